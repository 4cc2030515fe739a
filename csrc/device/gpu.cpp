#include "device/gpu.h"

#include <errno.h>

#include "base/after_fork.h"

namespace tensorferry::cuda {
namespace {

constexpr unsigned event_blocking_sync = 1;  // waiting threads sleep
constexpr unsigned event_disable_timing = 2;
constexpr unsigned stream_non_blocking = 1;  // no implicit ordering with the legacy default stream
constexpr int capture_mode_relaxed = 2;
constexpr unsigned register_portable = 1;  // registered for all contexts

struct Registry {
  std::mutex mutex;
  std::map<int, Gpu*> by_ordinal;
};

Registry& registry() { return of_this_process<Registry>(); }

}  // namespace

Current::Current(const Gpu& gpu) : driver_(gpu.driver()), code_(driver_.push_context(gpu.context())) {}

Current::~Current() {
  ContextHandle popped;
  if (code_ == success) (void)driver_.pop_context(&popped);  // fails only if push failed
}

std::optional<Fault> Current::fault() const {
  if (code_ == success) return std::nullopt;
  return fault_of(driver_, code_, "cuCtxPushCurrent");
}

void leave_captures_alone() {
  int mode = capture_mode_relaxed;
  if (const Driver* cuda = driver()) (void)cuda->exchange_capture_mode(&mode);  // fails only for an unknown mode
}

Event& Event::operator=(Event&& other) noexcept {
  if (this == &other) return *this;
  reset();
  gpu_ = std::exchange(other.gpu_, nullptr);
  handle_ = std::exchange(other.handle_, nullptr);
  return *this;
}

void Event::reset() {
  if (handle_ == nullptr) return;
  std::lock_guard lock(gpu_->mutex_);
  gpu_->idle_events_.push_back(std::exchange(handle_, nullptr));
}

std::optional<Fault> Event::record(StreamHandle stream) {
  Current current(*gpu_);
  if (auto fault = current.fault()) return fault;
  if (int code = gpu_->driver().record_event(handle_, stream)) return fault_of(gpu_->driver(), code, "cuEventRecord");
  return std::nullopt;
}

Result<bool> Event::passed() const {
  Current current(*gpu_);
  if (auto fault = current.fault()) return *fault;
  const int code = gpu_->driver().query_event(handle_);
  if (code == success) return true;
  if (code == error_not_ready) return false;
  return fault_of(gpu_->driver(), code, "cuEventQuery");
}

std::optional<Fault> Event::wait() const {
  Current current(*gpu_);
  // Wait even if the context could not be made current: memory must not be released while the stream may still use it.
  const int code = gpu_->driver().synchronize_event(handle_);
  if (code == success) return std::nullopt;
  auto fault = current.fault();
  return fault ? fault : fault_of(gpu_->driver(), code, "cuEventSynchronize");
}

Copier::~Copier() {
  Current current(gpu_);
  for (StreamHandle stream : streams_) {
    if (stream) (void)gpu_.driver().destroy_stream(stream);
  }
}

Result<Event> Copier::start(Direction direction, char* host, Address address, size_t nbytes) {
  auto event = gpu_.take_event();
  if (!event) return event.fault();
  const Driver& driver = gpu_.driver();
  Current current(gpu_);
  if (auto fault = current.fault()) return *fault;
  const bool to_gpu = direction == Direction::to_gpu;
  StreamHandle stream = streams_[to_gpu ? 0 : 1];
  const int code =
      to_gpu ? driver.copy_to_gpu(address, host, nbytes, stream) : driver.copy_from_gpu(host, address, nbytes, stream);
  if (code) return fault_of(driver, code, to_gpu ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync");
  if (auto fault = (*event).record(stream)) {
    // The copy is queued, and without the event only the stream can show when it has completed.
    (void)driver.synchronize_stream(stream);
    return *fault;
  }
  return std::move(*event);
}

Result<Gpu*> Gpu::of(int ordinal) {
  std::string reason;
  const Driver* cuda = cuda::driver(&reason);
  if (cuda == nullptr) return Fault{.error_number = ENODEV, .operation = "loading the CUDA driver", .hint = reason};
  Registry& known = registry();
  std::lock_guard lock(known.mutex);
  Gpu*& gpu = known.by_ordinal[ordinal];
  if (gpu != nullptr) return gpu;
  int device = 0;
  ContextHandle context = nullptr;
  if (int code = cuda->get_device(&device, ordinal)) return fault_of(*cuda, code, "cuDeviceGet");
  if (int code = cuda->retain_primary_context(&context, device)) {
    return fault_of(*cuda, code, "cuDevicePrimaryCtxRetain");
  }
  gpu = new Gpu(*cuda, context);
  return gpu;
}

Result<Event> Gpu::take_event() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      Event event(*this, idle_events_.back());
      idle_events_.pop_back();
      return event;
    }
  }
  Current current(*this);
  if (auto fault = current.fault()) return *fault;
  EventHandle handle = nullptr;
  if (int code = driver_.create_event(&handle, event_blocking_sync | event_disable_timing)) {
    return fault_of(driver_, code, "cuEventCreate");
  }
  return Event(*this, handle);
}

Result<std::unique_ptr<Copier>> Gpu::take_copier() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_copiers_.empty()) {
      auto copier = std::move(idle_copiers_.back());
      idle_copiers_.pop_back();
      return copier;
    }
  }
  Current current(*this);
  if (auto fault = current.fault()) return *fault;
  std::unique_ptr<Copier> copier(new Copier(*this));
  for (StreamHandle& stream : copier->streams_) {
    if (int code = driver_.create_stream(&stream, stream_non_blocking)) {
      return fault_of(driver_, code, "cuStreamCreate");
    }
  }
  return copier;
}

void Gpu::give_back(std::unique_ptr<Copier> copier) {
  std::lock_guard lock(mutex_);
  idle_copiers_.push_back(std::move(copier));
}

Copiers::~Copiers() {
  for (auto& [gpu, copier] : taken_) gpu->give_back(std::move(copier));
}

Result<Copier*> Copiers::of(Gpu& gpu) {
  if (auto found = taken_.find(&gpu); found != taken_.end()) return found->second.get();
  auto copier = gpu.take_copier();
  if (!copier) return copier.fault();
  return (taken_[&gpu] = std::move(*copier)).get();
}

std::optional<Fault> Gpu::register_host(void* memory, size_t nbytes) {
  Current current(*this);
  if (auto fault = current.fault()) return fault;
  if (int code = driver_.register_host(memory, nbytes, register_portable)) {
    return fault_of(driver_, code, "cuMemHostRegister");
  }
  return std::nullopt;
}

void Gpu::unregister_host(void* memory) {
  // A forked child has no registrations and must not call CUDA.
  if (!driver_in_use()) return;
  Current current(*this);
  // At exit the driver may already be unloaded. Nothing is registered then, so the failure does not matter.
  (void)driver_.unregister_host(memory);
}

bool is_capturing(int ordinal, StreamHandle stream) {
  // The default stream cannot be captured, and querying it while another stream is being captured is an error.
  if (stream == nullptr) return false;
  auto gpu = Gpu::of(ordinal);
  if (!gpu) return false;
  Current current(**gpu);
  int status = 0;
  // A failure is ignored here: Gate::after() then fails as well, and its fault is reported with the file's path.
  return (*gpu)->driver().is_capturing(stream, &status) == success && status != 0;
}

Result<std::shared_ptr<Gate>> Gate::after(int ordinal, StreamHandle stream) {
  auto gpu = Gpu::of(ordinal);
  if (!gpu) return gpu.fault();
  auto event = (*gpu)->take_event();
  if (!event) return event.fault();
  if (auto fault = (*event).record(stream)) return *fault;
  return std::shared_ptr<Gate>(new Gate(**gpu, std::move(*event)));
}

}  // namespace tensorferry::cuda
