// The CUDA driver API: the functions we use, typed, and their errors as values. No header of CUDA is needed; the
// types below are those of its ABI (docs.nvidia.com/cuda/cuda-driver-api), where handles are pointers to structs
// that nobody sees.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/fault.h"

namespace tensorferry::cuda {

using ContextHandle = struct ContextTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using Address = unsigned long long;  // in GPU memory

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

// The driver, loaded and initialised at first use. Null where there is none that works in this process: `reason`, if
// given, then says why and what helps. Success is remembered, failure is not.
const Driver* driver(std::string* reason = nullptr);

// Whether driver() has succeeded in this process.
bool driver_in_use();

// What the failure of a call says: errno for our callers, the call, the error's name and text.
Fault fault_of(const Driver& driver, int code, const char* call);

// The GPU that an address belongs to; nothing for memory that is no GPU's.
Result<std::optional<int>> device_of(Address address);

}  // namespace tensorferry::cuda
