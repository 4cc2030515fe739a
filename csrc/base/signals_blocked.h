// Blocks signals in a scope that starts threads. A new thread inherits the signal mask, so the kernel delivers signals
// only to the application's threads, where Python's handlers must run. Signals that report a fault of the thread itself
// stay unblocked: if SIGSEGV were blocked, the kernel would end the process without running the signal's handler
// (faulthandler's or a sanitizer's).
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
