#include "transfer/worker.h"

#include <errno.h>

namespace tensorferry {
namespace {

// Copying to or from bounce buffers takes time in which the drive must not run dry: after this much, what is
// prepared is handed over and free places are filled. The same after some completions of small blocks.
constexpr uint64_t copy_between_submits_nbytes = uint64_t{256} << 10;
constexpr uint32_t settled_between_submits = 8;

// Bounce memory that one worker has in flight. Enough for any drive's bandwidth times latency, small enough to stay
// in the processor's cache between the copy and the drive, and to leave the pool something for other workers.
constexpr uint64_t max_bounced_in_flight_nbytes = uint64_t{12} << 20;

constexpr uint64_t small_block_nbytes = uint64_t{64} << 10;
constexpr uint64_t background_share = 4;

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
    take_returned();
    const bool again = fill();
    if (in_flight_ == 0 && !again && !stalled_) {
      std::lock_guard lock(scheduler_.mutex_);
      if (scheduler_.stopping_ && scheduler_.line_.empty()) break;
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
    scheduler_.statistics_.inline_blocks.fetch_add(1, std::memory_order_relaxed);
    block.result = read_cached(block);
    if (block.result != -EAGAIN) {
      settle(block);
      return true;
    }
    // Evicted since it was looked up: it has to be waited for.
  }
  if (block.operation == Operation::write) count_copy(block);
  scheduler_.statistics_.blocks.fetch_add(1, std::memory_order_relaxed);
  run(block);
  return false;
}

void Worker::run(WorkBlock& block) {
  if (!block.direct_descriptor && engine_->blocks_on_buffered()) return hand_to_helper(block);
  engine_->add(block);
}

void Worker::settle(WorkBlock& block) {
  switch (block.transfer->settle(block, scheduler_.statistics_)) {
    case Settled::again: return run(block);
    case Settled::slow: return hand_to_helper(block);
    case Settled::copy: return copy(block);
    case Settled::done: break;
  }
  if (block.operation == Operation::read) count_copy(block);
  leave(block);
}

void Worker::hand_to_helper(WorkBlock& block) {
  scheduler_.help([this, &block, scheduler = scheduler_.shared_from_this()] {
    const bool ready = block.transfer->get_over(block);
    const Settled settled = ready ? scheduler->run_now(block) : Settled::done;
    come_back(block, settled, std::nullopt);
  });
}

void Worker::come_back(WorkBlock& block, Settled settled, std::optional<Fault> fault) {
  {
    std::lock_guard lock(returned_mutex_);
    returned_.push_back({&block, settled, std::move(fault)});
  }
  wake();
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
    come_back(block, Settled::again, std::move(fault));
  });
}

void Worker::take_returned() {
  std::vector<Returned> returned;
  {
    std::lock_guard lock(returned_mutex_);
    returned.swap(returned_);
  }
  for (auto& [block, settled, fault] : returned) {
    switch (settled) {
      case Settled::copy: copy(*block); break;
      case Settled::done: leave(*block); break;
      default: go_on(*block, fault);
    }
  }
}

void Worker::go_on(WorkBlock& block, const std::optional<Fault>& fault) {
  const bool well = block.transfer->copied(block, fault, scheduler_.statistics_);
  if (!well || block.operation == Operation::read) return leave(block);
  scheduler_.statistics_.blocks.fetch_add(1, std::memory_order_relaxed);
  run(block);
}

// The queue's depth is also a limit in bytes: large blocks must not make others wait longer. Blocks too small for that
// to matter always find a place, and those in the background leave most of it to others.
bool Worker::is_full_for(const WorkBlock& block) const {
  if (block.planned.io_nbytes <= small_block_nbytes) return false;
  if (block.planned.way == Way::bounced && block.transfer->gate()) return false;  // the pool decides
  if (block.planned.way == Way::bounced) return bounced_in_flight_nbytes_ >= max_bounced_in_flight_nbytes;
  const bool background = block.transfer->request().options().background;
  const uint64_t limit = scheduler_.options().max_in_flight_nbytes() / (background ? background_share : 1);
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
