#include "memory/bounce_pool.h"

#include <errno.h>

#include <algorithm>
#include <utility>

namespace tensorferry {
namespace {

std::atomic<size_t> process_nbytes{BouncePool::default_nbytes};

}  // namespace

// The pools of the process, by kind (plain and page-locked) and device.
struct BouncePool::Registry {
  struct Kind {
    std::map<uint64_t, std::weak_ptr<BouncePool>> by_device;
    std::shared_ptr<BouncePool> last;  // the most recently created pool, which is kept without a user

    // Return the pool of a device, or null if it must be created. If the limit of pools is reached, return the pool
    // that is used least instead.
    std::shared_ptr<BouncePool> find(uint64_t device) {
      if (auto found = by_device.find(device); found != by_device.end()) {
        if (auto pool = found->second.lock()) return pool;
      }
      std::erase_if(by_device, [](const auto& one) { return one.second.expired(); });
      if (by_device.size() < max_pools) return nullptr;
      std::shared_ptr<BouncePool> least;
      for (const auto& [other, kept] : by_device) {
        auto pool = kept.lock();
        if (pool && (!least || pool->nbytes_in_use() < least->nbytes_in_use())) least = std::move(pool);
      }
      return least;
    }

    std::shared_ptr<BouncePool> add(uint64_t device, std::shared_ptr<BouncePool> pool) {
      by_device[device] = pool;
      last = pool;
      return pool;
    }

    void replace() {
      for (const auto& [device, kept] : by_device) {
        const auto pool = kept.lock();
        if (!pool) continue;
        pool->replaced_ = true;
        // The waiters must call of() or pinned() again, which return the new pool.
        pool->wake_all();
      }
      by_device.clear();
      last.reset();
    }
  };

  std::mutex mutex;
  Kind plain, pinned;
};

BouncePool::Registry& BouncePool::registry() { return of_this_process<Registry>(); }

BounceBuffer& BounceBuffer::operator=(BounceBuffer&& other) noexcept {
  if (this == &other) return *this;
  reset();
  pool_ = std::move(other.pool_);
  data_ = std::exchange(other.data_, nullptr);
  units_ = std::exchange(other.units_, 0);
  return *this;
}

void BounceBuffer::reset() {
  if (data_ == nullptr) return;
  pool_->release(data_, units_);
  data_ = nullptr;
  pool_.reset();
}

std::shared_ptr<BouncePool> BouncePool::of(uint64_t device) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (auto found = all.plain.find(device)) return found;
  auto pool = std::make_shared<BouncePool>(process_nbytes.load());
  return pool->arena_ ? all.plain.add(device, std::move(pool)) : nullptr;
}

Result<std::shared_ptr<BouncePool>> BouncePool::pinned(uint64_t device, cuda::Gpu& gpu) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (auto found = all.pinned.find(device)) return found;
  auto pool = std::make_shared<BouncePool>(pinned_pool_nbytes());
  if (!pool->arena_) return Fault{.error_number = ENOMEM, .operation = "mmap", .hint = "buffers for GPU memory"};
  if (auto fault = pool->arena_->register_with(gpu)) return *fault;
  return all.pinned.add(device, std::move(pool));
}

size_t BouncePool::process_pool_nbytes() { return process_nbytes.load(); }

void BouncePool::set_process_pool_nbytes(size_t nbytes) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  process_nbytes.store(nbytes);
  all.plain.replace();
  all.pinned.replace();
}

BouncePool::BouncePool(size_t nbytes)
    : units_(nbytes / unit_nbytes), arena_(Allocation::create(units_ * unit_nbytes, Locking::none)) {
  free_.emplace(0, units_);
}

BounceTicket& BounceTicket::operator=(BounceTicket&& other) noexcept {
  if (this == &other) return *this;
  reset();
  pool_ = std::move(other.pool_);
  place_ = other.place_;
  return *this;
}

void BounceTicket::reset() {
  if (const auto pool = std::exchange(pool_, nullptr)) pool->leave(place_);
}

std::map<size_t, size_t>::iterator BouncePool::run_of(size_t units) {
  return std::find_if(free_.begin(), free_.end(), [&](const auto& run) { return run.second >= units; });
}

std::shared_ptr<BounceWaiter> BouncePool::next() {
  const bool any = !queue_.empty() && run_of(queue_.front().units) != free_.end();
  return any ? queue_.front().waiter.lock() : nullptr;
}

BounceBuffer BouncePool::try_acquire(size_t nbytes, BounceWaiter* waiter, BounceTicket* ticket) {
  const size_t wanted = (nbytes + unit_nbytes - 1) / unit_nbytes;
  if (ticket && ticket->pool_.get() != this) ticket->reset();
  const bool queued = ticket && ticket->pool_;
  BounceBuffer buffer;
  {
    std::lock_guard lock(mutex_);
    const bool is_first = queue_.empty() || (queued && ticket->place_ == queue_.begin());
    if (const auto run = is_first ? run_of(wanted) : free_.end(); run != free_.end()) {
      const auto [first, length] = *run;
      free_.erase(run);
      if (length > wanted) free_.emplace(first + wanted, length - wanted);
      units_in_use_ += wanted;
      buffer.pool_ = shared_from_this();
      buffer.data_ = arena_->data() + first * unit_nbytes;
      buffer.units_ = wanted;
    } else if (waiter && !queued) {
      queue_.push_back({waiter->weak_from_this(), wanted});
      ticket->place_ = std::prev(queue_.end());
      ticket->pool_ = shared_from_this();
    }
  }
  if (buffer && queued) ticket->reset();  // wakes the next
  return buffer;
}

void BouncePool::leave(std::list<BounceTicket::Waiting>::iterator place) {
  if (fork_generation_ != fork_generation()) return;  // see release()
  std::shared_ptr<BounceWaiter> woken;
  {
    std::lock_guard lock(mutex_);
    queue_.erase(place);
    woken = next();
  }
  if (woken) woken->bounce_memory_released();
}

size_t BouncePool::nbytes_in_use() const {
  std::lock_guard lock(mutex_);
  return units_in_use_ * unit_nbytes;
}

void BouncePool::release(char* data, size_t units) {
  // In a forked child the mutex may be locked forever, because a thread of the parent held it at the time of the fork.
  if (fork_generation_ != fork_generation()) return;
  std::shared_ptr<BounceWaiter> woken;
  {
    std::lock_guard lock(mutex_);
    size_t first = static_cast<size_t>(data - arena_->data()) / unit_nbytes;
    units_in_use_ -= units;
    const auto after = free_.lower_bound(first);
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == first) {
        first = before->first;
        units += before->second;
        free_.erase(before);
      }
    }
    if (after != free_.end() && after->first == first + units) {
      units += after->second;
      free_.erase(after);
    }
    free_.emplace(first, units);
    woken = next();
  }
  if (woken) woken->bounce_memory_released();  // a system call, so it is made after the lock is released
}

void BouncePool::wake_all() {
  std::vector<std::weak_ptr<BounceWaiter>> waiters;
  {
    std::lock_guard lock(mutex_);
    for (const auto& one : queue_) waiters.push_back(one.waiter);
  }
  for (const auto& one : waiters) {
    if (const auto waiter = one.lock()) waiter->bounce_memory_released();
  }
}

}  // namespace tensorferry
