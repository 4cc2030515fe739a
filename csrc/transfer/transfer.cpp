#include "transfer/transfer.h"

#include <errno.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/interruption.h"
#include "base/limits.h"
#include "memory/first_touch.h"
#include "transfer/cached_rows.h"
#include "transfer/scheduler.h"

namespace tensorferry {
namespace {

// EINTR and EAGAIN are retried at once at first, then a millisecond apart, and finally become an error.
constexpr uint32_t immediate_attempts = 16;
constexpr uint32_t max_attempts = 256;

// Up to about this size the copy of a bounced block stays in the processor's cache.
constexpr uint64_t max_bounced_block_nbytes = uint64_t{1} << 20;

// The number of blocks of maximum size that the pool for GPU memory holds: enough to keep the drive and the copies
// busy.
constexpr uint64_t staged_blocks = 16;

// The maximum size of a block with checksums, even if other blocks are larger: if a worker computes them, it submits no
// other block meanwhile.
constexpr uint64_t max_summed_block_nbytes = uint64_t{4} << 20;

// Shorter pieces are not touched in advance. The read itself adds their pages, which costs less than to wake another
// thread for them.
constexpr uint64_t min_touched_nbytes = uint64_t{256} << 10;

// How much memory one check for missing pages covers, which is one mincore() call (memory/first_touch.h).
constexpr uint64_t looked_at_nbytes = uint64_t{64} << 20;

// The number of rows of a table for which the page cache is examined, as a sample of all rows.
constexpr size_t sampled_rows = 32;

// cuFile requires this alignment of offsets and lengths, even if the drive requires less.
constexpr uint32_t cufile_alignment = 4096;

int64_t move_by_cufile(const Block& block) {
  const auto& work = static_cast<const WorkBlock&>(block);
  cuda::Gpu& gpu = work.transfer->gates().front()->gpu();
  return cufile::transfer(work.operation == Operation::write, work.cufile, gpu, work.memory, work.nbytes, work.offset);
}

int64_t move_cached_rows(const Block& block) {
  const auto& work = static_cast<const WorkBlock&>(block);
  return work.transfer->move_rows(work, true);
}

int64_t move_by_source(const Block& block) {
  const auto& work = static_cast<const WorkBlock&>(block);
  return work.transfer->file()->source()->read(work.memory, work.nbytes, work.offset, work.why);
}

const char* describe(Operation operation) { return operation == Operation::write ? "write" : "read"; }

}  // namespace

Transfer::Transfer(TransferSpec spec, std::shared_ptr<Request> request, size_t position)
    : OrderedWrite(spec.file->identity(), spec.offset, spec.offset + spec.memory.nbytes()),
      index(position),
      spec_(std::move(spec)),
      request_(std::move(request)) {}

Result<std::shared_ptr<Transfer>> Transfer::create(TransferSpec spec, std::shared_ptr<Request> request, size_t index,
                                                   uint64_t block_nbytes, const File::Snapshot* snapshot) {
  File& file = *spec.file;
  const uint64_t nbytes = spec.memory.nbytes();
  const auto& gates = spec.memory.gates();
  auto refused = [&, nbytes](Fault fault) {
    fault.expected = nbytes;
    if (fault.path.empty()) fault.path = file.path();
    return fault;
  };
  if (!spec.lane) spec.lane = request->scheduler()->lane_of(file.device());
  if (!spec.lease) spec.lease = file.lease();
  if (!spec.lease) return refused(Fault{.error_number = EBADF, .operation = "use of a closed file"});
  auto pool =
      gates.empty() ? Result(std::shared_ptr<BouncePool>()) : BouncePool::pinned(file.device(), gates.front()->gpu());
  if (!pool) return refused(pool.fault());
  if (!spec.write) {
    auto size = snapshot ? Result(snapshot->size) : file.size_for_reading();
    if (!size) return refused(size.fault());
    if (*size && nbytes > **size - std::min(**size, spec.offset)) {
      Fault fault{.error_number = 0, .operation = "read", .path = file.path(), .offset = std::max(spec.offset, **size)};
      fault.end_of_file = fault.refused = true;
      fault.hint = "the file has " + std::to_string(**size) + " bytes, but " + std::to_string(nbytes) +
                   " were wanted from offset " + std::to_string(spec.offset) + "; nothing was read";
      return refused(fault);
    }
  }
  if (!spec.write && file.first_reads()) {
    // Large blocks do not help here: a distant server is kept busy by many reads rather than by long ones.
    block_nbytes = std::min(block_nbytes, request->scheduler()->options().block_nbytes);
  }
  std::shared_ptr<Transfer> transfer(new Transfer(std::move(spec), std::move(request), index));
  transfer->pinned_pool_ = std::move(*pool);
  transfer->shared_ = file.in_memory();
  if (const auto& sums = transfer->spec_.checksums) sums->attach(transfer->spec_.memory);
  const bool direct = transfer->goes_past_the_cache(block_nbytes, !snapshot || !snapshot->nothing_cached);
  transfer->plan_ = Plan(transfer->plan_input(block_nbytes, direct), transfer->spec_.memory);
  // If a buffered descriptor will be needed, it is opened now, because here the caller can still wait for a free
  // descriptor.
  if (transfer->plan_.uses_buffered() && nbytes > 0) {
    if (auto descriptor = file.buffered_descriptor(); !descriptor) return refused(descriptor.fault());
  }
  return transfer;
}

// Whether the transfer is planned past the page cache. For a read, this also sets residency_.
bool Transfer::goes_past_the_cache(uint64_t block_nbytes, bool may_be_cached) {
  File& file = *spec_.file;
  const bool direct = file.direct() && nbytes() > 0;
  if (spec_.write) return direct;
  if (file.in_memory()) {
    residency_ = Residency::whole;
    return direct;
  }
  // For a read that goes through the cache in any case, residency matters only if it has several blocks: if all its
  // data is cached, several threads may share the copying.
  const bool matters = direct ? may_be_cached && file.direct_mode() == DirectMode::automatic : nbytes() > block_nbytes;
  const auto found = matters ? residency() : std::nullopt;
  if (!found || found->cached_pages == 0) return direct;
  const bool whole = found->cached_pages >= found->total_pages;
  if (!direct) {
    if (whole) residency_ = Residency::whole;
    return false;
  }
  // If no buffered descriptor can be opened (a limit), plan direct reads. They return the same data, because the kernel
  // writes changed pages back before a direct read.
  if (!file.buffered_descriptor()) return true;
  residency_ = whole ? Residency::whole : Residency::partial;
  return !whole;
}

// How much of a read the page cache holds. For rows of a table, only a sample of the rows is looked up: a system call
// for each row would cost a third of the time to read the row, and a single call for the range of a large table takes
// milliseconds. If the sample is misleading, a cached row is read from the drive, or a row that is not cached is read
// through the page cache.
std::optional<File::Residency> Transfer::residency() const {
  const Segments& memory = spec_.memory;
  if (!memory.of_rows()) return spec_.file->residency(spec_.offset, nbytes());
  File::Residency all{0, 0};
  const size_t count = std::min(memory.count(), sampled_rows);
  for (size_t sample = 0; sample < count; ++sample) {
    size_t index = sample * memory.count() / count;
    while (index < memory.count() && memory[index].is_gap()) ++index;
    if (index == memory.count()) break;
    const auto found = spec_.file->residency(spec_.offset + memory[index].begin, memory[index].nbytes);
    if (!found) return std::nullopt;
    all.cached_pages += found->cached_pages;
    all.total_pages += found->total_pages;
  }
  return all;
}

PlanInput Transfer::plan_input(uint64_t block_nbytes, bool direct) const {
  File& file = *spec_.file;
  PlanInput input;
  input.write = spec_.write;
  input.direct = direct;
  input.offset = spec_.offset;
  input.memory_alignment = file.alignment().memory;
  input.offset_alignment = file.alignment().offset;
  input.page_nbytes = spec_.write && direct ? file.write_granularity() : page_nbytes();
  input.block_nbytes = block_nbytes;
  input.rows = spec_.memory.of_rows();
  input.cached = residency_ == Residency::whole;
  input.bounce_nbytes = BouncePool::process_pool_nbytes() / 8;
  // For a source, the processor's cache sets no limit, because the call of the source costs far more than the copy.
  if (!file.source()) input.bounce_nbytes = std::min<uint64_t>(input.bounce_nbytes, max_bounced_block_nbytes);
  if (pinned_pool_) {
    const uint64_t pool_nbytes = pinned_pool_->nbytes();
    input.bounce_nbytes = pool_nbytes / staged_blocks;
    const bool by_cufile = direct && spec_.use_cufile && spec_.memory.count() == 1 && !spec_.checksums;
    if (by_cufile && file.cufile_handle() != nullptr) {
      input.cufile = true;
      // Blocks that the page cache holds are copied through the pool, so they must fit.
      input.block_nbytes = std::min<uint64_t>(block_nbytes, pool_nbytes / 4);
      input.memory_alignment = 1;
      input.offset_alignment = std::max(input.offset_alignment, cufile_alignment);
    }
  }
  if (spec_.checksums) {
    input.all_wanted = true;
    input.block_nbytes = std::min(input.block_nbytes, max_summed_block_nbytes);
    if (spec_.checksums->verify_first()) {
      input.verified_nbytes = spec_.checksums->chunk_nbytes();
      input.bounce_nbytes = std::max(input.bounce_nbytes, input.verified_nbytes + 2 * input.offset_alignment);
    }
  }
  return input;
}

bool Transfer::next_block(WorkBlock& block, bool& exhausted) {
  exhausted = true;
  if (stopped()) return false;
  const uint64_t begin = plan_.skip(cursor_);
  // A gap that the plan passes over counts as moved, so moved_nbytes_ reaches nbytes() at the end.
  moved_nbytes_.fetch_add(begin - cursor_, std::memory_order_relaxed);
  cursor_ = begin;
  if (cursor_ >= nbytes()) return false;
  block = {};
  block.operation = spec_.write ? Operation::write : Operation::read;
  block.planned = plan_.block_at(cursor_);
  cursor_ += block.planned.nbytes;
  exhausted = cursor_ >= nbytes();
  block.transfer = shared_from_this();
  open_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Transfer::rewind() {
  cursor_ = 0;
  open_.store(1, std::memory_order_relaxed);
  moved_nbytes_.store(0, std::memory_order_relaxed);
}

Step Transfer::prepare(WorkBlock& block, BounceWaiter* waiter, Statistics& statistics) {
  File& file = *spec_.file;
  PlannedBlock& planned = block.planned;
  if (request_->canceled()) return fail(block, ECANCELED, false);  // for example, while the block waited for memory
  block.begun = std::chrono::steady_clock::now();
  block.descriptor = file.descriptor();
  block.direct_descriptor = file.direct();
  block.resident = residency_ == Residency::whole;
  if (residency_ == Residency::partial) {
    auto resident = file.residency(spec_.offset + planned.begin, planned.nbytes);
    block.resident = resident && resident->cached_pages >= resident->total_pages;
  }
  if (block.resident && !planned.rows) planned = plan_.buffered(planned);
  if (planned.direct && !block.resident && goes_through_cache_after_all(planned)) planned = plan_.buffered(planned);
  block.offset = planned.io_offset;
  block.nbytes = planned.io_nbytes;
  if (!planned.direct && !use_buffered_descriptor(block)) return Step::done;
  if (planned.bounced) {
    auto pool = pinned_pool_ ? pinned_pool_ : spec_.lane->pool();
    if (!pool) return fail(block, ENOMEM, false, why_no_memory(BouncePool::process_pool_nbytes()));
    // A block of chunks to be verified may be larger than the pool, or the pool was made smaller.
    if (!pool->has_room_for(planned.io_nbytes)) {
      return fail(block, ENOMEM, false,
                  "the bounce pool of " + std::to_string(pool->nbytes()) + " bytes has no room for a block of " +
                      std::to_string(planned.io_nbytes) + "; remedy: tensorferry.set_bounce_pool_nbytes()");
    }
    block.of_gpu = pinned_pool_ != nullptr;
    block.bounce = pool->try_acquire(planned.io_nbytes, waiter, waiter ? &block.ticket : nullptr);
    if (!block.bounce) return Step::wait_for_memory;
    block.memory = block.bounce.data();
  } else {
    const auto piece = spec_.memory.at(planned.begin);
    block.memory = piece.memory;
    if (planned.rows) {
      block.call = &move_cached_rows;
    } else if (!piece.in_host()) {
      block.cufile = file.cufile_handle();
      block.call = block.cufile ? &move_by_cufile : nullptr;
    }
  }
  if (file.source()) block.call = &move_by_source;
  return advance(block, statistics);
}

// Whether a block that was planned directly is read through the page cache, because the trial of the mount's first
// reads needs such a block or has shown this to be faster. If no buffered descriptor can be opened (a limit), the block
// is read directly.
bool Transfer::goes_through_cache_after_all(const PlannedBlock& planned) const {
  File& file = *spec_.file;
  const bool open = !spec_.write && file.first_reads() && file.direct_mode() == DirectMode::automatic;
  if (!open || spec_.use_cufile) return false;
  return file.first_reads()->through_cache(planned.io_nbytes) && file.buffered_descriptor();
}

// The steps of a block: a write gathers its bytes before they are moved, a read delivers them afterwards.
Step Transfer::advance(WorkBlock& block, Statistics& statistics) {
  constexpr Step writing[] = {Step::copy_gpu, Step::copy, Step::move, Step::done};
  constexpr Step reading[] = {Step::touch, Step::move, Step::copy, Step::copy_gpu, Step::done};
  while (true) {
    const Step step = (spec_.write ? writing : reading)[block.station];
    if (step == Step::copy_gpu && has_gpu_piece(block)) return step;  // once for each GPU
    ++block.station;
    const bool copies = block.bounce || spec_.checksums || spec_.memory.has_copies();
    if (step == Step::copy_gpu || (step == Step::copy && !copies)) continue;
    if (step == Step::touch && !is_to_be_touched(block)) continue;
    if (step == Step::done) complete(block, statistics);
    return step;
  }
}

// Whether the block's memory must be touched before the block is moved. Blocks of cached data need not, because the
// copy from the page cache touches the memory. Memory is examined for several blocks at a time, because usually all of
// it has pages.
bool Transfer::is_to_be_touched(const WorkBlock& block) {
  if (block.resident || block.planned.nbytes < min_touched_nbytes) return false;
  const uint64_t begin = block.planned.begin;
  const uint64_t end = begin + block.planned.nbytes;
  std::lock_guard lock(mutex_);
  if (begin < looked_at_.begin || end > looked_at_.end) {
    looked_at_ = {begin, std::max(end, std::min(begin + looked_at_nbytes, nbytes())), false};
    spec_.memory.each(begin, looked_at_.end - begin, [&](const Segments::Piece& piece) {
      const bool counts = piece.in_host() && piece.nbytes >= min_touched_nbytes;
      looked_at_.untouched = looked_at_.untouched || (counts && is_untouched(piece.memory, piece.nbytes));
    });
  }
  return looked_at_.untouched;
}

Step Transfer::touch(WorkBlock& block, Statistics& statistics) {
  if (request_->canceled()) return fail(block, ECANCELED, false);
  spec_.memory.each(block.planned.begin, block.planned.nbytes, [&](const Segments::Piece& piece) {
    if (!piece.in_host() || piece.nbytes < min_touched_nbytes) return;
    tensorferry::touch(piece.memory, piece.nbytes);
    statistics.touched_nbytes.fetch_add(piece.nbytes, std::memory_order_relaxed);
  });
  return advance(block, statistics);
}

// Find the next GPU of which the block has memory.
bool Transfer::has_gpu_piece(WorkBlock& block) const {
  if (!block.bounce) return false;
  for (; block.gate < gates().size(); ++block.gate) {
    bool found = false;
    spec_.memory.each(block.planned.begin, block.planned.nbytes,
                      [&](const Segments::Piece& piece) { found |= piece.gate == block.gate; });
    if (found) return true;
  }
  return false;
}

Step Transfer::look_at_result(WorkBlock& block, Statistics& statistics) {
  const int64_t result = block.result;
  // A write of 0 bytes without an error is retried, too: POSIX allows it, and it must not loop forever.
  if (result == -EINTR || result == -EAGAIN || (spec_.write && result == 0)) {
    return try_again(block, statistics, result == 0 ? EIO : static_cast<int>(-result));
  }
  if (result == -ECANCELED && block.cufile == nullptr && ++block.attempts < max_attempts) {
    // ECANCELED cannot come from a cancellation, because submitted blocks are never cancelled. io_uring returns it if
    // the kernel cannot start the thread for the operation (a process limit).
    statistics.retried_blocks.fetch_add(1, std::memory_order_relaxed);
    return Step::get_over;
  }
  if ((result == -EINVAL || result == -EOPNOTSUPP) && block.direct_descriptor && block.cufile == nullptr &&
      spec_.file->direct_mode() == DirectMode::automatic) {
    // The file system accepted O_DIRECT but refuses this block: its alignment rules are stricter than those it
    // reported.
    block.refused = true;
    return Step::get_over;
  }
  if (cufile::is_own_code(result)) return fail(block, EIO, false, cufile::text_of(result));
  if (result < 0) return fail(block, static_cast<int>(-result), false, std::move(block.why));

  auto advanced = static_cast<uint64_t>(result);
  // Only a multiple of cuFile's alignment counts as moved, because cuFile can resume only there.
  if (block.cufile != nullptr) advanced -= advanced % cufile_alignment;
  block.moved += advanced;
  if (!block.planned.rows) block.memory += advanced;
  block.offset += advanced;
  block.nbytes -= std::min(advanced, block.nbytes);
  if (block.moved >= padding(block) + block.planned.nbytes) return advance(block, statistics);

  if (result == 0) return fail(block, 0, true);
  // cuFile can resume only at a multiple of its alignment, and has moved fewer bytes than that.
  if (advanced == 0) {
    const auto size = spec_.file->size();
    const bool ends = size && *size && **size < block.offset + block.nbytes;
    return try_again(block, statistics, ends ? 0 : EIO, "cuFile moved only " + std::to_string(result) + " bytes");
  }
  block.attempts = 0;
  statistics.resumed_blocks.fetch_add(1, std::memory_order_relaxed);
  const DirectAlignment alignment = spec_.file->alignment();
  // A short result may end at an unaligned offset. The rest then goes through the buffered descriptor.
  const bool aligned = block.offset % alignment.offset == 0 && block.nbytes % alignment.offset == 0 &&
                       reinterpret_cast<uintptr_t>(block.memory) % alignment.memory == 0;
  block.refused = block.direct_descriptor && !aligned && block.cufile == nullptr;
  return block.refused ? Step::get_over : Step::move;
}

// An error number of 0 means that the file has ended.
Step Transfer::try_again(WorkBlock& block, Statistics& statistics, int error_number, std::string hint) {
  if (request_->canceled()) return fail(block, ECANCELED, false);
  statistics.retried_blocks.fetch_add(1, std::memory_order_relaxed);
  if (++block.attempts >= max_attempts) return fail(block, error_number, error_number == 0, std::move(hint));
  return block.attempts > immediate_attempts ? Step::get_over : Step::move;
}

Step Transfer::get_over(WorkBlock& block) {
  if (block.attempts > immediate_attempts) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!block.refused) return Step::move;
  block.refused = false;
  const InterruptionsReturned by_nobody(false);  // an interrupted open would fail the block
  return use_buffered_descriptor(block) ? Step::move : Step::done;
}

int64_t Transfer::move_rows(const WorkBlock& block, bool wait) const {
  const uint64_t begin = block.planned.begin;
  return read_rows(spec_.memory, begin + block.moved, begin + block.planned.nbytes, block.descriptor, spec_.offset,
                   wait);
}

int64_t Transfer::move_here(WorkBlock& block, int64_t (*call)(const Block&)) const {
  if (block.planned.rows) return move_rows(block, call == &execute_now);
  if (spec_.write || !spec_.checksums || !block.resident || block.moved != 0) return call(block);
  Checksums::Block sums(*spec_.checksums, block.planned.begin);
  uint64_t done = 0;
  while (done < block.nbytes) {
    Block step = block;
    step.memory += done;
    step.offset += done;
    step.nbytes = std::min(block.nbytes - done, cached_step_nbytes);
    const int64_t result = call(step);
    // Part of the data is no longer cached. The rest is read later, by another call, and copy() then computes the
    // CRC-32s of the whole block.
    if (result != static_cast<int64_t>(step.nbytes)) {
      return done == 0 ? result : static_cast<int64_t>(done) + std::max<int64_t>(result, 0);
    }
    add_to_sums(sums, block, done, step.nbytes);
    done += step.nbytes;
  }
  block.sums.emplace(std::move(sums));
  return static_cast<int64_t>(done);
}

void Transfer::add_to_sums(Checksums::Block& sums, const WorkBlock& block, uint64_t begin, uint64_t nbytes) const {
  const uint64_t first = block.planned.begin;
  const char* const buffer = block.bounce ? block.bounce.data() + padding(block) : nullptr;
  spec_.memory.each(first + begin, nbytes, [&](const Segments::Piece& piece) {
    sums.add(buffer ? buffer + (piece.begin - first) : piece.memory, piece.nbytes, piece.segment);
  });
}

Step Transfer::copy(WorkBlock& block, Statistics& statistics) {
  const PlannedBlock& planned = block.planned;
  char* const buffer = block.bounce ? block.bounce.data() + padding(block) : nullptr;
  if (spec_.write || !spec_.checksums) {
    // Copy in small steps: the CRC-32 of a step is computed while its bytes are still in the processor's cache.
    std::optional<Checksums::Block> sums;
    if (spec_.checksums) sums.emplace(*spec_.checksums, planned.begin);
    spec_.memory.each(planned.begin, planned.nbytes, [&](const Segments::Piece& piece) {
      for (uint64_t done = 0; done < piece.nbytes; done += cached_step_nbytes) {
        const uint64_t nbytes = std::min(piece.nbytes - done, cached_step_nbytes);
        char* place = buffer ? buffer + (piece.begin + done - planned.begin) : piece.memory + done;
        if (buffer && piece.in_host()) {
          spec_.write ? std::memcpy(place, piece.memory + done, nbytes)
                      : std::memcpy(piece.memory + done, place, nbytes);
        }
        if (sums) sums->add(place, nbytes, piece.segment);
      }
      spec_.memory.each_copy(piece, [&](char* further) {
        std::memcpy(further, buffer ? buffer + (piece.begin - planned.begin) : piece.memory, piece.nbytes);
      });
    });
    if (sums) (void)sums->keep();  // a write has no expected checksums
    return advance(block, statistics);
  }
  if (!block.sums) {
    block.sums.emplace(*spec_.checksums, planned.begin);
    add_to_sums(*block.sums, block, 0, planned.nbytes);
  }
  const auto damaged = block.sums->keep();
  block.sums.reset();
  if (damaged) return fail_damaged(*damaged);
  if (buffer) scatter(block, planned.nbytes);
  return advance(block, statistics);
}

void Transfer::complete(WorkBlock& block, Statistics& statistics) {
  moved_nbytes_.fetch_add(block.planned.nbytes, std::memory_order_relaxed);
  const uint64_t nbytes = block.planned.rows ? block.planned.io_nbytes : block.planned.nbytes;
  (spec_.write ? statistics.written_nbytes : statistics.read_nbytes).fetch_add(nbytes, std::memory_order_relaxed);
  auto& way = !block.direct_descriptor ? statistics.buffered_nbytes
              : block.planned.bounced  ? statistics.bounced_nbytes
                                       : statistics.direct_nbytes;
  way.fetch_add(nbytes, std::memory_order_relaxed);
  if (!gates().empty()) statistics.gpu_nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  if (block.cufile) statistics.gds_nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  const auto elapsed = std::chrono::steady_clock::now() - block.begun;
  const bool as_meant = block.planned.direct == block.direct_descriptor && !block.resident && !block.cufile;
  if (FirstReads* const reads = spec_.file->first_reads(); reads && !spec_.write && as_meant) {
    reads->took(block.planned.direct, block.planned.io_nbytes, elapsed);
  }
  statistics.block_latency.add(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count()));
}

Result<cuda::Event> Transfer::start_copy(WorkBlock& block, cuda::Copier& copier) const {
  const auto direction = spec_.write ? cuda::Direction::from_gpu : cuda::Direction::to_gpu;
  Result<cuda::Event> last = cuda::Event();
  bool queued = false;
  spec_.memory.each(block.planned.begin, block.planned.nbytes, [&](const Segments::Piece& piece) {
    if (piece.gate != block.gate || !last) return;
    auto next = copier.start(direction, block.bounce.data() + padding(block) + (piece.begin - block.planned.begin),
                             reinterpret_cast<cuda::Address>(piece.memory), piece.nbytes);
    if (!next && queued) (void)(*last).wait();  // the earlier copies still use the buffer
    last = std::move(next);
    queued = true;
  });
  return last;
}

Step Transfer::copied(WorkBlock& block, const std::optional<Fault>& fault, Statistics& statistics) {
  if (fault) {
    Fault own = *fault;
    own.offset = spec_.offset + block.planned.begin;
    record(std::move(own));
    return Step::done;
  }
  ++block.gate;
  return advance(block, statistics);
}

Step Transfer::copy_now(WorkBlock& block, Statistics& statistics) {
  cuda::Copiers copiers;
  auto copier = copiers.of(gpu_of(block));
  if (!copier) return copied(block, copier.fault(), statistics);
  auto event = start_copy(block, **copier);
  const auto fault = event ? (*event).wait() : std::optional(event.fault());
  return copied(block, fault, statistics);
}

void Transfer::refuse(Fault fault) {
  fault.offset = spec_.offset;
  record(std::move(fault));
}

void Transfer::turn_has_come() { request_->scheduler()->line_up(shared_from_this()); }

void Transfer::finish() {
  if (!fault_ && request_->canceled() && cursor_ < nbytes()) {
    record(Fault{.error_number = ECANCELED,
                 .operation = describe(spec_.write ? Operation::write : Operation::read),
                 .path = {},
                 .offset = spec_.offset + cursor_});
  }
  if (fault_) fault_->transferred = moved_nbytes();
}

void Transfer::ended_singly(std::map<size_t, Fault> faults, uint64_t moved_nbytes) {
  faults_of_items_ = std::move(faults);
  moved_nbytes_.store(moved_nbytes, std::memory_order_relaxed);
  fault_ = faults_of_items_.empty() ? std::nullopt : std::optional(faults_of_items_.begin()->second);
}

std::map<size_t, Fault> Transfer::faults() const {
  if (joined()) return faults_of_items_;
  return fault_ ? std::map<size_t, Fault>{{index, *fault_}} : std::map<size_t, Fault>();
}

void Transfer::record(Fault fault) {
  fault.path = spec_.file->path();
  fault.expected = nbytes();
  std::lock_guard lock(mutex_);
  stopped_.store(true, std::memory_order_relaxed);
  if (!fault_ || fault.offset < fault_->offset) {
    fault_ = std::move(fault);
  }
}

Step Transfer::fail(const WorkBlock& block, int error_number, bool end_of_file, std::string hint) {
  // Bytes of this block that must still be verified, or copied to a GPU, have not reached their destination, so they do
  // not count as moved.
  const bool delivered = spec_.write || !(block.of_gpu || verified());
  const uint64_t progress = delivered ? user_progress(block) : 0;
  if (progress > 0 && !spec_.write && block.bounce) scatter(block, progress);
  moved_nbytes_.fetch_add(progress, std::memory_order_relaxed);
  Fault fault{.error_number = error_number, .operation = describe(block.operation), .path = {}};
  fault.offset = spec_.offset + block.planned.begin + progress;
  fault.end_of_file = end_of_file;
  fault.hint = end_of_file ? "the file became shorter while it was read" : std::move(hint);
  if (error_number == ENOSPC && fault.hint.empty()) fault.hint = spec_.file->room();
  record(std::move(fault));
  return Step::done;
}

Step Transfer::fail_damaged(uint64_t chunk) {
  const uint64_t begin = chunk * spec_.checksums->chunk_nbytes();
  Fault fault{.error_number = 0, .operation = "read", .path = {}};
  fault.offset = spec_.offset + begin;
  fault.damaged_nbytes = std::min(spec_.checksums->chunk_nbytes(), nbytes() - begin);
  record(std::move(fault));
  return Step::done;
}

// The bytes of the request that have reached their destination.
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

void Transfer::scatter(const WorkBlock& block, uint64_t nbytes) const {
  const char* const buffer = block.bounce.data() + padding(block);
  spec_.memory.each(block.planned.begin, nbytes, [&](const Segments::Piece& piece) {
    if (piece.in_host()) std::memcpy(piece.memory, buffer + (piece.begin - block.planned.begin), piece.nbytes);
  });
}

}  // namespace tensorferry
