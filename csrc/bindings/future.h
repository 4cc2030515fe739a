// What an asynchronous call returns: waiting, cancelling, and the coroutine that an event loop runs.
//
// All of it is here, and none of it in Python, since a small read takes less time than ten lines of Python do. What is
// seldom asked for is in tensorferry/transfer/futures.py: its class is derived from this one, and adds no state.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

#include "bindings/collect.h"
#include "bindings/scheduler.h"
#include "transfer/completion_queue.h"

namespace tensorferry {

struct PyCompletionQueue {
  std::shared_ptr<CompletionQueue> core = std::make_shared<CompletionQueue>();

  PyCompletionQueue();
};

class PyFuture {
 public:
  // The result, and what keeps its memory.
  PyFuture(nb::object array, nb::object keep);
  ~PyFuture();
  PyFuture(const PyFuture&) = delete;
  PyFuture& operator=(const PyFuture&) = delete;

  // A transfer that one call of the core began, of one plain array: its owner is looked at again when it has ended.
  static nb::object of_plain(nb::handle array, const PlainArray& memory);

  // What it is of, for messages: the path of a file or the name of a tensor.
  void is_about(bool write, nb::object what, uint64_t offset, uint64_t nbytes) {
    about_ = About{write, std::move(what), offset, nbytes};
  }

  // A request of the core's, or several looked at as one: any object with the methods of futures.Request. `check` is
  // asked when it has ended well: it returns an exception, or None.
  void start(nb::object request, nb::object check);
  void start(PyRequest request);

  // Another result than what the transfer fills. `deliver` makes it of that, when it is there; it returns as `check`.
  void gives(nb::object result, nb::object deliver);

  bool is_begun() const { return request_ || several_.is_valid(); }
  bool done();
  bool cancel();
  bool cancelled();
  nb::object exception(std::optional<double> timeout_seconds);
  nb::object result(std::optional<double> timeout_seconds);

  // The next step of the coroutine: what the task is to wait for. Raises StopIteration with the result at the end.
  nb::object step();
  [[noreturn]] void raise_in_coroutine(const nb::args& error);

  // An asyncio.Future that is done when the transfer is, or when one more of several is.
  nb::object waiter();

  // Ends the transfer before its time; how it ends is of no interest.
  void abandon();
  nb::object settle();
  nb::object request() const;
  nb::object begun_at() const { return begun_at_.is_valid() ? begun_at_ : nb::none(); }
  nb::object about() const;
  nb::str state();
  void notify(const PyCompletionQueue& queue, uint64_t token) const;
  void check_process() const;

  // Of all that ended with a failure nobody asked about: when the interpreter is about to end.
  static void warn_of_unseen();

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  struct About {
    bool write;
    nb::object what;
    uint64_t offset;
    uint64_t nbytes;
  };

  bool is_over() const;
  void cancel_request();
  nb::object failure() const;
  bool was_cancelled(nb::handle exception) const;
  nb::object awaited();
  void seen();
  void note_caller();
  void warn_if_unseen();

  nb::ft_mutex mutex_;
  nb::object array_;
  nb::object keep_;  // null once it has ended: perhaps it is a copy that the caller knows nothing of
  nb::object check_;
  nb::object deliver_;
  std::optional<PlainArray> plain_;
  std::optional<PyRequest> request_;
  nb::object several_;
  nb::object exception_;
  nb::object begun_at_;
  std::optional<About> about_;
  bool asked_ = false;
  bool cancelling_ = false;
  bool settled_ = false;
  uint64_t generation_ = 0;  // of the process that began it

  // All that nobody has asked about, in a list of this process's.
  struct Unseen;
  PyFuture* before_ = nullptr;
  PyFuture* behind_ = nullptr;
  bool listed_ = false;
};

// Completions for one event loop, whose thread alone uses this.
class PyLoopListener {
 public:
  void add(const PyFuture& future, nb::object waiter);
  void deliver();
  int fileno() const { return queue_.core->descriptor(); }

  int traverse(visitproc visit, void* arg) const;
  void clear() { waiters_.clear(); }

 private:
  PyCompletionQueue queue_;
  std::unordered_map<uint64_t, nb::object> waiters_;
  uint64_t last_ = 0;
};

void bind_futures(nb::module_& module);

}  // namespace tensorferry
