// One call of a user: one or many transfers, completed when the last of them is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "file/fault.h"
#include "transfer/completion_queue.h"

namespace tensorferry {

class Request {
 public:
  Request(uint64_t id, size_t transfer_count) : id_(id), remaining_(transfer_count) {}

  uint64_t id() const { return id_; }
  bool done() const { return done_.load(std::memory_order_acquire); }

  // Returns whether it is done.
  bool wait_for(std::chrono::milliseconds timeout) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return finished_.wait_for(lock, timeout, [&] { return done(); });
  }

  // Blocks that have not been handed to the kernel never will be; the request ends, with ECANCELED, when those
  // that have been are done.
  void cancel() { canceled_.store(true, std::memory_order_relaxed); }
  bool canceled() const { return canceled_.load(std::memory_order_relaxed); }

  // The failure of the first transfer, in the order of the request, that failed. Valid once done.
  const std::optional<Fault>& fault() const { return fault_; }
  size_t failed_transfers() const { return failed_transfers_; }

  // Queues `token` when done, at once if it is already.
  void notify(std::shared_ptr<CompletionQueue> queue, uint64_t token) {
    std::unique_lock lock(mutex_);
    if (!done()) {
      listeners_.emplace_back(std::move(queue), token);
      return;
    }
    lock.unlock();
    queue->push(token);
  }

  // Called once for each transfer; returns true for the last. announce() follows.
  bool transfer_finished(size_t index, const std::optional<Fault>& fault) {
    std::lock_guard lock(mutex_);
    if (fault) {
      ++failed_transfers_;
      if (!fault_ || index < fault_index_) {
        fault_ = fault;
        fault_index_ = index;
      }
    }
    return --remaining_ == 0;
  }

  void announce() {
    std::vector<std::pair<std::shared_ptr<CompletionQueue>, uint64_t>> listeners;
    {
      std::lock_guard lock(mutex_);
      done_.store(true, std::memory_order_release);
      listeners.swap(listeners_);
      finished_.notify_all();
    }
    for (auto& [queue, token] : listeners) queue->push(token);
  }

 private:
  const uint64_t id_;
  std::atomic<bool> done_{false};
  std::atomic<bool> canceled_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  size_t remaining_;
  size_t failed_transfers_ = 0;
  size_t fault_index_ = 0;
  std::optional<Fault> fault_;
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, uint64_t>> listeners_;
};

}  // namespace tensorferry
