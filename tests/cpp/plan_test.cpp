// The planner, exhaustively over small numbers: every byte exactly once, by a way that the rules allow.
#include "transfer/plan.h"

#include <doctest/doctest.h>

#include <algorithm>

namespace tensorferry {
namespace {

// Walks a plan and checks what must hold for each of its blocks. Returns how many there are.
uint64_t check(const PlanInput& input) {
  const Plan plan(input);
  uint64_t position = 0;
  uint64_t count = 0;
  bool buffered_seen = false;
  while (position < input.nbytes) {
    const PlannedBlock block = plan.block_at(position);
    REQUIRE(block.begin == position);
    REQUIRE(block.nbytes > 0);
    REQUIRE(block.begin + block.nbytes <= input.nbytes);
    // What the kernel moves covers what the block carries.
    REQUIRE(block.io_offset <= input.offset + block.begin);
    REQUIRE(block.io_offset + block.io_nbytes >= input.offset + block.begin + block.nbytes);
    const uint64_t alignment =
        input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;
    if (block.way != Way::buffered) {
      REQUIRE(input.direct);
      REQUIRE(block.io_offset % alignment == 0);
      REQUIRE(block.io_nbytes % alignment == 0);
    }
    if (block.way != Way::bounced || input.write) {
      // Nothing outside the request may be written, nor read into the caller's memory.
      REQUIRE(block.io_offset == input.offset + block.begin);
      REQUIRE(block.io_nbytes == block.nbytes);
    }
    if (block.way == Way::direct) REQUIRE((input.memory + block.begin) % input.memory_alignment == 0);
    const bool staged = input.staging == Staging::all || (input.staging == Staging::edges && block.way != Way::direct);
    if (input.staging == Staging::all) REQUIRE(block.way != Way::direct);
    if (staged) REQUIRE(block.io_nbytes <= std::max<uint64_t>(input.bounce_nbytes, 2 * alignment));
    if (block.way == Way::bounced) REQUIRE(block.io_nbytes <= std::max<uint64_t>(input.bounce_nbytes, 2 * alignment));
    buffered_seen |= block.way == Way::buffered;
    position += block.nbytes;
    ++count;
  }
  if (buffered_seen) REQUIRE(plan.uses_buffered());
  return count;
}

TEST_CASE("every byte is carried once, by a way that its alignment allows") {
  for (bool write : {false, true})
    for (bool direct : {false, true})
      for (uint64_t memory : {0u, 1u, 4u, 8u})
        for (uint64_t offset = 0; offset < 40; ++offset)
          for (uint64_t nbytes = 0; nbytes < 70; ++nbytes)
            for (uint64_t block : {1u, 5u, 8u, 24u, 1000u}) {
              PlanInput input;
              input.write = write;
              input.direct = direct;
              input.memory = memory;
              input.offset = offset;
              input.nbytes = nbytes;
              input.memory_alignment = 4;
              input.offset_alignment = 8;
              input.page_nbytes = 16;
              input.block_nbytes = block;
              input.bounce_nbytes = 32;
              check(input);
              input.staging = Staging::all;
              check(input);
              input.staging = Staging::edges;
              input.memory_alignment = 1;
              check(input);
            }
}

TEST_CASE("aligned memory and range need no copy and no page cache") {
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.memory = 512 * 7;
  input.offset = 4096;
  input.nbytes = 10 << 20;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  for (bool write : {false, true}) {
    input.write = write;
    const Plan plan(input);
    CHECK(check(input) == 10);
    CHECK_FALSE(plan.uses_buffered());
    CHECK(plan.block_at(0).way == Way::direct);
  }
}

TEST_CASE("a ragged write keeps whole pages for its edges") {
  PlanInput input;
  input.write = input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.memory = 64;
  input.offset = 7;
  input.nbytes = (1 << 20) + 1'000'003;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  check(input);
  const Plan plan(input);
  CHECK(plan.block_at(0).way == Way::buffered);
  CHECK(plan.block_at(0).nbytes == 4096 - 7);
  CHECK(plan.block_at(4096 - 7).way == Way::bounced);
}

TEST_CASE("sizes beyond 4 GiB and offsets near the end of what a file can hold") {
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.memory = 64;
  input.nbytes = (uint64_t{5} << 30) + 3;
  input.offset = (uint64_t{1} << 62) + 1;
  input.block_nbytes = uint64_t{1} << 30;
  input.bounce_nbytes = 1 << 20;
  for (bool write : {false, true}) {
    input.write = write;
    CHECK(check(input) >= 5 * 1024);
  }
}

}  // namespace
}  // namespace tensorferry
