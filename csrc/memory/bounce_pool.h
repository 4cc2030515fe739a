// Pools of bounce buffers. A bounce buffer is aligned memory through which a block is moved if direct I/O cannot use
// the caller's memory. A pool has a fixed size.
//
// Each device in use has its own pool, so blocks of a device that hangs occupy no memory that other devices need. A
// pool is one allocation, the arena, on huge pages. A buffer is a run of 16 KiB units of the arena, at the lowest
// address where there is room. A light load therefore stays within memory that the processor's cache holds, and the
// arena gets pages only for as many units as have ever been in use at the same time.
//
// A lane is what a scheduler keeps for one device: the workers (threads that each drive an engine), helper threads, and
// a reference to the pool (transfer/lane.h). The pool is created when a block of the device first needs it, shared by
// the lanes of all schedulers for the device, and destroyed with its last user. The pool that was created last is kept
// even then, for programs that use one device again and again. A worker that finds no room in the pool does not wait
// for it: it registers to be woken, and continues with its blocks in flight.
//
// Blocks with GPU memory use separate pools, page-locked by CUDA, also one for each device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/after_fork.h"
#include "memory/allocation.h"

namespace tensorferry {

class BouncePool;

// An object that is notified when there is bounce memory for it. The pool holds a weak reference to it.
class BounceWaiter : public std::enable_shared_from_this<BounceWaiter> {
 public:
  virtual ~BounceWaiter() = default;
  virtual void bounce_memory_released() = 0;
};

// A run of units of a pool's arena. The destructor returns the run to the pool.
class BounceBuffer {
 public:
  BounceBuffer() = default;
  BounceBuffer(BounceBuffer&& other) noexcept { *this = std::move(other); }
  BounceBuffer& operator=(BounceBuffer&& other) noexcept;
  ~BounceBuffer() { reset(); }

  char* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset();

 private:
  friend class BouncePool;
  std::shared_ptr<BouncePool> pool_;
  char* data_ = nullptr;
  size_t units_ = 0;
};

// A place in the queue for the memory of a pool. The destructor gives the place up.
class BounceTicket {
 public:
  BounceTicket() = default;
  BounceTicket(BounceTicket&& other) noexcept { *this = std::move(other); }
  BounceTicket& operator=(BounceTicket&& other) noexcept;
  ~BounceTicket() { reset(); }
  void reset();

 private:
  friend class BouncePool;
  struct Waiting {
    std::weak_ptr<BounceWaiter> waiter;
    size_t units;
  };
  std::shared_ptr<BouncePool> pool_;
  std::list<Waiting>::iterator place_;
};

class BouncePool : public std::enable_shared_from_this<BouncePool> {
 public:
  static constexpr size_t unit_nbytes = size_t{16} << 10;
  static constexpr size_t min_nbytes = size_t{1} << 20;
  static constexpr size_t default_nbytes = size_t{32} << 20;
  // The limit of pools in the process, for each kind (plain ones, and page-locked ones for GPU memory). Further devices
  // share pools.
  static constexpr size_t max_pools = 16;

  explicit BouncePool(size_t nbytes);

  // The pool of a device, created at first use. Null if there is no memory for it.
  static std::shared_ptr<BouncePool> of(uint64_t device);
  // The size of a pool that is created now.
  static size_t process_pool_nbytes();

  // The page-locked pool for transfers between files of a device and GPUs.
  static Result<std::shared_ptr<BouncePool>> pinned(uint64_t device, cuda::Gpu& gpu);
  static size_t pinned_pool_nbytes() { return 2 * process_pool_nbytes(); }

  // Set the size of pools, and replace all existing pools at their next use. Buffers in use keep their old pool alive
  // until they are returned to it.
  static void set_process_pool_nbytes(size_t nbytes);

  // Whether the size was set after this pool was created, so users must call of() or pinned() again.
  bool replaced() const { return replaced_.load(std::memory_order_relaxed); }

  size_t nbytes() const { return units_ * unit_nbytes; }

  // Whether a buffer of `nbytes` fits into the pool when no other buffer is in use.
  bool has_room_for(size_t nbytes) const { return nbytes <= this->nbytes(); }

  // Return a buffer of at least `nbytes`, or an empty one if no free run is long enough or others wait for memory. With
  // a `waiter`, the caller then gets a place in the queue, its `ticket`. The waiter is notified once the caller is next
  // and there is a long enough run; it must then call again with the same ticket. Memory is given out in the order of
  // the queue: otherwise short runs could be taken again and again, and a long one would never become free.
  BounceBuffer try_acquire(size_t nbytes, BounceWaiter* waiter = nullptr, BounceTicket* ticket = nullptr);

  size_t nbytes_in_use() const;

 private:
  friend class BounceBuffer;
  friend class BounceTicket;
  struct Registry;
  static Registry& registry();

  void release(char* data, size_t units);
  void leave(std::list<BounceTicket::Waiting>::iterator place);
  void wake_all();
  std::map<size_t, size_t>::iterator run_of(size_t units);  // the lowest free one; requires mutex_
  // The first in the queue, if there is a run for it. Requires mutex_; notify it, and release the reference, without.
  std::shared_ptr<BounceWaiter> next();

  const uint64_t fork_generation_ = fork_generation();
  const size_t units_;
  std::shared_ptr<Allocation> arena_;
  std::atomic<bool> replaced_{false};
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // free runs: first unit -> number of units; adjacent runs are merged
  size_t units_in_use_ = 0;
  std::list<BounceTicket::Waiting> queue_;
};

}  // namespace tensorferry
