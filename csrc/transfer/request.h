// One call of a user: its transfers, submitted at once or bit by bit, and the operations on their files after the data
// has moved. The request is done when all transfers and all operations on files are.
//
// Each file is truncated, made durable and closed, as far as the options ask for it, once and in this order. After
// that, the names of the files that the request created are made durable by one sync of each directory. All of this may
// block. The helper threads of the file's lane (lane.h) do it, or the caller's thread in a blocking call, but never a
// worker.
//
// The transfers of one file, known by its identity rather than by a path, are one unit: they are submitted together or
// not at all. What the call promises for a file therefore holds for all of its items, also if they use several paths
// (hard links) of it. The request is sealed once it gets no more transfers at all.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "file/file.h"
#include "transfer/write_order.h"

namespace tensorferry {

class Lane;
class Scheduler;
class Transfer;

struct RequestOptions {
  bool write = false;
  // After success, truncate each file behind the last byte written; false: only files that are replaced().
  bool truncate = false;
  bool sync = false;         // data, sizes and new names durable before the request is done
  bool sync_names = true;    // with `sync`; false: make the data durable, but not the names of new files
  bool close_files = false;  // the files were opened for this request
  bool background = false;   // requests that are not in the background go first

  // Whether there are operations on the files after the transfers.
  bool uses_files() const { return truncate || sync || close_files; }
  // Whether this file is truncated. Devices are never truncated.
  bool cuts(const File& file) const { return uses_files() && file.regular() && (truncate || file.replaced()); }
};

class Request : public std::enable_shared_from_this<Request> {
 public:
  Request(std::shared_ptr<Scheduler> scheduler, const RequestOptions& options);
  ~Request();

  uint64_t id() const { return id_; }
  const RequestOptions& options() const { return options_; }
  bool done() const { return done_.load(std::memory_order_acquire); }

  // The bytes of all transfers so far.
  uint64_t nbytes() const { return nbytes_.load(std::memory_order_relaxed); }

  // Wait until the request is done. Returns false if it is not done when the timeout expires.
  bool wait_for(std::chrono::milliseconds timeout);

  // Cancel the request: blocks that were not yet passed to the kernel are dropped, and no file is truncated any more.
  // Once the blocks that the kernel has are done, the request ends with ECANCELED, unless nothing was dropped.
  void cancel() { canceled_.store(true, std::memory_order_relaxed); }
  bool canceled() const { return canceled_.load(std::memory_order_relaxed); }

  // The faults, by the positions of their items in the call. Valid once the request is done.
  const std::map<size_t, Fault>& faults() const { return faults_; }
  // The fault with the lowest position; null if there is none.
  const Fault* fault() const { return faults_.empty() ? nullptr : &faults_.begin()->second; }

  // Call `listener` when the request is done, or at once if it is done already. The listener must not block or hold a
  // reference to the request.
  using Listener = std::function<void()>;
  void notify(Listener listener);

  // --- for the scheduler ---

  // Add transfers to the request, before they are submitted: all transfers of their files. `incomplete` are files of
  // which an item was refused, so they must not be truncated or reported as durable. Returns the truncations ("cuts")
  // of the files. The caller must enter these in the WriteOrder directly behind the transfers: a write of another
  // request that entered in between could end before the truncation, which would then cut off what was written. The
  // turn_has_come() of each must be called once it may begin; until then the request is not done. `ordered` is such a
  // truncation of the only file, if it has its turn already; it is then not among those that are returned.
  std::vector<std::shared_ptr<OrderedWrite>> add(const std::vector<std::shared_ptr<Transfer>>& transfers,
                                                 const std::vector<std::shared_ptr<File>>& incomplete = {},
                                                 std::shared_ptr<OrderedWrite> ordered = nullptr);

  // Seal the request: it gets no more transfers. Code that drops an unsealed request must cancel and seal it first.
  void seal();
  bool sealed();  // whether seal() was called

  // Record that a transfer has ended, and tell the scheduler that it is no longer outstanding. The last transfer of a
  // file stays outstanding until the operations on the file are done, because a caller that needs a free descriptor
  // waits for outstanding transfers. `lease` keeps the file open until then. `file` only identifies the file.
  void transfer_ended(const Transfer& transfer, const File* file, File::Lease lease);

  // For a blocking call with one file. leave_to_caller() declares that the caller's thread runs the operations on
  // files, instead of helpers. After the transfer has ended, that thread calls settle_files(), which runs the
  // operations, which may block, and ends the request. Returns false if a signal arrived (see InterruptionsReturned):
  // helpers then run what is left.
  bool settle_files();
  void leave_to_caller();
  void leave_to_helpers();

  // Null once the request is done.
  std::shared_ptr<Scheduler> scheduler();

  // The fork generation of the process that made the request.
  uint64_t fork_generation() const { return fork_generation_; }

 private:
  // The truncation of a file, as a member of the order of writes.
  class Cut;

  // One open file of a unit.
  struct Name {
    std::shared_ptr<File> file;
    File::Lease lease = {};
  };

 public:
  // The operations on one file. Its transfers and its truncation refer to it until they have ended. It is then in
  // ready_ under its lane, where a helper (or the caller) settles it: takes it and runs the operations. Names that must
  // be made durable then wait in directories_ until their directory is synced.
  struct Unit {
    std::shared_ptr<Lane> lane;
    std::vector<Name> names = {};                 // nearly always one
    std::shared_ptr<OrderedWrite> cut = nullptr;  // the truncation, if the file is truncated
    uint64_t begin = UINT64_MAX;                  // the lowest file offset of the transfers
    uint64_t end = 0;                             // the end of the last one
    uint64_t nbytes = 0;                          // of all transfers
    uint64_t moved_nbytes = 0;
    size_t index = SIZE_MAX;  // the lowest position of a transfer in the call
    size_t to_come = 0;       // events to wait for: the end of each transfer, the turn of the truncation
    bool failed = false;
    std::shared_ptr<Lane> counted_in = nullptr;  // once the unit is ready: where it counts as outstanding
  };

 private:
  // A function for a helper thread of the lane.
  struct Job {
    std::shared_ptr<Lane> lane;
    std::function<void()> action;
  };
  // A name that waits for the sync of its directory.
  struct Undurable {
    std::shared_ptr<Unit> unit;
    Name name;
  };

  // Whether several helpers settle the files in parallel. They do so if files are synced or truncated, which takes
  // long. Requires mutex_.
  bool side_by_side() const { return options_.sync || cuts_any_; }

  // Record that the truncation of this file may begin.
  void may_cut(const std::shared_ptr<Unit>& unit);

  // Call `change` with a list of jobs and mutex_ held. Then, without the lock, post the jobs that it has added to the
  // list, or announce the end of the request if nothing is open any more.
  template <typename Change>
  void change(Change change);
  // Move a unit to ready_, after all its events have occurred. Add a job that settles it, unless an earlier job or the
  // caller's thread will do so. Requires mutex_.
  void make_ready(std::shared_ptr<Unit> unit, std::vector<Job>& jobs);
  // A job that settles the ready units of a lane. The request is not done before it has ended. Requires mutex_.
  Job settling(std::shared_ptr<Lane> lane);
  Job job_of(std::shared_ptr<Lane> lane, std::function<void()> action);

  std::shared_ptr<Unit> take_ready(const std::shared_ptr<Lane>& lane);
  bool settle_file(const std::shared_ptr<Unit>& unit);  // false: a signal arrived
  // Truncate and sync the unit's file. Returns whether a signal arrived, and otherwise sets `fault`.
  bool is_interrupted_in(Unit& unit, std::optional<Fault>& fault) const;
  // Close one of the unit's files, or keep it until the directory of its name has been synced.
  void end_name(const std::shared_ptr<Unit>& unit, Name name, std::optional<Fault> fault);
  void sync_names(const std::string& directory, std::vector<Undurable>& names);
  void record(const Unit& unit, const File& file, Fault fault);
  // End the request: wake threads in wait_for(), and call the listeners.
  void announce();

  const uint64_t id_;
  const RequestOptions options_;
  const uint64_t fork_generation_;
  std::atomic<bool> done_{false};
  std::atomic<bool> canceled_{false};
  std::atomic<uint64_t> nbytes_{0};

  std::mutex mutex_;
  std::condition_variable finished_;
  std::shared_ptr<Scheduler> scheduler_;
  bool sealed_ = false;
  bool by_caller_ = false;  // the caller's thread settles ready files, in place of helpers
  bool cuts_any_ = false;
  // The number of unfinished parts: the seal, transfers, units, jobs, and the caller's settling. At zero, a job is
  // added that syncs the directories_; if there are none, the request is done.
  size_t open_ = 1;
  std::map<std::shared_ptr<Lane>, std::deque<std::shared_ptr<Unit>>> ready_;
  // Directories in which the request created files, with these files. The first file of a directory stays open until
  // the directory is synced, because syncing may need its descriptor.
  std::map<std::string, std::vector<Undurable>> directories_;
  std::map<size_t, Fault> faults_;
  std::vector<Listener> listeners_;
};

}  // namespace tensorferry
