#include "transfer/helpers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "base/reserve.h"
#include "base/signals_blocked.h"

namespace tensorferry {
namespace {

// A thread ends after this time without work.
constexpr std::chrono::seconds idle_patience{5};

}  // namespace

// The threads share ownership of the state, because after abandon() they may outlive the Helpers.
struct Helpers::State {
  std::mutex mutex;
  std::condition_variable news;
  std::deque<Job> jobs;
  size_t max_threads;
  std::vector<std::thread> threads;
  std::vector<std::thread> ended;  // threads that have ended after idle_patience and must still be joined
  size_t running = 0;              // the number of threads, including detached ones
  size_t idle = 0;                 // how many of them have no job
  bool abandoned = false;
  bool stopping = false;

  explicit State(size_t max) : max_threads(max) {}

  void join_ended() {
    for (auto& thread : ended) thread.join();  // each has released the lock and is returning
    ended.clear();
  }
};

Helpers::Helpers(const char* name, size_t max_threads) : name_(name), state_(std::make_shared<State>(max_threads)) {}
Helpers::~Helpers() = default;

bool Helpers::start_thread() {
  State& state = *state_;
  state.join_ended();
  SignalsBlocked signals;
  try {
    std::thread thread([own = state_, name = name_] {
      begin_core_thread(name);
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
  if (state.idle <= state.jobs.size() && state.running < state.max_threads && !start_thread() && state.running == 0) {
    lock.unlock();
    // The caller may be in the scope of an InterruptionsReturned. EINTR would mean nothing to the job, which is not the
    // caller's own, so system calls are repeated here.
    const InterruptionsReturned by_nobody(false);
    return job();
  }
  state.jobs.push_back(std::move(job));
  lock.unlock();
  state.news.notify_one();
}

void Helpers::allow(size_t max_threads) {
  std::lock_guard lock(state_->mutex);
  state_->max_threads = max_threads;
}

bool Helpers::offer(Job job) {
  State& state = *state_;
  {
    std::lock_guard lock(state.mutex);
    const bool busy = state.idle <= state.jobs.size();
    if (busy && (state.running >= state.max_threads || !start_thread())) return false;
    state.jobs.push_back(std::move(job));
  }
  state.news.notify_one();
  return true;
}

void Helpers::serve(const std::shared_ptr<State>& own) {
  State& state = *own;
  std::unique_lock lock(state.mutex);
  while (true) {
    const bool news = state.news.wait_for(lock, idle_patience, [&] { return !state.jobs.empty() || state.stopping; });
    if (state.jobs.empty() && !news && !state.abandoned) {
      const auto is_this = [](const auto& thread) { return thread.get_id() == std::this_thread::get_id(); };
      const auto own_handle = std::find_if(state.threads.begin(), state.threads.end(), is_this);
      if (own_handle == state.threads.end()) continue;  // stop() has taken the handle and will join this thread
      state.ended.push_back(std::move(*own_handle));
      state.threads.erase(own_handle);
    }
    if (state.jobs.empty()) break;
    Job job = std::move(state.jobs.front());
    state.jobs.pop_front();
    --state.idle;
    lock.unlock();
    job();
    job = nullptr;  // release what the job refers to before the wait for the next one
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
    state_->join_ended();
  }
  state_->news.notify_all();
  for (auto& thread : threads) thread.join();
  std::lock_guard lock(state_->mutex);
  state_->stopping = false;
}

void Helpers::abandon() {
  std::lock_guard lock(state_->mutex);
  state_->abandoned = true;
  for (auto* threads : {&state_->threads, &state_->ended}) {
    for (auto& thread : *threads) thread.detach();
    threads->clear();
  }
}

void Helpers::let_end() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->news.notify_all();
}

}  // namespace tensorferry
