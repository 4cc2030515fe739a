// One transfer: it moves a contiguous range of one file from or to segments of memory.
//
// Blocks are taken from the transfer in order of offset. Each block goes through the steps of `Step`, one at a time:
// the thread that drives the block does what the step requires, calls the step's function, and gets the next step. This
// thread is a worker, which owns an engine (worker.h), the caller of a blocking call, or a helper, which runs
// operations that may block (helpers.h). This code does not depend on which engine has moved a block, or whether a
// thread has moved it without an engine. After the last block the request continues: see request.h.
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
  std::shared_ptr<Checksums> checksums = nullptr;  // may be null; no other transfer uses them
  File::Lease lease = {};                          // keeps the file open; if empty, create() acquires one
  std::shared_ptr<Lane> lane = nullptr;            // of the file's device; if null, create() looks it up
  bool ordered = false;                            // the caller has entered it in the WriteOrder, and lets it leave
  // For a transfer that moves several joined items (items.h): for each segment, the position of its item in the call,
  // or gap_position if the segment is a gap.
  std::vector<size_t> positions = {};
};

constexpr size_t gap_position = SIZE_MAX;

class Transfer;

// The next operation on a block.
enum class Step : uint8_t {
  wait_for_memory,  // prepare() again once bounce memory is released
  touch,            // touch(): add pages to memory that has none
  copy,             // copy(): between the bounce buffer and host memory
  copy_gpu,         // start_copy() and copied(), or copy_now(): between the bounce buffer and GPU memory
  move,             // pass the block to an engine or to execute_now(), then call look_at_result()
  get_over,         // get_over(): an operation that may block
  done,             // the block is complete or has failed; drop it
};

// A block in progress, with the state that is needed to settle it.
struct WorkBlock : Block {
  std::shared_ptr<Transfer> transfer;
  PlannedBlock planned{};
  BounceBuffer bounce;
  BounceTicket ticket;    // while the block waits for bounce memory
  uint64_t moved = 0;     // bytes that the kernel has moved so far
  uint32_t attempts = 0;  // attempts since the block last moved bytes
  uint32_t station = 0;   // the number of completed steps
  uint32_t gate = 0;      // index in gates(): the memory of this gate's GPU is copied next
  bool direct_descriptor = false;
  bool resident = false;            // the page cache holds the whole block
  Line::Class in = Line::normal;    // the class of its request when the block was taken from the line
  cufile::Handle cufile = nullptr;  // set if cuFile moves the block, from or to GPU memory
  bool of_gpu = false;              // the bounce buffer is from the page-locked pool for GPU memory
  mutable std::string why = {};     // why the block failed, if the file's source has reported it
  // Direct I/O is not possible for the rest of the block: get_over() must switch it to the buffered descriptor.
  bool refused = false;
  std::optional<Checksums::Block> sums;         // set if the CRC-32s were computed while the block was read
  std::chrono::steady_clock::time_point begun;  // for the latency
};

class Transfer final : public OrderedWrite, public std::enable_shared_from_this<Transfer> {
 public:
  // Check the range, make the plan, and open the descriptors that the plan needs. Nothing is moved yet. For a write,
  // the file space must have been reserved. `index` is the transfer's position in the call. `snapshot` is the file's
  // state, if the caller of a read has looked it up.
  static Result<std::shared_ptr<Transfer>> create(TransferSpec spec, std::shared_ptr<Request> request, size_t index,
                                                  uint64_t block_nbytes, const File::Snapshot* snapshot = nullptr);

  Request& request() const { return *request_; }
  const std::shared_ptr<Lane>& lane() const { return spec_.lane; }
  uint64_t nbytes() const { return spec_.memory.nbytes(); }
  bool is_write() const { return spec_.write; }
  bool enters_order() const { return spec_.write && !spec_.ordered; }
  const std::shared_ptr<File>& file() const { return spec_.file; }  // null once the transfer has ended
  uint64_t moved_nbytes() const { return moved_nbytes_.load(std::memory_order_relaxed); }
  // Whether there is more than one block.
  bool has_many_blocks() const {
    const uint64_t begin = plan_.skip(0);
    return begin < nbytes() && plan_.skip(begin + plan_.block_at(begin).nbytes) < nbytes();
  }
  // Whether the transfer only copies data that is already in host memory (in the page cache, or of a file in memory).
  // In that case several threads may share the work.
  bool is_shared() const { return shared_ || residency_ == Residency::whole; }
  const std::vector<std::shared_ptr<cuda::Gate>>& gates() const { return spec_.memory.gates(); }

  // Called when the write no longer has to wait for an overlapping one (write_order.h): puts the transfer in line.
  void turn_has_come() override;

  // Take the next block, if there is one. Sets `exhausted` if there will be no further one. Calls must be serialized.
  bool next_block(WorkBlock& block, bool& exhausted);

  // Start again at the first block. No block that was taken so far may be in progress.
  void rewind();

  // Set the block's descriptor and memory, and return its first step. If the block needs a bounce buffer and there is
  // no memory for it, returns wait_for_memory; `waiter`, if given, is then called when memory is released.
  Step prepare(WorkBlock& block, BounceWaiter* waiter, Statistics& statistics);

  // Move the block on this thread by one call of `call`, which is execute_now() or read_cached(), and return its
  // result. If CRC-32s of cached data are wanted, the data is read in small steps instead, so each step's bytes are
  // still in the processor's cache when they are included in the CRC-32.
  int64_t move_here(WorkBlock& block, int64_t (*call)(const Block&)) const;
  // Read the rest of a block of table rows from the page cache; with `wait`, wait for the drive where needed.
  int64_t move_rows(const WorkBlock& block, bool wait) const;

  // Evaluate block.result after a move: complete, resume, retry or fail the block.
  Step look_at_result(WorkBlock& block, Statistics& statistics);

  // Do what must happen before the block can be moved again: pause before another attempt, or open the buffered
  // descriptor.
  Step get_over(WorkBlock& block);

  // Add pages to the block's memory. This may take as long as zeroing the memory takes, and on some virtual machines
  // ten times as long.
  Step touch(WorkBlock& block, Statistics& statistics);

  // Copy between the bounce buffer and host memory, and compute and verify CRC-32s. This may take as long as it takes
  // to copy a megabyte.
  Step copy(WorkBlock& block, Statistics& statistics);

  // Copy between the bounce buffer and memory of the GPU gpu_of(block). Either call start_copy(), which queues the copy
  // on a copier of that GPU, and then copied() once the event has passed, or with the fault if start_copy() or the copy
  // failed. Or call copy_now(), which waits for the copy.
  cuda::Gpu& gpu_of(const WorkBlock& block) const { return gates()[block.gate]->gpu(); }
  Result<cuda::Event> start_copy(WorkBlock& block, cuda::Copier& copier) const;
  Step copied(WorkBlock& block, const std::optional<Fault>& fault, Statistics& statistics);
  Step copy_now(WorkBlock& block, Statistics& statistics);

  // End the transfer with a fault. Must be called before any block is taken.
  void refuse(Fault fault);

  // Count down the references that keep the transfer from ending: one for each block in progress, and one for the
  // cursor (the position of the next block) while there may be further blocks. Returns true at zero: the transfer has
  // ended, and the caller must call finish(). The order is acq_rel because the thread that counts to zero must see
  // everything that the other threads have written.
  bool count_down() { return open_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  void finish();

  const std::optional<Fault>& fault() const { return fault_; }

  // Whether the transfer moves several joined items. One item must not fail because of another. If a joined transfer
  // ends with a fault, each of its items is therefore moved again by a separate transfer. ended_singly() then replaces
  // the fault with the faults of these transfers, each stored under its item's position in the call.
  bool joined() const { return !spec_.positions.empty(); }
  const TransferSpec& spec() const { return spec_; }
  void ended_singly(std::map<size_t, Fault> faults, uint64_t moved_nbytes);

  // The faults of all items, by position in the call.
  std::map<size_t, Fault> faults() const;

  // Release the file, after the transfer has ended. Returns the lease, which keeps the file open for the request's
  // operations on it.
  File::Lease release_file() {
    spec_.file.reset();
    return std::move(spec_.lease);
  }

 private:
  // How much of a read's range the page cache holds.
  enum class Residency { none, partial, whole };

  Transfer(TransferSpec spec, std::shared_ptr<Request> request, size_t index);

  bool goes_past_the_cache(uint64_t block_nbytes, bool may_be_cached);
  std::optional<File::Residency> residency() const;
  PlanInput plan_input(uint64_t block_nbytes, bool direct) const;
  bool verified() const { return spec_.checksums && spec_.checksums->verify(); }
  // The loads are relaxed: a thread that sees a flag late only takes one block more.
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
  std::shared_ptr<Request::Unit> unit = nullptr;  // of its file, if the request has operations on files

 private:
  TransferSpec spec_;
  std::shared_ptr<Request> request_;
  Plan plan_;
  std::shared_ptr<BouncePool> pinned_pool_;  // set if the memory includes GPU memory
  Residency residency_ = Residency::none;
  bool shared_ = false;            // whether the file is in memory: see is_shared()
  uint64_t cursor_ = 0;            // the position of the next block
  std::atomic<uint64_t> open_{1};  // the references that count_down() counts
  std::atomic<uint64_t> moved_nbytes_{0};
  std::atomic<bool> stopped_{false};  // after a fault
  std::mutex mutex_;                  // guards the members below while blocks are in flight
  struct LookedAt {
    uint64_t begin = 0, end = 0;
    bool untouched = false;
  } looked_at_;  // the last range of memory that was checked, and whether a page of it was missing
  std::optional<Fault> fault_;
  std::map<size_t, Fault> faults_of_items_;
};

}  // namespace tensorferry
