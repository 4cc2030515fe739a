// Lets go of the GIL for a scope. Unlike nanobind's, it may end when the interpreter does: Python before 3.14 then ends
// a thread that asks for the GIL by unwinding it (pthread_exit), which a destructor must not let pass, and nanobind's
// frames cannot; such a thread stays where it is, as Python 3.14 has it, until the process is gone.
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
