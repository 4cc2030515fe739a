#include "transfer/request.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "base/after_fork.h"
#include "base/interruption.h"
#include "transfer/scheduler.h"
#include "transfer/transfer.h"

namespace tensorferry {
namespace {

// The limit of files that are kept open until their directories are synced.
constexpr size_t max_kept_open = 64;

}  // namespace

// Truncates everything behind the last byte written: see write_order.h.
class Request::Cut final : public OrderedWrite {
 public:
  Cut(std::shared_ptr<Request> request, const File& file, uint64_t size)
      : OrderedWrite(file.identity(), size, UINT64_MAX), request_(std::move(request)), file_(file) {}

  void turn_has_come() override { request_->one_over(file_); }

 private:
  const std::shared_ptr<Request> request_;
  const File& file_;  // the use that waits for this cut keeps it alive
};

Request::Request(std::shared_ptr<Scheduler> scheduler, const RequestOptions& options)
    : id_(scheduler->next_request_id()),
      options_(options),
      fork_generation_(tensorferry::fork_generation()),
      scheduler_(std::move(scheduler)) {}

Request::~Request() = default;

bool Request::wait_for(std::chrono::milliseconds timeout) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [&] { return done(); });
}

void Request::notify(Listener listener) {
  {
    std::lock_guard lock(mutex_);
    if (!done()) return listeners_.push_back(std::move(listener));
  }
  listener();
}

std::shared_ptr<Scheduler> Request::scheduler() {
  std::lock_guard lock(mutex_);
  return scheduler_;
}

void Request::add(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  std::lock_guard lock(mutex_);
  open_ += transfers.size();
  for (const auto& transfer : transfers) {
    nbytes_.fetch_add(transfer->nbytes(), std::memory_order_relaxed);
    if (!uses_files()) continue;
    Use& use = use_of(transfer->file(), transfer->lane());
    ++use.to_come;
    use.begin = std::min(use.begin, transfer->begin());
    auto& end = ends_[transfer->identity()];  // needed even if only another path of the file is truncated
    end = std::max(end, transfer->end());
    cuts_any_ = cuts_any_ || cuts(*transfer->file());
    use.nbytes += transfer->nbytes();
    use.index = std::min(use.index, transfer->index);
  }
}

Request::Use& Request::use_of(const std::shared_ptr<File>& file, const std::shared_ptr<Lane>& lane) {
  auto& use = uses_[file.get()];
  if (!use) {
    use = std::make_unique<Use>(Use{file, lane});
    ++open_;
  }
  return *use;
}

std::shared_ptr<OrderedWrite> Request::cut_behind(const File& file, uint64_t end) {
  return cuts(file) ? std::make_shared<Cut>(shared_from_this(), file, end) : nullptr;
}

std::shared_ptr<OrderedWrite> Request::next_cut(const File& file) {
  std::lock_guard lock(mutex_);
  auto found = uses_.find(&file);
  if (found == uses_.end() || found->second->sealed || found->second->cut) return nullptr;
  Use& use = *found->second;
  use.cut = cut_behind(file, ends_[file.identity()]);
  if (use.cut) ++use.to_come;
  return use.cut;
}

void Request::seal(const File& file, std::shared_ptr<OrderedWrite> begun) {
  if (!uses_files()) return;
  const auto cut = begun ? nullptr : next_cut(file);
  if (cut && WriteOrder::enter({cut}).front()) cut->turn_has_come();
  {
    std::lock_guard lock(mutex_);
    auto found = uses_.find(&file);
    if (found == uses_.end() || found->second->sealed) return;
    found->second->sealed = true;
    if (begun) found->second->cut = std::move(begun);
  }
  one_over(file);
}

void Request::seal() {
  std::vector<const File*> given_up;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(sealed_, true)) return;
    for (auto& [file, use] : uses_) {
      if (std::exchange(use->sealed, true)) continue;
      use->failed = true;  // not all transfers were added
      incomplete_.insert(file->identity());
      given_up.push_back(file);
    }
  }
  for (const File* file : given_up) one_over(*file);
  change([this](auto&) { --open_; });
}

bool Request::sealed() {
  std::lock_guard lock(mutex_);
  return sealed_;
}

std::unique_ptr<Request::Use> Request::count_down(const File& file) {
  auto found = uses_.find(&file);
  if (--found->second->to_come > 0) return nullptr;
  auto use = std::move(found->second);
  uses_.erase(found);
  return use;
}

void Request::one_over(const File& file) {
  std::unique_ptr<Use> ready;
  {
    std::lock_guard lock(mutex_);
    ready = count_down(file);
  }
  if (!ready) return;
  // The file's transfers are no longer outstanding, so the use itself counts as outstanding until the file is closed.
  ready->counted_in = ready->lane;
  scheduler()->one_more(*ready->lane);
  change([&](auto& jobs) { make_ready(std::move(ready), jobs); });
}

void Request::refuse(const std::shared_ptr<File>& file) {
  if (!uses_files()) return;
  const auto lane = scheduler()->lane_of(file->device());
  std::lock_guard lock(mutex_);
  use_of(file, lane).failed = true;
  incomplete_.insert(file->identity());
}

void Request::transfer_ended(const Transfer& transfer, const File* file, File::Lease lease) {
  std::unique_ptr<Use> ready;
  {
    std::lock_guard lock(mutex_);
    if (transfer.fault()) faults_.merge(transfer.faults());
    if (uses_files()) {
      Use& use = *uses_.at(file);
      use.moved_nbytes += transfer.moved_nbytes();
      if (!use.lease) use.lease = std::move(lease);
      if (transfer.fault()) {
        use.failed = true;
        incomplete_.insert(transfer.identity());
      }
      ready = count_down(*file);
    }
  }
  if (ready) {
    ready->counted_in = transfer.lane();  // the use is now outstanding in place of the transfer
  } else {
    // Count the transfer down before the request can be done: a caller that sees the request done must find none of its
    // transfers outstanding.
    scheduler()->one_less(*transfer.lane());
  }
  change([&](auto& jobs) {
    --open_;
    if (ready) make_ready(std::move(ready), jobs);
  });
}

template <typename Change>
void Request::change(Change change) {
  std::vector<Job> jobs;
  bool over;
  bool syncs;
  {
    std::lock_guard lock(mutex_);
    change(jobs);
    if (open_ == 0) {
      for (auto& [directory, uses] : std::exchange(directories_, {})) {
        auto lane = uses.front()->lane;
        auto shared = std::make_shared<Uses>(std::move(uses));  // std::function requires a copyable callable
        jobs.push_back(job_of(std::move(lane), [this, directory, shared] { sync_names(directory, *shared); }));
      }
    }
    over = open_ == 0;
    syncs = side_by_side();
  }
  for (Job& job : jobs) syncs ? job.lane->help_to_sync(std::move(job.action)) : job.lane->help(std::move(job.action));
  if (over) announce();
}

Request::Job Request::job_of(std::shared_ptr<Lane> lane, std::function<void()> action) {
  ++open_;
  return {std::move(lane), [self = shared_from_this(), action = std::move(action)] {
            action();
            self->change([&](auto&) { --self->open_; });
          }};
}

// If files are settled in parallel, each use has a job. Otherwise one job settles all ready uses of a lane, because the
// operations take hardly any time.
void Request::make_ready(std::unique_ptr<Use> use, std::vector<Job>& jobs) {
  const auto lane = use->lane;
  auto& ready = ready_[lane];
  ready.push_back(std::move(use));
  if (by_caller_ || (ready.size() > 1 && !side_by_side())) return;
  jobs.push_back(job_of(lane, [this, lane] {
    while (auto found = take_ready(lane)) (void)settle_file(std::move(found));
  }));
}

void Request::leave_to_caller() {
  std::lock_guard lock(mutex_);
  by_caller_ = true;
  ++open_;
}

bool Request::settle_files() {
  while (auto use = take_ready(nullptr)) {
    if (!settle_file(std::move(use))) return false;
  }
  std::map<std::string, Uses> directories;
  {
    std::lock_guard lock(mutex_);
    directories.swap(directories_);
  }
  const InterruptionsReturned by_nobody(false);  // an interrupted sync of a directory would be recorded as a fault
  for (const auto& [directory, uses] : directories) sync_names(directory, uses);
  change([this](auto&) {
    by_caller_ = false;
    --open_;
  });
  return true;
}

// Take a ready use of this lane, or return null if there is none. A null `lane` means any lane. The thread of a
// blocking call passes null, because its request has only one file.
std::unique_ptr<Request::Use> Request::take_ready(const std::shared_ptr<Lane>& lane) {
  std::lock_guard lock(mutex_);
  auto found = lane ? ready_.find(lane) : ready_.begin();
  if (found == ready_.end() || found->second.empty()) return nullptr;
  auto use = std::move(found->second.front());
  found->second.pop_front();
  return use;
}

bool Request::settle_file(std::unique_ptr<Use> use) {
  bool cut;
  {
    std::lock_guard lock(mutex_);
    cut = !incomplete_.contains(use->file->identity());
  }
  const auto scheduler = this->scheduler();
  const auto counted_in = use->counted_in;
  Done done = act_on_file(*use, cut);
  if (done.interrupted) {
    std::lock_guard lock(mutex_);
    ready_[use->lane].push_front(std::move(use));
    return false;
  }
  bool kept = false;
  if (done.directory) {
    // Syncing a directory may need the descriptor of one file in it, so the first file of each directory stays open,
    // for a limited number of directories. All other files are closed here, if the request closes its files.
    std::lock_guard lock(mutex_);
    Uses& there = directories_[*done.directory];
    kept = !options_.close_files || (there.empty() && directories_.size() <= max_kept_open);
    if (kept) there.push_back(std::move(use));
  }
  if (done.directory && !kept) done.fault = use->file->close();
  if (!kept) {
    std::lock_guard lock(mutex_);
    if (done.fault) record(*use, std::move(*done.fault));
    if (done.directory) directories_[*done.directory].push_back(std::move(use));
  }
  use.reset();  // releases the lease as well
  scheduler->one_less(*counted_in);
  std::lock_guard lock(mutex_);
  --open_;
  return true;
}

Request::Done Request::act_on_file(Use& use, bool cut) const {
  File& file = *use.file;
  std::optional<Fault> fault;
  const auto interrupted = [&] { return fault && fault->error_number == EINTR && interruptions_are_returned; };
  if (!use.failed && use.cut && canceled()) fault = Fault{.error_number = ECANCELED, .operation = "truncate"};
  if (!use.failed && !fault && cut && use.cut) fault = file.end_at(use.cut->begin());
  if (interrupted()) return {.interrupted = true};
  if (use.cut) WriteOrder::leave(*std::exchange(use.cut, nullptr));
  if (!use.failed && !fault && options_.sync) {
    const bool given_up = canceled() && interruptions_are_returned;
    fault = given_up ? Fault{.error_number = ECANCELED, .operation = "fdatasync"} : file.sync();
  }
  if (interrupted()) return {.interrupted = true};
  if (!use.failed && !fault && options_.sync && options_.sync_names && file.name_made()) {
    auto directory = file.directory();
    if (directory) return {.directory = std::move(*directory)};
    fault = directory.fault();
  }
  if (options_.close_files) {
    auto failed = file.close();
    if (!use.failed && !fault) fault = std::move(failed);
  }
  return {.fault = std::move(fault)};
}

void Request::sync_names(const std::string& directory, const Uses& uses) {
  File& first = *uses.front()->file;
  const auto failed = sync_directory(directory, first.descriptor(), first.path());
  for (const auto& use : uses) {
    std::optional<Fault> fault = failed;
    if (!fault) use->file->name_durable();
    if (options_.close_files) {
      auto unclosed = use->file->close();
      if (!fault) fault = std::move(unclosed);
    }
    if (!fault) continue;
    std::lock_guard lock(mutex_);
    record(*use, std::move(*fault));
  }
}

void Request::record(const Use& use, Fault fault) {
  fault.path = use.file->path();
  fault.offset = use.begin;
  fault.expected = use.nbytes;
  fault.transferred = use.moved_nbytes;
  faults_.emplace(use.index, std::move(fault));
}

void Request::announce() {
  const auto scheduler = this->scheduler();
  scheduler->count_request(*this);
  std::vector<Listener> listeners;
  {
    std::lock_guard lock(mutex_);
    // done_ is set under the lock, so neither wait_for() nor notify() can miss the end of the request. The release
    // order publishes faults_ to threads that see done().
    done_.store(true, std::memory_order_release);
    scheduler_.reset();
    ready_.clear();  // a request that is still referenced must not keep its lanes
    listeners.swap(listeners_);
    finished_.notify_all();
  }
  for (const auto& listener : listeners) listener();
  // Only now, so that all requests are done, and all their listeners called, when the scheduler is idle.
  scheduler->request_over(*this);
}

}  // namespace tensorferry
