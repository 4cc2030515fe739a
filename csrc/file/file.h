// One open file: its descriptors (direct and buffered), its alignment rules, its size and its durability.
//
// A File opens one descriptor and switches it to O_DIRECT where the file system takes that; a second, buffered
// one is opened through /proc only when something needs it (ragged edges of a write, cached parts of a read),
// so that thousands of plain requests hold one descriptor each.
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

// What direct I/O asks of memory addresses and of file offsets and lengths, in bytes.
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
  bool replaced = false;     // by one request: see File::replaced()
  bool for_request = false;  // which closes it: see File::of_requests()
  DirectMode direct = DirectMode::automatic;
};

struct Status;  // what is asked of a file as it is opened

// Which file it is, whatever it is called: file system and inode; of a block device its number.
using FileIdentity = std::pair<uint64_t, uint64_t>;

class File : public std::enable_shared_from_this<File> {
 public:
  static Result<std::shared_ptr<File>> open(const std::string& path, const OpenOptions& options);

  // A descriptor of the caller's; it is reopened (or duplicated), so the caller may close theirs at once.
  static Result<std::shared_ptr<File>> from_descriptor(int descriptor, bool write, DirectMode direct,
                                                       bool for_request = false);

  // To be read by a source, by engines with threads only: it has no descriptor. `device` stands for what it waits for.
  static std::shared_ptr<File> of_source(std::string path, uint64_t nbytes, uint64_t device,
                                         std::shared_ptr<Source> source);

  ~File() { (void)close(); }  // nobody is left to be told
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Closes all descriptors now; nothing may be in flight. NFS, FUSE and quotas may tell only here that written data
  // could not be kept: the first failure of a descriptor that is open for writing. Later calls do nothing; afterwards
  // descriptor() is -1 and all that needs one fails with EBADF.
  std::optional<Fault> close();

  // As long as there is one, the descriptors stay open, unless close() is called all the same.
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

    // Whether the file goes, and its descriptors are closed, with this.
    bool is_all_that_is_left() const { return file_.use_count() == 1; }

   private:
    friend class File;
    explicit Lease(std::shared_ptr<File> file) : file_(std::move(file)) {}
    std::shared_ptr<File> file_;
  };

  // Empty once the file is retired.
  Lease lease();

  // No more leases; waits for the end of those there are, and returns whether there are none.
  bool retire(std::chrono::milliseconds timeout);

  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }
  bool in_memory() const { return in_memory_; }  // a file system without a drive: tmpfs, say
  DirectMode direct_mode() const { return mode_; }
  // Of a file on the network or FUSE, which is read as the first reads of its mount went; null for others.
  FirstReads* first_reads() const { return first_reads_.get(); }
  // Linux takes FUSE for one that never waits in a submission, since it can be polled, but it may for each request. And
  // what io_uring reads or writes short there, directly, it goes on with at the same offset (fuse_direct_IO leaves
  // ki_pos as it was; seen with Linux 6.18 where the server has not asked for FUSE_ASYNC_DIO). So threads move blocks
  // there.
  bool on_fuse() const { return fuse_; }
  bool regular() const { return regular_; }  // else a device
  Source* source() const { return source_.get(); }
  bool readable() const { return readable_; }
  bool writable() const { return writable_; }
  DirectAlignment alignment() const { return alignment_; }
  int descriptor() const { return descriptor_.load(std::memory_order_relaxed); }
  const FileIdentity& identity() const { return identity_; }
  uint64_t file_system() const { return file_system_; }  // its number, st_dev

  // What a transfer waits for: the device that the file system is on, as far as its number tells; of a block device its
  // own; 0 for files in memory, which wait for none.
  uint64_t device() const { return in_memory_ ? 0 : regular_ ? file_system_ : identity_.first; }

  // Whether a request that has written to it ends it behind the last byte written. Only files have such an end.
  bool replaced() const { return replaced_ && regular_; }

  // The descriptor whose I/O goes through the page cache.
  Result<int> buffered_descriptor();

  // What writes through the page cache and past it must not share: pages, and blocks of the file system where these
  // are larger (XFS with 16 KiB blocks). There the cache reads and writes back whole blocks, over what was written past
  // it meanwhile. A power of two.
  uint32_t write_granularity() const { return write_granularity_; }

  // Size in bytes; nothing where a size means nothing (a character device).
  Result<std::optional<uint64_t>> size() const;

  // The same of a file that was opened for one request: as it was then. That is no longer ago than the request.
  Result<std::optional<uint64_t>> size_for_reading() const {
    return regular_ && of_request_.load(std::memory_order_relaxed) ? std::optional(opened_size_) : size();
  }

  // Reserves blocks for [offset, offset + nbytes) beyond the present end and extends the size to cover it, so
  // that direct writes neither extend the file (ext4 and XFS serialize those) nor find the disk full half-way.
  // File systems without fallocate are left alone. A refusal leaves the size as it was, and never shortens the file.
  // With `keep_size` it is left as it was in any case.
  std::optional<Fault> preallocate(uint64_t offset, uint64_t nbytes, bool keep_size = false);

  // Refuses what the limit of files' sizes (RLIMIT_FSIZE) does not allow to be written.
  std::optional<Fault> check_end(uint64_t end) const;

  // How much the file system has left, for messages.
  std::string room() const;

  // Gives the blocks of a range back to the file system; the size stays, and the range reads as zeros.
  std::optional<Fault> punch(uint64_t offset, uint64_t nbytes);

  std::optional<Fault> truncate(uint64_t size);
  std::optional<Fault> end_at(uint64_t size);  // the same, without a change where that is its size

  // Makes durable what was written before. Once that failed it fails for ever: the kernel tells of it once for each
  // open file (errseq_t in the kernel's docs), and the next fdatasync succeeds although what was written is lost. Not
  // for a forked child, which shares the open file and would take the error away from its parent.
  std::optional<Fault> sync();
  uint64_t fork_generation() const { return fork_generation_; }

  // Whether a File of this process made the file's name (or may have), and nobody called name_durable() since:
  // sync_directory() is then what a durable write needs besides sync().
  bool name_made() const;
  void name_durable();

  // The directory that holds the file's name, behind symbolic links.
  Result<std::string> directory() const;

  // What cuFile knows it by; null where cuFile does not take it. Registered at first use, until the file is closed.
  cufile::Handle cufile_handle();

  // How much of [offset, offset + nbytes) the page cache holds: pages cached and pages in all. Nothing where
  // the kernel cannot tell (cachestat(2), Linux 6.5; for overlay mincore(2), for who owns the file or may write to it).
  struct Residency {
    uint64_t cached_pages;
    uint64_t total_pages;
  };
  std::optional<Residency> residency(uint64_t offset, uint64_t nbytes) const;

  // What many transfers of one submission would each ask the kernel for.
  struct Snapshot {
    std::optional<uint64_t> size;
    bool nothing_cached = false;
  };
  Result<Snapshot> snapshot() const;

  // Descriptors held by all Files of the process.
  static size_t open_descriptors();

  // Files that were opened for one request each: how many are open, and how many have been closed so far. Who lacks a
  // descriptor may wait for one of these, and for no other.
  struct OfRequests {
    size_t open;
    uint64_t given_back;
  };
  static OfRequests of_requests();

 private:
  File(std::string path, int descriptor, bool readable, bool writable);
  // `kept_flags`: of a description that is shared with others; 0: it is the file's own.
  std::optional<Fault> enable_direct(DirectMode mode, const Status& status, int kept_flags);
  void give_to_request();
  // Whether one request has opened the file, when it had this end already.
  bool was_opened_with(uint64_t end) const {
    return of_request_.load(std::memory_order_relaxed) && end <= opened_size_;
  }
  std::optional<Residency> residency_below(uint64_t begin, uint64_t end) const;
  Fault fault(const char* operation, int error_number) const;
  std::optional<std::string> resolved_name() const;

  static constexpr uint64_t retired_bit = uint64_t{1} << 63;
  std::atomic<uint64_t> leases_{0};  // how many, and whether there will be no more

  std::string path_;
  std::shared_ptr<Source> source_;
  std::atomic<int> descriptor_;
  bool readable_;
  bool writable_;
  bool direct_ = false;
  DirectMode mode_ = DirectMode::automatic;
  bool regular_ = true;
  bool in_memory_ = false;
  bool stacked_ = false;
  bool fuse_ = false;
  std::shared_ptr<FirstReads> first_reads_;
  // Whether a mapping shows which pages are in memory.
  enum class Shown { perhaps, always, never };
  mutable std::atomic<Shown> shown_{Shown::perhaps};
  bool replaced_ = false;
  FileIdentity identity_;
  uint64_t file_system_ = 0;
  uint64_t opened_size_ = 0;  // for good, if it has a source
  uint32_t write_granularity_ = 1;
  bool keeps_failed_reservations_ = false;
  std::atomic<bool> of_request_{false};
  DirectAlignment alignment_;
  const uint64_t fork_generation_ = tensorferry::fork_generation();
  std::mutex sync_mutex_;
  std::atomic<uint64_t> syncs_begun_{0};
  int sync_error_ = 0;  // of the first sync that failed
  std::atomic<bool> name_durable_{false};
  std::atomic<int> buffered_{-1};
  std::mutex cufile_mutex_;  // for registering only, which a forked child never does
  std::atomic<cufile::Handle> cufile_{nullptr};
  bool refused_by_cufile_ = false;
};

// Makes the names in `directory` durable; `descriptor` is of a file in it. File systems without fsync of directories
// have nothing that it could add. `path` is for messages.
std::optional<Fault> sync_directory(const std::string& directory, int descriptor, const std::string& path);

}  // namespace tensorferry
