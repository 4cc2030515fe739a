// One transfer: segments of memory to or from a contiguous range of one file.
//
// Blocks are taken from it in order of offset. Each then goes through the stations of its Step, one at a time: whoever
// drives it (a worker, the caller, a helper) does what a step says, calls the function of that step, and gets the next
// one. Nothing here knows which engine ran a block, or whether one did. What follows the last block is the request's:
// see request.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/gpu.h"
#include "engine/engine.h"
#include "file/file.h"
#include "memory/bounce_pool.h"
#include "transfer/checksums.h"
#include "transfer/lane.h"
#include "transfer/plan.h"
#include "transfer/request.h"
#include "transfer/segments.h"
#include "transfer/statistics.h"
#include "transfer/write_order.h"

namespace tensorferry {

struct TransferSpec {
  std::shared_ptr<File> file;
  Segments memory;
  uint64_t offset = 0;
  bool write = false;
  bool use_cufile = false;
  std::shared_ptr<Checksums> checksums = nullptr;  // if any are wanted; of this transfer alone
  File::Lease lease = {};                          // on the file; without one it is taken
  std::shared_ptr<Lane> lane = nullptr;            // of the file's device; without it, it is looked up
  // Where several items of a call are joined: the position of each segment's item, and gap_position of a gap.
  std::vector<size_t> positions = {};
};

constexpr size_t gap_position = SIZE_MAX;

class Transfer;

// What is to be done with a block next.
enum class Step : uint8_t {
  wait_for_memory,  // it is to be prepared again when bounce memory came free
  touch,            // touch(): memory that has no pages yet
  copy,             // copy(): between its buffer and host memory
  copy_gpu,         // start_copy() and copied(), or copy_now(): the same with memory of a GPU
  move,             // an engine, or execute_now(), then look_at_result()
  get_over,         // what may block: get_over()
  done,             // it is settled, or has failed; drop it
};

// A block on its way, with what is needed to settle it.
struct WorkBlock : Block {
  std::shared_ptr<Transfer> transfer;
  PlannedBlock planned{};
  BounceBuffer bounce;
  uint64_t moved = 0;     // by the kernel so far
  uint32_t attempts = 0;  // since it last moved something
  uint32_t station = 0;   // steps behind it
  uint32_t gate = 0;      // whose memory is copied next
  bool direct_descriptor = false;
  bool resident = false;  // the page cache holds all of it
  Line::Class in = Line::normal;
  cufile::Handle cufile = nullptr;       // if it moves the block, from or to memory of a GPU
  bool of_gpu = false;                   // its buffer is of the pinned pool
  mutable std::string why = {};          // it has failed, where the file's source knows it
  bool refused = false;                  // by the direct descriptor: the buffered one is to be opened, and takes it
  std::optional<Checksums::Block> sums;  // of all of it, if they were made while it was read
  std::chrono::steady_clock::time_point begun;
};

class Transfer final : public OrderedWrite, public std::enable_shared_from_this<Transfer> {
 public:
  // Checks the range and plans; what a plan needs to be opened is opened. Nothing is moved yet. A writer has reserved
  // the space. `snapshot` is that of the file, if a reader has one.
  static Result<std::shared_ptr<Transfer>> create(TransferSpec spec, std::shared_ptr<Request> request, size_t index,
                                                  uint64_t block_nbytes, const File::Snapshot* snapshot = nullptr);

  Request& request() const { return *request_; }
  const std::shared_ptr<Lane>& lane() const { return spec_.lane; }
  uint64_t nbytes() const { return spec_.memory.nbytes(); }
  bool is_write() const { return spec_.write; }
  const std::shared_ptr<File>& file() const { return spec_.file; }  // null once it has ended
  uint64_t moved_nbytes() const { return moved_nbytes_.load(std::memory_order_relaxed); }
  bool has_many_blocks() const {
    const uint64_t begin = plan_.skip(0);
    return begin < nbytes() && plan_.skip(begin + plan_.block_at(begin).nbytes) < nbytes();
  }
  // Whether nothing but memory is copied: by as many threads as there are.
  bool is_shared() const { return shared_ || residency_ == Residency::whole; }
  const std::vector<std::shared_ptr<cuda::Gate>>& gates() const { return spec_.memory.gates(); }

  void turn_has_come() override;

  // Takes the next block, if there is one to take. Sets `exhausted` when there will be no further one. Callers
  // serialize calls.
  bool next_block(WorkBlock& block, bool& exhausted);

  // Forgets that blocks were taken; all of them must have been dropped or settled.
  void rewind();

  // Gives the block its descriptor and memory.
  Step prepare(WorkBlock& block, BounceWaiter* waiter, Statistics& statistics);

  // To its first result by this call, execute_now() or read_cached(). What the page cache holds is read a few steps at
  // a time, so that a checksum finds in the processor's cache what was read.
  int64_t move_here(WorkBlock& block, int64_t (*call)(const Block&)) const;
  int64_t move_rows(const WorkBlock& block, bool wait) const;

  // Looks at block.result.
  Step look_at_result(WorkBlock& block, Statistics& statistics);

  // A pause, or opening a descriptor.
  Step get_over(WorkBlock& block);

  // May take as long as zeroing a block's memory takes, and on some virtual machines ten times as long.
  Step touch(WorkBlock& block, Statistics& statistics);

  // May take as long as copying a megabyte takes.
  Step copy(WorkBlock& block, Statistics& statistics);

  // Queued on a copier of gpu_of(block), with copied() to be called when the event has passed or was not to be had; or
  // here and now.
  cuda::Gpu& gpu_of(const WorkBlock& block) const { return gates()[block.gate]->gpu(); }
  Result<cuda::Event> start_copy(WorkBlock& block, cuda::Copier& copier) const;
  Step copied(WorkBlock& block, const std::optional<Fault>& fault, Statistics& statistics);
  Step copy_now(WorkBlock& block, Statistics& statistics);

  // Before any block was taken: none will be.
  void refuse(Fault fault);

  // Counts down what keeps it going: each block, and the cursor while it may yield blocks. True when it has ended;
  // then call finish().
  bool count_down() { return open_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  void finish();

  const std::optional<Fault>& fault() const { return fault_; }

  // Of joined items none is to fail for another: once it has ended with a fault, each is moved by a transfer of its
  // own, and what became of these takes the place of what became of all.
  bool joined() const { return !spec_.positions.empty(); }
  const TransferSpec& spec() const { return spec_; }
  void ended_singly(std::map<size_t, Fault> faults, uint64_t moved_nbytes);

  // By position in the call.
  std::map<size_t, Fault> faults() const;

  // Once ended: lets go of the file; the lease on it is for who has something left to do with it.
  File::Lease release_file() {
    spec_.file.reset();
    return std::move(spec_.lease);
  }

 private:
  enum class Residency { none, partial, whole };

  Transfer(TransferSpec spec, std::shared_ptr<Request> request, size_t index);

  bool goes_past_the_cache(uint64_t block_nbytes, bool may_be_cached);
  std::optional<File::Residency> residency() const;
  PlanInput plan_input(uint64_t block_nbytes, bool direct) const;
  bool verified() const { return spec_.checksums && spec_.checksums->verify(); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed) || request_->canceled(); }
  bool goes_through_cache_after_all(const PlannedBlock& planned) const;
  Step advance(WorkBlock& block, Statistics& statistics);
  bool has_gpu_piece(WorkBlock& block) const;
  bool is_to_be_touched(const WorkBlock& block);
  Step fail(const WorkBlock& block, int error_number, bool end_of_file, std::string hint = "");
  Step fail_damaged(uint64_t chunk);
  void add_to_sums(Checksums::Block& sums, const WorkBlock& block, uint64_t begin, uint64_t nbytes) const;
  void record(Fault fault);
  bool use_buffered_descriptor(WorkBlock& block);
  Step try_again(WorkBlock& block, Statistics& statistics, int error_number, std::string hint = "");
  void scatter(const WorkBlock& block, uint64_t nbytes) const;
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
  std::shared_ptr<BouncePool> pinned_pool_;  // if there is memory of GPUs
  Residency residency_ = Residency::none;
  bool shared_ = false;
  uint64_t cursor_ = 0;
  std::atomic<uint64_t> open_{1};
  std::atomic<uint64_t> moved_nbytes_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;  // guards what follows while blocks are out
  struct LookedAt {
    uint64_t begin = 0, end = 0;
    bool untouched = false;
  } looked_at_;  // the last range of memory, and whether some of it has no pages
  std::optional<Fault> fault_;
  std::map<size_t, Fault> faults_of_items_;
};

}  // namespace tensorferry
