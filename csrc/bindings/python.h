// Shared by all bindings: nanobind's casters for standard library types (without these headers a cast would fail at run
// time), the conversion of faults to exceptions, and waits that Ctrl-C ends.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/after_fork.h"
#include "base/fault.h"
#include "base/interruption.h"
#include "bindings/without_gil.h"

namespace tensorferry {

namespace nb = nanobind;
using namespace nb::literals;
using std::chrono::milliseconds;

// The interval at which a waiting thread checks for signals such as Ctrl-C.
constexpr milliseconds signal_interval{40};

// Call a Python object. Unlike nanobind's call operator, this may be the thread's last call: see until_exit().
template <typename... Arguments>
nb::object call_python(nb::handle function, const Arguments&... arguments) {
  const nb::tuple all = nb::make_tuple(arguments...);
  PyObject* const found = until_exit([&] { return PyObject_Call(function.ptr(), all.ptr(), nullptr); });
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

// The casters and the constructors of nanobind are noexcept: a failed allocation in them ends the process. Therefore
// arguments of any length are converted by numbers_of(), and instances are made by instance_of() and new_instance(),
// because the table in which nanobind keeps all instances may have to grow for each of them.
template <typename T>
std::vector<T> numbers_of(nb::handle sequence) {
  std::vector<T> numbers;
  numbers.reserve(nb::len(sequence));
  for (nb::handle number : sequence) numbers.push_back(nb::cast<T>(number));
  return numbers;
}

// Return `value` as a Python object of its bound class.
template <typename T>
nb::typed<nb::object, T> instance_of(T value) {
  nb::object instance = nb::inst_alloc(nb::type<T>());
  new (nb::inst_ptr<T>(instance)) T(std::move(value));
  nb::inst_mark_ready(instance);
  return instance;
}

// Make an instance for a constructor. All bound classes that have constructors have these slots.
PyObject* new_instance(PyTypeObject* type, PyObject* arguments, PyObject* keywords) noexcept;
inline PyType_Slot constructed[] = {{Py_tp_new, reinterpret_cast<void*>(&new_instance)}, {0, nullptr}};

// Return an attribute. The name is interned: Python's cache of methods would keep each new string for the same name.
inline nb::object attribute(nb::handle object, const char* name) {
  return object.attr(nb::steal(PyUnicode_InternFromString(name)));
}

// Return an attribute of a module, mostly a function of this package.
inline nb::object imported(const char* module, const char* name) {
  return attribute(nb::module_::import_(module), name);
}

// Create the exception of tensorferry.errors that describes a fault.
nb::object exception_of(const Fault& fault);
[[noreturn]] void raise(nb::object exception);
[[noreturn]] void raise(const Fault& fault);
// Raise EngineUnavailableError.
[[noreturn]] void raise_unavailable(const std::string& reason);
// Raise RuntimeError in a forked child: `what` ("this file") belongs to the parent process.
[[noreturn]] void raise_forked(const char* what);

// Run the pending signal handlers of Python, and raise the exception that one of them raises. If a handler has forked
// and this is the child, whose fork generation differs from `generation`, call raise_forked(what).
void check_signals(uint64_t generation, const char* what);

inline bool is_interrupted(const std::optional<Fault>& fault) { return fault && fault->error_number == EINTR; }
template <typename T>
bool is_interrupted(const Result<T>& result) {
  return !result && result.fault().error_number == EINTR;
}
inline bool is_interrupted(bool over) { return !over; }

// Run an action that waits for the drive, without the GIL, and return its result. If a signal interrupts the action (it
// returns a fault with EINTR, or false), run the signal handlers, and if they raise nothing, run the action again.
template <typename Action>
auto interruptibly(const char* what, Action action) {
  const uint64_t generation = fork_generation();
  for (uint32_t attempt = 1;; ++attempt) {
    auto found = [&] {
      WithoutGil release;
      const InterruptionsReturned returned(attempt < max_interruptions);
      return action();
    }();
    if (!is_interrupted(found) || attempt >= max_interruptions) return found;
    check_signals(generation, what);
  }
}

// Run an action on a file like interruptibly(), and raise the fault that it returns, if any.
template <typename Action>
void raise_fault_of(Action action) {
  if (const std::optional<Fault> fault = interruptibly("this file", action)) raise(*fault);
}

// Call `step(slice)` again and again without the GIL, and run signal handlers in between. Each call waits for up to
// `slice` milliseconds. Returns true once `step` returns true, and false if the timeout expires before.
template <typename Step>
bool wait_interruptibly(std::optional<double> timeout_seconds, Step step) {
  using clock = std::chrono::steady_clock;
  // A timeout of more than a century counts as none: it would overflow the clock's type.
  const bool forever = !timeout_seconds || *timeout_seconds > 3e9;
  const uint64_t generation = fork_generation();
  const auto deadline = forever ? clock::time_point::max()
                                : clock::now() + std::chrono::duration_cast<clock::duration>(
                                                     std::chrono::duration<double>(std::max(*timeout_seconds, 0.0)));
  while (true) {
    milliseconds slice = signal_interval;
    if (!forever) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - clock::now());
      slice = std::clamp(left, milliseconds(0), signal_interval);
    }
    bool over;
    {
      WithoutGil release;
      over = step(slice);
    }
    if (over) return true;
    check_signals(generation, "this transfer");
    if (!forever && clock::now() >= deadline) return false;
  }
}

}  // namespace tensorferry
