#include "transfer/helpers.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "base/signals_blocked.h"

namespace tensorferry {

// Shared with the threads, which may be left behind.
struct Helpers::State {
  std::mutex mutex;
  std::condition_variable news;
  std::deque<Job> jobs;
  std::vector<std::thread> threads;
  size_t running = 0;  // threads, those left behind too
  size_t idle = 0;     // of them
  bool abandoned = false;
  bool stopping = false;
};

Helpers::Helpers(const char* name, size_t max_threads)
    : name_(name), max_threads_(max_threads), state_(std::make_shared<State>()) {}
Helpers::~Helpers() = default;

bool Helpers::start_thread() {
  State& state = *state_;
  SignalsBlocked signals;
  try {
    std::thread thread([own = state_, name = name_] {
      (void)::pthread_setname_np(::pthread_self(), name);
      serve(own);
    });
    ++state.running;
    ++state.idle;
    if (state.abandoned) {
      thread.detach();
    } else {
      state.threads.push_back(std::move(thread));
    }
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void Helpers::post(Job job) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.idle <= state.jobs.size() && state.running < max_threads_ && !start_thread() && state.running == 0) {
    lock.unlock();
    const InterruptionsReturned by_nobody(false);  // the caller knows nothing of the job
    return job();
  }
  state.jobs.push_back(std::move(job));
  lock.unlock();
  state.news.notify_one();
}

bool Helpers::offer(Job job) {
  State& state = *state_;
  {
    std::lock_guard lock(state.mutex);
    const bool busy = state.idle <= state.jobs.size();
    if (busy && (state.running >= max_threads_ || !start_thread())) return false;
    state.jobs.push_back(std::move(job));
  }
  state.news.notify_one();
  return true;
}

void Helpers::serve(const std::shared_ptr<State>& own) {
  State& state = *own;
  std::unique_lock lock(state.mutex);
  while (true) {
    state.news.wait(lock, [&] { return !state.jobs.empty() || state.stopping; });
    if (state.jobs.empty()) break;
    Job job = std::move(state.jobs.front());
    state.jobs.pop_front();
    --state.idle;
    lock.unlock();
    job();
    job = nullptr;  // what it holds goes now
    lock.lock();
    ++state.idle;
  }
  --state.idle;
  --state.running;
}

void Helpers::stop() {
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
  }
  state_->news.notify_all();
  for (auto& thread : threads) thread.join();
  std::lock_guard lock(state_->mutex);
  state_->stopping = false;
}

void Helpers::abandon() {
  std::lock_guard lock(state_->mutex);
  state_->abandoned = true;
  for (auto& thread : state_->threads) thread.detach();
  state_->threads.clear();
}

void Helpers::release() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->news.notify_all();
}

}  // namespace tensorferry
