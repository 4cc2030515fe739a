// cuFile, NVIDIA's library for GPUDirect Storage: the functions we use, opened at run time, with errors as values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fault.h"
#include "device/gpu.h"

namespace tensorferry::cufile {

// A file as cuFile knows it.
using Handle = void*;

struct Status {
  std::string refusal;  // why it cannot be used; empty: it can
  bool native = false;  // transfers may bypass host memory; else cuFile itself copies through it ("compat")
  std::string detail;   // which library, and what it found
};

// Opens the library (where the linker finds it, then in `folders`) and its driver at first use, in the context of a
// GPU. Success is remembered.
Status open(const std::vector<std::string>& folders, int ordinal);

// Whether open() has succeeded.
bool ready();

Result<Handle> register_file(int descriptor);
void deregister_file(Handle handle);

// GPU memory that transfers then reach without a copy within the GPU. The caller keeps it until it is deregistered.
std::optional<Fault> register_buffer(cuda::Address address, size_t nbytes, int ordinal);
bool deregister_buffer(cuda::Address address);

// One transfer, on the calling thread: bytes moved, or -errno, or a code of cuFile's that text_of() explains.
int64_t transfer(bool write, Handle handle, cuda::Gpu& gpu, char* memory, uint64_t nbytes, uint64_t offset);

// Whether a result of transfer() is a code of cuFile's, and what it says.
bool is_own_code(int64_t result);
std::string text_of(int64_t result);

}  // namespace tensorferry::cufile
