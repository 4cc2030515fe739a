// Admission, outstanding transfers, and how they end.
//
// A transfer is admitted first. From then on closing waits for it; transfers that come later are refused. An admitted
// transfer gets in line in its device's lane (lanes.h). There a worker with room takes the block that is next in line,
// so blocks spread over workers by themselves, and one request's last blocks are in flight together with another's.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/watcher.h"
#include "engine/engine.h"
#include "transfer/helpers.h"
#include "transfer/lane.h"
#include "transfer/lanes.h"
#include "transfer/request.h"
#include "transfer/statistics.h"
#include "transfer/transfer.h"

namespace tensorferry {

// What is on its way at any moment where each byte takes so long, at the speed of a fast network: 4 GB/s.
inline uint64_t nbytes_on_their_way(std::chrono::nanoseconds latency) {
  return 4 * static_cast<uint64_t>(latency.count());
}

struct SchedulerOptions {
  std::string engine;  // empty: the first that works
  uint64_t block_nbytes = uint64_t{1} << 20;
  uint64_t large_block_nbytes = uint64_t{1} << 20;  // for requests of many such blocks for each worker
  uint32_t queue_depth = 128;
  uint32_t worker_count = 1;
  bool single_submit = false;
  uint32_t copier_count = default_copier_count();  // threads that copy beside the workers of a device
  size_t max_lanes = 16;                           // devices beyond share the lanes of others
  std::chrono::milliseconds idle_patience{5000};   // after which a lane that nobody uses is given back

  // None where workers, callers and the kernel's own work keep all processors busy: on two, blocks that were copied
  // beside the worker made a transfer slower by a tenth, and cost a fifth more. More than memory can serve are no use.
  static uint32_t default_copier_count() {
    return std::min(std::max(std::thread::hardware_concurrency() / 2, 1u) - 1, 3u);
  }

  // Of one worker, in blocks from and to callers' own memory. With the default sizes less than the queue would hold:
  // eight large blocks keep a drive as busy (measured: 2.3 GB/s with 32 MiB and with 128), and a small request finds no
  // more before itself. Where a read takes as long as `latency` with nothing before it, as many as that asks for.
  uint64_t max_in_flight_nbytes(std::chrono::nanoseconds latency) const {
    const uint64_t all = queue_depth * block_nbytes;
    if (large_block_nbytes <= block_nbytes) return all;
    return std::min(all, std::max(8 * large_block_nbytes, nbytes_on_their_way(latency)));
  }
};

struct EngineRefusal {
  std::string engine;
  std::string reason;
};

class Scheduler : public std::enable_shared_from_this<Scheduler> {
 public:
  // The most outstanding transfers of one lane; further submissions to it wait.
  static constexpr size_t max_outstanding = 16384;

  // Null when no engine could be had: `refusals` then says why. It also names those passed over.
  static std::shared_ptr<Scheduler> create(const SchedulerOptions& options, std::vector<EngineRefusal>& refusals);

  ~Scheduler();

  const char* engine_name() const { return lanes_.engine_kind().name; }
  const SchedulerOptions& options() const { return options_; }
  Statistics& statistics() { return statistics_; }

  // Large requests go in large blocks: fewer submissions, same bytes in flight.
  uint64_t block_nbytes_for(uint64_t request_nbytes) const {
    const bool large = request_nbytes / options_.worker_count >= 16 * options_.large_block_nbytes;
    return large ? options_.large_block_nbytes : options_.block_nbytes;
  }
  uint64_t next_request_id() { return ++last_request_id_; }

  enum class Admission { admitted, full, closed };

  // So many transfers of a lane.
  struct Places {
    std::shared_ptr<Lane> lane;
    size_t count;
  };

  // Counts them as outstanding, as soon as so many may be in each of the lanes, or says why not when time is over. Each
  // is to be handed over or, if nothing becomes of it, taken back.
  Admission admit(const std::vector<Places>& places, std::chrono::milliseconds timeout);
  void take_back(const std::vector<Places>& places);

  // Waits until something finishes that was outstanding; false when time is over. True at once if nothing is.
  bool wait_for_progress(std::chrono::milliseconds timeout);

  // That of a device, as File::device() tells it. Where there may be no further lane, another device's.
  std::shared_ptr<Lane> lane_of(uint64_t device) { return lanes_.of(device); }
  size_t lane_count() const { return lanes_.count(); }

  // To be called, with success, before transfers of GPU memory are handed over.
  std::optional<Fault> prepare_for_gpus();

  // Once prepared for GPUs.
  cuda::Watcher& watcher() { return *watcher_; }

  // Hands over transfers of a request, which have been admitted. Of the files in `last` no others will come: they are
  // sealed.
  void submit(const std::shared_ptr<Request>& request, const std::vector<std::shared_ptr<Transfer>>& transfers,
              const std::vector<std::shared_ptr<File>>& last = {});

  // For blocking calls: takes on a small transfer here and now, without another thread, and returns whether it did. If
  // not, submit it; then share() works on it beside the workers where that helps. If so, the request is sealed; go on
  // with it, and then settle it.
  struct Inline {
    std::shared_ptr<Transfer> transfer;
    WorkBlock block;
    Step step = Step::done;
  };
  // `only_cached`: what would wait for a device is not taken on.
  bool try_inline(const std::shared_ptr<Transfer>& transfer, Inline& taken, bool only_cached = false);

  // Does all of it, and returns true; false where a signal came: see InterruptionsReturned.
  bool go_on(Inline& taken);

  // For calls that must not wait: the same for a small read of what is in memory. It is done then.
  bool try_cached(const std::shared_ptr<Transfer>& transfer);

  // A submitted write no longer has to wait for another.
  void line_up(const std::shared_ptr<Transfer>& transfer);

  // Returns true when nothing is left to take, false when time is over.
  bool share(const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout);

  // Ids of requests that finished since the last call, and of what was let go of.
  std::vector<uint64_t> take_finished();

  size_t outstanding() const;

  // Refuses what comes from now on. For who waits for the end in steps of his own, before `close`.
  void refuse();
  // Whether nothing is outstanding, or is not any more within `timeout`.
  bool wait_until_idle(std::chrono::milliseconds timeout);
  // Changes whenever bytes have moved or something has ended.
  uint64_t progress() const;

  // Ends the workers, or leaves them behind if a transfer is still outstanding. Returns whether all ended well.
  // Concurrent calls wait for the first one.
  bool close();

  // Run CPU-bound jobs. help_to_copy returns false if no thread is free.
  void help_to_touch(Helpers::Job job) { lanes_.help_to_touch(std::move(job)); }
  bool help_to_copy(Helpers::Job job) { return lanes_.help_to_copy(std::move(job)); }

  // Something else is outstanding in a lane; that, or a transfer, is over.
  void one_more(Lane& lane);
  void one_less(Lane& lane);

  // All of a request is over.
  void request_over(const Request& request);

  // Memory kept under an id of next_request_id() is needed no more.
  void let_go(uint64_t id);

  // After fork(2) the child has no workers, and must not wait for them.
  bool belongs_to_this_process() const;

 private:
  friend class Queue;
  friend class Worker;
  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  explicit Scheduler(const SchedulerOptions& options);

  void end_if_abandoned();  // with mutex_ held: what was left behind has come back
  bool is_idle() const { return outstanding_ == 0 && requests_.empty(); }  // with mutex_ held

  bool move_cached(Inline& taken);
  void drop(WorkBlock& block);  // settled or abandoned
  Step run_now(WorkBlock& block, Step step);
  Step run_on(WorkBlock& block, Step step);  // to its end, unless a signal came
  bool may_line_up(const std::shared_ptr<Transfer>& transfer);
  std::vector<bool> enter_order(Request& request, const Transfers& transfers,
                                const std::vector<std::shared_ptr<File>>& last);
  void drive(WorkBlock& block);  // from its beginning to its end, on this thread; waits for memory
  void run_to_end(WorkBlock& block, Step step);
  void end_transfer(const std::shared_ptr<Transfer>& transfer);
  void move_singly(Transfer& joined);  // blocks
  void tell_request(const std::shared_ptr<Transfer>& transfer);

  const SchedulerOptions options_;
  const uint64_t fork_generation_;
  Statistics statistics_;
  std::atomic<uint64_t> last_request_id_{0};

  mutable std::mutex mutex_;
  std::condition_variable progress_;
  std::unordered_map<const Request*, std::shared_ptr<Request>> requests_;
  std::vector<uint64_t> finished_;
  size_t outstanding_ = 0;
  uint64_t completed_ = 0;
  enum class State { open, refusing, closing, closed, abandoned } state_ = State::open;

  Lanes lanes_;
  std::unique_ptr<cuda::Watcher> watcher_;
};

}  // namespace tensorferry
