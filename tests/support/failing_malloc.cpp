// One allocation of the threads of the core fails: that with the number that fail_at() got.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

extern "C" {

void* __libc_malloc(size_t);
static std::atomic<long> left;

void fail_at(long number) { left = number; }
long not_yet() { return left; }

void* malloc(size_t nbytes) noexcept {
  char name[16] = "";
  if (left > 0 && pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "tensorferry", 11) == 0 &&
      --left == 0) {
    errno = ENOMEM;
    return nullptr;
  }
  return __libc_malloc(nbytes);
}
}
