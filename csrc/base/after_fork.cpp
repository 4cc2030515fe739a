#include "base/after_fork.h"

#include <pthread.h>

namespace tensorferry {
namespace {

std::atomic<uint64_t> generation{0};

// The handler that counts forks. It is installed when the module is loaded, before any state depends on the count. Its
// result is not checked, because pthread_atfork fails only if memory runs out, here while the module is loaded.
const int installed = ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

}  // namespace

uint64_t fork_generation() {
  // Refer to `installed`, so the linker keeps its initialization.
  (void)installed;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace tensorferry
