// The results of the first reads of a mount. They are used for network file systems and FUSE, because the type of such
// a file system does not determine how to read it best. A block is one read that is passed to the kernel.
//
// The fastest read past the page cache shows the latency of the server, and so how many bytes must be in flight to keep
// the server busy. Whether reads through the page cache or past it are faster is found by trial: of the first large
// blocks every other one goes through the page cache, and if these are much faster, all later ones go through it, too.
// The results are kept for each mount until the process ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

namespace tensorferry {

class FirstReads {
 public:
  // Shorter blocks do not count in the trial. Through the page cache the kernel reads ahead more than their length, so
  // the time that such a block takes is not that of its own bytes.
  static constexpr uint64_t min_compared_nbytes = uint64_t{512} << 10;

  // The object that all files of a mount share. `mount` is the mount's unique number, or st_dev where there is none.
  static std::shared_ptr<FirstReads> of(uint64_t mount);

  // Whether a block that was planned past the page cache should go through the page cache instead.
  bool through_cache(uint64_t nbytes);

  // Record how long it took to read a block, past the page cache (`direct`) or through it.
  void took(bool direct, uint64_t nbytes, std::chrono::nanoseconds elapsed);

  // The latency of the fastest read past the page cache; zero before the first one.
  std::chrono::nanoseconds latency() const {
    return std::chrono::nanoseconds(latency_ns_.load(std::memory_order_relaxed));
  }

 private:
  enum class Way { undecided, direct, cached };
  // The sums over the blocks of the trial that were read in one of the two ways.
  struct Compared {
    uint32_t count = 0;
    double nbytes = 0, seconds = 0;
  };

  std::atomic<int64_t> latency_ns_{0};
  std::atomic<Way> way_{Way::undecided};
  std::mutex mutex_;    // guards the members below
  uint32_t begun_ = 0;  // large blocks for which through_cache() was called during the trial
  Compared direct_, cached_;
};

}  // namespace tensorferry
