// The memory of one transfer: segments in the order of their bytes in the file.
//
// A segment is host memory or GPU memory of any address and length, or a gap, which is a range of the file that a read
// passes over. A segment that is a row of a table may have copies: further places in memory to which its bytes are
// copied after they are read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device/gpu.h"

namespace tensorferry {

class Segments {
 public:
  static constexpr uint32_t host = UINT32_MAX;

  // A segment, or a part of one.
  struct Piece {
    char* memory;    // null for a gap
    uint64_t begin;  // relative to the transfer
    uint64_t nbytes;
    uint32_t gate;   // index in gates() for GPU memory; `host` for host memory and gaps
    size_t segment;  // index of the segment

    bool is_gap() const { return memory == nullptr; }
    bool in_host() const { return gate == host && memory != nullptr; }
  };

  // A further place in host memory for all bytes of a segment.
  struct Copy {
    size_t segment;
    char* memory;
  };

  Segments() = default;
  Segments(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr) {
    add(memory, nbytes, std::move(gate));
  }

  void reserve(size_t count) { pieces_.reserve(count); }

  // Append a segment, which may be empty.
  void add(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr);
  void add_gap(uint64_t nbytes) { add(nullptr, nbytes); }

  // Mark the segments as rows of a table, far apart in the file. `copies` are sorted by segment.
  void are_rows(std::vector<Copy> copies) {
    rows_ = true;
    copies_ = std::move(copies);
  }
  bool of_rows() const { return rows_; }
  bool has_copies() const { return !copies_.empty(); }

  uint64_t nbytes() const { return nbytes_; }
  size_t count() const { return pieces_.size(); }
  const Piece& operator[](size_t index) const { return pieces_[index]; }

  // The gates of the GPU memory among the segments: points in the GPUs' work (cuda::Gate). All of them must have passed
  // before a byte is moved, because until then the GPUs may still be writing or reading this memory.
  const std::vector<std::shared_ptr<cuda::Gate>>& gates() const { return gates_; }

  // The part of a segment from the byte at `position` to the segment's end.
  Piece at(uint64_t position) const {
    const Piece& found = pieces_[index_at(position)];
    const uint64_t within = position - found.begin;
    return {found.is_gap() ? nullptr : found.memory + within, position, found.nbytes - within, found.gate,
            found.segment};
  }

  // Call `action` with each piece of a range, in order.
  template <typename Action>
  void each(uint64_t begin, uint64_t nbytes, Action action) const {
    const uint64_t end = begin + nbytes;
    for (size_t index = nbytes > 0 ? index_at(begin) : count(); index < count() && pieces_[index].begin < end;
         ++index) {
      Piece piece = pieces_[index];
      const uint64_t skipped = begin - std::min(begin, piece.begin);
      piece.nbytes = std::min(end, piece.begin + piece.nbytes) - (piece.begin + skipped);
      piece.begin += skipped;
      if (!piece.is_gap()) piece.memory += skipped;
      if (piece.nbytes > 0) action(piece);
    }
  }

  // Call `action` with the address of each copy of a piece.
  template <typename Action>
  void each_copy(const Piece& piece, Action action) const {
    const uint64_t within = piece.begin - pieces_[piece.segment].begin;
    auto copy = std::lower_bound(copies_.begin(), copies_.end(), piece.segment,
                                 [](const Copy& one, size_t segment) { return one.segment < segment; });
    for (; copy != copies_.end() && copy->segment == piece.segment; ++copy) action(copy->memory + within);
  }

  // The index of the segment that contains the byte at `position`. If several segments begin there, this is the last of
  // them, since the others are empty.
  size_t index_at(uint64_t position) const {
    if (pieces_.size() == 1) return 0;
    const auto above = std::upper_bound(pieces_.begin(), pieces_.end(), position,
                                        [](uint64_t value, const Piece& piece) { return value < piece.begin; });
    return static_cast<size_t>(above - pieces_.begin()) - 1;
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<Copy> copies_;
  bool rows_ = false;
  std::vector<std::shared_ptr<cuda::Gate>> gates_;
  uint64_t nbytes_ = 0;
};

}  // namespace tensorferry
