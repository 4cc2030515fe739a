#include "transfer/worker.h"

namespace tensorferry {
namespace {

// Copying to or from bounce buffers takes time in which the drive must not run dry: after this much, what is
// prepared is handed over and free places are filled. The same after some completions of small blocks.
constexpr uint64_t copy_between_submits_nbytes = uint64_t{256} << 10;
constexpr uint32_t settled_between_submits = 8;

// Bounce memory that one worker has in flight. Enough for any drive's bandwidth times latency, small enough to stay
// in the processor's cache between the copy and the drive, and to leave the pool something for other workers.
constexpr uint64_t max_bounced_in_flight_nbytes = uint64_t{12} << 20;

}  // namespace

Worker::Worker(Scheduler& scheduler, std::unique_ptr<Engine> engine)
    : scheduler_(scheduler), engine_(std::move(engine)), blocks_(scheduler.options().queue_depth) {
  // The last is taken first, and the first addresses are the warmest.
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) free_.push_back(&*block);
}

Worker::~Worker() {
  for (auto& [gpu, copier] : copiers_) gpu->give_back(std::move(copier));
}

void Worker::run() {
  engine_->start();
  std::vector<Block*> completed;
  while (true) {
    take_copied();
    const bool again = fill();
    if (in_flight_ == 0 && !again && !stalled_) {
      std::lock_guard lock(scheduler_.mutex_);
      if (scheduler_.stopping_ && scheduler_.ready_.empty()) break;
    }
    completed.clear();
    engine_->reap(completed, !again);
    uint32_t settled = 0;
    for (Block* block : completed) {
      settle(static_cast<WorkBlock&>(*block));
      if (++settled >= settled_between_submits || copied_since_submit_ >= copy_between_submits_nbytes) {
        (void)fill();
        engine_->submit();
        copied_since_submit_ = 0;
        settled = 0;
      }
    }
  }
  BouncePool::forget(this);
}

bool Worker::fill() {
  while (stalled_ || !free_.empty()) {
    WorkBlock* block = stalled_;
    if (!block) {
      block = free_.back();
      if (!scheduler_.take(*block, this, nullptr)) return false;
      free_.pop_back();
    }
    if (is_full_for(*block)) {
      stalled_ = block;
      return false;  // goes on with the next completion
    }
    stalled_ = nullptr;
    switch (block->transfer->prepare(*block, this)) {
      case Prepared::failed: put_back(*block); continue;
      case Prepared::no_bounce_memory: stalled_ = block; return false;
      case Prepared::ready: break;
    }
    if (start(*block)) return true;
    if (copied_since_submit_ >= copy_between_submits_nbytes) {
      engine_->submit();
      copied_since_submit_ = 0;
    }
  }
  return false;
}

// Returns whether it took time: what the page cache holds is copied right here, since the kernel would do just
// that within the submission.
bool Worker::start(WorkBlock& block) {
  ++in_flight_;
  in_flight_nbytes_ += block.planned.io_nbytes;
  if (block.bounce && !block.staged) bounced_in_flight_nbytes_ += block.planned.io_nbytes;
  if (block.staged && block.operation == Operation::write) {
    copy(block);
    return false;
  }
  if (block.resident && !engine_->has_threads()) {
    if (scheduler_.run_now(block) == Settled::copy) {
      copy(block);
    } else {
      leave(block);
    }
    return true;
  }
  if (block.operation == Operation::write) count_copy(block);
  scheduler_.statistics_.blocks.fetch_add(1, std::memory_order_relaxed);
  engine_->add(block);
  return false;
}

void Worker::settle(WorkBlock& block) {
  switch (block.transfer->settle(block, scheduler_.statistics_)) {
    case Settled::again: engine_->add(block); return;
    case Settled::copy: copy(block); return;
    case Settled::done: break;
  }
  if (block.operation == Operation::read) count_copy(block);
  leave(block);
}

// Queues the copy of a staged block on this worker's stream; go_on() follows when it is over.
void Worker::copy(WorkBlock& block) {
  cuda::Gpu& gpu = block.transfer->gate()->gpu();
  auto& copier = copiers_[&gpu];
  if (!copier) {
    auto taken = gpu.take_copier();
    if (!taken) return go_on(block, taken.fault());
    cuda::leave_captures_alone();
    copier = std::move(*taken);
  }
  auto event = block.transfer->start_copy(block, *copier);
  if (!event) return go_on(block, event.fault());
  scheduler_.watcher_->add_copy(std::move(*event), [this, &block](std::optional<Fault> fault) {
    {
      std::lock_guard lock(copied_mutex_);
      copied_.push_back({&block, std::move(fault)});
    }
    wake();
  });
}

void Worker::take_copied() {
  std::vector<Copied> copied;
  {
    std::lock_guard lock(copied_mutex_);
    copied.swap(copied_);
  }
  for (auto& [block, fault] : copied) go_on(*block, fault);
}

void Worker::go_on(WorkBlock& block, const std::optional<Fault>& fault) {
  const bool well = block.transfer->copied(block, fault, scheduler_.statistics_);
  if (!well || block.operation == Operation::read) return leave(block);
  scheduler_.statistics_.blocks.fetch_add(1, std::memory_order_relaxed);
  engine_->add(block);
}

// The queue's depth is also a limit in bytes: large blocks must not make others wait longer.
bool Worker::is_full_for(const WorkBlock& block) const {
  if (block.planned.way == Way::bounced && block.transfer->gate()) return false;  // the pool decides
  if (block.planned.way == Way::bounced) return bounced_in_flight_nbytes_ >= max_bounced_in_flight_nbytes;
  const uint64_t limit = scheduler_.options().queue_depth * scheduler_.options().block_nbytes;
  return in_flight_ > 0 && in_flight_nbytes_ + block.planned.io_nbytes > limit;
}

void Worker::count_copy(const WorkBlock& block) {
  if (block.bounce && !block.staged) copied_since_submit_ += block.planned.nbytes;
}

void Worker::leave(WorkBlock& block) {
  --in_flight_;
  in_flight_nbytes_ -= block.planned.io_nbytes;
  if (block.bounce && !block.staged) bounced_in_flight_nbytes_ -= block.planned.io_nbytes;
  put_back(block);
}

void Worker::put_back(WorkBlock& block) {
  scheduler_.drop(block);
  free_.push_back(&block);
}

}  // namespace tensorferry
