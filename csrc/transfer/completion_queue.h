// Reports completed requests to Python. Workers only use this queue and never call Python, so they never wait for the
// GIL. A token is a number that the receiver chose for a request. When the request is done, its token is queued here
// and an eventfd is set. To learn of it, an event loop watches the eventfd's descriptor, or a Python thread sleeps in
// wait().
#pragma once

#include <poll.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/event.h"

namespace tensorferry {

class CompletionQueue {
 public:
  int descriptor() const { return event_.descriptor(); }
  // The errno if the eventfd could not be created, otherwise 0.
  int error_number() const { return event_.error_number(); }

  void push(uint64_t token) {
    bool first;
    {
      std::lock_guard lock(mutex_);
      first = tokens_.empty();
      tokens_.push_back(token);
    }
    if (first) event_.set();  // otherwise the event is still set for tokens that were not taken
  }

  // Wake a sleeping thread although there is no token to take.
  void wake() { event_.set(); }

  // Return the queued tokens, and remove them from the queue.
  std::vector<uint64_t> take() {
    // Clear the event before the tokens are taken. In the opposite order a token that is pushed in between would stay
    // in the queue with the event cleared.
    event_.clear();
    std::lock_guard lock(mutex_);
    return std::exchange(tokens_, {});
  }

  // Sleep until the event is set.
  void wait(int timeout_ms) const {
    struct pollfd watched{event_.descriptor(), POLLIN, 0};
    (void)::poll(&watched, 1, timeout_ms);  // after an interruption or a timeout the caller checks and waits again
  }

 private:
  Event event_;
  std::mutex mutex_;
  std::vector<uint64_t> tokens_;
};

}  // namespace tensorferry
