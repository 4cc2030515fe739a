#include "base/interruption.h"

#include <doctest/doctest.h>

using namespace tensorferry;

TEST_CASE("an interrupted call is retried a bounded number of times, except by callers that check for signals") {
  int calls = 0;
  const auto interrupted = [&](int times) {
    calls = 0;
    return [&calls, times] {
      if (++calls <= times) {
        errno = EINTR;
        return -1;
      }
      return 5;
    };
  };
  CHECK(uninterrupted(interrupted(0)) == 5);
  CHECK(calls == 1);
  CHECK(uninterrupted(interrupted(3)) == 5);
  CHECK(calls == 4);
  CHECK(uninterrupted(interrupted(1'000'000)) == -1);
  CHECK(errno == EINTR);
  CHECK(calls == static_cast<int>(max_interruptions));
  {
    const InterruptionsReturned returned;
    CHECK(uninterrupted(interrupted(3)) == -1);
    CHECK(errno == EINTR);
    CHECK(calls == 1);
    {
      const InterruptionsReturned by_nobody(false);
      CHECK(uninterrupted(interrupted(3)) == 5);
    }
    CHECK(uninterrupted(interrupted(1)) == -1);
  }
  CHECK(uninterrupted(interrupted(1)) == 5);
  CHECK(uninterrupted([&] {
          errno = EIO;
          return ++calls, -1;
        }) == -1);
  CHECK(calls == 3);
}
