// State that survives fork(2). fork() copies the memory of the parent but only the thread that called it, so in the
// child a mutex may stay locked forever, and the worker threads do not exist. Process-wide state is therefore kept in
// of_this_process(), which creates a new instance in the child and never touches or frees the child's copy of the
// parent's instance. An object that is tied to threads stores the fork generation (the number of forks so far) in which
// it was created. If fork_generation() has another value later, the object is a copy in a child, where its threads do
// not exist.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace tensorferry {

// The number of forks between the first process and this one.
uint64_t fork_generation();

// Lock the mutex of an object, to read the object. `generation` is the fork generation in which the object was created.
// If the object is a copy in a forked child, this locks nothing. No thread of the child changes the object, and a
// thread of the parent may have held the mutex at the time of the fork, so the child would wait for it forever.
inline std::unique_lock<std::mutex> locked_unless_forked(std::mutex& mutex, uint64_t generation) {
  return generation == fork_generation() ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

// Holds one instance of T for each process: get() returns the instance of the calling process, and creates it at first
// use.
template <typename T>
class ForkSafe {
 public:
  T& get() {
    // Two threads may both find no instance of this generation and create one. The first one publishes its instance by
    // the exchange; the other deletes its instance and uses the published one. There is no mutex, because a fork could
    // leave it locked.
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

// The instance of T for this process. The static variable is constinit, so it needs no initialization at run time. An
// ordinary function-local static would be initialized by the first thread under a guard, and a child that was forked at
// that moment would wait for the guard forever.
template <typename T>
T& of_this_process() {
  static constinit ForkSafe<T> instance;
  return instance.get();
}

}  // namespace tensorferry
