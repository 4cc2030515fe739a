// The lanes of a scheduler: one for each device in use, up to a limit. A lane (lane.h) has what the transfers of its
// device may wait for: a queue with workers, helper threads and bounce memory.
//
// A lane is created when a transfer first needs it. A thread, the caretaker, destroys it after some seconds without
// use. Beyond the limit devices share lanes. The threads for CPU-bound work are also here, because all lanes share
// them.
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

  // Make the first queue, with engines of this kind; later queues use the same kind. Returns an empty string, or the
  // reason for a failure.
  std::string start(const EngineKind& kind);
  const EngineKind& engine_kind() const { return *engine_kind_; }

  // The lane of a device. At the limit of lanes, this is the lane of another device, which the two then share.
  std::shared_ptr<Lane> of(uint64_t device);
  size_t count() const;

  // Return a queue for a new lane: an idle one, else a new one, else (at the limit of queues, or if no engine or thread
  // can be created) that of another lane, which the two lanes then share.
  std::shared_ptr<Queue> queue_for_a_lane();

  // Run a CPU-bound job on a helper thread: one that adds pages to memory (touches it), or one that copies. If all
  // threads are busy, help_to_touch() queues the job, and help_to_copy() returns false, so the caller copies itself.
  void help_to_touch(Helpers::Job job) { touch_helpers_.post(std::move(job)); }
  bool help_to_copy(Helpers::Job job) { return copy_helpers_.offer(std::move(job)); }

  // For the threads of all lanes and queues, and those for CPU-bound work: stop() lets them finish their work and joins
  // them. abandon() detaches them, because a transfer hangs, and let_end() then makes them end when they have no work.
  void stop();
  void abandon();
  void let_end();

 private:
  struct KeptLane {
    std::shared_ptr<Lane> lane;
    bool used;  // whether of() returned the lane since the caretaker last looked
  };
  using ByDevice = std::unordered_map<uint64_t, KeptLane>;

  // Remove a lane that nothing refers to; with `unused`, only one that of() has not returned since the caretaker last
  // looked. Null if there is none. Requires mutex_.
  std::shared_ptr<Lane> take_out_idle(bool unused);
  // End the helpers of a lane that was taken out. End its queue as well, unless another lane uses the queue, or it is
  // kept for the next lane.
  void give_back(std::shared_ptr<Lane> lane);
  void look_after();        // the loop of the caretaker
  void share_processors();  // requires mutex_
  std::pair<std::vector<std::shared_ptr<Lane>>, std::vector<std::shared_ptr<Queue>>> all() const;

  Scheduler& scheduler_;
  const SchedulerOptions& options_;
  const EngineKind* engine_kind_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable news_;
  ByDevice lanes_;
  // All queues. A queue that is referenced only here is idle, and the next new lane gets it.
  std::vector<std::shared_ptr<Queue>> queues_;
  bool over_ = false;
  // The thread that destroys idle lanes. It is started when a second lane is created.
  std::thread caretaker_;
  Helpers copy_helpers_;
  Helpers touch_helpers_;
};

}  // namespace tensorferry
