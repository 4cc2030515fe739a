#include "bindings/scheduler.h"

#include <errno.h>

#include <algorithm>

#include "device/driver.h"
#include "engine/engine.h"
#include "transfer/completion_queue.h"
#include "transfer/reservation.h"

namespace tensorferry {
namespace {

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

// Read with the items before and behind it, where these are moved as one: a drive takes longer for another request.
constexpr uint64_t max_joined_gap_nbytes = uint64_t{16} << 10;

struct PyCompletionQueue {
  std::shared_ptr<CompletionQueue> core = std::make_shared<CompletionQueue>();

  PyCompletionQueue() {
    if (core->error_number()) raise(Fault{.error_number = core->error_number(), .operation = "eventfd"});
  }
};

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

PyScheduler::PyScheduler(const std::string& engine, uint64_t block_nbytes, uint64_t large_block_nbytes,
                         uint32_t queue_depth, uint32_t worker_count, bool single_submit) {
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
  if (core_) return;
  std::string message;
  for (const auto& [name, reason] : refusals_) message += (message.empty() ? "" : "\n") + name + ": " + reason;
  raise_unavailable(message);
}

PyScheduler::~PyScheduler() {
  if (!core_) return;
  if (!core_->belongs_to_this_process()) {
    new std::shared_ptr<Scheduler>(core_);  // its workers are in another process: never destroyed
    return;
  }
  (void)close(close_patience_seconds);
}

PyRequest PyScheduler::new_request(bool write, bool truncate, bool sync, bool close_files, bool background) {
  check_usable();
  return {std::make_shared<Request>(core_, RequestOptions{.write = write,
                                                          .truncate = truncate,
                                                          .sync = sync,
                                                          .close_files = close_files,
                                                          .background = background}),
          owners_};
}

nb::list PyScheduler::submit(PyRequest& request, const std::vector<PyFile>& files,
                             const std::vector<uintptr_t>& addresses, const std::vector<uint64_t>& nbytes,
                             const std::vector<uint64_t>& offsets, const std::vector<size_t>& positions,
                             nb::object owner, const std::optional<Locations>& locations,
                             const std::optional<std::vector<bool>>& last, const PySegments* segments,
                             const PyChecksums* checksums) {
  const size_t count = files.size();
  if ((segments || checksums) && count != 1) throw nb::value_error("segments and checksums are of one transfer");
  if ((locations && locations->size() != count) || (last && last->size() != count) || addresses.size() != count ||
      nbytes.size() != count || offsets.size() != count || positions.size() != count) {
    throw nb::value_error("files, addresses, nbytes, offsets, positions, locations and last differ in length");
  }
  std::vector<File::Lease> leases;
  leases.reserve(count);
  for (const PyFile& file : files) leases.push_back(lease_of(file));
  Admitted admitted(*this, count);
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::vector<std::pair<size_t, Fault>> refused;
  std::optional<Fault> fault;
  {
    WithoutGil release;
    fault = create_transfers(files, leases, addresses, nbytes, offsets, positions, locations, segments, checksums,
                             request.core, transfers, refused);
  }
  if (fault) refuse(*fault);
  if (!transfers.empty()) {
    owners_->keep(request.core->id(), std::move(owner));
    admitted.handed_over(transfers.size());
    if (checksums) checksums->begun = true;
  }
  if (transfers.size() == 1 && transfers.front()->is_shared()) request.cached = transfers.front();
  {
    WithoutGil release;
    std::vector<std::shared_ptr<File>> ended;
    for (size_t index = 0; index < count; ++index) {
      if (!last || (*last)[index]) ended.push_back(files[index].core);
    }
    if (!transfers.empty()) {
      core_->submit(request.core, transfers, ended);
    } else {
      for (const auto& file : ended) request.core->seal(*file);
    }
    if (!last) request.core->seal();
  }
  nb::list found;
  for (const auto& [position, why] : refused) found.append(nb::make_tuple(position, exception_of(why)));
  return found;
}

std::optional<PyRequest> PyScheduler::run(const PyFile& file, uintptr_t address, uint64_t nbytes, uint64_t offset,
                                          bool write, bool truncate, bool sync, bool close_files, bool background,
                                          nb::object owner, std::optional<Location> location,
                                          const PySegments* segments, const PyChecksums* checksums) {
  PyRequest request = new_request(write, truncate, sync, close_files, background);
  std::vector<File::Lease> leases;
  leases.push_back(lease_of(file));
  Admitted admitted(*this, 1);
  const std::optional<Locations> locations = location ? std::optional(Locations{location}) : std::nullopt;
  std::vector<std::shared_ptr<Transfer>> transfers;
  Scheduler::Inline taken;
  bool inlined = false;
  bool over = false;
  const auto fault = interruptibly("this transfer", [&] {
    std::vector<std::pair<size_t, Fault>> refused;
    auto found = create_transfers({file}, leases, {address}, {nbytes}, {offset}, {0}, locations, segments, checksums,
                                  request.core, transfers, refused);
    if (!refused.empty()) found = std::move(refused.front().second);
    inlined = !found && core_->try_inline(transfers.front(), taken);
    over = inlined && core_->go_on(taken) && request.core->settle();
    return found;
  });
  if (fault) refuse(*fault);
  if (checksums) checksums->begun = true;
  if (inlined) {
    admitted.handed_over(1);
    if (!over) end_interrupted(request, taken);
    if (request.core->done() && request.core->faults().empty()) return std::nullopt;
  }
  if (!request.core->done()) {
    owners_->keep(request.core->id(), std::move(owner));
    if (!inlined) {
      admitted.handed_over(1);
      if (transfers.front()->is_shared()) request.cached = transfers.front();
      WithoutGil release;
      core_->submit(request.core, transfers, {file.core});
      request.core->seal();
    }
    transfers.clear();  // what they keep ends with the request
    try {
      (void)request.wait(std::nullopt);
    } catch (...) {
      if (request.core->fork_generation() == fork_generation()) request.core->cancel();
      throw;
    }
  }
  return request;
}

// A signal came while this thread moved what it had taken on. Its handlers end that by what they raise.
void PyScheduler::end_interrupted(const PyRequest& request, Scheduler::Inline& taken) {
  const auto go_on = [&] { return core_->go_on(taken) && request.core->settle(); };
  try {
    check_signals(request.core->fork_generation(), "this transfer");
    (void)interruptibly("this transfer", go_on);
  } catch (...) {
    if (request.core->fork_generation() != fork_generation()) {
      new Scheduler::Inline(std::move(taken));  // what it would give back is the parent's
      throw;
    }
    request.core->cancel();
    WithoutGil release;
    const InterruptionsReturned returned;
    while (!go_on()) {
    }
    throw;
  }
}

bool PyScheduler::run_plain(const PyFile& file, nb::handle array, nb::handle offset, bool write, bool sync,
                            bool background) {
  const auto found = plain_array(array, !write);
  const auto begin = found ? plain_offset(offset, found->nbytes) : std::nullopt;
  if (!begin) return false;
  const auto request = run(file, found->address, found->nbytes, *begin, write, false, sync, false, background,
                           found->owner, std::nullopt, nullptr, nullptr);
  if (request && !request->core->faults().empty()) raise(request->exception());
  if (is_moved(*found)) {
    raise(nb::module_::import_("tensorferry.errors")
              .attr("memory_moved")(nb::cast(file).attr("path"), *begin, found->nbytes));
  }
  return true;
}

void PyScheduler::reap() {
  if (!core_->belongs_to_this_process()) return;
  for (uint64_t id : core_->take_finished()) owners_->drop(id);
}

bool PyScheduler::wait_for_progress(double timeout_seconds) {
  check_usable();
  return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core_->wait_for_progress(slice); });
}

std::vector<bool> PyScheduler::close_together(const std::vector<PyScheduler*>& schedulers, double patience_seconds,
                                              bool interruptible) {
  struct Closing {
    Scheduler& core;
    uint64_t seen;
    double left_seconds;
  };
  std::vector<Closing> closing;
  for (PyScheduler* scheduler : schedulers) {
    if (!scheduler->core_->belongs_to_this_process()) continue;
    scheduler->closed_ = true;
    scheduler->core_->refuse();
    closing.push_back({*scheduler->core_, scheduler->core_->progress(), patience_seconds});
  }
  // Steps are counted: a stopped process must not lose its patience.
  const auto step = [&](milliseconds slice) {
    const auto is_hung = [](const Closing& one) { return one.left_seconds <= 0; };
    const auto is_over = [&](const Closing& one) { return is_hung(one) || one.core.wait_until_idle(milliseconds(0)); };
    const auto first = std::find_if_not(closing.begin(), closing.end(), is_over);
    if (first == closing.end()) return true;
    if (first->core.wait_until_idle(slice)) return false;
    for (Closing& one : closing) {
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
  std::vector<bool> ended;
  for (PyScheduler* scheduler : schedulers) {
    ended.push_back(!scheduler->core_->belongs_to_this_process() || scheduler->end());
  }
  return ended;
}

// What is still outstanding hangs, and is left behind.
bool PyScheduler::end() {
  bool ended;
  {
    WithoutGil release;
    ended = core_->close(milliseconds(0));
  }
  reap();
  if (!ended && !left_behind_.exchange(true)) new std::shared_ptr<Owners>(owners_);
  return ended;
}

void PyScheduler::check_usable() const {
  if (!core_->belongs_to_this_process()) raise_forked("this handle or file");
  if (closed_) raise_closed();
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

std::optional<Fault> PyScheduler::create_transfers(
    const std::vector<PyFile>& files, std::vector<File::Lease>& leases, const std::vector<uintptr_t>& addresses,
    const std::vector<uint64_t>& nbytes, const std::vector<uint64_t>& offsets, const std::vector<size_t>& positions,
    const std::optional<Locations>& locations, const PySegments* segments, const PyChecksums* checksums,
    const std::shared_ptr<Request>& request, std::vector<std::shared_ptr<Transfer>>& transfers,
    std::vector<std::pair<size_t, Fault>>& refused) const {
  const bool write = request->options().write;
  transfers.reserve(files.size());
  std::map<const File*, Fault> full;
  if (write) full = reserve_all(files, nbytes, offsets);
  for (const auto& [file, fault] : full) {
    if (fault.error_number == EINTR) return fault;
  }
  const File* seen = nullptr;
  std::optional<File::Snapshot> snapshot;
  Gates gates;
  for (size_t index = 0; index < files.size(); ++index) {
    const auto& file = files[index].core;
    if (file.get() != seen) {
      seen = file.get();
      snapshot.reset();
      // Asking for the whole file pays where several pieces of it follow each other.
      const size_t next = std::min(index + 4, files.size() - 1);
      if (!write && next > index && files[next].core.get() == seen) {
        auto taken = file->snapshot();
        if (taken) snapshot = *taken;  // else each of them will say why
      }
    }
    if (auto found = full.find(file.get()); found != full.end()) {
      request->refuse(file);
      refused.emplace_back(positions[index], found->second);
      continue;
    }
    TransferSpec spec{file, {}, offsets[index], write};
    spec.lease = std::move(leases[index]);
    if (checksums) spec.checksums = checksums->core;
    if (const size_t end = end_of_neighbours(index, files, addresses, nbytes, offsets, locations, write);
        end > index + 1) {
      TransferSpec joined{file, {}, offsets[index], write};
      joined.lease = file->lease();
      for (size_t item = index; item < end; ++item) {
        if (const uint64_t at = offsets[index] + joined.memory.nbytes(); at < offsets[item]) {
          joined.memory.add_gap(offsets[item] - at);
          joined.positions.push_back(gap_position);
        }
        joined.memory.add(reinterpret_cast<char*>(addresses[item]), nbytes[item]);
        joined.positions.push_back(positions[item]);
      }
      const size_t first = *std::min_element(joined.positions.begin(), joined.positions.end());
      const uint64_t all_nbytes = joined.memory.nbytes();
      auto transfer = Transfer::create(std::move(joined), request, first, core_->block_nbytes_for(all_nbytes),
                                       snapshot ? &*snapshot : nullptr);
      if (transfer) {
        transfers.push_back(*transfer);
        index = end - 1;
        continue;
      }  // else each of them says what is wrong
    }
    auto memory =
        segments ? memory_of(*segments, gates)
                 : memory_of(addresses[index], nbytes[index], locations ? (*locations)[index] : std::nullopt, gates);
    auto transfer = create_transfer(std::move(spec), std::move(memory), nbytes[index], request, positions[index],
                                    snapshot ? &*snapshot : nullptr);
    if (transfer) {
      transfers.push_back(*transfer);
      continue;
    }
    const Fault& fault = transfer.fault();
    for (const int of_all : {EMFILE, ENFILE, ENODEV, EINTR}) {
      if (fault.error_number == of_all) return fault;
    }
    request->refuse(file);
    refused.emplace_back(positions[index], fault);
  }
  return std::nullopt;
}

size_t PyScheduler::end_of_neighbours(size_t index, const std::vector<PyFile>& files,
                                      const std::vector<uintptr_t>& addresses, const std::vector<uint64_t>& nbytes,
                                      const std::vector<uint64_t>& offsets, const std::optional<Locations>& locations,
                                      bool write) {
  const auto joins = [&](size_t item) {
    return addresses[item] != 0 && nbytes[item] > 0 && nbytes[item] < Plan::min_straight_nbytes &&
           (!locations || !(*locations)[item]);
  };
  const uint64_t gap_nbytes = write ? 0 : max_joined_gap_nbytes;
  size_t next = index;
  while (next < files.size() && joins(next) && files[next].core.get() == files[index].core.get()) {
    const uint64_t end = next > index ? offsets[next - 1] + nbytes[next - 1] : offsets[index];
    if (offsets[next] < end || offsets[next] - end > gap_nbytes) break;
    ++next;
  }
  return next;
}

std::map<const File*, Fault> PyScheduler::reserve_all(const std::vector<PyFile>& files,
                                                      const std::vector<uint64_t>& nbytes,
                                                      const std::vector<uint64_t>& offsets) {
  std::map<File*, std::vector<Range>> pieces;
  for (size_t index = 0; index < files.size(); ++index) {
    pieces[files[index].core.get()].push_back({offsets[index], offsets[index] + nbytes[index]});
  }
  std::map<const File*, Fault> full;
  for (auto& [file, ranges] : pieces) {
    if (auto fault = reserve(*file, std::move(ranges))) full.emplace(file, std::move(*fault));
  }
  return full;
}

Result<Segments> PyScheduler::memory_of(uintptr_t address, uint64_t nbytes, const std::optional<Location>& location,
                                        Gates& gates) {
  auto gate = gates.of(location);
  if (!gate) return gate.fault();
  return Segments(reinterpret_cast<char*>(address), nbytes, *gate);
}

Result<Segments> PyScheduler::memory_of(const PySegments& given, Gates& gates) {
  Segments segments;
  segments.reserve(given.pieces.size());
  for (const auto& [address, nbytes, location] : given.pieces) {
    auto gate = gates.of(location);
    if (!gate) return gate.fault();
    segments.add(reinterpret_cast<char*>(address), nbytes, *gate);
  }
  return segments;
}

Result<std::shared_ptr<Transfer>> PyScheduler::create_transfer(TransferSpec spec, Result<Segments> memory,
                                                               uint64_t nbytes, const std::shared_ptr<Request>& request,
                                                               size_t index, const File::Snapshot* snapshot) const {
  std::optional<Fault> fault = memory ? std::nullopt : std::optional(memory.fault());
  if (!fault && !(*memory).gates().empty()) fault = core_->prepare_for_gpus();
  if (fault) {
    fault->path = spec.file->path();
    fault->offset = spec.offset;
    fault->expected = nbytes;
    return *fault;
  }
  spec.memory = std::move(*memory);
  spec.use_cufile = core_->options().engine == "cufile";
  return Transfer::create(std::move(spec), request, index, core_->block_nbytes_for(nbytes), snapshot);
}

void PyScheduler::refuse(const Fault& fault) {
  if (fault.error_number == ENODEV && cuda::driver() == nullptr) raise_unavailable(fault.hint);
  raise(fault);
}

PyScheduler::Admitted::Admitted(PyScheduler& scheduler, size_t count) : core_(*scheduler.core_), count_(count) {
  scheduler.check_usable();
  scheduler.reap();
  auto answer = core_.admit(count, milliseconds(0));  // without letting go of the GIL
  while (answer == Scheduler::Admission::full) {
    wait_interruptibly(std::nullopt, [&](milliseconds slice) {
      answer = core_.admit(count, slice);
      return answer != Scheduler::Admission::full;
    });
  }
  if (answer == Scheduler::Admission::closed) raise_closed();
}

void bind_schedulers(nb::module_& module) {
  nb::class_<PyCompletionQueue>(module, "CompletionQueue")
      .def(nb::init<>())
      .def("fileno", [](const PyCompletionQueue& queue) { return queue.core->descriptor(); })
      .def("take", [](const PyCompletionQueue& queue) { return queue.core->take(); })
      .def("wake", [](const PyCompletionQueue& queue) { queue.core->wake(); })
      .def(
          "wait",
          [](const PyCompletionQueue& queue, double timeout_seconds) {
            WithoutGil release;
            queue.core->wait(static_cast<int>(timeout_seconds * 1000));
          },
          "timeout_seconds"_a);

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

  nb::class_<PyChecksums>(module, "Checksums")
      .def(
          "__init__",
          [](PyChecksums* self, uint64_t chunk_nbytes, bool of_segments, std::vector<uint32_t> expected,
             bool straight) {
            new (self)
                PyChecksums{std::make_shared<Checksums>(chunk_nbytes, of_segments, std::move(expected), straight)};
          },
          "chunk_nbytes"_a, "of_segments"_a, "expected"_a, "straight"_a)
      .def_prop_ro("chunks", [](const PyChecksums& sums) { return sums.core->of_chunks(); })
      .def_prop_ro("segments", [](const PyChecksums& sums) { return sums.core->of_segments(); })
      .def_ro("begun", &PyChecksums::begun);

  nb::class_<PyScheduler>(module, "Scheduler", nb::is_weak_referenceable())
      .def(nb::init<const std::string&, uint64_t, uint64_t, uint32_t, uint32_t, bool>(), "engine"_a, "block_nbytes"_a,
           "large_block_nbytes"_a, "queue_depth"_a, "worker_count"_a, "single_submit"_a)
      .def_prop_ro("engine", [](const PyScheduler& scheduler) { return scheduler.core_->engine_name(); })
      .def_prop_ro("refusals",
                   [](const PyScheduler& scheduler) {
                     std::vector<std::pair<std::string, std::string>> refusals;
                     for (const auto& refusal : scheduler.refusals_)
                       refusals.emplace_back(refusal.engine, refusal.reason);
                     return refusals;
                   })
      .def("new_request", &PyScheduler::new_request, "write"_a, "truncate"_a, "sync"_a, "close_files"_a, "background"_a)
      .def("submit", &PyScheduler::submit, "request"_a, "files"_a, "addresses"_a, "nbytes"_a, "offsets"_a,
           "positions"_a, "owner"_a.none(), "locations"_a.none() = nb::none(), "last"_a.none() = nb::none(),
           "segments"_a.none() = nb::none(), "checksums"_a.none() = nb::none(),
           nb::sig("def submit(self, request: Request, files: collections.abc.Sequence[File], "
                   "addresses: collections.abc.Sequence[int], nbytes: collections.abc.Sequence[int], "
                   "offsets: collections.abc.Sequence[int], positions: collections.abc.Sequence[int], "
                   "owner: object | None, locations: collections.abc.Sequence[tuple[int, int] | None] | None = None, "
                   "last: collections.abc.Sequence[bool] | None = None, segments: Segments | None = None, "
                   "checksums: Checksums | None = None) "
                   "-> list[tuple[int, tensorferry.errors.StorageError]]"))
      .def("run", &PyScheduler::run, "file"_a, "address"_a, "nbytes"_a, "offset"_a, "write"_a, "truncate"_a, "sync"_a,
           "close_files"_a, "background"_a, "owner"_a.none(), "location"_a.none() = nb::none(),
           "segments"_a.none() = nb::none(), "checksums"_a.none() = nb::none())
      .def("run_plain", &PyScheduler::run_plain, "file"_a, "array"_a.none(), "offset"_a.none(), "write"_a, "sync"_a,
           "background"_a,
           nb::sig("def run_plain(self, file: File, array: object, offset: object, write: bool, sync: bool, "
                   "background: bool) -> bool"))
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
      "close_together",
      [](const nb::list& schedulers, double patience_seconds, bool interruptible) {
        std::vector<PyScheduler*> all;
        for (nb::handle scheduler : schedulers) all.push_back(nb::cast<PyScheduler*>(scheduler));
        return PyScheduler::close_together(all, patience_seconds, interruptible);
      },
      "schedulers"_a, "patience_seconds"_a, "interruptible"_a = false,
      nb::sig("def close_together(schedulers: list[Scheduler], patience_seconds: float, interruptible: bool = False) "
              "-> list[bool]"));
  module.def("probe_engines", &probe_engines);
  module.def("engine_names", [] {
    std::vector<std::string> names;
    for (const EngineKind& kind : engine_kinds())
      if (!kind.on_request_only) names.emplace_back(kind.name);
    return names;
  });
}

}  // namespace tensorferry
