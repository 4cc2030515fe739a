// The functions of the CUDA driver API that we use, loaded at run time, with errors as values. No CUDA header is
// needed: the types below follow the ABI of the API (docs.nvidia.com/cuda/cuda-driver-api), where handles are pointers
// to opaque structs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/fault.h"

namespace tensorferry::cuda {

using ContextHandle = struct ContextTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using Address = unsigned long long;  // an address in GPU memory

constexpr int success = 0;
constexpr int error_invalid_value = 1;
constexpr int error_out_of_memory = 2;
constexpr int error_not_ready = 600;

struct Driver {
  int (*init)(unsigned flags);
  int (*get_version)(int* version);
  int (*get_error_name)(int code, const char** name);
  int (*get_error_string)(int code, const char** text);
  int (*get_device)(int* device, int ordinal);
  int (*retain_primary_context)(ContextHandle* context, int device);
  int (*push_context)(ContextHandle context);
  int (*pop_context)(ContextHandle* context);
  int (*get_pointer_attribute)(void* value, int attribute, Address address);
  int (*register_host)(void* memory, size_t nbytes, unsigned flags);
  int (*unregister_host)(void* memory);
  int (*copy_to_gpu)(Address to, const void* from, size_t nbytes, StreamHandle stream);
  int (*copy_from_gpu)(void* to, Address from, size_t nbytes, StreamHandle stream);
  int (*create_stream)(StreamHandle* stream, unsigned flags);
  int (*destroy_stream)(StreamHandle stream);
  int (*is_capturing)(StreamHandle stream, int* status);
  int (*synchronize_stream)(StreamHandle stream);
  int (*exchange_capture_mode)(int* mode);
  int (*create_event)(EventHandle* event, unsigned flags);
  int (*record_event)(EventHandle event, StreamHandle stream);
  int (*query_event)(EventHandle event);
  int (*synchronize_event)(EventHandle event);
};

// Return the driver, which is loaded and initialised at first use. If no driver works in this process, return null and
// set `reason`, if given, to the cause and the remedy. The next call then tries again, so it finds a driver that was
// installed meanwhile.
const Driver* driver(std::string* reason = nullptr);

// Whether driver() has succeeded in this process.
bool driver_in_use();

// The Fault for a call that returned `code`: with an errno, the name of the call, and the error's name and text.
Fault fault_of(const Driver& driver, int code, const char* call);

// The ordinal of the GPU that the memory at an address belongs to; empty for host memory.
Result<std::optional<int>> device_of(Address address);

}  // namespace tensorferry::cuda
