// The planner, exhaustively over small numbers: every byte exactly once, by a way that the rules allow.
#include "transfer/plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <source_location>
#include <vector>

namespace tensorferry {
namespace {

// Far from 0, which is a gap, and aligned to whatever these tests ask for.
constexpr uint64_t base = uint64_t{1} << 40;

struct Piece {
  uint64_t address;  // 0: a gap
  uint64_t nbytes;
};

Segments segments_of(const std::vector<Piece>& pieces) {
  Segments segments;
  for (const auto& [address, nbytes] : pieces) segments.add(reinterpret_cast<char*>(address), nbytes);
  return segments;
}

// A REQUIRE for millions of calls: doctest's needs a microsecond, or ten under ThreadSanitizer.
void must(bool holds, std::source_location place = std::source_location::current()) {
  if (!holds) FAIL("line ", place.line());
}

// Checks the invariants of each block of a plan. Returns the number of blocks.
uint64_t check(const PlanInput& input, const Segments& segments, bool on_gpu = false) {
  const Plan plan(input, segments);
  const uint64_t nbytes = segments.nbytes();
  const uint64_t alignment = input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;
  uint64_t position = 0;
  uint64_t count = 0;
  while (true) {
    const uint64_t skipped = plan.skip(position);
    segments.each(position, skipped - position, [](const Segments::Piece& piece) { must(piece.is_gap()); });
    position = skipped;
    if (position == nbytes) break;
    const PlannedBlock block = plan.block_at(position);
    must(block.begin == position);
    must(block.nbytes > 0);
    must(block.begin + block.nbytes <= nbytes);
    // The kernel moves at least the bytes that the block carries.
    must(block.io_offset <= input.offset + block.begin);
    must(block.io_offset + block.io_nbytes >= input.offset + block.begin + block.nbytes);
    if (block.direct) {
      must(input.direct);
      must(block.io_offset % alignment == 0);
      must(block.io_nbytes % alignment == 0);
    } else {
      must(plan.uses_buffered());
    }
    if (!block.direct || !block.bounced || input.write) {
      // No byte outside the request may be written, or read into the caller's memory.
      must(block.io_offset == input.offset + block.begin);
      must(block.io_nbytes == block.nbytes);
    }
    if (block.bounced) {
      must(block.io_nbytes <= std::max<uint64_t>(input.bounce_nbytes, 2 * alignment));
    } else {
      const auto piece = segments.at(position);
      must(!piece.is_gap());
      must(piece.nbytes >= block.nbytes);
      if (on_gpu) must(input.cufile && block.direct);
      if (block.direct) must(reinterpret_cast<uintptr_t>(piece.memory) % input.memory_alignment == 0);
    }
    const PlannedBlock cached = plan.buffered(block);
    must(cached.bounced || !block.bounced || segments.at(position).nbytes >= block.nbytes);
    if (input.verified_nbytes) {
      must(block.bounced && cached.bounced);
      must(block.begin % input.verified_nbytes == 0);
      must(block.nbytes % input.verified_nbytes == 0 || block.begin + block.nbytes == nbytes);
    }
    position += block.nbytes;
    ++count;
  }
  return count;
}

uint64_t check(const PlanInput& input, uint64_t address, uint64_t nbytes) {
  return check(input, Segments(reinterpret_cast<char*>(address), nbytes));
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
              input.offset = offset;
              input.memory_alignment = 4;
              input.offset_alignment = 8;
              input.page_nbytes = 16;
              input.block_nbytes = block;
              input.bounce_nbytes = 32;
              check(input, base + memory, nbytes);
              // Some segments, a gap among them.
              const uint64_t third = nbytes / 3;
              check(input, segments_of({{base + memory, third},
                                        {write ? 2 * base : 0, third},
                                        {3 * base, 0},
                                        {4 * base + 8, nbytes - 2 * third}}));
              if (write) continue;
              input.verified_nbytes = 8;
              check(input, base + memory, nbytes);
            }
}

TEST_CASE("memory of a GPU has a buffer, but where cuFile moves it") {
  auto gate = std::shared_ptr<cuda::Gate>(reinterpret_cast<cuda::Gate*>(base), [](cuda::Gate*) {});
  for (bool write : {false, true})
    for (bool direct : {false, true})
      for (bool cufile : {false, true})
        for (uint64_t offset = 0; offset < 40; ++offset)
          for (uint64_t nbytes = 1; nbytes < 70; ++nbytes) {
            PlanInput input;
            input.write = write;
            input.direct = direct;
            input.cufile = cufile && direct;
            input.offset = offset;
            input.memory_alignment = cufile ? 1 : 4;
            input.offset_alignment = 8;
            input.page_nbytes = 16;
            input.block_nbytes = 24;
            input.bounce_nbytes = 32;
            check(input, Segments(reinterpret_cast<char*>(base + 1), nbytes, gate), true);
          }
}

TEST_CASE("short segments share a buffer, and long ones that are aligned have none") {
  constexpr uint64_t long_nbytes = 4 << 20, short_nbytes = 16 << 10;
  std::vector<Piece> pieces;
  for (uint64_t index = 0; index < 100; ++index) pieces.push_back({base + index * 2 * short_nbytes, short_nbytes});
  pieces.push_back({2 * base, long_nbytes});
  pieces.push_back({3 * base, short_nbytes});
  pieces.push_back({4 * base + 1, long_nbytes});
  const Segments segments = segments_of(pieces);
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  for (bool write : {false, true}) {
    input.write = write;
    check(input, segments);
    const Plan plan(input, segments);
    uint64_t straight = 0;
    for (uint64_t at = 0; at < segments.nbytes(); at += plan.block_at(at).nbytes) {
      const auto block = plan.block_at(at);
      if (!block.bounced) straight += block.nbytes;
      if (at == 0) CHECK(block.nbytes == 1 << 20);
    }
    CHECK(straight == long_nbytes);
  }
}

TEST_CASE("a read skips long gaps, except those with a wanted checksum") {
  const Segments segments = segments_of({{0, 5 << 20}, {base, 1000}, {0, 1000}, {base, 1000}, {0, 5 << 20}});
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  CHECK(check(input, segments) == 1);
  const Plan plan(input, segments);
  CHECK(plan.skip(0) == 5 << 20);
  CHECK(plan.block_at(5 << 20).nbytes == 3000);
  input.all_wanted = true;
  CHECK(check(input, segments) == 11);
}

TEST_CASE("aligned memory and range need no copy and no page cache") {
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.offset = 4096;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  for (bool write : {false, true}) {
    input.write = write;
    const Segments memory(reinterpret_cast<char*>(base + 512 * 7), 10 << 20);
    const Plan plan(input, memory);
    CHECK(check(input, memory) == 10);
    CHECK_FALSE(plan.uses_buffered());
    CHECK(plan.block_at(0).direct);
    CHECK_FALSE(plan.block_at(0).bounced);
  }
}

TEST_CASE("a ragged write keeps whole pages for its edges") {
  PlanInput input;
  input.write = input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.offset = 7;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  const Segments memory(reinterpret_cast<char*>(base + 64), (1 << 20) + 1'000'003);
  check(input, memory);
  const Plan plan(input, memory);
  CHECK_FALSE(plan.block_at(0).direct);
  CHECK_FALSE(plan.block_at(0).bounced);
  CHECK(plan.block_at(0).nbytes == 4096 - 7);
  CHECK(plan.block_at(4096 - 7).direct);
  CHECK(plan.block_at(4096 - 7).bounced);
}

TEST_CASE("sizes beyond 4 GiB and offsets near the maximum size of files") {
  PlanInput input;
  input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.offset = (uint64_t{1} << 62) + 1;
  input.block_nbytes = uint64_t{1} << 30;
  input.bounce_nbytes = 1 << 20;
  for (bool write : {false, true}) {
    input.write = write;
    CHECK(check(input, base + 64, (uint64_t{5} << 30) + 3) >= 5 * 1024);
  }
}

}  // namespace
}  // namespace tensorferry
