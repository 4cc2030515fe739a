// The only place that knows Python. Thin: each function turns arguments into the core's types, lets go of the
// GIL, calls, and turns a Fault into the exception that tensorferry.errors builds.
//
// Ownership: a Request's memory and files belong to the arrays' Python objects. Scheduler.submit() takes a
// reference to an `owner` that holds them and keeps it until the core reports the request as finished; no worker
// ever touches a reference count. References are dropped by whoever sees the end from Python, and by the next call
// into the scheduler.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <unordered_map>

#include "bindings/collect.h"
#include "bindings/without_gil.h"
#include "checksum/checksum.h"
#include "device/cufile.h"
#include "device/gpu.h"
#include "engine/engine.h"
#include "file/file.h"
#include "memory/after_fork.h"
#include "memory/allocation.h"
#include "memory/bounce_pool.h"
#include "transfer/completion_queue.h"
#include "transfer/reservation.h"
#include "transfer/scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tensorferry {
namespace {

using std::chrono::milliseconds;

// Ctrl-C is noticed between waits of this length.
constexpr milliseconds signal_interval{40};

nb::object exception_of(const Fault& fault) {
  return nb::module_::import_("tensorferry.errors")
      .attr("storage_error")(fault.error_number, fault.operation, nb::bytes(fault.path.data(), fault.path.size()),
                             fault.offset, fault.expected, fault.transferred, fault.end_of_file, fault.damaged_nbytes,
                             fault.hint);
}

[[noreturn]] void raise(nb::object exception) {
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

[[noreturn]] void raise(const Fault& fault) { raise(exception_of(fault)); }

// Runs without the GIL what waits for the drive, and raises the fault it returns.
template <typename Action>
void raise_fault_of(Action action) {
  const std::optional<Fault> fault = [&] {
    WithoutGil release;
    return action();
  }();
  if (fault) raise(*fault);
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Calls `step(milliseconds)` without the GIL until it returns true or time is over; returns whether it did.
template <typename Step>
bool wait_interruptibly(std::optional<double> timeout_seconds, Step step) {
  using clock = std::chrono::steady_clock;
  // Longer than a century is for ever, and fits the clock.
  const bool forever = !timeout_seconds || *timeout_seconds > 3e9;
  const auto deadline = forever ? clock::time_point::max()
                                : clock::now() + std::chrono::duration_cast<clock::duration>(
                                                     std::chrono::duration<double>(std::max(*timeout_seconds, 0.0)));
  while (true) {
    milliseconds slice = signal_interval;
    if (!forever) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - clock::now());
      slice = std::clamp(left, milliseconds(0), signal_interval);
    }
    bool over;
    {
      WithoutGil release;
      over = step(slice);
    }
    if (over) return true;
    check_signals();
    if (!forever && clock::now() >= deadline) return false;
  }
}

DirectMode direct_mode_of(const std::string& name) {
  if (name == "auto") return DirectMode::automatic;
  return name == "always" ? DirectMode::always : DirectMode::never;
}

[[noreturn]] void raise_unavailable(const std::string& reason) {
  raise(nb::module_::import_("tensorferry.errors").attr("EngineUnavailableError")(reason));
}

// Gates of one call: one for each location that comes.
class Gates {
 public:
  // Null for host memory.
  Result<std::shared_ptr<cuda::Gate>> of(const std::optional<Location>& location) {
    if (!location) return std::shared_ptr<cuda::Gate>();
    for (const auto& [known, gate] : made_) {
      if (known == *location) return gate;
    }
    auto gate = cuda::Gate::after(location->first, reinterpret_cast<cuda::StreamHandle>(location->second));
    if (gate) made_.emplace_back(*location, *gate);
    return gate;
  }

 private:
  std::vector<std::pair<Location, std::shared_ptr<cuda::Gate>>> made_;
};

// Paths travel as str with surrogate escapes or as bytes; the file system wants bytes.
std::string path_of(nb::handle path) {
  nb::object encoded = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
  if (!encoded.is_valid()) throw nb::python_error();
  return std::string(PyBytes_AsString(encoded.ptr()), static_cast<size_t>(PyBytes_Size(encoded.ptr())));
}

// Shared with the core by plain shared_ptr, whose release needs no GIL.
struct PyFile {
  std::shared_ptr<File> core;
};

struct PyCompletionQueue {
  std::shared_ptr<CompletionQueue> core = std::make_shared<CompletionQueue>();

  PyCompletionQueue() {
    if (core->error_number()) raise(Fault{.error_number = core->error_number(), .operation = "eventfd"});
  }
};

PyFile open_file(nb::str path, bool read, bool write, bool create, bool exclusive, bool truncate,
                 const std::string& direct) {
  const std::string name = path_of(path);
  const OpenOptions options{read, write, create, exclusive, truncate, direct_mode_of(direct)};
  auto file = [&] {
    WithoutGil release;
    return File::open(name, options);
  }();
  if (!file) raise(file.fault());
  return PyFile{*file};
}

PyFile file_from_descriptor(int descriptor, bool write, const std::string& direct) {
  auto file = File::from_descriptor(descriptor, write, direct_mode_of(direct));
  if (!file) raise(file.fault());
  return PyFile{*file};
}

File::Lease lease_of(const PyFile& file) {
  auto lease = file.core->lease();
  if (!lease) throw nb::value_error("this file is closed");
  return lease;
}

// Whether no transfer uses the file any more, which no further one can then; False when time is over.
bool retire(const PyFile& file, double timeout_seconds) {
  return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return file.core->retire(slice); });
}

nb::object path_object(const PyFile& self) {
  const File& file = *self.core;
  nb::object path =
      nb::steal(PyUnicode_DecodeFSDefaultAndSize(file.path().data(), static_cast<Py_ssize_t>(file.path().size())));
  if (!path.is_valid()) throw nb::python_error();
  return path;
}

[[noreturn]] void raise_forked(const char* what) {
  PyErr_Format(PyExc_RuntimeError,
               "%s was made before fork(): its workers run in the parent process. Make a new one in the child.", what);
  throw nb::python_error();
}

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
    const bool over =
        core->done() || wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core->wait_for(slice); });
    return over && done();
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
    if (core_) return;
    std::string message;
    for (const auto& [name, reason] : refusals_) message += (message.empty() ? "" : "\n") + name + ": " + reason;
    raise_unavailable(message);
  }

  ~PyScheduler() {
    if (!core_) return;
    if (!core_->belongs_to_this_process()) {
      new std::shared_ptr<Scheduler>(core_);  // its workers are in another process: never destroyed
      return;
    }
    (void)close(close_patience_seconds);
  }

  PyRequest new_request(bool write, bool truncate, bool sync, bool close_files, bool background) {
    check_usable();
    return {std::make_shared<Request>(core_, RequestOptions{write, truncate, sync, close_files, background}), owners_};
  }

  // Hands over as many transfers as there are files; the other lists are as long. `positions` are theirs in the call,
  // and `last` says of each whether it is the last one with its file; None: all are, and the request has no further
  // ones. Returns those refused, which are not handed over, with their positions.
  nb::list submit(PyRequest& request, const std::vector<PyFile>& files, const std::vector<uintptr_t>& addresses,
                  const std::vector<uint64_t>& nbytes, const std::vector<uint64_t>& offsets,
                  const std::vector<size_t>& positions, nb::object owner, const std::optional<Locations>& locations,
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
    }
    {
      WithoutGil release;
      if (!transfers.empty()) core_->submit(request.core, transfers);
      for (size_t index = 0; index < count; ++index) {
        if (!last || (*last)[index]) request.core->seal(*files[index].core);
      }
      if (!last) request.core->seal();
    }
    nb::list found;
    for (const auto& [position, why] : refused) found.append(nb::make_tuple(position, exception_of(why)));
    return found;
  }

  // A blocking call's transfer. None: done, and well. Else the request, to wait for or to ask what went wrong.
  std::optional<PyRequest> run(const PyFile& file, uintptr_t address, uint64_t nbytes, uint64_t offset, bool write,
                               bool truncate, bool sync, bool close_files, bool background, nb::object owner,
                               std::optional<Location> location, const PySegments* segments,
                               const PyChecksums* checksums) {
    PyRequest request = new_request(write, truncate, sync, close_files, background);
    std::vector<File::Lease> leases;
    leases.push_back(lease_of(file));
    Admitted admitted(*this, 1);
    std::vector<std::shared_ptr<Transfer>> transfers;
    std::optional<Fault> fault;
    bool inlined = false;
    {
      WithoutGil release;
      const std::optional<Locations> locations = location ? std::optional(Locations{location}) : std::nullopt;
      std::vector<std::pair<size_t, Fault>> refused;
      fault = create_transfers({file}, leases, {address}, {nbytes}, {offset}, {0}, locations, segments, checksums,
                               request.core, transfers, refused);
      if (!refused.empty()) fault = std::move(refused.front().second);
      inlined = !fault && core_->try_inline(transfers.front());
      if (inlined) {
        admitted.handed_over(1);
        request.core->settle();
      }
    }
    if (fault) refuse(*fault);
    if (inlined && request.core->done() && request.core->faults().empty()) return std::nullopt;
    if (!request.core->done()) {
      owners_->keep(request.core->id(), std::move(owner));
      if (!inlined) admitted.handed_over(1);
      WithoutGil release;
      if (!inlined) {
        core_->submit(request.core, transfers);
        request.core->seal(*file.core);
        request.core->seal();
        core_->share(transfers.front());
      }
    }
    return request;
  }

  // Drops the owners of what has finished.
  void reap() {
    if (!core_->belongs_to_this_process()) return;
    for (uint64_t id : core_->take_finished()) owners_->drop(id);
  }

  size_t outstanding() const { return core_->belongs_to_this_process() ? core_->outstanding() : 0; }

  bool wait_for_progress(double timeout_seconds) {
    check_usable();
    return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core_->wait_for_progress(slice); });
  }

  // Whether all ended well. What did not keeps its memory for ever. After an interruption it is to be called again.
  bool close(double patience_seconds, bool interruptible = false) {
    if (!core_->belongs_to_this_process()) return true;
    closed_ = true;
    if (interruptible && !wait_until_idle(patience_seconds)) patience_seconds = 0;
    bool ended;
    {
      WithoutGil release;
      ended = core_->close(milliseconds(static_cast<int64_t>(patience_seconds * 1000)));
    }
    reap();
    if (!ended && !left_behind_.exchange(true)) new std::shared_ptr<Owners>(owners_);
    return ended;
  }

  // ValueError once closed; RuntimeError in a forked child.
  void check_usable() const {
    if (!core_->belongs_to_this_process()) raise_forked("this handle or file");
    if (closed_) raise_closed();
  }

  nb::dict stats() const {
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

  static constexpr double close_patience_seconds = 60;

  std::shared_ptr<Scheduler> core_;
  std::vector<EngineRefusal> refusals_;
  std::atomic<bool> closed_{false};

 private:
  // False where nothing moves for so long. Steps are counted: a stopped process must not lose its patience.
  bool wait_until_idle(double patience_seconds) {
    core_->refuse();
    uint64_t seen = core_->progress();
    double left = patience_seconds;
    bool idle = false;
    (void)wait_interruptibly(std::nullopt, [&](milliseconds slice) {
      idle = core_->wait_until_idle(slice);
      const uint64_t now = core_->progress();
      left = std::exchange(seen, now) == now ? left - std::chrono::duration<double>(slice).count() : patience_seconds;
      return idle || left <= 0;
    });
    return idle;
  }

  [[noreturn]] static void raise_closed() { throw nb::value_error("this handle or file is closed"); }

  // Room for transfers; what is not handed over is taken back.
  class Admitted {
   public:
    Admitted(PyScheduler& scheduler, size_t count) : core_(*scheduler.core_), count_(count) {
      scheduler.check_usable();
      scheduler.reap();
      auto answer = Scheduler::Admission::full;
      wait_interruptibly(std::nullopt, [&](milliseconds slice) {
        answer = core_.admit(count, slice);
        return answer != Scheduler::Admission::full;
      });
      if (answer == Scheduler::Admission::closed) raise_closed();
    }
    ~Admitted() {
      if (count_ > 0) core_.take_back(count_);
    }
    Admitted(const Admitted&) = delete;
    Admitted& operator=(const Admitted&) = delete;

    void handed_over(size_t count) { count_ -= count; }

   private:
    Scheduler& core_;
    size_t count_;
  };

  // A fault that is no single transfer's, or goes away with time (too many descriptors), refuses all of them.
  std::optional<Fault> create_transfers(const std::vector<PyFile>& files, std::vector<File::Lease>& leases,
                                        const std::vector<uintptr_t>& addresses, const std::vector<uint64_t>& nbytes,
                                        const std::vector<uint64_t>& offsets, const std::vector<size_t>& positions,
                                        const std::optional<Locations>& locations, const PySegments* segments,
                                        const PyChecksums* checksums, const std::shared_ptr<Request>& request,
                                        std::vector<std::shared_ptr<Transfer>>& transfers,
                                        std::vector<std::pair<size_t, Fault>>& refused) const {
    const bool write = request->options().write;
    transfers.reserve(files.size());
    std::map<const File*, Fault> full;
    if (write) full = reserve_all(files, nbytes, offsets);
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
      if (fault.error_number == EMFILE || fault.error_number == ENFILE || fault.error_number == ENODEV) return fault;
      request->refuse(file);
      refused.emplace_back(positions[index], fault);
    }
    return std::nullopt;
  }

  static std::map<const File*, Fault> reserve_all(const std::vector<PyFile>& files, const std::vector<uint64_t>& nbytes,
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

  static Result<Segments> memory_of(uintptr_t address, uint64_t nbytes, const std::optional<Location>& location,
                                    Gates& gates) {
    auto gate = gates.of(location);
    if (!gate) return gate.fault();
    return Segments(reinterpret_cast<char*>(address), nbytes, *gate);
  }

  static Result<Segments> memory_of(const PySegments& given, Gates& gates) {
    Segments segments;
    segments.reserve(given.pieces.size());
    for (const auto& [address, nbytes, location] : given.pieces) {
      auto gate = gates.of(location);
      if (!gate) return gate.fault();
      segments.add(reinterpret_cast<char*>(address), nbytes, *gate);
    }
    return segments;
  }

  Result<std::shared_ptr<Transfer>> create_transfer(TransferSpec spec, Result<Segments> memory, uint64_t nbytes,
                                                    const std::shared_ptr<Request>& request, size_t index,
                                                    const File::Snapshot* snapshot) const {
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

  // What is wrong with the GPU before any I/O is no fault of the file.
  [[noreturn]] static void refuse(const Fault& fault) {
    if (fault.error_number == ENODEV && cuda::driver() == nullptr) raise_unavailable(fault.hint);
    raise(fault);
  }

  std::shared_ptr<Owners> owners_ = std::make_shared<Owners>();
  std::atomic<bool> left_behind_{false};
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

// Page-aligned memory as a uint8 array that owns it, by DLPack and the buffer protocol; and whether it is locked. With
// the number of a GPU it is registered with CUDA, if that lets it.
std::pair<nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>, bool> allocate(size_t nbytes, bool lock,
                                                                                            int ordinal) {
  auto allocation = [&] {
    WithoutGil release;
    auto made = Allocation::create(nbytes, lock ? Locking::wanted : Locking::none);
    if (made && ordinal >= 0) {
      // Copies from memory that is not registered are slower, not wrong.
      if (auto gpu = cuda::Gpu::of(ordinal)) (void)made->register_with(**gpu);
    }
    return made;
  }();
  if (!allocation) {
    PyErr_Format(PyExc_MemoryError, "cannot allocate %zu bytes", nbytes);
    throw nb::python_error();
  }
  const bool locked = allocation->locked();
  char* data = allocation->data();
  nb::capsule owner(new std::shared_ptr<Allocation>(std::move(allocation)),
                    [](void* kept) noexcept { delete static_cast<std::shared_ptr<Allocation>*>(kept); });
  return {nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>(data, {nbytes}, owner), locked};
}

bool is_locked(uintptr_t address, size_t nbytes) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), nbytes);
  return allocation && allocation->locked();
}

bool is_lent(uintptr_t address, size_t nbytes) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), nbytes);
  return allocation && allocation->lent();
}

// Whether this is the first byte of an allocation that had not been given back yet.
bool give_back(uintptr_t address) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), 1);
  if (!allocation || reinterpret_cast<uintptr_t>(allocation->data()) != address) return false;
  WithoutGil release;
  return allocation->give_back();
}

std::optional<std::string> cuda_refusal() {
  WithoutGil release;
  std::string reason;
  return cuda::driver(&reason) ? std::nullopt : std::optional(reason);
}

int device_of(uintptr_t address) {
  auto ordinal = cuda::device_of(address);
  if (!ordinal) raise(ordinal.fault());
  if (!*ordinal) throw nb::value_error("no memory of a GPU is at this address");
  return **ordinal;
}

bool is_capturing(int device, uintptr_t stream) {
  return cuda::is_capturing(device, reinterpret_cast<cuda::StreamHandle>(stream));
}

std::tuple<std::optional<std::string>, bool, std::string> open_cufile(const std::vector<std::string>& folders,
                                                                      int device) {
  WithoutGil release;
  const cufile::Status status = cufile::open(folders, device);
  return {status.refusal.empty() ? std::nullopt : std::optional(status.refusal), status.native, status.detail};
}

void register_gpu_buffer(uintptr_t address, size_t nbytes, int device) {
  raise_fault_of([&] { return cufile::register_buffer(address, nbytes, device); });
}

bool deregister_gpu_buffer(uintptr_t address) {
  WithoutGil release;
  return cufile::deregister_buffer(address);
}

// Address and bytes of a C-contiguous buffer, or None where the object has none (or no writable one). It stays where
// it is as long as the caller keeps an export, such as a memoryview, alive.
std::optional<std::pair<uintptr_t, uint64_t>> buffer_memory(nb::handle exporter, bool writable) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(exporter.ptr(), &buffer, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::pair found{reinterpret_cast<uintptr_t>(buffer.buf), static_cast<uint64_t>(buffer.len)};
  PyBuffer_Release(&buffer);
  return found;
}

// Address, bytes, whether it may be written to, whether it is C-contiguous; and what keeps it: an exporter may make the
// memory for this one view.
std::tuple<uintptr_t, uint64_t, bool, bool, nb::capsule> dlpack_memory(nb::handle array) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(array, view)) throw nb::type_error("cannot import the array through DLPack");
  nb::ndarray<> writable;
  // What is elsewhere every time is a copy, which nobody would see what is read into.
  const bool may_write = nb::try_cast(array, writable) && writable.data() == view.data();
  bool contiguous = true;
  int64_t expected = 1;
  for (size_t axis = view.ndim(); axis-- > 0;) {
    if (view.shape(axis) != 1 && view.stride(axis) != expected) contiguous = false;
    expected *= static_cast<int64_t>(view.shape(axis));
  }
  nb::capsule keeper(new nb::ndarray<nb::ro>(view),
                     [](void* kept) noexcept { delete static_cast<nb::ndarray<nb::ro>*>(kept); });
  return {reinterpret_cast<uintptr_t>(view.data()), view.nbytes(), may_write, contiguous || view.size() == 0, keeper};
}

// Shorter ones are done before another thread would have got the GIL.
constexpr Py_ssize_t gil_free_crc_nbytes = 16 << 10;

uint32_t crc32_of(nb::handle exporter, uint32_t crc) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(exporter.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto nbytes = static_cast<size_t>(buffer.len);
  if (buffer.len < gil_free_crc_nbytes) {
    crc = crc32(crc, buffer.buf, nbytes);
  } else {
    WithoutGil release;
    crc = crc32(crc, buffer.buf, nbytes);
  }
  PyBuffer_Release(&buffer);
  return crc;
}

}  // namespace
}  // namespace tensorferry

NB_MODULE(_core, module) {
  using namespace tensorferry;
  module.doc() = "The native core of tensorferry: see csrc/. Use the package's public names instead.";
  // DeepSpeed's engines, and with them our handles, are alive when the interpreter ends. All their I/O has been
  // finished by then (runtime.py), and each of a training's processes would print twenty lines.
  nb::set_leak_warnings(false);

  bind_collect(module);

  nb::class_<PyFile>(module, "File")
      .def_prop_ro("path", path_object, nb::sig("def path(self) -> str"))
      .def_prop_ro("device", [](const PyFile& file) { return file.core->identity().first; })
      .def_prop_ro("direct", [](const PyFile& file) { return file.core->direct(); })
      .def_prop_ro("readable", [](const PyFile& file) { return file.core->readable(); })
      .def_prop_ro("writable", [](const PyFile& file) { return file.core->writable(); })
      .def_prop_ro("memory_alignment", [](const PyFile& file) { return file.core->alignment().memory; })
      .def_prop_ro("offset_alignment", [](const PyFile& file) { return file.core->alignment().offset; })
      .def("size",
           [](const PyFile& file) {
             const auto lease = lease_of(file);
             auto size = file.core->size();
             if (!size) raise(size.fault());
             return *size;
           })
      .def("sync",
           [](const PyFile& file) {
             const auto lease = lease_of(file);
             raise_fault_of([&] { return file.core->sync(); });
           })
      .def(
          "truncate",
          [](const PyFile& file, uint64_t size) {
            const auto lease = lease_of(file);
            raise_fault_of([&] { return file.core->truncate(size); });
          },
          "size"_a)
      .def(
          "preallocate",
          [](const PyFile& file, uint64_t offset, uint64_t nbytes) {
            const auto lease = lease_of(file);
            raise_fault_of([&] { return file.core->preallocate(offset, nbytes); });
          },
          "offset"_a, "nbytes"_a)
      .def(
          "reserve",
          [](const PyFile& file, const std::vector<uint64_t>& offsets, const std::vector<uint64_t>& nbytes) {
            if (nbytes.size() != offsets.size()) throw nb::value_error("offsets and nbytes differ in length");
            const auto lease = lease_of(file);
            std::vector<Range> pieces;
            for (size_t index = 0; index < offsets.size(); ++index) {
              pieces.push_back({offsets[index], offsets[index] + nbytes[index]});
            }
            raise_fault_of([&] { return reserve(*file.core, std::move(pieces)); });
          },
          "offsets"_a, "nbytes"_a)
      .def("retire", &retire, "timeout_seconds"_a)
      .def("close", [](const PyFile& file) { raise_fault_of([&] { return file.core->close(); }); });

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
            request.core->notify(queue.core, token);
          },
          "queue"_a, "token"_a);

  nb::class_<PyChecksums>(module, "Checksums")
      .def(
          "__init__",
          [](PyChecksums* self, uint64_t chunk_nbytes, bool of_segments, std::vector<uint32_t> expected) {
            new (self) PyChecksums{std::make_shared<Checksums>(chunk_nbytes, of_segments, std::move(expected))};
          },
          "chunk_nbytes"_a, "of_segments"_a, "expected"_a)
      .def_prop_ro("chunks", [](const PyChecksums& sums) { return sums.core->of_chunks(); })
      .def_prop_ro("segments", [](const PyChecksums& sums) { return sums.core->of_segments(); });

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
      .def("reap", &PyScheduler::reap)
      .def("outstanding", &PyScheduler::outstanding)
      .def("wait_for_progress", &PyScheduler::wait_for_progress, "timeout_seconds"_a)
      .def("check_usable", &PyScheduler::check_usable)
      .def("belongs_to_this_process",
           [](const PyScheduler& scheduler) { return scheduler.core_->belongs_to_this_process(); })
      .def("stats", &PyScheduler::stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("close", &PyScheduler::close, "patience_seconds"_a = PyScheduler::close_patience_seconds,
           "interruptible"_a = false);

  module.def("open_file", &open_file, "path"_a, "read"_a, "write"_a, "create"_a, "exclusive"_a, "truncate"_a,
             "direct"_a);
  module.def("file_from_descriptor", &file_from_descriptor, "descriptor"_a, "write"_a, "direct"_a);
  module.def("open_descriptors", &File::open_descriptors);
  module.def("probe_engines", &probe_engines);
  module.def("allocate", &allocate, "nbytes"_a, "lock"_a, "gpu"_a = -1);
  module.def("is_locked", &is_locked, "address"_a, "nbytes"_a);
  module.def("is_lent", &is_lent, "address"_a, "nbytes"_a);
  module.def("give_back", &give_back, "address"_a);
  module.def("buffer_memory", &buffer_memory, "exporter"_a, "writable"_a);
  module.def("dlpack_memory", &dlpack_memory, "array"_a);
  module.def("crc32", &crc32_of, "buffer"_a, "crc"_a = 0);
  module.def("crc32_combine", &crc32_combine, "crc"_a, "next_crc"_a, "nbytes"_a);
  module.def("cuda_refusal", &cuda_refusal);
  module.def("cuda_in_use", &cuda::driver_in_use);
  module.def("device_of", &device_of, "address"_a);
  module.def("is_capturing", &is_capturing, "device"_a, "stream"_a);
  module.def("open_cufile", &open_cufile, "folders"_a, "device"_a = 0);
  module.def("register_gpu_buffer", &register_gpu_buffer, "address"_a, "nbytes"_a, "device"_a);
  module.def("deregister_gpu_buffer", &deregister_gpu_buffer, "address"_a);
  module.def("pinned_pool_nbytes", &BouncePool::pinned_pool_nbytes);
  module.def("fork_generation", &fork_generation);
  module.def("bounce_pool_nbytes", &BouncePool::process_pool_nbytes);
  module.def("set_bounce_pool_nbytes", &BouncePool::set_process_pool_nbytes, "nbytes"_a);
  module.def("engine_names", [] {
    std::vector<std::string> names;
    for (const EngineKind& kind : engine_kinds())
      if (!kind.on_request_only) names.emplace_back(kind.name);
    return names;
  });
  module.attr("MIN_BOUNCE_POOL_NBYTES") = BouncePool::min_nbytes;
}
