// System calls that the kernel refuses: a seccomp filter of one thread, as a sandbox would put up.
#pragma once

#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <thread>

namespace tensorferry {

// From now on system call `number` fails in this thread: always, or where argument `position` has a value, or where it
// has another.
enum class Where { always, equal, different };
inline void refuse_calls(long number, int error_number, Where where = Where::always, size_t position = 0,
                         uint32_t value = 0) {
  const auto load = [](size_t offset) {
    return sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
  };
  const auto unless_equal = [](uint32_t expected, uint8_t skip) {
    return sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, expected, 0, skip);
  };
  const auto when_equal = [](uint32_t expected, uint8_t skip) {
    return sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, expected, skip, 0);
  };
  sock_filter program[] = {
      load(offsetof(seccomp_data, nr)),
      unless_equal(static_cast<uint32_t>(number), 3),
      load(offsetof(seccomp_data, args) + 8 * position),
      where == Where::equal       ? unless_equal(value, 1)
      : where == Where::different ? when_equal(value, 1)
                                  : sock_filter BPF_STMT(BPF_LD | BPF_IMM, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{sizeof program / sizeof *program, program};
  REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  REQUIRE(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
}

// Runs `body` in a thread where `number` fails if its first argument is `argument`.
inline void where_call_fails(long number, uint32_t argument, int error_number, const std::function<void()>& body) {
  std::thread([&] {
    refuse_calls(number, error_number, Where::equal, 0, argument);
    body();
  }).join();
}

}  // namespace tensorferry
