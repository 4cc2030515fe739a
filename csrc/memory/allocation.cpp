#include "memory/allocation.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "base/after_fork.h"

namespace tensorferry {
namespace {

constexpr size_t huge_page_nbytes = size_t{2} << 20;

// All live allocations, by address. The references are weak, because the registry must not keep memory alive.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, std::weak_ptr<Allocation>> by_address;
};

Registry& registry() { return of_this_process<Registry>(); }

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Allocation::Allocation(void* mapping, size_t mapping_nbytes, char* data, size_t nbytes)
    : mapping_(mapping), mapping_nbytes_(mapping_nbytes), data_(data), nbytes_(nbytes) {}

std::shared_ptr<Allocation> Allocation::create(size_t nbytes, Locking locking) {
  // For direct I/O, the kernel pins a huge page in one step instead of 512 steps for its ordinary pages, and the first
  // touch costs one page fault for each 2 MiB. Smaller allocations use ordinary pages.
  const bool huge = nbytes >= huge_page_nbytes;
  const size_t granule = huge ? huge_page_nbytes : static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (nbytes > SIZE_MAX / 2) return nullptr;
  const size_t used = round_up(nbytes == 0 ? 1 : nbytes, static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
  const size_t mapping_nbytes = used + (huge ? granule : 0);
  void* mapping = ::mmap(nullptr, mapping_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* data = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(mapping), granule));
  // The return value does not matter: a kernel without huge pages returns EINVAL, and ordinary pages serve.
  if (huge) (void)::madvise(data, used, MADV_HUGEPAGE);
  std::shared_ptr<Allocation> allocation(new Allocation(mapping, mapping_nbytes, data, nbytes));
  if (locking == Locking::wanted && nbytes > 0) {
    allocation->lent_ = true;
    allocation->locked_ = ::mlock(data, used) == 0;
  }

  Registry& known = registry();
  std::lock_guard lock(known.mutex);
  known.by_address[reinterpret_cast<uintptr_t>(data)] = allocation;
  return allocation;
}

Allocation::~Allocation() {
  if (cuda::Gpu* gpu = gpu_.exchange(nullptr)) gpu->unregister_host(data_);
  {
    Registry& known = registry();
    std::lock_guard lock(known.mutex);
    known.by_address.erase(reinterpret_cast<uintptr_t>(data_));
  }
  (void)::munmap(mapping_, mapping_nbytes_);  // fails only for arguments that mmap did not return
}

std::optional<Fault> Allocation::register_with(cuda::Gpu& gpu) {
  if (auto fault = gpu.register_host(data_, nbytes_)) return fault;
  gpu_ = &gpu;
  return std::nullopt;
}

bool Allocation::give_back() {
  if (cuda::Gpu* gpu = gpu_.exchange(nullptr)) gpu->unregister_host(data_);
  if (locked_.exchange(false)) (void)::munlock(data_, nbytes_);  // cannot fail for memory that mlock has locked
  return lent_.exchange(false);
}

std::shared_ptr<Allocation> Allocation::containing(const void* address, size_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  Registry& known = registry();
  // Declared before the lock: if another thread drops its reference meanwhile, this one is the last, and the destructor
  // locks the mutex.
  std::shared_ptr<Allocation> allocation;
  std::lock_guard lock(known.mutex);
  auto after = known.by_address.upper_bound(begin);
  if (after == known.by_address.begin()) return nullptr;
  allocation = std::prev(after)->second.lock();
  if (!allocation) return nullptr;
  const auto offset = begin - reinterpret_cast<uintptr_t>(allocation->data_);
  if (offset > allocation->nbytes_ || nbytes > allocation->nbytes_ - offset) return nullptr;
  return allocation;
}

}  // namespace tensorferry
