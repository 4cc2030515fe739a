// What bindings share: types of the standard library (without these a cast would fail, at run time), faults as
// exceptions, and waiting that Ctrl-C ends.
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

#include "base/after_fork.h"
#include "base/fault.h"
#include "base/interruption.h"
#include "bindings/without_gil.h"

namespace tensorferry {

namespace nb = nanobind;
using namespace nb::literals;
using std::chrono::milliseconds;

// Ctrl-C is noticed between waits of this length.
constexpr milliseconds signal_interval{40};

// Of tensorferry.errors.
nb::object exception_of(const Fault& fault);
[[noreturn]] void raise(nb::object exception);
[[noreturn]] void raise(const Fault& fault);
[[noreturn]] void raise_unavailable(const std::string& reason);
[[noreturn]] void raise_forked(const char* what);

// Raises what a signal handler has raised; in a child that a handler has forked, that `what` is the parent's.
void check_signals(uint64_t generation, const char* what);

inline bool is_interrupted(const std::optional<Fault>& fault) { return fault && fault->error_number == EINTR; }
template <typename T>
bool is_interrupted(const Result<T>& result) {
  return !result && result.fault().error_number == EINTR;
}
inline bool is_interrupted(bool over) { return !over; }

// Runs without the GIL what waits for the drive. Where a signal interrupts it (EINTR, or false), handlers are called;
// if they raise nothing, it is run again.
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

// The same, and raises the fault it returns.
template <typename Action>
void raise_fault_of(Action action) {
  if (const std::optional<Fault> fault = interruptibly("this file", action)) raise(*fault);
}

// Calls `step(milliseconds)` without the GIL until it returns true or time is over; returns whether it did.
template <typename Step>
bool wait_interruptibly(std::optional<double> timeout_seconds, Step step) {
  using clock = std::chrono::steady_clock;
  // Longer than a century is for ever, and fits the clock.
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
