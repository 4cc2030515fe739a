// How one transfer is cut into blocks: pure arithmetic, no I/O, tested on its own and exhaustively.
//
// A transfer covers [offset, offset + nbytes) of the file and the segments of as many bytes. Direct I/O wants file
// offsets, lengths and memory addresses at multiples; what does not meet them is handled so:
//
//   write:  | ragged head | body, aligned ................................ | ragged tail |
//             page cache    past it, straight from a segment where that      page cache
//                           fits, else gathered in a bounce buffer
//
//   read:   | head        | body, aligned ................................ | tail        |
//             padded        past the page cache, straight into a segment     padded
//             bounce        where that fits, else scattered from a buffer    bounce
//
// The ragged edges of a write go through the page cache because only the kernel can change part of a sector
// without losing a neighbour's concurrent change. They cover whole pages, so that no page is ever written both
// ways. A padded read takes the whole sectors and copies out what was asked for.
//
// A segment is used as it is where it has enough bytes to be worth a block; shorter neighbours share a bounce buffer.
// A read passes over gaps that are worth it. Rows of a table are far apart: of them it reads those pages that hold
// something wanted, each once, and a row that is alone in its pages goes straight to its place where it may.
//
// Memory of a GPU cannot be given to the kernel: every block of it has a bounce buffer and a copy whichever way it
// goes. With cuFile the body goes directly, wherever it begins in memory.
//
// What is to be verified before anybody gets it is read in whole chunks, and into bounce buffers.
#pragma once

#include <cstdint>

#include "transfer/segments.h"

namespace tensorferry {

struct PlannedBlock {
  bool direct = false;     // past the page cache
  bool bounced = false;    // through a bounce buffer; else straight from or to the caller's memory
  bool rows = false;       // several of a table, which the page cache holds: each straight to its place
  uint64_t begin = 0;      // first byte of the transfer that this block carries
  uint64_t nbytes = 0;     // bytes of the transfer that it carries
  uint64_t io_offset = 0;  // what the kernel is asked to move: for a padded read more than nbytes
  uint64_t io_nbytes = 0;
};

struct PlanInput {
  bool write = false;
  bool direct = false;  // false: everything through the page cache
  bool cufile = false;  // which moves the body of a GPU's memory
  uint64_t offset = 0;  // in the file
  uint32_t memory_alignment = 1;
  uint32_t offset_alignment = 1;
  uint32_t page_nbytes = 4096;
  uint64_t block_nbytes = 1;
  uint64_t bounce_nbytes = 1;  // the longest bounced block; at least two alignments
  uint64_t verified_nbytes =
      0;                    // of the chunks that a read verifies; bounce_nbytes has room for one and two alignments
  bool all_wanted = false;  // gaps as well, for their checksums
  bool rows = false;        // of a table: no page is read that holds nothing wanted
  bool cached = false;      // the page cache holds all of it
};

class Plan {
 public:
  // Shorter ones are copied together with their neighbours, and gaps are read with them.
  static constexpr uint64_t min_straight_nbytes = uint64_t{128} << 10;
  static constexpr uint64_t min_gap_nbytes = uint64_t{64} << 10;

  Plan() = default;
  // The segments must outlive the plan.
  Plan(const PlanInput& input, const Segments& segments);

  // The block that begins at `position`, which is skip(0) or what skip() makes of the end of the block before.
  PlannedBlock block_at(uint64_t position) const;

  // Where the next block begins: behind a gap that is not to be read.
  uint64_t skip(uint64_t position) const;

  // The same block if it goes through the page cache after all.
  PlannedBlock buffered(const PlannedBlock& block) const;

  // Whether some block goes through the page cache.
  bool uses_buffered() const;

 private:
  uint64_t straight_nbytes(uint64_t position) const;
  uint64_t cached_nbytes(uint64_t position, uint64_t limit) const;
  uint64_t end_of_bounced(uint64_t position, uint64_t limit, bool direct) const;
  uint64_t verified_end(uint64_t position, uint64_t end, uint64_t limit) const;
  bool is_passed_over(const Segments::Piece& rest) const;
  bool is_alone(const Segments::Piece& rest) const;

  PlanInput input_;
  const Segments* segments_ = nullptr;
  uint64_t nbytes_ = 0;
  uint64_t alignment_ = 1;   // of direct blocks in the file
  uint64_t body_begin_ = 0;  // relative to the transfer
  uint64_t body_end_ = 0;
  uint64_t step_ = 1;  // bytes of a block straight from or to memory
  uint64_t bounce_step_ = 1;
};

}  // namespace tensorferry
