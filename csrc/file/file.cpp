#include "file/file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "base/after_fork.h"
#include "base/interruption.h"

namespace tensorferry {

uint32_t page_nbytes() {
  static const uint32_t nbytes = static_cast<uint32_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

// The properties of an open file, which are looked up once, at open.
struct Status {
  uint64_t device, own_device, inode, size;
  uint32_t mode;
  uint32_t user;
  uint64_t mount = 0;                      // 0: the kernel has no unique number for the mount
  std::optional<DirectAlignment> aligned;  // empty: not reported by the kernel; offset 0: no direct I/O
};

namespace {

// linux/stat.h of older distributions lacks the direct I/O fields, so the kernel's layout is repeated here: see
// statx(2), STATX_DIOALIGN (Linux 6.1) and STATX_MNT_ID_UNIQUE (6.8).
constexpr uint32_t statx_basic_mask = 0x7ff;
constexpr uint32_t statx_dioalign_mask = 0x2000;
constexpr uint32_t statx_unique_mount_mask = 0x4000;
struct StatxWithDirectAlignment {
  uint32_t mask;
  uint8_t before_user[0x14 - 4];
  uint32_t user;
  uint32_t group;
  uint16_t mode;
  uint8_t before_inode[0x20 - 0x1e];
  uint64_t inode;
  uint64_t size;
  uint8_t before_devices[0x80 - 0x30];
  uint32_t own_device[2];  // major, minor
  uint32_t device[2];
  uint64_t mount;
  uint32_t memory_alignment;
  uint32_t offset_alignment;
  uint8_t after[0x100 - 0xa0];
};
static_assert(sizeof(StatxWithDirectAlignment) == 0x100);
static_assert(offsetof(StatxWithDirectAlignment, memory_alignment) == 0x98);

// cachestat(2), Linux 6.5. The number is the same on every architecture.
constexpr long cachestat_number = 451;
struct CachestatRange {
  uint64_t offset;
  uint64_t nbytes;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

// Assumed where the kernel does not report the alignment (before 6.1, FUSE, NFS). No device requires more than a page.
constexpr uint32_t assumed_alignment = 4096;

// XFS has no larger blocks. Network file systems may report a megabyte as f_bsize, where it has another meaning.
constexpr int64_t max_file_system_block_nbytes = 64 << 10;

// mincore() on a mapping takes about ten nanoseconds for each page, so larger files are not checked as a whole.
constexpr uint64_t max_quickly_shown_nbytes = uint64_t{256} << 20;

std::atomic<size_t> descriptors_open{0};
std::atomic<size_t> files_of_requests{0};
std::atomic<uint64_t> files_given_back{0};

int counted(int descriptor) {
  if (descriptor >= 0) descriptors_open.fetch_add(1, std::memory_order_relaxed);
  return descriptor;
}

// Close a descriptor and return 0 or the errno. Linux releases the descriptor whatever close(2) returns, so close(2) is
// never called again. EINTR means that a wait for write-back was interrupted. It is not an error of the data, which the
// kernel writes back later, as after any close without a sync.
int close_counted(int descriptor) {
  if (descriptor < 0) return 0;
  const int error_number = ::close(descriptor) == 0 || errno == EINTR ? 0 : errno;
  descriptors_open.fetch_sub(1, std::memory_order_relaxed);
  return error_number;
}

int open_retrying(const char* path, int flags, mode_t mode = 0) {
  return counted(uninterrupted([&] { return ::open(path, flags | O_CLOEXEC, mode); }));
}

// Open a path. O_NONBLOCK keeps a FIFO from blocking the open. It also makes the open fail (EWOULDBLOCK) for a file on
// which another process has a lease (F_SETLEASE: Samba, NFS servers). The kernel has then asked the holder to release
// the lease, and removes it after /proc/sys/fs/lease-break-time seconds at the latest, so a blocking open ends. Only
// regular files have leases.
int open_path(const char* path, int flags, mode_t mode = 0) {
  const int descriptor = open_retrying(path, flags | O_NONBLOCK, mode);
  if (descriptor >= 0 || errno != EWOULDBLOCK) return descriptor;
  struct stat status;
  const bool leased = ::stat(path, &status) == 0 && S_ISREG(status.st_mode);
  errno = EWOULDBLOCK;
  return leased ? open_retrying(path, flags, mode) : descriptor;
}

// Look up the properties of a file. Empty, with errno set, if the file system cannot answer.
std::optional<Status> status_of(int descriptor) {
  StatxWithDirectAlignment told;
  std::memset(&told, 0, sizeof told);
  const uint32_t wanted = statx_basic_mask | statx_dioalign_mask | statx_unique_mount_mask;
  const auto ask = [&] { return ::syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, wanted, &told); };
  if (uninterrupted(ask) == 0) {
    Status found{.device = makedev(told.device[0], told.device[1]),
                 .own_device = makedev(told.own_device[0], told.own_device[1]),
                 .inode = told.inode,
                 .size = told.size,
                 .mode = told.mode,
                 .user = told.user};
    if (told.mask & statx_unique_mount_mask) found.mount = told.mount;
    if (told.mask & statx_dioalign_mask) found.aligned = {told.memory_alignment, told.offset_alignment};
    return found;
  }
  // statx is forbidden by a sandbox, or the kernel is older than 4.11.
  struct stat status;
  if (uninterrupted([&] { return ::fstat(descriptor, &status); }) != 0) return std::nullopt;
  return Status{.device = status.st_dev,
                .own_device = status.st_rdev,
                .inode = status.st_ino,
                .size = static_cast<uint64_t>(status.st_size),
                .mode = status.st_mode,
                .user = status.st_uid};
}

// The files whose names in their directories were created by Files of this process and are not yet durable. The next
// durable write to such a file, through any File, must make its name durable as well. If it is not known which files
// these are (a name is being created at the moment, this is a forked child, there are more names than fit), all names
// count as new, which costs additional syncs of directories.
struct NamesMade {
  static constexpr size_t max_count = 4096;

  std::mutex mutex;
  std::set<FileIdentity> files;
  size_t being_made = 0;
  bool all = fork_generation() > 0;
};

NamesMade& names_made() { return of_this_process<NamesMade>(); }

// An open that may create a name: it is counted in NamesMade::being_made from begin() to end(), and made() adds the
// file.
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

  bool is_new = false;  // whether the open has certainly created the file

 private:
  NamesMade* names_ = nullptr;
};

// Remove a file that this process has just created and does not use, unless the path names another file by now or
// another process has written to it. Returns whether it was removed.
bool remove_empty(const std::string& path, const FileIdentity& file) {
  struct stat status;
  return ::lstat(path.c_str(), &status) == 0 && FileIdentity{status.st_dev, status.st_ino} == file &&
         status.st_size == 0 && ::unlink(path.c_str()) == 0;
}

// Open with O_CREAT. If the open may have created the name, `making` has begun at the return. If it has begun although
// the name existed before, that costs one unnecessary sync of a directory. `status` is set if the properties of the
// file were looked up.
int open_creating(const char* path, int flags, mode_t mode, Making& making, std::optional<Status>& status) {
  if (flags & O_EXCL) {
    making.begin();
    const int opened = open_path(path, flags, mode);
    making.is_new = opened >= 0;
    return opened;
  }
  const int found = open_path(path, flags & ~(O_CREAT | O_TRUNC));
  const int error_number = errno;
  if (found < 0 && error_number == EINTR) return found;
  const auto before = found >= 0 ? status_of(found) : std::nullopt;
  if (before && !(flags & O_TRUNC) && before->user == ::geteuid()) {
    status = before;
    return found;
  }
  making.begin();
  if (found < 0 && error_number == ENOENT) {
    const int fresh = open_path(path, flags | O_EXCL, mode);
    making.is_new = fresh >= 0;
    if (fresh >= 0 || errno != EEXIST) return fresh;
  }
  // The call below is for these cases: the file must be truncated; or it belongs to another user, so an open with
  // O_CREAT may fail (fs.protected_regular); or another process has created it meanwhile; or the path is a dangling
  // symbolic link; or the open fails, and this call sets the usual errno.
  const int opened = open_path(path, flags, mode);
  const int opened_error = errno;
  // The first descriptor keeps the inode number in use, so equal numbers mean the same file.
  if (opened >= 0 && before) {
    status = status_of(opened);
    if (status && before->device == status->device && before->inode == status->inode) making.end();
  }
  (void)close_counted(found);  // nothing was written through it
  errno = opened_error;
  return opened;
}

std::string link_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

// The path of an open file with symbolic links resolved; empty, with errno set, if /proc is missing or the path is too
// long.
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

#ifndef OVERLAYFS_SUPER_MAGIC
#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#endif

#ifndef CEPH_SUPER_MAGIC
#define CEPH_SUPER_MAGIC 0x00c36400
#endif

#ifndef SMB2_SUPER_MAGIC
#define SMB2_SUPER_MAGIC 0xfe534d42
#endif

constexpr uint32_t cifs_magic = 0xff534d42;
constexpr uint32_t lustre_magic = 0x0bd00bd0;
constexpr uint32_t gpfs_magic = 0x47504653;

// Properties that do not change while a file system is mounted.
struct Mounted {
  enum class Kind { memory, fuse, network, overlay, ext4, other } kind = Kind::other;
  uint32_t write_granularity = page_nbytes();
};

Mounted ask_mounted(int descriptor) {
  Mounted found;
  struct statfs info;
  if (::fstatfs(descriptor, &info) != 0) return found;  // keep the safest assumptions
  switch (static_cast<uint32_t>(info.f_type)) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case HUGETLBFS_MAGIC: found.kind = Mounted::Kind::memory; break;
    case FUSE_SUPER_MAGIC: found.kind = Mounted::Kind::fuse; break;
    case NFS_SUPER_MAGIC:
    case SMB_SUPER_MAGIC:
    case SMB2_SUPER_MAGIC:
    case cifs_magic:
    case CEPH_SUPER_MAGIC:
    case V9FS_MAGIC:
    case AFS_SUPER_MAGIC:
    case lustre_magic:
    case gpfs_magic: found.kind = Mounted::Kind::network; break;
    case OVERLAYFS_SUPER_MAGIC: found.kind = Mounted::Kind::overlay; break;
    case EXT4_SUPER_MAGIC: found.kind = Mounted::Kind::ext4; break;
    default: break;
  }
  if (info.f_bsize > page_nbytes() && info.f_bsize <= max_file_system_block_nbytes &&
      (info.f_bsize & (info.f_bsize - 1)) == 0) {
    found.write_granularity = static_cast<uint32_t>(info.f_bsize);
  }
  return found;
}

// The properties of mounts, by the unique number of the mount, which the kernel never reuses. They are cached because
// on a network file system fstatfs costs a message to the server.
struct Mounts {
  static constexpr size_t max_count = 64;

  std::mutex mutex;
  std::map<uint64_t, Mounted> known;
};

Mounted mounted(int descriptor, const Status& status) {
  if (status.mount == 0) return ask_mounted(descriptor);
  Mounts& mounts = of_this_process<Mounts>();
  {
    std::lock_guard lock(mounts.mutex);
    if (auto found = mounts.known.find(status.mount); found != mounts.known.end()) return found->second;
  }
  const Mounted found = ask_mounted(descriptor);
  std::lock_guard lock(mounts.mutex);
  if (mounts.known.size() == Mounts::max_count) mounts.known.clear();
  mounts.known.emplace(status.mount, found);
  return found;
}

// The space that a file on ext4 can still get. It is checked before space is reserved, because if ext4 finds the disk
// full while it reserves, the file keeps what was reserved until then (measured: all free space), and no other file
// could use it. XFS is not checked: it reserves all or nothing up to 8 GiB, and may find more space than it reports as
// free.
std::optional<uint64_t> obtainable_nbytes(int descriptor) {
  struct statfs info;
  if (::fstatfs(descriptor, &info) != 0) return std::nullopt;
  // Root may use the reserved blocks, but not the last 2 %, at most 4,096 blocks, that ext4 keeps for metadata.
  const uint64_t kept = std::min<uint64_t>(info.f_blocks / 50, 4096);
  const uint64_t for_root = info.f_bfree - std::min<uint64_t>(kept, info.f_bfree);
  const uint64_t blocks = ::geteuid() == 0 ? std::max<uint64_t>(for_root, info.f_bavail) : info.f_bavail;
  // The blocks beyond its end that the file already has are added. They are looked up after the free space: blocks that
  // another thread reserves between the two calls are then counted twice. In the other order they would not be counted
  // at all, and a write that fits would be refused.
  struct stat status;
  if (::fstat(descriptor, &status) != 0) return std::nullopt;
  const uint64_t held = static_cast<uint64_t>(status.st_blocks) * 512;
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  return blocks * static_cast<uint64_t>(info.f_bsize) + (held > size ? held - size : 0);
}

// The free space in `info` as text for messages. `failed` is the result of the statfs() that has filled `info`.
std::string told_room(int failed, const struct statfs& info) {
  if (failed != 0) return "";
  if (info.f_files > 0 && info.f_ffree == 0) {
    return "all " + std::to_string(info.f_files) + " inodes of the file system are in use";
  }
  const uint64_t blocks = ::geteuid() == 0 ? info.f_bfree : info.f_bavail;
  return std::to_string(blocks * static_cast<uint64_t>(info.f_bsize)) + " bytes are free";
}

// The number of cached pages of a range, found with mincore() on a mapping; empty if the range cannot be mapped.
std::optional<uint64_t> pages_shown(int descriptor, uint64_t offset, uint64_t nbytes) {
  void* const memory =
      ::mmap(nullptr, nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, descriptor, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return std::nullopt;
  std::array<unsigned char, 4096> pages;
  const uint64_t step = pages.size() * page_nbytes();
  std::optional<uint64_t> found = 0;
  for (uint64_t done = 0; done < nbytes; done += step) {
    const uint64_t part_nbytes = std::min(nbytes - done, step);
    if (::mincore(static_cast<char*>(memory) + done, part_nbytes, pages.data()) != 0) {
      found.reset();
      break;
    }
    const auto end = pages.begin() + static_cast<ptrdiff_t>((part_nbytes + page_nbytes() - 1) / page_nbytes());
    *found += static_cast<uint64_t>(std::count_if(pages.begin(), end, [](unsigned char page) { return page & 1; }));
  }
  (void)::munmap(memory, nbytes);  // fails only for wrong arguments
  return found;
}

int fallocate_retrying(int descriptor, int mode, uint64_t offset, uint64_t nbytes) {
  return uninterrupted(
      [&] { return ::fallocate(descriptor, mode, static_cast<off_t>(offset), static_cast<off_t>(nbytes)); });
}

}  // namespace

size_t File::open_descriptors() { return descriptors_open.load(std::memory_order_relaxed); }

File::OfRequests File::of_requests() {
  return {files_of_requests.load(std::memory_order_relaxed), files_given_back.load(std::memory_order_relaxed)};
}

void File::give_to_request() {
  if (!of_request_.exchange(true)) files_of_requests.fetch_add(1, std::memory_order_relaxed);
}

File::File(std::string path, int descriptor, bool readable, bool writable)
    : path_(std::move(path)), descriptor_(descriptor), readable_(readable), writable_(writable) {}

File::Lease File::lease() {
  uint64_t present = leases_.load(std::memory_order_relaxed);
  do {
    // The retired bit and the count share one word, so no lease can be added after retire() has set the bit.
    if (present & retired_bit) return {};
  } while (!leases_.compare_exchange_weak(present, present + 1, std::memory_order_acq_rel));
  return Lease(shared_from_this());
}

bool File::retire(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  leases_.fetch_or(retired_bit, std::memory_order_acq_rel);
  while (leases_.load(std::memory_order_acquire) != retired_bit) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    // Polling suffices because there is hardly ever a lease to wait for: programs close a file after its transfers.
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

std::optional<Fault> File::close() {
  if (cufile::Handle handle = cufile_.exchange(nullptr)) cufile::deregister_file(handle);
  const int through_cache = close_counted(buffered_.exchange(-1));
  const int own = close_counted(descriptor_.exchange(-1));
  const int error_number = through_cache != 0 ? through_cache : own;
  if (of_request_.exchange(false)) {
    files_of_requests.fetch_sub(1, std::memory_order_relaxed);
    files_given_back.fetch_add(1, std::memory_order_relaxed);
  }
  // A failed close of a read-only file is ignored: nothing was written, and the results of the reads were checked.
  if (error_number == 0 || !writable_) return std::nullopt;
  return fault("close", error_number);
}

Fault File::fault(const char* operation, int error_number) const {
  Fault found{.error_number = error_number, .operation = operation, .path = path_};
  if (error_number == ENOSPC) found.hint = room();
  return found;
}

std::string File::room() const {
  if (!regular_) return "";  // a block device, whose node is on another file system
  struct statfs info;
  const int failed = ::fstatfs(descriptor(), &info);
  return told_room(failed, info);
}

std::optional<Fault> File::check_end(uint64_t end) const {
  struct rlimit limit;
  if (!regular_ || ::getrlimit(RLIMIT_FSIZE, &limit) != 0 || end <= limit.rlim_cur) return std::nullopt;
  Fault refused = fault("reserve space", EFBIG);
  refused.hint = "the file size limit (ulimit -f) is " + std::to_string(limit.rlim_cur) + " bytes";
  return refused;
}

Result<std::shared_ptr<File>> File::open(const std::string& path, const OpenOptions& options) {
  int flags = options.write ? (options.read ? O_RDWR : O_WRONLY) : O_RDONLY;
  if (options.create) flags |= O_CREAT;
  if (options.exclusive) flags |= O_EXCL;
  if (options.truncate) flags |= O_TRUNC;
  flags |= O_NOCTTY;
  Making making;
  std::optional<Status> status;
  const int descriptor =
      options.create ? open_creating(path.c_str(), flags, 0666, making, status) : open_path(path.c_str(), flags);
  if (descriptor < 0) {
    Fault refused{.error_number = errno, .operation = "open", .path = path};
    if (refused.error_number == ENOSPC) {
      const size_t slash = path.rfind('/');
      struct statfs info;
      const int failed = ::statfs(slash == std::string::npos ? "." : path.substr(0, slash + 1).c_str(), &info);
      refused.hint = told_room(failed, info);
    }
    return refused;
  }
  std::shared_ptr<File> file(new File(path, descriptor, options.read || !options.write, options.write));
  file->replaced_ = options.replaced;
  if (options.for_request) file->give_to_request();
  // From here on EINTR must not be returned: the open may have created the file, and a second open (with O_EXCL) would
  // fail.
  const InterruptionsReturned by_nobody(false);
  if (!status) status = status_of(descriptor);
  auto refused = status ? file->enable_direct(options.direct, *status, 0) : file->fault("statx", errno);
  if (refused && making.is_new && remove_empty(path, file->identity_)) return *refused;
  if (making) making.made(file->identity_);  // the name exists even if the file is refused
  if (refused) return *refused;
  return file;
}

std::shared_ptr<File> File::of_source(std::string path, uint64_t nbytes, uint64_t device,
                                      std::shared_ptr<Source> source) {
  std::shared_ptr<File> file(new File(std::move(path), -1, true, false));
  file->source_ = std::move(source);
  file->opened_size_ = nbytes;
  file->file_system_ = device;
  // The page cache holds nothing of a file with a source, so the plan must not go through it.
  file->direct_ = true;
  file->mode_ = DirectMode::always;
  return file;
}

Result<std::shared_ptr<File>> File::from_descriptor(int descriptor, bool write, DirectMode direct, bool for_request) {
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
  int kept_flags = 0;
  // Open a separate open file description, so the caller's flags (O_APPEND would ignore our offsets) and file position
  // are unaffected.
  int own = open_retrying(link_of(descriptor).c_str(), access | O_NOCTTY | O_NONBLOCK);
  if (own < 0) {
    const int reopen_error = errno;
    const bool is_needed = direct == DirectMode::always || (flags & (O_APPEND | O_DIRECT));
    if (is_needed || reopen_error == EMFILE || reopen_error == ENFILE || reopen_error == EINTR) {
      fault.error_number = reopen_error;
      if (direct == DirectMode::always) fault.hint = "direct=True needs a descriptor without the caller's flags";
      return fault;
    }
    own = counted(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (own < 0) {
      fault.error_number = errno;
      return fault;
    }
    direct = DirectMode::never;  // the caller shares the open file description, so its flags must not change
    kept_flags = flags;
  }
  std::shared_ptr<File> file(new File(std::move(path), own, access != O_WRONLY, access != O_RDONLY));
  if (for_request) file->give_to_request();
  const InterruptionsReturned by_nobody(false);
  const auto status = status_of(own);
  if (!status) return file->fault("statx", errno);
  if (auto failed = file->enable_direct(direct, *status, kept_flags)) return *failed;
  return file;
}

std::optional<Fault> File::enable_direct(DirectMode mode, const Status& status, int kept_flags) {
  mode_ = mode;
  if (S_ISDIR(status.mode)) return fault("open", EISDIR);
  regular_ = S_ISREG(status.mode);
  file_system_ = status.device;
  opened_size_ = status.size;
  // A block device may have several device nodes.
  identity_ =
      S_ISBLK(status.mode) ? FileIdentity{status.own_device, UINT64_MAX} : FileIdentity{status.device, status.inode};
  if (!regular_ && !S_ISBLK(status.mode)) {
    Fault refused = fault("open", ESPIPE);
    refused.hint = "only regular files and block devices can hold tensors";
    return refused;
  }
  const Mounted file_system = mounted(descriptor_, status);
  in_memory_ = regular_ && file_system.kind == Mounted::Kind::memory;
  stacked_ = regular_ && file_system.kind == Mounted::Kind::overlay;
  fuse_ = regular_ && file_system.kind == Mounted::Kind::fuse;
  if (fuse_ || (regular_ && file_system.kind == Mounted::Kind::network)) {
    first_reads_ = FirstReads::of(status.mount != 0 ? status.mount : status.device);
  }
  keeps_failed_reservations_ = file_system.kind == Mounted::Kind::ext4;
  write_granularity_ = file_system.write_granularity;

  // All flags are set in one call. It also clears O_NONBLOCK, which was needed only for the open: with it, io_uring
  // would fail with EAGAIN where it should wait.
  const auto set_flags = [&](int flags) { return ::fcntl(descriptor(), F_SETFL, (kept_flags & ~O_NONBLOCK) | flags); };
  const auto through_cache = [&]() -> std::optional<Fault> {
    if (kept_flags != 0 && !(kept_flags & O_NONBLOCK)) return std::nullopt;
    return set_flags(0) == 0 ? std::nullopt : std::optional(fault("fcntl", errno));
  };
  const auto unsupported = [&](const char* why) -> std::optional<Fault> {
    if (mode == DirectMode::automatic) return through_cache();
    Fault refused = fault("open with O_DIRECT", EINVAL);
    refused.hint = why;
    return refused;
  };
  if (mode == DirectMode::never) return through_cache();
  // File systems in memory may accept O_DIRECT, but their page cache is the file, so direct I/O would copy like
  // buffered I/O.
  if (in_memory_) {
    return unsupported("the file system is in memory: use direct=\"auto\" or False");
  }
  if (status.aligned && status.aligned->offset == 0) {
    return unsupported("the file system does not support direct I/O for this file: use direct=\"auto\" or False");
  }
  // Linux reports a short asynchronous direct write to FUSE as EIO (fs/fuse/file.c, fuse_get_res_by_io), so the write
  // could not be resumed. Reads do not have this problem: a short one is reported as short.
  if (!status.aligned && fuse_ && writable_ && mode == DirectMode::automatic) return through_cache();
  if (set_flags(O_DIRECT) != 0) {
    if (errno != EINVAL) return fault("fcntl", errno);
    return unsupported("the file system does not support O_DIRECT: use direct=\"auto\" or False");
  }
  direct_ = true;
  alignment_ = status.aligned.value_or(DirectAlignment{assumed_alignment, assumed_alignment});
  alignment_.memory = std::max(alignment_.memory, 1u);
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
  if (opened < 0) {
    const int error_number = errno;
    // Without /proc this file cannot be opened a second time. Its only descriptor is switched to the page cache. It
    // also serves the blocks that were planned for direct I/O, since the page cache has no alignment rules.
    const int flags = error_number == ENOENT && mode_ == DirectMode::automatic ? ::fcntl(own, F_GETFL) : -1;
    if (flags >= 0 && ::fcntl(own, F_SETFL, flags & ~O_DIRECT) == 0) return own;
    Fault refused = fault("open without O_DIRECT", error_number);
    if (error_number == ENOENT) refused.hint = "/proc is not mounted: use direct=\"auto\", which works without it";
    return refused;
  }
  // No lock is used here, because a child that is forked meanwhile would find it locked.
  if (buffered_.compare_exchange_strong(present, opened, std::memory_order_acq_rel)) return opened;
  (void)close_counted(opened);  // another thread was faster; nothing was written through this descriptor
  return present;
}

Result<std::optional<uint64_t>> File::size() const {
  if (source_) return std::optional<uint64_t>(opened_size_);
  if (!regular_) {
    uint64_t nbytes = 0;
    if (::ioctl(descriptor(), BLKGETSIZE64, &nbytes) != 0) return fault("ioctl BLKGETSIZE64", errno);
    return std::optional<uint64_t>(nbytes);
  }
  struct stat status;
  if (uninterrupted([&] { return ::fstat(descriptor_, &status); }) != 0) return fault("fstat", errno);
  return std::optional<uint64_t>(static_cast<uint64_t>(status.st_size));
}

std::optional<Fault> File::preallocate(uint64_t offset, uint64_t nbytes) {
  if (!regular_ || nbytes == 0) return std::nullopt;
  if (was_opened_with(offset + nbytes)) return std::nullopt;
  struct stat status;
  if (uninterrupted([&] { return ::fstat(descriptor_, &status); }) != 0) return fault("fstat", errno);
  const uint64_t end = offset + nbytes;
  const uint64_t old_size = static_cast<uint64_t>(status.st_size);
  if (end <= old_size) return std::nullopt;
  const uint64_t begin = std::max(offset, old_size);
  const auto at_begin = [&](Fault found) {
    found.offset = begin;
    found.expected = end - begin;
    return found;
  };
  // The kernel reserves blocks beyond this limit, but fails writes there.
  if (auto refused = check_end(end)) return at_begin(std::move(*refused));
  const auto obtainable = keeps_failed_reservations_ ? obtainable_nbytes(descriptor()) : std::nullopt;
  if (obtainable && end - begin > *obtainable) {
    Fault refused = at_begin(fault("reserve space", ENOSPC));
    refused.hint = std::to_string(*obtainable) + " bytes are free";
    return refused;
  }
  // Reserve the blocks first and set the size afterwards: if space is refused, the file must not look longer than its
  // data.
  if (fallocate_retrying(descriptor(), FALLOC_FL_KEEP_SIZE, begin, end - begin) != 0) {
    // Only a lack of space is a refusal. File systems that do not support fallocate return various errors; their writes
    // proceed without a reservation.
    if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG && errno != EINTR) return std::nullopt;
    // The space that was reserved before the refusal (by a quota, or because other writers took the last blocks) stays
    // beyond the end of the file, for its next writer. Releasing it could destroy data that another process writes
    // there at this moment.
    return at_begin(fault("reserve space", errno));
  }
  // The blocks are reserved; if the size cannot be set now, the writes will set it.
  if (fallocate_retrying(descriptor(), 0, begin, end - begin) != 0 && errno == EINTR) {
    return at_begin(fault("reserve space", EINTR));
  }
  return std::nullopt;
}

std::optional<Fault> File::truncate(uint64_t size) {
  const int result = uninterrupted([&] { return ::ftruncate(descriptor_, static_cast<off_t>(size)); });
  if (result != 0) return fault("truncate", errno);
  return std::nullopt;
}

std::optional<Fault> File::end_at(uint64_t size) {
  const auto present = this->size();
  if (!present) return present.fault();
  return *present == size ? std::nullopt : truncate(size);
}

std::optional<Fault> File::sync() {
  // Syncs run one after the other: the kernel reports a failed write-back only once, and a concurrent second sync would
  // succeed although data was lost. A sync that begins after this point makes this caller's data durable, too.
  const uint64_t begun = syncs_begun_.load(std::memory_order_acquire);
  std::lock_guard lock(sync_mutex_);
  if (sync_error_ != 0) {
    Fault failed = fault("fdatasync", sync_error_);
    // EINVAL usually means that the file system does not support fsync.
    if (sync_error_ != EINVAL) {
      failed.hint = "an earlier sync failed: reopen the file and write the data again";
    }
    return failed;
  }
  // Another thread's sync began after this call did and has ended, so it has made this caller's data durable.
  if (syncs_begun_.load(std::memory_order_relaxed) > begun) return std::nullopt;
  syncs_begun_.fetch_add(1, std::memory_order_acq_rel);
  const int result = uninterrupted([&] { return ::fdatasync(descriptor_); });
  if (result == 0) return std::nullopt;
  if (errno == EINTR) {
    // An interruption is not an error of the data. Callers that waited for this sync must run their own, so it does not
    // count.
    syncs_begun_.fetch_sub(1, std::memory_order_acq_rel);
    return fault("fdatasync", EINTR);
  }
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
  // If the path leads through symbolic links, the name at their end is the one that must be durable.
  auto name = linked_name(descriptor());
  const int error_number = errno;
  if (!name && descriptor() >= 0) name = resolved_name();  // no /proc
  if (!name) return fault("readlink of /proc/self/fd", error_number);
  const size_t slash = name->rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : name->substr(0, slash);
}

// The path with symbolic links resolved, if it still leads to this file.
std::optional<std::string> File::resolved_name() const {
  const std::unique_ptr<char, void (*)(void*)> resolved(::realpath(path_.c_str(), nullptr), &::free);
  struct stat status;
  if (!resolved || ::stat(resolved.get(), &status) != 0) return std::nullopt;
  if (FileIdentity{status.st_dev, status.st_ino} != identity_) return std::nullopt;
  return resolved.get();
}

std::optional<Fault> sync_directory(const std::string& directory, int descriptor, const std::string& path) {
  const auto synced = [&](const char* operation, int (*call)(int), int target) -> std::optional<Fault> {
    if (uninterrupted([&] { return call(target); }) == 0) return std::nullopt;
    return Fault{.error_number = errno, .operation = operation, .path = path};
  };
  const int opened = open_retrying(directory.c_str(), O_RDONLY | O_DIRECTORY);
  // A directory may be writable but not readable (mode 0333), or may have been moved. Then the whole file system is
  // synced, through the file's descriptor: slow, but it makes the name durable.
  if (opened < 0) return synced("syncfs", ::syncfs, descriptor);
  auto fault = synced("fsync of the directory", ::fsync, opened);
  if (fault && (fault->error_number == EINVAL || fault->error_number == ENOSYS || fault->error_number == EOPNOTSUPP ||
                fault->error_number == EBADF)) {
    fault.reset();  // this file system does not support fsync of directories
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
  if (!regular_ || source_ || nbytes == 0 || !known.load(std::memory_order_relaxed)) return std::nullopt;
  const uint64_t page = page_nbytes();
  const uint64_t first = offset / page;
  const uint64_t last = (offset + nbytes - 1) / page;
  if (stacked_) return residency_below(first * page, (last + 1) * page);
  CachestatRange range{offset, nbytes};
  Cachestat counts{};
  if (::syscall(cachestat_number, descriptor(), &range, &counts, 0) != 0) {
    if (errno == ENOSYS) known.store(false, std::memory_order_relaxed);
    return std::nullopt;
  }
  return Residency{counts.cached, last - first + 1};
}

// The residency of a file on an overlay file system. The cached pages belong to the underlying file of a layer, so
// cachestat() counts none for the overlay's own file. Only mincore() on a mapping shows them.
std::optional<File::Residency> File::residency_below(uint64_t begin, uint64_t end) const {
  const uint64_t page = page_nbytes();
  const uint64_t total = (end - begin) / page;
  if (shown_.load(std::memory_order_relaxed) == Shown::never) return std::nullopt;
  const auto found = pages_shown(descriptor(), begin, end - begin);
  if (!found) return std::nullopt;
  if (*found == total && shown_.load(std::memory_order_relaxed) == Shown::perhaps) {
    // For a caller that neither owns the file nor may write to it, mincore(2) reports all pages as resident, even a
    // page behind the end of the file. So if that page is reported as resident, mincore() is not used for this file
    // again.
    const auto size = this->size();
    const uint64_t behind = size && *size ? (**size + page - 1) / page * page : 0;
    shown_.store(behind > 0 && pages_shown(descriptor(), behind, page) == 0 ? Shown::always : Shown::never);
    return residency_below(begin, end);
  }
  return Residency{*found, total};
}

Result<File::Snapshot> File::snapshot() const {
  auto found = size();
  if (!found) return found.fault();
  Snapshot snapshot{*found, false};
  const bool quickly = !stacked_ || *found <= max_quickly_shown_nbytes;
  if (snapshot.size && *snapshot.size > 0 && direct_ && mode_ == DirectMode::automatic && quickly) {
    const auto resident = residency(0, *snapshot.size);
    snapshot.nothing_cached = resident && resident->cached_pages == 0;
  }
  return snapshot;
}

}  // namespace tensorferry
