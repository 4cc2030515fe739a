#include "transfer/scheduler.h"

#include <errno.h>
#include <pthread.h>

#include <algorithm>

#include "base/after_fork.h"
#include "base/interruption.h"
#include "base/limits.h"
#include "base/reserve.h"
#include "base/signals_blocked.h"
#include "transfer/worker.h"
#include "transfer/write_order.h"

namespace tensorferry {
namespace {

// Cached data of this size is copied in less time than it takes to wake another thread.
constexpr uint64_t max_cached_nbytes = uint64_t{64} << 10;

// A larger blocking call is left to a worker, which keeps several blocks in flight.
constexpr uint64_t max_inline_nbytes = uint64_t{1} << 20;

// Waits on its thread until it is next in the queue for bounce memory, or for a short time: the request may have been
// cancelled.
class SleepingWaiter final : public BounceWaiter {
 public:
  void wait() {
    std::unique_lock lock(mutex_);
    (void)released_.wait_for(lock, std::chrono::milliseconds(50), [&] { return std::exchange(is_next_, false); });
  }
  void bounce_memory_released() override {
    {
      std::lock_guard lock(mutex_);
      is_next_ = true;
    }
    released_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  bool is_next_ = false;
};

// A truncation that has its turn as soon as it enters the order.
class Truncation final : public OrderedWrite {
 public:
  Truncation(const FileIdentity& file, uint64_t size) : OrderedWrite(file, size, UINT64_MAX) {}
  void turn_has_come() override {}
};

}  // namespace

std::shared_ptr<Scheduler> Scheduler::create(const SchedulerOptions& options, std::vector<EngineRefusal>& refusals) {
  std::shared_ptr<Scheduler> scheduler(new Scheduler(options));
  for (const EngineKind& kind : engine_kinds()) {
    if (options.engine.empty() ? kind.on_request_only : options.engine != kind.name) continue;
    const std::string refusal = scheduler->lanes_.start(kind);
    if (refusal.empty()) return scheduler;
    refusals.push_back({kind.name, refusal});
  }
  return nullptr;
}

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options), fork_generation_(tensorferry::fork_generation()), lanes_(*this) {
  fill_reserve();  // before any thread starts
}

Scheduler::~Scheduler() {
  // The destructor may run on the watcher's own thread, which cannot join itself.
  if (state_ == State::abandoned) (void)watcher_.release();
}

bool Scheduler::belongs_to_this_process() const { return fork_generation_ == tensorferry::fork_generation(); }

// A lane without outstanding transfers admits any number at once. Otherwise a request with more transfers than the
// limit could never start.
bool Scheduler::has_room(const Places& wanted) {
  const size_t outstanding = wanted.lane->outstanding_;
  return outstanding == 0 || outstanding + wanted.count <= max_outstanding;
}

// A caller that waits for another lane, which may hang, does not hold back those of lanes where it has room.
bool Scheduler::holds_back(const std::vector<Places>& earlier, const std::vector<Places>& later) {
  const bool is_next = std::ranges::all_of(earlier, &has_room);
  return std::ranges::any_of(earlier, [&](const Places& wanted) {
    const bool is_shared = std::ranges::find(later, wanted.lane, &Places::lane) != later.end();
    return is_shared && (is_next || !has_room(wanted));
  });
}

Scheduler::Admission Scheduler::admit(const std::vector<Places>& places, std::chrono::milliseconds timeout,
                                      uint64_t& ticket) {
  std::unique_lock lock(mutex_);
  if (ticket == 0) ticket = ++last_ticket_;
  const auto may_go = [&] {
    if (state_ != State::open) return true;
    const auto holds_this_back = [&](const auto& one) { return one.first < ticket && holds_back(*one.second, places); };
    return std::ranges::all_of(places, &has_room) && std::ranges::none_of(waiting_, holds_this_back);
  };
  if (!may_go()) {
    waiting_.emplace(ticket, &places);
    const bool decided = progress_.wait_for(lock, timeout, may_go);
    waiting_.erase(ticket);
    progress_.notify_all();  // later callers may go on, if the lanes have room for them
    if (!decided) return Admission::full;
  }
  if (state_ != State::open) return Admission::closed;
  for (const auto& [lane, count] : places) {
    lane->outstanding_ += count;
    outstanding_ += count;
  }
  return Admission::admitted;
}

void Scheduler::take_back(const std::vector<Places>& places) {
  std::lock_guard lock(mutex_);
  for (const auto& [lane, count] : places) {
    lane->outstanding_ -= count;
    outstanding_ -= count;
  }
  end_if_abandoned();
  progress_.notify_all();
}

bool Scheduler::wait_for_progress(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const uint64_t before = completed_;
  return progress_.wait_for(lock, timeout, [&] { return completed_ != before || outstanding_ == 0; });
}

size_t Scheduler::outstanding() const {
  std::lock_guard lock(mutex_);
  return outstanding_;
}

std::vector<uint64_t> Scheduler::take_finished() {
  std::lock_guard lock(mutex_);
  return std::exchange(finished_, {});
}

void Scheduler::keep(const std::shared_ptr<Request>& request) {
  std::lock_guard lock(mutex_);
  requests_[request.get()] = request;
}

void Scheduler::submit(const std::shared_ptr<Request>& request, const Transfers& transfers,
                       const std::vector<std::shared_ptr<File>>& incomplete, std::shared_ptr<OrderedWrite> ordered) {
  const UsesReserve reserve;
  statistics_.requests.fetch_add(1, std::memory_order_relaxed);
  keep(request);
  const auto cuts = request->add(transfers, incomplete, ordered);
  std::vector<bool> may_begin(transfers.size(), true);
  if (transfers.front()->enters_order()) {
    WriteOrder::Writes order(transfers.begin(), transfers.end()), in_the_way;
    order.insert(order.end(), cuts.begin(), cuts.end());
    may_begin = WriteOrder::enter(order, in_the_way);
    for (const auto& write : in_the_way) write->others_wait();
  }
  // This truncates nothing yet: the truncation also waits for the transfers.
  for (size_t index = 0; index < cuts.size(); ++index) {
    if (may_begin[transfers.size() + index]) cuts[index]->turn_has_come();
  }
  // The transfers that may get in line, grouped by lane. Nearly always there is only one lane.
  std::vector<std::pair<Lane*, Transfers>> ready;
  for (size_t index = 0; index < transfers.size(); ++index) {
    if (!may_begin[index] || !may_line_up(transfers[index])) continue;
    Lane* const lane = transfers[index]->lane().get();
    auto found = std::find_if(ready.begin(), ready.end(), [&](const auto& one) { return one.first == lane; });
    if (found == ready.end()) found = ready.insert(found, {lane, {}});
    found->second.push_back(transfers[index]);
  }
  for (const auto& [lane, own] : ready) lane->queue()->add(own);
}

void Scheduler::line_up(const std::shared_ptr<Transfer>& transfer) {
  if (may_line_up(transfer)) transfer->lane()->queue()->add({transfer});
}

// Returns whether the transfer may get in line now. Returns false if work that is queued on a GPU may still write or
// read the transfer's memory. In that case the watcher calls line_up() once that work has completed.
bool Scheduler::may_line_up(const std::shared_ptr<Transfer>& transfer) {
  for (const auto& gate : transfer->gates()) {
    auto passed = gate->passed();
    if (!passed) transfer->refuse(passed.fault());
    if (!passed || *passed) continue;
    watcher_->add_gate(gate, [this, transfer](const std::optional<Fault>& fault) {
      if (fault) transfer->refuse(*fault);
      line_up(transfer);
    });
    return false;
  }
  return true;
}

std::optional<Fault> Scheduler::prepare_for_gpus() {
  std::lock_guard lock(mutex_);
  if (watcher_) return std::nullopt;
  SignalsBlocked signals;
  auto watcher = cuda::Watcher::create();
  if (!watcher) return watcher.fault();
  watcher_ = std::move(*watcher);
  return std::nullopt;
}

void Scheduler::refuse() {
  std::lock_guard lock(mutex_);
  if (state_ == State::open) state_ = State::refusing;
  progress_.notify_all();  // wakes callers that wait for admission
}

bool Scheduler::wait_until_idle(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return progress_.wait_for(lock, timeout, [&] { return is_idle() || state_ == State::abandoned; });
}

uint64_t Scheduler::progress() const {
  std::lock_guard lock(mutex_);
  return completed_ + statistics_.read_nbytes + statistics_.written_nbytes;
}

bool Scheduler::close() {
  std::unique_lock lock(mutex_);
  if (state_ != State::open && state_ != State::refusing) {
    progress_.wait(lock, [&] { return state_ != State::closing; });
    return state_ == State::closed;
  }
  // If something is still outstanding, it hangs in the kernel. The threads are then left behind: they own the
  // scheduler, and end when everything has completed, or with the process.
  const bool hung = !is_idle();
  state_ = hung ? State::abandoned : State::closing;
  progress_.notify_all();  // wakes callers that wait for admission
  if (hung) {
    lanes_.abandon();
    return false;
  }
  lock.unlock();
  lanes_.stop();
  watcher_.reset();  // after the workers, because the watcher may have been about to wake one of them
  lock.lock();
  state_ = State::closed;
  progress_.notify_all();
  return true;
}

void Scheduler::end_if_abandoned() {
  if (state_ != State::abandoned || !is_idle()) return;
  lanes_.let_end();
}

void Scheduler::drop(WorkBlock& block) {
  block.bounce.reset();
  block.ticket.reset();
  auto transfer = std::move(block.transfer);
  if (transfer->count_down()) end_transfer(transfer);
}

void Scheduler::end_transfer(const std::shared_ptr<Transfer>& transfer) {
  transfer->finish();
  if (!transfer->fault() || !transfer->joined()) return tell_request(transfer);
  transfer->lane()->help_to_wait([self = shared_from_this(), transfer] {
    self->move_singly(*transfer);
    self->tell_request(transfer);
  });
}

// Meanwhile the joined transfer stays in the WriteOrder, so overlapping writes wait, and it counts as outstanding.
void Scheduler::move_singly(Transfer& joined) {
  const TransferSpec& spec = joined.spec();
  const auto request = joined.request().shared_from_this();
  std::map<size_t, Fault> faults;
  uint64_t moved_nbytes = 0;
  for (size_t index = 0; index < spec.memory.count(); ++index) {
    const auto& piece = spec.memory[index];
    if (spec.positions[index] == gap_position) continue;
    const size_t position = spec.positions[index];
    TransferSpec own{spec.file, Segments(piece.memory, piece.nbytes), spec.offset + piece.begin, spec.write};
    own.lane = spec.lane;
    own.lease = spec.lease.another();  // another thread may be closing the file
    auto made = Transfer::create(std::move(own), request, position, block_nbytes_for(piece.nbytes));
    if (!made) {
      faults.emplace(position, made.fault());
      continue;
    }
    Transfer& single = **made;
    WorkBlock block;
    bool exhausted = false;
    while (!exhausted && single.next_block(block, exhausted)) {
      drive(block);
      block.transfer.reset();
    }
    single.finish();
    moved_nbytes += single.moved_nbytes();
    faults.merge(single.faults());
  }
  joined.ended_singly(std::move(faults), moved_nbytes);
}

void Scheduler::tell_request(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->enters_order()) WriteOrder::leave(*transfer);
  // The pointer only identifies the file. If the request has operations on it, the request holds the file and takes
  // over the lease.
  const File* file = transfer->file().get();
  File::Lease lease = transfer->release_file();
  Request& request = transfer->request();
  if (!request.options().uses_files()) {
    // If the user has dropped the file meanwhile, releasing the lease closes the file, which may block. A helper then
    // does it, and counts as outstanding until the file is closed.
    if (lease.is_all_that_is_left()) {
      one_more(*transfer->lane());
      transfer->lane()->help([self = shared_from_this(), lane = transfer->lane(),
                              held = std::make_shared<File::Lease>(std::move(lease))]() mutable {
        held.reset();
        self->one_less(*lane);
      });
    }
    // Release the lease before the end is announced: a caller that then drops the file must be the one that closes it.
    lease = {};
  }
  request.transfer_ended(*transfer, file, std::move(lease));
}

void Scheduler::one_less(Lane& lane) {
  {
    std::lock_guard lock(mutex_);
    --lane.outstanding_;
    --outstanding_;
    ++completed_;
    end_if_abandoned();
  }
  progress_.notify_all();
}

void Scheduler::let_go(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    finished_.push_back(id);
  }
  on_finished_();
}

bool Scheduler::one_more_if_open(Lane& lane) {
  std::lock_guard lock(mutex_);
  if (state_ != State::open) return false;
  ++lane.outstanding_;
  ++outstanding_;
  return true;
}

void Scheduler::one_more(Lane& lane) {
  std::lock_guard lock(mutex_);
  ++lane.outstanding_;
  ++outstanding_;
}

void Scheduler::count_request(const Request& request) {
  if (!request.faults().empty()) statistics_.failed_requests.fetch_add(1, std::memory_order_relaxed);
}

void Scheduler::request_over(const Request& request) {
  std::shared_ptr<Request> kept;  // releasing it may destroy this scheduler
  {
    std::lock_guard lock(mutex_);
    ++completed_;
    auto found = requests_.find(&request);
    if (found != requests_.end()) {
      kept = std::move(found->second);
      requests_.erase(found);
      finished_.push_back(request.id());
    }
    end_if_abandoned();
  }
  progress_.notify_all();
  if (kept) on_finished_();
}

// Run steps on this thread up to the next one that copies. Returns that step.
Step Scheduler::run_now(WorkBlock& block, Step step) {
  Transfer& transfer = *block.transfer;
  while (true) {
    switch (step) {
      case Step::get_over: step = transfer.get_over(block); break;
      case Step::move:
        statistics_.inline_blocks.fetch_add(block.moved == 0 && block.attempts == 0, std::memory_order_relaxed);
        block.result = transfer.move_here(block, &execute_now);
        step = transfer.look_at_result(block, statistics_);
        if (block.result == -EINTR && interruptions_are_returned) return step;
        break;
      default: return step;
    }
  }
}

Step Scheduler::run_on(WorkBlock& block, Step step) {
  while (step != Step::done) {
    step = run_now(block, step);
    if (step == Step::move || step == Step::get_over) break;
    if (step == Step::touch) step = block.transfer->touch(block, statistics_);
    if (step == Step::copy) step = block.transfer->copy(block, statistics_);
    if (step == Step::copy_gpu) step = block.transfer->copy_now(block, statistics_);
  }
  return step;
}

bool Scheduler::try_inline(const std::shared_ptr<Transfer>& transfer, Inline& taken, bool only_cached) {
  const UsesReserve reserve;
  if (transfer->nbytes() > max_inline_nbytes || transfer->has_many_blocks()) return false;
  if (transfer->file()->source()) return false;  // a signal cannot interrupt a source
  for (const auto& gate : transfer->gates()) {
    auto passed = gate->passed();
    if (!passed || !*passed) return false;  // the watcher waits for the gate
  }
  Request& request = transfer->request();
  std::shared_ptr<OrderedWrite> cut;
  if (request.options().cuts(*transfer->file())) {
    cut = std::make_shared<Truncation>(transfer->identity(), transfer->end());
  }
  WriteOrder::Writes order;
  if (transfer->is_write()) order.push_back(transfer);
  if (cut) order.push_back(cut);
  if (!order.empty() && !WriteOrder::try_to_enter(order)) return false;
  bool exhausted;
  if (transfer->next_block(taken.block, exhausted)) {
    taken.step = transfer->prepare(taken.block, nullptr, statistics_);
    if (taken.step == Step::wait_for_memory || (only_cached && !move_cached(taken))) {
      taken.block.transfer.reset();
      // The caller will submit the transfer, because a worker can wait for memory or for the device.
      transfer->rewind();
      for (const auto& write : order) WriteOrder::leave(*write);
      return false;
    }
    (void)transfer->count_down();  // for the block; the cursor's reference still keeps the transfer from ending
  }
  request.leave_to_caller();
  (void)request.add({transfer}, {}, std::move(cut));
  request.seal();
  statistics_.requests.fetch_add(1, std::memory_order_relaxed);
  taken.transfer = transfer;
  return true;
}

bool Scheduler::try_cached(const std::shared_ptr<Transfer>& transfer) {
  const UsesReserve reserve;
  if (transfer->is_write() || transfer->nbytes() > max_cached_nbytes) return false;
  if (!transfer->is_shared() || !transfer->gates().empty()) return false;
  if (transfer->spec().checksums || transfer->joined()) return false;
  Inline taken;
  if (!try_inline(transfer, taken, true)) return false;
  (void)go_on(taken);
  (void)transfer->request().settle_files();  // the caller opened the file, and closing it takes as little time
  return true;
}

// Read a block without waiting for a device. Returns false if that is impossible or gave less than the whole block. A
// worker then reads it again and reports the fault, if there is one.
bool Scheduler::move_cached(Inline& taken) {
  if (taken.step != Step::move) return false;
  WorkBlock& block = taken.block;
  // tmpfs does not support RWF_NOWAIT, but it never waits for a device.
  const bool in_memory = block.transfer->file()->in_memory();
  block.result = block.transfer->move_here(block, in_memory ? &execute_now : &read_cached);
  if (block.result != static_cast<int64_t>(block.nbytes)) return false;
  statistics_.inline_blocks.fetch_add(1, std::memory_order_relaxed);
  taken.step = block.transfer->look_at_result(block, statistics_);
  return true;
}

bool Scheduler::go_on(Inline& taken) {
  const UsesReserve reserve;
  taken.step = run_on(taken.block, taken.step);
  if (taken.step != Step::done) {
    const auto lane = taken.transfer->lane();  // the helper may end the transfer before help() returns
    taken.transfer->request().leave_to_helpers();
    keep(taken.transfer->request().shared_from_this());
    lane->help([self = shared_from_this(), rest = std::make_shared<Inline>(std::move(taken))] {
      self->run_to_end(rest->block, rest->step);
      rest->block.transfer.reset();
      self->end_transfer(rest->transfer);
    });
    return false;
  }
  taken.block.bounce.reset();
  taken.block.transfer.reset();
  end_transfer(std::exchange(taken.transfer, nullptr));
  return true;
}

void Scheduler::drive(WorkBlock& block) {
  Step step;
  const auto memory = std::make_shared<SleepingWaiter>();
  while ((step = block.transfer->prepare(block, memory.get(), statistics_)) == Step::wait_for_memory) memory->wait();
  run_to_end(block, step);
}

void Scheduler::run_to_end(WorkBlock& block, Step step) {
  while (step != Step::done) step = run_on(block, step);
  block.bounce.reset();
}

// The calling thread helps the workers, because several threads copy from the page cache faster than one does.
bool Scheduler::share(const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout) {
  const UsesReserve reserve;
  if (!transfer->is_shared()) return true;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  WorkBlock block;
  while (transfer->lane()->queue()->take_block(block, nullptr, transfer.get())) {
    const Step step = block.transfer->prepare(block, nullptr, statistics_);
    // A hung transfer may hold the bounce memory forever, so a helper waits for the memory in place of the caller.
    if (step == Step::wait_for_memory) {
      transfer->lane()->help_to_wait(
          [self = shared_from_this(), block = std::make_shared<WorkBlock>(std::move(block))] {
            self->drive(*block);
            self->drop(*block);
          });
      return true;
    }
    run_to_end(block, step);
    drop(block);
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
  return true;
}

}  // namespace tensorferry
