// What a forked child may trust: fork(2) copies the memory of the parent but only one of its threads, so a
// mutex may be held for ever and workers are gone. State for the whole process lives in of_this_process(), which gives
// the child a new instance and leaves the parent's copy untouched (and leaked); objects tied to threads
// remember the generation in which they were made.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace tensorferry {

// Counts the forks between the first process and this one.
uint64_t fork_generation();

// Locks what was made in a generation, for looking: a forked child does without, since nothing changes there any more,
// and a thread of the parent may have held the mutex.
inline std::unique_lock<std::mutex> locked_unless_forked(std::mutex& mutex, uint64_t generation) {
  return generation == fork_generation() ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

template <typename T>
class ForkSafe {
 public:
  T& get() {
    const uint64_t now = fork_generation();
    State* state = state_.load(std::memory_order_acquire);
    while (state == nullptr || state->generation != now) {
      auto* fresh = new State{now, {}};
      if (state_.compare_exchange_strong(state, fresh, std::memory_order_acq_rel)) return fresh->value;
      delete fresh;
    }
    return state->value;
  }

 private:
  struct State {
    uint64_t generation;
    T value;
  };
  std::atomic<State*> state_{nullptr};
};

// The only T of this process. It is constinit: a thread that makes a static one at its first use has it locked, and a
// child forked then would wait for ever.
template <typename T>
T& of_this_process() {
  static constinit ForkSafe<T> instance;
  return instance.get();
}

}  // namespace tensorferry
