// The future that an asynchronous call returns: it is used to wait for the transfer, to cancel it, or as a coroutine in
// an event loop.
//
// The frequent operations are implemented here in C++, because a small read takes less time than ten lines of Python.
// The rare ones are in tensorferry/transfer/futures.py, in a Python subclass without further state.
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

// Completed transfers, each reported by a token (transfer/completion_queue.h).
struct PyCompletionQueue {
  std::shared_ptr<CompletionQueue> core = std::make_shared<CompletionQueue>();

  PyCompletionQueue();
};

class PyFuture {
 public:
  // `array` is the result, and `keep` an object that keeps its memory alive during the transfer.
  PyFuture(nb::object array, nb::object keep);
  ~PyFuture();
  PyFuture(const PyFuture&) = delete;
  PyFuture& operator=(const PyFuture&) = delete;

  // Create the future for a transfer of one plain array, as PyScheduler::start_plain() begins it. At the end the future
  // checks whether the array still has its memory.
  static nb::object of_plain(nb::handle array, const PlainArray& memory);

  // Set what the transfer moves, for messages: the path of a file or the name of a tensor.
  void is_about(bool write, nb::object what, uint64_t offset, uint64_t nbytes) {
    about_ = About{write, std::move(what), offset, nbytes};
  }

  // Set the request that the future waits for: a PyRequest, or any object with the methods of futures.Request, which
  // may combine several requests. If the request succeeds, `check` is called, which returns an exception or None.
  void start(nb::object request, nb::object check);
  void start(PyRequest request);

  // Make `result` the future's result in place of the array that the transfer fills. `deliver` fills `result` from that
  // array after the transfer; it returns an exception or None.
  void gives(nb::object result, nb::object deliver);

  bool is_begun() const { return request_ || several_.is_valid(); }
  bool done();
  bool cancel();
  bool cancelled();
  nb::object exception(std::optional<double> timeout_seconds);
  nb::object result(std::optional<double> timeout_seconds);

  // Run the coroutine to its next `await`, and return the asyncio.Future that the task must wait for. If the transfer
  // has ended, raise StopIteration with the result, or the exception.
  nb::object step();
  [[noreturn]] void raise_in_coroutine(const nb::args& error);

  // Create an asyncio.Future that completes when the transfer ends; for several combined requests, when one of them
  // ends.
  nb::object waiter();

  // Cancel the transfer, and give no warning if its outcome is never retrieved.
  void abandon();
  // Return the exception of a transfer that has ended, or None, after all checks.
  nb::object settle();
  nb::object request() const;
  // The caller's line that began the transfer, as (file, number), or None.
  nb::object begun_at() const { return begun_at_.is_valid() ? begun_at_ : nb::none(); }
  nb::object about() const;
  nb::str state();
  // Push `token` to the queue when the transfer ends.
  void notify(const PyCompletionQueue& queue, uint64_t token) const;
  // Raise RuntimeError in a forked child.
  void check_process() const;

  // Warn about every failed transfer whose outcome was never retrieved. Called when the interpreter is about to end.
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

  bool is_over() const;  // whether the request has ended
  void cancel_request();
  nb::object failure() const;  // the request's exception, or None
  bool was_cancelled(nb::handle exception) const;
  nb::object awaited();  // the result for a task that awaits the future; raises asyncio.CancelledError after a cancel
  void seen();           // the outcome was retrieved, so no warning is needed
  void note_caller();
  void warn_if_unseen();

  nb::ft_mutex mutex_;
  nb::object array_;
  nb::object keep_;  // released when the transfer has ended, because it may be a copy that only this future refers to
  nb::object check_;
  nb::object deliver_;
  std::optional<PlainArray> plain_;
  std::optional<PyRequest> request_;
  nb::object several_;  // set in place of request_ if the request is not a PyRequest
  nb::object exception_;
  nb::object begun_at_;
  std::optional<About> about_;
  bool asked_ = false;       // the outcome was retrieved
  bool cancelling_ = false;  // cancel() was called
  bool settled_ = false;     // exception_ is final
  uint64_t generation_ = 0;  // the fork generation of the process that began the transfer

  // The linked list of the futures whose outcome was not yet retrieved.
  struct Unseen;
  PyFuture* before_ = nullptr;
  PyFuture* behind_ = nullptr;
  bool listed_ = false;
};

// Reports the ends of transfers to one event loop, which watches fileno(). Only the loop's thread uses it.
class PyLoopListener {
 public:
  // Complete `waiter`, an asyncio.Future, when the future's transfer ends.
  void add(const PyFuture& future, nb::object waiter);
  // Complete the waiters of the transfers that have ended. The loop calls this when fileno() is readable.
  void deliver();
  int fileno() const { return queue_.core->descriptor(); }

  int traverse(visitproc visit, void* arg) const;
  void clear() { waiters_.clear(); }

 private:
  PyCompletionQueue queue_;
  std::unordered_map<uint64_t, nb::object> waiters_;  // by their tokens
  uint64_t last_ = 0;                                 // the last token
};

void bind_futures(nb::module_& module);

}  // namespace tensorferry
