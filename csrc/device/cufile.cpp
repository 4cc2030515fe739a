#include "device/cufile.h"

#include <errno.h>
#include <sys/types.h>

#include <atomic>
#include <map>
#include <mutex>

#include "device/library.h"

namespace tensorferry::cufile {
namespace {

// The ABI of cufile.h (docs.nvidia.com/gpudirect-storage/api-reference-guide).
struct Error {
  int code;
  int cuda_code;
};

struct Descriptor {
  int type;
  union {
    int descriptor;
    void* handle;
  };
  const void* operations;
};

struct Properties {
  struct {
    unsigned major_version;
    unsigned minor_version;
    size_t poll_threshold_nbytes;
    size_t max_direct_io_nbytes;
    unsigned status_flags;
    unsigned control_flags;
  } nvidia_fs;
  unsigned feature_flags;
  unsigned max_cache_nbytes;
  unsigned buffer_cache_nbytes;
  unsigned max_pinned_nbytes;
  unsigned max_batch_size;
  unsigned max_batch_timeout_ms;
  char later_versions[256];
};

constexpr int descriptor_type_fd = 1;
constexpr unsigned feature_p2p_dma = 1u << 4;
constexpr int first_own_code = 5000;
constexpr int cuda_driver_error = 5011;

struct Functions {
  Error (*open_driver)();
  Error (*get_properties)(Properties* properties);
  Error (*register_handle)(Handle* handle, Descriptor* descriptor);
  void (*deregister_handle)(Handle handle);
  Error (*register_buffer)(const void* base, size_t nbytes, int flags);
  Error (*deregister_buffer)(const void* base);
  ssize_t (*read)(Handle handle, void* base, size_t nbytes, off_t file_offset, off_t buffer_offset);
  ssize_t (*write)(Handle handle, const void* base, size_t nbytes, off_t file_offset, off_t buffer_offset);
};

struct Buffer {
  size_t nbytes;
  int ordinal;
};

struct State {
  std::mutex mutex;
  std::atomic<bool> ready{false};
  Functions table{};
  Status status;
  std::map<cuda::Address, Buffer> buffers;
};

State& state() {
  // A forked child gets the parent's instance, but never uses it: it would need a Gpu first, and cuda::driver() returns
  // null in the child.
  static auto* instance = new State;
  return *instance;
}

bool load(Library& library, Functions& table) {
  return library.load(table.open_driver, "cuFileDriverOpen") &&
         library.load(table.get_properties, "cuFileDriverGetProperties") &&
         library.load(table.register_handle, "cuFileHandleRegister") &&
         library.load(table.deregister_handle, "cuFileHandleDeregister") &&
         library.load(table.register_buffer, "cuFileBufRegister") &&
         library.load(table.deregister_buffer, "cuFileBufDeregister") && library.load(table.read, "cuFileRead") &&
         library.load(table.write, "cuFileWrite");
}

const char* name_of(int code) {
  switch (code) {
    case 5001: return "nvidia-fs is not loaded, and cufile.json forbids the compatibility mode";
    case 5004: return "the version of nvidia-fs does not match";
    case 5007: return "GPUDirect Storage is not supported on this platform";
    case 5008: return "GPUDirect Storage is not supported for this file";
    case 5009: return "GPUDirect Storage is not supported by this GPU";
    case 5010: return "nvidia-fs failed";
    case cuda_driver_error: return "the CUDA driver failed";
    case 5012: return "invalid device pointer";
    case 5013: return "not GPU memory";
    case 5014: return "beyond the end of the allocation";
    case 5015: return "memory of another CUDA context";
    case 5016: return "beyond the largest size that can be pinned";
    case 5018: return "unsupported file type";
    case 5019: return "unsupported open flags";
    case 5020: return "the file is not open for direct I/O";
    case 5022: return "invalid argument";
    case 5023: return "the memory is registered already";
    case 5024: return "the memory is not registered";
    case 5025: return "permission denied";
    case 5027: return "the file is not registered";
    case 5028: return "the file is registered already";
    case 5030: return "internal error";
    case 5034: return "disabled for this file by cufile.json";
    case 5036: return "GPU memory cannot be pinned";
    case 5043: return "no memory";
    case 5044: return "I/O error";
    default: return "";
  }
}

std::string code_text(int code) {
  const std::string text = name_of(code);
  return "cuFile error " + std::to_string(code) + (text.empty() ? "" : " (" + text + ")");
}

// The text for a failed call.
std::string text_of(const Error& error) {
  if (error.code == cuda_driver_error) {
    if (const cuda::Driver* driver = cuda::driver()) return cuda::fault_of(*driver, error.cuda_code, "").hint;
  }
  return code_text(error.code);
}

Fault fault_of(const Error& error, const char* call) {
  return Fault{.error_number = EIO, .operation = call, .hint = text_of(error)};
}

// Open the library and its driver, and return the outcome. Requires the mutex of State.
Status start(Functions& table, const std::vector<std::string>& folders, int ordinal) {
  std::string reason;
  if (cuda::driver(&reason) == nullptr) return {.refusal = reason, .detail = ""};
  std::vector<std::string> candidates{"libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.0"};
  for (const std::string& folder : folders) candidates.push_back(folder + "/libcufile.so.0");
  Library library("TENSORFERRY_LIBCUFILE", candidates);
  if (!library) {
    return {.refusal = "cuFile cannot be opened: " + library.reason() +
                       "; remedy: pip install nvidia-cufile (CUDA 13) or nvidia-cufile-cu12",
            .detail = ""};
  }
  if (!load(library, table)) return {.refusal = "cuFile cannot be used: " + library.reason(), .detail = ""};
  // cuFileDriverOpen requires a current context.
  auto gpu = cuda::Gpu::of(ordinal);
  if (!gpu) return {.refusal = gpu.fault().operation + (": " + gpu.fault().hint), .detail = ""};
  cuda::Current current(**gpu);
  if (const Error error = table.open_driver(); error.code != 0) {
    return {.refusal = "cuFileDriverOpen: " + text_of(error), .detail = ""};
  }
  Status found{.refusal = "", .detail = library.path()};
  Properties properties{};
  if (const Error error = table.get_properties(&properties); error.code != 0) {
    found.detail += ": cuFileDriverGetProperties: " + text_of(error);
    return found;
  }
  const auto& nvidia_fs = properties.nvidia_fs;
  const bool has_nvidia_fs = nvidia_fs.major_version != 0 || nvidia_fs.minor_version != 0;
  const bool has_p2p_dma = (properties.feature_flags & feature_p2p_dma) != 0;
  found.native = has_nvidia_fs || has_p2p_dma;
  if (has_nvidia_fs) {
    found.detail +=
        ", nvidia-fs " + std::to_string(nvidia_fs.major_version) + "." + std::to_string(nvidia_fs.minor_version);
  }
  if (has_p2p_dma) found.detail += ", PCI P2P DMA";
  if (!found.native) {
    found.detail += ": neither nvidia-fs nor PCI P2P DMA is available, so it would copy through host memory";
  }
  return found;
}

}  // namespace

Status open(const std::vector<std::string>& folders, int ordinal) {
  State& current = state();
  std::lock_guard lock(current.mutex);
  if (current.ready) return current.status;
  Status status = start(current.table, folders, ordinal);
  if (status.refusal.empty()) {
    current.status = status;
    current.ready = true;
  }
  return status;
}

bool ready() { return state().ready; }

Result<Handle> register_file(int descriptor) {
  State& current = state();
  if (!current.ready) return Fault{.error_number = ENODEV, .operation = "cuFileHandleRegister", .hint = "not open"};
  Descriptor description{};
  description.type = descriptor_type_fd;
  description.descriptor = descriptor;
  Handle handle = nullptr;
  const Error error = current.table.register_handle(&handle, &description);
  if (error.code != 0) return fault_of(error, "cuFileHandleRegister");
  return handle;
}

void deregister_file(Handle handle) {
  if (cuda::driver_in_use()) state().table.deregister_handle(handle);  // otherwise this is a forked child
}

std::optional<Fault> register_buffer(cuda::Address address, size_t nbytes, int ordinal) {
  State& current = state();
  if (!current.ready) return Fault{.error_number = ENODEV, .operation = "cuFileBufRegister", .hint = "not open"};
  auto gpu = cuda::Gpu::of(ordinal);
  if (!gpu) return gpu.fault();
  cuda::Current context(**gpu);
  const Error error = current.table.register_buffer(reinterpret_cast<const void*>(address), nbytes, 0);
  if (error.code != 0) return fault_of(error, "cuFileBufRegister");
  std::lock_guard lock(current.mutex);
  current.buffers[address] = {nbytes, ordinal};
  return std::nullopt;
}

bool deregister_buffer(cuda::Address address) {
  State& current = state();
  Buffer buffer;
  {
    std::lock_guard lock(current.mutex);
    const auto found = current.buffers.find(address);
    if (found == current.buffers.end()) return false;
    buffer = found->second;
    current.buffers.erase(found);
  }
  auto gpu = cuda::Gpu::of(buffer.ordinal);
  if (!gpu) return false;
  cuda::Current context(**gpu);
  return current.table.deregister_buffer(reinterpret_cast<const void*>(address)).code == 0;
}

int64_t transfer(bool write, Handle handle, cuda::Gpu& gpu, char* memory, uint64_t nbytes, uint64_t offset) {
  State& current = state();
  const auto address = reinterpret_cast<cuda::Address>(memory);
  // cuFile identifies registered memory by its first byte; other addresses are given by their offset from it.
  cuda::Address base = address;
  {
    std::lock_guard lock(current.mutex);
    auto after = current.buffers.upper_bound(address);
    if (after != current.buffers.begin()) {
      const auto& [begin, buffer] = *std::prev(after);
      if (address + nbytes <= begin + buffer.nbytes) base = begin;
    }
  }
  auto* at = reinterpret_cast<void*>(base);
  const auto within = static_cast<off_t>(address - base);
  const auto place = static_cast<off_t>(offset);
  cuda::Current context(gpu);
  if (context.fault()) return -cuda_driver_error;
  // cuFileRead and cuFileWrite return -1 with errno set for a system error, and another negative number for their own
  // errors.
  errno = 0;
  const ssize_t moved = write ? current.table.write(handle, at, nbytes, place, within)
                              : current.table.read(handle, at, nbytes, place, within);
  if (moved == -1) return errno != 0 ? -errno : -EIO;
  return moved;
}

bool is_own_code(int64_t result) { return result < -first_own_code; }

std::string text_of(int64_t result) { return code_text(static_cast<int>(-result)); }

}  // namespace tensorferry::cufile
