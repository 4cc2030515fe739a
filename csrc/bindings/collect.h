// Converts the arrays that Python passes for one transfer, or for many, to addresses and sizes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "transfer/items.h"

namespace tensorferry {

// The memory of one transfer, with the objects that keep the memory valid. It consists of arrays and gaps (bytes of the
// file that the caller does not want) in file order, or of rows of a table, which are all in one array.
struct PySegments {
  using Piece = Memory;
  std::vector<Piece> pieces;
  nanobind::list owners;  // one for each piece; for rows only the owner of the array
  uint64_t nbytes = 0;
  std::optional<Memory> array = {};  // the array of the rows, if these are rows
  std::vector<Segments::Copy> copies = {};

  bool of_rows() const { return array.has_value(); }

  void add(const Piece& piece, const nanobind::object& owner) {
    pieces.push_back(piece);
    if (!of_rows()) owners.append(owner);
    nbytes += piece.nbytes;
  }
};

// An exact torch.Tensor or numpy.ndarray (no subclass) whose memory can be used as it is: contiguous, in host memory,
// and without a pending lazy operation (conjugation, negation).
struct PlainArray {
  uintptr_t address = 0;
  uint64_t nbytes = 0;
  nanobind::object owner;  // of the memory: the torch storage, or the ndarray
};

// Return the array's memory; empty if the array is not plain in this sense, or not writable although it must be.
std::optional<PlainArray> plain_array(nanobind::handle array, bool writable);

// Return `offset` as a file offset; empty unless it is an int, not negative, and no byte of the `nbytes` bytes from it
// on is beyond the largest file offset.
std::optional<uint64_t> plain_offset(nanobind::handle offset, uint64_t nbytes);

// Whether the owner no longer has the memory at the array's address, for example because it was resized.
bool is_moved(const PlainArray& array);

void bind_collect(nanobind::module_& module);

}  // namespace tensorferry
