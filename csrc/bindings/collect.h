// Arrays as memory: what Python gives for one transfer, or for many.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "transfer/items.h"

namespace tensorferry {

// The memory of one transfer: arrays and gaps, one after the other, and what keeps it valid. Or rows of a table, all of
// which are in one array.
struct PySegments {
  using Piece = Memory;
  std::vector<Piece> pieces;
  nanobind::list owners;  // one for each piece, or that of the array
  uint64_t nbytes = 0;
  std::optional<Memory> array = {};  // of rows
  std::vector<Segments::Copy> copies = {};

  bool of_rows() const { return array.has_value(); }

  void add(const Piece& piece, const nanobind::object& owner) {
    pieces.push_back(piece);
    if (!of_rows()) owners.append(owner);
    nbytes += piece.nbytes;
  }

  // Neighbours are one.
  void add_gap(uint64_t gap_nbytes) {
    if (pieces.empty() || pieces.back().address != 0) {
      add({0, gap_nbytes, std::nullopt}, nanobind::none());
    } else {
      pieces.back().nbytes += gap_nbytes;
      nbytes += gap_nbytes;
    }
  }
};

// An exact torch.Tensor or numpy.ndarray that is plainly usable: contiguous, in host memory, with nothing lazy.
struct PlainArray {
  uintptr_t address = 0;
  uint64_t nbytes = 0;
  nanobind::object owner;  // of the memory: a torch storage, or the ndarray
};

std::optional<PlainArray> plain_array(nanobind::handle array, bool writable);

// An int that is a file's offset with so many bytes behind it.
std::optional<uint64_t> plain_offset(nanobind::handle offset, uint64_t nbytes);

// Whether its owner no longer has that memory.
bool is_moved(const PlainArray& array);

void bind_collect(nanobind::module_& module);

}  // namespace tensorferry
