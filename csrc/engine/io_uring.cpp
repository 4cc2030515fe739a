// The io_uring engine: blocks are written to a queue shared with the kernel, and one system call submits many of them
// and waits for completions.
//
// The ring is made for one submitting thread and runs its completion work only when that thread asks for it
// (SINGLE_ISSUER, DEFER_TASKRUN; Linux 6.1), with fewer flags on older kernels. It needs the system call
// io_uring_setup, which Docker's default seccomp profile and the sysctl kernel.io_uring_disabled may forbid. README.md
// has the measurements behind the choices.
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

#include "base/event.h"
#include "base/limits.h"
#include "engine/engine.h"

namespace tensorferry {
namespace {

int read_sysctl(const char* path, int fallback) {
  FILE* file = ::fopen(path, "re");
  if (!file) return fallback;
  int value = fallback;
  if (::fscanf(file, "%d", &value) != 1) value = fallback;
  ::fclose(file);
  return value;
}

bool kernel_before(int major, int minor) {
  utsname system;
  int found_major = 0, found_minor = 0;
  if (::uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &found_major, &found_minor) != 2) return false;
  return found_major < major || (found_major == major && found_minor < minor);
}

constexpr char remedy[] =
    "remedy: run the container with a profile that allows io_uring_setup, io_uring_enter and io_uring_register, or "
    "with --security-opt seccomp=unconfined";

std::string refusal(const char* call, int error_number) {
  std::string reason = std::string(call) + ": " + ::strerror(error_number) + "; ";
  if (error_number == ENOSYS && kernel_before(5, 1)) return reason + "likely cause: a kernel before 5.1";
  if (error_number == ENOSYS) {
    return reason + "likely cause: a seccomp profile (Podman's default one hides io_uring this way), or a sandbox " +
           "without io_uring; " + remedy;
  }
  if (error_number == EPERM || error_number == EACCES) {
    const int disabled = read_sysctl("/proc/sys/kernel/io_uring_disabled", 0);
    if (disabled != 0) {
      return reason + "likely cause: the sysctl kernel.io_uring_disabled is " + std::to_string(disabled) +
             "; remedy: sysctl -w kernel.io_uring_disabled=0";
    }
    return reason + "likely cause: a seccomp profile (Docker's default one blocks io_uring); " + remedy;
  }
  if (error_number == ENOMEM) {
    const std::string address_space = why_no_memory();
    return reason +
           (address_space.empty() ? "likely cause: RLIMIT_MEMLOCK; remedy: ulimit -l unlimited" : address_space);
  }
  if (error_number == EMFILE || error_number == ENFILE)
    return reason + "remedy: raise the descriptor limit (ulimit -n)";
  return reason + "likely cause: a kernel without a required feature of io_uring";
}

class IoUringEngine final : public Engine {
 public:
  static EngineAttempt create(const EngineOptions& options) {
    std::unique_ptr<IoUringEngine> engine(new IoUringEngine(options));
    if (engine->event_.error_number()) return {nullptr, refusal("eventfd", engine->event_.error_number())};
    const unsigned entries = std::min(options.queue_depth + 1, 32768u);  // one more for the wake-up
    int result = -EINVAL;
    // Kernels before 6.1 reject the first combination with EINVAL, those before 5.19 the second one.
    for (unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0u}) {
      struct io_uring_params parameters;
      ::memset(&parameters, 0, sizeof parameters);
      // The ring is made disabled, so the thread that enables it, the worker, becomes its single issuer.
      parameters.flags = flags | IORING_SETUP_CLAMP | IORING_SETUP_R_DISABLED;
      result = ::io_uring_queue_init_params(entries, &engine->ring_, &parameters);
      if (result != -EINVAL) break;
    }
    if (result < 0) return {nullptr, refusal("io_uring_setup", -result)};
    engine->ring_made_ = true;
    // The plain read and write operations exist since Linux 5.6.
    struct io_uring_probe* probe = ::io_uring_get_probe_ring(&engine->ring_);
    const bool complete = probe && ::io_uring_opcode_supported(probe, IORING_OP_READ) &&
                          ::io_uring_opcode_supported(probe, IORING_OP_WRITE);
    if (probe) ::io_uring_free_probe(probe);
    if (!complete) return {nullptr, refusal("io_uring_register", EINVAL)};
    return {std::move(engine), ""};
  }

  ~IoUringEngine() override {
    if (ring_made_) ::io_uring_queue_exit(&ring_);
  }

  const char* name() const override { return "io_uring"; }

  void start() override {
    start_error_ = -::io_uring_enable_rings(&ring_);
    // This saves a descriptor look-up in each call; a failure does not matter.
    if (start_error_ <= 0) (void)::io_uring_register_ring_fd(&ring_);
  }

  void end() override {
    // io_uring_queue_exit() would do it as well, but a registered descriptor is an index in a table of the calling
    // thread: on the thread of another worker, that index belongs to the other worker's ring.
    (void)::io_uring_unregister_ring_fd(&ring_);  // fails if start() could not register it
  }

  void add(Block& block) override {
    struct io_uring_sqe* entry = start_error_ > 0 ? nullptr : next_entry();
    if (entry == nullptr) {
      block.result = start_error_ > 0 ? -start_error_ : -EAGAIN;
      refused_.push_back(&block);
      return;
    }
    const auto nbytes = static_cast<unsigned>(std::min(block.nbytes, max_call_nbytes));
    switch (block.operation) {
      case Operation::read: ::io_uring_prep_read(entry, block.descriptor, block.memory, nbytes, block.offset); break;
      case Operation::write: ::io_uring_prep_write(entry, block.descriptor, block.memory, nbytes, block.offset); break;
    }
    ::io_uring_sqe_set_data(entry, &block);
    ++outstanding_;
    if (options_.single_submit) submit();
  }

  void submit() override {
    // A failure leaves the entries in the queue. reap() submits them again and counts the failures.
    if (::io_uring_sq_ready(&ring_) > 0) (void)::io_uring_submit(&ring_);
  }

  void reap(std::vector<Block*>& completed, bool wait) override {
    const size_t before = completed.size();
    completed.insert(completed.end(), refused_.begin(), refused_.end());
    wait = wait && refused_.empty();
    refused_.clear();
    if (wait && !wake_armed_) arm_wake();
    int result = 0;
    if (wait) {
      result = ::io_uring_submit_and_wait(&ring_, 1);  // after an interruption the worker calls reap() again
    } else {
      if (::io_uring_sq_ready(&ring_) > 0) result = ::io_uring_submit(&ring_);
      // Completions that overflowed the queue, and with DEFER_TASKRUN all completions, are only delivered by a call
      // with IORING_ENTER_GETEVENTS, which io_uring_get_events() makes.
      if (IO_URING_READ_ONCE(*ring_.sq.kflags) & IORING_SQ_CQ_OVERFLOW || ring_.flags & IORING_SETUP_DEFER_TASKRUN) {
        (void)::io_uring_get_events(&ring_);
      }
    }
    collect(completed);
    if (result >= 0 || result == -EINTR || completed.size() > before) {
      failing_since_.reset();
    } else {
      outlast(-result, wait);
      collect(completed);
    }
  }

  void wake() override { event_.set(); }

 private:
  using Clock = std::chrono::steady_clock;

  // How long the kernel may refuse all submissions before the waiting entries fail.
  static constexpr std::chrono::milliseconds max_refusal{100};

  explicit IoUringEngine(const EngineOptions& options) : options_(options) {}

  void collect(std::vector<Block*>& completed) {
    unsigned head;
    unsigned seen = 0;
    struct io_uring_cqe* entry;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++seen;
      void* data = ::io_uring_cqe_get_data(entry);
      // This is the completion of the poll that arm_wake() has added. The next wait must add it again.
      if (data == this) {
        event_.clear();
        wake_armed_ = false;
        continue;
      }
      auto* block = static_cast<Block*>(data);
      block->result = entry->res;
      completed.push_back(block);
      --outstanding_;
    }
    ::io_uring_cq_advance(&ring_, seen);
  }

  // The kernel has accepted nothing: it lacks memory for requests, or a sandbox was put around the running process.
  // Wait a little, but not in the ring: the poll by which wake() ends such a wait may be among the refused entries. If
  // the failures last for a tenth of a second, the entries are returned with the error. Blocks that the kernel accepted
  // before are still waited for: their completions need no submission, but with DEFER_TASKRUN they need a call of
  // io_uring_enter. If that is forbidden, too, they never complete, and Scheduler::close() leaks their memory rather
  // than free it while the kernel may write to it.
  void outlast(int error_number, bool wait) {
    const auto now = Clock::now();
    if (!failing_since_) failing_since_ = now;
    if (now - *failing_since_ >= max_refusal) take_back(error_number);
    if (wait && refused_.empty()) {
      struct pollfd event{event_.descriptor(), POLLIN, 0};
      // Without outstanding blocks only a wake-up can matter, so wait for it without a timeout.
      if (::poll(&event, 1, outstanding_ > 0 ? 1 : -1) > 0) event_.clear();  // interrupted: the caller asks again
      if (outstanding_ == 0) failing_since_.reset();
    }
    (void)::io_uring_get_events(&ring_);  // fails as the submission did, or delivers completions
  }

  // Return entries that the kernel has not accepted, with the error as their result.
  void take_back(int error_number) {
    const unsigned head = io_uring_smp_load_acquire(ring_.sq.khead);
    for (unsigned index = head; index != ring_.sq.sqe_tail; ++index) {
      auto* data = reinterpret_cast<void*>(static_cast<uintptr_t>(ring_.sq.sqes[index & ring_.sq.ring_mask].user_data));
      if (data == this) {
        wake_armed_ = false;
        continue;
      }
      auto* block = static_cast<Block*>(data);
      block->result = -error_number;
      refused_.push_back(block);
      --outstanding_;
    }
    // Without SQPOLL the kernel reads the tail only in io_uring_enter, so it is safe to move it back.
    ring_.sq.sqe_head = ring_.sq.sqe_tail = head;
    io_uring_smp_store_release(ring_.sq.ktail, head);
    failing_since_.reset();
  }

  struct io_uring_sqe* next_entry() {
    struct io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry) return entry;
    submit();  // the queue was full: the depth exceeds the kernel's limit
    return ::io_uring_get_sqe(&ring_);
  }

  // Add a poll of the eventfd to the ring, whose completion ends a wait in the ring when wake() is called.
  void arm_wake() {
    struct io_uring_sqe* entry = next_entry();
    if (entry == nullptr) return;  // the queue is full, so a completion will soon end the wait instead
    ::io_uring_prep_poll_add(entry, event_.descriptor(), POLLIN);
    ::io_uring_sqe_set_data(entry, this);
    wake_armed_ = true;
  }

  EngineOptions options_;
  Event event_;
  struct io_uring ring_{};
  bool ring_made_ = false;
  int start_error_ = 0;
  bool wake_armed_ = false;
  size_t outstanding_ = 0;  // blocks in the ring, whether the kernel has accepted them or not
  std::optional<Clock::time_point> failing_since_;
  std::vector<Block*> refused_;
};

}  // namespace

EngineAttempt create_io_uring_engine(const EngineOptions& options) { return IoUringEngine::create(options); }

}  // namespace tensorferry
