#include "base/reserve.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace tensorferry {
namespace {

// The parts are large enough that malloc() maps each one separately, so that all of its memory is free at once.
constexpr size_t part_nbytes = 256 << 10;
std::array<std::atomic<void*>, 8> parts;

// The number of scopes of each thread. It is not a thread_local, because in a shared object the first use of one
// allocates memory, and glibc ends the process if there is none.
class Scopes {
 public:
  Scopes() : exist_(::pthread_key_create(&key_, nullptr) == 0) {}
  intptr_t count() const { return exist_ ? reinterpret_cast<intptr_t>(::pthread_getspecific(key_)) : 0; }
  void add(intptr_t change) const {
    // If this fails, the thread's allocations fail as others do.
    if (exist_) (void)::pthread_setspecific(key_, reinterpret_cast<void*>(count() + change));
  }

 private:
  pthread_key_t key_;
  const bool exist_;
};
const Scopes scopes;
std::new_handler others = nullptr;

void free_a_part() {
  if (scopes.count() > 0) {
    for (auto& part : parts) {
      if (void* const taken = part.exchange(nullptr)) return std::free(taken);
    }
  }
  if (!others) throw std::bad_alloc();
  others();
}

}  // namespace

void fill_reserve(size_t further_nbytes) {
  [[maybe_unused]] static const bool is_set = [] {
    others = std::set_new_handler(&free_a_part);
    return true;
  }();
  for (auto& part : parts) {
    if (part.load(std::memory_order_relaxed)) continue;
    void* const made = std::malloc(part_nbytes);
    if (!made) throw std::bad_alloc();
    void* missing = nullptr;
    if (!part.compare_exchange_strong(missing, made)) std::free(made);
  }
  if (further_nbytes <= part_nbytes) return;
  void* const volatile further = std::malloc(further_nbytes);  // volatile: compilers remove what is freed unused
  if (!further) throw std::bad_alloc();
  std::free(further);
}

UsesReserve::UsesReserve() { scopes.add(1); }
UsesReserve::~UsesReserve() { scopes.add(-1); }

void begin_core_thread(const char* name) {
  (void)::pthread_setname_np(::pthread_self(), name);
  scopes.add(1);
}

}  // namespace tensorferry
