#include "transfer/helpers.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "transfer/signals_blocked.h"

namespace tensorferry {

// Shared with the threads, which may be left behind.
struct Helpers::State {
  std::mutex mutex;
  std::condition_variable news;
  std::deque<Job> jobs;
  std::vector<std::thread> threads;
  size_t idle = 0;
  bool stopping = false;
};

Helpers::Helpers() : state_(std::make_shared<State>()) {}
Helpers::~Helpers() = default;

void Helpers::post(Job job) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.idle <= state.jobs.size() && state.threads.size() < max_threads) {
    SignalsBlocked signals;
    try {
      state.threads.emplace_back([own = state_] {
        (void)::pthread_setname_np(::pthread_self(), "tensorferry-job");
        serve(own);
      });
      ++state.idle;
    } catch (const std::system_error&) {
      if (state.threads.empty()) {
        lock.unlock();
        return job();
      }
    }
  }
  state.jobs.push_back(std::move(job));
  lock.unlock();
  state.news.notify_one();
}

void Helpers::serve(const std::shared_ptr<State>& own) {
  State& state = *own;
  std::unique_lock lock(state.mutex);
  while (true) {
    state.news.wait(lock, [&] { return !state.jobs.empty() || state.stopping; });
    if (state.jobs.empty()) return;
    Job job = std::move(state.jobs.front());
    state.jobs.pop_front();
    --state.idle;
    lock.unlock();
    job();
    job = nullptr;  // what it holds goes now
    lock.lock();
    ++state.idle;
  }
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
  state_->idle = 0;
}

void Helpers::abandon() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    for (auto& thread : state_->threads) thread.detach();
    state_->threads.clear();
  }
  state_->news.notify_all();
}

}  // namespace tensorferry
