// A thread that owns one engine and keeps its queue full. It never blocks but in the engine: what may block is run by
// a helper and comes back.
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
  // Takes and hands over blocks until the queue is full or there is nothing more to take. Returns whether it
  // should be asked again before sleeping.
  bool fill();
  bool try_to_begin(WorkBlock& block);  // false: it has to wait
  void submit();
  bool has_copied_enough() const;  // for the drive to get what is prepared
  void go_on(WorkBlock& block, Step step);
  void move(WorkBlock& block);
  void touch(WorkBlock& block);
  void copy(WorkBlock& block);
  void copy_gpu(WorkBlock& block);
  void hand_to_helper(WorkBlock& block);
  void come_back(WorkBlock& block, Step step);
  void take_returned();
  void block_over(WorkBlock& block);
  bool is_full_for(const WorkBlock& block) const;
  void put_back(WorkBlock& block);
  void count(const WorkBlock& block, bool more);
  bool has_work() const {
    return in_flight_ > 0 || std::ranges::any_of(waiting_, [](auto* one) { return one; });
  }

  Scheduler& scheduler_;
  Queue& queue_;
  std::unique_ptr<Engine> engine_;
  std::vector<WorkBlock> blocks_;
  std::vector<WorkBlock*> free_;
  // Of each class one that was taken, and waits for bounce memory or for others to be over. Better classes pass by.
  std::array<WorkBlock*, Line::class_count> waiting_{};
  size_t in_flight_ = 0;
  uint64_t in_flight_nbytes_ = 0;  // but for those in the background
  uint64_t background_in_flight_nbytes_ = 0;
  uint64_t bounced_in_flight_nbytes_ = 0;
  uint64_t moving_nbytes_ = 0;  // with the engine
  uint64_t added_nbytes_ = 0;   // of these, not yet submitted
  uint64_t copied_since_submit_ = 0;
  bool took_time_ = false;

  // Blocks from other threads: from helpers, and from the one that watches copies to and from GPUs.
  struct Returned {
    WorkBlock* block;
    Step step;
  };
  std::mutex returned_mutex_;
  std::vector<Returned> returned_;
  cuda::Copiers copiers_;
};

}  // namespace tensorferry
