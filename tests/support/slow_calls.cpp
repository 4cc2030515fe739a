// Calls of libc made slow, held, or failing, by rules that a test writes while the program runs; to be preloaded.
//
// Rules and a log of calls are in a file that is mapped here and in the test. TENSORFERRY_SLOW_CALLS names it, and
// slow_calls.py has the same layout. A call without a rule, on a file that is not watched, costs one load. Calls that
// do not go through libc, such as io_uring's submissions, are not seen.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

namespace {

enum Call : uint32_t {
  call_none,
  call_open,
  call_open_directory,
  call_close,
  call_fallocate,
  call_ftruncate,
  call_pread,
  call_pwrite,
  call_preadv2,
  call_preadv2_nowait,
  call_pwritev2,
  call_fdatasync,
  call_fsync,
  call_syncfs,
  call_statx,
  call_io_submit,
  call_sleep,
  call_pthread_create,
};

constexpr uint32_t rules_max = 16;
constexpr uint32_t seen_max = 1u << 16;
// Longer than the timeouts of all tests: a test that waits for a held call must fail instead of ending late.
constexpr int held_max_milliseconds = 150'000;

struct Rule {
  uint32_t call;  // none: no rule
  int32_t error;
  int32_t after;  // the call is made, and fails all the same
  int32_t hold;
  int32_t skip;   // so many are let through first
  int32_t times;  // then so many are hit; below 0: all
  uint32_t hits;
  uint32_t held;
  int64_t delay_microseconds;
  char where[88];  // a part of the path; empty: any
};

struct Seen {
  uint32_t call;
  int32_t thread;
  char name[16];
  char path[104];  // its end
};

struct Control {
  uint32_t seen_count;
  char watched[124];
  Rule rules[rules_max];
  Seen seen[seen_max];
};
static_assert(sizeof(Rule) == 128 && sizeof(Seen) == 128);

Control* control = nullptr;

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

// Defines `real`: the libc function that the surrounding function of this library hides.
#define NEXT(name) static const auto real = next<decltype(&::name)>(#name)

long real_syscall(long number, long a, long b, long c, long d) {
  using Function = long (*)(long, ...);
  static const auto real = next<Function>("syscall");
  return real(number, a, b, c, d);
}

void map_control() {
  const char* path = ::getenv("TENSORFERRY_SLOW_CALLS");
  if (path == nullptr || *path == '\0') return;
  const long descriptor = real_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(path), O_RDWR | O_CLOEXEC, 0);
  if (descriptor < 0) return;
  void* memory = ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(descriptor), 0);
  (void)real_syscall(SYS_close, descriptor, 0, 0, 0);
  if (memory != MAP_FAILED) control = static_cast<Control*>(memory);
}

// Children of a server (child.py) get its path when they are forked.
__attribute__((constructor)) void map_control_in_every_process() {
  map_control();
  (void)::pthread_atfork(nullptr, nullptr, map_control);
}

void sleep_microseconds(int64_t microseconds) {
  timespec time{static_cast<time_t>(microseconds / 1'000'000), static_cast<long>(microseconds % 1'000'000 * 1000)};
  while (real_syscall(SYS_nanosleep, reinterpret_cast<long>(&time), reinterpret_cast<long>(&time), 0, 0) != 0 &&
         errno == EINTR) {
  }
}

bool is_interesting(Call call) {
  if (control == nullptr) return false;
  if (control->watched[0] != '\0') return true;
  for (const Rule& rule : control->rules)
    if (__atomic_load_n(&rule.call, __ATOMIC_ACQUIRE) == call) return true;
  return false;
}

bool counted_down(int32_t& left) {
  int32_t value = __atomic_load_n(&left, __ATOMIC_RELAXED);
  while (value > 0)
    if (__atomic_compare_exchange_n(&left, &value, value - 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
  return false;
}

void note(Call call, const char* path) {
  const uint32_t index = __atomic_fetch_add(&control->seen_count, 1, __ATOMIC_RELAXED);
  if (index >= seen_max) return;
  Seen& seen = control->seen[index];
  seen.thread = static_cast<int32_t>(real_syscall(SYS_gettid, 0, 0, 0, 0));
  (void)::prctl(PR_GET_NAME, seen.name);
  const size_t length = ::strlen(path);
  const size_t cut = length < sizeof(seen.path) ? 0 : length - sizeof(seen.path) + 1;
  ::memcpy(seen.path, path + cut, length - cut + 1);
  __atomic_store_n(&seen.call, static_cast<uint32_t>(call), __ATOMIC_RELEASE);
}

// The effect of the rules on a call: the error to fail with, or 0; with `after` the call is made nevertheless.
struct Fate {
  int error = 0;
  bool after = false;
};

Fate meet(Call call, const char* path) {
  if (control->watched[0] != '\0' && (call == call_sleep || ::strstr(path, control->watched))) note(call, path);
  for (Rule& rule : control->rules) {
    if (__atomic_load_n(&rule.call, __ATOMIC_ACQUIRE) != call) continue;
    if (rule.where[0] != '\0' && !::strstr(path, rule.where)) continue;
    if (counted_down(rule.skip)) continue;
    if (rule.times >= 0 && !counted_down(rule.times)) continue;
    __atomic_fetch_add(&rule.hits, 1, __ATOMIC_RELAXED);
    const Fate fate{rule.error, rule.after != 0};
    if (rule.delay_microseconds > 0) sleep_microseconds(rule.delay_microseconds);
    if (rule.hold) {
      __atomic_fetch_add(&rule.held, 1, __ATOMIC_RELAXED);
      for (int waited = 0; waited < held_max_milliseconds && __atomic_load_n(&rule.hold, __ATOMIC_ACQUIRE); ++waited) {
        sleep_microseconds(1000);
      }
      __atomic_fetch_sub(&rule.held, 1, __ATOMIC_RELAXED);
    }
    return fate;
  }
  return {};
}

class PathOf {
 public:
  explicit PathOf(int descriptor) {
    char link[40];
    (void)::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = ::readlink(link, path_, sizeof path_ - 1);
    path_[length > 0 ? length : 0] = '\0';
  }
  // The path of a file that is opened relative to a directory.
  PathOf(int directory, const char* name) : PathOf(directory) {
    const size_t length = directory < 0 || name[0] == '/' ? 0 : ::strlen(path_);
    (void)::snprintf(path_ + length, sizeof path_ - length, length > 0 ? "/%s" : "%s", name);
  }
  const char* text() const { return path_; }

 private:
  char path_[1024];
};

template <typename Action>
auto with_rules(Call call, const char* path, Action action) -> decltype(action()) {
  const int before = errno;
  const Fate fate = meet(call, path);
  errno = before;
  if (fate.error == 0) return action();
  if (fate.after) (void)action();
  errno = fate.error;
  return -1;
}

template <typename Action>
auto on_descriptor(Call call, int descriptor, Action action) -> decltype(action()) {
  if (!is_interesting(call)) return action();
  const int before = errno;
  const PathOf path(descriptor);
  errno = before;
  return with_rules(call, path.text(), action);
}

template <typename Action>
int on_path(const char* path, int flags, Action action) {
  const Call call = (flags & O_DIRECTORY) == O_DIRECTORY ? call_open_directory : call_open;
  return is_interesting(call) ? with_rules(call, path, action) : action();
}

// Linux AIO: syncs are counted as syncs.
long submit(long context, long count, long blocks) {
  auto** list = reinterpret_cast<iocb**>(blocks);
  auto action = [&] { return real_syscall(SYS_io_submit, context, count, blocks, 0); };
  if (count < 1 || control == nullptr) return action();
  const int before = errno;
  for (long index = 0; index < count; ++index) {
    const uint16_t opcode = list[index]->aio_lio_opcode;
    const Call call = opcode == IOCB_CMD_FSYNC ? call_fsync : opcode == IOCB_CMD_FDSYNC ? call_fdatasync : call_none;
    if (call != call_none && is_interesting(call))
      (void)meet(call, PathOf(static_cast<int>(list[index]->aio_fildes)).text());
  }
  errno = before;
  return on_descriptor(call_io_submit, static_cast<int>(list[0]->aio_fildes), action);
}

}  // namespace

extern "C" {

#define OPEN(name)                                                        \
  int name(const char* path, int flags, ...) {                            \
    NEXT(name);                                                           \
    va_list arguments;                                                    \
    va_start(arguments, flags);                                           \
    const mode_t mode = static_cast<mode_t>(va_arg(arguments, unsigned)); \
    va_end(arguments);                                                    \
    return on_path(path, flags, [&] { return real(path, flags, mode); }); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                         \
  int name(int directory, const char* path, int flags, ...) {                                \
    NEXT(name);                                                                              \
    va_list arguments;                                                                       \
    va_start(arguments, flags);                                                              \
    const mode_t mode = static_cast<mode_t>(va_arg(arguments, unsigned));                    \
    va_end(arguments);                                                                       \
    const PathOf whole(directory, path);                                                     \
    return on_path(whole.text(), flags, [&] { return real(directory, path, flags, mode); }); \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int descriptor) {
  NEXT(close);
  return on_descriptor(call_close, descriptor, [&] { return real(descriptor); });
}

#define ON_DESCRIPTOR(result, call, name, parameters, arguments)                        \
  result name parameters {                                                              \
    NEXT(name);                                                                         \
    return on_descriptor(call, descriptor, [&]() -> result { return real arguments; }); \
  }
#define PARAMETERS(...) (int descriptor, __VA_ARGS__)
#define ARGUMENTS(...) (descriptor, __VA_ARGS__)

ON_DESCRIPTOR(int, call_fallocate, fallocate, PARAMETERS(int mode, off_t a, off_t b), ARGUMENTS(mode, a, b))
ON_DESCRIPTOR(int, call_fallocate, fallocate64, PARAMETERS(int mode, off64_t a, off64_t b), ARGUMENTS(mode, a, b))
ON_DESCRIPTOR(int, call_ftruncate, ftruncate, PARAMETERS(off_t size), ARGUMENTS(size))
ON_DESCRIPTOR(int, call_ftruncate, ftruncate64, PARAMETERS(off64_t size), ARGUMENTS(size))
ON_DESCRIPTOR(ssize_t, call_pread, pread, PARAMETERS(void* m, size_t n, off_t at), ARGUMENTS(m, n, at))
ON_DESCRIPTOR(ssize_t, call_pread, pread64, PARAMETERS(void* m, size_t n, off64_t at), ARGUMENTS(m, n, at))
ON_DESCRIPTOR(ssize_t, call_pwrite, pwrite, PARAMETERS(const void* m, size_t n, off_t at), ARGUMENTS(m, n, at))
ON_DESCRIPTOR(ssize_t, call_pwrite, pwrite64, PARAMETERS(const void* m, size_t n, off64_t at), ARGUMENTS(m, n, at))
ON_DESCRIPTOR(int, call_fdatasync, fdatasync, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, call_fsync, fsync, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, call_syncfs, syncfs, (int descriptor), (descriptor))

#define PREADV2(name, offset_type)                                                                     \
  ssize_t name(int descriptor, const iovec* parts, int count, offset_type at, int flags) {             \
    NEXT(name);                                                                                        \
    const Call call = flags & RWF_NOWAIT ? call_preadv2_nowait : call_preadv2;                         \
    return on_descriptor(call, descriptor, [&] { return real(descriptor, parts, count, at, flags); }); \
  }
PREADV2(preadv2, off_t)
PREADV2(preadv64v2, off64_t)

#define PWRITEV2(name, offset_type)                                                                             \
  ssize_t name(int descriptor, const iovec* parts, int count, offset_type at, int flags) {                      \
    NEXT(name);                                                                                                 \
    return on_descriptor(call_pwritev2, descriptor, [&] { return real(descriptor, parts, count, at, flags); }); \
  }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

int statx(int directory, const char* path, int flags, unsigned mask, struct statx* status) {
  NEXT(statx);
  auto action = [&] { return real(directory, path, flags, mask, status); };
  if (path != nullptr && *path != '\0')
    return is_interesting(call_statx) ? with_rules(call_statx, path, action) : action();
  return on_descriptor(call_statx, directory, action);
}

int nanosleep(const timespec* time, timespec* left) {
  NEXT(nanosleep);
  auto action = [&] { return real(time, left); };
  return is_interesting(call_sleep) ? with_rules(call_sleep, "", action) : action();
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  NEXT(clock_nanosleep);
  if (is_interesting(call_sleep)) (void)meet(call_sleep, "");
  return real(clock, flags, time, left);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  NEXT(pthread_create);
  if (is_interesting(call_pthread_create)) {
    if (const Fate fate = meet(call_pthread_create, ""); fate.error != 0) return fate.error;
  }
  return real(thread, attributes, start, argument);
}

long syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  using Function = long (*)(long, ...);
  static const auto real = next<Function>("syscall");
  auto action = [&] { return real(number, a[0], a[1], a[2], a[3], a[4], a[5]); };
  const int descriptor = static_cast<int>(a[0]);
  switch (number) {
    case SYS_io_submit: return submit(a[0], a[1], a[2]);
    case SYS_statx: return on_descriptor(call_statx, descriptor, action);
    case SYS_preadv2: return on_descriptor(a[5] & RWF_NOWAIT ? call_preadv2_nowait : call_preadv2, descriptor, action);
    case SYS_pwritev2: return on_descriptor(call_pwritev2, descriptor, action);
    default: return action();
  }
}

}  // extern "C"
