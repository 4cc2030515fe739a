// One call of a user: transfers, handed over at once or bit by bit, and what is to be done with their files when the
// bytes are where they belong. It is done when all of that is.
//
// What is done with a file, once for each file of the request and in this order: cut it, make it durable, close it; and
// when all files are through, make the names durable that the request made, once for each directory. All of this may
// block, so helpers do it, or the caller of a blocking call; a thread that drives a queue never does.
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
  bool truncate = false;     // after success, cut each file behind the last byte written; else those replaced() only
  bool sync = false;         // data, sizes and new names durable before the request is done
  bool sync_names = true;    // else not the names
  bool close_files = false;  // the files were opened for this request
  bool background = false;   // let others go first
};

class Request : public std::enable_shared_from_this<Request> {
 public:
  Request(std::shared_ptr<Scheduler> scheduler, const RequestOptions& options);
  ~Request();

  uint64_t id() const { return id_; }
  const RequestOptions& options() const { return options_; }
  bool done() const { return done_.load(std::memory_order_acquire); }

  // Bytes of all its transfers so far.
  uint64_t nbytes() const { return nbytes_.load(std::memory_order_relaxed); }

  // Returns whether it is done.
  bool wait_for(std::chrono::milliseconds timeout);

  // Blocks that have not been handed to the kernel never will be, and no file is cut any more; the request ends, with
  // ECANCELED, when those that have been are done.
  void cancel() { canceled_.store(true, std::memory_order_relaxed); }
  bool canceled() const { return canceled_.load(std::memory_order_relaxed); }

  // What went wrong with which of its transfers, by their positions in the call. Valid once done.
  const std::map<size_t, Fault>& faults() const { return faults_; }
  const Fault* fault() const { return faults_.empty() ? nullptr : &faults_.begin()->second; }  // the first

  // Calls `listener` when done, at once if it is already. It must not block, nor keep the request.
  using Listener = std::function<void()>;
  void notify(Listener listener);

  // --- for the scheduler ---

  // Before the transfers are handed over.
  void add(const std::vector<std::shared_ptr<Transfer>>& transfers);

  // What cuts a file of which no transfer comes any more, to enter the order of writes right behind them: else a write
  // that was submitted later could end before it. Null where the file is not cut, or that was asked for before. Once
  // it may begin, turn_has_come().
  std::shared_ptr<OrderedWrite> next_cut(const File& file);

  // The same for the only transfer, which ends at `end`, before it was added; seal() is to be told once it has begun.
  std::shared_ptr<OrderedWrite> cut_behind(const File& file, uint64_t end);

  // No transfer of this file comes any more; of no file. A file that was not sealed is given up: it is closed only.
  // Whoever drops a request that was not sealed must cancel and seal it.
  void seal(const File& file, std::shared_ptr<OrderedWrite> begun = nullptr);
  void seal();
  bool sealed();

  // A transfer has ended. It counts as over, unless it is the last one with its file: then when that is settled, since
  // who waits for descriptors waits for what is outstanding.
  // `lease` on its file is kept until then.
  void transfer_ended(const Transfer& transfer, const File* file, File::Lease lease);

  // Whether anything is to be done with the files.
  bool uses_files() const { return options_.truncate || options_.sync || options_.close_files; }

  // A transfer of this file was refused: the file is not to be cut, and not called durable.
  void refuse(const std::shared_ptr<File>& file);

  // Does what is due with files, and tells everybody if the request is over by that. Blocks. Helpers do this by
  // themselves; after leave_to_caller() the caller calls it, until it returns true: false says that a signal came (see
  // InterruptionsReturned).
  bool settle_files();
  void leave_to_caller();

  // Null once done.
  std::shared_ptr<Scheduler> scheduler();

  // Of the process in which it was made.
  uint64_t fork_generation() const { return fork_generation_; }

 private:
  // Cutting a file, in its turn among the writes to what is cut off.
  class Cut;

  // What the request does with one file. It is in uses_ as long as something of it is to come, then ready at its lane,
  // and over when a helper (or the caller) has settled it; or when its directory has been synced, if it made a name.
  struct Use {
    std::shared_ptr<File> file;
    std::shared_ptr<Lane> lane;
    File::Lease lease = {};
    std::shared_ptr<OrderedWrite> cut = nullptr;
    uint64_t begin = UINT64_MAX;
    uint64_t nbytes = 0;
    uint64_t moved_nbytes = 0;
    size_t index = SIZE_MAX;  // of its first transfer
    size_t to_come = 1;       // what has to end before its turn comes: transfers, its cut's turn, its seal
    bool sealed = false;      // no transfer is still to come
    bool failed = false;
    std::shared_ptr<Lane> counted_in = nullptr;  // where it is outstanding, once its turn has come
  };

  using Uses = std::vector<std::unique_ptr<Use>>;
  struct Job {
    std::shared_ptr<Lane> lane;
    std::function<void()> action;
  };

  // What has been done with a file.
  struct Done {
    bool interrupted = false;  // by a signal: it is to be done again
    std::optional<Fault> fault = std::nullopt;
    std::optional<std::string> directory = std::nullopt;  // which is still to be synced, for the file's name
  };

  bool cuts(const File& file) const { return options_.truncate || file.replaced(); }
  bool side_by_side() const { return options_.sync || cuts_any_; }  // with mutex_ held
  Use& use_of(const std::shared_ptr<File>& file, const std::shared_ptr<Lane>& lane);

  // With mutex_ held: of what a use waited for one is over. Null: it waits for more.
  std::unique_ptr<Use> count_down(const File& file);
  void one_over(const File& file);

  // Makes a change with the lock held, and then without it does what follows: posts jobs, or tells that all is over.
  template <typename Change>
  void change(Change change);
  // With mutex_ held: its turn has come; what is to be posted.
  void make_ready(std::unique_ptr<Use> use, std::vector<Job>& jobs);
  Job job_of(std::shared_ptr<Lane> lane, std::function<void()> action);

  std::unique_ptr<Use> take_ready(const std::shared_ptr<Lane>& lane);
  bool settle_file(std::unique_ptr<Use> use);  // false: a signal came
  Done act_on_file(Use& use, bool cut) const;
  void sync_names(const std::string& directory, const Uses& uses);
  void record(const Use& use, Fault fault);
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
  bool by_caller_ = false;  // who settles what is ready, and no helper does
  bool cuts_any_ = false;
  // What has to end before the request does: the seal, transfers, uses, jobs, and the caller's settling. Names are made
  // durable when nothing else is left.
  size_t open_ = 1;
  std::unordered_map<const File*, std::unique_ptr<Use>> uses_;
  std::map<std::shared_ptr<Lane>, std::deque<std::unique_ptr<Use>>> ready_;
  // By identity, since one file may go by several names: where it is to be cut; of which not all was written.
  std::map<FileIdentity, uint64_t> ends_;
  std::set<FileIdentity> incomplete_;
  // Where the request made names, each with the files in it, the first of which is kept open until they are durable.
  std::map<std::string, Uses> directories_;
  std::map<size_t, Fault> faults_;
  std::vector<Listener> listeners_;
};

}  // namespace tensorferry
