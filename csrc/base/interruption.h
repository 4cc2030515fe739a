// System calls that a signal interrupts (EINTR).
//
// Threads of ours block all signals, so there EINTR comes from a file system that gives up of its own accord: the call
// is made again, a bounded number of times. On a caller's thread a signal handler may want to end the call, and only
// the caller can run it: within an InterruptionsReturned such a call fails with EINTR at once, and whoever made the
// scope looks for signals and calls again.
#pragma once

#include <errno.h>

#include <cstdint>

namespace tensorferry {

constexpr uint32_t max_interruptions = 256;

inline thread_local bool interruptions_are_returned = false;

class InterruptionsReturned {
 public:
  explicit InterruptionsReturned(bool are_returned = true) { interruptions_are_returned = are_returned; }
  ~InterruptionsReturned() { interruptions_are_returned = before_; }
  InterruptionsReturned(const InterruptionsReturned&) = delete;
  InterruptionsReturned& operator=(const InterruptionsReturned&) = delete;

 private:
  const bool before_ = interruptions_are_returned;
};

// The result of `call()`, a system call's, which is below 0 with EINTR only as said above.
template <typename Call>
auto uninterrupted(Call call) {
  for (uint32_t attempt = 1;; ++attempt) {
    const auto result = call();
    if (result >= 0 || errno != EINTR || interruptions_are_returned || attempt >= max_interruptions) return result;
  }
}

}  // namespace tensorferry
