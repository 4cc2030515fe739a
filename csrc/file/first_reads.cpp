#include "file/first_reads.h"

#include <map>

#include "base/after_fork.h"

namespace tensorferry {
namespace {

constexpr uint32_t compared_count = 8;  // blocks of the trial for each of the two ways

// The page cache is chosen only if its reads take less than this share of the time that direct reads take, because it
// copies the data once more and uses memory that others may need. Also, the kernel's read-ahead sends two requests at a
// time for a block, where a direct read sends one. A single block is therefore faster through the page cache. A whole
// transfer gains nothing from that, because it has many blocks in flight in both ways.
constexpr double max_share_of_direct = 0.5;

struct FirstReadsOfAll {
  static constexpr size_t max_count = 64;

  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<FirstReads>> known;
};

}  // namespace

std::shared_ptr<FirstReads> FirstReads::of(uint64_t mount) {
  FirstReadsOfAll& all = of_this_process<FirstReadsOfAll>();
  std::lock_guard lock(all.mutex);
  if (auto found = all.known.find(mount); found != all.known.end()) return found->second;
  if (all.known.size() == FirstReadsOfAll::max_count) all.known.clear();
  return all.known.emplace(mount, std::make_shared<FirstReads>()).first->second;
}

bool FirstReads::through_cache(uint64_t nbytes) {
  const Way way = way_.load(std::memory_order_relaxed);
  if (way != Way::undecided) return way == Way::cached;
  if (nbytes < min_compared_nbytes) return false;
  std::lock_guard lock(mutex_);
  const uint32_t turn = begun_++;
  return turn % 2 == 1 && turn / 2 < compared_count;
}

void FirstReads::took(bool direct, uint64_t nbytes, std::chrono::nanoseconds elapsed) {
  if (direct) {
    int64_t before = latency_ns_.load(std::memory_order_relaxed);
    while ((before == 0 || elapsed.count() < before) &&
           !latency_ns_.compare_exchange_weak(before, elapsed.count(), std::memory_order_relaxed)) {
    }
  }
  if (nbytes < min_compared_nbytes || way_.load(std::memory_order_relaxed) != Way::undecided) return;
  std::lock_guard lock(mutex_);
  Compared& compared = direct ? direct_ : cached_;
  ++compared.count;
  compared.nbytes += static_cast<double>(nbytes);
  compared.seconds += std::chrono::duration<double>(elapsed).count();
  if (direct_.count < compared_count || cached_.count < compared_count) return;
  const double share = cached_.seconds / cached_.nbytes / (direct_.seconds / direct_.nbytes);
  way_.store(share < max_share_of_direct ? Way::cached : Way::direct, std::memory_order_relaxed);
}

}  // namespace tensorferry
