// Threads for what a worker must not do: what may block (closing, cutting and syncing files, opening them, I/O through
// the page cache where an engine would block, pauses), and copying. They start as jobs wait for one, up to a limit, and
// end when there has been nothing to do for some seconds.
#pragma once

#include <functional>
#include <memory>

namespace tensorferry {

class Helpers {
 public:
  using Job = std::function<void()>;

  // `name` is that of the threads, and lives as long as they do; the kernel takes 15 characters.
  Helpers(const char* name, size_t max_threads);
  // After stop() or abandon().
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // So many threads at most from now on; no thread is ended for it.
  void allow(size_t max_threads);

  // Where no thread can be had (a process limit), and none is there, the caller does the job itself.
  void post(Job job);

  // Only if one of the threads has nothing to do; returns whether it took the job.
  bool offer(Job job);

  // Waits for all jobs and ends the threads.
  void stop();

  // The threads are not joined; they keep running jobs until let_end().
  void abandon();
  void let_end();

 private:
  struct State;
  bool start_thread();  // with the lock
  static void serve(const std::shared_ptr<State>& state);

  const char* const name_;
  const std::shared_ptr<State> state_;
};

}  // namespace tensorferry
