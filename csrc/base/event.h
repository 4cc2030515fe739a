// An eventfd, by which one thread wakes another that sleeps in the kernel.
#pragma once

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

namespace tensorferry {

class Event {
 public:
  Event() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), error_number_(descriptor_ < 0 ? errno : 0) {}
  ~Event() {
    if (descriptor_ >= 0) (void)::close(descriptor_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  int descriptor() const { return descriptor_; }
  int error_number() const { return error_number_; }  // errno if the eventfd could not be created, otherwise 0

  void set() const {
    const uint64_t one = 1;
    // The write fails with EINTR, and is then repeated, or with EAGAIN if the counter is full. A full counter means
    // that the event is already set.
    while (::write(descriptor_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void clear() const {
    uint64_t count;
    // EAGAIN means that the event was not set.
    while (::read(descriptor_, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }

 private:
  int descriptor_;
  int error_number_;
};

}  // namespace tensorferry
