// A thread that waits for GPUs in place of the workers, the threads that drive the engines. It calls a function when a
// copy has completed, or when a gate has passed. A gate is the point in a CUDA stream's work from which a transfer may
// use GPU memory (gpu.h).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "device/gpu.h"

namespace tensorferry::cuda {

class Watcher {
 public:
  // Called with the fault if the wait has failed, otherwise with an empty optional.
  using Done = std::function<void(std::optional<Fault>)>;

  // Fails with EAGAIN if the process cannot start another thread.
  static Result<std::unique_ptr<Watcher>> create();

  // Waits for every copy and gate that was added.
  ~Watcher();

  // The watcher's thread calls `done` exactly once, after the event behind a copy, or the gate, has passed or failed.
  void add_copy(Event event, Done done);
  void add_gate(std::shared_ptr<Gate> gate, Done done);

 private:
  struct Copy {
    Event event;
    Done done;
  };
  struct Waiting {
    std::shared_ptr<Gate> gate;
    Done done;
  };

  Watcher() = default;
  void run();
  static bool end_passed(std::vector<Waiting>& gates);

  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Copy> copies_;
  std::vector<Waiting> gates_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tensorferry::cuda
