// The bounded memory in between: blocks whose memory the device cannot take pass through here.
//
// One arena on huge pages, given out in runs of 16 KiB units, lowest address first, so that a light load stays
// within memory that the processor's cache holds. There is one pool for the process. Who finds it empty
// registers to be woken and carries on with what is in flight.
//
// Memory of GPUs passes through a pool of its own, which CUDA knows as page-locked and which is made when a GPU is
// first used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/allocation.h"

namespace tensorferry {

class BouncePool;

// Someone who wants to know that bounce memory came free.
class BounceWaiter {
 public:
  virtual void bounce_memory_released() = 0;

 protected:
  ~BounceWaiter() = default;
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

  explicit BouncePool(size_t nbytes);

  // The process's pool, made at first use. Null where there is no memory for it.
  static std::shared_ptr<BouncePool> process_pool();
  static size_t process_pool_nbytes();

  // The one between files and GPUs.
  static Result<std::shared_ptr<BouncePool>> pinned_pool(cuda::Gpu& gpu);
  static size_t pinned_pool_nbytes() { return 2 * process_pool_nbytes(); }

  // Buffers in use keep the old arena until they return.
  static void set_process_pool_nbytes(size_t nbytes);

  size_t nbytes() const { return units_.size() * unit_nbytes; }

  // Whether there ever can be a run that long.
  bool has_room_for(size_t nbytes) const { return nbytes <= this->nbytes(); }

  // Empty when there is no run that long; `waiter`, if given, is then called once when something returns.
  BounceBuffer try_acquire(size_t nbytes, BounceWaiter* waiter);
  static void forget(BounceWaiter* waiter);

  size_t nbytes_in_use() const;

 private:
  friend class BounceBuffer;
  void release(char* data, size_t units);

  std::shared_ptr<Allocation> arena_;
  std::vector<bool> units_;  // true: in use
  size_t units_in_use_ = 0;
};

}  // namespace tensorferry
