// For a scope in which threads are started: they inherit a mask without the signals that Python's handlers, on threads
// of its own, are for. Those that a fault of the thread itself raises stay as they are: blocked, they would end the
// process without its handler (faulthandler, a sanitizer's) having run.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace tensorferry {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t signals;
    ::sigfillset(&signals);
    for (int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) ::sigdelset(&signals, own);
    blocked_ = ::pthread_sigmask(SIG_BLOCK, &signals, &before_) == 0;
  }
  ~SignalsBlocked() {
    if (blocked_) (void)::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
  bool blocked_;
};

}  // namespace tensorferry
