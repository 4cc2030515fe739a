// Releases the GIL for a scope. Unlike nanobind's class, it can be destroyed after the end of the interpreter. Python
// before 3.14 ends a thread that then acquires the GIL by unwinding the thread's stack with a C++ exception
// (pthread_exit). A destructor must not let an exception pass, and neither can nanobind's functions. Such a thread
// therefore sleeps until the process has ended, as it does in Python 3.14.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace tensorferry {

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
      // abi::__forced_unwind is how glibc's pthread_exit unwinds the stack. glibc aborts the process if a handler ends
      // without rethrowing it, so this handler never ends.
    } catch (abi::__forced_unwind&) {
      while (true) (void)::pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace tensorferry
