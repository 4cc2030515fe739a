// cuFile, NVIDIA's library for GPUDirect Storage: the functions that we use, loaded at run time, with errors as values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fault.h"
#include "device/gpu.h"

namespace tensorferry::cufile {

// cuFile's handle of a registered file.
using Handle = void*;

struct Status {
  std::string refusal;  // why cuFile cannot be used; empty if it can
  // Whether transfers may bypass host memory; false: cuFile copies through host memory ("compat mode").
  bool native = false;
  std::string detail;  // which library was opened, and what it reports about nvidia-fs and PCI P2P DMA
};

// Open the library and its driver, in the context of the GPU `ordinal`. The library is looked for in the dynamic
// linker's search path, then in `folders`. After a success, further calls return the same status; after a failure, they
// try again.
Status open(const std::vector<std::string>& folders, int ordinal);

// Whether open() has succeeded.
bool ready();

Result<Handle> register_file(int descriptor);
void deregister_file(Handle handle);

// Register GPU memory, so transfers reach it without a copy inside the GPU. The caller must keep the memory until it is
// deregistered.
std::optional<Fault> register_buffer(cuda::Address address, size_t nbytes, int ordinal);
// Returns false if no memory is registered at this address, or cuFile refuses.
bool deregister_buffer(cuda::Address address);

// Run one transfer on the calling thread. Returns the number of bytes moved, -errno, or the negative of an error code
// of cuFile.
int64_t transfer(bool write, Handle handle, cuda::Gpu& gpu, char* memory, uint64_t nbytes, uint64_t offset);

// Whether a result of transfer() is the negative of an error code of cuFile; text_of() is then the text of the error.
bool is_own_code(int64_t result);
std::string text_of(int64_t result);

}  // namespace tensorferry::cufile
