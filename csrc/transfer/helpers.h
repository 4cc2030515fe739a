// Threads for work that a worker (the thread that drives an engine) must not do: operations that may block (opening,
// closing, truncating and syncing files, buffered I/O where the engine would block, pauses), and copying. A thread is
// started when a job waits for one, up to a limit, and ends after some seconds without work.
#pragma once

#include <functional>
#include <memory>

namespace tensorferry {

class Helpers {
 public:
  using Job = std::function<void()>;

  // `name` is the name of the threads and must outlive them. The kernel stores 15 characters of it.
  Helpers(const char* name, size_t max_threads);
  // stop() or abandon() must have been called before.
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Change the maximum number of threads. A lower limit ends no running thread.
  void allow(size_t max_threads);

  // Run the job on a thread. If no thread exists and none can be started (a process limit), the caller runs it.
  void post(Job job);

  // Run the job on a thread if one is idle or can be started. Returns false, without running the job, if not.
  bool offer(Job job);

  // Wait for all jobs and end the threads.
  void stop();

  // Detach the threads, because a job hangs. They continue to accept jobs. let_end() makes them end as soon as they
  // have no job left.
  void abandon();
  void let_end();

 private:
  struct State;
  bool start_thread();  // requires the mutex of State
  static void serve(const std::shared_ptr<State>& state);

  const char* const name_;
  const std::shared_ptr<State> state_;
};

}  // namespace tensorferry
