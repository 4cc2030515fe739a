#include "base/after_fork.h"

#include <pthread.h>

namespace tensorferry {
namespace {

std::atomic<uint64_t> generation{0};

// Installed when the module is loaded, before there is anything to protect. Registration fails only for lack
// of memory at load time.
const int installed = ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

}  // namespace

uint64_t fork_generation() {
  (void)installed;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace tensorferry
