#include "transfer/scheduler.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "memory/after_fork.h"
#include "transfer/worker.h"
#include "transfer/write_order.h"

namespace tensorferry {
namespace {

// Beyond this a blocking call is left to a worker, which has several blocks in flight.
constexpr uint64_t max_inline_nbytes = uint64_t{1} << 20;

// The threads of the core take no signals: Python's handlers belong to its own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    blocked_ = ::pthread_sigmask(SIG_SETMASK, &all, &before_) == 0;
  }
  ~SignalsBlocked() {
    if (blocked_) (void)::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t before_;
  bool blocked_;
};

}  // namespace

std::shared_ptr<Scheduler> Scheduler::create(const SchedulerOptions& options, std::vector<EngineRefusal>& refusals) {
  std::shared_ptr<Scheduler> scheduler(new Scheduler(options));
  for (const EngineKind& kind : engine_kinds()) {
    if (options.engine.empty() ? kind.on_request_only : options.engine != kind.name) continue;
    std::string refusal;
    for (uint32_t index = 0; index < options.worker_count && refusal.empty(); ++index) {
      EngineAttempt attempt = kind.create({options.queue_depth, options.single_submit});
      refusal = attempt.refusal;
      if (attempt.engine)
        scheduler->workers_.push_back(std::make_unique<Worker>(*scheduler, std::move(attempt.engine)));
    }
    if (refusal.empty()) refusal = scheduler->start_workers();
    if (refusal.empty()) {
      scheduler->engine_name_ = kind.name;
      return scheduler;
    }
    scheduler->workers_.clear();
    refusals.push_back({kind.name, refusal});
  }
  return nullptr;
}

std::string Scheduler::start_workers() {
  SignalsBlocked signals;
  for (auto& worker : workers_) {
    try {
      // The thread keeps the scheduler alive, for the case that close() has to leave it behind.
      threads_.emplace_back([self = shared_from_this(), own = worker.get()] {
        (void)::pthread_setname_np(::pthread_self(), "tensorferry");
        own->run();
      });
    } catch (const std::system_error& error) {
      (void)close(std::chrono::milliseconds(0));
      stopping_ = false;
      return std::string("cannot start a thread: ") + error.what() +
             "; remedy: raise the limit of processes (ulimit -u)";
    }
  }
  return "";
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), fork_generation_(tensorferry::fork_generation()) {}

Scheduler::~Scheduler() = default;

bool Scheduler::belongs_to_this_process() const { return fork_generation_ == tensorferry::fork_generation(); }

bool Scheduler::wait_for_room(size_t count, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return progress_.wait_for(lock, timeout,
                            [&] { return outstanding_ == 0 || outstanding_ + count <= max_outstanding; });
}

bool Scheduler::wait_for_progress(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const uint64_t before = completed_;
  return progress_.wait_for(lock, timeout, [&] { return completed_ != before || outstanding_ == 0; });
}

size_t Scheduler::outstanding() const {
  std::lock_guard lock(mutex_);
  return outstanding_;
}

std::vector<uint64_t> Scheduler::take_finished() {
  std::lock_guard lock(mutex_);
  return std::exchange(finished_, {});
}

void Scheduler::submit(const std::shared_ptr<Request>& request,
                       const std::vector<std::shared_ptr<Transfer>>& transfers) {
  statistics_.requests.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    requests_[request.get()] = request;
    outstanding_ += transfers.size();
  }
  std::vector<std::shared_ptr<Transfer>> ready;
  ready.reserve(transfers.size());
  for (const auto& transfer : transfers) {
    if (WriteOrder::enter(transfer, shared_from_this()) && may_line_up(transfer)) ready.push_back(transfer);
  }
  if (ready.empty()) return;
  std::lock_guard lock(mutex_);
  ready_.insert(ready_.end(), ready.begin(), ready.end());
  wake_hungry(ready.size() > 1 || ready.front()->has_many_blocks());
}

void Scheduler::begin(const std::shared_ptr<Transfer>& transfer) {
  if (may_line_up(transfer)) line_up(transfer);
}

// False for memory of a GPU that is still to be written to, or read, by what was queued before: then the transfer
// lines up by itself when that has passed.
bool Scheduler::may_line_up(const std::shared_ptr<Transfer>& transfer) {
  if (!transfer->gate()) return true;
  auto passed = transfer->gate()->passed();
  if (!passed) transfer->refuse(passed.fault());
  if (!passed || *passed) return true;
  watcher_->add_gate(transfer->gate(), [this, transfer](const std::optional<Fault>& fault) {
    if (fault) transfer->refuse(*fault);
    line_up(transfer);
  });
  return false;
}

void Scheduler::line_up(const std::shared_ptr<Transfer>& transfer) {
  std::lock_guard lock(mutex_);
  ready_.push_back(transfer);
  wake_hungry(transfer->has_many_blocks());
}

std::optional<Fault> Scheduler::prepare_for_gpus() {
  std::lock_guard lock(mutex_);
  if (watcher_) return std::nullopt;
  SignalsBlocked signals;
  auto watcher = cuda::Watcher::create();
  if (!watcher) return watcher.fault();
  watcher_ = std::move(*watcher);
  return std::nullopt;
}

bool Scheduler::close(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  while (outstanding_ > 0) {
    const uint64_t before = completed_;
    const uint64_t blocks_before = statistics_.read_nbytes + statistics_.written_nbytes;
    progress_.wait_for(lock, patience, [&] { return completed_ != before || outstanding_ == 0; });
    const uint64_t blocks_now = statistics_.read_nbytes + statistics_.written_nbytes;
    if (completed_ == before && blocks_now == blocks_before) {
      // Hung in the kernel. The threads own the scheduler; they end with the process.
      for (auto& thread : threads_) thread.detach();
      threads_.clear();
      return false;
    }
  }
  stopping_ = true;
  lock.unlock();
  for (auto& worker : workers_) worker->wake();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  watcher_.reset();  // which may be about to wake a worker
  workers_.clear();
  return true;
}

bool Scheduler::take(WorkBlock& block, Worker* hungry, const Transfer* only) {
  while (true) {
    std::shared_ptr<Transfer> transfer;
    {
      std::lock_guard lock(mutex_);
      if (ready_.empty() || (only && ready_.front().get() != only)) {
        if (hungry && std::find(hungry_.begin(), hungry_.end(), hungry) == hungry_.end()) hungry_.push_back(hungry);
        return false;
      }
      transfer = ready_.front();
      bool exhausted = false;
      const bool taken = transfer->take(block, exhausted);
      if (exhausted) ready_.pop_front();
      // The cursor no longer keeps the phase open; a block, if there is one, still does.
      const bool over = exhausted && transfer->release();
      if (taken) return true;
      if (!over) continue;
    }
    phase_over(transfer);
  }
}

void Scheduler::drop(WorkBlock& block) {
  block.bounce.reset();
  auto transfer = std::move(block.transfer);
  if (transfer->release()) phase_over(transfer);
}

void Scheduler::wake_hungry(bool all) {
  const size_t kept = all || hungry_.empty() ? 0 : hungry_.size() - 1;
  while (hungry_.size() > kept) {
    hungry_.back()->wake();
    hungry_.pop_back();
  }
}

void Scheduler::phase_over(const std::shared_ptr<Transfer>& transfer) {
  if (!transfer->next_phase()) {
    finish(transfer);
    return;
  }
  std::lock_guard lock(mutex_);
  ready_.push_front(transfer);
  wake_hungry(false);
}

void Scheduler::finish(const std::shared_ptr<Transfer>& transfer) {
  transfer->release_file();
  WriteOrder::leave(*transfer);
  Request& request = transfer->request();
  const bool last = request.transfer_finished(transfer->index, transfer->fault());
  std::shared_ptr<Request> kept;
  {
    std::lock_guard lock(mutex_);
    --outstanding_;
    ++completed_;
    if (last) {
      auto found = requests_.find(&request);
      kept = std::move(found->second);
      requests_.erase(found);
      finished_.push_back(request.id());
    }
    progress_.notify_all();
  }
  if (!last) return;
  if (request.fault()) statistics_.failed_requests.fetch_add(1, std::memory_order_relaxed);
  request.announce();
}

Settled Scheduler::run_now(WorkBlock& block) {
  statistics_.inline_blocks.fetch_add(1, std::memory_order_relaxed);
  Settled settled;
  do {
    block.result = execute_now(block);
    settled = block.transfer->settle(block, statistics_);
  } while (settled == Settled::again);
  return settled;
}

void Scheduler::execute(WorkBlock& block) {
  const bool copy_first = block.staged && block.operation == Operation::write;
  if (copy_first && !block.transfer->copy_now(block, statistics_)) return;
  if (run_now(block) == Settled::copy) (void)block.transfer->copy_now(block, statistics_);
}

bool Scheduler::try_inline(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->nbytes() > max_inline_nbytes || transfer->has_many_blocks()) return false;
  if (transfer->gate()) {
    auto passed = transfer->gate()->passed();
    if (!passed || !*passed) return false;  // waiting for it is the watcher's work
  }
  if (!WriteOrder::enter(transfer, nullptr)) return false;
  do {
    WorkBlock block;
    bool exhausted;
    if (transfer->take(block, exhausted)) {
      const Prepared prepared = transfer->prepare(block, nullptr);
      if (prepared == Prepared::no_bounce_memory) {
        transfer->rewind();  // a worker can wait for it
        WriteOrder::leave(*transfer);
        return false;
      }
      if (prepared == Prepared::ready) execute(block);
      (void)transfer->release();  // the cursor still keeps the phase open
    }
    (void)transfer->release();
  } while (transfer->next_phase());
  transfer->release_file();
  WriteOrder::leave(*transfer);
  Request& request = transfer->request();
  statistics_.requests.fetch_add(1, std::memory_order_relaxed);
  if (transfer->fault()) statistics_.failed_requests.fetch_add(1, std::memory_order_relaxed);
  (void)request.transfer_finished(transfer->index, transfer->fault());
  request.announce();
  return true;
}

// Copies out of the page cache scale with threads.
void Scheduler::share(const std::shared_ptr<Transfer>& transfer) {
  if (!transfer->from_page_cache()) return;
  WorkBlock block;
  while (take(block, nullptr, transfer.get())) {
    Prepared prepared;
    while ((prepared = transfer->prepare(block, nullptr)) == Prepared::no_bounce_memory) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));  // the workers give theirs back
    }
    if (prepared == Prepared::ready) execute(block);
    drop(block);
  }
}

}  // namespace tensorferry
