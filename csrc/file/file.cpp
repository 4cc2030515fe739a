#include "file/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace tensorferry {
namespace {

// linux/stat.h of older distributions lacks the direct-I/O fields, so the kernel's layout stands here: see
// statx(2), STATX_DIOALIGN, Linux 6.1.
constexpr uint32_t statx_dioalign_mask = 0x2000;
struct StatxWithDirectAlignment {
  uint32_t mask;
  uint8_t before[0x98 - 4];
  uint32_t memory_alignment;
  uint32_t offset_alignment;
  uint8_t after[0x100 - 0xa0];
};
static_assert(sizeof(StatxWithDirectAlignment) == 0x100);

// cachestat(2), Linux 6.5; the number is the same on every architecture.
constexpr long cachestat_number = 451;
struct CachestatRange {
  uint64_t offset;
  uint64_t nbytes;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

// What to assume where the kernel does not tell (before 6.1, FUSE, NFS): no device asks for more than a page.
constexpr uint32_t assumed_alignment = 4096;

std::atomic<size_t> descriptors_open{0};

int counted(int descriptor) {
  if (descriptor >= 0) descriptors_open.fetch_add(1, std::memory_order_relaxed);
  return descriptor;
}

void close_counted(int descriptor) {
  if (descriptor < 0) return;
  // Linux releases the descriptor whatever close returns, and errors of the data were reported by fsync.
  (void)::close(descriptor);
  descriptors_open.fetch_sub(1, std::memory_order_relaxed);
}

int open_retrying(const char* path, int flags, mode_t mode = 0) {
  int descriptor;
  do {
    descriptor = ::open(path, flags | O_CLOEXEC, mode);
  } while (descriptor < 0 && errno == EINTR);
  return counted(descriptor);
}

std::string link_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

std::string name_of(int descriptor) {
  std::array<char, 4096> name;
  ssize_t length = ::readlink(link_of(descriptor).c_str(), name.data(), name.size());
  return length > 0 ? std::string(name.data(), static_cast<size_t>(length))
                    : "descriptor " + std::to_string(descriptor);
}

#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546  // linux/magic.h since 5.13
#endif

enum class FileSystem { memory, fuse, other };

FileSystem file_system_of(int descriptor) {
  struct statfs info;
  if (::fstatfs(descriptor, &info) != 0) return FileSystem::other;
  switch (info.f_type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case HUGETLBFS_MAGIC: return FileSystem::memory;
    case FUSE_SUPER_MAGIC: return FileSystem::fuse;
    default: return FileSystem::other;
  }
}

// Extending is check-then-act (a failed reservation is undone), so it is serialized within the process.
std::mutex& extension_mutex(ino_t inode) {
  static auto* mutexes = new std::array<std::mutex, 64>;
  return (*mutexes)[inode % mutexes->size()];
}

int fallocate_retrying(int descriptor, int mode, uint64_t offset, uint64_t nbytes) {
  int result;
  do {
    result = ::fallocate(descriptor, mode, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

uint32_t page_nbytes() {
  static const uint32_t nbytes = static_cast<uint32_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

size_t File::open_descriptors() { return descriptors_open.load(std::memory_order_relaxed); }

File::File(std::string path, int descriptor, bool readable, bool writable)
    : path_(std::move(path)), descriptor_(descriptor), readable_(readable), writable_(writable) {}

File::~File() {
  if (cufile_ != nullptr) cufile::deregister_file(cufile_);
  close_counted(buffered_);
  close_counted(directory_);
  close_counted(descriptor_);
}

Fault File::fault(const char* operation, int error_number) const {
  return Fault{.error_number = error_number, .operation = operation, .path = path_};
}

Result<std::shared_ptr<File>> File::open(const std::string& path, const OpenOptions& options) {
  int flags = options.write ? (options.read ? O_RDWR : O_WRONLY) : O_RDONLY;
  if (options.create) flags |= O_CREAT;
  if (options.exclusive) flags |= O_EXCL;
  if (options.truncate) flags |= O_TRUNC;
  // O_NONBLOCK only keeps a FIFO from hanging the open; such files are refused below, others ignore it.
  int descriptor = open_retrying(path.c_str(), flags | O_NOCTTY | O_NONBLOCK, 0666);
  if (descriptor < 0) return Fault{.error_number = errno, .operation = "open", .path = path};
  std::shared_ptr<File> file(new File(path, descriptor, options.read || !options.write, options.write));
  if (auto fault = file->enable_direct(options.direct)) return *fault;
  return file;
}

Result<std::shared_ptr<File>> File::from_descriptor(int descriptor, bool write, DirectMode direct) {
  Fault fault{.error_number = 0, .operation = "open descriptor", .path = "descriptor " + std::to_string(descriptor)};
  int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0) {
    fault.error_number = errno;
    return fault;
  }
  const int access = flags & O_ACCMODE;
  if (access == (write ? O_RDONLY : O_WRONLY)) {
    fault.error_number = EBADF;
    fault.hint = write ? "the descriptor was opened for reading only" : "the descriptor was opened for writing only";
    return fault;
  }
  std::string path = name_of(descriptor);
  // A description of our own: the caller's flags (O_APPEND would ignore our offsets) and position stay theirs.
  int own = open_retrying(link_of(descriptor).c_str(), access | O_NOCTTY | O_NONBLOCK);
  if (own < 0) {
    const int reopen_error = errno;
    if (reopen_error == EMFILE || reopen_error == ENFILE || (flags & (O_APPEND | O_DIRECT))) {
      fault.error_number = reopen_error;
      return fault;
    }
    own = counted(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (own < 0) {
      fault.error_number = errno;
      return fault;
    }
    direct = DirectMode::never;  // the description is shared with the caller: its flags must not change
  }
  std::shared_ptr<File> file(new File(std::move(path), own, access != O_WRONLY, access != O_RDONLY));
  if (auto failed = file->enable_direct(direct)) return *failed;
  return file;
}

std::optional<Fault> File::enable_direct(DirectMode mode) {
  mode_ = mode;
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  if (S_ISDIR(status.st_mode)) return fault("open", EISDIR);
  regular_ = S_ISREG(status.st_mode);
  identity_ = {status.st_dev, status.st_ino};
  if (!regular_ && !S_ISBLK(status.st_mode)) {
    Fault refused = fault("open", ESPIPE);
    refused.hint = "only regular files and block devices can hold tensors";
    return refused;
  }
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) return fault("fcntl", errno);
  // O_NONBLOCK has served; io_uring would take it for "fail rather than wait".
  if ((flags & O_NONBLOCK) && ::fcntl(descriptor_, F_SETFL, flags & ~O_NONBLOCK) != 0) return fault("fcntl", errno);
  if (mode == DirectMode::never) return std::nullopt;

  auto unsupported = [&](const char* why) -> std::optional<Fault> {
    if (mode == DirectMode::automatic) return std::nullopt;
    Fault refused = fault("open with O_DIRECT", EINVAL);
    refused.hint = why;
    return refused;
  };
  // Memory file systems may accept O_DIRECT and then copy all the same; their page cache *is* the file.
  const FileSystem file_system = file_system_of(descriptor_);
  if (regular_ && file_system == FileSystem::memory) {
    return unsupported("the file system lives in memory: use direct=\"auto\" or False");
  }
  StatxWithDirectAlignment status_x;
  std::memset(&status_x, 0, sizeof status_x);
  const bool told = ::syscall(SYS_statx, descriptor_, "", AT_EMPTY_PATH, statx_dioalign_mask, &status_x) == 0 &&
                    (status_x.mask & statx_dioalign_mask);
  if (told && status_x.offset_alignment == 0) {
    return unsupported("the file system has no direct I/O for this file: use direct=\"auto\" or False");
  }
  // Linux reports a short asynchronous direct write to FUSE as EIO (fs/fuse/file.c, fuse_get_res_by_io), so that it
  // could not be resumed.
  if (!told && file_system == FileSystem::fuse && mode == DirectMode::automatic) return std::nullopt;
  if (::fcntl(descriptor_, F_SETFL, (flags & ~O_NONBLOCK) | O_DIRECT) != 0) {
    if (errno != EINVAL) return fault("fcntl", errno);
    return unsupported("the file system does not take O_DIRECT: use direct=\"auto\" or False");
  }
  direct_ = true;
  if (told) {
    alignment_ = {std::max(status_x.memory_alignment, 1u), status_x.offset_alignment};
  } else {
    alignment_ = {assumed_alignment, assumed_alignment};
  }
  return std::nullopt;
}

Result<int> File::buffered_descriptor() {
  if (!direct_) return descriptor_;
  std::lock_guard lock(mutex_);
  if (buffered_ < 0) {
    const int access = writable_ ? (readable_ ? O_RDWR : O_WRONLY) : O_RDONLY;
    buffered_ = open_retrying(link_of(descriptor_).c_str(), access);
    if (buffered_ < 0) return fault("open without O_DIRECT", errno);
  }
  return buffered_;
}

Result<std::optional<uint64_t>> File::size() const {
  if (!regular_) {
    uint64_t nbytes = 0;
    if (::ioctl(descriptor_, BLKGETSIZE64, &nbytes) != 0) return fault("ioctl BLKGETSIZE64", errno);
    return std::optional<uint64_t>(nbytes);
  }
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  return std::optional<uint64_t>(static_cast<uint64_t>(status.st_size));
}

std::optional<Fault> File::preallocate(uint64_t offset, uint64_t nbytes) {
  if (!regular_ || nbytes == 0) return std::nullopt;
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  const uint64_t end = offset + nbytes;
  if (end <= static_cast<uint64_t>(status.st_size)) return std::nullopt;

  std::lock_guard lock(extension_mutex(status.st_ino));
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  const uint64_t old_size = static_cast<uint64_t>(status.st_size);
  if (end <= old_size) return std::nullopt;
  const uint64_t begin = std::max(offset, old_size);
  // First the blocks, then the size: a refusal must not leave a file that looks longer than its data.
  if (fallocate_retrying(descriptor_, FALLOC_FL_KEEP_SIZE, begin, end - begin) != 0) {
    const int error_number = errno;
    // Only a lack of space is a refusal. File systems that cannot reserve say so in many ways, and get their
    // writes without.
    if (error_number != ENOSPC && error_number != EDQUOT && error_number != EFBIG) return std::nullopt;
    Fault refused = fault("reserve space", error_number);
    refused.offset = begin;
    // Give back what was reserved before the disk was full. Truncating to the size that the file has releases
    // blocks beyond it; another process extending the file in this instant would find the disk full as well.
    if (::fstat(descriptor_, &status) == 0 && static_cast<uint64_t>(status.st_size) == old_size) {
      (void)!::ftruncate(descriptor_, static_cast<off_t>(old_size));
    }
    return refused;
  }
  // The blocks are there; if the size cannot be set now, the writes will set it.
  (void)fallocate_retrying(descriptor_, 0, begin, end - begin);
  return std::nullopt;
}

std::optional<Fault> File::truncate(uint64_t size) {
  int result;
  do {
    result = ::ftruncate(descriptor_, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return fault("truncate", errno);
  return std::nullopt;
}

std::optional<Fault> File::sync() {
  int result;
  do {
    result = ::fdatasync(descriptor_);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return fault("fdatasync", errno);
  return std::nullopt;
}

Result<int> File::directory_descriptor() {
  std::lock_guard lock(mutex_);
  if (directory_ < 0) {
    // The name behind symbolic links is what must last.
    const std::string name = name_of(descriptor_);
    const size_t slash = name.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : slash == 0 ? "/" : name.substr(0, slash);
    directory_ = open_retrying(directory.c_str(), O_RDONLY | O_DIRECTORY);
    if (directory_ < 0) return fault("open directory", errno);
  }
  return directory_;
}

cufile::Handle File::cufile_handle() {
  std::lock_guard lock(mutex_);
  if (cufile_ == nullptr && !refused_by_cufile_) {
    auto handle = cufile::register_file(descriptor_);
    refused_by_cufile_ = !handle;
    if (handle) cufile_ = *handle;
  }
  return cufile_;
}

std::optional<File::Residency> File::residency(uint64_t offset, uint64_t nbytes) const {
  static std::atomic<bool> known{true};
  if (!regular_ || nbytes == 0 || !known.load(std::memory_order_relaxed)) return std::nullopt;
  const uint64_t page = page_nbytes();
  const uint64_t first = offset / page;
  const uint64_t last = (offset + nbytes - 1) / page;
  CachestatRange range{offset, nbytes};
  Cachestat counts{};
  if (::syscall(cachestat_number, descriptor_, &range, &counts, 0) != 0) {
    if (errno == ENOSYS) known.store(false, std::memory_order_relaxed);
    return std::nullopt;
  }
  return Residency{counts.cached, last - first + 1};
}

Result<File::Snapshot> File::snapshot() const {
  auto found = size();
  if (!found) return found.fault();
  Snapshot snapshot{*found, false};
  if (snapshot.size && *snapshot.size > 0 && direct_ && mode_ == DirectMode::automatic) {
    const auto resident = residency(0, *snapshot.size);
    snapshot.nothing_cached = resident && resident->cached_pages == 0;
  }
  return snapshot;
}

}  // namespace tensorferry
