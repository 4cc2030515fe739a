#include "transfer/request.h"

#include <errno.h>

#include <algorithm>
#include <utility>

#include "base/after_fork.h"
#include "base/interruption.h"
#include "base/reserve.h"
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
  Cut(std::shared_ptr<Request> request, std::shared_ptr<Unit> unit, const FileIdentity& file)
      : OrderedWrite(file, unit->end, UINT64_MAX), request_(std::move(request)), unit_(std::move(unit)) {}

  void turn_has_come() override { request_->may_cut(std::exchange(unit_, nullptr)); }

 private:
  const std::shared_ptr<Request> request_;
  std::shared_ptr<Unit> unit_;  // until its turn: the unit refers to its cut
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

std::vector<std::shared_ptr<OrderedWrite>> Request::add(const std::vector<std::shared_ptr<Transfer>>& transfers,
                                                        const std::vector<std::shared_ptr<File>>& incomplete,
                                                        std::shared_ptr<OrderedWrite> ordered) {
  std::vector<std::shared_ptr<OrderedWrite>> cuts_to_come;
  std::map<FileIdentity, std::shared_ptr<Unit>> units;
  uint64_t nbytes = 0;
  const auto is_name_of = [](const File* file) { return [file](const Name& name) { return name.file.get() == file; }; };
  const auto add_name = [&](Unit& unit, const std::shared_ptr<File>& file) {
    if (std::ranges::none_of(unit.names, is_name_of(file.get()))) unit.names.push_back({file});
  };
  for (const auto& transfer : transfers) {
    nbytes += transfer->nbytes();
    if (!options_.uses_files()) continue;
    auto& unit = units[transfer->identity()];
    if (!unit) unit = std::make_shared<Unit>(Unit{transfer->lane()});
    add_name(*unit, transfer->file());
    transfer->unit = unit;
    ++unit->to_come;
    unit->begin = std::min(unit->begin, transfer->begin());
    unit->end = std::max(unit->end, transfer->end());
    unit->nbytes += transfer->nbytes();
    unit->index = std::min(unit->index, transfer->index);
  }
  for (const auto& file : incomplete) {
    const auto found = units.find(file->identity());
    if (found == units.end()) continue;  // none of its items was accepted, so the caller's reference is the last
    found->second->failed = true;
    add_name(*found->second, file);
  }
  for (const auto& [identity, unit] : units) {
    if (ordered) {
      unit->cut = std::move(ordered);
    } else if (std::ranges::any_of(unit->names, [&](const Name& name) { return options_.cuts(*name.file); })) {
      unit->cut = std::make_shared<Cut>(shared_from_this(), unit, identity);
      ++unit->to_come;
      cuts_to_come.push_back(unit->cut);
    }
  }
  std::lock_guard lock(mutex_);
  nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
  open_ += transfers.size() + units.size();
  cuts_any_ = cuts_any_ || !cuts_to_come.empty();
  return cuts_to_come;
}

void Request::seal() {
  const UsesReserve reserve;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(sealed_, true)) return;
  }
  change([this](auto&) { --open_; });
}

bool Request::sealed() {
  std::lock_guard lock(mutex_);
  return sealed_;
}

void Request::may_cut(const std::shared_ptr<Unit>& unit) {
  {
    std::lock_guard lock(mutex_);
    if (--unit->to_come > 0) return;
  }
  // The file's transfers are no longer outstanding, so the unit itself counts as outstanding until the file is closed.
  unit->counted_in = unit->lane;
  scheduler()->one_more(*unit->lane);
  change([&](auto& jobs) { make_ready(unit, jobs); });
}

void Request::transfer_ended(const Transfer& transfer, const File* file, File::Lease lease) {
  const auto& unit = transfer.unit;
  bool ready = false;
  {
    std::lock_guard lock(mutex_);
    if (transfer.fault()) faults_.merge(transfer.faults());
    if (unit) {
      unit->moved_nbytes += transfer.moved_nbytes();
      for (Name& name : unit->names) {
        if (name.file.get() == file && !name.lease) name.lease = std::move(lease);
      }
      unit->failed = unit->failed || transfer.fault();
      ready = --unit->to_come == 0;
    }
  }
  if (ready) {
    unit->counted_in = transfer.lane();  // the unit is now outstanding in place of the transfer
  } else {
    // Count the transfer down before the request can be done: a caller that sees the request done must find none of its
    // transfers outstanding.
    scheduler()->one_less(*transfer.lane());
  }
  change([&](auto& jobs) {
    --open_;
    if (ready) make_ready(unit, jobs);
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
      for (auto& [directory, names] : std::exchange(directories_, {})) {
        auto lane = names.front().unit->lane;
        auto shared = std::make_shared<std::vector<Undurable>>(std::move(names));  // a std::function must be copyable
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

Request::Job Request::settling(std::shared_ptr<Lane> lane) {
  return job_of(lane, [this, lane] {
    while (const auto unit = take_ready(lane)) (void)settle_file(unit);
  });
}

// If files are settled in parallel, each unit has a job. Otherwise one job settles all ready units of a lane, because
// the operations take hardly any time.
void Request::make_ready(std::shared_ptr<Unit> unit, std::vector<Job>& jobs) {
  const auto lane = unit->lane;
  auto& ready = ready_[lane];
  ready.push_back(std::move(unit));
  if (by_caller_ || (ready.size() > 1 && !side_by_side())) return;
  jobs.push_back(settling(lane));
}

void Request::leave_to_caller() {
  std::lock_guard lock(mutex_);
  by_caller_ = true;
  ++open_;
}

void Request::leave_to_helpers() {
  change([this](auto& jobs) {
    by_caller_ = false;
    for (const auto& [lane, ready] : ready_) {
      if (!ready.empty()) jobs.push_back(settling(lane));
    }
    --open_;
  });
}

bool Request::settle_files() {
  const UsesReserve reserve;
  while (const auto unit = take_ready(nullptr)) {
    if (settle_file(unit)) continue;
    scheduler()->keep(shared_from_this());
    leave_to_helpers();
    return false;
  }
  decltype(directories_) directories;
  {
    std::lock_guard lock(mutex_);
    directories.swap(directories_);
  }
  const InterruptionsReturned by_nobody(false);  // an interrupted sync of a directory would be recorded as a fault
  for (auto& [directory, names] : directories) sync_names(directory, names);
  leave_to_helpers();  // nothing is left to them
  return true;
}

// Take a ready unit of this lane, or return null if there is none. A null `lane` means any lane. The thread of a
// blocking call passes null, because its request has only one file.
std::shared_ptr<Request::Unit> Request::take_ready(const std::shared_ptr<Lane>& lane) {
  std::lock_guard lock(mutex_);
  auto found = lane ? ready_.find(lane) : ready_.begin();
  if (found == ready_.end() || found->second.empty()) return nullptr;
  auto unit = std::move(found->second.front());
  found->second.pop_front();
  return unit;
}

bool Request::settle_file(const std::shared_ptr<Unit>& unit) {
  std::optional<Fault> fault;
  if (is_interrupted_in(*unit, fault)) {
    std::lock_guard lock(mutex_);
    ready_[unit->lane].push_front(unit);
    return false;
  }
  const auto scheduler = this->scheduler();
  for (Name& name : std::exchange(unit->names, {})) end_name(unit, std::move(name), fault);
  scheduler->one_less(*unit->counted_in);
  std::lock_guard lock(mutex_);
  --open_;
  return true;
}

bool Request::is_interrupted_in(Unit& unit, std::optional<Fault>& fault) const {
  const auto interrupted = [&] { return fault && fault->error_number == EINTR && interruptions_are_returned; };
  File& file = *unit.names.front().file;
  if (!unit.failed && unit.cut) {
    fault = canceled() ? Fault{.error_number = ECANCELED, .operation = "truncate"} : file.end_at(unit.cut->begin());
  }
  if (interrupted()) return true;
  if (unit.cut) WriteOrder::leave(*std::exchange(unit.cut, nullptr));
  if (!unit.failed && !fault && options_.sync) fault = file.sync();
  return interrupted();
}

void Request::end_name(const std::shared_ptr<Unit>& unit, Name name, std::optional<Fault> fault) {
  File& file = *name.file;
  if (!unit->failed && !fault && options_.sync && options_.sync_names && file.name_made()) {
    auto directory = file.directory();
    if (directory) {
      // Syncing a directory may need the descriptor of one file in it, so the first file of each directory stays open,
      // for a limited number of directories. All other files are closed here, if the request closes its files.
      std::unique_lock lock(mutex_);
      auto& there = directories_[*directory];
      const bool kept = !options_.close_files || (there.empty() && directories_.size() <= max_kept_open);
      there.push_back({unit, kept ? std::move(name) : Name{name.file}});
      lock.unlock();
      if (kept) return;
    } else {
      fault = directory.fault();
    }
  }
  if (options_.close_files) {
    auto failed = file.close();
    if (!unit->failed && !fault) fault = std::move(failed);
  }
  if (fault) record(*unit, file, std::move(*fault));
}

void Request::sync_names(const std::string& directory, std::vector<Undurable>& names) {
  File& first = *names.front().name.file;
  const auto failed = sync_directory(directory, first.descriptor(), first.path());
  for (auto& [unit, name] : names) {
    std::optional<Fault> fault = failed;
    if (!fault) name.file->name_durable();
    if (options_.close_files) {
      auto unclosed = name.file->close();
      if (!fault) fault = std::move(unclosed);
    }
    if (fault) record(*unit, *name.file, std::move(*fault));
  }
}

void Request::record(const Unit& unit, const File& file, Fault fault) {
  fault.path = file.path();
  fault.offset = unit.begin;
  fault.expected = unit.nbytes;
  fault.transferred = unit.moved_nbytes;
  std::lock_guard lock(mutex_);
  faults_.emplace(unit.index, std::move(fault));
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
