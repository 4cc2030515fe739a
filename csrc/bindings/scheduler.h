// Schedulers and requests, as Python objects.
//
// Ownership: the memory and the files of a request belong to Python objects. Scheduler.submit() gets an `owner`, an
// object that refers to all of them, and keeps a reference to the owner until the core reports the request as finished.
// Workers never change a Python reference count: the Python thread that finds the request done drops the reference to
// the owner, or the next call of the scheduler, or the main thread soon after the end (Reaper).
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/after_fork.h"
#include "bindings/collect.h"
#include "bindings/files.h"
#include "bindings/python.h"
#include "transfer/scheduler.h"

namespace tensorferry {

// Checksums as a Python object. The transfer that computes the checksums shares them.
struct PyChecksums {
  std::shared_ptr<Checksums> core;
};

// The objects that keep the memory of requests valid, by request id.
class Owners {
 public:
  void keep(uint64_t id, nb::object owner) {
    nb::ft_lock_guard guard(mutex_);
    by_request_[id].push_back(std::move(owner));
  }

  void drop(uint64_t id) {
    std::vector<nb::object> dropped;  // destroyed after the lock is released: a destructor may call back
    nb::ft_lock_guard guard(mutex_);
    auto found = by_request_.find(id);
    if (found == by_request_.end()) return;
    dropped = std::move(found->second);
    by_request_.erase(found);
  }

 private:
  nb::ft_mutex mutex_;
  std::unordered_map<uint64_t, std::vector<nb::object>> by_request_;
};

// Drops the owners of finished requests soon after their end, also if the program makes no further call: a thread of
// the core asks Python to run this on the main thread.
class Reaper : public std::enable_shared_from_this<Reaper> {
 public:
  Reaper(const std::shared_ptr<Scheduler>& core, std::shared_ptr<Owners> owners)
      : core_(core), owners_(std::move(owners)) {}

  void ask() {
    if (asked_.exchange(true)) return;
    kept_ = shared_from_this();
    if (Py_IsInitialized() && Py_AddPendingCall(&run, this) == 0) return;
    kept_.reset();  // Python ends, or has too much to do: the next call of the scheduler drops the owners
    asked_ = false;
  }

  void reap() const {
    const auto core = core_.lock();
    if (!core || !core->belongs_to_this_process()) return;
    for (uint64_t id : core->take_finished()) owners_->drop(id);
  }

 private:
  static int run(void* given) {
    const auto own = std::move(static_cast<Reaper*>(given)->kept_);
    own->asked_ = false;
    own->reap();
    return 0;
  }

  const std::weak_ptr<Scheduler> core_;
  const std::shared_ptr<Owners> owners_;
  std::atomic<bool> asked_{false};
  std::shared_ptr<Reaper> kept_;  // while Python is asked
};

// Cancels and seals a request if it is not sealed when the last PyRequest that refers to it is destroyed. This happens
// if an exception was raised before the last transfer was submitted; without the seal, the request would never end.
struct Sealer {
  std::shared_ptr<Request> core;

  explicit Sealer(std::shared_ptr<Request> request) : core(std::move(request)) {}
  ~Sealer() {
    if (core->done() || core->fork_generation() != fork_generation()) return;
    if (!core->sealed()) core->cancel();
    core->seal();
  }
  Sealer(const Sealer&) = delete;
  Sealer& operator=(const Sealer&) = delete;
};

struct PyRequest {
  std::shared_ptr<Request> core;
  std::shared_ptr<Owners> owners;
  std::shared_ptr<Sealer> sealer = std::make_shared<Sealer>(core);
  // The request's transfer, if it is the only one and its data is in the page cache. A thread that waits for the
  // request helps to copy the data.
  std::weak_ptr<Transfer> cached = {};

  // Whether the request is done. If so, the reference to the owner is dropped, and the core no longer uses the memory.
  bool done() const {
    if (!core->done()) return false;
    owners->drop(core->id());
    return true;
  }

  // Raise RuntimeError in a forked child, unless the request is done.
  void check_process() const {
    if (!core->done() && core->fork_generation() != fork_generation()) raise_forked("this transfer");
  }

  // Wait until the request is done. Returns false if the timeout expires before.
  bool wait(std::optional<double> timeout_seconds) const {
    check_process();
    if (!timeout_seconds && !core->done()) help();
    const bool over =
        core->done() || wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core->wait_for(slice); });
    return over && done();
  }

  // Help to copy the data of `cached`, until no block of it is left to take.
  void help() const {
    const auto transfer = cached.lock();
    const auto scheduler = transfer ? core->scheduler() : nullptr;
    if (!scheduler) return;
    (void)wait_interruptibly(std::nullopt, [&](milliseconds slice) { return scheduler->share(transfer, slice); });
  }

  void seal() const {
    WithoutGil release;
    core->seal();
  }

  // The position in the call and the exception of each failed item, in order of position.
  nb::list failures() const {
    nb::list found;
    for (const auto& [position, fault] : core->faults()) found.append(nb::make_tuple(position, exception_of(fault)));
    return found;
  }

  // The exception of the failed item with the lowest position, which refers to the others, or None.
  nb::object exception() const {
    nb::list found;
    for (const auto& [position, fault] : core->faults()) found.append(exception_of(fault));
    if (found.size() < 2) return found.size() == 0 ? nb::none() : nb::object(found[0]);
    return call_python(imported("tensorferry.errors", "first_error"), found, "of this call");
  }
};

class PyScheduler {
 public:
  PyScheduler(const char* engine, uint64_t block_nbytes, uint64_t large_block_nbytes, uint32_t queue_depth,
              uint32_t worker_count, bool single_submit);

  ~PyScheduler();

  PyRequest new_request(const RequestOptions& options);

  // Submit one transfer for each item, or one for several small neighbours (transfer/items.h): all items of their
  // files. `incomplete` has a flag for each item: whether an item of the same file was refused before, so the file must
  // not be truncated. Unless there is `more` to come, the request is sealed. Returns (position, exception) of each item
  // that was refused and not submitted.
  nb::list submit(PyRequest& request, std::vector<Item> items, nb::object owner,
                  const std::vector<bool>& incomplete = {}, bool more = false);

  // Run the transfer of a blocking call and wait for it. If a signal handler raises an exception (Ctrl-C), the transfer
  // is cancelled and the exception propagates. If the transfer ran on this thread without a fault, returns None;
  // otherwise returns the request, which has the faults, if any.
  std::optional<PyRequest> run(Item item, const RequestOptions& options, nb::object owner);

  // Move one plain array (collect.h) in a blocking call, and check afterwards that it still has its memory. Returns
  // false, having done nothing, if the array is not plain or the offset is not a valid int. Raises the fault of a
  // failed transfer.
  bool run_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync, bool background);

  // Begin the transfer of one plain array and return its future; or None in the cases in which run_plain() returns
  // false. A small read of data that the page cache holds is completed at once.
  nb::object start_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync,
                         bool background);

  // Drop the owners of finished requests.
  void reap() const { reaper_->reap(); }

  size_t outstanding() const { return core_->belongs_to_this_process() ? core_->outstanding() : 0; }

  // Wait until an outstanding transfer ends, if there is one. Returns false on timeout.
  bool wait_for_progress(double timeout_seconds);

  // Refuse new requests, wait until the outstanding ones have ended, and end the workers. Gives up after
  // `patience_seconds` without progress. Returns whether every request has ended; the memory of a request that has not
  // is never released. If `interruptible`, a signal handler may raise an exception, and close() must be called again.
  bool close(double patience_seconds, bool interruptible = false);

  // Wait until nothing is outstanding in any of the schedulers, at the same time for all: if several of them hang, that
  // takes no longer than for one. Returns whether each of them is idle.
  static std::vector<bool> wait_together(const std::vector<PyScheduler*>& schedulers, double patience_seconds,
                                         bool interruptible);

  // The process ends: from now on a call returns only when what it has begun has ended, because the process may not
  // wait for anything again. Daemon threads, which do not end before the process, begin nothing any more, except for
  // the one with the number `callback_thread`, which the exit waits for.
  static void begin_exit(uint64_t callback_thread) {
    callback_thread_ = callback_thread;
    exiting_in_ = fork_generation();
  }
  static bool is_exiting() { return exiting_in_ == fork_generation(); }

  // Raise ValueError if the scheduler is closed, and RuntimeError in a forked child.
  void check_usable() const;

  nb::dict stats() const;

  static constexpr double close_patience_seconds = 60;

  std::shared_ptr<Scheduler> core_;
  std::vector<EngineRefusal> refusals_;
  std::atomic<bool> closed_{false};

 private:
  friend class PyStream;

  static inline std::atomic<uint64_t> exiting_in_{UINT64_MAX};  // the process that ends, as its fork_generation()
  static inline std::atomic<uint64_t> callback_thread_{0};

  [[noreturn]] static void raise_closed() { throw nb::value_error("this handle or file is closed"); }

  // Admits transfers: waits until their lanes have room for them (Scheduler::admit), and counts them as outstanding.
  // Each transfer then has a place in its lane. The destructor gives up the places of the transfers that were not
  // submitted: those for which handed_over() was not called.
  class Admitted {
   public:
    Admitted(PyScheduler& scheduler, std::vector<Scheduler::Places> places);
    ~Admitted() {
      if (!places_.empty()) core_.take_back(places_);
    }
    Admitted(const Admitted&) = delete;
    Admitted& operator=(const Admitted&) = delete;

    void handed_over() { places_.clear(); }  // all transfers were submitted
    void handed_over(const std::vector<std::shared_ptr<Transfer>>& transfers);

   private:
    Scheduler& core_;
    std::vector<Scheduler::Places> places_;
  };

  // Raise the fault of a call that has moved nothing. If the machine has no CUDA driver, this is
  // EngineUnavailableError, because the file is not at fault.
  [[noreturn]] static void refuse(const Fault& fault);

  std::shared_ptr<Owners> owners_ = std::make_shared<Owners>();
  std::shared_ptr<Reaper> reaper_;
  std::atomic<bool> left_behind_{false};  // whether close() has leaked a reference to owners_, because a request hangs
};

void bind_schedulers(nb::module_& module);

}  // namespace tensorferry
