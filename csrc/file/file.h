// One open file: its descriptors (direct and buffered), alignment rules, size and durability. A block is one read or
// write that is passed to the kernel (engine/engine.h).
//
// A File opens one descriptor and switches it to O_DIRECT where the file system supports that. A second, buffered
// descriptor is opened through /proc only when something needs it (ragged edges of a write, cached parts of a read). A
// request that needs neither holds only one descriptor, so thousands of requests can be in progress at the same time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/after_fork.h"
#include "base/fault.h"
#include "device/cufile.h"
#include "file/first_reads.h"
#include "file/source.h"

namespace tensorferry {

uint32_t page_nbytes();

enum class DirectMode { automatic, always, never };

// The multiples that direct I/O requires of memory addresses and of file offsets and lengths, in bytes.
struct DirectAlignment {
  uint32_t memory = 1;
  uint32_t offset = 1;
};

struct OpenOptions {
  bool read = false;
  bool write = false;
  bool create = false;
  bool exclusive = false;
  bool truncate = false;
  bool replaced = false;     // one request writes the whole file: see File::replaced()
  bool for_request = false;  // one request owns the file and closes it: see File::of_requests()
  DirectMode direct = DirectMode::automatic;
};

struct Status;  // the properties of a file that open() looks up

// Identifies a file independently of its path: st_dev and inode; for a block device, its device number and UINT64_MAX.
using FileIdentity = std::pair<uint64_t, uint64_t>;

class File : public std::enable_shared_from_this<File> {
 public:
  static Result<std::shared_ptr<File>> open(const std::string& path, const OpenOptions& options);

  // Create a File from the caller's descriptor. The descriptor is reopened (or duplicated), so the caller may close it
  // at once.
  static Result<std::shared_ptr<File>> from_descriptor(int descriptor, bool write, DirectMode direct,
                                                       bool for_request = false);

  // A file without a descriptor, whose bytes `source` reads. Only engines with threads can read it, because `source`
  // may block. `device` is the number that device() returns. It selects the lane: the queue and the threads that serve
  // the files of one device (transfer/lane.h).
  static std::shared_ptr<File> of_source(std::string path, uint64_t nbytes, uint64_t device,
                                         std::shared_ptr<Source> source);

  ~File() { (void)close(); }  // there is no caller left to report a failure to
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Close all descriptors now; nothing may be in flight. NFS, FUSE and quotas may report only here that written data
  // could not be stored, so close() returns the first failure of a file that is open for writing. After close(),
  // descriptor() is -1, every operation that needs a descriptor fails with EBADF, and further calls do nothing.
  std::optional<Fault> close();

  // A reference to a File that keeps its descriptors open. retire() waits for leases; close() does not.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&& other) noexcept {
      std::swap(file_, other.file_);
      return *this;
    }
    ~Lease() {
      if (file_) file_->leases_.fetch_sub(1, std::memory_order_acq_rel);
    }
    explicit operator bool() const { return file_ != nullptr; }

    // Return a further lease of the same file, which must not be empty. Unlike File::lease(), this works after
    // retire(), which waits for this lease in any case.
    Lease another() const {
      file_->leases_.fetch_add(1, std::memory_order_acq_rel);
      return Lease(file_);
    }

    // Whether this lease is the last reference to the file, so releasing it closes the descriptors.
    bool is_all_that_is_left() const { return file_.use_count() == 1; }

   private:
    friend class File;
    explicit Lease(std::shared_ptr<File> file) : file_(std::move(file)) {}
    std::shared_ptr<File> file_;
  };

  // Return a lease. It is empty if retire() was called before, because the file is then about to be closed.
  Lease lease();

  // Refuse further leases and wait for the existing ones to end. Returns false if some are left after the timeout.
  bool retire(std::chrono::milliseconds timeout);

  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }
  bool in_memory() const { return in_memory_; }  // the file is on a file system without a drive, such as tmpfs
  DirectMode direct_mode() const { return mode_; }
  // The results of the first reads of the file's mount (first_reads.h); null if it is not a network file system or
  // FUSE.
  FirstReads* first_reads() const { return first_reads_.get(); }
  // Whether the file is on FUSE. All blocks of such a file must be moved by threads: the engine's, or the helper
  // threads of the lane. io_uring assumes that a FUSE file never blocks in a submission, because the file can be
  // polled. In fact each read or write may block, and with it the worker that submits. Also, io_uring resumes a short
  // direct read or write of such a file at the same offset, since fuse_direct_IO leaves ki_pos unchanged (seen with
  // Linux 6.18 where the server has not asked for FUSE_ASYNC_DIO).
  bool on_fuse() const { return fuse_; }
  bool regular() const { return regular_; }  // false: a block device
  Source* source() const { return source_.get(); }
  bool readable() const { return readable_; }
  bool writable() const { return writable_; }
  DirectAlignment alignment() const { return alignment_; }
  int descriptor() const { return descriptor_.load(std::memory_order_relaxed); }
  const FileIdentity& identity() const { return identity_; }
  uint64_t file_system() const { return file_system_; }  // st_dev

  // The device that transfers of this file wait for: st_dev of the file system, the device number of a block device, or
  // 0 for files in memory, which wait for no device.
  uint64_t device() const { return in_memory_ ? 0 : regular_ ? file_system_ : identity_.first; }

  // Whether a request that writes the file truncates the file behind the last byte written, even without the request's
  // `truncate`. Set by OpenOptions::replaced, for regular files only, since devices cannot be truncated.
  bool replaced() const { return replaced_ && regular_; }

  // The descriptor for I/O through the page cache.
  Result<int> buffered_descriptor();

  // A power of two. If the file is divided into units of this size, no unit may be written both through the page cache
  // and directly, because the page cache reads and writes back whole units, which would overwrite bytes that a direct
  // write has stored meanwhile. A unit is a page, or the file system's block where that is larger (XFS with 16 KiB
  // blocks).
  uint32_t write_granularity() const { return write_granularity_; }

  // The size in bytes.
  Result<std::optional<uint64_t>> size() const;

  // The size against which a read is checked, so a read beyond the end is refused. For a file that was opened for one
  // request, this is the size at open: no system call is needed, and the size is no older than the request.
  Result<std::optional<uint64_t>> size_for_reading() const {
    return regular_ && of_request_.load(std::memory_order_relaxed) ? std::optional(opened_size_) : size();
  }

  // Reserve blocks for the part of [offset, offset + nbytes) that is beyond the file's present end, and extend the size
  // to cover the range. Direct writes then do not extend the file (ext4 and XFS serialize writes that do), and a full
  // disk is found before the first write. If the file system does not support fallocate, this does nothing. If space is
  // refused, the size stays as it was.
  std::optional<Fault> preallocate(uint64_t offset, uint64_t nbytes);

  // Return a fault if the file size limit (RLIMIT_FSIZE) does not allow a write up to the offset `end`.
  std::optional<Fault> check_end(uint64_t end) const;

  // The free space of the file system, as text for messages.
  std::string room() const;

  std::optional<Fault> truncate(uint64_t size);
  std::optional<Fault> end_at(uint64_t size);  // like truncate(), but leaves a file alone that has this size already

  // Make earlier writes durable. After a failure every later call fails, too: the kernel reports a lost write-back once
  // for each open file description (errseq_t in the kernel's documentation), and the next fdatasync would succeed
  // although the data is lost. A forked child must not call sync(): the child shares the open file description, so the
  // kernel would report the error to the child and not to the parent.
  std::optional<Fault> sync();
  uint64_t fork_generation() const { return fork_generation_; }

  // Whether a File of this process has created the file's name in its directory, or may have, and name_durable() was
  // not called since. A durable write then needs sync_directory() in addition to sync(), and name_durable() after it.
  bool name_made() const;
  void name_durable();

  // The directory that holds the file's name, with symbolic links resolved.
  Result<std::string> directory() const;

  // cuFile's handle of the file; null if cuFile does not support the file. The file is registered with cuFile at first
  // use, and deregistered when it is closed.
  cufile::Handle cufile_handle();

  // How many of the pages of [offset, offset + nbytes) are in the page cache. Empty where the kernel cannot report it:
  // cachestat(2) needs Linux 6.5; for files on overlay, mincore(2) is used, which needs a caller that owns the file or
  // may write to it.
  struct Residency {
    uint64_t cached_pages;
    uint64_t total_pages;
  };
  std::optional<Residency> residency(uint64_t offset, uint64_t nbytes) const;

  // State of the file that all transfers of one submission need. It is looked up once for all of them.
  struct Snapshot {
    std::optional<uint64_t> size;
    bool nothing_cached = false;  // false: some pages may be in the page cache
  };
  Result<Snapshot> snapshot() const;

  // The number of descriptors that all Files of the process hold.
  static size_t open_descriptors();

  // The files that were opened for one request each. A caller that runs out of descriptors may wait until one of them
  // is closed, because each is closed at the end of its request. It must not wait for other files, which may stay open
  // forever.
  struct OfRequests {
    size_t open;          // how many of them are open
    uint64_t given_back;  // how many of them have been closed so far
  };
  static OfRequests of_requests();

 private:
  File(std::string path, int descriptor, bool readable, bool writable);
  // Set the properties of the file from `status`, and switch the descriptor to O_DIRECT as `mode` says. `kept_flags`
  // are the status flags that must be kept because the caller shares the open file description; 0 if the description is
  // ours.
  std::optional<Fault> enable_direct(DirectMode mode, const Status& status, int kept_flags);
  void give_to_request();  // mark the file as one that was opened for one request
  // Whether the file was opened for one request and had at least `end` bytes at that time.
  bool was_opened_with(uint64_t end) const {
    return of_request_.load(std::memory_order_relaxed) && end <= opened_size_;
  }
  std::optional<Residency> residency_below(uint64_t begin, uint64_t end) const;
  Fault fault(const char* operation, int error_number) const;
  std::optional<std::string> resolved_name() const;

  static constexpr uint64_t retired_bit = uint64_t{1} << 63;
  std::atomic<uint64_t> leases_{0};  // the number of leases, and retired_bit after retire()

  std::string path_;
  std::shared_ptr<Source> source_;
  std::atomic<int> descriptor_;
  bool readable_;
  bool writable_;
  bool direct_ = false;
  DirectMode mode_ = DirectMode::automatic;
  bool regular_ = true;
  bool in_memory_ = false;
  bool stacked_ = false;  // on an overlay file system
  bool fuse_ = false;
  std::shared_ptr<FirstReads> first_reads_;
  // Whether mincore() on a mapping shows which pages are cached; `perhaps` until this is known.
  enum class Shown { perhaps, always, never };
  mutable std::atomic<Shown> shown_{Shown::perhaps};
  bool replaced_ = false;
  FileIdentity identity_;
  uint64_t file_system_ = 0;
  uint64_t opened_size_ = 0;  // at open; a file with a source always has this size
  uint32_t write_granularity_ = 1;
  bool keeps_failed_reservations_ = false;  // on ext4, where a failed fallocate keeps the blocks that it got
  std::atomic<bool> of_request_{false};
  DirectAlignment alignment_;
  const uint64_t fork_generation_ = tensorferry::fork_generation();
  std::mutex sync_mutex_;
  std::atomic<uint64_t> syncs_begun_{0};
  int sync_error_ = 0;  // errno of the first sync that failed
  std::atomic<bool> name_durable_{false};
  std::atomic<int> buffered_{-1};  // the second descriptor, without O_DIRECT; -1 until it is opened
  std::mutex cufile_mutex_;        // serializes registration; a forked child never registers a file
  std::atomic<cufile::Handle> cufile_{nullptr};
  bool refused_by_cufile_ = false;
};

// Make the names in `directory` durable by an fsync of the directory. If the directory cannot be opened, the whole file
// system of the file `descriptor`, a file in the directory, is synced instead. File systems that do not support fsync
// of directories count as synced. `path` is for messages.
std::optional<Fault> sync_directory(const std::string& directory, int descriptor, const std::string& path);

}  // namespace tensorferry
