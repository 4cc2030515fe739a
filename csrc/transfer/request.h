// One call of a user: its transfers, submitted at once or bit by bit, and the operations on their files after the data
// has moved. The request is done when all transfers and all operations on files are.
//
// Each file is truncated, made durable and closed, as far as the options ask for it, once and in this order. After
// that, the names of the files that the request created are made durable by one sync of each directory. All of this may
// block. The helper threads of the file's lane (lane.h) do it, or the caller's thread in a blocking call, but never a
// worker.
//
// A file is sealed once it gets no more transfers, and the request is sealed once it gets no more transfers at all.
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
#include <set>
#include <string>
#include <unordered_map>
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

  // Add transfers to the request, before they are submitted.
  void add(const std::vector<std::shared_ptr<Transfer>>& transfers);

  // Return the truncation ("cut") of a file that gets no more transfers. The caller must enter it in the WriteOrder
  // directly behind the file's transfers: a write of another request that entered in between could end before the
  // truncation, which would then cut off what was written. Its turn_has_come() must be called once it may begin; until
  // then the request is not done. Returns null if this request does not truncate the file, or if next_cut() returned
  // the truncation before.
  std::shared_ptr<OrderedWrite> next_cut(const File& file);

  // Return the truncation of `file` at the file offset `end`, or null if this request does not truncate the file. This
  // is for a request with a single transfer, which ends at `end` and is not yet added. Once the WriteOrder has let the
  // truncation begin, pass it to seal().
  std::shared_ptr<OrderedWrite> cut_behind(const File& file, uint64_t end);

  // Seal one file: it gets no more transfers. `begun` is its truncation, if that has entered the WriteOrder and may
  // begin.
  void seal(const File& file, std::shared_ptr<OrderedWrite> begun = nullptr);
  // Seal the request: it gets no more transfers. Files that were not sealed before are closed, but not truncated or
  // synced, because some of their transfers are missing. Code that drops an unsealed request must cancel and seal it
  // first.
  void seal();
  bool sealed();  // whether seal() was called

  // Record that a transfer has ended, and tell the scheduler that it is no longer outstanding. The last transfer of a
  // file stays outstanding until the operations on the file are done, because a caller that needs a free descriptor
  // waits for outstanding transfers. `lease` keeps the file open until then. `file` only identifies the file.
  void transfer_ended(const Transfer& transfer, const File* file, File::Lease lease);

  // Whether the request has operations on its files.
  bool uses_files() const { return options_.truncate || options_.sync || options_.close_files; }

  // Record that a transfer of this file was refused: the file must not be truncated or reported as durable.
  void refuse(const std::shared_ptr<File>& file);

  // For a blocking call with one file. leave_to_caller() declares that the caller's thread runs the operations on
  // files, instead of helpers. After the transfer has ended, that thread calls settle_files() until it returns true.
  // This runs the operations, which may block, and ends the request. It returns false if a signal arrived (see
  // InterruptionsReturned).
  bool settle_files();
  void leave_to_caller();

  // Null once the request is done.
  std::shared_ptr<Scheduler> scheduler();

  // The fork generation of the process that made the request.
  uint64_t fork_generation() const { return fork_generation_; }

 private:
  // The truncation of a file, as a member of the order of writes.
  class Cut;

  // The operations on one file. A Use is in uses_ while the file has unfinished transfers, and then in ready_ under its
  // lane. There a helper (or the caller) settles it: takes it and runs the operations on the file. If the file's name
  // must be made durable, the Use then waits in directories_ until the directory is synced.
  struct Use {
    std::shared_ptr<File> file;
    std::shared_ptr<Lane> lane;
    File::Lease lease = {};
    std::shared_ptr<OrderedWrite> cut = nullptr;  // the truncation, if the file is truncated
    uint64_t begin = UINT64_MAX;                  // the lowest file offset of the transfers
    uint64_t nbytes = 0;                          // of all transfers
    uint64_t moved_nbytes = 0;
    size_t index = SIZE_MAX;  // the lowest position of a transfer in the call
    size_t to_come = 1;       // events to wait for: the end of each transfer, the turn of the truncation, the seal
    bool sealed = false;      // no further transfer will be added
    bool failed = false;
    std::shared_ptr<Lane> counted_in = nullptr;  // once the use is ready: where it counts as outstanding
  };

  using Uses = std::vector<std::unique_ptr<Use>>;
  // A function for a helper thread of the lane.
  struct Job {
    std::shared_ptr<Lane> lane;
    std::function<void()> action;
  };

  // The outcome of the operations on a file.
  struct Done {
    bool interrupted = false;  // by a signal: the operations must be run again
    std::optional<Fault> fault = std::nullopt;
    std::optional<std::string> directory = std::nullopt;  // directory to be synced for the file's name
  };

  bool cuts(const File& file) const { return uses_files() && (options_.truncate || file.replaced()); }
  // Whether several helpers settle the files in parallel. They do so if files are synced or truncated, which takes
  // long. Requires mutex_.
  bool side_by_side() const { return options_.sync || cuts_any_; }
  Use& use_of(const std::shared_ptr<File>& file, const std::shared_ptr<Lane>& lane);

  // Record that one of the events that the file's use waits for has occurred. If it was the last one, returns the use
  // and removes it from uses_; otherwise returns null. Requires mutex_.
  std::unique_ptr<Use> count_down(const File& file);
  // Lock mutex_ and count down for an event other than the end of a transfer. If it was the last event, make the use
  // ready and count it as outstanding.
  void one_over(const File& file);

  // Call `change` with a list of jobs and mutex_ held. Then, without the lock, post the jobs that it has added to the
  // list, or announce the end of the request if nothing is open any more.
  template <typename Change>
  void change(Change change);
  // Move a use to ready_, after all its events have occurred. Add a job that settles it, unless an earlier job or the
  // caller's thread will do so. Requires mutex_.
  void make_ready(std::unique_ptr<Use> use, std::vector<Job>& jobs);
  // A job that runs `action`. The request is not done before the job has ended. Requires mutex_.
  Job job_of(std::shared_ptr<Lane> lane, std::function<void()> action);

  std::unique_ptr<Use> take_ready(const std::shared_ptr<Lane>& lane);
  bool settle_file(std::unique_ptr<Use> use);  // false: a signal arrived
  // Run the operations on the use's file. Without `cut`, the file is not truncated.
  Done act_on_file(Use& use, bool cut) const;
  void sync_names(const std::string& directory, const Uses& uses);
  void record(const Use& use, Fault fault);
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
  // The number of unfinished parts: the seal, transfers, uses, jobs, and the caller's settling. At zero, jobs are added
  // that sync the directories_; if there are none, the request is done.
  size_t open_ = 1;
  std::unordered_map<const File*, std::unique_ptr<Use>> uses_;
  std::map<std::shared_ptr<Lane>, std::deque<std::unique_ptr<Use>>> ready_;
  // The end of the last transfer of each file, where the file is truncated; and the files that must not be truncated,
  // because some transfer was refused or failed. Both are by identity, since one file may have several paths.
  std::map<FileIdentity, uint64_t> ends_;
  std::set<FileIdentity> incomplete_;
  // Directories in which the request created files, with the uses of these files. The first file of a directory stays
  // open until the directory is synced, because syncing may need its descriptor.
  std::map<std::string, Uses> directories_;
  std::map<size_t, Fault> faults_;
  std::vector<Listener> listeners_;
};

}  // namespace tensorferry
