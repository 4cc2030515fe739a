// A CUDA driver without a GPU: the functions of libcuda.so.1 that tensorferry calls, with the real
// types and rules, over memory that looks like a device's. Each stream is a queue with a separate
// thread, so queued operations run later, and read and write host memory only then. Neither code nor
// the kernel can access device memory by its address. The driver is stricter than CUDA: an
// asynchronous copy fails if its host memory is not registered.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "standin.h"
#include "state.h"

using namespace standin;

namespace {

constexpr std::size_t kPage = 4096;

enum Needs { kNothing, kDriver, kContext };

// Counts the call and returns the error that it gives at once, if any. The caller holds the mutex.
int enter(const char* function, Needs needs, bool may_be_poisoned = true) {
  State& all = state();
  all.add(function, 1);
  if (const int code = all.ordered_failure(function, false)) return code;
  if (needs == kNothing) return kSuccess;
  if (!all.initialized_in) return kNotInitialized;
  if (may_be_poisoned && all.options["poison"]) return static_cast<int>(all.options["poison"]);
  if (needs == kContext && contexts().empty()) return kInvalidContext;
  return kSuccess;
}

template <typename Body>
int call(const char* function, Needs needs, Body body, bool may_be_poisoned = true) {
  if (forked()) return kNotInitialized;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const int code = enter(function, needs, may_be_poisoned);
  return code ? code : body(all);
}

std::shared_ptr<Event> find_event(void* handle) {
  const auto found = state().events.find(handle);
  return found == state().events.end() ? nullptr : found->second;
}

std::shared_ptr<Stream> find_stream(void* handle) { return state().stream(contexts().back()->ordinal, handle); }

std::uintptr_t first_page(std::uintptr_t address) { return address / kPage; }
std::uintptr_t end_page(std::uintptr_t address, std::size_t nbytes) { return (address + nbytes + kPage - 1) / kPage; }

struct HostCopy {
  const char* function;
  const char* counter;
  std::uint64_t device_address;
  void* host;
  std::size_t nbytes;
  bool to_device;
};

int queue_copy(State& all, const HostCopy& copy, void* handle) {
  const auto stream = find_stream(handle);
  if (!stream) return kInvalidHandle;
  if (stream->capture_status) return kCaptureUnsupported;
  const Range range = all.find(copy.device_address, copy.nbytes);
  if (!range) return kInvalidValue;
  if (range.allocation->device != stream->device) return kInvalidHandle;
  if (!all.options["unregistered_allowed"] && !all.is_registered(copy.host, copy.nbytes, stream->device)) {
    std::fprintf(stderr, "stand-in: %s of %zu bytes of host memory that is not registered\n", copy.function,
                 copy.nbytes);
    return kInvalidValue;
  }
  const int failure = all.ordered_failure(copy.function, true);
  all.queue(stream, [copy, range, failure, &all, device = stream->device]() -> int {
    std::int64_t delay_us;
    {
      const std::lock_guard lock(all.mutex);
      delay_us = all.options["copy_delay_us"];
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (failure) return failure;
    {
      const std::lock_guard lock(all.mutex);
      if (!all.options["unregistered_allowed"] && !all.is_registered(copy.host, copy.nbytes, device)) {
        return kIllegalAddress;
      }
      all.add(copy.counter, static_cast<std::int64_t>(copy.nbytes));
    }
    const std::lock_guard lock(range.allocation->mutex);
    if (range.allocation->freed) return kIllegalAddress;
    char* bytes = range.allocation->bytes + range.offset;
    std::memcpy(copy.to_device ? bytes : copy.host, copy.to_device ? copy.host : bytes, copy.nbytes);
    return kSuccess;
  });
  return kSuccess;
}

struct ErrorName {
  int code;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrorNames[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not mapped"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "driver and kernel module do not fit"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while the stream is captured"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int describe(int code, const char** text, const char* ErrorName::* what) {
  if (!text) return kInvalidValue;
  const auto* found = std::ranges::find(kErrorNames, code, &ErrorName::code);
  *text = found == std::end(kErrorNames) ? nullptr : found->*what;
  return *text ? kSuccess : kInvalidValue;
}

}  // namespace

// --- driver and devices ---

STANDIN_API int cuInit(unsigned flags) {
  return call("cuInit", kNothing, [&](State& all) -> int {
    if (flags) return kInvalidValue;
    if (all.options["device_count"] == 0) return kNoDevice;
    all.initialized_in = getpid();
    return kSuccess;
  });
}

STANDIN_API int cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", kNothing, [&](State& all) -> int {
    if (!version) return kInvalidValue;
    *version = static_cast<int>(all.options["driver_version"]);
    return kSuccess;
  });
}

STANDIN_API int cuGetErrorName(int code, const char** text) {
  return call("cuGetErrorName", kNothing, [&](State&) { return describe(code, text, &ErrorName::name); });
}

STANDIN_API int cuGetErrorString(int code, const char** text) {
  return call("cuGetErrorString", kNothing, [&](State&) { return describe(code, text, &ErrorName::text); });
}

STANDIN_API int cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", kDriver, [&](State& all) -> int {
    if (!count) return kInvalidValue;
    *count = static_cast<int>(all.options["device_count"]);
    return kSuccess;
  });
}

STANDIN_API int cuDeviceGet(int* device, int ordinal) {
  return call("cuDeviceGet", kDriver, [&](State& all) -> int {
    if (!device) return kInvalidValue;
    if (ordinal < 0 || ordinal >= all.options["device_count"]) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
  });
}

STANDIN_API int cuDeviceGetName(char* name, int length, int device) {
  return call("cuDeviceGetName", kDriver, [&](State&) -> int {
    if (!name || length <= 0) return kInvalidValue;
    if (device < 0 || device >= kDevicesMax) return kInvalidDevice;
    std::snprintf(name, static_cast<std::size_t>(length), "Stand-in GPU %d", device);
    return kSuccess;
  });
}

// --- contexts ---

STANDIN_API int cuDevicePrimaryCtxRetain(void** context, int device) {
  return call("cuDevicePrimaryCtxRetain", kDriver, [&](State& all) -> int {
    if (!context) return kInvalidValue;
    if (device < 0 || device >= all.options["device_count"]) return kInvalidDevice;
    ++all.devices[device].retained;
    all.add("contexts", 1);
    *context = &all.devices[device];
    return kSuccess;
  });
}

STANDIN_API int cuCtxPushCurrent_v2(void* context) {
  return call("cuCtxPushCurrent_v2", kDriver, [&](State& all) -> int {
    for (Device& device : all.devices) {
      if (&device != context || !device.retained) continue;
      contexts().push_back(&device);
      all.add("contexts_pushed", 1);
      return kSuccess;
    }
    return kInvalidContext;
  });
}

STANDIN_API int cuCtxPopCurrent_v2(void** context) {
  return call(
      "cuCtxPopCurrent_v2", kContext,
      [&](State& all) -> int {
        if (context) *context = contexts().back();
        contexts().pop_back();
        all.add("contexts_pushed", -1);
        return kSuccess;
      },
      false);
}

// --- memory ---

STANDIN_API int cuPointerGetAttribute(void* data, int attribute, std::uint64_t address) {
  return call("cuPointerGetAttribute", kDriver, [&](State& all) -> int {
    const Range range = all.find(address, 0);
    const bool on_host = all.is_registered(reinterpret_cast<void*>(address), 1, -1);
    if (!data || (!range && !on_host)) return kInvalidValue;
    const int device = range ? range.allocation->device : 0;
    switch (attribute) {
      case 1:  // the context
        *static_cast<void**>(data) = &all.devices[device];
        return kSuccess;
      case 2:  // the type of memory: host or device
        *static_cast<unsigned*>(data) = range ? 2 : 1;
        return kSuccess;
      case 8:  // managed?
        *static_cast<unsigned*>(data) = 0;
        return kSuccess;
      case 9:  // the device's ordinal
        *static_cast<int*>(data) = device;
        return kSuccess;
      default: return kInvalidValue;
    }
  });
}

STANDIN_API int cuMemHostRegister_v2(void* host, std::size_t nbytes, unsigned flags) {
  return call("cuMemHostRegister_v2", kContext, [&](State& all) -> int {
    if (!host || !nbytes || flags > 15) return kInvalidValue;
    const auto address = reinterpret_cast<std::uintptr_t>(host);
    for (const auto& [begin, range] : all.registered) {
      if (first_page(address) < end_page(begin, range.nbytes) && first_page(begin) < end_page(address, nbytes)) {
        return kAlreadyRegistered;
      }
    }
    const bool portable = flags & 1;
    all.registered[address] = {nbytes, portable ? -1 : contexts().back()->ordinal};
    all.add("registered_ranges", 1);
    all.add("registered_nbytes", static_cast<std::int64_t>(nbytes));
    return kSuccess;
  });
}

STANDIN_API int cuMemHostUnregister(void* host) {
  return call("cuMemHostUnregister", kContext, [&](State& all) -> int {
    const auto found = all.registered.find(reinterpret_cast<std::uintptr_t>(host));
    if (found == all.registered.end()) return kNotRegistered;
    all.add("registered_ranges", -1);
    all.add("registered_nbytes", -static_cast<std::int64_t>(found->second.nbytes));
    all.registered.erase(found);
    return kSuccess;
  });
}

STANDIN_API int cuMemcpyHtoDAsync_v2(std::uint64_t destination, const void* source, std::size_t nbytes, void* stream) {
  const HostCopy copy = {"cuMemcpyHtoDAsync_v2", "htod_nbytes", destination, const_cast<void*>(source), nbytes, true};
  return call(copy.function, kContext, [&](State& all) { return queue_copy(all, copy, stream); });
}

STANDIN_API int cuMemcpyDtoHAsync_v2(void* destination, std::uint64_t source, std::size_t nbytes, void* stream) {
  const HostCopy copy = {"cuMemcpyDtoHAsync_v2", "dtoh_nbytes", source, destination, nbytes, false};
  return call(copy.function, kContext, [&](State& all) { return queue_copy(all, copy, stream); });
}

// --- streams ---

STANDIN_API int cuStreamCreate(void** handle, unsigned flags) {
  return call("cuStreamCreate", kContext, [&](State& all) -> int {
    if (!handle || flags > 1) return kInvalidValue;
    auto stream = std::make_shared<Stream>();
    stream->device = contexts().back()->ordinal;
    stream->counted = true;
    *handle = stream.get();
    all.streams[*handle] = std::move(stream);
    all.add("streams", 1);
    if (!flags) all.add("blocking_streams_made", 1);
    return kSuccess;
  });
}

STANDIN_API int cuStreamDestroy_v2(void* handle) {
  return call(
      "cuStreamDestroy_v2", kContext,
      [&](State& all) -> int {
        const auto found = all.streams.find(handle);
        if (found == all.streams.end()) return kInvalidHandle;
        if (found->second->counted) all.add("streams", -1);
        all.close(std::shared_ptr(found->second));
        return kSuccess;
      },
      false);
}

STANDIN_API int cuStreamIsCapturing(void* handle, int* status) {
  return call("cuStreamIsCapturing", kContext, [&](State&) -> int {
    const auto stream = find_stream(handle);
    if (!stream) return kInvalidHandle;
    if (!status) return kInvalidValue;
    *status = stream->capture_status;
    return kSuccess;
  });
}

STANDIN_API int cuStreamSynchronize(void* handle) {
  if (forked()) return kNotInitialized;
  State& all = state();
  std::unique_lock lock(all.mutex);
  if (const int code = enter("cuStreamSynchronize", kContext)) return code;
  const auto stream = find_stream(handle);
  if (!stream) return kInvalidHandle;
  all.changed.wait(lock, [&, until = stream->queued] { return stream->done >= until; });
  return stream->error;
}

// The mode decides which calls of this thread may break a capture; in the stand-in no call does.
STANDIN_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  return call("cuThreadExchangeStreamCaptureMode", kNothing, [&](State&) -> int {
    if (!mode || *mode < 0 || *mode > 2) return kInvalidValue;
    std::swap(current, *mode);
    return kSuccess;
  });
}

// --- events ---

STANDIN_API int cuEventCreate(void** handle, unsigned flags) {
  return call("cuEventCreate", kContext, [&](State& all) -> int {
    if (!handle || flags > 7) return kInvalidValue;
    auto event = std::make_shared<Event>();
    event->device = contexts().back()->ordinal;
    *handle = event.get();
    all.events[*handle] = std::move(event);
    all.add("events", 1);
    return kSuccess;
  });
}

STANDIN_API int cuEventDestroy_v2(void* handle) {
  return call(
      "cuEventDestroy_v2", kContext,
      [&](State& all) -> int {
        if (!all.events.erase(handle)) return kInvalidHandle;
        all.add("events", -1);
        return kSuccess;
      },
      false);
}

STANDIN_API int cuEventRecord(void* handle, void* stream_handle) {
  return call("cuEventRecord", kContext, [&](State& all) -> int {
    const auto event = find_event(handle);
    const auto stream = find_stream(stream_handle);
    if (!event || !stream || event->device != stream->device) return kInvalidHandle;
    if (stream->capture_status) return kCaptureUnsupported;
    const std::uint64_t number = ++event->recorded;
    // The stream outlives its queued work, because its thread holds a reference.
    all.queue(stream, [&all, event, number, on = stream.get()] {
      const std::lock_guard lock(all.mutex);
      event->completed = std::max(event->completed, number);
      event->error = std::exchange(on->error, 0);
      return kSuccess;
    });
    return kSuccess;
  });
}

STANDIN_API int cuEventQuery(void* handle) {
  return call("cuEventQuery", kDriver, [&](State&) -> int {
    const auto event = find_event(handle);
    if (!event) return kInvalidHandle;
    return event->completed < event->recorded ? static_cast<int>(kNotReady) : event->error;
  });
}

STANDIN_API int cuEventSynchronize(void* handle) {
  if (forked()) return kNotInitialized;
  State& all = state();
  std::unique_lock lock(all.mutex);
  if (const int code = enter("cuEventSynchronize", kContext)) return code;
  const auto event = find_event(handle);
  if (!event) return kInvalidHandle;
  all.changed.wait(lock, [&, until = event->recorded] { return event->completed >= until; });
  if (all.options["poison"]) return static_cast<int>(all.options["poison"]);
  return event->error;
}
