// One transfer: a contiguous piece of memory to or from a contiguous range of one file.
//
// The scheduler takes blocks from it in order of offset, prepares each (descriptor, memory, bounce buffer), has
// an engine run it, and settles the result here: resume, retry, or count. Nothing here knows which engine ran a
// block, or whether one did. What follows the last block is the request's: see request.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "device/gpu.h"
#include "engine/engine.h"
#include "file/file.h"
#include "memory/bounce_pool.h"
#include "transfer/plan.h"
#include "transfer/request.h"
#include "transfer/statistics.h"
#include "transfer/write_order.h"

namespace tensorferry {

struct TransferSpec {
  std::shared_ptr<File> file;
  char* memory = nullptr;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  bool write = false;
  std::shared_ptr<cuda::Gate> gate = nullptr;  // memory is a GPU's, to be used from then on
  bool use_cufile = false;
  File::Lease lease = {};  // on the file; without one it is taken
};

class Transfer;

// A block on its way, with what is needed to settle it.
struct WorkBlock : Block {
  std::shared_ptr<Transfer> transfer;
  PlannedBlock planned{};
  BounceBuffer bounce;
  uint64_t moved = 0;     // by the kernel so far
  uint32_t attempts = 0;  // since it last moved something
  bool direct_descriptor = false;
  bool resident = false;  // the page cache holds all of it
  bool staged = false;    // the bounce buffer is one side of a copy to or from a GPU
  bool refused = false;   // by the direct descriptor: the buffered one is to be opened, and takes it
  std::chrono::steady_clock::time_point begun;
};

// What becomes of a block after a result. `again` and `slow`: run it once more as it now is, the latter only after
// get_over(), which may block.
enum class Settled { done, again, slow, copy };
enum class Prepared { ready, no_bounce_memory, failed };

class Transfer final : public OrderedWrite, public std::enable_shared_from_this<Transfer> {
 public:
  // Checks the range and plans; what a plan needs to be opened is opened. Nothing is moved yet. A writer has reserved
  // the space. `snapshot` is that of the file, if a reader has one.
  static Result<std::shared_ptr<Transfer>> create(TransferSpec spec, std::shared_ptr<Request> request, size_t index,
                                                  uint64_t block_nbytes, const File::Snapshot* snapshot = nullptr);

  Request& request() const { return *request_; }
  uint64_t nbytes() const { return spec_.nbytes; }
  bool is_write() const { return spec_.write; }
  const std::shared_ptr<File>& file() const { return spec_.file; }  // null once it has ended
  uint64_t moved_nbytes() const { return moved_nbytes_.load(std::memory_order_relaxed); }
  bool has_many_blocks() const { return plan_.block_at(0).nbytes < spec_.nbytes; }
  bool from_page_cache() const { return residency_ == Residency::whole; }
  const std::shared_ptr<cuda::Gate>& gate() const { return spec_.gate; }

  void turn_has_come() override;

  // Takes the next block, if there is one to take. Sets `exhausted` when there will be no further one. Callers
  // serialize calls.
  bool take(WorkBlock& block, bool& exhausted);

  // Forgets that blocks were taken; all of them must have been dropped or settled.
  void rewind();

  // Gives the block its descriptor and memory. A failure is recorded, and the block must then be dropped.
  Prepared prepare(WorkBlock& block, BounceWaiter* waiter);

  // Looks at block.result. `copy`: what a staged block read is in its buffer; copy it to the GPU, then call copied().
  Settled settle(WorkBlock& block, Statistics& statistics);

  // What has to come before the next attempt of a `slow` block: a pause, or opening a descriptor. False: that failed,
  // which is recorded, and the block must be dropped.
  bool get_over(WorkBlock& block);

  // The copy of a staged block: queued on a copier's stream, or done here and now. To be made before a write and after
  // a read. copied() says how it ended, and is false if badly: that is recorded, and the block must be dropped.
  Result<cuda::Event> start_copy(WorkBlock& block, cuda::Copier& copier) const;
  bool copy_now(WorkBlock& block, Statistics& statistics);
  bool copied(WorkBlock& block, const std::optional<Fault>& fault, Statistics& statistics);

  // Before any block was taken: none will be.
  void refuse(Fault fault);

  // Counts down what keeps it going: each block, and the cursor while it may yield blocks. True when it has ended;
  // then call finish().
  bool release() { return open_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  void finish();

  const std::optional<Fault>& fault() const { return fault_; }

  // Once ended: lets go of the file; the lease on it is for who has something left to do with it.
  File::Lease release_file() {
    spec_.file.reset();
    return std::move(spec_.lease);
  }

 private:
  enum class Residency { none, partial, whole };

  Transfer(TransferSpec spec, std::shared_ptr<Request> request, size_t index);

  bool stopped() const { return stopped_.load(std::memory_order_relaxed) || request_->canceled(); }
  void fail(const WorkBlock& block, int error_number, bool end_of_file, std::string hint = "");
  void record(Fault fault);
  bool use_buffered_descriptor(WorkBlock& block);
  bool try_again(WorkBlock& block, Statistics& statistics) const;
  void copy_out(WorkBlock& block);
  void complete(WorkBlock& block, Statistics& statistics);
  uint64_t padding(const WorkBlock& block) const {
    return spec_.offset + block.planned.begin - block.planned.io_offset;
  }
  uint64_t user_progress(const WorkBlock& block) const;

 public:
  const size_t index;

 private:
  TransferSpec spec_;
  std::shared_ptr<Request> request_;
  Plan plan_;
  std::shared_ptr<BouncePool> pinned_pool_;  // for staged blocks
  Residency residency_ = Residency::none;
  uint64_t cursor_ = 0;
  std::atomic<uint64_t> open_{1};
  std::atomic<uint64_t> moved_nbytes_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;  // guards fault_ while blocks are out
  std::optional<Fault> fault_;
};

}  // namespace tensorferry
