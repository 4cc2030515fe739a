// The watcher's thread treats copies and gates differently. Copies take a fraction of a millisecond each and complete
// approximately in the order in which they were queued, so the thread sleeps until the oldest one completes. Gates wait
// for work of users, which may take any time and complete in any order. They are polled, at growing intervals while
// none passes.
#include "device/watcher.h"

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/limits.h"
#include "base/reserve.h"

namespace tensorferry::cuda {
namespace {

using std::chrono::microseconds;

// The time between two polls of the gates. The shortest nap bounds the delay of a transfer that waits for a short
// kernel. The longest nap bounds the cost of polling while a transfer waits for a long kernel.
constexpr microseconds shortest_nap{20};
constexpr microseconds longest_nap{500};

}  // namespace

Result<std::unique_ptr<Watcher>> Watcher::create() {
  std::unique_ptr<Watcher> watcher(new Watcher);
  try {
    watcher->thread_ = std::thread([own = watcher.get()] {
      begin_core_thread("tensorferry-gpu");
      own->run();
    });
  } catch (const std::system_error& error) {
    return Fault{.error_number = EAGAIN,
                 .operation = "starting a thread",
                 .hint = std::string(error.what()) + "; " + why_no_thread()};
  }
  return watcher;
}

Watcher::~Watcher() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  news_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Watcher::add_copy(Event event, Done done) {
  {
    std::lock_guard lock(mutex_);
    copies_.push_back({std::move(event), std::move(done)});
  }
  news_.notify_one();
}

void Watcher::add_gate(std::shared_ptr<Gate> gate, Done done) {
  {
    std::lock_guard lock(mutex_);
    gates_.push_back({std::move(gate), std::move(done)});
  }
  news_.notify_one();
}

void Watcher::run() {
  leave_captures_alone();
  std::vector<Waiting> gates;
  microseconds nap = shortest_nap;
  std::unique_lock lock(mutex_);
  while (true) {
    if (copies_.empty() && gates_.empty()) {
      // With gates to poll, sleep at most `nap`; otherwise sleep until something is added.
      if (!gates.empty()) {
        news_.wait_for(lock, nap);
      } else if (stopping_) {
        return;
      } else {
        news_.wait(lock);
        nap = shortest_nap;
      }
    }
    if (!gates_.empty()) nap = shortest_nap;
    std::move(gates_.begin(), gates_.end(), std::back_inserter(gates));
    gates_.clear();
    std::optional<Copy> copy;
    if (!copies_.empty()) {
      copy = std::move(copies_.front());
      copies_.pop_front();
    }
    lock.unlock();
    if (copy) {
      auto fault = copy->event.wait();
      copy->event.reset();
      copy->done(std::move(fault));
    }
    nap = end_passed(gates) ? shortest_nap : std::min(2 * nap, longest_nap);
    copy.reset();
    lock.lock();
  }
}

// Call back for each gate that has passed or failed, and remove it from `gates`. Returns whether there was such a gate.
bool Watcher::end_passed(std::vector<Waiting>& gates) {
  const size_t before = gates.size();
  for (size_t index = 0; index < gates.size();) {
    auto state = gates[index].gate->passed();
    if (state && !*state) {
      ++index;
      continue;
    }
    Waiting over = std::move(gates[index]);
    gates.erase(gates.begin() + static_cast<ptrdiff_t>(index));
    over.done(state ? std::nullopt : std::optional(state.fault()));
  }
  return gates.size() < before;
}

}  // namespace tensorferry::cuda
