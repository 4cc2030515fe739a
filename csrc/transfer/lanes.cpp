#include "transfer/lanes.h"

#include <algorithm>
#include <system_error>

#include "base/after_fork.h"
#include "base/reserve.h"
#include "base/signals_blocked.h"
#include "transfer/scheduler.h"

namespace tensorferry {
namespace {

// Queues of all schedulers of the process, beyond the first one of each. Further lanes share queues.
constexpr size_t max_further_queues = 64;

struct FurtherQueues {
  std::atomic<size_t> count{0};
};
std::atomic<size_t>& further_queues() { return of_this_process<FurtherQueues>().count; }

// Four threads zero memory faster than most drives fill it. They may use all processors, because a read cannot continue
// before its memory has pages. On two processors, two threads made loads into memory that the host had reclaimed up to
// 1.6 times as fast as one thread did, and none slower.
constexpr size_t touchers_of_a_device = 4;

size_t processors() { return std::max(std::thread::hardware_concurrency(), 1u); }

}  // namespace

Lanes::Lanes(Scheduler& scheduler)
    : scheduler_(scheduler),
      options_(scheduler.options()),
      copy_helpers_("tensorferry-cpy", options_.copier_count),
      touch_helpers_("tensorferry-mem", std::min(touchers_of_a_device, processors())) {}

std::string Lanes::start(const EngineKind& kind) {
  auto queue = std::make_shared<Queue>(scheduler_);
  const std::string refusal = queue->start(kind);
  if (refusal.empty()) {
    engine_kind_ = &kind;
    queues_.push_back(std::move(queue));
  } else {
    queue->stop();
  }
  return refusal;
}

std::shared_ptr<Lane> Lanes::of(uint64_t device) {
  std::shared_ptr<Lane> idle;
  std::shared_ptr<Lane> lane;
  {
    std::lock_guard lock(mutex_);
    if (auto found = lanes_.find(device); found != lanes_.end()) {
      found->second.used = true;
      return found->second.lane;
    }
    if (lanes_.size() >= options_.max_lanes) {
      idle = take_out_idle(false);
      // Share the lane of the device with the fewest users.
      if (!idle) {
        const auto is_less_used = [](const ByDevice::value_type& one, const ByDevice::value_type& other) {
          return one.second.lane.use_count() < other.second.lane.use_count();
        };
        return std::min_element(lanes_.begin(), lanes_.end(), is_less_used)->second.lane;
      }
    }
    lane = lanes_.emplace(device, KeptLane{std::make_shared<Lane>(*this, device), true}).first->second.lane;
    share_processors();
    if (over_) lane->abandon();  // the scheduler was abandoned, and its other lanes with it
    if (lanes_.size() > 1 && !over_ && !caretaker_.joinable()) {
      SignalsBlocked signals;
      try {
        caretaker_ = std::thread([this, scheduler = scheduler_.shared_from_this()] {
          begin_core_thread("tensorferry-job");
          look_after();
        });
      } catch (const std::system_error&) {
        // Without a caretaker, idle lanes are destroyed when another device needs their place.
      }
    }
  }
  news_.notify_one();
  if (idle) give_back(std::move(idle));
  return lane;
}

size_t Lanes::count() const {
  std::lock_guard lock(mutex_);
  return lanes_.size();
}

std::shared_ptr<Lane> Lanes::take_out_idle(bool unused) {
  for (auto kept = lanes_.begin(); kept != lanes_.end(); ++kept) {
    // A user of a lane holds a reference to it for as long as it uses the lane.
    if (kept->second.lane.use_count() > 1 || (unused && kept->second.used)) continue;
    auto lane = std::move(kept->second.lane);
    lanes_.erase(kept);
    share_processors();
    return lane;
  }
  return nullptr;
}

void Lanes::give_back(std::shared_ptr<Lane> lane) {
  lane->stop();
  auto queue = lane->give_queue_back();
  if (!queue) return;
  {
    std::lock_guard lock(mutex_);
    const auto is_spare = [&](const auto& one) { return one != queue && one.use_count() == 1; };
    const bool is_used = queue.use_count() > 2;  // by another lane; the other two references are in queues_ and `queue`
    // One spare queue is kept for the next lane.
    if (over_ || is_used || std::none_of(queues_.begin(), queues_.end(), is_spare)) return;
    std::erase(queues_, queue);
  }
  queue->stop();
  --further_queues();
}

void Lanes::look_after() {
  std::unique_lock lock(mutex_);
  while (!over_) {
    if (lanes_.size() < 2) {
      news_.wait(lock);
      continue;
    }
    for (auto& [device, kept] : lanes_) kept.used = false;
    if (news_.wait_for(lock, options_.idle_patience, [&] { return over_; })) break;
    while (lanes_.size() > 1) {
      auto idle = take_out_idle(true);
      if (!idle) break;
      lock.unlock();
      give_back(std::move(idle));
      lock.lock();
    }
  }
}

// Set the limits of the threads that copy and those that touch memory: a number for each device, as far as there are
// processors for them.
void Lanes::share_processors() {
  const size_t count = std::max<size_t>(lanes_.size(), 1);
  const size_t copiers = std::max<size_t>(options_.copier_count, std::max<size_t>(processors() / 2, 1) - 1);
  copy_helpers_.allow(std::min(count * options_.copier_count, copiers));
  touch_helpers_.allow(std::min(count * touchers_of_a_device, processors()));
}

std::shared_ptr<Queue> Lanes::queue_for_a_lane() {
  {
    std::lock_guard lock(mutex_);
    for (const auto& queue : queues_) {
      if (queue.use_count() == 1) return queue;
    }
  }
  if (++further_queues() <= max_further_queues) {
    auto queue = std::make_shared<Queue>(scheduler_);
    if (queue->start(*engine_kind_).empty()) {
      std::lock_guard lock(mutex_);
      queues_.push_back(queue);
      if (over_) queue->abandon();  // the scheduler was abandoned, and its other queues with it
      return queue;
    }
    queue->stop();
  }
  --further_queues();
  std::lock_guard lock(mutex_);
  const auto is_less_used = [](const auto& one, const auto& other) { return one.use_count() < other.use_count(); };
  return *std::min_element(queues_.begin(), queues_.end(), is_less_used);
}

void Lanes::stop() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  news_.notify_one();
  if (caretaker_.joinable()) caretaker_.join();
  const auto [lanes, queues] = all();
  for (const auto& queue : queues) queue->stop();
  for (const auto& lane : lanes) lane->stop();
  copy_helpers_.stop();
  touch_helpers_.stop();
  further_queues() -= queues.size() - 1;
}

void Lanes::abandon() {
  std::lock_guard lock(mutex_);
  over_ = true;
  news_.notify_one();
  if (caretaker_.joinable()) caretaker_.detach();
  for (const auto& queue : queues_) queue->abandon();
  for (const auto& [device, kept] : lanes_) kept.lane->abandon();
  copy_helpers_.abandon();
  touch_helpers_.abandon();
}

void Lanes::let_end() {
  const auto [lanes, queues] = all();
  for (const auto& queue : queues) queue->let_end();
  for (const auto& lane : lanes) lane->let_end();
  copy_helpers_.let_end();
  touch_helpers_.let_end();
}

std::pair<std::vector<std::shared_ptr<Lane>>, std::vector<std::shared_ptr<Queue>>> Lanes::all() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Lane>> lanes;
  for (const auto& [device, kept] : lanes_) lanes.push_back(kept.lane);
  return {lanes, queues_};
}

}  // namespace tensorferry
