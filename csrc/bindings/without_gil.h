// Releasing the GIL for a scope, and calls into Python that may never return. Python before 3.14 ends a thread that
// acquires the GIL after the end of the interpreter by unwinding the thread's stack with a C++ exception
// (pthread_exit). A destructor must not let an exception pass, and neither can nanobind's functions. Such a thread
// therefore sleeps until the process has ended, as it does in Python 3.14.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace tensorferry {

// Return the result of a call that may acquire the GIL: of a function of Python's C API that can run Python code. The
// call must have no destructors on the stack, because they would run without the GIL.
template <typename Call>
auto until_exit(Call call) {
  try {
    return call();
    // abi::__forced_unwind is how glibc's pthread_exit unwinds the stack. glibc aborts the process if a handler ends
    // without rethrowing it, so this handler never ends.
  } catch (abi::__forced_unwind&) {
    while (true) (void)::pause();
  }
}

// Releases the GIL for a scope. Unlike nanobind's class, it can be destroyed after the end of the interpreter.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    until_exit([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace tensorferry
