// Admission of transfers, the limit of outstanding ones, and how they end.
//
// A transfer is first admitted, which means that it is counted as outstanding in the lane of its device (lane.h).
// close() waits for all outstanding transfers, and admits no further ones. A submitted transfer then gets in line in
// its lane. Each worker of the lane takes the block that is next in line whenever its engine has room for another
// block. Blocks therefore spread over the workers, and the last blocks of one request are in flight together with the
// first ones of the next.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
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

// The bytes that must be in flight to use a fast network, of 4 GB/s, with the given latency.
inline uint64_t nbytes_on_their_way(std::chrono::nanoseconds latency) {
  return 4 * static_cast<uint64_t>(latency.count());
}

struct SchedulerOptions {
  std::string engine;  // empty: the first that works
  uint64_t block_nbytes = uint64_t{1} << 20;
  uint64_t large_block_nbytes = uint64_t{1} << 20;  // for large requests: see block_nbytes_for()
  uint32_t queue_depth = 128;                       // of each worker's engine: blocks that it may have at the same time
  uint32_t worker_count = 1;                        // of each queue
  bool single_submit = false;                       // one system call for each block
  uint32_t copier_count = default_copier_count();   // threads for each device that copy concurrently with its workers
  size_t max_lanes = 16;                            // further devices share lanes
  std::chrono::milliseconds idle_patience{5000};    // an unused lane is destroyed after this time

  // Half of the processors less one, and at most three. On two processors there is none, because workers, callers and
  // the kernel's own work keep both busy: copying concurrently with the worker made a transfer a tenth slower and cost
  // a fifth more CPU time. More than three would be useless, because together they use the memory bandwidth.
  static uint32_t default_copier_count() {
    return std::min(std::max(std::thread::hardware_concurrency() / 2, 1u) - 1, 3u);
  }

  // The limit of the bytes that one worker has in flight in blocks straight from or to callers' memory. It is less than
  // a full queue of large blocks: eight large blocks keep a drive as busy as a full queue does (measured: 2.3 GB/s with
  // 32 MiB and with 128), and a small request waits behind fewer bytes. The limit is higher if a single read takes a
  // long `latency`.
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
  // The maximum number of outstanding transfers of one lane. Further submissions wait.
  static constexpr size_t max_outstanding = 16384;

  // Create a scheduler with the first engine that works; null if none does. `refusals` gets the engines that were tried
  // before, with the reasons why they do not work.
  static std::shared_ptr<Scheduler> create(const SchedulerOptions& options, std::vector<EngineRefusal>& refusals);

  ~Scheduler();

  const char* engine_name() const { return lanes_.engine_kind().name; }
  const SchedulerOptions& options() const { return options_; }
  Statistics& statistics() { return statistics_; }

  // The block size for a request of this size. With large blocks a large request needs fewer submissions, and has the
  // same bytes in flight.
  uint64_t block_nbytes_for(uint64_t request_nbytes) const {
    const bool large = request_nbytes / options_.worker_count >= 16 * options_.large_block_nbytes;
    return large ? options_.large_block_nbytes : options_.block_nbytes;
  }
  uint64_t next_request_id() { return ++last_request_id_; }

  enum class Admission { admitted, full, closed };

  // A number of transfers in one lane.
  struct Places {
    std::shared_ptr<Lane> lane;
    size_t count;
  };

  // Wait until every lane has room for its transfers, and count them as outstanding (`admitted`). Returns `full`,
  // counting nothing, if the timeout expires first, and `closed` if the scheduler accepts no more transfers. An
  // admitted transfer must later be submitted, or its place be given up by take_back().
  //
  // Callers are admitted in turn, so none waits forever while later ones go on. `ticket` is the caller's turn: 0 at its
  // first call, and kept by it until it is admitted. A ticket holds others back only during a call of admit(): in
  // between the caller runs signal handlers, which may submit transfers as well.
  Admission admit(const std::vector<Places>& places, std::chrono::milliseconds timeout, uint64_t& ticket);
  Admission admit(const std::vector<Places>& places, std::chrono::milliseconds timeout) {
    uint64_t ticket = 0;
    return admit(places, timeout, ticket);
  }
  void take_back(const std::vector<Places>& places);

  // Wait until an outstanding transfer ends; false on timeout. Returns true at once if none is outstanding.
  bool wait_for_progress(std::chrono::milliseconds timeout);

  // The lane of a device (File::device()); at the limit of lanes, that of another device, which the two then share.
  std::shared_ptr<Lane> lane_of(uint64_t device) { return lanes_.of(device); }
  size_t lane_count() const { return lanes_.count(); }

  // Start the watcher, a thread that waits for GPUs (device/watcher.h), unless it is running. This must succeed before
  // transfers of GPU memory are submitted and before watcher() is called.
  std::optional<Fault> prepare_for_gpus();
  cuda::Watcher& watcher() { return *watcher_; }

  // Submit admitted transfers of a request: all transfers of their files. For `incomplete` and `ordered` see
  // Request::add().
  void submit(const std::shared_ptr<Request>& request, const std::vector<std::shared_ptr<Transfer>>& transfers,
              const std::vector<std::shared_ptr<File>>& incomplete = {},
              std::shared_ptr<OrderedWrite> ordered = nullptr);

  // A small transfer that the thread of a blocking call runs itself, with its block and the block's next step.
  struct Inline {
    std::shared_ptr<Transfer> transfer;
    WorkBlock block;
    Step step = Step::done;
  };
  // For a blocking call: begin to run the only transfer of a request on this thread, and return whether that is
  // possible. If true, the transfer is added to the request and the request is sealed; call go_on(), and after it
  // Request::settle_files(). If false, submit the transfer, and call share() to work on it together with the workers.
  // With `only_cached`, returns false if the transfer would have to wait for a device.
  bool try_inline(const std::shared_ptr<Transfer>& transfer, Inline& taken, bool only_cached = false);

  // Run the transfer of a successful try_inline() to its end and return true. Returns false if a signal arrived (see
  // InterruptionsReturned): a helper then runs the rest. The transfer has a place in the WriteOrder, and a signal
  // handler that writes to the same file would otherwise wait for it forever.
  bool go_on(Inline& taken);

  // For an asynchronous call, which must not wait: if the transfer is a small read of cached data, run it and its
  // request to their end on this thread. Returns whether it did.
  bool try_cached(const std::shared_ptr<Transfer>& transfer);

  // Put a submitted transfer in its lane's line, at once or as soon as the work that is queued for its GPU memory has
  // completed. Called for a write once it no longer has to wait for an overlapping one.
  void line_up(const std::shared_ptr<Transfer>& transfer);

  // Help the workers with a submitted transfer of a file in memory: take blocks of it and copy them on this thread.
  // Returns true if this thread has nothing more to do: no block is left, a block went to a helper because it must wait
  // for bounce memory, or the file is not in memory. Returns false if the time is over; the caller may call again.
  bool share(const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout);

  // The ids of requests that finished since the last call, and the ids that were passed to let_go() since then.
  std::vector<uint64_t> take_finished();
  // Call `listener`, which must not block, on a thread of the core whenever there are such ids. Set before any use.
  void on_finished(std::function<void()> listener) { on_finished_ = std::move(listener); }

  size_t outstanding() const;

  // Admit no more transfers from now on. This is for a caller that then waits, in steps of wait_until_idle(), before it
  // calls close().
  void refuse();
  // Wait until nothing is outstanding. Returns false on timeout.
  bool wait_until_idle(std::chrono::milliseconds timeout);
  // A number that changes whenever bytes have moved or a transfer has ended.
  uint64_t progress() const;

  // End the workers, or detach them if a transfer is still outstanding. Returns whether everything has ended.
  // Concurrent calls wait for the first one.
  bool close();

  // Run a CPU-bound job on another thread: see the functions of Lanes with these names.
  void help_to_touch(Helpers::Job job) { lanes_.help_to_touch(std::move(job)); }
  bool help_to_copy(Helpers::Job job) { return lanes_.help_to_copy(std::move(job)); }

  // one_more() counts work of a lane (a transfer or other work) as outstanding, so close() waits for it. one_less()
  // counts it as ended.
  void one_more(Lane& lane);
  bool one_more_if_open(Lane& lane);  // false: the scheduler is being closed
  void one_less(Lane& lane);

  // Refer to a request until request_over().
  void keep(const std::shared_ptr<Request>& request);
  // Count a request that is about to be done.
  void count_request(const Request& request);
  // Forget a request that is done. take_finished() will return its id.
  void request_over(const Request& request);

  // Make take_finished() return `id`, which is from next_request_id() but belongs to no request. The bindings keep the
  // memory of an aborted stream under such an id, and release it then.
  void let_go(uint64_t id);

  // False in a forked child, which has no workers and must not wait for them.
  bool belongs_to_this_process() const;

 private:
  friend class Queue;
  friend class Worker;
  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  explicit Scheduler(const SchedulerOptions& options);

  void end_if_abandoned();  // requires mutex_: once all work has ended, let the threads that were left behind end
  static bool has_room(const Places& wanted);  // requires mutex_
  // Whether the caller of one admit() holds back that of another one, with a later ticket. Requires mutex_.
  static bool holds_back(const std::vector<Places>& earlier, const std::vector<Places>& later);
  bool is_idle() const { return outstanding_ == 0 && requests_.empty(); }  // requires mutex_

  bool move_cached(Inline& taken);
  void drop(WorkBlock& block);  // requires that the block is settled or has failed
  Step run_now(WorkBlock& block, Step step);
  Step run_on(WorkBlock& block, Step step);  // runs all steps on this thread, unless a signal arrives
  bool may_line_up(const std::shared_ptr<Transfer>& transfer);
  void drive(WorkBlock& block);  // runs the whole block on this thread, waiting for bounce memory if necessary
  void run_to_end(WorkBlock& block, Step step);
  void end_transfer(const std::shared_ptr<Transfer>& transfer);
  void move_singly(Transfer& joined);  // moves each item of a failed joined transfer separately; may block
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
  std::map<uint64_t, const std::vector<Places>*> waiting_;  // the callers in admit(), by their tickets
  uint64_t last_ticket_ = 0;
  std::function<void()> on_finished_ = [] {};
  uint64_t completed_ = 0;  // ended work and requests, for progress()
  enum class State { open, refusing, closing, closed, abandoned } state_ = State::open;

  Lanes lanes_;
  std::unique_ptr<cuda::Watcher> watcher_;
};

}  // namespace tensorferry
