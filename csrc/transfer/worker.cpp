#include "transfer/worker.h"

#include <errno.h>

#include <algorithm>

namespace tensorferry {
namespace {

// While a worker copies to and from bounce buffers, the drive must not run out of blocks. After this many copied bytes
// the worker therefore submits the blocks that it has added to the engine, and takes further ones from the line. It
// does the same after settled_between_submits completions.
constexpr uint64_t copy_between_submits_nbytes = uint64_t{256} << 10;
// The number of copied bytes after which blocks are submitted while the drive has enough blocks.
constexpr uint64_t copy_while_moving_nbytes = uint64_t{2} << 20;
constexpr uint32_t settled_between_submits = 8;

// The bounce memory that one worker has in flight: enough for the bandwidth times latency of any drive, small enough to
// stay in the processor's cache between the copy and the drive, and to leave some of the pool to other workers.
constexpr uint64_t max_bounced_in_flight_nbytes = uint64_t{12} << 20;

// For a distant server that limit grows with the latency, which the first reads have shown (file/first_reads.h), up to
// this maximum.
constexpr uint64_t max_far_bounced_in_flight_nbytes = uint64_t{24} << 20;

// While the engine has blocks of this many bytes, the drive does not wait for copies.
constexpr uint64_t enough_moving_nbytes = uint64_t{4} << 20;

constexpr uint64_t small_block_nbytes = uint64_t{64} << 10;
// While only background blocks are in flight, their limit of bytes in flight is the worker's limit divided by this.
constexpr uint64_t background_share = 4;

}  // namespace

Worker::Worker(Scheduler& scheduler, Queue& queue, std::unique_ptr<Engine> engine)
    : scheduler_(scheduler), queue_(queue), engine_(std::move(engine)), blocks_(scheduler.options().queue_depth) {
  // free_ is a stack: the first blocks are used most, and their memory stays in the processor's cache.
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) free_.push_back(&*block);
}

void Worker::run() {
  engine_->start();
  std::vector<Block*> completed;
  while (true) {
    take_returned();
    const bool again = fill();
    if (!again && !has_work() && queue_.is_over()) break;
    completed.clear();
    engine_->reap(completed, !again);
    added_nbytes_ = copied_since_submit_ = 0;
    for (Block* block : completed) moving_nbytes_ -= static_cast<WorkBlock&>(*block).planned.io_nbytes;
    uint32_t settled = 0;
    for (Block* block : completed) {
      auto& work = static_cast<WorkBlock&>(*block);
      go_on(work, work.transfer->look_at_result(work, scheduler_.statistics_));
      if (block == completed.back()) break;  // the next reap() submits the blocks that are added from here on
      if (++settled >= settled_between_submits || has_copied_enough()) {
        take_returned();
        (void)fill();
        submit();
        settled = 0;
      }
    }
    if (added_nbytes_ == 0) copied_since_submit_ = 0;
  }
  engine_->end();
}

bool Worker::fill() {
  while (true) {
    // Retry waiting blocks, in the order of their classes. If one must go on waiting, only blocks of classes before its
    // own are taken from the line.
    auto limit = Line::class_count;
    WorkBlock* block = nullptr;
    for (const auto in : {Line::small, Line::normal, Line::background}) {
      if (!waiting_[in]) continue;
      WorkBlock* const waiting = std::exchange(waiting_[in], nullptr);
      if (try_to_begin(*waiting)) {
        block = waiting;
        break;
      }
      waiting_[in] = waiting;
      if (limit == Line::class_count) limit = in;
    }
    if (!block) {
      if (free_.empty()) return false;
      block = free_.back();
      if (!queue_.take_block(*block, this, nullptr, limit)) return false;
      free_.pop_back();
      if (!try_to_begin(*block)) {
        waiting_[block->in] = block;
        continue;
      }
    }
    if (took_time_) return true;
    if (has_copied_enough()) {
      take_returned();
      submit();
    }
  }
}

bool Worker::has_copied_enough() const {
  const bool busy = moving_nbytes_ >= added_nbytes_ + copy_while_moving_nbytes;
  return copied_since_submit_ >= (busy ? copy_while_moving_nbytes : copy_between_submits_nbytes);
}

void Worker::submit() {
  engine_->submit();
  added_nbytes_ = copied_since_submit_ = 0;
}

bool Worker::try_to_begin(WorkBlock& block) {
  if (is_full_for(block)) return false;  // fill() tries again after the next completion
  const Step step = block.transfer->prepare(block, this, scheduler_.statistics_);
  if (step == Step::wait_for_memory) return false;
  took_time_ = false;
  if (step == Step::done) {
    put_back(block);
    return true;
  }
  count(block, true);
  go_on(block, step);
  return true;
}

void Worker::go_on(WorkBlock& block, Step step) {
  switch (step) {
    case Step::touch: return touch(block);
    case Step::copy: return copy(block);
    case Step::copy_gpu: return copy_gpu(block);
    case Step::move: return move(block);
    case Step::get_over: return hand_to_helper(block);
    case Step::wait_for_memory:
    case Step::done: break;
  }
  block_over(block);
}

void Worker::move(WorkBlock& block) {
  const bool first = block.moved == 0 && block.attempts == 0;
  if (first && block.resident && !engine_->has_threads()) {
    // Cached data is copied on this thread without the engine: in a submission, the kernel would copy it on this
    // thread, too.
    scheduler_.statistics_.inline_blocks.fetch_add(1, std::memory_order_relaxed);
    block.result = block.transfer->move_here(block, &read_cached);
    if (block.result != -EAGAIN) {
      took_time_ = true;
      return go_on(block, block.transfer->look_at_result(block, scheduler_.statistics_));
    }
    // The data was evicted after the look-up, so the read has to wait for the drive.
  }
  if (first) scheduler_.statistics_.blocks.fetch_add(1, std::memory_order_relaxed);
  const bool blocks = engine_->blocks_on_buffered() || (block.planned.rows && !engine_->has_threads());
  if (!block.direct_descriptor && blocks) return hand_to_helper(block);
  if (block.transfer->file()->on_fuse() && !engine_->has_threads()) return hand_to_helper(block);
  moving_nbytes_ += block.planned.io_nbytes;
  added_nbytes_ += block.planned.io_nbytes;
  engine_->add(block);
}

// A reference for another thread that will return a block. That thread first returns the block and then calls wake().
// In between, the worker may take the block, finish it and end. The reference keeps the Worker object alive for the
// call of wake().
std::shared_ptr<Worker> Worker::own() { return std::static_pointer_cast<Worker>(shared_from_this()); }

// Another thread touches the memory, so this one can keep the queue full. The block counts as in flight meanwhile,
// which limits how far the touching runs ahead of the reads.
void Worker::touch(WorkBlock& block) {
  scheduler_.help_to_touch([self = own(), &block, scheduler = scheduler_.shared_from_this()] {
    self->come_back(block, block.transfer->touch(block, scheduler->statistics()));
  });
}

// Copy on this thread while the drive has enough to do, because waking another thread costs as much as copying some
// tens of kilobytes. Otherwise let several threads copy, if there are processors for them, because one thread is slower
// than a fast drive.
void Worker::copy(WorkBlock& block) {
  const bool here = block.planned.nbytes <= small_block_nbytes || in_flight_ == 1 || (block.sums && !block.bounce) ||
                    moving_nbytes_ >= enough_moving_nbytes;
  if (!here && scheduler_.help_to_copy([self = own(), &block, scheduler = scheduler_.shared_from_this()] {
        self->come_back(block, block.transfer->copy(block, scheduler->statistics()));
      })) {
    return;
  }
  copied_since_submit_ += block.planned.nbytes;
  go_on(block, block.transfer->copy(block, scheduler_.statistics_));
}

// Queue the copy on a CUDA stream of this worker's copier. The watcher returns the block when the copy has completed.
void Worker::copy_gpu(WorkBlock& block) {
  Transfer& transfer = *block.transfer;
  if (copiers_.empty()) cuda::leave_captures_alone();  // the capture mode belongs to the thread and applies to all GPUs
  auto copier = copiers_.of(transfer.gpu_of(block));
  if (!copier) return go_on(block, transfer.copied(block, copier.fault(), scheduler_.statistics_));
  auto event = transfer.start_copy(block, **copier);
  if (!event) return go_on(block, transfer.copied(block, event.fault(), scheduler_.statistics_));
  scheduler_.watcher_->add_copy(std::move(*event), [self = own(), &block](const std::optional<Fault>& fault) {
    self->come_back(block, block.transfer->copied(block, fault, self->scheduler_.statistics_));
  });
}

void Worker::hand_to_helper(WorkBlock& block) {
  block.transfer->lane()->help([self = own(), &block, scheduler = scheduler_.shared_from_this()] {
    self->come_back(block, scheduler->run_now(block, Step::get_over));
  });
}

void Worker::come_back(WorkBlock& block, Step step) {
  bool first;
  {
    std::lock_guard lock(returned_mutex_);
    first = returned_.empty();
    returned_.push_back({&block, step});
  }
  if (first) wake();  // otherwise the worker is awake or about to wake, and takes all returned blocks at once
}

void Worker::take_returned() {
  std::vector<Returned> returned;
  {
    std::lock_guard lock(returned_mutex_);
    returned.swap(returned_);
  }
  for (const auto& [block, step] : returned) go_on(*block, step);
}

// Whether the block must wait until others complete. Not only the number of blocks in flight is limited, but also their
// bytes, so a small request does not wait behind a full queue of large blocks. Small blocks never wait here. Background
// blocks have a separate limit, because they would otherwise wait forever while other requests use up the common one.
// While other blocks are in flight, one background block may be in flight, however long it is. While no other blocks
// are in flight, background blocks may use a part of the limit (background_share).
bool Worker::is_full_for(const WorkBlock& block) const {
  if (block.planned.io_nbytes <= small_block_nbytes) return false;
  const FirstReads* const first_reads = block.transfer->file()->first_reads();
  const auto latency = first_reads ? first_reads->latency() : std::chrono::nanoseconds(0);
  const uint64_t limit = scheduler_.options().max_in_flight_nbytes(latency);
  if (block.in == Line::background) {
    const uint64_t own = in_flight_nbytes_ > 0 ? 0 : limit / background_share;
    return background_in_flight_nbytes_ > 0 && background_in_flight_nbytes_ + block.planned.io_nbytes > own;
  }
  const bool staged = !block.transfer->gates().empty() || block.transfer->file()->source() != nullptr;
  if (block.planned.bounced && staged) return false;  // the pool sets the limit
  if (block.planned.bounced) {
    const uint64_t far = std::min(nbytes_on_their_way(latency), max_far_bounced_in_flight_nbytes);
    return bounced_in_flight_nbytes_ >= std::max(max_bounced_in_flight_nbytes, far);
  }
  return in_flight_nbytes_ > 0 && in_flight_nbytes_ + block.planned.io_nbytes > limit;
}

void Worker::count(const WorkBlock& block, bool more) {
  const auto add = [more](uint64_t& total, uint64_t n) { total = more ? total + n : total - n; };
  const uint64_t nbytes = block.planned.io_nbytes;
  in_flight_ = more ? in_flight_ + 1 : in_flight_ - 1;
  add(block.in == Line::background ? background_in_flight_nbytes_ : in_flight_nbytes_, nbytes);
  if (block.bounce && !block.of_gpu && block.in != Line::background) add(bounced_in_flight_nbytes_, nbytes);
}

void Worker::block_over(WorkBlock& block) {
  count(block, false);
  put_back(block);
}

void Worker::put_back(WorkBlock& block) {
  scheduler_.drop(block);
  free_.push_back(&block);
}

}  // namespace tensorferry
