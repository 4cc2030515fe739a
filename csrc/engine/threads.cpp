// The threads engine: threads that block in pread and pwrite. It works everywhere and is the baseline for the other
// engines. The same code is the engine for cuFile, because cuFile's calls block like system calls.
//
// A thread is started when a block waits for one, up to a limit: beyond some tens of threads a drive gains nothing, and
// each thread costs a stack.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/reserve.h"
#include "device/cufile.h"
#include "engine/engine.h"

namespace tensorferry {
namespace {

constexpr uint32_t max_threads = 32;

class ThreadsEngine final : public Engine {
 public:
  ThreadsEngine(const char* name, const EngineOptions& options)
      : name_(name), limit_(std::min(options.queue_depth, max_threads)) {}

  ~ThreadsEngine() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  const char* name() const override { return name_; }
  bool has_threads() const override { return true; }

  void add(Block& block) override {
    std::lock_guard lock(mutex_);
    waiting_.push_back(&block);
    if (idle_ < waiting_.size() && threads_.size() < limit_) start_thread();
    work_.notify_one();
  }

  void submit() override {}

  void reap(std::vector<Block*>& completed, bool wait) override {
    std::unique_lock lock(mutex_);
    if (wait) news_.wait(lock, [&] { return !done_.empty() || woken_ || must_lend(); });
    woken_ = false;
    completed.insert(completed.end(), done_.begin(), done_.end());
    done_.clear();
    if (must_lend()) {
      Block* block = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      block->result = execute_now(*block);
      completed.push_back(block);
    }
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

 private:
  // Whether the worker must run blocks itself, in reap(), because no thread could be started (a process limit).
  bool must_lend() const { return threads_.empty() && !waiting_.empty(); }

  void start_thread() {
    try {
      threads_.emplace_back([this] {
        begin_core_thread("tensorferry-io");
        serve();
      });
      ++idle_;
    } catch (const std::system_error&) {
      // EAGAIN: the process may not start more threads. The running threads, or the worker, serve the block.
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return !waiting_.empty() || stopping_; });
      if (waiting_.empty()) return;
      Block* block = waiting_.front();
      waiting_.pop_front();
      --idle_;
      lock.unlock();
      block->result = execute_now(*block);
      lock.lock();
      ++idle_;
      done_.push_back(block);
      news_.notify_one();
    }
  }

  const char* const name_;
  const uint32_t limit_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable news_;
  std::deque<Block*> waiting_;
  std::vector<Block*> done_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
};

}  // namespace

EngineAttempt create_threads_engine(const EngineOptions& options) {
  return {std::make_unique<ThreadsEngine>("threads", options), ""};
}

EngineAttempt create_cufile_engine(const EngineOptions& options) {
  if (!cufile::ready()) return {nullptr, "cuFile has not been opened"};
  return {std::make_unique<ThreadsEngine>("cufile", options), ""};
}

}  // namespace tensorferry
