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

// Files whose directories are still to be synced.
constexpr size_t max_kept_open = 64;

}  // namespace

// All behind the last byte written is cut off: see write_order.h.
class Request::Cut final : public OrderedWrite {
 public:
  Cut(std::shared_ptr<Request> request, const File& file, uint64_t size)
      : OrderedWrite(file.identity(), size, UINT64_MAX), request_(std::move(request)), file_(file) {}

  void turn_has_come() override {
    std::unique_lock lock(request_->mutex_);
    request_->release(file_, lock);
  }

 private:
  const std::shared_ptr<Request> request_;
  const File& file_;  // of a use that waits for this
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
  std::unique_lock lock(mutex_);
  if (!done()) {
    listeners_.push_back(std::move(listener));
    return;
  }
  lock.unlock();
  listener();
}

std::shared_ptr<Scheduler> Request::scheduler() {
  std::lock_guard lock(mutex_);
  return scheduler_;
}

void Request::add(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  std::lock_guard lock(mutex_);
  transfers_ += transfers.size();
  for (const auto& transfer : transfers) {
    nbytes_.fetch_add(transfer->nbytes(), std::memory_order_relaxed);
    if (!uses_files()) continue;
    Use& use = use_of(transfer->file());
    ++use.open;
    use.begin = std::min(use.begin, transfer->begin());
    auto& end = ends_[transfer->identity()];  // also where the file is cut by another of its names only
    end = std::max(end, transfer->end());
    cuts_any_ = cuts_any_ || cuts(*transfer->file());
    use.nbytes += transfer->nbytes();
    use.index = std::min(use.index, transfer->index);
  }
}

Request::Use& Request::use_of(const std::shared_ptr<File>& file) {
  auto& use = uses_[file.get()];
  if (!use) {
    use = std::make_unique<Use>();
    use->file = file;
    ++unsettled_;
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
  if (use.cut) ++use.open;
  return use.cut;
}

void Request::seal(const File& file, std::shared_ptr<OrderedWrite> begun) {
  if (!uses_files()) return;
  const auto cut = begun ? nullptr : next_cut(file);
  if (cut && WriteOrder::enter({cut}).front()) cut->turn_has_come();
  std::unique_lock lock(mutex_);
  auto found = uses_.find(&file);
  if (found == uses_.end() || found->second->sealed) return;
  Use& use = *found->second;
  use.sealed = true;
  if (begun) use.cut = std::move(begun);
  release(file, lock);
}

void Request::seal() {
  std::unique_lock lock(mutex_);
  std::vector<const File*> given_up;
  for (auto& [file, use] : uses_) {
    if (use->sealed) continue;
    use->failed = true;  // not all of it has come
    incomplete_.insert(file->identity());
    given_up.push_back(file);
  }
  for (const File* file : given_up) {
    release(*file, lock);
    lock.lock();
  }
  sealed_ = true;
  const Next then = next();
  lock.unlock();
  follow(then);
}

bool Request::sealed() {
  std::lock_guard lock(mutex_);
  return sealed_;
}

void Request::release(const File& file, std::unique_lock<std::mutex>& lock) {
  auto found = uses_.find(&file);
  if (--found->second->open > 0) {
    lock.unlock();
    return;
  }
  // All of its transfers were over before: until it is closed it counts itself.
  auto use = std::move(found->second);
  use->counts_as_one = true;
  uses_.erase(found);
  const auto scheduler = scheduler_;
  lock.unlock();
  scheduler->one_more();
  lock.lock();
  ready_.push_back(std::move(use));
  const Next then = next();
  lock.unlock();
  follow(then);
}

void Request::refuse(const std::shared_ptr<File>& file) {
  if (!uses_files()) return;
  std::lock_guard lock(mutex_);
  use_of(file).failed = true;
  incomplete_.insert(file->identity());
}

void Request::transfer_ended(const Transfer& transfer, const File* file, File::Lease lease) {
  std::unique_lock lock(mutex_);
  if (transfer.fault()) faults_.merge(transfer.faults());
  bool counts_as_over = true;
  if (uses_files()) {
    auto found = uses_.find(file);
    Use& use = *found->second;
    use.moved_nbytes += transfer.moved_nbytes();
    if (!use.lease) use.lease = std::move(lease);
    if (transfer.fault()) {
      use.failed = true;
      incomplete_.insert(transfer.identity());
    }
    if (--use.open == 0) {
      use.counts_as_one = true;
      counts_as_over = false;
      ready_.push_back(std::move(found->second));
      uses_.erase(found);
    }
  }
  if (counts_as_over) {
    // Before the request can be done: who sees that finds nothing of it outstanding.
    const auto scheduler = scheduler_;
    lock.unlock();
    scheduler->transfer_over();
    lock.lock();
  }
  --transfers_;
  const Next then = next();
  lock.unlock();
  follow(then);
}

Request::Next Request::next() {
  if (!ready_.empty() || directories_are_due()) {
    // Syncs side by side; what takes no time, one after the other.
    const bool side_by_side = options_.sync || cuts_any_;
    if (by_caller_ || (helpers_ > 0 && !side_by_side)) return Next::nothing;
    ++helpers_;
    return side_by_side ? Next::help_to_sync : Next::help;
  }
  if (over_ || !is_over()) return Next::nothing;
  over_ = true;
  return Next::announce;
}

void Request::leave_to_caller() {
  std::lock_guard lock(mutex_);
  by_caller_ = true;
}

void Request::follow(Next next) {
  const auto settle = [this] { return [self = shared_from_this()] { self->settle(); }; };
  if (next == Next::help) scheduler()->help(settle());
  if (next == Next::help_to_sync) scheduler()->help_to_sync(settle());
  if (next == Next::announce) announce();
}

bool Request::settle() {
  std::unique_lock lock(mutex_);
  const auto scheduler = scheduler_;
  while (true) {
    if (!ready_.empty()) {
      auto use = std::move(ready_.front());
      ready_.pop_front();
      const bool cut = !incomplete_.contains(use->file->identity());
      lock.unlock();
      std::string directory;
      std::optional<Fault> fault;
      const Settled settled = settle(*use, cut, directory, fault);
      const bool names = settled == Settled::but_for_the_name;
      lock.lock();
      if (settled == Settled::not_yet) {
        ready_.push_front(std::move(use));
        return false;
      }
      // One descriptor is enough for a directory, and so many for all.
      const bool keep = names && directories_.size() < max_kept_open && !directories_.contains(directory);
      if (names && !keep && options_.close_files) {
        lock.unlock();
        fault = use->file->close();
        lock.lock();
      }
      const bool counts_as_one = use->counts_as_one;
      if (fault) record(*use, std::move(*fault));
      if (names) directories_[directory].push_back(std::move(use));
      lock.unlock();
      use.reset();  // and with it the lease
      if (counts_as_one) scheduler->transfer_over();
      lock.lock();
      --unsettled_;
    } else if (directories_are_due()) {
      const auto directories = std::exchange(directories_, {});
      ++unsettled_;
      lock.unlock();
      for (const auto& [directory, uses] : directories) settle(directory, uses);
      lock.lock();
      --unsettled_;
    } else {
      break;
    }
  }
  if (!std::exchange(by_caller_, false)) --helpers_;
  const Next then = next();
  lock.unlock();
  follow(then);
  return true;
}

// The name that is left is to be made durable by its directory.
Request::Settled Request::settle(Use& use, bool cut, std::string& directory, std::optional<Fault>& fault) const {
  File& file = *use.file;
  const auto interrupted = [&] { return fault && fault->error_number == EINTR && interruptions_are_returned; };
  if (!use.failed && use.cut && canceled()) fault = Fault{.error_number = ECANCELED, .operation = "truncate"};
  if (!use.failed && !fault && cut && use.cut) fault = file.end_at(use.cut->begin());
  if (interrupted()) return Settled::not_yet;
  if (use.cut) WriteOrder::leave(*std::exchange(use.cut, nullptr));
  if (!use.failed && !fault && options_.sync) {
    const bool given_up = canceled() && interruptions_are_returned;
    fault = given_up ? Fault{.error_number = ECANCELED, .operation = "fdatasync"} : file.sync();
  }
  if (interrupted()) return Settled::not_yet;
  if (!use.failed && !fault && options_.sync && options_.sync_names && file.name_made()) {
    auto found = file.directory();
    if (found) {
      directory = std::move(*found);
      return Settled::but_for_the_name;
    }
    fault = found.fault();
  }
  if (options_.close_files) {
    auto failed = file.close();
    if (!use.failed && !fault) fault = std::move(failed);
  }
  return Settled::wholly;
}

void Request::settle(const std::string& directory, const std::vector<std::unique_ptr<Use>>& uses) {
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
  scheduler->request_over(*this);
  std::vector<Listener> listeners;
  {
    std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    scheduler_.reset();
    listeners.swap(listeners_);
    finished_.notify_all();
  }
  for (const auto& listener : listeners) listener();
}

}  // namespace tensorferry
