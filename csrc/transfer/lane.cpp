#include "transfer/lane.h"

#include <algorithm>
#include <system_error>

#include "base/limits.h"
#include "base/reserve.h"
#include "base/signals_blocked.h"
#include "transfer/scheduler.h"
#include "transfer/worker.h"

namespace tensorferry {
namespace {

constexpr size_t max_waiting = 32;  // helpers for jobs_: as many as the threads engine has threads
constexpr size_t max_helpers = 8;   // helpers for waits_, and as many for syncs_ and for streams_

}  // namespace

std::string Queue::start(const EngineKind& kind) {
  const SchedulerOptions& options = scheduler_.options();
  for (uint32_t index = 0; index < options.worker_count; ++index) {
    EngineAttempt attempt = kind.create({options.queue_depth, options.single_submit});
    if (!attempt.engine) return attempt.refusal;
    workers_.push_back(std::make_shared<Worker>(scheduler_, *this, std::move(attempt.engine)));
  }
  SignalsBlocked signals;
  for (auto& worker : workers_) {
    try {
      // The thread keeps the scheduler alive, because close() may have to leave the thread running.
      threads_.emplace_back([scheduler = scheduler_.shared_from_this(), own = worker.get()] {
        begin_core_thread("tensorferry");
        own->run();
      });
    } catch (const std::system_error& error) {
      return std::string("cannot start a thread: ") + error.what() + "; " + why_no_thread();
    }
  }
  return "";
}

void Queue::add(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  if (transfers.empty()) return;
  const bool several = transfers.size() > 1 || transfers.front()->has_many_blocks();
  std::vector<std::shared_ptr<Worker>> woken;
  {
    std::lock_guard lock(mutex_);
    const Line::Class in = Line::class_of(*transfers.front());
    for (const auto& transfer : transfers) line_.add(transfer);
    for (auto one = hungry_.begin(); one != hungry_.end() && (several || woken.empty());) {
      if (one->limit <= in) {
        ++one;
        continue;
      }
      woken.push_back(std::move(one->worker));
      one = hungry_.erase(one);
    }
  }
  for (const auto& worker : woken) worker->wake();
}

bool Queue::take_block(WorkBlock& block, Worker* hungry, const Transfer* only, Line::Class limit) {
  while (true) {
    std::shared_ptr<Transfer> transfer;
    {
      std::lock_guard lock(mutex_);
      if (only) {
        transfer = line_.find(*only);
      } else if (line_.has_before(limit)) {
        transfer = line_.front(limit);
      }
      if (!transfer) {
        if (hungry) {
          std::erase_if(hungry_, [&](const Hungry& one) { return one.worker.get() == hungry; });
          hungry_.push_back({hungry->own(), limit});
        }
        return false;
      }
      bool exhausted = false;
      const bool taken = transfer->next_block(block, exhausted);
      block.in = line_.took(*transfer, taken ? block.planned.io_nbytes : 0, exhausted);
      // Count down the cursor's reference: only the blocks now keep the transfer from ending.
      const bool over = exhausted && transfer->count_down();
      if (taken) return true;
      if (!over) continue;
    }
    scheduler_.end_transfer(transfer);
  }
}

bool Queue::is_over() const {
  std::lock_guard lock(mutex_);
  return stopping_ && line_.empty();
}

void Queue::stop() {
  let_end();
  for (auto& thread : threads_) thread.join();
  std::lock_guard lock(mutex_);
  threads_.clear();
  hungry_.clear();
  workers_.clear();
}

void Queue::abandon() {
  for (auto& thread : threads_) thread.detach();
  threads_.clear();
}

void Queue::let_end() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (auto& worker : workers_) worker->wake();
}

Lane::Lane(Lanes& lanes, uint64_t device)
    : lanes_(lanes),
      device_(device),
      jobs_("tensorferry-job", max_waiting),
      waits_("tensorferry-job", max_helpers),
      syncs_("tensorferry-job", max_helpers),
      streams_("tensorferry-job", max_helpers) {}

std::shared_ptr<Queue> Lane::queue() {
  std::lock_guard lock(mutex_);
  if (!queue_) queue_ = lanes_.queue_for_a_lane();
  return queue_;
}

std::shared_ptr<BouncePool> Lane::pool() {
  std::lock_guard lock(mutex_);
  if (!pool_ || pool_->replaced()) pool_ = BouncePool::of(device_);
  return pool_;
}

void Lane::stop() {
  for (Helpers* helpers : all_helpers()) helpers->stop();
  std::lock_guard lock(mutex_);
  pool_.reset();  // a closed scheduler that is still referenced must not hold memory
}

void Lane::abandon() {
  for (Helpers* helpers : all_helpers()) helpers->abandon();
}

void Lane::let_end() {
  for (Helpers* helpers : all_helpers()) helpers->let_end();
}

}  // namespace tensorferry
