// CRC-32s of the data of one transfer: of its chunks and of its segments. A chunk is a part of the file's data, and all
// chunks but the last have the same length. A segment is one piece of the caller's memory (segments.h). The CRC-32s are
// computed while the bytes are in the processor's cache, from blocks in any order.
//
// A read may have an expected CRC-32 for each chunk. A chunk is then verified, which means that its computed CRC-32 is
// compared with the expected one, before its bytes are copied to the caller's memory. For reads straight into memory
// that is not yet in use (`in_place`), the chunk is verified as soon as it is complete.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/after_fork.h"
#include "checksum/checksum.h"
#include "transfer/segments.h"

namespace tensorferry {

class Checksums {
 public:
  // chunk_nbytes is 0 if no CRC-32s of chunks are wanted. With `of_segments`, those of the segments are computed.
  // `expected` has the CRC-32 of each chunk, or is empty. With `in_place`, the caller's memory may receive bytes before
  // they are verified.
  Checksums(uint64_t chunk_nbytes, bool of_segments, std::vector<uint32_t> expected, bool in_place = false)
      : chunk_nbytes_(chunk_nbytes), of_segments_(of_segments), in_place_(in_place), expected_(std::move(expected)) {}

  uint64_t chunk_nbytes() const { return chunk_nbytes_; }
  bool verify() const { return !expected_.empty(); }
  // Whether chunks are verified before the caller's memory receives their bytes.
  bool verify_first() const { return verify() && !in_place_; }
  const std::vector<uint32_t>& expected() const { return expected_; }
  uint64_t chunk_count(uint64_t nbytes) const {
    return chunk_nbytes_ == 0 ? 0 : nbytes / chunk_nbytes_ + (nbytes % chunk_nbytes_ != 0);
  }

  // Attach to a transfer with these segments, before any of its data is added.
  void attach(const Segments& segments);

  // Record that the transfer is submitted. These Checksums cannot be used for another transfer from then on.
  void hand_over() { handed_over_ = true; }
  bool handed_over() const { return handed_over_; }

  // Computes the CRC-32s of one block of the transfer, whose bytes are added in order. keep() merges them into the
  // Checksums.
  class Block {
   public:
    Block(Checksums& all, uint64_t begin) : all_(&all), begin_(begin), position_(begin) {}

    // Add bytes of the segment with the index `segment`. They may end anywhere: the ends of segments and chunks are
    // found by their positions.
    void add(const char* bytes, uint64_t nbytes, size_t segment);

    // Merge the block's CRC-32s into the Checksums, once all its bytes have been added. Returns the index of the first
    // chunk that this block completes and whose CRC-32 differs from the expected one. The block then does not count as
    // kept, so of_chunks() and of_segments() stay empty.
    [[nodiscard]] std::optional<uint64_t> keep();

   private:
    // The CRC-32 of the block's bytes that belong to one chunk or segment.
    struct Part : RunningCrc32 {
      size_t index;    // of the chunk or segment
      uint64_t begin;  // of these bytes, relative to the transfer
    };
    friend class Checksums;

    Checksums* all_;
    uint64_t begin_;
    uint64_t position_;
    std::optional<Part> chunk_, segment_;
    std::vector<Part> chunks_, segments_;
  };

  // The CRC-32s of all chunks and of all segments, in order. Empty until keep() was called for every block.
  std::optional<std::vector<uint32_t>> of_chunks() { return complete(chunks_); }
  std::optional<std::vector<uint32_t>> of_segments() { return complete(segments_); }

 private:
  // The CRC-32s of all chunks, or of all segments. These ranges may be completed in any order.
  struct Table {
    // A chunk or segment of which some parts are still missing.
    struct Open {
      std::map<uint64_t, Block::Part> parts;  // by their beginnings
      uint64_t nbytes = 0;                    // of these parts together
    };
    std::vector<uint32_t> crcs;
    std::map<size_t, Open> open;  // by the index of the chunk or segment

    // Returns whether the part completes its chunk or segment, which has `nbytes` in total.
    bool add(const Block::Part& part, uint64_t nbytes);
  };

  std::optional<std::vector<uint32_t>> complete(const Table& table) {
    const auto lock = locked_unless_forked(mutex_, fork_generation_);
    return of_ && kept_nbytes_ == nbytes_ ? std::optional(table.crcs) : std::nullopt;
  }

  uint64_t chunk_end(uint64_t position) const {
    return std::min(position - position % chunk_nbytes_ + chunk_nbytes_, nbytes_);
  }
  uint64_t nbytes_of_chunk(size_t index) const { return chunk_end(index * chunk_nbytes_) - index * chunk_nbytes_; }

  const uint64_t chunk_nbytes_;
  const bool of_segments_;
  const bool in_place_;
  const std::vector<uint32_t> expected_;
  std::atomic<bool> handed_over_{false};
  const Segments* of_ = nullptr;
  uint64_t nbytes_ = 0;
  const uint64_t fork_generation_ = fork_generation();
  std::mutex mutex_;
  uint64_t kept_nbytes_ = 0;
  Table chunks_, segments_;
};

}  // namespace tensorferry
