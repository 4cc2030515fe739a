// The bounded memory in between: blocks whose memory the device cannot take pass through here.
//
// Each device that is in use has a pool of its own, so that one that hangs keeps nobody else's memory. A pool is one
// arena on huge pages, given out in runs of 16 KiB units, lowest address first, so that a light load stays within
// memory that the processor's cache holds, and only what was in use at one time has pages. It is made when a block of
// the device first needs it, kept by those who use the device, and gone with the last of them; but the one that was
// made last stays, for who uses one device again and again. Who finds a pool empty registers to be woken and carries on
// with what is in flight.
//
// Memory of GPUs passes through pools which CUDA knows as page-locked, also one for each device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/after_fork.h"
#include "memory/allocation.h"

namespace tensorferry {

class BouncePool;

// Someone who wants to know that bounce memory came free. May be gone by then.
class BounceWaiter : public std::enable_shared_from_this<BounceWaiter> {
 public:
  virtual ~BounceWaiter() = default;
  virtual void bounce_memory_released() = 0;
};

// A run of units; returns itself.
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

class BouncePool : public std::enable_shared_from_this<BouncePool> {
 public:
  static constexpr size_t unit_nbytes = size_t{16} << 10;
  static constexpr size_t min_nbytes = size_t{1} << 20;
  static constexpr size_t default_nbytes = size_t{32} << 20;
  // Of the process, of each kind: devices beyond share.
  static constexpr size_t max_pools = 16;

  explicit BouncePool(size_t nbytes);

  // That of a device, made at first use. Null where there is no memory for it.
  static std::shared_ptr<BouncePool> of(uint64_t device);
  static size_t process_pool_nbytes();

  // The one between files of a device and GPUs.
  static Result<std::shared_ptr<BouncePool>> pinned(uint64_t device, cuda::Gpu& gpu);
  static size_t pinned_pool_nbytes() { return 2 * process_pool_nbytes(); }

  // Of each pool. Buffers in use keep their old arena until they return.
  static void set_process_pool_nbytes(size_t nbytes);

  // Whether the size has been set anew since it was made.
  bool replaced() const { return replaced_.load(std::memory_order_relaxed); }

  size_t nbytes() const { return units_ * unit_nbytes; }

  // Whether there ever can be a run that long.
  bool has_room_for(size_t nbytes) const { return nbytes <= this->nbytes(); }

  // Empty when there is no run that long; `waiter`, if given, is then called once when something returns.
  BounceBuffer try_acquire(size_t nbytes, BounceWaiter* waiter);

  size_t nbytes_in_use() const;

 private:
  friend class BounceBuffer;
  struct Registry;
  static Registry& registry();

  void release(char* data, size_t units);
  void wake();

  const uint64_t fork_generation_ = fork_generation();
  const size_t units_;
  std::shared_ptr<Allocation> arena_;
  std::atomic<bool> replaced_{false};
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // runs of units: where they begin, and how long they are; no two touch
  size_t units_in_use_ = 0;
  std::vector<std::weak_ptr<BounceWaiter>> waiters_;
};

}  // namespace tensorferry
