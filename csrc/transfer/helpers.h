// Threads for what may block: closing, cutting and syncing files, opening them, I/O through the page cache where an
// engine would block, pauses. They start as jobs wait for one, up to a limit.
#pragma once

#include <functional>
#include <memory>

namespace tensorferry {

class Helpers {
 public:
  static constexpr size_t max_threads = 8;

  using Job = std::function<void()>;

  Helpers();
  // After stop() or abandon().
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Where no thread can be had (a process limit), and none is there, the caller does the job itself.
  void post(Job job);

  // Waits for all jobs and ends the threads.
  void stop();

  // Nobody will wait for the threads; they go on with jobs until release().
  void abandon();
  void release();

 private:
  struct State;
  static void serve(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace tensorferry
