#include "bindings/future.h"

#include <errno.h>

#include <atomic>
#include <utility>

#include "bindings/python.h"

namespace tensorferry {
namespace {

// An attribute of a module, looked up once and never freed. It must be `static constinit`. A function-local static with
// an initializer would import while it holds the guard of C++, and hang if the import releases the GIL to a thread that
// then waits for the guard.
class Kept {
 public:
  constexpr Kept(const char* module, const char* name) : module_(module), name_(name) {}

  nb::handle get() {
    PyObject* found = object_.load(std::memory_order_acquire);
    if (found == nullptr) {
      nb::object own = imported(module_, name_);
      if (object_.compare_exchange_strong(found, own.ptr(), std::memory_order_acq_rel)) found = own.release().ptr();
    }
    return found;
  }

 private:
  const char* const module_;
  const char* const name_;
  std::atomic<PyObject*> object_{nullptr};
};

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// Call a method with at most one argument.
nb::object call(nb::handle object, PyObject* name, PyObject* argument = nullptr) {
  PyObject* const arguments[] = {object.ptr(), argument};
  PyObject* const found =
      until_exit([&] { return PyObject_VectorcallMethod(name, arguments, argument ? 2 : 1, nullptr); });
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

[[noreturn]] void raise_error(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw nb::python_error();
}

// Raise like the Python statement `raise error`.
[[noreturn]] void raise_object(nb::handle error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// The line outside this package from which the call came, as (file, number); null if there is none.
nb::object line_of_caller() {
  static PyObject* const file_name = interned("co_filename");
  static PyObject* const caller = interned("f_back");
  static constinit Kept package("tensorferry.base.caller_warnings", "PACKAGE");
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid() && !frame.is_none()) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const nb::object name = code.attr(nb::handle(file_name));
    if (PyUnicode_Tailmatch(name.ptr(), package.get().ptr(), 0, PY_SSIZE_T_MAX, -1) == 0) {
      return nb::make_tuple(name, PyFrame_GetLineNumber(raw));
    }
    frame = nb::object(frame.attr(nb::handle(caller)));
  }
  return {};
}

// The PyLoopListener of an event loop, as a Python object. Usually there is only one loop, so the last listener that
// was found is cached.
nb::object listener_of(const nb::object& loop) {
  struct Last {
    nb::ft_mutex mutex;
    nb::object loop;  // a weak reference
    nb::object listener;
    uint64_t generation = 0;
  };
  static Last& last = *new Last;
  static constinit Kept reference("weakref", "ref");
  nb::object known, listener;
  {
    nb::ft_lock_guard guard(last.mutex);
    if (last.generation == fork_generation()) known = last.loop, listener = last.listener;
  }
  if (known.is_valid() && known().is(loop)) return listener;
  listener = call_python(imported("tensorferry.transfer.futures", "_listener_of"), loop);
  known = reference.get()(loop);
  nb::object other = listener;
  nb::ft_lock_guard guard(last.mutex);
  std::swap(last.loop, known);
  std::swap(last.listener, other);  // the old objects are destroyed after the lock is released
  last.generation = fork_generation();
  return listener;
}

template <typename T>
int traverse_of(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<T>(self)->traverse(visit, arg) : 0;
}

template <typename T>
int clear_of(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->clear();
  return 0;
}

PyType_Slot future_slots[] = {constructed[0],
                              {Py_tp_traverse, reinterpret_cast<void*>(&traverse_of<PyFuture>)},
                              {Py_tp_clear, reinterpret_cast<void*>(&clear_of<PyFuture>)},
                              {0, nullptr}};

PyType_Slot listener_slots[] = {constructed[0],
                                {Py_tp_traverse, reinterpret_cast<void*>(&traverse_of<PyLoopListener>)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear_of<PyLoopListener>)},
                                {0, nullptr}};

}  // namespace

PyCompletionQueue::PyCompletionQueue() {
  if (core->error_number()) raise(Fault{.error_number = core->error_number(), .operation = "eventfd"});
}

// The futures whose outcome was not yet retrieved. If one of them has failed, it warns when it is freed. The list is
// needed for those that are not freed before the interpreter ends: see warn_of_unseen().
struct PyFuture::Unseen {
  nb::ft_mutex mutex;
  PyFuture* first = nullptr;

  static Unseen& get() {
    static Unseen& all = *new Unseen;
    return all;
  }

  void add(PyFuture& one) {
    nb::ft_lock_guard guard(mutex);
    one.behind_ = std::exchange(first, &one);
    if (one.behind_) one.behind_->before_ = &one;
    one.listed_ = true;
  }

  void remove(PyFuture& one) {
    nb::ft_lock_guard guard(mutex);
    if (one.listed_) unlink(one);
  }

  // Removes the first future and returns it, or null if there is none. Futures that another thread is freeing are only
  // removed: they warn in their destructor, which waits for the mutex.
  nb::object take() {
    nb::ft_lock_guard guard(mutex);
    while (PyFuture* const one = first) {
      unlink(*one);
      if (nb::object found = nb::find(one)) return found;
    }
    return {};
  }

 private:
  void unlink(PyFuture& one) {
    one.listed_ = false;
    if (one.behind_) one.behind_->before_ = one.before_;
    (one.before_ ? one.before_->behind_ : first) = one.behind_;
    one.before_ = one.behind_ = nullptr;
  }
};

PyFuture::PyFuture(nb::object array, nb::object keep) : array_(std::move(array)), keep_(std::move(keep)) {}

PyFuture::~PyFuture() {
  Unseen::get().remove(*this);
  const nb::error_scope others;  // preserves an exception that is in flight on this thread
  try {
    warn_if_unseen();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the warning about a future that was never asked for its outcome");
  } catch (const std::exception& error) {  // for example, out of memory
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

nb::object PyFuture::of_plain(nb::handle array, const PlainArray& memory) {
  static constinit Kept type("tensorferry.transfer.futures", "Future");
  nb::object future = nb::inst_alloc(type.get());
  auto* const core = new (nb::inst_ptr<PyFuture>(future)) PyFuture(nb::borrow(array), nb::object());
  nb::inst_mark_ready(future);
  core->plain_ = memory;
  return future;
}

void PyFuture::start(nb::object request, nb::object check) {
  if (!check.is_none()) check_ = std::move(check);
  PyRequest* of_core;
  if (nb::try_cast<PyRequest*>(request, of_core, false) && of_core != nullptr) return start(*of_core);
  several_ = std::move(request);
  note_caller();
}

void PyFuture::start(PyRequest request) {
  request_.emplace(std::move(request));
  note_caller();
}

void PyFuture::gives(nb::object result, nb::object deliver) {
  nb::ft_lock_guard guard(mutex_);
  std::swap(array_, result);  // the old array is destroyed after the lock is released
  if (deliver.is_none() || (settled_ && !exception_.is_none())) return;
  deliver_ = std::move(deliver);
  settled_ = false;
}

void PyFuture::note_caller() {
  generation_ = fork_generation();
  begun_at_ = line_of_caller();
  Unseen::get().add(*this);
}

bool PyFuture::is_over() const {
  if (request_) return request_->done();
  return several_.is_valid() && nb::cast<bool>(call_python(attribute(several_, "done")));
}

bool PyFuture::done() {
  if (!is_over()) return false;
  if (!settled_ && (check_.is_valid() || deliver_.is_valid() || plain_)) (void)settle();
  return true;
}

bool PyFuture::cancel() {
  if (done()) return false;
  cancelling_ = true;
  cancel_request();
  return true;
}

void PyFuture::cancel_request() {
  if (request_) {
    request_->core->cancel();
  } else {
    (void)call_python(attribute(several_, "cancel"));
  }
}

bool PyFuture::cancelled() { return done() && was_cancelled(settle()); }

bool PyFuture::was_cancelled(nb::handle exception) const {
  return cancelling_ && !exception.is_none() &&
         nb::cast<nb::object>(exception.attr("errno")).equal(nb::int_(ECANCELED));
}

nb::object PyFuture::failure() const {
  return request_ ? request_->exception() : call_python(attribute(several_, "exception"));
}

// Return the outcome of a transfer that has ended. All callers, on any thread, get the same object.
nb::object PyFuture::settle() {
  nb::object found, keep, check, deliver;
  std::optional<PlainArray> plain;
  {
    nb::ft_lock_guard guard(mutex_);
    if (settled_) return exception_;
    check = check_, deliver = deliver_, plain = plain_;  // copies: another thread may settle the future meanwhile
  }
  found = failure();
  if (found.is_none() && plain && is_moved(*plain)) {
    const nb::object moved = imported("tensorferry.errors", "memory_moved");
    found = call_python(moved, about_->what, about_->offset, about_->nbytes);
  }
  if (found.is_none() && check.is_valid()) found = call_python(check);
  if (found.is_none() && deliver.is_valid()) found = call_python(deliver);
  nb::ft_lock_guard guard(mutex_);
  if (!std::exchange(settled_, true)) {
    exception_ = std::move(found);
    keep = std::move(keep_);  // destroyed after the lock is released: a destructor may call back
    check_.reset();
    deliver_.reset();
    plain_.reset();
  }
  return exception_;
}

void PyFuture::seen() {
  asked_ = true;
  Unseen::get().remove(*this);
}

nb::object PyFuture::exception(std::optional<double> timeout_seconds) {
  if (!is_over()) {
    check_process();
    const bool over = request_ ? request_->wait(timeout_seconds)
                               : nb::cast<bool>(call_python(attribute(several_, "wait"), timeout_seconds));
    if (!over) {
      const nb::str text = nb::str("the transfer has not ended within {} seconds").format(nb::cast(timeout_seconds));
      raise_error(PyExc_TimeoutError, text.c_str());
    }
  }
  seen();
  nb::object found = settle();
  if (was_cancelled(found))
    raise_object(nb::module_::import_("concurrent.futures").attr("CancelledError")(nb::str(found)));
  return found;
}

nb::object PyFuture::result(std::optional<double> timeout_seconds) {
  const nb::object found = exception(timeout_seconds);
  if (!found.is_none()) raise_object(found);
  return array_.is_valid() ? array_ : nb::none();  // the garbage collector may have cleared it
}

nb::object PyFuture::awaited() {
  if (!cancelled()) return result(0.0);
  seen();
  raise_object(nb::module_::import_("asyncio").attr("CancelledError")(nb::str(exception_)));
}

nb::object PyFuture::step() {
  if (!done()) {
    static PyObject* const blocking = interned("_asyncio_future_blocking");
    nb::object found = waiter();
    // `await` sets this attribute on an object that it passes to the task.
    if (PyObject_SetAttr(found.ptr(), blocking, Py_True) != 0) throw nb::python_error();
    return found;
  }
  // Pass an instance: a tuple as the value of StopIteration would otherwise become its arguments.
  raise_object(nb::handle(PyExc_StopIteration)(awaited()));
}

void PyFuture::raise_in_coroutine(const nb::args& arguments) {
  if (arguments.size() == 0) raise_error(PyExc_TypeError, "throw() needs an exception");
  nb::object error = arguments[0];
  if (PyType_Check(error.ptr())) error = call_python(error);
  if (!PyExceptionInstance_Check(error.ptr())) raise_error(PyExc_TypeError, "throw() needs an exception");
  if (nb::isinstance(error, nb::module_::import_("asyncio").attr("CancelledError"))) (void)cancel();
  raise_object(error);
}

nb::object PyFuture::waiter() {
  static constinit Kept running_loop("asyncio", "get_running_loop");
  static PyObject* const create_future = interned("create_future");
  check_process();
  const nb::object loop = running_loop.get()();
  nb::object found = call(loop, create_future);
  const nb::object listener = listener_of(loop);
  nb::inst_ptr<PyLoopListener>(listener)->add(*this, found);
  return found;
}

void PyFuture::abandon() {
  cancel_request();
  seen();
}

nb::object PyFuture::request() const {
  if (request_) return instance_of(PyRequest(*request_));
  return several_.is_valid() ? several_ : nb::none();
}

nb::object PyFuture::about() const {
  if (!about_) return nb::none();
  return nb::make_tuple(about_->write ? "writing" : "reading", about_->what, about_->offset, about_->nbytes);
}

// The state for repr(). This does not count as retrieving the outcome, and does not call `check`.
nb::str PyFuture::state() {
  if (!is_begun()) return nb::str("never begun");
  if (!is_over()) return nb::str(cancelling_ ? "being cancelled" : "running");
  const nb::object found = settled_ ? exception_ : failure();
  if (found.is_none()) return nb::str("done");
  return was_cancelled(found) ? nb::str("cancelled") : nb::str("failed: {}").format(found);
}

void PyFuture::notify(const PyCompletionQueue& queue, uint64_t token) const {
  if (request_) {
    request_->check_process();
    request_->core->notify([queue = queue.core, token] { queue->push(token); });
  } else {
    (void)call_python(attribute(several_, "notify"), instance_of(PyCompletionQueue(queue)), token);
  }
}

void PyFuture::check_process() const {
  if (generation_ == fork_generation()) return;
  raise_error(PyExc_RuntimeError,
              "this transfer was begun before fork(): it belongs to the parent process and cannot complete here");
}

void PyFuture::warn_if_unseen() {
  if (!is_begun() || asked_ || generation_ != fork_generation()) return;  // in a forked child, the parent warns
  // The usual cases, recognized without Python: the transfer is still running, or has succeeded.
  if (request_ && (!request_->core->done() || request_->core->faults().empty()) &&
      !(settled_ && !exception_.is_none())) {
    return;
  }
  if (nb::cast<bool>(nb::module_::import_("sys").attr("is_finalizing")()) || !is_over()) return;
  // `check` is not called: the array was returned to the caller long ago, and may have changed since.
  const nb::object found = settled_ ? exception_ : failure();
  if (found.is_none() || was_cancelled(found)) return;
  const nb::str text = nb::str("the outcome of a failed transfer was never retrieved: {}").format(found);
  (void)call_python(imported("tensorferry.base.caller_warnings", "warn"), text, begun_at());
}

void PyFuture::warn_of_unseen() {
  while (const nb::object found = Unseen::get().take()) {
    auto* const one = nb::inst_ptr<PyFuture>(found);
    try {
      one->warn_if_unseen();
    } catch (nb::python_error& error) {  // where warnings are errors; the other futures warn as well
      error.discard_as_unraisable(found);
    }
    one->asked_ = true;
  }
}

int PyFuture::traverse(visitproc visit, void* arg) const {
  Py_VISIT(array_.ptr());
  Py_VISIT(keep_.ptr());
  Py_VISIT(check_.ptr());
  Py_VISIT(deliver_.ptr());
  Py_VISIT(several_.ptr());
  Py_VISIT(exception_.ptr());
  if (plain_) Py_VISIT(plain_->owner.ptr());
  return 0;
}

// The collector clears only unreachable futures. While a transfer is in progress, its future is reachable from the
// owner that the scheduler keeps (scheduler.h).
void PyFuture::clear() {
  const nb::object array = std::move(array_), keep = std::move(keep_), check = std::move(check_),
                   deliver = std::move(deliver_);
  const auto plain = std::exchange(plain_, std::nullopt);
}

void PyLoopListener::add(const PyFuture& future, nb::object waiter) {
  waiters_.emplace(++last_, std::move(waiter));
  future.notify(queue_, last_);
}

void PyLoopListener::deliver() {
  static PyObject* const done = interned("done");
  static PyObject* const set_result = interned("set_result");
  for (const uint64_t token : queue_.core->take()) {
    auto waiting = waiters_.extract(token);
    if (!waiting) continue;
    const nb::object waiter = waiting.mapped();
    if (call(waiter, done).is(nb::bool_(true))) continue;  // the task that awaited it was cancelled
    (void)call(waiter, set_result, Py_None);
  }
}

int PyLoopListener::traverse(visitproc visit, void* arg) const {
  for (const auto& [token, waiter] : waiters_) Py_VISIT(waiter.ptr());
  return 0;
}

void bind_futures(nb::module_& module) {
  nb::class_<PyCompletionQueue>(module, "CompletionQueue", nb::type_slots(constructed))
      .def(nb::init<>())
      .def("fileno", [](const PyCompletionQueue& queue) { return queue.core->descriptor(); })
      .def("take", [](const PyCompletionQueue& queue) { return queue.core->take(); })
      .def("wake", [](const PyCompletionQueue& queue) { queue.core->wake(); })
      .def(
          "wait",
          [](const PyCompletionQueue& queue, double timeout_seconds) {
            WithoutGil release;
            queue.core->wait(static_cast<int>(timeout_seconds * 1000));
          },
          "timeout_seconds"_a);

  nb::class_<PyLoopListener>(module, "LoopListener", nb::type_slots(listener_slots))
      .def(nb::init<>())
      .def("fileno", &PyLoopListener::fileno)
      .def("deliver", &PyLoopListener::deliver);

  nb::class_<PyFuture>(module, "Future", nb::is_weak_referenceable(), nb::type_slots(future_slots))
      .def(nb::init<nb::object, nb::object>(), "array"_a.none(), "keep"_a.none())
      .def("done", &PyFuture::done,
           "Return whether the transfer has ended: successfully, with a failure, or by :meth:`cancel`.")
      .def(
          "running", [](PyFuture& future) { return !future.done(); },
          "Return whether the transfer has not ended. A cancelled one runs until its blocks in flight are done.")
      .def("cancel", &PyFuture::cancel, R"(Cancel the transfer.

Blocks that were not passed to the kernel are dropped. Blocks in flight are completed: until then
:meth:`done` is False, :meth:`result` waits, and the array must stay as it is. A cancelled write leaves old
and new bytes in its range.

Returns
-------
bool
    False if the transfer had already ended, else True. Once the transfer has ended,
    :meth:`cancelled` shows whether this took effect.)")
      .def("cancelled", &PyFuture::cancelled,
           "Return whether :meth:`cancel` ended the transfer. If it moved all its bytes nevertheless, it is a success.")
      .def("exception", &PyFuture::exception, "timeout"_a.none() = nb::none(),
           nb::sig("def exception(self, timeout: float | None = None) -> tensorferry.errors.StorageError | None"),
           R"(Wait for the transfer, and return its exception or None.

Parameters
----------
timeout : float, optional
    Seconds to wait at most; None waits without a limit.

Raises
------
TimeoutError
    The transfer has not ended within ``timeout`` seconds. It continues.
concurrent.futures.CancelledError
    The transfer was cancelled.
RuntimeError
    This is a forked child, and the transfer belongs to its parent.)")
      .def("result", &PyFuture::result, "timeout"_a.none() = nb::none(),
           nb::sig("def result(self, timeout: float | None = None) -> typing.Any"),
           R"(Wait for the transfer, and return the array.

Raises
------
StorageError
    The transfer failed.
TimeoutError
    The transfer has not ended within ``timeout`` seconds. It continues.
concurrent.futures.CancelledError
    The transfer was cancelled.
RuntimeError
    This is a forked child, and the transfer belongs to its parent.)")
      // The future is its own `await` iterator, since the transfer has all the state that the iterator needs.
      .def(
          "__await__", [](nb::object self) { return self; },
          nb::sig("def __await__(self) -> collections.abc.Generator[typing.Any, None, typing.Any]"))
      .def("__next__", &PyFuture::step, nb::sig("def __next__(self) -> typing.Any"))
      .def(
          "send", [](PyFuture& future, nb::handle) { return future.step(); }, "value"_a.none(),
          nb::sig("def send(self, value: None) -> typing.Any"), "Resume as a coroutine; for asyncio.")
      .def(
          "throw", [](PyFuture& future, const nb::args& error) { future.raise_in_coroutine(error); },
          nb::sig("def throw(self, *error: typing.Any) -> typing.NoReturn"),
          "Resume as a coroutine with an exception; for asyncio.")
      .def(
          "close", [](PyFuture&) {}, "Do nothing. Coroutines have this method; the transfer continues.")
      .def("_start", nb::overload_cast<nb::object, nb::object>(&PyFuture::start), "request"_a,
           "check"_a.none() = nb::none())
      .def("_gives", &PyFuture::gives, "result"_a.none(), "deliver"_a.none() = nb::none())
      .def("_is_about", &PyFuture::is_about, "write"_a, "what"_a, "offset"_a, "nbytes"_a)
      .def("_abandon", &PyFuture::abandon)
      .def("_settle", &PyFuture::settle, nb::sig("def _settle(self) -> tensorferry.errors.StorageError | None"))
      .def("_waiter", &PyFuture::waiter, nb::sig("def _waiter(self) -> asyncio.Future[None]"))
      .def("_check_process", &PyFuture::check_process)
      .def_prop_ro("_request", &PyFuture::request, nb::sig("def _request(self) -> typing.Any"))
      .def_prop_ro("_about", &PyFuture::about, nb::sig("def _about(self) -> tuple[str, str, int, int] | None"))
      .def_prop_ro("_begun_at", &PyFuture::begun_at, nb::sig("def _begun_at(self) -> tuple[str, int] | None"))
      .def_prop_ro("_state", &PyFuture::state);

  module.def(
      "line_of_caller",
      [] {
        nb::object found = line_of_caller();
        return found.is_valid() ? found : nb::none();
      },
      nb::sig("def line_of_caller() -> tuple[str, int] | None"));
  module.def("warn_of_unseen_futures", &PyFuture::warn_of_unseen);
}

}  // namespace tensorferry
