// Rows of a table: their order, their memory, and the blocks in which the page cache gives them.
#include "transfer/gather.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "transfer/cached_rows.h"
#include "transfer/plan.h"

namespace tensorferry {
namespace {

std::vector<uint64_t> numbers_of(const OrderedRows& ordered) {
  std::vector<uint64_t> rows;
  for (const auto& one : ordered.rows) rows.push_back(one.row);
  return rows;
}

Segments segments_of_rows(const RowMemory& memory) {
  Segments segments;
  for (const auto& piece : memory.pieces) segments.add(reinterpret_cast<char*>(piece.address), piece.nbytes);
  segments.are_rows(memory.copies);
  return segments;
}

TEST_CASE("numbers are sorted, count from the end, and are told where they are of no row") {
  const std::vector<int64_t> numbers{3, -1, 0, 3, -10};
  CHECK(numbers_of(order_rows(numbers, 10, false)) == std::vector<uint64_t>{0, 0, 3, 3, 9});
  CHECK(order_rows(numbers, 10, false).rows[2].place == 0);
  CHECK(order_rows(numbers, 10, false).rows[3].place == 3);
  CHECK(order_rows(numbers, 9, false).outside == 4);
  CHECK(order_rows(numbers, 3, false).outside == 0);
  CHECK(order_rows(numbers, 10, true).outside == 1);
  CHECK(order_rows({}, 0, false).rows.empty());
  for (const int64_t number : {INT64_MIN, int64_t{-1}, int64_t{0}, INT64_MAX}) {
    CHECK(order_rows(std::vector<int64_t>{number}, 0, false).outside == 0);
  }
}

TEST_CASE("every wanted byte has its places, and gaps fill what lies between") {
  std::mt19937 random(17);
  for (int round = 0; round < 300; ++round) {
    const uint64_t row_nbytes = 1 + random() % 20, stride = row_nbytes + (round % 2) * (random() % 9);
    const uint64_t row_count = 1 + random() % 40;
    const bool write = round % 3 == 0;
    std::vector<int64_t> numbers(random() % 50);
    for (auto& number : numbers) number = static_cast<int64_t>(random() % row_count);
    const auto ordered = order_rows(numbers, row_count, false);
    if (ordered.rows.empty()) continue;
    std::vector<char> memory(numbers.size() * row_nbytes, '?');
    const auto segments = segments_of_rows(memory_of_rows(ordered.rows, {row_nbytes, stride}, memory.data(), write));
    const uint64_t first = ordered.rows.front().row;
    const auto byte_at = [](uint64_t position) { return static_cast<char>(position % 251); };
    for (size_t index = 0; index < segments.count(); ++index) {
      const auto& piece = segments[index];
      REQUIRE(piece.nbytes > 0);
      if (piece.is_gap()) continue;
      for (uint64_t at = 0; at < piece.nbytes; ++at) piece.memory[at] = byte_at(first * stride + piece.begin + at);
      segments.each_copy(piece, [&](char* further) { std::memcpy(further, piece.memory, piece.nbytes); });
    }
    for (size_t place = 0; place < numbers.size(); ++place) {
      const auto row = static_cast<uint64_t>(numbers[place]);
      size_t last = place;
      for (size_t later = place; later < numbers.size(); ++later) {
        if (numbers[later] == numbers[place]) last = later;
      }
      for (uint64_t at = 0; at < row_nbytes; ++at) {
        const bool there = memory[place * row_nbytes + at] == byte_at(row * stride + at);
        const bool untouched = memory[place * row_nbytes + at] == '?';
        REQUIRE((write && last != place ? untouched : there));
      }
    }
  }
}

TEST_CASE("neighbours that stay neighbours are one piece") {
  std::vector<char> memory(1000);
  std::vector<int64_t> numbers(100);
  std::iota(numbers.begin(), numbers.end(), 5);
  auto ordered = order_rows(numbers, 200, false);
  CHECK(memory_of_rows(ordered.rows, {10, 10}, memory.data(), false).pieces.size() == 1);
  CHECK(memory_of_rows(ordered.rows, {10, 11}, memory.data(), false).pieces.size() == 199);
  numbers[99] = 60;  // a copy of one of them
  ordered = order_rows(numbers, 200, false);
  CHECK(memory_of_rows(ordered.rows, {10, 10}, memory.data(), false).pieces.size() == 3);
}

TEST_CASE("only pages with wanted bytes are read, each once") {
  std::mt19937 random(18);
  for (int round = 0; round < 300; ++round) {
    const uint64_t row_nbytes = 1 + random() % 6000, row_count = 400;
    std::vector<int64_t> numbers(1 + random() % 60);
    for (auto& number : numbers) number = static_cast<int64_t>(random() % row_count);
    const auto ordered = order_rows(numbers, row_count, false);
    std::vector<char> memory(numbers.size() * row_nbytes);
    const auto segments =
        segments_of_rows(memory_of_rows(ordered.rows, {row_nbytes, row_nbytes}, memory.data(), false));
    PlanInput input;
    input.rows = input.direct = true;
    input.memory_alignment = input.offset_alignment = 4096;
    input.offset = 7 + ordered.rows.front().row * row_nbytes;
    input.block_nbytes = input.bounce_nbytes = 1 << 20;
    std::vector<int> wanted((row_count + 2) * 6000 / 4096), read(wanted.size());
    for (const auto& one : ordered.rows) {
      const uint64_t begin = 7 + one.row * row_nbytes;
      for (uint64_t page = begin / 4096; page <= (begin + row_nbytes - 1) / 4096; ++page) wanted[page] = 1;
    }
    const Plan plan(input, segments);
    uint64_t carried = 0;
    for (uint64_t at = plan.skip(0); at < segments.nbytes();) {
      const auto block = plan.block_at(at);
      carried += nbytes_of_rows(segments, at, at + block.nbytes);
      for (uint64_t page = block.io_offset / 4096; page < (block.io_offset + block.io_nbytes) / 4096; ++page) {
        ++read[page];
      }
      at = plan.skip(at + block.nbytes);
    }
    CHECK(carried == nbytes_of_rows(segments, 0, segments.nbytes()));
    CHECK(read == wanted);
  }
}

TEST_CASE("a row that is alone in its pages is read directly to its destination") {
  constexpr uint64_t page = 4096;
  auto* const memory = reinterpret_cast<char*>(uint64_t{1} << 40);
  PlanInput input;
  input.rows = input.direct = true;
  input.memory_alignment = input.offset_alignment = 512;
  input.block_nbytes = input.bounce_nbytes = 1 << 20;
  const std::vector<NumberedRow> apart{{1, 0}, {5, 1}}, together{{1, 1}, {2, 0}};
  auto segments = segments_of_rows(memory_of_rows(apart, {page, page}, memory, false));
  CHECK_FALSE(Plan(input, segments).block_at(0).bounced);
  CHECK_FALSE(Plan(input, segments).block_at(4 * page).bounced);
  segments = segments_of_rows(memory_of_rows(apart, {page, page}, memory + 64, false));
  CHECK(Plan(input, segments).block_at(0).bounced);
  segments = segments_of_rows(memory_of_rows(together, {page, page}, memory, false));
  CHECK(Plan(input, segments).block_at(0).bounced);
  CHECK(Plan(input, segments).block_at(0).nbytes == 2 * page);
}

TEST_CASE("rows come from the page cache in blocks of many, and go on where they were interrupted") {
  constexpr uint64_t row_nbytes = 100, row_count = 5000;
  std::string file(row_nbytes * row_count, '\0');
  for (size_t at = 0; at < file.size(); ++at) file[at] = static_cast<char>(at % 251);
  const int descriptor = ::memfd_create("rows", 0);
  REQUIRE(::write(descriptor, file.data(), file.size()) == static_cast<ssize_t>(file.size()));
  std::mt19937 random(19);
  for (const uint64_t apart : {1u, 3u, 40u}) {
    std::vector<int64_t> numbers(row_count / apart);
    for (auto& number : numbers) number = static_cast<int64_t>(random() % row_count / apart * apart);
    const auto ordered = order_rows(numbers, row_count, false);
    std::vector<char> memory(numbers.size() * row_nbytes, '?');
    const auto rows = segments_of_rows(memory_of_rows(ordered.rows, {row_nbytes, row_nbytes}, memory.data(), false));
    const uint64_t offset = ordered.rows.front().row * row_nbytes;
    uint64_t blocks = 0;
    for (uint64_t begin = 0; begin < rows.nbytes(); ++blocks) {
      if (rows.at(begin).is_gap()) begin += rows.at(begin).nbytes;
      const uint64_t end = end_of_cached_rows(rows, begin);
      REQUIRE(end > begin);
      const uint64_t cut = begin + random() % (end - begin);
      const int64_t first = read_rows(rows, begin, cut, descriptor, offset, true);
      REQUIRE(first >= static_cast<int64_t>(cut - begin));
      begin += static_cast<uint64_t>(first);
      if (begin < end)
        REQUIRE(read_rows(rows, begin, end, descriptor, offset, true) == static_cast<int64_t>(end - begin));
      begin = end;
    }
    CHECK(blocks <= rows.count() / 100 + 2);
    for (size_t index = 0; index < rows.count(); ++index) {
      const auto& piece = rows[index];
      if (!piece.is_gap()) CHECK(std::memcmp(piece.memory, file.data() + offset + piece.begin, piece.nbytes) == 0);
    }
    REQUIRE(::ftruncate(descriptor, 0) == 0);
    CHECK(read_rows(rows, 0, rows.nbytes(), descriptor, offset, true) == 0);
    CHECK(::pwrite(descriptor, file.data(), file.size(), 0) == static_cast<ssize_t>(file.size()));
  }
  ::close(descriptor);
}

}  // namespace
}  // namespace tensorferry
