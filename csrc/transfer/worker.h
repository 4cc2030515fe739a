// A thread that owns one engine and keeps the engine's queue full of blocks, which it takes from a line of transfers
// (Queue in lane.h). The thread sleeps only in the engine. If another step of a block may block, a helper thread runs
// the step and returns the block to the worker afterwards.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "device/gpu.h"
#include "engine/engine.h"
#include "memory/bounce_pool.h"
#include "transfer/scheduler.h"

namespace tensorferry {

class Worker final : public BounceWaiter {
 public:
  Worker(Scheduler& scheduler, Queue& queue, std::unique_ptr<Engine> engine);

  void run();
  void wake() { engine_->wake(); }
  std::shared_ptr<Worker> own();
  void bounce_memory_released() override { wake(); }

 private:
  // Take and submit blocks until the queue is full or no block is left. Returns whether fill() should be called again
  // before the worker sleeps.
  bool fill();
  bool try_to_begin(WorkBlock& block);  // returns false if the block must wait for memory or for other blocks
  void submit();
  bool has_copied_enough() const;  // whether the added blocks should be submitted before more bytes are copied
  void go_on(WorkBlock& block, Step step);
  void move(WorkBlock& block);
  void touch(WorkBlock& block);
  void copy(WorkBlock& block);
  void copy_gpu(WorkBlock& block);
  void hand_to_helper(WorkBlock& block);
  void come_back(WorkBlock& block, Step step);  // called by another thread, to return a block with its next step
  void take_returned();
  void block_over(WorkBlock& block);
  bool is_full_for(const WorkBlock& block) const;
  void put_back(WorkBlock& block);
  void count(const WorkBlock& block, bool more);  // count the block as in flight (`more`), or as ended
  bool has_work() const {
    return in_flight_ > 0 || std::ranges::any_of(waiting_, [](auto* one) { return one; });
  }

  Scheduler& scheduler_;
  Queue& queue_;
  std::unique_ptr<Engine> engine_;
  std::vector<WorkBlock> blocks_;
  std::vector<WorkBlock*> free_;
  // For each class (Line::Class), one block that was taken from the line and waits for bounce memory or until other
  // blocks complete. Blocks of classes before its own may pass it.
  std::array<WorkBlock*, Line::class_count> waiting_{};
  size_t in_flight_ = 0;
  uint64_t in_flight_nbytes_ = 0;  // of all blocks but background ones
  uint64_t background_in_flight_nbytes_ = 0;
  uint64_t bounced_in_flight_nbytes_ = 0;
  uint64_t moving_nbytes_ = 0;  // bytes of the blocks that the engine has
  uint64_t added_nbytes_ = 0;   // the part of moving_nbytes_ that is not yet submitted
  uint64_t copied_since_submit_ = 0;
  bool took_time_ = false;  // the last block was read on this thread, so completions may be waiting

  // A block that another thread has returned: a helper, or the watcher of copies from and to GPUs.
  struct Returned {
    WorkBlock* block;
    Step step;
  };
  std::mutex returned_mutex_;
  std::vector<Returned> returned_;
  cuda::Copiers copiers_;
};

}  // namespace tensorferry
