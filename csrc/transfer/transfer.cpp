#include "transfer/transfer.h"

#include <errno.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "transfer/scheduler.h"

namespace tensorferry {
namespace {

// EINTR and EAGAIN: at once at first, then a millisecond apart, then it is an error.
constexpr uint32_t immediate_attempts = 16;
constexpr uint32_t max_attempts = 256;

// A bounced block's copy stays in the processor's cache up to about here.
constexpr uint64_t max_bounced_block_nbytes = uint64_t{1} << 20;

// Blocks in flight that the pool for GPU memory holds, at their longest: enough to keep the drive and the copies busy.
constexpr uint64_t staged_blocks = 16;

// What cuFile asks of offsets and lengths, where the drive asks for less.
constexpr uint32_t cufile_alignment = 4096;

const char* describe(Operation operation) { return operation == Operation::write ? "write" : "read"; }

}  // namespace

Transfer::Transfer(TransferSpec spec, std::shared_ptr<Request> request, size_t position)
    : OrderedWrite(spec.file->identity(), spec.offset, spec.offset + spec.nbytes),
      index(position),
      spec_(std::move(spec)),
      request_(std::move(request)) {}

Result<std::shared_ptr<Transfer>> Transfer::create(TransferSpec spec, std::shared_ptr<Request> request, size_t index,
                                                   uint64_t block_nbytes, const File::Snapshot* snapshot) {
  File& file = *spec.file;
  auto refused = [&](Fault fault) {
    fault.expected = spec.nbytes;
    if (fault.path.empty()) fault.path = file.path();
    return fault;
  };
  if (!spec.lease) spec.lease = file.lease();
  if (!spec.lease) return refused(Fault{.error_number = EBADF, .operation = "use of a closed file"});
  auto pool = spec.gate ? BouncePool::pinned_pool(spec.gate->gpu()) : Result(std::shared_ptr<BouncePool>());
  if (!pool) return refused(pool.fault());
  if (!spec.write) {
    auto size = snapshot ? Result(snapshot->size) : file.size();
    if (!size) return refused(size.fault());
    if (*size && spec.nbytes > **size - std::min(**size, spec.offset)) {
      Fault fault{.error_number = 0, .operation = "read", .path = file.path(), .offset = std::max(spec.offset, **size)};
      fault.end_of_file = true;
      fault.hint = "the file has " + std::to_string(**size) + " bytes";
      return refused(fault);
    }
  }
  std::shared_ptr<Transfer> transfer(new Transfer(std::move(spec), std::move(request), index));
  const TransferSpec& own = transfer->spec_;
  bool direct = file.direct() && own.nbytes > 0;
  const bool may_be_cached = !snapshot || !snapshot->nothing_cached;
  if (direct && !own.write && may_be_cached && file.direct_mode() == DirectMode::automatic) {
    if (auto resident = file.residency(own.offset, own.nbytes); resident && resident->cached_pages > 0) {
      const bool whole = resident->cached_pages >= resident->total_pages;
      // Without a descriptor to read it by (a limit), what is cached is on the drive as well.
      if (file.buffered_descriptor()) {
        transfer->residency_ = whole ? Residency::whole : Residency::partial;
        if (whole) direct = false;
      }
    }
  }
  PlanInput input;
  input.write = own.write;
  input.direct = direct;
  input.memory = reinterpret_cast<uintptr_t>(own.memory);
  input.offset = own.offset;
  input.nbytes = own.nbytes;
  input.memory_alignment = file.alignment().memory;
  input.offset_alignment = file.alignment().offset;
  input.page_nbytes = own.write && direct ? file.write_granularity() : page_nbytes();
  input.block_nbytes = block_nbytes;
  input.bounce_nbytes = std::min<uint64_t>(BouncePool::process_pool_nbytes() / 8, max_bounced_block_nbytes);
  if (own.gate) {
    transfer->pinned_pool_ = std::move(*pool);
    const uint64_t pool_nbytes = transfer->pinned_pool_->nbytes();
    input.staging = Staging::all;
    input.bounce_nbytes = pool_nbytes / staged_blocks;
    if (direct && own.use_cufile && file.cufile_handle() != nullptr) {
      input.staging = Staging::edges;
      input.block_nbytes = std::min<uint64_t>(block_nbytes, pool_nbytes / 4);  // what is cached will be staged
      input.memory_alignment = 1;
      input.offset_alignment = std::max(input.offset_alignment, cufile_alignment);
    }
  }
  transfer->plan_ = Plan(input);
  // A buffered descriptor that will be needed is opened now, where a descriptor limit can still be waited out.
  if (transfer->plan_.uses_buffered() && own.nbytes > 0) {
    if (auto descriptor = file.buffered_descriptor(); !descriptor) return refused(descriptor.fault());
  }
  return transfer;
}

bool Transfer::take(WorkBlock& block, bool& exhausted) {
  exhausted = true;
  if (cursor_ >= spec_.nbytes || stopped()) return false;
  block.operation = spec_.write ? Operation::write : Operation::read;
  block.planned = plan_.block_at(cursor_);
  cursor_ += block.planned.nbytes;
  exhausted = cursor_ >= spec_.nbytes;
  block.transfer = shared_from_this();
  block.moved = 0;
  block.attempts = 0;
  block.resident = false;
  block.staged = false;
  block.refused = false;
  block.cufile = nullptr;
  open_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Transfer::rewind() {
  cursor_ = 0;
  open_.store(1, std::memory_order_relaxed);
  moved_nbytes_.store(0, std::memory_order_relaxed);
}

Prepared Transfer::prepare(WorkBlock& block, BounceWaiter* waiter) {
  File& file = *spec_.file;
  PlannedBlock& planned = block.planned;
  block.begun = std::chrono::steady_clock::now();
  block.descriptor = file.descriptor();
  block.direct_descriptor = file.direct();
  block.resident = residency_ == Residency::whole;
  if (residency_ == Residency::partial) {
    auto resident = file.residency(spec_.offset + planned.begin, planned.nbytes);
    block.resident = resident && resident->cached_pages >= resident->total_pages;
  }
  if (block.resident) {
    planned = {Way::buffered, planned.begin, planned.nbytes, spec_.offset + planned.begin, planned.nbytes};
  }
  block.offset = planned.io_offset;
  block.nbytes = planned.io_nbytes;
  block.memory = spec_.memory + planned.begin;
  if (planned.way == Way::buffered && !use_buffered_descriptor(block)) return Prepared::failed;
  block.staged = spec_.gate && planned.way != Way::direct;
  if (block.staged) {
    block.bounce = pinned_pool_->try_acquire(planned.io_nbytes, waiter);
    if (!block.bounce) return Prepared::no_bounce_memory;
    block.memory = block.bounce.data();
  } else if (spec_.gate) {
    block.cufile = file.cufile_handle();
    block.gpu = &spec_.gate->gpu();
  } else if (planned.way == Way::bounced) {
    auto pool = BouncePool::process_pool();
    if (!pool) {
      fail(block, ENOMEM, false);
      return Prepared::failed;
    }
    block.bounce = pool->try_acquire(planned.io_nbytes, waiter);
    if (!block.bounce) return Prepared::no_bounce_memory;
    if (spec_.write) std::memcpy(block.bounce.data(), block.memory, planned.nbytes);
    block.memory = block.bounce.data();
  }
  return Prepared::ready;
}

Settled Transfer::settle(WorkBlock& block, Statistics& statistics) {
  const int64_t result = block.result;
  if (result == -EINTR || result == -EAGAIN || (spec_.write && result == 0)) {
    if (try_again(block, statistics)) return block.attempts > immediate_attempts ? Settled::slow : Settled::again;
    fail(block, result == 0 ? EIO : static_cast<int>(-result), false);
    return Settled::done;
  }
  if ((result == -EINVAL || result == -EOPNOTSUPP) && block.direct_descriptor && block.cufile == nullptr &&
      spec_.file->direct_mode() == DirectMode::automatic) {
    // The file took O_DIRECT but does not take this block: what it asks for is more than it told us.
    block.refused = true;
    return Settled::slow;
  }
  if (cufile::is_own_code(result)) {
    fail(block, EIO, false, cufile::text_of(result));
    return Settled::done;
  }
  if (result < 0) {
    fail(block, static_cast<int>(-result), false);
    return Settled::done;
  }

  auto advanced = static_cast<uint64_t>(result);
  if (block.cufile != nullptr) advanced -= advanced % cufile_alignment;  // it goes on where it may
  block.moved += advanced;
  block.memory += advanced;
  block.offset += advanced;
  block.nbytes -= std::min(advanced, block.nbytes);
  if (block.moved < padding(block) + block.planned.nbytes) {
    if (result == 0) {
      if (block.bounce && !block.staged) copy_out(block);
      fail(block, 0, true);
      return Settled::done;
    }
    if (advanced == 0) {  // less than cuFile may go on from
      if (try_again(block, statistics)) return block.attempts > immediate_attempts ? Settled::slow : Settled::again;
      const auto size = spec_.file->size();
      const bool ends = size && *size && **size < block.offset + block.nbytes;
      fail(block, ends ? 0 : EIO, ends, "cuFile moved " + std::to_string(result) + " bytes and no more");
      return Settled::done;
    }
    block.attempts = 0;
    statistics.resumed_blocks.fetch_add(1, std::memory_order_relaxed);
    const DirectAlignment alignment = spec_.file->alignment();
    const bool aligned = block.offset % alignment.offset == 0 && block.nbytes % alignment.offset == 0 &&
                         reinterpret_cast<uintptr_t>(block.memory) % alignment.memory == 0;
    block.refused = block.direct_descriptor && !aligned && block.cufile == nullptr;
    return block.refused ? Settled::slow : Settled::again;
  }

  if (block.staged && !spec_.write) return Settled::copy;
  if (block.bounce && !spec_.write) copy_out(block);
  complete(block, statistics);
  return Settled::done;
}

bool Transfer::try_again(WorkBlock& block, Statistics& statistics) const {
  statistics.retried_blocks.fetch_add(1, std::memory_order_relaxed);
  return ++block.attempts < max_attempts;
}

bool Transfer::get_over(WorkBlock& block) {
  if (block.attempts > immediate_attempts) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!block.refused) return true;
  block.refused = false;
  return use_buffered_descriptor(block);
}

void Transfer::complete(WorkBlock& block, Statistics& statistics) {
  const uint64_t nbytes = block.planned.nbytes;
  moved_nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
  (spec_.write ? statistics.written_nbytes : statistics.read_nbytes).fetch_add(nbytes, std::memory_order_relaxed);
  auto& way = !block.direct_descriptor            ? statistics.buffered_nbytes
              : block.planned.way == Way::bounced ? statistics.bounced_nbytes
                                                  : statistics.direct_nbytes;
  way.fetch_add(nbytes, std::memory_order_relaxed);
  if (spec_.gate) statistics.gpu_nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  if (block.cufile) statistics.gds_nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  const auto elapsed = std::chrono::steady_clock::now() - block.begun;
  statistics.block_latency.add(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count()));
}

Result<cuda::Event> Transfer::start_copy(WorkBlock& block, cuda::Copier& copier) const {
  const auto direction = spec_.write ? cuda::Direction::from_gpu : cuda::Direction::to_gpu;
  return copier.start(direction, block.bounce.data() + padding(block),
                      reinterpret_cast<cuda::Address>(spec_.memory + block.planned.begin), block.planned.nbytes);
}

bool Transfer::copy_now(WorkBlock& block, Statistics& statistics) {
  cuda::Gpu& gpu = spec_.gate->gpu();
  auto copier = gpu.take_copier();
  if (!copier) return copied(block, copier.fault(), statistics);
  auto event = start_copy(block, **copier);
  const auto fault = event ? (*event).wait() : std::optional(event.fault());
  gpu.give_back(std::move(*copier));
  return copied(block, fault, statistics);
}

bool Transfer::copied(WorkBlock& block, const std::optional<Fault>& fault, Statistics& statistics) {
  if (fault) {
    Fault own = *fault;
    own.offset = spec_.offset + block.planned.begin;
    record(std::move(own));
    return false;
  }
  if (!spec_.write) complete(block, statistics);
  return true;
}

void Transfer::refuse(Fault fault) {
  fault.offset = spec_.offset;
  record(std::move(fault));
}

void Transfer::turn_has_come() { request_->scheduler()->begin(shared_from_this()); }

void Transfer::finish() {
  if (!fault_ && request_->canceled() && cursor_ < spec_.nbytes) {
    record(Fault{.error_number = ECANCELED,
                 .operation = describe(spec_.write ? Operation::write : Operation::read),
                 .path = {},
                 .offset = spec_.offset + cursor_});
  }
  if (fault_) fault_->transferred = moved_nbytes();
}

void Transfer::record(Fault fault) {
  fault.path = spec_.file->path();
  fault.expected = spec_.nbytes;
  std::lock_guard lock(mutex_);
  stopped_.store(true, std::memory_order_relaxed);
  if (!fault_ || fault.offset < fault_->offset) {
    fault_ = std::move(fault);
  }
}

void Transfer::fail(const WorkBlock& block, int error_number, bool end_of_file, std::string hint) {
  const bool reached = spec_.write || !block.staged;  // not if it got no further than the buffer
  const uint64_t progress = reached ? user_progress(block) : 0;
  moved_nbytes_.fetch_add(progress, std::memory_order_relaxed);
  Fault fault{.error_number = error_number, .operation = describe(block.operation), .path = {}};
  fault.offset = spec_.offset + block.planned.begin + progress;
  fault.end_of_file = end_of_file;
  fault.hint = end_of_file ? "the file became shorter while it was read" : std::move(hint);
  record(std::move(fault));
}

// Bytes of the request that have reached their place.
uint64_t Transfer::user_progress(const WorkBlock& block) const {
  return std::min(block.moved - std::min(block.moved, padding(block)), block.planned.nbytes);
}

bool Transfer::use_buffered_descriptor(WorkBlock& block) {
  auto descriptor = spec_.file->buffered_descriptor();
  if (!descriptor) {
    fail(block, descriptor.fault().error_number, false);
    return false;
  }
  block.descriptor = *descriptor;
  block.direct_descriptor = false;
  return true;
}

void Transfer::copy_out(WorkBlock& block) {
  std::memcpy(spec_.memory + block.planned.begin, block.bounce.data() + padding(block), user_progress(block));
}

}  // namespace tensorferry
