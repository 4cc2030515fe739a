#include "memory/bounce_pool.h"

#include <errno.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "base/after_fork.h"

namespace tensorferry {
namespace {

std::atomic<size_t> process_nbytes{BouncePool::default_nbytes};

// One mutex for all pools (there is more than one only while a replaced one drains), so that no release can fall
// between a failed acquisition and its registration as a waiter.
struct ProcessState {
  std::mutex mutex;
  std::shared_ptr<BouncePool> pool;
  std::shared_ptr<BouncePool> pinned_pool;
  std::vector<BounceWaiter*> waiters;
};

ProcessState& process() {
  static constinit ForkSafe<ProcessState> instance;
  return instance.get();
}

// Under the lock, so that forget() can promise that nobody calls a waiter that is gone.
void wake(ProcessState& state) {
  for (BounceWaiter* waiter : state.waiters) waiter->bounce_memory_released();
  state.waiters.clear();
}

}  // namespace

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

std::shared_ptr<BouncePool> BouncePool::process_pool() {
  ProcessState& current = process();
  std::lock_guard lock(current.mutex);
  if (!current.pool) {
    auto pool = std::make_shared<BouncePool>(process_nbytes.load());
    if (!pool->arena_) return nullptr;
    current.pool = std::move(pool);
  }
  return current.pool;
}

Result<std::shared_ptr<BouncePool>> BouncePool::pinned_pool(cuda::Gpu& gpu) {
  ProcessState& current = process();
  std::lock_guard lock(current.mutex);
  if (!current.pinned_pool) {
    auto pool = std::make_shared<BouncePool>(pinned_pool_nbytes());
    if (!pool->arena_) return Fault{.error_number = ENOMEM, .operation = "mmap", .hint = "buffers for GPU memory"};
    if (auto fault = pool->arena_->register_with(gpu)) return *fault;
    current.pinned_pool = std::move(pool);
  }
  return current.pinned_pool;
}

size_t BouncePool::process_pool_nbytes() { return process_nbytes.load(); }

void BouncePool::set_process_pool_nbytes(size_t nbytes) {
  process_nbytes.store(nbytes);
  ProcessState& current = process();
  std::shared_ptr<BouncePool> old, old_pinned;
  std::lock_guard lock(current.mutex);
  old.swap(current.pool);
  old_pinned.swap(current.pinned_pool);
  wake(current);
}

BouncePool::BouncePool(size_t nbytes)
    : arena_(Allocation::create(nbytes / unit_nbytes * unit_nbytes, Locking::none)), units_(nbytes / unit_nbytes) {}

BounceBuffer BouncePool::try_acquire(size_t nbytes, BounceWaiter* waiter) {
  const size_t wanted = (nbytes + unit_nbytes - 1) / unit_nbytes;
  ProcessState& current = process();
  std::lock_guard lock(current.mutex);
  size_t run = 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    run = units_[unit] ? 0 : run + 1;
    if (run < wanted) continue;
    const size_t first = unit + 1 - wanted;
    std::fill_n(units_.begin() + static_cast<ptrdiff_t>(first), wanted, true);
    units_in_use_ += wanted;
    BounceBuffer buffer;
    buffer.pool_ = shared_from_this();
    buffer.data_ = arena_->data() + first * unit_nbytes;
    buffer.units_ = wanted;
    return buffer;
  }
  auto& waiters = current.waiters;
  if (waiter && std::find(waiters.begin(), waiters.end(), waiter) == waiters.end()) waiters.push_back(waiter);
  return {};
}

void BouncePool::forget(BounceWaiter* waiter) {
  ProcessState& current = process();
  std::lock_guard lock(current.mutex);
  std::erase(current.waiters, waiter);
}

size_t BouncePool::nbytes_in_use() const {
  std::lock_guard lock(process().mutex);
  return units_in_use_ * unit_nbytes;
}

void BouncePool::release(char* data, size_t units) {
  ProcessState& current = process();
  std::lock_guard lock(current.mutex);
  const size_t first = static_cast<size_t>(data - arena_->data()) / unit_nbytes;
  std::fill_n(units_.begin() + static_cast<ptrdiff_t>(first), units, false);
  units_in_use_ -= units;
  wake(current);
}

}  // namespace tensorferry
