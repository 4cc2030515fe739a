// A cuFile without GPUDirect Storage: the functions of libcufile.so.0 that tensorferry calls, with the
// real types and rules. It finds the stand-in driver's memory through standin.h, so its transfers move
// bytes between files and the "GPU" without any memory of tensorferry's, as with nvidia-fs. It counts
// transfers that would be slow on a real one (unaligned offsets and sizes), and refuses wrong calls.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "standin.h"

namespace {

enum Code : int {
  kSuccess = 0,
  kDriverNotInitialized = 5001,
  kCudaDriverError = 5011,
  kPointerRange = 5014,
  kContextMismatch = 5015,
  kMappingRange = 5017,
  kFileType = 5018,
  kInvalidValue = 5022,
  kMemoryAlreadyRegistered = 5023,
  kMemoryNotRegistered = 5024,
  kHandleNotRegistered = 5027,
  kHandleAlreadyRegistered = 5028,
};

struct Error {
  int cufile;
  int cuda;
};

struct Properties {
  struct {
    unsigned major_version;
    unsigned minor_version;
    std::size_t poll_threshold_kib;
    std::size_t max_direct_io_kib;
    unsigned file_systems;
    unsigned control_flags;
  } nvfs;
  unsigned features;
  unsigned max_device_cache_kib;
  unsigned per_buffer_cache_kib;
  unsigned max_device_pinned_kib;
  unsigned max_batch_io;
  unsigned max_batch_io_timeout_ms;
};
static_assert(sizeof(Properties) == 56);

struct Description {
  int type;
  union {
    int fd;
    void* handle;
  };
  const void* operations;
};
static_assert(sizeof(Description) == 24);

struct File {
  int fd;
  dev_t device;
  ino_t inode;
};

struct Known {
  std::mutex mutex;
  bool open = false;
  std::map<void*, std::unique_ptr<File>> files;
  std::map<std::uint64_t, std::size_t> buffers;
};

Known& known() {
  static Known* const instance = new Known;  // calls may outlive main
  return *instance;
}

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kBounce = std::size_t{1} << 20;
constexpr std::size_t kTransferMax = 0x7ffff000;

// A small number that a test ordered is CUDA's error.
Error error_of(int code) { return code == 0 || code >= 5000 ? Error{code, 0} : Error{kCudaDriverError, code}; }

// The result of cuFileRead and cuFileWrite for an error: cuFile's negative code, or -1 and errno.
ssize_t failed(int code) {
  if (code >= 5000) return -code;
  errno = code;
  return -1;
}

bool is_same_file(const File& file) {
  struct stat now;
  return fstat(file.fd, &now) == 0 && now.st_dev == file.device && now.st_ino == file.inode;
}

struct Transfer {
  void* handle;
  std::uint64_t base;
  std::size_t nbytes;
  off_t file_offset;
  off_t buffer_offset;
  bool write;
};

// Moves bytes in pieces through memory that suits O_DIRECT, as a device's own does.
ssize_t carry_out(const Transfer& transfer, int fd, std::size_t nbytes) {
  const std::unique_ptr<void, decltype(&std::free)> bounce(std::aligned_alloc(kBlock, kBounce), std::free);
  const std::uint64_t address = transfer.base + static_cast<std::uint64_t>(transfer.buffer_offset);
  std::size_t done = 0;
  while (done < nbytes) {
    const std::size_t piece = std::min(kBounce, nbytes - done);
    const off_t offset = transfer.file_offset + static_cast<off_t>(done);
    if (transfer.write && standin_peek(address + done, bounce.get(), piece)) {
      return failed(kPointerRange);
    }
    const ssize_t moved =
        transfer.write ? pwrite(fd, bounce.get(), piece, offset) : pread(fd, bounce.get(), piece, offset);
    if (moved < 0) return done ? static_cast<ssize_t>(done) : -1;
    const auto count = static_cast<std::size_t>(moved);
    if (!transfer.write && count && standin_poke(address + done, bounce.get(), count)) {
      return failed(kPointerRange);
    }
    done += count;
    if (count < piece) break;
  }
  return static_cast<ssize_t>(done);
}

ssize_t run(const char* function, const Transfer& transfer) {
  if (const int code = standin_enter(function)) return failed(code);
  int fd;
  {
    Known& all = known();
    const std::lock_guard lock(all.mutex);
    if (!all.open) return failed(kDriverNotInitialized);
    const auto file = all.files.find(transfer.handle);
    if (file == all.files.end() || !is_same_file(*file->second)) return failed(kHandleNotRegistered);
    fd = file->second->fd;
    if (transfer.nbytes > kTransferMax || transfer.file_offset < 0 || transfer.buffer_offset < 0) {
      return failed(EINVAL);
    }
    const auto buffer = all.buffers.find(transfer.base);
    if (buffer != all.buffers.end()) {
      const auto offset = static_cast<std::size_t>(transfer.buffer_offset);
      if (offset > buffer->second || transfer.nbytes > buffer->second - offset) {
        return failed(kMappingRange);
      }
      standin_add("cufile_registered", 1);
    }
  }
  const std::uint64_t address = transfer.base + static_cast<std::uint64_t>(transfer.buffer_offset);
  const int device = standin_device_of(address, transfer.nbytes);
  if (device < 0) return failed(kPointerRange);
  if (device != standin_current_device()) return failed(kContextMismatch);
  if (transfer.file_offset % kBlock || transfer.nbytes % kBlock) standin_add("cufile_unaligned", 1);

  const auto limit = static_cast<std::size_t>(standin_option("cufile_transfer_max"));
  const std::size_t nbytes = limit ? std::min(limit, transfer.nbytes) : transfer.nbytes;
  standin_add("cufile_running", 1);
  std::this_thread::sleep_for(std::chrono::microseconds(standin_option("cufile_delay_us")));
  const ssize_t moved = carry_out(transfer, fd, nbytes);
  const int error = errno;
  standin_add("cufile_running", -1);
  if (moved > 0) {
    standin_add(transfer.write ? "cufile_written_nbytes" : "cufile_read_nbytes", moved);
  }
  errno = error;
  return moved;
}

}  // namespace

STANDIN_API Error cuFileDriverOpen() {
  if (const int code = standin_enter("cuFileDriverOpen")) return error_of(code);
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  all.open = true;
  return {kSuccess, 0};
}

STANDIN_API Error cuFileDriverGetProperties(Properties* properties) {
  if (const int code = standin_enter("cuFileDriverGetProperties")) return error_of(code);
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (!all.open) return {kDriverNotInitialized, 0};
  if (!properties) return {kInvalidValue, 0};
  const bool nvfs = standin_option("cufile_nvfs") != 0;
  const bool p2p = standin_option("cufile_p2p") != 0;
  *properties = {};
  properties->nvfs.major_version = nvfs ? 2 : 0;
  properties->nvfs.minor_version = nvfs ? 26 : 0;
  properties->nvfs.max_direct_io_kib = 16384;
  properties->nvfs.file_systems = nvfs ? 1U << 4 : 0;  // NVMe
  properties->nvfs.control_flags = 1U << 1;            // the compat mode is allowed
  properties->features = p2p ? 1U << 4 : 0;
  return {kSuccess, 0};
}

STANDIN_API Error cuFileHandleRegister(void** handle, Description* description) {
  if (const int code = standin_enter("cuFileHandleRegister")) return error_of(code);
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (!all.open) return {kDriverNotInitialized, 0};
  struct stat status;
  if (!handle || !description || description->type != 1 || description->operations ||
      fstat(description->fd, &status) != 0) {
    return {kInvalidValue, 0};
  }
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) return {kFileType, 0};
  for (const auto& [other, file] : all.files) {
    if (file->fd == description->fd) return {kHandleAlreadyRegistered, 0};
  }
  if (!(fcntl(description->fd, F_GETFL) & O_DIRECT)) standin_add("cufile_buffered_files", 1);
  auto file = std::make_unique<File>(File{description->fd, status.st_dev, status.st_ino});
  *handle = file.get();
  all.files[*handle] = std::move(file);
  standin_add("cufile_files", 1);
  return {kSuccess, 0};
}

STANDIN_API void cuFileHandleDeregister(void* handle) {
  standin_enter("cuFileHandleDeregister");
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  const auto found = all.files.find(handle);
  if (found == all.files.end()) return;
  if (!is_same_file(*found->second)) standin_add("cufile_closed_early", 1);
  all.files.erase(found);
  standin_add("cufile_files", -1);
}

STANDIN_API Error cuFileBufRegister(const void* base, std::size_t nbytes, int flags) {
  if (const int code = standin_enter("cuFileBufRegister")) return error_of(code);
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (!all.open) return {kDriverNotInitialized, 0};
  const auto address = reinterpret_cast<std::uint64_t>(base);
  if (!nbytes || flags) return {kInvalidValue, 0};
  const int device = standin_device_of(address, nbytes);
  if (device < 0) return {kPointerRange, 0};
  if (device != standin_current_device()) return {kContextMismatch, 0};
  if (!all.buffers.emplace(address, nbytes).second) return {kMemoryAlreadyRegistered, 0};
  standin_add("cufile_buffers", 1);
  return {kSuccess, 0};
}

STANDIN_API Error cuFileBufDeregister(const void* base) {
  if (const int code = standin_enter("cuFileBufDeregister")) return error_of(code);
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (!all.buffers.erase(reinterpret_cast<std::uint64_t>(base))) return {kMemoryNotRegistered, 0};
  standin_add("cufile_buffers", -1);
  return {kSuccess, 0};
}

STANDIN_API ssize_t cuFileRead(void* handle, void* base, std::size_t nbytes, off_t file_offset, off_t buffer_offset) {
  return run("cuFileRead", {handle, reinterpret_cast<std::uint64_t>(base), nbytes, file_offset, buffer_offset, false});
}

STANDIN_API ssize_t cuFileWrite(void* handle, const void* base, std::size_t nbytes, off_t file_offset,
                                off_t buffer_offset) {
  return run("cuFileWrite", {handle, reinterpret_cast<std::uint64_t>(base), nbytes, file_offset, buffer_offset, true});
}
