// A thread that owns one engine and keeps its queue full. It never blocks but in the engine: what may block is run by
// a helper and comes back.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/gpu.h"
#include "engine/engine.h"
#include "memory/bounce_pool.h"
#include "transfer/scheduler.h"

namespace tensorferry {

class Worker final : public BounceWaiter {
 public:
  Worker(Scheduler& scheduler, std::unique_ptr<Engine> engine);
  ~Worker();

  void run();
  void wake() { engine_->wake(); }
  void bounce_memory_released() override { wake(); }

 private:
  // Takes and hands over blocks until the queue is full or there is nothing more to take. Returns whether it
  // should be asked again before sleeping.
  bool fill();
  void settle(WorkBlock& block);
  bool start(WorkBlock& block);
  void run(WorkBlock& block);
  void hand_to_helper(WorkBlock& block);
  void come_back(WorkBlock& block, Settled settled, std::optional<Fault> fault);
  void copy(WorkBlock& block);
  void take_returned();
  void go_on(WorkBlock& block, const std::optional<Fault>& fault);
  void leave(WorkBlock& block);
  bool is_full_for(const WorkBlock& block) const;
  void count_copy(const WorkBlock& block);
  void put_back(WorkBlock& block);

  Scheduler& scheduler_;
  std::unique_ptr<Engine> engine_;
  std::vector<WorkBlock> blocks_;
  std::vector<WorkBlock*> free_;
  WorkBlock* stalled_ = nullptr;  // taken, but without bounce memory
  size_t in_flight_ = 0;
  uint64_t in_flight_nbytes_ = 0;
  uint64_t bounced_in_flight_nbytes_ = 0;
  uint64_t copied_since_submit_ = 0;

  // Blocks from other threads: `again` from the one that watches copies to and from GPUs, this one's being over; else
  // from a helper that has run it.
  struct Returned {
    WorkBlock* block;
    Settled settled;
    std::optional<Fault> fault;
  };
  std::mutex returned_mutex_;
  std::vector<Returned> returned_;
  std::map<cuda::Gpu*, std::unique_ptr<cuda::Copier>> copiers_;
};

}  // namespace tensorferry
