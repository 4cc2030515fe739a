// Page-aligned memory of our own, on huge pages and page-locked where the system allows, and the registry that
// knows which addresses lie in it.
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
  // Zeroed memory; null where the system has none left. `Locking::wanted` locks the pages if RLIMIT_MEMLOCK
  // lets it and else leaves them unlocked: ask locked().
  static std::shared_ptr<Allocation> create(size_t nbytes, Locking locking);

  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  char* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  // Page-locked, by us or by CUDA.
  bool locked() const { return locked_.load(std::memory_order_relaxed) || registered(); }
  // Whether it was made to be locked, RLIMIT_MEMLOCK letting it or not, and was not given back yet.
  bool lent() const { return lent_.load(std::memory_order_relaxed); }

  // Makes it page-locked memory of CUDA's as well, so that copies to and from GPUs are asynchronous.
  std::optional<Fault> register_with(cuda::Gpu& gpu);
  bool registered() const { return gpu_.load(std::memory_order_relaxed) != nullptr; }

  // For an owner who says that it is done with memory that others may still see: unlocks it now, while the
  // memory itself lasts as long as this object. False if it was given back before, or never was lockable.
  bool give_back();

  // The live allocation that holds all of [address, address + nbytes), if any.
  static std::shared_ptr<Allocation> containing(const void* address, size_t nbytes);

 private:
  Allocation(void* mapping, size_t mapping_nbytes, char* data, size_t nbytes);

  void* mapping_;
  size_t mapping_nbytes_;
  char* data_;
  size_t nbytes_;
  std::atomic<bool> lent_{false};
  std::atomic<bool> locked_{false};
  std::atomic<cuda::Gpu*> gpu_{nullptr};  // that it is registered with
};

}  // namespace tensorferry
