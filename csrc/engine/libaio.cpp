// The libaio engine: Linux AIO by its four system calls (linux/aio_abi.h), for environments that forbid io_uring.
//
// It is asynchronous only for direct I/O: a buffered block runs inside io_submit. Contexts count against the
// machine-wide limit fs.aio-max-nr. The wake-up is a poll of an eventfd in the same context (IOCB_CMD_POLL, Linux
// 4.18), so one call waits for both.
#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/event.h"
#include "base/limits.h"
#include "engine/engine.h"

namespace tensorferry {
namespace {

// Return the result of a system call as -errno on failure.
long kernel_call(long result) { return result < 0 ? -errno : result; }

std::string refusal(const char* call, long error_number) {
  std::string reason = std::string(call) + ": " + ::strerror(static_cast<int>(error_number)) + "; ";
  switch (error_number) {
    case EAGAIN:
      return reason + "likely cause: the limit fs.aio-max-nr is exhausted; remedy: sysctl -w fs.aio-max-nr=1048576";
    case ENOSYS:
      return reason +
             "likely cause: a seccomp profile, or a sandbox without Linux AIO; remedy: allow io_setup, "
             "io_submit, io_getevents and io_destroy";
    case EPERM:
    case EACCES:
      return reason + "likely cause: a seccomp profile; remedy: allow io_setup, io_submit, io_getevents and io_destroy";
    case EMFILE:
    case ENFILE: return reason + "remedy: raise the descriptor limit (ulimit -n)";
    case ENOMEM: {
      const std::string address_space = why_no_memory();
      return reason +
             (address_space.empty() ? "likely cause: the system or the container is out of memory" : address_space);
    }
    default: return reason + "likely cause: a kernel before 4.18";
  }
}

class LibaioEngine final : public Engine {
 public:
  static EngineAttempt create(const EngineOptions& options) {
    std::unique_ptr<LibaioEngine> engine(new LibaioEngine(options));
    if (engine->event_.error_number()) return {nullptr, refusal("eventfd", engine->event_.error_number())};
    long result = kernel_call(::syscall(SYS_io_setup, options.queue_depth + 1, &engine->context_));
    if (result < 0) return {nullptr, refusal("io_setup", -result)};
    engine->arm_wake();
    if (!engine->wake_armed_) return {nullptr, refusal("io_submit", -engine->wake_result_)};
    return {std::move(engine), ""};
  }

  ~LibaioEngine() override {
    // io_destroy waits for blocks in flight; when a worker ends, only the poll is left.
    if (context_) (void)::syscall(SYS_io_destroy, context_);
  }

  const char* name() const override { return "libaio"; }
  bool blocks_on_buffered() const override { return true; }

  void add(Block& block) override {
    struct iocb* control = free_.back();
    free_.pop_back();
    ::memset(control, 0, sizeof *control);
    control->aio_data = reinterpret_cast<uintptr_t>(&block);
    control->aio_fildes = static_cast<uint32_t>(block.descriptor);
    control->aio_buf = reinterpret_cast<uintptr_t>(block.memory);
    control->aio_nbytes = std::min(block.nbytes, max_call_nbytes);
    control->aio_offset = static_cast<int64_t>(block.offset);
    switch (block.operation) {
      case Operation::read: control->aio_lio_opcode = IOCB_CMD_PREAD; break;
      case Operation::write: control->aio_lio_opcode = IOCB_CMD_PWRITE; break;
    }
    added_.push_back(control);
    if (options_.single_submit) submit();
  }

  void submit() override {
    size_t begin = 0;
    while (begin < added_.size()) {
      const long accepted = kernel_call(
          ::syscall(SYS_io_submit, context_, static_cast<long>(added_.size() - begin), added_.data() + begin));
      if (accepted > 0) {
        begin += static_cast<size_t>(accepted);
        continue;
      }
      if (accepted == -EINTR) continue;
      // The error belongs to the first control block: io_submit(2).
      struct iocb* control = added_[begin++];
      auto* block = reinterpret_cast<Block*>(control->aio_data);
      block->result = accepted == 0 ? -EAGAIN : accepted;
      refused_.push_back(block);
      free_.push_back(control);
    }
    added_.clear();
  }

  void reap(std::vector<Block*>& completed, bool wait) override {
    submit();
    completed.insert(completed.end(), refused_.begin(), refused_.end());
    wait = wait && refused_.empty();
    refused_.clear();
    if (!wake_armed_) arm_wake();
    // Without an armed wake-up a sleep in the kernel could not be ended.
    const bool sleep = wait && wake_armed_;
    std::array<struct io_event, 64> events;
    const long count =
        kernel_call(::syscall(SYS_io_getevents, context_, sleep ? 1L : 0L, static_cast<long>(events.size()),
                              events.data(), sleep ? nullptr : &no_time_));
    if (wait && (count < 0 ? count != -EINTR : count == 0)) {
      // The kernel refuses (a sandbox was put around the running process). Blocks that it accepted before belong to it
      // until they complete, so look again after a millisecond; without such blocks only a wake-up can matter.
      struct pollfd event{event_.descriptor(), POLLIN, 0};
      if (::poll(&event, 1, free_.size() < controls_.size() ? 1 : -1) > 0) event_.clear();
    }
    // After an interruption `count` is negative, and the worker calls reap() again.
    for (long index = 0; index < count; ++index) {
      const auto& event = events[static_cast<size_t>(index)];
      auto* control = reinterpret_cast<struct iocb*>(event.obj);
      if (control == &wake_control_) {
        event_.clear();
        wake_armed_ = false;
        continue;
      }
      auto* block = reinterpret_cast<Block*>(event.data);
      block->result = event.res;
      free_.push_back(control);
      completed.push_back(block);
    }
  }

  void wake() override { event_.set(); }

 private:
  explicit LibaioEngine(const EngineOptions& options) : options_(options), controls_(options.queue_depth) {
    for (auto& control : controls_) free_.push_back(&control);
  }

  // Add a poll of the eventfd to the context, whose completion ends io_getevents() when wake() is called.
  void arm_wake() {
    ::memset(&wake_control_, 0, sizeof wake_control_);
    wake_control_.aio_lio_opcode = IOCB_CMD_POLL;
    wake_control_.aio_fildes = static_cast<uint32_t>(event_.descriptor());
    wake_control_.aio_buf = POLLIN;
    struct iocb* control = &wake_control_;
    wake_result_ = kernel_call(::syscall(SYS_io_submit, context_, 1L, &control));
    wake_armed_ = wake_result_ == 1;
  }

  EngineOptions options_;
  Event event_;
  aio_context_t context_ = 0;
  std::vector<struct iocb> controls_;
  std::vector<struct iocb*> free_;
  std::vector<struct iocb*> added_;
  std::vector<Block*> refused_;
  struct iocb wake_control_{};
  long wake_result_ = 0;
  bool wake_armed_ = false;
  struct timespec no_time_{};
};

}  // namespace

EngineAttempt create_libaio_engine(const EngineOptions& options) { return LibaioEngine::create(options); }

}  // namespace tensorferry
