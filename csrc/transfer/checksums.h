// CRC-32s of what one transfer moves: of its chunks, each so many bytes of the range but for the last, and of its
// segments. Taken while the bytes are in the processor's cache, in any order of blocks.
//
// Chunks of a read may be compared with what they should be; that is then done before their bytes are given to anybody,
// or, where they go straight to memory that is nobody's yet, when all of them are there.
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
  // No chunks: chunk_nbytes is 0. `expected` has the CRC of each chunk, or is empty. `straight`: memory may have bytes
  // before they are compared.
  Checksums(uint64_t chunk_nbytes, bool of_segments, std::vector<uint32_t> expected, bool straight = false)
      : chunk_nbytes_(chunk_nbytes), of_segments_(of_segments), straight_(straight), expected_(std::move(expected)) {}

  uint64_t chunk_nbytes() const { return chunk_nbytes_; }
  bool verify() const { return !expected_.empty(); }
  bool verify_first() const { return verify() && !straight_; }
  const std::vector<uint32_t>& expected() const { return expected_; }
  uint64_t chunk_count(uint64_t nbytes) const {
    return chunk_nbytes_ == 0 ? 0 : nbytes / chunk_nbytes_ + (nbytes % chunk_nbytes_ != 0);
  }

  // For a transfer of these segments, before anything of it is added.
  void attach(const Segments& segments);

  // Once there is such a transfer that will be moved.
  void hand_over() { handed_over_ = true; }
  bool handed_over() const { return handed_over_; }

  // The CRCs of one block, in the order of its bytes; kept when the block has been added.
  class Block {
   public:
    Block(Checksums& all, uint64_t begin) : all_(&all), begin_(begin), position_(begin) {}

    // Of a piece of `segment` that ends where it or a chunk does, or anywhere.
    void add(const char* bytes, uint64_t nbytes, size_t segment);

    // When all of the block has been added. Returns the first chunk that ended with it and is not as expected; then
    // the block does not count.
    [[nodiscard]] std::optional<uint64_t> keep();

   private:
    struct Part : RunningCrc32 {
      size_t index;
      uint64_t begin;
    };
    friend class Checksums;

    Checksums* all_;
    uint64_t begin_;
    uint64_t position_;
    std::optional<Part> chunk_, segment_;
    std::vector<Part> chunks_, segments_;
  };

  // Nothing until all blocks have been kept.
  std::optional<std::vector<uint32_t>> of_chunks() { return complete(chunks_); }
  std::optional<std::vector<uint32_t>> of_segments() { return complete(segments_); }

 private:
  // What is known of each of many ranges that follow each other.
  struct Table {
    struct Open {
      std::map<uint64_t, Block::Part> parts;  // by their beginnings
      uint64_t nbytes = 0;
    };
    std::vector<uint32_t> crcs;
    std::map<size_t, Open> open;  // not yet all of them

    // Whether that was all of its range.
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
  const bool straight_;
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
