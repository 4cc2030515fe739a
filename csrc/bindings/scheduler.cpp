#include "bindings/scheduler.h"

#include <errno.h>

#include <algorithm>

#include "base/reserve.h"
#include "bindings/future.h"
#include "device/driver.h"
#include "engine/engine.h"

namespace tensorferry {
namespace {

// More than the submission of a transfer allocates in maps and lists, beside the transfer itself.
constexpr size_t submission_nbytes = 1024;

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

void tell_checksums(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  for (const auto& transfer : transfers) {
    if (const auto& sums = transfer->spec().checksums) sums->hand_over();
  }
}

Item item_of(const PyFile& file, const Memory& memory, uint64_t offset, const PySegments* segments,
             const PyChecksums* checksums) {
  Item item{file.core, lease_of(file), memory, offset};
  if (segments) item.segments = &segments->pieces;
  if (segments && segments->of_rows()) item.copies = &segments->copies;
  if (checksums) item.checksums = checksums->core;
  return item;
}

std::vector<std::pair<std::string, std::optional<std::string>>> probe_engines() {
  WithoutGil release;
  std::vector<std::pair<std::string, std::optional<std::string>>> found;
  for (const EngineKind& kind : engine_kinds()) {
    if (kind.on_request_only) continue;
    EngineAttempt attempt = kind.create({});
    found.emplace_back(kind.name, attempt.engine ? std::nullopt : std::optional(attempt.refusal));
  }
  return found;
}

}  // namespace

PyScheduler::PyScheduler(const char* engine, uint64_t block_nbytes, uint64_t large_block_nbytes, uint32_t queue_depth,
                         uint32_t worker_count, bool single_submit) {
  SchedulerOptions options;
  options.engine = engine;
  options.block_nbytes = block_nbytes;
  options.large_block_nbytes = large_block_nbytes;
  options.queue_depth = queue_depth;
  options.worker_count = worker_count;
  options.single_submit = single_submit;
  {
    WithoutGil release;
    core_ = Scheduler::create(options, refusals_);
  }
  if (core_) {
    reaper_ = std::make_shared<Reaper>(core_, owners_);
    core_->on_finished([reaper = reaper_] { reaper->ask(); });
    return;
  }
  std::string message;
  for (const auto& [name, reason] : refusals_) message += (message.empty() ? "" : "\n") + name + ": " + reason;
  raise_unavailable(message);
}

PyScheduler::~PyScheduler() {
  if (!core_) return;
  if (!core_->belongs_to_this_process()) {
    new std::shared_ptr<Scheduler>(core_);  // never destroyed: its workers are in another process
    return;
  }
  (void)close(close_patience_seconds);
}

PyRequest PyScheduler::new_request(const RequestOptions& options) {
  check_usable();
  return {std::make_shared<Request>(core_, options), owners_};
}

nb::list PyScheduler::submit(PyRequest& request, std::vector<Item> items, nb::object owner,
                             const std::vector<bool>& incomplete, bool more) {
  check_usable();
  Admitted admitted(*this, find_lanes(items, *core_));
  auto prepared = [&] {
    WithoutGil release;
    return prepare(items, *core_, request.core);
  }();
  if (prepared.fault) refuse(*prepared.fault);
  const auto& transfers = prepared.transfers;
  if (!more && items.size() == 1 && transfers.size() == 1 && core_->try_cached(transfers.front())) {
    admitted.handed_over();
    return {};
  }
  for (size_t index = 0; index < incomplete.size(); ++index) {
    if (incomplete[index]) prepared.incomplete.push_back(items[index].file);
  }
  if (!transfers.empty()) {
    owners_->keep(request.core->id(), std::move(owner));
    admitted.handed_over(transfers);
    tell_checksums(transfers);
  }
  if (transfers.size() == 1 && transfers.front()->is_shared()) request.cached = transfers.front();
  {
    WithoutGil release;
    if (!transfers.empty()) core_->submit(request.core, transfers, prepared.incomplete);
    if (!more) request.core->seal();
  }
  if (!more && is_exiting()) {  // nothing waits for the request later, or asks for its failure
    (void)request.wait(std::nullopt);
    if (!request.core->faults().empty()) raise(request.exception());
  }
  nb::list found;
  for (const auto& [position, why] : prepared.refused) found.append(nb::make_tuple(position, exception_of(why)));
  return found;
}

std::optional<PyRequest> PyScheduler::run(Item item, const RequestOptions& options, nb::object owner) {
  PyRequest request = new_request(options);
  std::vector<Item> items;
  items.push_back(std::move(item));
  Admitted admitted(*this, find_lanes(items, *core_));
  std::vector<std::shared_ptr<Transfer>> transfers;
  Scheduler::Inline taken;
  bool inlined = false;
  bool over = false;
  const auto fault = interruptibly("this transfer", [&] {
    auto prepared = prepare(items, *core_, request.core);
    if (!prepared.fault && !prepared.refused.empty()) prepared.fault = std::move(prepared.refused.front().second);
    transfers = std::move(prepared.transfers);
    inlined = !prepared.fault && core_->try_inline(transfers.front(), taken);
    over = inlined && core_->go_on(taken) && request.core->settle_files();
    return prepared.fault;
  });
  if (fault) refuse(*fault);
  tell_checksums(transfers);
  if (inlined) {
    admitted.handed_over();
    if (over && request.core->faults().empty()) return std::nullopt;
  }
  if (!request.core->done()) {
    owners_->keep(request.core->id(), std::move(owner));
    if (!inlined) {
      admitted.handed_over();
      if (transfers.front()->is_shared()) request.cached = transfers.front();
      WithoutGil release;
      core_->submit(request.core, transfers);
      request.core->seal();
    }
    transfers.clear();  // the scheduler refers to the transfers until they end
    try {
      (void)request.wait(std::nullopt);
    } catch (...) {
      if (request.core->fork_generation() == fork_generation()) {
        request.core->cancel();
        (void)request.done();  // if it has ended meanwhile, this drops the owner
      }
      throw;
    }
  }
  return request;
}

bool PyScheduler::run_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync,
                            bool background) {
  const auto found = plain_array(array, !write);
  const auto begin = found ? plain_offset(offset, found->nbytes) : std::nullopt;
  if (!begin) return false;
  const auto request = run({file.core, lease_of(file), {found->address, found->nbytes}, *begin},
                           {.write = write, .sync = sync, .background = background}, found->owner);
  if (request && !request->core->faults().empty()) raise(request->exception());
  if (is_moved(*found)) {
    const nb::object moved = imported("tensorferry.errors", "memory_moved");
    raise(call_python(moved, path_of(file), *begin, found->nbytes));
  }
  return true;
}

nb::object PyScheduler::start_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync,
                                    bool background) {
  const auto found = plain_array(array, !write);
  const auto begin = found ? plain_offset(offset, found->nbytes) : std::nullopt;
  if (!begin) return nb::none();
  PyRequest request = new_request({.write = write, .sync = sync, .background = background});
  std::vector<Item> items;
  items.push_back({file.core, lease_of(file), {found->address, found->nbytes}, *begin});
  nb::object future = PyFuture::of_plain(array, *found);
  auto& core = *nb::inst_ptr<PyFuture>(future);
  core.is_about(write, path_of(file), *begin, found->nbytes);
  const nb::list refused = submit(request, std::move(items), future);
  if (refused.size() > 0) raise(nb::object(refused[0][1]));
  core.start(std::move(request));
  return future;
}

bool PyScheduler::wait_for_progress(double timeout_seconds) {
  check_usable();
  return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core_->wait_for_progress(slice); });
}

std::vector<bool> PyScheduler::wait_together(const std::vector<PyScheduler*>& schedulers, double patience_seconds,
                                             bool interruptible) {
  struct Waited {
    Scheduler& core;
    uint64_t seen;
    double left_seconds;
  };
  std::vector<Waited> waited;
  for (PyScheduler* scheduler : schedulers) {
    if (!scheduler->core_->belongs_to_this_process()) continue;
    waited.push_back({*scheduler->core_, scheduler->core_->progress(), patience_seconds});
  }
  // The patience is counted down in steps rather than by the clock, so it does not expire while the process is stopped.
  const auto step = [&](milliseconds slice) {
    const auto is_hung = [](const Waited& one) { return one.left_seconds <= 0; };
    const auto is_over = [&](const Waited& one) { return is_hung(one) || one.core.wait_until_idle(milliseconds(0)); };
    const auto first = std::find_if_not(waited.begin(), waited.end(), is_over);
    if (first == waited.end()) return true;
    if (first->core.wait_until_idle(slice)) return false;
    for (Waited& one : waited) {
      const uint64_t now = one.core.progress();
      const bool moved = std::exchange(one.seen, now) != now;
      if (!is_hung(one)) one.left_seconds = moved ? patience_seconds : one.left_seconds - seconds(slice);
    }
    return false;
  };
  if (interruptible) {
    (void)wait_interruptibly(std::nullopt, step);
  } else {
    WithoutGil release;
    while (!step(signal_interval)) {
    }
  }
  std::vector<bool> idle;
  for (PyScheduler* scheduler : schedulers) {
    const auto& core = scheduler->core_;
    idle.push_back(!core->belongs_to_this_process() || core->wait_until_idle(milliseconds(0)));
  }
  return idle;
}

bool PyScheduler::close(double patience_seconds, bool interruptible) {
  if (!core_->belongs_to_this_process()) return true;
  closed_ = true;
  core_->refuse();
  (void)wait_together({this}, patience_seconds, interruptible);
  bool ended;
  {
    WithoutGil release;
    ended = core_->close();
  }
  reap();
  // Outstanding requests hang: the references to the owners of their memory are then never dropped.
  if (!ended && !left_behind_.exchange(true)) new std::shared_ptr<Owners>(owners_);
  return ended;
}

void PyScheduler::check_usable() const {
  if (!core_->belongs_to_this_process()) raise_forked("this handle or file");
  if (closed_) raise_closed();
  if (!is_exiting()) return;
  const nb::object thread = imported("threading", "current_thread")();
  if (nb::cast<bool>(thread.attr("daemon")) && nb::cast<uint64_t>(thread.attr("ident")) != callback_thread_) {
    raise_closed();
  }
}

nb::dict PyScheduler::stats() const {
  const Statistics& counted = core_->statistics();
  nb::dict result;
  result["engine"] = core_->engine_name();
  result["requests"] = counted.requests.load();
  result["failed_requests"] = counted.failed_requests.load();
  result["read_nbytes"] = counted.read_nbytes.load();
  result["written_nbytes"] = counted.written_nbytes.load();
  result["engine_blocks"] = counted.blocks.load();
  result["inline_blocks"] = counted.inline_blocks.load();
  result["direct_nbytes"] = counted.direct_nbytes.load();
  result["bounced_nbytes"] = counted.bounced_nbytes.load();
  result["buffered_nbytes"] = counted.buffered_nbytes.load();
  result["touched_nbytes"] = counted.touched_nbytes.load();
  result["gpu_nbytes"] = counted.gpu_nbytes.load();
  result["gds_nbytes"] = counted.gds_nbytes.load();
  result["resumed_blocks"] = counted.resumed_blocks.load();
  result["retried_blocks"] = counted.retried_blocks.load();
  nb::dict latency;
  latency["p50"] = counted.block_latency.percentile(0.50);
  latency["p90"] = counted.block_latency.percentile(0.90);
  latency["p99"] = counted.block_latency.percentile(0.99);
  latency["p99.9"] = counted.block_latency.percentile(0.999);
  result["block_latency_microseconds"] = latency;
  return result;
}

void PyScheduler::refuse(const Fault& fault) {
  if (fault.error_number == ENODEV && cuda::driver() == nullptr) raise_unavailable(fault.hint);
  raise(fault);
}

PyScheduler::Admitted::Admitted(PyScheduler& scheduler, std::vector<Scheduler::Places> places)
    : core_(*scheduler.core_), places_(std::move(places)) {
  scheduler.check_usable();
  size_t count = 0;
  for (const auto& each : places_) count += each.count;
  fill_reserve(count * submission_nbytes);
  scheduler.reap();
  uint64_t ticket = 0;
  auto answer = core_.admit(places_, milliseconds(0), ticket);  // without releasing the GIL
  while (answer == Scheduler::Admission::full) {
    wait_interruptibly(std::nullopt, [&](milliseconds slice) {
      answer = core_.admit(places_, slice, ticket);
      return answer != Scheduler::Admission::full;
    });
  }
  if (answer == Scheduler::Admission::closed) raise_closed();
}

void PyScheduler::Admitted::handed_over(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  for (const auto& transfer : transfers) {
    --std::ranges::find(places_, transfer->lane(), &Scheduler::Places::lane)->count;
  }
  std::erase_if(places_, [](const Scheduler::Places& one) { return one.count == 0; });
}

void bind_schedulers(nb::module_& module) {
  nb::class_<PyRequest>(module, "Request")
      .def("done", &PyRequest::done)
      .def("wait", &PyRequest::wait, "timeout_seconds"_a.none() = nb::none())
      .def("seal", &PyRequest::seal)
      .def("failures", &PyRequest::failures,
           nb::sig("def failures(self) -> list[tuple[int, tensorferry.errors.StorageError]]"))
      .def("exception", &PyRequest::exception, nb::sig("def exception(self) -> tensorferry.errors.StorageError | None"))
      .def("cancel", [](const PyRequest& request) { request.core->cancel(); })
      .def(
          "notify",
          [](const PyRequest& request, const PyCompletionQueue& queue, uint64_t token) {
            request.check_process();
            request.core->notify([queue = queue.core, token] { queue->push(token); });
          },
          "queue"_a, "token"_a);

  nb::class_<PyChecksums>(module, "Checksums", nb::type_slots(constructed))
      .def(
          "__init__",
          [](PyChecksums* self, uint64_t chunk_nbytes, bool of_segments, nb::typed<nb::sequence, uint32_t> expected,
             bool in_place) {
            auto crcs = numbers_of<uint32_t>(expected);
            new (self) PyChecksums{std::make_shared<Checksums>(chunk_nbytes, of_segments, std::move(crcs), in_place)};
          },
          "chunk_nbytes"_a, "of_segments"_a, "expected"_a, "in_place"_a)
      .def_prop_ro("chunks", [](const PyChecksums& sums) { return sums.core->of_chunks(); })
      .def_prop_ro("segments", [](const PyChecksums& sums) { return sums.core->of_segments(); })
      .def_prop_ro("begun", [](const PyChecksums& sums) { return sums.core->handed_over(); });

  nb::class_<PyScheduler>(module, "Scheduler", nb::is_weak_referenceable(), nb::type_slots(constructed))
      .def(nb::init<const char*, uint64_t, uint64_t, uint32_t, uint32_t, bool>(), "engine"_a, "block_nbytes"_a,
           "large_block_nbytes"_a, "queue_depth"_a, "worker_count"_a, "single_submit"_a)
      .def_prop_ro("engine", [](const PyScheduler& scheduler) { return scheduler.core_->engine_name(); })
      .def_prop_ro("refusals",
                   [](const PyScheduler& scheduler) {
                     std::vector<std::pair<std::string, std::string>> refusals;
                     for (const auto& refusal : scheduler.refusals_)
                       refusals.emplace_back(refusal.engine, refusal.reason);
                     return refusals;
                   })
      .def(
          "new_request",
          [](PyScheduler& scheduler, bool write, bool truncate, bool sync, bool close_files, bool background) {
            return instance_of(scheduler.new_request({.write = write,
                                                      .truncate = truncate,
                                                      .sync = sync,
                                                      .close_files = close_files,
                                                      .background = background}));
          },
          "write"_a, "truncate"_a, "sync"_a, "close_files"_a, "background"_a)
      .def(
          "submit",
          [](PyScheduler& scheduler, PyRequest& request, nb::sequence files, nb::sequence addresses,
             nb::sequence nbytes, nb::sequence offsets, nb::sequence positions, nb::object owner,
             std::optional<nb::sequence> locations, const PySegments* segments, const PyChecksums* checksums,
             nb::sequence incomplete, bool more) {
            const size_t count = nb::len(files);
            if ((segments || checksums) && count != 1) {
              throw nb::value_error("segments, checksums: they require exactly one transfer");
            }
            const auto flags = numbers_of<bool>(incomplete);
            if ((locations && nb::len(*locations) != count) || (!flags.empty() && flags.size() != count) ||
                nb::len(addresses) != count || nb::len(nbytes) != count || nb::len(offsets) != count ||
                nb::len(positions) != count) {
              throw nb::value_error(
                  "files, addresses, nbytes, offsets, positions, locations and incomplete must have the same length");
            }
            std::vector<Item> items;
            items.reserve(count);
            for (size_t index = 0; index < count; ++index) {
              Memory memory{nb::cast<uintptr_t>(addresses[index]), nb::cast<uint64_t>(nbytes[index])};
              if (locations) memory.location = nb::cast<std::optional<Location>>((*locations)[index]);
              const auto& file = nb::cast<const PyFile&>(files[index]);
              items.push_back(item_of(file, memory, nb::cast<uint64_t>(offsets[index]), segments, checksums));
              items.back().position = nb::cast<size_t>(positions[index]);
            }
            return scheduler.submit(request, std::move(items), std::move(owner), flags, more);
          },
          "request"_a, "files"_a, "addresses"_a, "nbytes"_a, "offsets"_a, "positions"_a, "owner"_a.none(),
          "locations"_a.none() = nb::none(), "segments"_a.none() = nb::none(), "checksums"_a.none() = nb::none(),
          "incomplete"_a = nb::tuple(), "more"_a = false,
          nb::sig("def submit(self, request: Request, files: collections.abc.Sequence[File], "
                  "addresses: collections.abc.Sequence[int], nbytes: collections.abc.Sequence[int], "
                  "offsets: collections.abc.Sequence[int], positions: collections.abc.Sequence[int], "
                  "owner: object | None, locations: collections.abc.Sequence[tuple[int, int] | None] | None = None, "
                  "segments: Segments | None = None, checksums: Checksums | None = None, "
                  "incomplete: collections.abc.Sequence[bool] = (), more: bool = False) "
                  "-> list[tuple[int, tensorferry.errors.StorageError]]"))
      .def(
          "run",
          [](PyScheduler& scheduler, const PyFile& file, uintptr_t address, uint64_t nbytes, uint64_t offset,
             bool write, bool truncate, bool sync, bool close_files, bool background, nb::object owner,
             std::optional<Location> location, const PySegments* segments,
             const PyChecksums* checksums) -> nb::typed<nb::object, std::optional<PyRequest>> {
            auto request = scheduler.run(item_of(file, {address, nbytes, location}, offset, segments, checksums),
                                         {.write = write,
                                          .truncate = truncate,
                                          .sync = sync,
                                          .close_files = close_files,
                                          .background = background},
                                         std::move(owner));
            return request ? instance_of(std::move(*request)) : nb::none();
          },
          "file"_a, "address"_a, "nbytes"_a, "offset"_a, "write"_a, "truncate"_a, "sync"_a, "close_files"_a,
          "background"_a, "owner"_a.none(), "location"_a.none() = nb::none(), "segments"_a.none() = nb::none(),
          "checksums"_a.none() = nb::none())
      .def("run_plain", &PyScheduler::run_plain, "file"_a, "array"_a.none(), "offset"_a.none(), "write"_a, "sync"_a,
           "background"_a,
           nb::sig("def run_plain(self, file: File, array: object, offset: object, write: bool, sync: bool, "
                   "background: bool) -> bool"))
      .def("start_plain", &PyScheduler::start_plain, "file"_a, "array"_a.none(), "offset"_a.none(), "write"_a, "sync"_a,
           "background"_a,
           nb::sig("def start_plain(self, file: File, array: object, offset: object, write: bool, sync: bool, "
                   "background: bool) -> typing.Any"))
      .def("reap", &PyScheduler::reap)
      .def("outstanding", &PyScheduler::outstanding)
      .def("wait_for_progress", &PyScheduler::wait_for_progress, "timeout_seconds"_a)
      .def("check_usable", &PyScheduler::check_usable)
      .def("belongs_to_this_process",
           [](const PyScheduler& scheduler) { return scheduler.core_->belongs_to_this_process(); })
      .def("stats", &PyScheduler::stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("close", &PyScheduler::close, "patience_seconds"_a = PyScheduler::close_patience_seconds,
           "interruptible"_a = false);

  module.def(
      "wait_together",
      [](const nb::list& schedulers, double patience_seconds, bool interruptible) {
        std::vector<PyScheduler*> all;
        for (nb::handle scheduler : schedulers) all.push_back(nb::cast<PyScheduler*>(scheduler));
        return PyScheduler::wait_together(all, patience_seconds, interruptible);
      },
      "schedulers"_a, "patience_seconds"_a, "interruptible"_a = false,
      nb::sig("def wait_together(schedulers: list[Scheduler], patience_seconds: float, interruptible: bool = False) "
              "-> list[bool]"));
  module.def("begin_exit", &PyScheduler::begin_exit, "callback_thread"_a);
  module.def("is_exiting", &PyScheduler::is_exiting);
  module.def("probe_engines", &probe_engines);
  module.def("engine_names", [] {
    std::vector<std::string> names;
    for (const EngineKind& kind : engine_kinds())
      if (!kind.on_request_only) names.emplace_back(kind.name);
    return names;
  });
}

}  // namespace tensorferry
