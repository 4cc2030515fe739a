#include "device/driver.h"

#include <errno.h>

#include <atomic>
#include <mutex>

#include "base/after_fork.h"
#include "device/library.h"

namespace tensorferry::cuda {
namespace {

// CUDA 11.0: its driver, and every later one, has all functions that we use.
constexpr int oldest_version = 11000;

constexpr int pointer_attribute_memory_type = 2;
constexpr int pointer_attribute_device_ordinal = 9;
constexpr unsigned memory_type_host = 1;

bool load(Library& library, Driver& table) {
  return library.load(table.init, "cuInit") && library.load(table.get_version, "cuDriverGetVersion") &&
         library.load(table.get_error_name, "cuGetErrorName") &&
         library.load(table.get_error_string, "cuGetErrorString") && library.load(table.get_device, "cuDeviceGet") &&
         library.load(table.retain_primary_context, "cuDevicePrimaryCtxRetain") &&
         library.load(table.push_context, "cuCtxPushCurrent_v2") &&
         library.load(table.pop_context, "cuCtxPopCurrent_v2") &&
         library.load(table.get_pointer_attribute, "cuPointerGetAttribute") &&
         library.load(table.register_host, "cuMemHostRegister_v2") &&
         library.load(table.unregister_host, "cuMemHostUnregister") &&
         library.load(table.copy_to_gpu, "cuMemcpyHtoDAsync_v2") &&
         library.load(table.copy_from_gpu, "cuMemcpyDtoHAsync_v2") &&
         library.load(table.create_stream, "cuStreamCreate") &&
         library.load(table.destroy_stream, "cuStreamDestroy_v2") &&
         library.load(table.is_capturing, "cuStreamIsCapturing") &&
         library.load(table.synchronize_stream, "cuStreamSynchronize") &&
         library.load(table.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode") &&
         library.load(table.create_event, "cuEventCreate") && library.load(table.record_event, "cuEventRecord") &&
         library.load(table.query_event, "cuEventQuery") && library.load(table.synchronize_event, "cuEventSynchronize");
}

std::string text_of(const Driver& driver, int code) {
  const char* name = nullptr;
  const char* text = nullptr;
  (void)driver.get_error_name(code, &name);  // an unknown code leaves both null
  (void)driver.get_error_string(code, &text);
  std::string both = name ? name : "CUDA error " + std::to_string(code);
  if (text) both += std::string(" (") + text + ")";
  return both;
}

// Load and initialise the driver. Returns an empty string or the reason for a failure.
std::string start(Driver& table) {
  // The first name works in ordinary installations; the others are for containers without ldconfig, and for WSL.
  Library library("TENSORFERRY_LIBCUDA",
                  {"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"});
  if (!library) {
    return "the CUDA driver cannot be opened: " + library.reason() +
           "; likely cause: no NVIDIA driver on this machine, or a container started without --gpus";
  }
  if (!load(library, table)) return "the CUDA driver cannot be used: " + library.reason();
  int version = 0;
  if (int code = table.get_version(&version)) return "cuDriverGetVersion: " + text_of(table, code);
  if (version < oldest_version) {
    return "the CUDA driver supports CUDA " + std::to_string(version / 1000) + "." +
           std::to_string(version % 1000 / 10) + " only; 11.0 or later is required";
  }
  if (int code = table.init(0)) {
    std::string reason = "cuInit: " + text_of(table, code);
    if (fork_generation() > 0) reason += "; CUDA cannot be used in a child made by fork() of a process that used it";
    return reason;
  }
  return "";
}

struct State {
  std::mutex mutex;
  std::atomic<bool> ready{false};
  Driver table{};
};

State& state() { return of_this_process<State>(); }

// The fork generation of the process that first initialised the driver. A forked child of that process cannot use a
// GPU.
std::atomic<uint64_t> first_user{UINT64_MAX};

}  // namespace

const Driver* driver(std::string* reason) {
  State& current = state();
  if (current.ready.load(std::memory_order_acquire)) return &current.table;
  std::lock_guard lock(current.mutex);
  if (current.ready) return &current.table;
  std::string refusal;
  const uint64_t generation = fork_generation();
  if (first_user.load() != UINT64_MAX && first_user.load() != generation) {
    refusal = "CUDA was used before fork(): it cannot be used in the child (remedy: use the start method \"spawn\")";
  } else {
    refusal = start(current.table);
  }
  if (!refusal.empty()) {
    if (reason) *reason = refusal;
    return nullptr;
  }
  first_user = generation;
  current.ready.store(true, std::memory_order_release);  // publishes the table
  return &current.table;
}

bool driver_in_use() { return state().ready.load(std::memory_order_acquire); }

Fault fault_of(const Driver& driver, int code, const char* call) {
  return Fault{
      .error_number = code == error_out_of_memory ? ENOMEM : EIO, .operation = call, .hint = text_of(driver, code)};
}

Result<std::optional<int>> device_of(Address address) {
  std::string reason;
  const Driver* cuda = driver(&reason);
  if (cuda == nullptr) return Fault{.error_number = ENODEV, .operation = "loading the CUDA driver", .hint = reason};
  unsigned type = 0;
  int ordinal = -1;
  int code = cuda->get_pointer_attribute(&type, pointer_attribute_memory_type, address);
  if (code == error_invalid_value) return std::optional<int>();  // host memory that CUDA does not know
  if (code == success && type == memory_type_host) return std::optional<int>();
  if (code == success) code = cuda->get_pointer_attribute(&ordinal, pointer_attribute_device_ordinal, address);
  if (code != success) return fault_of(*cuda, code, "cuPointerGetAttribute");
  return std::optional<int>(ordinal);
}

}  // namespace tensorferry::cuda
