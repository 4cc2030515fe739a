// The memory of one transfer: segments, one after the other as their bytes are in the file.
//
// Each is a piece of host memory or of a GPU's, of any address and length, or a gap: bytes of the file that a read
// passes over. Of rows of a table a segment may have further places, to which its bytes are copied when they are there.
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

  // Bytes of one segment.
  struct Piece {
    char* memory;    // null: of a gap
    uint64_t begin;  // in the transfer
    uint64_t nbytes;
    uint32_t gate;  // whose memory it is, by its place among gates(); or host
    size_t segment;

    bool is_gap() const { return memory == nullptr; }
    bool in_host() const { return gate == host && memory != nullptr; }
  };

  // A further place of all of a segment's bytes, in host memory.
  struct Copy {
    size_t segment;
    char* memory;
  };

  Segments() = default;
  Segments(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr) {
    add(memory, nbytes, std::move(gate));
  }

  void reserve(size_t count) { pieces_.reserve(count); }

  // At the end. Without bytes it counts all the same.
  void add(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr);
  void add_gap(uint64_t nbytes) { add(nullptr, nbytes); }

  // They are rows of a table, far apart; copies are in the order of segments.
  void are_rows(std::vector<Copy> copies) {
    rows_ = true;
    copies_ = std::move(copies);
  }
  bool of_rows() const { return rows_; }
  bool has_copies() const { return !copies_.empty(); }

  uint64_t nbytes() const { return nbytes_; }
  size_t count() const { return pieces_.size(); }
  const Piece& operator[](size_t index) const { return pieces_[index]; }

  // Of the GPUs whose memory is among them: each to be passed before a byte is moved.
  const std::vector<std::shared_ptr<cuda::Gate>>& gates() const { return gates_; }

  // From this byte on to the end of its segment.
  Piece at(uint64_t position) const {
    const Piece& found = pieces_[index_at(position)];
    const uint64_t within = position - found.begin;
    return {found.is_gap() ? nullptr : found.memory + within, position, found.nbytes - within, found.gate,
            found.segment};
  }

  // Calls `action` with each piece of a range, in order.
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

  // Calls `action` with each further place of a piece.
  template <typename Action>
  void each_copy(const Piece& piece, Action action) const {
    const uint64_t within = piece.begin - pieces_[piece.segment].begin;
    auto copy = std::lower_bound(copies_.begin(), copies_.end(), piece.segment,
                                 [](const Copy& one, size_t segment) { return one.segment < segment; });
    for (; copy != copies_.end() && copy->segment == piece.segment; ++copy) action(copy->memory + within);
  }

  // The segment of a byte: of those that begin there the last one, since the others have no bytes.
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
