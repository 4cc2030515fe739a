// Which lanes a scheduler has: one for each device that is in use, within bounds.
//
// A lane is created when a transfer first needs it, and destroyed after some seconds without use. At the limit, devices
// share a lane. The threads that only compute are here too: all lanes share them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "transfer/helpers.h"
#include "transfer/lane.h"

namespace tensorferry {

struct SchedulerOptions;

class Lanes {
 public:
  explicit Lanes(Scheduler& scheduler);

  // Makes the first queue, with engines of this kind, as all others will have; empty, or why not.
  std::string start(const EngineKind& kind);
  const EngineKind& engine_kind() const { return *engine_kind_; }

  // That of a device. Where there may be no further lane, another device's.
  std::shared_ptr<Lane> of(uint64_t device);
  size_t count() const;

  // For a lane: an idle one, a new one, or another lane's.
  std::shared_ptr<Queue> queue_for_a_lane();

  // Run CPU-bound jobs. help_to_copy returns false if no thread is free.
  void help_to_touch(Helpers::Job job) { touch_helpers_.post(std::move(job)); }
  bool help_to_copy(Helpers::Job job) { return copy_helpers_.offer(std::move(job)); }

  // Ends threads when they have nothing to do any more, and waits for that; or leaves them behind, until let_end().
  void stop();
  void abandon();
  void let_end();

 private:
  struct KeptLane {
    std::shared_ptr<Lane> lane;
    bool used;  // since it was last looked at
  };
  using ByDevice = std::unordered_map<uint64_t, KeptLane>;

  std::shared_ptr<Lane> take_out_idle(bool unused);  // with mutex_ held; null: none is idle
  void give_back(std::shared_ptr<Lane> lane);
  void look_after();
  void share_processors();  // with mutex_ held
  std::pair<std::vector<std::shared_ptr<Lane>>, std::vector<std::shared_ptr<Queue>>> all() const;

  Scheduler& scheduler_;
  const SchedulerOptions& options_;
  const EngineKind* engine_kind_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable news_;
  ByDevice lanes_;
  // Of all lanes; one that only stands here is for the next lane that needs one.
  std::vector<std::shared_ptr<Queue>> queues_;
  bool over_ = false;
  std::thread caretaker_;  // gives lanes back; there is one once there have been two lanes
  Helpers copy_helpers_;
  Helpers touch_helpers_;
};

}  // namespace tensorferry
