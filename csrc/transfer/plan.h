// How one request is cut into blocks: pure arithmetic, no I/O, tested on its own and exhaustively.
//
// A request covers [offset, offset + nbytes) of the file and as many bytes of memory. Through the page cache
// anything goes, so it is cut every block_nbytes. Direct I/O wants file offsets, lengths and memory addresses at
// multiples; what does not meet them is handled so:
//
//   write:  | ragged head | body, aligned ................................ | ragged tail |
//             buffered      direct from the tensor, or through a bounce      buffered
//             descriptor    buffer where its address does not fit            descriptor
//
//   read:   | head        | body, aligned ................................ | tail        |
//             padded        direct into the tensor, or through a bounce      padded
//             bounce        buffer where its address does not fit            bounce
//
// The ragged edges of a write go through the page cache because only the kernel can change part of a sector
// without losing a neighbour's concurrent change. They cover whole pages, so that no page is ever written both
// ways. A padded read takes the whole sectors and copies out what was asked for.
//
// Memory of a GPU cannot be given to the kernel: every block of it is staged, that is, has a bounce buffer and a copy
// whichever way it goes. With cuFile the body goes directly, wherever it begins in memory, and only edges are staged.
#pragma once

#include <cstdint>

namespace tensorferry {

enum class Way : uint8_t {
  direct,    // O_DIRECT between the file and the caller's memory
  bounced,   // O_DIRECT between the file and a bounce buffer, and a copy
  buffered,  // through the page cache, to or from the caller's memory
};

struct PlannedBlock {
  Way way;
  uint64_t begin;      // first byte of the request that this block carries
  uint64_t nbytes;     // bytes of the request that it carries
  uint64_t io_offset;  // what the kernel is asked to move: for a padded read more than nbytes
  uint64_t io_nbytes;
};

enum class Staging : uint8_t { none, edges, all };

struct PlanInput {
  bool write = false;
  Staging staging = Staging::none;
  bool direct = false;  // false: everything through the page cache
  uint64_t memory = 0;  // address of the first byte
  uint64_t offset = 0;  // in the file
  uint64_t nbytes = 0;
  uint32_t memory_alignment = 1;
  uint32_t offset_alignment = 1;
  uint32_t page_nbytes = 4096;
  uint64_t block_nbytes = 1;
  uint64_t bounce_nbytes = 1;  // the longest bounced block; at least two alignments
};

class Plan {
 public:
  Plan() = default;
  explicit Plan(const PlanInput& input);

  // The block that begins at `position`, which is 0 or the end of the block before.
  PlannedBlock block_at(uint64_t position) const;

  uint64_t nbytes() const { return input_.nbytes; }

  // Whether some block goes through the page cache.
  bool uses_buffered() const;

 private:
  PlanInput input_;
  uint64_t body_begin_ = 0;  // relative to the request
  uint64_t body_end_ = 0;
  uint64_t step_ = 1;  // bytes of a body block
  Way body_way_ = Way::buffered;
};

}  // namespace tensorferry
