// System calls that a signal interrupts (EINTR).
//
// Threads of the core block all signals. On these threads EINTR can only come from a file system that gives up a call,
// so the call is repeated, a bounded number of times. On a thread of a caller, a signal may have a Python handler that
// is meant to end the call, and only code above the core can run the handler. Within the scope of an
// InterruptionsReturned, a system call that a signal interrupts is therefore not repeated but fails with EINTR; the
// code that opened the scope runs the handlers and calls again.
#pragma once

#include <errno.h>

#include <cstdint>

namespace tensorferry {

constexpr uint32_t max_interruptions = 256;

inline thread_local bool interruptions_are_returned = false;

// In the scope of an InterruptionsReturned, uninterrupted() returns an interruption (EINTR) to its caller. The scope of
// an InterruptionsReturned(false) within it makes uninterrupted() repeat the call again. Both concern only the thread
// that opened the scope.
class InterruptionsReturned {
 public:
  explicit InterruptionsReturned(bool are_returned = true) { interruptions_are_returned = are_returned; }
  ~InterruptionsReturned() { interruptions_are_returned = before_; }
  InterruptionsReturned(const InterruptionsReturned&) = delete;
  InterruptionsReturned& operator=(const InterruptionsReturned&) = delete;

 private:
  const bool before_ = interruptions_are_returned;
};

// Run `call()`, a system call, and return its result. If the call is interrupted (EINTR), it is repeated. The
// interruption is returned in only two cases: in the scope of an InterruptionsReturned, and after max_interruptions
// attempts.
template <typename Call>
auto uninterrupted(Call call) {
  for (uint32_t attempt = 1;; ++attempt) {
    const auto result = call();
    if (result >= 0 || errno != EINTR || interruptions_are_returned || attempt >= max_interruptions) return result;
  }
}

}  // namespace tensorferry
