// The counters of a scheduler. Any thread may read a counter while others change it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace tensorferry {

// A log-linear histogram of microseconds with 8 buckets for each power of two, so a percentile is at most an eighth too
// high. fio and HdrHistogram use the same scheme.
class LatencyHistogram {
 public:
  void add(uint64_t microseconds) { buckets_[bucket_of(microseconds)].fetch_add(1, std::memory_order_relaxed); }

  // The upper end of the bucket that contains the given fraction of all samples; 0 without samples.
  uint64_t percentile(double fraction) const {
    uint64_t total = 0;
    for (const auto& bucket : buckets_) total += bucket.load(std::memory_order_relaxed);
    if (total == 0) return 0;
    const double wanted = fraction * static_cast<double>(total);
    uint64_t seen = 0;
    size_t index = 0;
    for (; index < buckets_.size() - 1; ++index) {
      seen += buckets_[index].load(std::memory_order_relaxed);
      if (static_cast<double>(seen) >= wanted && seen > 0) break;
    }
    return upper_end(index);
  }

 private:
  static constexpr unsigned sub_bits = 3;
  static constexpr size_t sub_count = size_t{1} << sub_bits;

  static size_t bucket_of(uint64_t value) {
    if (value < sub_count) return value;
    const unsigned shift = static_cast<unsigned>(std::bit_width(value)) - sub_bits - 1;
    const size_t index = (size_t{shift} + 1) * sub_count + ((value >> shift) & (sub_count - 1));
    return index < bucket_count ? index : bucket_count - 1;
  }

  static uint64_t upper_end(size_t index) {
    if (index < sub_count) return index;
    const size_t shift = index / sub_count - 1;
    return ((sub_count + index % sub_count + 1) << shift) - 1;
  }

  static constexpr size_t bucket_count = 40 * sub_count;  // beyond 10^11 microseconds, more than a day
  std::array<std::atomic<uint64_t>, bucket_count> buckets_{};
};

struct Statistics {
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> failed_requests{0};
  std::atomic<uint64_t> read_nbytes{0};
  std::atomic<uint64_t> written_nbytes{0};
  std::atomic<uint64_t> blocks{0};           // moved by the engine
  std::atomic<uint64_t> inline_blocks{0};    // moved by the calling thread, or from the page cache by the worker
  std::atomic<uint64_t> direct_nbytes{0};    // past the page cache, straight from or to the caller's memory
  std::atomic<uint64_t> bounced_nbytes{0};   // past the page cache, through bounce buffers
  std::atomic<uint64_t> buffered_nbytes{0};  // through the page cache
  std::atomic<uint64_t> touched_nbytes{0};   // memory that had no pages and got them from Transfer::touch()
  std::atomic<uint64_t> gpu_nbytes{0};       // from or to GPU memory
  std::atomic<uint64_t> gds_nbytes{0};       // the part of gpu_nbytes that cuFile moved
  std::atomic<uint64_t> resumed_blocks{0};   // continued after a short read or write
  std::atomic<uint64_t> retried_blocks{0};   // tried again after EINTR, EAGAIN or ECANCELED
  LatencyHistogram block_latency;
};

}  // namespace tensorferry
