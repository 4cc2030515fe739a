// Page-aligned memory that the core allocates, on huge pages and page-locked where the system allows it. A registry of
// all live allocations finds the one that contains an address.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/fault.h"
#include "device/gpu.h"

namespace tensorferry {

enum class Locking { none, wanted };

class Allocation {
 public:
  // Allocate zeroed memory; null if the system has no memory left. With Locking::wanted the pages are locked if
  // RLIMIT_MEMLOCK allows it, and otherwise stay unlocked; locked() returns which.
  static std::shared_ptr<Allocation> create(size_t nbytes, Locking locking);

  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  char* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  // Whether the memory is page-locked, by mlock or by CUDA.
  bool locked() const { return locked_.load(std::memory_order_relaxed) || registered(); }
  // Whether the memory was allocated with Locking::wanted (locked or not) and give_back() has not been called.
  bool lent() const { return lent_.load(std::memory_order_relaxed); }

  // Register the memory with CUDA as page-locked, which makes copies to and from GPUs asynchronous.
  std::optional<Fault> register_with(cuda::Gpu& gpu);
  // Whether register_with() has succeeded.
  bool registered() const { return gpu_.load(std::memory_order_relaxed) != nullptr; }

  // Unlock the memory now, and unregister it. This is for memory that its user has released while other objects may
  // still refer to it, so the memory itself must live until this Allocation ends. Returns false if give_back() was
  // called before, or the memory was not allocated with Locking::wanted.
  bool give_back();

  // The live allocation that contains all of [address, address + nbytes), or null.
  static std::shared_ptr<Allocation> containing(const void* address, size_t nbytes);

 private:
  Allocation(void* mapping, size_t mapping_nbytes, char* data, size_t nbytes);

  void* mapping_;
  size_t mapping_nbytes_;
  char* data_;
  size_t nbytes_;
  std::atomic<bool> lent_{false};
  std::atomic<bool> locked_{false};
  std::atomic<cuda::Gpu*> gpu_{nullptr};  // the GPU that the memory is registered with
};

}  // namespace tensorferry
