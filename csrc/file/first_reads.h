// What the first reads of a mount show, where its kind does not tell how it is read best: network file systems and
// FUSE.
//
// The fastest read past the page cache tells how far away the server is, and so how many bytes must be on their way to
// keep it busy. Which way is faster is tried: of the first large blocks every other one goes through the page cache; if
// those are much faster, all go there from then on. Known once for each mount, as long as the process lives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tensorferry {

class FirstReads {
 public:
  // Shorter blocks are not compared: the kernel reads ahead more than they are.
  static constexpr uint64_t min_compared_nbytes = uint64_t{512} << 10;

  // Those of a mount, for all of its files. The number is the mount's, or the device's where it has none of its own.
  static std::shared_ptr<FirstReads> of(uint64_t mount);

  // Whether the next block, planned past the page cache, is to go through it.
  bool through_cache(uint64_t nbytes);

  // A block has been read, by the way it was meant to go.
  void took(bool direct, uint64_t nbytes, std::chrono::nanoseconds elapsed);

  // That of the fastest read past the page cache; zero before the first one.
  std::chrono::nanoseconds latency() const {
    return std::chrono::nanoseconds(latency_ns_.load(std::memory_order_relaxed));
  }

 private:
  enum class Way { undecided, direct, cached };
  struct Compared {
    uint32_t count = 0;
    double nbytes = 0, seconds = 0;
  };

  std::atomic<int64_t> latency_ns_{0};
  std::atomic<Way> way_{Way::undecided};
  std::mutex mutex_;  // guards what follows
  uint32_t begun_ = 0;
  Compared direct_, cached_;
};

}  // namespace tensorferry
