// Arrays as memory: what Python gives for one transfer, or for many.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace tensorferry {

// Where memory of a GPU is used: the device's number, and the stream whose work so far comes before.
using Location = std::pair<int, uintptr_t>;
using Locations = std::vector<std::optional<Location>>;

// The memory of one transfer: arrays and gaps, one after the other, and what keeps it valid.
struct PySegments {
  struct Piece {
    uintptr_t address;  // 0: a gap, or without bytes
    uint64_t nbytes;
    std::optional<Location> location;
  };
  std::vector<Piece> pieces;
  nanobind::list owners;  // one for each piece
  uint64_t nbytes = 0;

  void add(const Piece& piece, const nanobind::object& owner) {
    pieces.push_back(piece);
    owners.append(owner);
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
