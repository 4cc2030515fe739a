// Tests of the decision that the first reads of a mount make: its result and its time.
#include "file/first_reads.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tensorferry {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t block_nbytes = uint64_t{1} << 20;

// Reads so many blocks; returns how many of them use the page cache.
int read_blocks(FirstReads& reads, int count, milliseconds direct, milliseconds cached,
                uint64_t nbytes = block_nbytes) {
  int through_cache = 0;
  for (int block = 0; block < count; ++block) {
    const bool way = reads.through_cache(nbytes);
    reads.took(!way, nbytes, way ? cached : direct);
    through_cache += way;
  }
  return through_cache;
}

TEST_CASE("of the first large blocks some go through the page cache, and none later unless that is much faster") {
  for (const auto& [cached_ms, share] : {std::pair(6, 0), std::pair(10, 0), std::pair(40, 0), std::pair(4, 100)}) {
    FirstReads reads;
    CHECK(read_blocks(reads, 16, milliseconds(10), milliseconds(cached_ms)) == 8);
    CHECK(read_blocks(reads, 100, milliseconds(10), milliseconds(cached_ms)) == share);
    // The decision is permanent, independent of later times.
    CHECK(read_blocks(reads, 100, milliseconds(1), milliseconds(1)) == share);
  }
}

TEST_CASE("short blocks are not compared, and go where long ones have shown to be faster") {
  const uint64_t nbytes = FirstReads::min_compared_nbytes - 1;
  FirstReads reads;
  CHECK(read_blocks(reads, 100, milliseconds(10), milliseconds(1), nbytes) == 0);
  read_blocks(reads, 16, milliseconds(10), milliseconds(1));
  CHECK(read_blocks(reads, 100, milliseconds(10), milliseconds(1), nbytes) == 100);
}

TEST_CASE("blocks that never end through the page cache make no decision, and no more blocks use it") {
  FirstReads reads;
  int through_cache = 0;
  for (int block = 0; block < 100; ++block) {
    if (reads.through_cache(block_nbytes)) {
      ++through_cache;
    } else {
      reads.took(true, block_nbytes, milliseconds(10));
    }
  }
  CHECK(through_cache == 8);
}

TEST_CASE("the latency is that of the fastest direct read of any length") {
  FirstReads reads;
  CHECK(reads.latency().count() == 0);
  reads.took(true, block_nbytes, milliseconds(30));
  reads.took(true, 4096, milliseconds(10));
  reads.took(false, 4096, milliseconds(1));
  reads.took(true, 4096, milliseconds(20));
  CHECK(reads.latency() == milliseconds(10));
}

TEST_CASE("all files of a mount share the result of its first reads, and a forked child decides again") {
  const auto reads = FirstReads::of(1);
  CHECK(FirstReads::of(1) == reads);
  CHECK(FirstReads::of(2) != reads);
  reads->took(true, 4096, milliseconds(10));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(FirstReads::of(1)->latency().count() == 0 ? 0 : 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 0);
  // So many mounts at most, whatever number they have.
  for (uint64_t mount = 100; mount < 200; ++mount) (void)FirstReads::of(mount);
  CHECK(FirstReads::of(1) != reads);
}

}  // namespace
}  // namespace tensorferry
