#include "transfer/stream.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/reserve.h"
#include "checksum/checksum.h"
#include "transfer/reservation.h"

namespace tensorferry {
namespace {

// A job starts when this many bytes or segments wait to be copied, because fewer are not worth waking a thread.
constexpr uint64_t min_job_nbytes = uint64_t{256} << 10;
constexpr size_t min_job_sources = 256;

// The limit of segments that wait to be copied: each of them needs some memory here, however short it is.
constexpr size_t max_sources = 16384;

// The stock of the process's buffers of maximum size. Returned buffers are kept for the next stream, as many as one
// device may use, because memory fresh from the system costs more than the copy into it.
class Stock {
 public:
  Stock() { kept_.reserve(Stream::max_buffers + together); }

  // Take a buffer. It is empty if the limit is reached and `insist` is not set, or if there is no memory.
  Stream::Memory take(uint64_t device, bool insist) {
    {
      std::lock_guard lock(mutex_);
      size_t& of_device = by_device_[device];
      if (!insist && (of_device >= Stream::max_buffers || taken_ >= max_taken)) return {};
      ++of_device;
      ++taken_;
      if (!kept_.empty()) return take_kept();
    }
    auto allocation = Allocation::create(together * Stream::max_buffer_nbytes, Locking::none);
    std::lock_guard lock(mutex_);
    if (!allocation) {
      count_back(device);
      return {};
    }
    for (size_t at = 0; at < together; ++at) {
      kept_.push_back({allocation, allocation->data() + at * Stream::max_buffer_nbytes});
    }
    return take_kept();
  }

  void give_back(uint64_t device, Stream::Memory memory) {
    std::lock_guard lock(mutex_);
    count_back(device);
    if (kept_.size() + taken_ < Stream::max_buffers) {
      kept_.push_back(std::move(memory));
    } else if (!memory.allocation->registered()) {
      // Release the pages only, because the allocation lives while another of its buffers does. madvise fails only for
      // locked memory, which then stays.
      (void)::madvise(memory.data, Stream::max_buffer_nbytes, MADV_DONTNEED);
    }
  }

 private:
  // Buffers for each allocation: large enough for a huge page.
  static constexpr size_t together = 2;

  // The limit for all devices together.
  static constexpr size_t max_taken = 8 * Stream::max_buffers;

  void count_back(uint64_t device) {
    --taken_;
    if (auto found = by_device_.find(device); --found->second == 0) by_device_.erase(found);
  }

  Stream::Memory take_kept() {
    auto memory = std::move(kept_.back());
    kept_.pop_back();
    return memory;
  }

  std::mutex mutex_;
  size_t taken_ = 0;
  std::map<uint64_t, size_t> by_device_;
  std::vector<Stream::Memory> kept_;
};

Stock& stock() { return of_this_process<Stock>(); }

uint64_t buffer_nbytes_for(uint64_t expected_nbytes) {
  return std::bit_ceil(std::clamp(expected_nbytes, Stream::min_buffer_nbytes, Stream::max_buffer_nbytes));
}

void put(char* place, uint32_t value) {
  for (int byte = 0; byte < 4; ++byte) place[byte] = static_cast<char>(value >> (8 * byte));
}

}  // namespace

class Stream::Place final : public OrderedWrite {
 public:
  Place(const std::shared_ptr<Stream>& stream, uint64_t begin, uint64_t end)
      : OrderedWrite(stream->file_->identity(), begin, end), stream_(stream) {}

  void turn_has_come() override {
    if (const auto stream = stream_.lock()) stream->turn_has_come(*this);
  }
  void others_wait() override {
    if (const auto stream = stream_.lock()) stream->others_wait();
  }

  bool admitted = false;  // whether it is counted as outstanding, while it waits; guarded by the stream's mutex

 private:
  const std::weak_ptr<Stream> stream_;
};

Stream::Stream(std::shared_ptr<Scheduler> scheduler, std::shared_ptr<File> file, const StreamOptions& options)
    : scheduler_(std::move(scheduler)),
      file_(std::move(file)),
      lane_(scheduler_->lane_of(file_->device())),
      options_(options),
      buffer_nbytes_(buffer_nbytes_for(options.expected_nbytes)),
      entered_end_(options.offset),
      turn_end_(options.offset),
      handed_over_end_(options.offset),
      position_(options.offset) {}

Stream::~Stream() {
  if (fork_generation_ == tensorferry::fork_generation()) (void)abort(std::chrono::milliseconds(0));
}

Stream::Buffer::~Buffer() {
  if (of_stock) stock().give_back(device, std::move(memory));
}

bool Stream::append(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (stopped()) return true;
  sources_.push_back({memory, nbytes, std::move(gate)});
  ++segment_count_;
  appended_nbytes_ += nbytes;
  uncopied_nbytes_ += nbytes;
  return true;
}

bool Stream::has_ended() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

bool Stream::append(Made made) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  const uint64_t size = made.bytes.size();
  const auto is_known = [&](int64_t crc) { return crc >= 0 || static_cast<uint64_t>(~crc) < segment_count_; };
  for (const Made::Field& field : made.fields) {
    const uint64_t nbytes = field.kind == Made::Field::Kind::folded ? Made::folded_nbytes : 4;
    if (nbytes > size || field.position > size - nbytes) return false;
    if (field.fold.left >= 64 || field.fold.right >= 64) return false;
    if (field.begin > size || field.nbytes > size - field.begin) return false;
    const bool of_segment = field.kind == Made::Field::Kind::segment;
    if (of_segment && field.segment >= segment_count_) return false;
    if ((of_segment || !field.crcs.empty()) && !options_.of_segments) return false;
    if (!std::all_of(field.crcs.begin(), field.crcs.end(), is_known)) return false;
  }
  if (stopped()) return true;
  sources_.push_back({nullptr, size, nullptr, std::make_shared<Made>(std::move(made))});
  ++segment_count_;
  appended_nbytes_ += size;
  uncopied_nbytes_ += size;
  return true;
}

void Stream::begin_job(bool now) {
  const UsesReserve reserve;
  WriteOrder::Writes in_the_way;
  bool must_wait;
  {
    std::lock_guard lock(mutex_);
    must_wait = enter_order(in_the_way);
    now = now || uncopied_nbytes_ >= min_job_nbytes || sources_.size() >= min_job_sources;
  }
  for (const auto& write : in_the_way) write->others_wait();
  if (now) wake();
  if (!must_wait) scheduler_->one_less(*lane_);
}

bool Stream::enter_order(WriteOrder::Writes& in_the_way) {
  if (stopped()) return false;
  std::vector<std::shared_ptr<Place>> entering;
  const uint64_t end = options_.offset + appended_nbytes_;
  if (!places_.empty() && turn_end_ == entered_end_ && WriteOrder::extend(*places_.back(), end)) {
    turn_end_ = end;
  } else if (end > entered_end_) {
    entering.push_back(places_.emplace_back(std::make_shared<Place>(shared_from_this(), entered_end_, end)));
  }
  entered_end_ = end;
  if (ending_ && ending_->cuts(*file_) && !cut_) {
    entering.push_back(cut_ = std::make_shared<Place>(shared_from_this(), end, UINT64_MAX));
  }
  if (entering.empty()) return false;
  const auto may_begin = WriteOrder::enter({entering.begin(), entering.end()}, in_the_way);
  for (size_t index = 0; index < entering.size(); ++index) {
    if (may_begin[index]) turn_end_ = entering[index]->end();
  }
  return entering.back()->admitted = !may_begin.back();
}

void Stream::turn_has_come(Place& place) {
  bool admitted;
  {
    std::lock_guard lock(mutex_);
    turn_end_ = std::max(turn_end_, place.end());
    admitted = std::exchange(place.admitted, false);
  }
  wake();
  if (admitted) scheduler_->one_less(*lane_);
}

void Stream::others_wait() {
  bool is_open;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;  // everything is written without further calls, or nothing more
    early_end_ = entered_end_;
    is_open = scheduler_->one_more_if_open(*lane_);
  }
  if (is_open) {
    wake();
    scheduler_->one_less(*lane_);
  } else {  // no thread can write the bytes any more
    fail({.error_number = ECANCELED, .operation = "write", .path = {}});
    leave_order();
  }
}

void Stream::leave_order() {
  std::vector<std::shared_ptr<Place>> left;
  size_t admitted_count = 0;
  {
    std::lock_guard lock(mutex_);
    const bool over = stopped() && in_flight_.empty() && !at_work_;
    const uint64_t unwritten = over ? UINT64_MAX : in_flight_.empty() ? handed_over_end_ : *in_flight_.begin();
    while (!places_.empty() && places_.front()->end() <= unwritten) {
      left.push_back(std::move(places_.front()));
      places_.pop_front();
    }
    if (over && cut_) left.push_back(std::move(cut_));
    for (const auto& place : left) admitted_count += std::exchange(place->admitted, false);
  }
  for (const auto& place : left) WriteOrder::leave(*place);
  while (admitted_count-- > 0) scheduler_->one_less(*lane_);
}

bool Stream::end(const RequestOptions& options) {
  bool first;
  {
    std::lock_guard lock(mutex_);
    first = !closed_;
    if (first) ending_ = options;
    closed_ = true;
  }
  begin_job(first);
  return first;
}

bool Stream::wait_until_uncopied_is(uint64_t nbytes, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return news_.wait_for(lock, timeout,
                        [&] { return (uncopied_nbytes_ <= nbytes && sources_.size() <= max_sources) || stopped(); });
}

bool Stream::wait_until_ended(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return news_.wait_for(lock, timeout, [&] { return (ended_ || stopped()) && in_flight_.empty() && !at_work_; });
}

// This does not wait for a posted job that has no thread yet, because hanging jobs may occupy all threads. When that
// job gets a thread, it finds `stopping_` set and does nothing.
bool Stream::abort(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  closed_ = stopping_ = true;
  news_.notify_all();
  const bool over = news_.wait_for(lock, timeout, [&] { return !is_copying(); });
  if (over) sources_.clear();
  lock.unlock();
  leave_order();
  return over;
}

void Stream::tell_when_aborted(uint64_t id) {
  std::unique_lock lock(mutex_);
  to_be_told_ = id;
  news(lock);
}

void Stream::news(std::unique_lock<std::mutex>& lock) {
  news_.notify_all();
  const auto told = is_copying() ? std::nullopt : std::exchange(to_be_told_, std::nullopt);
  lock.unlock();
  if (told) scheduler_->let_go(*told);
}

std::optional<Fault> Stream::fault() const {
  std::lock_guard lock(mutex_);
  return fault_;
}

uint64_t Stream::segment_count() const {
  const auto lock = locked();
  return segment_count_;
}

uint64_t Stream::copied_segments() const {
  std::lock_guard lock(mutex_);
  return copied_segments_;
}

uint64_t Stream::nbytes() const {
  const auto lock = locked();
  return appended_nbytes_;
}

// A posted job, a buffer being written and a watched copy each count as outstanding, so closing the scheduler waits for
// them.
void Stream::wake() {
  {
    std::lock_guard lock(mutex_);
    again_ = true;  // a running job looks again before it ends, so no event is lost
    if (running_) return;
    running_ = true;
  }
  scheduler_->one_more(*lane_);
  lane_->help_stream([self = shared_from_this()] {
    self->run();
    self->scheduler_->one_less(*self->lane_);
  });
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  at_work_ = true;
  while (std::exchange(again_, false) && !stopped()) {
    lock.unlock();
    while (true) {
      const bool placed = place_sources();
      const bool copied = copy();
      if (!placed && !copied && !write_early() && !write_the_rest()) break;
    }
    lock.lock();
  }
  running_ = at_work_ = false;
  news(lock);
  leave_order();
}

// Give segments their places in the buffer that is being filled, up to its end. Only bytes that have their turn get
// one: the first bytes of a buffer never wait for a write that waits for them.
bool Stream::place_sources() {
  bool any = false;
  while (true) {
    Source* source = nullptr;
    uint64_t placeable;
    {
      std::lock_guard lock(mutex_);
      if (stopped() || sources_.empty()) break;
      source = &sources_.front();  // appending does not move it
      placeable = turn_end_ - position_;
    }
    if (placeable == 0 && source->nbytes > 0) break;
    const bool full = filling_ && filling_->end == buffer_nbytes_;
    if (full && source->nbytes > 0) {
      filled_.push_back(std::move(filling_));
      if (any) break;  // return to watch the copies into the full buffer first
    }
    if (!filling_ && !take_buffer()) break;
    Buffer& buffer = *filling_;
    Part part{.begin = buffer.end,
              .nbytes = std::min({source->nbytes - source->placed_nbytes, buffer_nbytes_ - buffer.end, placeable})};
    if (source->gate && part.nbytes > 0) {
      if (!start_copy(*source, part.nbytes)) break;
      part.of_gpu = true;
    } else if (source->made) {
      part.made = source->made;
      part.made_begin = source->placed_nbytes;
    } else {
      part.memory = source->memory + source->placed_nbytes;
    }
    source->placed_nbytes += part.nbytes;
    buffer.end += part.nbytes;
    position_ += part.nbytes;
    part.ends_segment = source->placed_nbytes == source->nbytes;
    if (part.ends_segment) {
      std::lock_guard lock(mutex_);
      sources_.pop_front();
    }
    buffer.parts.push_back(std::move(part));
    any = true;
  }
  watch_copies();
  return any;
}

bool Stream::take_buffer() {
  bool insist;
  {
    std::lock_guard lock(mutex_);
    insist = buffer_count_ == 0;
    if (buffer_count_ == max_buffers) return false;  // wait for one that is being written
  }
  const bool of_stock = buffer_nbytes_ == max_buffer_nbytes;
  Memory memory;
  if (of_stock) {
    memory = stock().take(file_->device(), insist);
  } else if (auto allocation = Allocation::create(buffer_nbytes_, Locking::none)) {
    char* const data = allocation->data();
    memory = {std::move(allocation), data};
  }
  if (!memory.data) {
    if (insist) fail({.error_number = ENOMEM, .operation = "write", .path = {}, .offset = position_});
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    ++buffer_count_;
  }
  filling_ = std::make_shared<Buffer>();
  filling_->memory = std::move(memory);
  filling_->of_stock = of_stock;
  filling_->device = file_->device();
  filling_->begin = filling_->end = position_ % buffer_nbytes_;
  filling_->offset = position_;
  return true;
}

// Queue the copy of a part of GPU memory to the end of the buffer. Returns false if it cannot begin yet or has failed.
bool Stream::start_copy(Source& source, uint64_t nbytes) {
  auto passed = source.gate->passed();
  if (!passed) {
    fail(passed.fault());
    return false;
  }
  if (!*passed) {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(gate_watched_, true)) return false;
    }
    scheduler_->one_more(*lane_);
    scheduler_->watcher().add_gate(source.gate, [self = shared_from_this()](const std::optional<Fault>& fault) {
      if (fault) self->fail(*fault);
      {
        std::lock_guard lock(self->mutex_);
        self->gate_watched_ = false;
      }
      self->wake();
      self->scheduler_->one_less(*self->lane_);
    });
    return false;
  }
  cuda::Gpu& gpu = source.gate->gpu();
  auto copier = copiers_.of(gpu);
  if (!copier) {
    fail(copier.fault());
    return false;
  }
  Buffer& buffer = *filling_;
  // Register the memory with CUDA, because the copy is slower otherwise. A failure does not matter: for example,
  // another stream may just have registered the same allocation.
  if (!buffer.memory.allocation->registered()) (void)buffer.memory.allocation->register_with(gpu);
  cuda::leave_captures_alone();
  auto event = (*copier)->start(cuda::Direction::from_gpu, buffer.memory.data + buffer.end,
                                reinterpret_cast<cuda::Address>(source.memory + source.placed_nbytes), nbytes);
  if (!event) {
    fail(event.fault());
    return false;
  }
  buffer.copies[&gpu] = std::move(*event);  // replaces earlier events: copies of one CUDA stream complete in order
  return true;
}

void Stream::watch_copies() {
  std::vector<std::shared_ptr<Buffer>> buffers(filled_.begin(), filled_.end());
  if (filling_) buffers.push_back(filling_);
  for (const auto& buffer : buffers) {
    auto copies = std::exchange(buffer->copies, {});
    for (auto& [gpu, event] : copies) {
      scheduler_->one_more(*lane_);
      {
        std::lock_guard lock(mutex_);
        ++open_copies_;
        ++buffer->open_copies;
      }
      scheduler_->watcher().add_copy(std::move(event),
                                     [self = shared_from_this(), buffer](const std::optional<Fault>& fault) {
                                       if (fault) self->fail(*fault);
                                       {
                                         std::unique_lock lock(self->mutex_);
                                         --self->open_copies_;
                                         --buffer->open_copies;
                                         self->news(lock);
                                       }
                                       self->wake();
                                       self->scheduler_->one_less(*self->lane_);
                                     });
    }
  }
}

// Copy the placed parts in order, include them in the CRC-32s, and submit a full buffer.
bool Stream::copy() {
  {
    std::lock_guard lock(mutex_);
    if (stopped()) return false;  // after abort() or a fault the appended memory may no longer exist
  }
  const bool front_is_full = !filled_.empty();
  const auto buffer = front_is_full ? filled_.front() : filling_;
  if (!buffer) return false;
  const size_t before = buffer->parts.size();
  copy_and_sum(*buffer);
  if (!front_is_full || !buffer->parts.empty()) return buffer->parts.size() < before;
  {
    std::lock_guard lock(mutex_);
    if (stopped() || in_flight_.size() + spare_buffers >= max_buffers) return buffer->parts.size() < before;
  }
  filled_.pop_front();
  write(buffer, RequestOptions{.write = true, .background = options_.background}, false);
  return true;
}

bool Stream::write_early() {
  if (!filling_ || filling_->end == filling_->begin || !filling_->parts.empty()) return false;
  {
    std::lock_guard lock(mutex_);
    const bool more_waits = position_ == turn_end_ && (turn_end_ < entered_end_ || cut_);
    if (filling_->offset >= early_end_ && !more_waits) return false;
  }
  filled_.push_back(std::move(filling_));
  return true;
}

bool Stream::write_the_rest() {
  RequestOptions options;
  {
    std::lock_guard lock(mutex_);
    if (!ending_ || ended_ || stopped() || !sources_.empty() || !in_flight_.empty() || !filled_.empty()) return false;
    if (ending_->cuts(*file_) && turn_end_ < UINT64_MAX) return false;
    if (filling_ && !filling_->parts.empty()) return false;
    options = *std::exchange(ending_, std::nullopt);
  }
  if (!filling_) {
    filling_ = std::make_shared<Buffer>();
    filling_->offset = position_;
  }
  if (chunk_.nbytes > 0) chunk_crcs_.push_back(chunk_.crc);
  options.write = true;
  options.background = options_.background;
  write(std::exchange(filling_, nullptr), options, true);
  return true;
}

void Stream::copy_and_sum(Buffer& buffer) {
  const bool sums = options_.chunk_nbytes > 0 || options_.of_segments;
  uint64_t copied = 0;
  uint64_t ended = 0;
  while (!buffer.parts.empty()) {
    const Part& part = buffer.parts.front();
    if (part.of_gpu) {
      std::lock_guard lock(mutex_);
      if (buffer.open_copies > 0 || stopped()) break;
    }
    if (part.made && part.made_begin == 0) fill_in(*part.made);
    const char* const from = part.made ? part.made->bytes.data() + part.made_begin : part.memory;
    char* const to = buffer.memory.data ? buffer.memory.data + part.begin : nullptr;
    for (uint64_t done = 0; done < part.nbytes; done += cached_step_nbytes) {
      const uint64_t nbytes = std::min(part.nbytes - done, cached_step_nbytes);
      if (from) std::memcpy(to + done, from + done, nbytes);
      if (sums) sum(to + done, nbytes);
    }
    copied += part.nbytes;
    if (part.ends_segment) {
      ++ended;
      if (options_.of_segments) segment_crcs_.push_back(std::exchange(segment_, {}).crc);
    }
    buffer.parts.pop_front();
  }
  std::lock_guard lock(mutex_);
  uncopied_nbytes_ -= copied;
  copied_segments_ += ended;
  if (copied + ended > 0) news_.notify_all();
}

void Stream::sum(const char* bytes, uint64_t nbytes) {
  RunningCrc32* const chunk = options_.chunk_nbytes > 0 ? &chunk_ : nullptr;
  while (nbytes > 0) {
    const uint64_t length = chunk ? std::min(nbytes, options_.chunk_nbytes - chunk->nbytes) : nbytes;
    add(chunk, options_.of_segments ? &segment_ : nullptr, bytes, length);
    bytes += length;
    nbytes -= length;
    if (!chunk || chunk->nbytes < options_.chunk_nbytes) continue;
    chunk_crcs_.push_back(std::exchange(chunk_, {}).crc);
  }
}

void Stream::fill_in(Made& made) const {
  for (const Made::Field& field : made.fields) {
    char* const place = made.bytes.data() + field.position;
    switch (field.kind) {
      case Made::Field::Kind::segment: put(place, segment_crcs_[field.segment]); break;
      case Made::Field::Kind::own: put(place, crc32(0, made.bytes.data() + field.begin, field.nbytes)); break;
      case Made::Field::Kind::folded: {
        uint64_t number = 0;
        for (const int64_t given : field.crcs) {
          const uint64_t crc = given < 0 ? segment_crcs_[static_cast<size_t>(~given)] : static_cast<uint64_t>(given);
          number ^= crc + field.fold.added + (number << field.fold.left) + (number >> field.fold.right);
        }
        for (uint64_t digit = Made::folded_nbytes; digit-- > 0; number /= 10) {
          place[digit] = static_cast<char>('0' + number % 10);
        }
        break;
      }
    }
  }
}

// hand_over() reserves space, which may block on the drive. abort() need not wait for that (handing_over_), because no
// appended memory is read there.
void Stream::write(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last) {
  {
    std::unique_lock lock(mutex_);
    in_flight_.insert(buffer->offset);
    handed_over_end_ = buffer->offset + (buffer->end - buffer->begin);
    handing_over_ = true;
    news(lock);
  }
  hand_over(std::move(buffer), options, last);
  std::lock_guard lock(mutex_);
  handing_over_ = false;
}

void Stream::hand_over(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last) {
  const uint64_t nbytes = buffer->end - buffer->begin;
  scheduler_->one_more(*lane_);  // until written() is called
  const auto request = std::make_shared<Request>(scheduler_, options);
  TransferSpec spec{.file = file_, .offset = buffer->offset, .write = true, .lane = lane_, .ordered = true};
  // Get the lease first. Closing the file waits for its leases, so from here on its descriptor number cannot be reused
  // by another file.
  spec.lease = file_->lease();
  spec.memory = Segments(buffer->memory.data ? buffer->memory.data + buffer->begin : nullptr, nbytes);
  auto fault = spec.lease ? reserve(*file_, {{buffer->offset, buffer->offset + nbytes}}) : std::nullopt;
  auto transfer = Result<std::shared_ptr<Transfer>>(Fault{});
  if (!fault) {
    transfer = Transfer::create(std::move(spec), request, 0, scheduler_->options().large_block_nbytes);
    if (!transfer) fault = transfer.fault();
  }
  if (fault) {
    written(std::move(buffer), fault, last);
    return;
  }
  scheduler_->one_more(*lane_);  // for the transfer
  std::shared_ptr<OrderedWrite> cut;
  if (last) {
    std::lock_guard lock(mutex_);
    cut = std::exchange(cut_, nullptr);  // the request makes it leave the order
  }
  scheduler_->submit(request, {*transfer}, {}, std::move(cut));
  request->seal();
  request->notify([self = shared_from_this(), request = request.get(), buffer = std::move(buffer), last]() mutable {
    self->written(std::move(buffer), request->fault() ? std::optional(*request->fault()) : std::nullopt, last);
  });
}

void Stream::written(std::shared_ptr<Buffer> buffer, const std::optional<Fault>& fault, bool last) {
  if (fault) fail(*fault);
  {
    std::lock_guard lock(mutex_);
    in_flight_.erase(buffer->offset);
    if (buffer->memory.data) --buffer_count_;
    if (last && !fault) ended_ = true;
    news_.notify_all();
  }
  buffer.reset();  // the next buffer can use its memory
  leave_order();
  wake();
  scheduler_->one_less(*lane_);
}

void Stream::fail(Fault fault) {
  std::lock_guard lock(mutex_);
  if (fault.path.empty()) fault.path = file_->path();
  if (!fault_ || fault.offset < fault_->offset) fault_ = std::move(fault);
  news_.notify_all();
}

}  // namespace tensorferry
