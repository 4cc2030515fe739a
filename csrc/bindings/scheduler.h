// Schedulers and requests.
//
// Ownership: a Request's memory and files belong to the arrays' Python objects. Scheduler.submit() takes a
// reference to an `owner` that holds them and keeps it until the core reports the request as finished; no worker
// ever touches a reference count. References are dropped by whoever sees the end from Python, and by the next call
// into the scheduler.
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

// Shared with the transfer whose they are.
struct PyChecksums {
  std::shared_ptr<Checksums> core;
};

// What keeps the memory of requests, by their ids.
class Owners {
 public:
  void keep(uint64_t id, nb::object owner) {
    nb::ft_lock_guard guard(mutex_);
    by_request_[id].push_back(std::move(owner));
  }

  void drop(uint64_t id) {
    std::vector<nb::object> dropped;  // ends when the lock is free: a destructor may call back
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

// Ends a request that an exception has kept from being completed.
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
  std::weak_ptr<Transfer> cached = {};  // its only one, if that is in memory: who waits helps to copy it

  // Whoever learns of the end has the memory back.
  bool done() const {
    if (!core->done()) return false;
    owners->drop(core->id());
    return true;
  }

  void check_process() const {
    if (!core->done() && core->fork_generation() != fork_generation()) raise_forked("this transfer");
  }

  bool wait(std::optional<double> timeout_seconds) const {
    check_process();
    if (!timeout_seconds && !core->done()) help();
    const bool over =
        core->done() || wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core->wait_for(slice); });
    return over && done();
  }

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

  // (position, exception) of each transfer that failed, in order.
  nb::list failures() const {
    nb::list found;
    for (const auto& [position, fault] : core->faults()) found.append(nb::make_tuple(position, exception_of(fault)));
    return found;
  }

  nb::object exception() const {
    if (core->faults().empty()) return nb::none();
    return exception_of(core->faults().begin()->second);
  }
};

class PyScheduler {
 public:
  PyScheduler(const std::string& engine, uint64_t block_nbytes, uint64_t large_block_nbytes, uint32_t queue_depth,
              uint32_t worker_count, bool single_submit);

  ~PyScheduler();

  PyRequest new_request(const RequestOptions& options);

  // Hands over as many transfers as there are items, or fewer where neighbours are joined. `last` says of each whether
  // it is the last one with its file; None: all are, and the request has no further ones. Returns those refused, which
  // are not handed over, with their positions.
  nb::list submit(PyRequest& request, std::vector<Item> items, nb::object owner,
                  const std::optional<std::vector<bool>>& last);

  // A blocking call's transfer, waited for; an interrupted one is cancelled. None: all is well. Else the request, to
  // ask what went wrong.
  std::optional<PyRequest> run(Item item, const RequestOptions& options, nb::object owner);

  // The same for one plain array: found, moved, and looked at again. False: it is not plainly usable, or the offset is
  // none; nothing has been done. Raises what went wrong.
  bool run_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync, bool background);

  // Begins the transfer of one plain array, and returns its future; None as above. What memory has is read at once.
  nb::object start_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync,
                         bool background);

  // Drops the owners of what has finished.
  void reap();

  size_t outstanding() const { return core_->belongs_to_this_process() ? core_->outstanding() : 0; }

  bool wait_for_progress(double timeout_seconds);

  // Whether all ended well. What did not keeps its memory for ever. After an interruption it is to be called again.
  bool close(double patience_seconds, bool interruptible = false) {
    return close_together({this}, patience_seconds, interruptible).front();
  }

  // The same for several at a time: it takes no longer where several of them hang.
  static std::vector<bool> close_together(const std::vector<PyScheduler*>& schedulers, double patience_seconds,
                                          bool interruptible);

  // ValueError once closed; RuntimeError in a forked child.
  void check_usable() const;

  nb::dict stats() const;

  static constexpr double close_patience_seconds = 60;

  std::shared_ptr<Scheduler> core_;
  std::vector<EngineRefusal> refusals_;
  std::atomic<bool> closed_{false};

 private:
  friend class PyStream;

  bool end();

  [[noreturn]] static void raise_closed() { throw nb::value_error("this handle or file is closed"); }

  // Room for transfers; what is not handed over is taken back.
  class Admitted {
   public:
    Admitted(PyScheduler& scheduler, std::vector<Scheduler::Places> places);
    ~Admitted() {
      if (!places_.empty()) core_.take_back(places_);
    }
    Admitted(const Admitted&) = delete;
    Admitted& operator=(const Admitted&) = delete;

    void handed_over() { places_.clear(); }  // all
    void handed_over(const std::vector<std::shared_ptr<Transfer>>& transfers);

   private:
    Scheduler& core_;
    std::vector<Scheduler::Places> places_;
  };

  void end_interrupted(const PyRequest& request, Scheduler::Inline& taken);

  // What is wrong with the GPU before any I/O is no fault of the file.
  [[noreturn]] static void refuse(const Fault& fault);

  std::shared_ptr<Owners> owners_ = std::make_shared<Owners>();
  std::atomic<bool> left_behind_{false};
};

void bind_schedulers(nb::module_& module);

}  // namespace tensorferry
