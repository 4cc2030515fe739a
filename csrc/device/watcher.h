// A thread that waits for GPUs, and tells when a copy is over or a gate has passed, so that workers need not.
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
  using Done = std::function<void(std::optional<Fault>)>;

  // EAGAIN: the process may have no more threads.
  static Result<std::unique_ptr<Watcher>> create();

  // Waits for what was added.
  ~Watcher();

  // `done` is called by the watcher's thread, once.
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
