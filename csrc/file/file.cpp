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
#include <set>
#include <thread>

#include "base/after_fork.h"

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

// XFS has no larger ones. What network file systems tell as f_bsize may be a megabyte and means something else.
constexpr int64_t max_file_system_block_nbytes = 64 << 10;

std::atomic<size_t> descriptors_open{0};

int counted(int descriptor) {
  if (descriptor >= 0) descriptors_open.fetch_add(1, std::memory_order_relaxed);
  return descriptor;
}

// Returns 0 or the errno. Linux releases the descriptor whatever close returns, so it is never called again. EINTR says
// that waiting was cut short and nothing about data: what is still cached is written later, as without a sync.
int close_counted(int descriptor) {
  if (descriptor < 0) return 0;
  const int error_number = ::close(descriptor) == 0 || errno == EINTR ? 0 : errno;
  descriptors_open.fetch_sub(1, std::memory_order_relaxed);
  return error_number;
}

int open_retrying(const char* path, int flags, mode_t mode = 0) {
  int descriptor;
  do {
    descriptor = ::open(path, flags | O_CLOEXEC, mode);
  } while (descriptor < 0 && errno == EINTR);
  return counted(descriptor);
}

// Names that Files of this process made and that are not durable yet, by file: whoever syncs the file next makes the
// name last, whichever File made it. Where this is not known (a name that is being made right now, a forked child, more
// names than fit) all are taken for new, which costs syncs of directories.
struct NamesMade {
  static constexpr size_t max_count = 4096;

  std::mutex mutex;
  std::set<FileIdentity> files;
  size_t being_made = 0;
  bool all = fork_generation() > 0;
};

NamesMade& names_made() {
  static constinit ForkSafe<NamesMade> instance;
  return instance.get();
}

// One name on its way into NamesMade.
class Making {
 public:
  Making() = default;
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;
  ~Making() { end(); }

  void end() {
    if (names_ == nullptr) return;
    std::lock_guard lock(names_->mutex);
    --names_->being_made;
    names_ = nullptr;
  }

  void begin() {
    names_ = &names_made();
    std::lock_guard lock(names_->mutex);
    ++names_->being_made;
  }

  void made(const FileIdentity& file) {
    std::lock_guard lock(names_->mutex);
    if (names_->all) return;
    names_->files.insert(file);
    if (names_->files.size() <= NamesMade::max_count) return;
    names_->all = true;
    names_->files.clear();
  }

  explicit operator bool() const { return names_ != nullptr; }

 private:
  NamesMade* names_ = nullptr;
};

// Opens with O_CREAT. `making` has begun where that may have made the name; too often costs one sync of a directory.
int open_creating(const char* path, int flags, mode_t mode, Making& making) {
  if (flags & O_EXCL) {
    making.begin();
    return open_retrying(path, flags, mode);
  }
  const int found = open_retrying(path, flags & ~(O_CREAT | O_TRUNC));
  const int error_number = errno;
  struct stat before, after;
  const bool known = found >= 0 && ::fstat(found, &before) == 0;
  if (known && !(flags & O_TRUNC) && before.st_uid == ::geteuid()) return found;
  making.begin();
  if (found < 0 && error_number == ENOENT) {
    const int fresh = open_retrying(path, flags | O_EXCL, mode);
    if (fresh >= 0 || errno != EEXIST) return fresh;
  }
  // Truncated only now; or somebody else's, which O_CREAT may not open (fs.protected_regular); or made by another in
  // this moment; or a symbolic link to nowhere; or an error, which has its usual errno this way.
  const int opened = open_retrying(path, flags, mode);
  const int opened_error = errno;
  // While the first descriptor is open, nobody else can have its inode number.
  if (opened >= 0 && known && ::fstat(opened, &after) == 0 && before.st_dev == after.st_dev &&
      before.st_ino == after.st_ino) {
    making.end();
  }
  (void)close_counted(found);  // nothing was written through it
  errno = opened_error;
  return opened;
}

std::string link_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

// What the file is called, behind symbolic links; nothing, and errno, where /proc is missing or the name is too long.
std::optional<std::string> linked_name(int descriptor) {
  std::array<char, 4096> name;
  const ssize_t length = ::readlink(link_of(descriptor).c_str(), name.data(), name.size());
  if (length < 0) return std::nullopt;
  return std::string(name.data(), static_cast<size_t>(length));
}

std::string name_of(int descriptor) {
  return linked_name(descriptor).value_or("descriptor " + std::to_string(descriptor));
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

// The space that a file can still be given, where asking beforehand is worth it: ext4 keeps what it reserved before it
// found the disk full (measured: all that was free), so that nobody could use it. XFS reserves all of up to 8 GiB or
// nothing, and may find more than it tells.
std::optional<uint64_t> obtainable_nbytes(int descriptor) {
  struct statfs info;
  if (::fstatfs(descriptor, &info) != 0 || info.f_type != EXT4_SUPER_MAGIC) return std::nullopt;
  // Root may use blocks kept for it, but not the last 2 %, at most 4,096 blocks, that ext4 keeps for metadata.
  const uint64_t kept = std::min<uint64_t>(info.f_blocks / 50, 4096);
  const uint64_t for_root = info.f_bfree - std::min<uint64_t>(kept, info.f_bfree);
  const uint64_t blocks = ::geteuid() == 0 ? std::max<uint64_t>(for_root, info.f_bavail) : info.f_bavail;
  // Blocks beyond its end that the file has already; asked after, so that what another thread reserves for it between
  // the two calls is counted twice rather than not at all.
  struct stat status;
  if (::fstat(descriptor, &status) != 0) return std::nullopt;
  const uint64_t held = static_cast<uint64_t>(status.st_blocks) * 512;
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  return blocks * static_cast<uint64_t>(info.f_bsize) + (held > size ? held - size : 0);
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

File::Lease File::lease() {
  uint64_t present = leases_.load(std::memory_order_relaxed);
  do {
    if (present & retired_bit) return {};
  } while (!leases_.compare_exchange_weak(present, present + 1, std::memory_order_acq_rel));
  return Lease(shared_from_this());
}

bool File::retire(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  leases_.fetch_or(retired_bit, std::memory_order_acq_rel);
  while (leases_.load(std::memory_order_acquire) != retired_bit) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));  // hardly ever: who closes has waited for transfers
  }
  return true;
}

std::optional<Fault> File::close() {
  if (cufile::Handle handle = cufile_.exchange(nullptr)) cufile::deregister_file(handle);
  const int through_cache = close_counted(buffered_.exchange(-1));
  const int own = close_counted(descriptor_.exchange(-1));
  const int error_number = through_cache != 0 ? through_cache : own;
  // What was read has been checked already; a failure to let go of the file takes nothing from it.
  if (error_number == 0 || !writable_) return std::nullopt;
  return fault("close", error_number);
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
  flags |= O_NOCTTY | O_NONBLOCK;
  Making making;
  const int descriptor =
      options.create ? open_creating(path.c_str(), flags, 0666, making) : open_retrying(path.c_str(), flags);
  if (descriptor < 0) return Fault{.error_number = errno, .operation = "open", .path = path};
  std::shared_ptr<File> file(new File(path, descriptor, options.read || !options.write, options.write));
  file->replaced_ = options.replaced;
  auto refused = file->enable_direct(options.direct);
  if (making) making.made(file->identity_);  // the name is there either way
  if (refused) return *refused;
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
  const int flags = ::fcntl(descriptor(), F_GETFL);
  if (flags < 0) return fault("fcntl", errno);
  // O_NONBLOCK has served; io_uring would take it for "fail rather than wait".
  if ((flags & O_NONBLOCK) && ::fcntl(descriptor(), F_SETFL, flags & ~O_NONBLOCK) != 0) return fault("fcntl", errno);
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
  const bool told = ::syscall(SYS_statx, descriptor(), "", AT_EMPTY_PATH, statx_dioalign_mask, &status_x) == 0 &&
                    (status_x.mask & statx_dioalign_mask);
  if (told && status_x.offset_alignment == 0) {
    return unsupported("the file system has no direct I/O for this file: use direct=\"auto\" or False");
  }
  // Linux reports a short asynchronous direct write to FUSE as EIO (fs/fuse/file.c, fuse_get_res_by_io), so that it
  // could not be resumed.
  if (!told && file_system == FileSystem::fuse && mode == DirectMode::automatic) return std::nullopt;
  if (::fcntl(descriptor(), F_SETFL, (flags & ~O_NONBLOCK) | O_DIRECT) != 0) {
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
  const int own = descriptor();
  if (own < 0) return fault("open without O_DIRECT", EBADF);
  if (!direct_) return own;
  const int access = writable_ ? (readable_ ? O_RDWR : O_WRONLY) : O_RDONLY;
  int present = buffered_.load(std::memory_order_acquire);
  if (present >= 0) return present;
  const int opened = open_retrying(link_of(own).c_str(), access);
  if (opened < 0) return fault("open without O_DIRECT", errno);
  // No lock, since a child of fork() may meet it half-way.
  if (buffered_.compare_exchange_strong(present, opened, std::memory_order_acq_rel)) return opened;
  (void)close_counted(opened);  // another thread was faster; nothing was written through this one
  return present;
}

Result<std::optional<uint64_t>> File::size() const {
  if (!regular_) {
    uint64_t nbytes = 0;
    if (::ioctl(descriptor(), BLKGETSIZE64, &nbytes) != 0) return fault("ioctl BLKGETSIZE64", errno);
    return std::optional<uint64_t>(nbytes);
  }
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  return std::optional<uint64_t>(static_cast<uint64_t>(status.st_size));
}

std::optional<Fault> File::preallocate(uint64_t offset, uint64_t nbytes, bool keep_size) {
  if (!regular_ || nbytes == 0) return std::nullopt;
  struct stat status;
  if (::fstat(descriptor_, &status) != 0) return fault("fstat", errno);
  const uint64_t end = offset + nbytes;
  const uint64_t old_size = static_cast<uint64_t>(status.st_size);
  if (end <= old_size) return std::nullopt;
  const uint64_t begin = std::max(offset, old_size);
  const auto refused = [&](int error_number) {
    Fault found = fault("reserve space", error_number);
    found.offset = begin;
    return found;
  };
  const auto obtainable = obtainable_nbytes(descriptor());
  if (obtainable && end - begin > *obtainable) return refused(ENOSPC);
  // First the blocks, then the size: a refusal must not leave a file that looks longer than its data.
  if (fallocate_retrying(descriptor(), FALLOC_FL_KEEP_SIZE, begin, end - begin) != 0) {
    // Only a lack of space is a refusal. File systems that cannot reserve say so in many ways, and get their
    // writes without.
    if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG) return std::nullopt;
    // What was reserved until then (a quota, a race for the last blocks) stays beyond the file's end, for its next
    // writer: nothing can give it back without a risk for what another process writes there in this moment.
    return refused(errno);
  }
  // The blocks are there; if the size cannot be set now, the writes will set it.
  if (!keep_size) (void)fallocate_retrying(descriptor(), 0, begin, end - begin);
  return std::nullopt;
}

std::optional<Fault> File::punch(uint64_t offset, uint64_t nbytes) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate_retrying(descriptor(), mode, offset, nbytes) == 0) return std::nullopt;
  return fault("give space back", errno);
}

uint32_t File::write_granularity() const {
  struct statfs info;
  const uint32_t page = page_nbytes();
  if (::fstatfs(descriptor(), &info) != 0 || info.f_bsize <= page || info.f_bsize > max_file_system_block_nbytes ||
      (info.f_bsize & (info.f_bsize - 1)) != 0) {
    return page;
  }
  return static_cast<uint32_t>(info.f_bsize);
}

std::optional<Fault> File::truncate(uint64_t size) {
  int result;
  do {
    result = ::ftruncate(descriptor_, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return fault("truncate", errno);
  return std::nullopt;
}

std::optional<Fault> File::end_at(uint64_t size) {
  const auto present = this->size();
  if (!present) return present.fault();
  return *present == size ? std::nullopt : truncate(size);
}

std::optional<Fault> File::sync() {
  // One after the other: who comes second is not to succeed because the first took the error with it. A sync that
  // begins from here on keeps what this one is to keep.
  const uint64_t begun = syncs_begun_.load(std::memory_order_acquire);
  std::lock_guard lock(sync_mutex_);
  if (sync_error_ != 0) {
    Fault failed = fault("fdatasync", sync_error_);
    // EINVAL: most often the file system has no syncs.
    if (sync_error_ != EINVAL) {
      failed.hint = "of an earlier sync: what it was to keep must be written again, to a file that is opened anew";
    }
    return failed;
  }
  if (syncs_begun_.load(std::memory_order_relaxed) > begun) return std::nullopt;  // and it has ended
  syncs_begun_.fetch_add(1, std::memory_order_acq_rel);
  int result;
  do {
    result = ::fdatasync(descriptor_);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return std::nullopt;
  sync_error_ = errno;
  return fault("fdatasync", sync_error_);
}

bool File::name_made() const {
  if (name_durable_.load(std::memory_order_acquire)) return false;
  NamesMade& names = names_made();
  std::lock_guard lock(names.mutex);
  return names.all || names.being_made > 0 || names.files.contains(identity_);
}

void File::name_durable() {
  name_durable_.store(true, std::memory_order_release);
  NamesMade& names = names_made();
  std::lock_guard lock(names.mutex);
  names.files.erase(identity_);
}

Result<std::string> File::directory() const {
  // The name behind symbolic links is what must last.
  const auto name = linked_name(descriptor());
  if (!name) return fault("readlink of /proc/self/fd", errno);
  const size_t slash = name->rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : name->substr(0, slash);
}

std::optional<Fault> sync_directory(const std::string& directory, int descriptor, const std::string& path) {
  const auto synced = [&](const char* operation, int (*call)(int), int target) -> std::optional<Fault> {
    int result;
    do {
      result = call(target);
    } while (result != 0 && errno == EINTR);
    if (result == 0) return std::nullopt;
    return Fault{.error_number = errno, .operation = operation, .path = path};
  };
  const int opened = open_retrying(directory.c_str(), O_RDONLY | O_DIRECTORY);
  // A directory may be written but not read (mode 0333), or have moved. All of the file system is then synced, by the
  // file's own descriptor: slow, but what was asked for.
  if (opened < 0) return synced("syncfs", ::syncfs, descriptor);
  auto fault = synced("fsync of the directory", ::fsync, opened);
  if (fault && (fault->error_number == EINVAL || fault->error_number == ENOSYS || fault->error_number == EOPNOTSUPP ||
                fault->error_number == EBADF)) {
    fault.reset();  // this file system has none
  }
  const int close_error = close_counted(opened);
  if (!fault && close_error != 0) {
    fault = Fault{.error_number = close_error, .operation = "close of the directory", .path = path};
  }
  return fault;
}

cufile::Handle File::cufile_handle() {
  std::lock_guard lock(cufile_mutex_);
  if (cufile_.load() == nullptr && !refused_by_cufile_ && descriptor() >= 0) {
    auto handle = cufile::register_file(descriptor());
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
  if (::syscall(cachestat_number, descriptor(), &range, &counts, 0) != 0) {
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
