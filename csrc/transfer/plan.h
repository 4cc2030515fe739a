// Divides one transfer into blocks. This is pure arithmetic without I/O and is tested exhaustively.
//
// A transfer moves [offset, offset + nbytes) of a file from or to segments: pieces of memory that have the same number
// of bytes in total (segments.h). A block is a part of the transfer that is passed to the kernel at once. It is moved
// straight from or to a segment, or it is bounced: moved from or to a bounce buffer, which is aligned memory of our
// own, with a copy between the buffer and the segments.
//
// Direct I/O, past the page cache, requires that file offsets, lengths and memory addresses are multiples of certain
// numbers. The part of a transfer between its first and its last aligned file offset is the body, and the rest of it
// are the edges, head and tail:
//
//   write:  | ragged head | body, aligned ................................ | ragged tail |
//             page cache    direct, straight from a segment where the       page cache
//                           address is aligned, else by a bounce buffer
//
//   read:   | head        | body, aligned ................................ | tail        |
//             padded        direct, straight into a segment where the       padded
//             bounce        address is aligned, else by a bounce buffer     bounce
//
// The edges of a write go through the page cache because only the kernel can change a part of a sector without losing a
// concurrent change of another part. The body of a write begins and ends at page boundaries, so no page is written both
// through the page cache and past it. An edge of a read is padded: the whole sectors are read into a bounce buffer, and
// the requested bytes are copied from it.
//
// A segment is used in place if it has enough bytes to be worth a block; shorter neighbours share a bounce buffer. A
// segment may be a gap, which is a range of the file that the caller does not want. A read passes over gaps that are
// long enough, and reads shorter ones together with the segments around them. The rows of a table are far apart: a
// gather reads only pages that hold wanted bytes, each page once, and a row that is alone in its pages is read straight
// into its memory if its alignment permits.
//
// GPU memory cannot be passed to the kernel, so each block of GPU memory is bounced, with a copy between the buffer and
// the GPU. With cuFile the body is moved directly, at any GPU address.
//
// Chunks are parts of the file with one CRC-32 each (checksums.h). Data that must be verified before the caller's
// memory receives it is read in whole chunks, into bounce buffers.
#pragma once

#include <cstdint>

#include "transfer/segments.h"

namespace tensorferry {

struct PlannedBlock {
  bool direct = false;  // past the page cache
  // Through a bounce buffer; false: straight from or to the caller's memory.
  bool bounced = false;
  // Several rows of a table that the page cache holds. Each row is read straight into its memory.
  bool rows = false;
  uint64_t begin = 0;   // first byte of the block, relative to the transfer
  uint64_t nbytes = 0;  // bytes of the transfer in the block
  // The range of the file that is passed to the kernel. It is longer than nbytes for a padded read. For a block of
  // rows, io_nbytes counts only the rows, without the gaps.
  uint64_t io_offset = 0;
  uint64_t io_nbytes = 0;
};

struct PlanInput {
  bool write = false;
  bool direct = false;            // false: everything goes through the page cache
  bool cufile = false;            // cuFile moves the body of GPU memory
  uint64_t offset = 0;            // in the file
  uint32_t memory_alignment = 1;  // direct I/O requires multiples of this as memory addresses,
  uint32_t offset_alignment = 1;  // and of this as file offsets and lengths
  uint32_t page_nbytes = 4096;    // the body of a write begins and ends at multiples of this
  uint64_t block_nbytes = 1;      // the longest block straight from or to memory
  uint64_t bounce_nbytes = 1;     // the longest bounced block; at least 2 * offset_alignment
  // The length of the chunks that a read verifies before the caller's memory receives them; 0: none. bounce_nbytes must
  // then be at least verified_nbytes + 2 * offset_alignment.
  uint64_t verified_nbytes = 0;
  bool all_wanted = false;  // read gaps as well, for their checksums
  bool rows = false;        // rows of a table: read no page without wanted bytes
  bool cached = false;      // the page cache holds the whole range
};

class Plan {
 public:
  // Shorter segments are bounced together with their neighbours.
  static constexpr uint64_t min_straight_nbytes = uint64_t{128} << 10;
  // Shorter gaps are read together with the segments around them.
  static constexpr uint64_t min_gap_nbytes = uint64_t{64} << 10;

  Plan() = default;
  // The segments must outlive the plan.
  Plan(const PlanInput& input, const Segments& segments);

  // The block that begins at `position`, which must be skip(0), or skip(end of the previous block).
  PlannedBlock block_at(uint64_t position) const;

  // The position at which the next block begins: `position`, or the end of the gap there if that gap is not read.
  uint64_t skip(uint64_t position) const;

  // A block with the bytes of `block` that goes through the page cache.
  PlannedBlock buffered(const PlannedBlock& block) const;

  // Whether any block of the plan goes through the page cache.
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
  uint64_t alignment_ = 1;   // file offsets and lengths of direct blocks are multiples of this
  uint64_t body_begin_ = 0;  // these two are relative to the transfer
  uint64_t body_end_ = 0;
  uint64_t step_ = 1;         // the longest block straight from or to memory
  uint64_t bounce_step_ = 1;  // the longest bounced block
};

}  // namespace tensorferry
