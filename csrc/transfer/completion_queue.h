// How a completion reaches Python without the worker needing Python: tokens are queued here and an eventfd is
// set; an event loop watches the descriptor, or a Python thread sleeps in wait().
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
  int error_number() const { return event_.error_number(); }

  void push(uint64_t token) {
    bool first;
    {
      std::lock_guard lock(mutex_);
      first = tokens_.empty();
      tokens_.push_back(token);
    }
    if (first) event_.set();  // else it is set, and nobody has taken what it was set for
  }

  // Wakes a sleeper that has nothing to fetch.
  void wake() { event_.set(); }

  std::vector<uint64_t> take() {
    event_.clear();
    std::lock_guard lock(mutex_);
    return std::exchange(tokens_, {});
  }

  void wait(int timeout_ms) const {
    struct pollfd watched{event_.descriptor(), POLLIN, 0};
    (void)::poll(&watched, 1, timeout_ms);  // interrupted or timed out, the caller looks and asks again
  }

 private:
  Event event_;
  std::mutex mutex_;
  std::vector<uint64_t> tokens_;
};

}  // namespace tensorferry
