// Transfers of several segments: gathered writes and scattered reads, with checksums, on every engine.
#include <algorithm>
#include <thread>

#include "checksum/checksum.h"
#include "memory/allocation.h"
#include "scheduling.h"
#include "transfer/checksums.h"

namespace tensorferry {
namespace {

// Segments of the bytes, in memory in the order of the file, but with gaps between them.
struct Scattered {
  std::vector<std::vector<char>> parts;

  Segments segments() {
    Segments found;
    for (auto& part : parts) found.add(part.data(), part.size());
    return found;
  }
  std::vector<char> joined() const {
    std::vector<char> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
};

Scattered scatter(const std::vector<char>& bytes, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t lengths[] = {0, 1, 3, 511, 4096, 10'000, 65'536, 200'000};
  Scattered result;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t nbytes = std::min(lengths[random() % std::size(lengths)], bytes.size() - begin);
    const auto first = bytes.begin() + static_cast<ptrdiff_t>(begin);
    result.parts.emplace_back(first, first + static_cast<ptrdiff_t>(nbytes));
    begin += nbytes;
  }
  return result;
}

std::vector<uint32_t> chunk_crcs(const std::vector<char>& bytes, size_t chunk_nbytes) {
  std::vector<uint32_t> found;
  for (size_t begin = 0; begin < bytes.size(); begin += chunk_nbytes) {
    found.push_back(crc32(0, bytes.data() + begin, std::min(chunk_nbytes, bytes.size() - begin)));
  }
  return found;
}

std::vector<char> read_back(Scheduler& scheduler, const std::string& path, uint64_t offset, size_t nbytes) {
  std::vector<char> found(nbytes);
  auto read = start(scheduler, {open_file(path, false), {found.data(), nbytes}, offset}, true);
  REQUIRE(read->wait_for(milliseconds(60'000)));
  REQUIRE_FALSE(read->fault());
  return found;
}

TEST_CASE("segments are gathered and scattered, and their checksums are right") {
  TemporaryDirectory directory;
  uint32_t seed = 0;
  for (const char* engine : {"io_uring", "libaio", "threads"})
    for (uint32_t workers : {1u, 3u})
      for (uint64_t offset : {0u, 5u})
        for (auto direct : {DirectMode::automatic, DirectMode::never}) {
          auto scheduler = make(engine, workers, 8, 1 << 20, workers - 1);
          if (!scheduler) continue;
          const std::string path = directory.file(std::to_string(++seed));
          const auto bytes = pattern(3'000'001, seed);
          const uint64_t chunk_nbytes = seed % 2 ? 65'536 : 30'001;
          auto source = scatter(bytes, seed);
          TransferSpec writing{open_file(path, true, direct), source.segments(), offset, true};
          writing.checksums = std::make_shared<Checksums>(chunk_nbytes, true, std::vector<uint32_t>());
          const auto sums = writing.checksums;
          auto written = start(*scheduler, std::move(writing), seed % 3 == 0);
          REQUIRE(written->wait_for(milliseconds(60'000)));
          REQUIRE_FALSE(written->fault());
          CHECK(read_back(*scheduler, path, offset, bytes.size()) == bytes);
          CHECK(sums->of_chunks() == chunk_crcs(bytes, chunk_nbytes));
          REQUIRE(sums->of_segments()->size() == source.parts.size());
          for (size_t index = 0; index < source.parts.size(); ++index) {
            CHECK((*sums->of_segments())[index] == crc32(0, source.parts[index].data(), source.parts[index].size()));
          }

          for (const auto& [verify, in_place] : {std::pair(false, false), {true, false}, {true, true}}) {
            auto target = scatter(std::vector<char>(bytes.size()), seed + 1000);
            TransferSpec reading{open_file(path, false, direct), target.segments(), offset};
            reading.checksums = std::make_shared<Checksums>(
                chunk_nbytes, true, verify ? *sums->of_chunks() : std::vector<uint32_t>(), in_place);
            const auto found = reading.checksums;
            auto read = start(*scheduler, std::move(reading));
            REQUIRE(read->wait_for(milliseconds(60'000)));
            REQUIRE_FALSE(read->fault());
            CHECK(target.joined() == bytes);
            CHECK(found->of_chunks() == sums->of_chunks());
          }
          CHECK(close(*scheduler));
        }
}

TEST_CASE("no bytes of a damaged chunk reach the caller's memory") {
  TemporaryDirectory directory;
  constexpr uint64_t chunk_nbytes = 8192;
  const auto bytes = pattern(100'000, 1);
  for (const char* engine : {"io_uring", "libaio", "threads"})
    for (auto direct : {DirectMode::automatic, DirectMode::never}) {
      auto scheduler = make(engine);
      if (!scheduler) continue;
      const std::string path = directory.file(engine);
      auto damaged = bytes;
      damaged[5 * chunk_nbytes + 17] ^= 1;
      auto written = start(*scheduler, {open_file(path, true, direct), {damaged.data(), damaged.size()}, 3, true});
      REQUIRE(written->wait_for(milliseconds(60'000)));
      auto target = scatter(std::vector<char>(bytes.size(), 'x'), 7);
      TransferSpec reading{open_file(path, false, direct), target.segments(), 3};
      reading.checksums = std::make_shared<Checksums>(chunk_nbytes, false, chunk_crcs(bytes, chunk_nbytes));
      auto read = start(*scheduler, std::move(reading));
      REQUIRE(read->wait_for(milliseconds(60'000)));
      REQUIRE(read->fault());
      CHECK(read->fault()->damaged_nbytes == chunk_nbytes);
      CHECK(read->fault()->offset == 3 + 5 * chunk_nbytes);
      const auto found = target.joined();
      for (size_t at = 5 * chunk_nbytes; at < 6 * chunk_nbytes; ++at) REQUIRE(found[at] == 'x');
    }
}

TEST_CASE("chunks that may be read directly into memory are, and are verified there, also across several blocks") {
  TemporaryDirectory directory;
  constexpr size_t nbytes = 2 << 20;
  const auto bytes = pattern(nbytes, 8);
  const auto memory = Allocation::create(nbytes, Locking::none);
  REQUIRE(memory);
  for (const char* engine : {"io_uring", "libaio", "threads"})
    for (uint64_t chunk_nbytes : {uint64_t{30'001}, uint64_t{64} << 10, uint64_t{1} << 20, uint64_t{4} << 20})
      for (bool damage : {false, true}) {
        auto scheduler = make(engine, 2);
        if (!scheduler) continue;
        const std::string path = directory.file(engine);
        auto stored = bytes;
        if (damage) stored[1'100'000] ^= 4;
        auto written = start(*scheduler, {open_file(path, true), {stored.data(), nbytes}, 0, true});
        REQUIRE(written->wait_for(milliseconds(60'000)));
        const auto file = open_file(path, false);
        TransferSpec reading{file, {memory->data(), nbytes}, 0};
        reading.checksums = std::make_shared<Checksums>(chunk_nbytes, false, chunk_crcs(bytes, chunk_nbytes), true);
        const auto sums = reading.checksums;
        const uint64_t before = scheduler->statistics().bounced_nbytes;
        auto read = start(*scheduler, std::move(reading));
        REQUIRE(read->wait_for(milliseconds(60'000)));
        CHECK(scheduler->statistics().bounced_nbytes == before);
        if (damage) {
          REQUIRE(read->fault());
          const uint64_t chunk = 1'100'000 / chunk_nbytes;
          CHECK(read->fault()->offset == chunk * chunk_nbytes);
          CHECK(read->fault()->damaged_nbytes == std::min(chunk_nbytes, nbytes - chunk * chunk_nbytes));
          CHECK_FALSE(sums->of_chunks());
        } else {
          REQUIRE_FALSE(read->fault());
          CHECK(sums->of_chunks() == chunk_crcs(bytes, chunk_nbytes));
        }
        if (!damage) CHECK(std::equal(bytes.begin(), bytes.end(), memory->data()));
      }
}

TEST_CASE("gaps are passed over, whether they are read or not") {
  TemporaryDirectory directory;
  const auto bytes = pattern(2'100'000, 2);
  for (const char* engine : {"io_uring", "libaio", "threads"}) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    auto source = bytes;
    auto written = start(*scheduler, {open_file(path, true), {source.data(), source.size()}, 0, true});
    REQUIRE(written->wait_for(milliseconds(60'000)));
    for (uint64_t gap : {0u, 1u, 5'000u, 1'000'000u}) {
      std::vector<char> first(3000), last(200'000);
      Segments memory;
      memory.add_gap(gap);
      memory.add(first.data(), first.size());
      memory.add_gap(gap / 2);
      memory.add(last.data(), last.size());
      memory.add_gap(gap / 3);
      const uint64_t nbytes = memory.nbytes();
      auto read = start(*scheduler, {open_file(path, false), std::move(memory), 1});
      REQUIRE(read->wait_for(milliseconds(60'000)));
      REQUIRE_FALSE(read->fault());
      const char* from = bytes.data() + 1 + gap;
      CHECK(std::equal(first.begin(), first.end(), from));
      CHECK(std::equal(last.begin(), last.end(), from + first.size() + gap / 2));
      CHECK(read->nbytes() == nbytes);
    }
  }
}

TEST_CASE("joined items fail each for itself") {
  TemporaryDirectory directory;
  auto bytes = pattern(100'000, 12);
  for (const char* engine : {"io_uring", "libaio", "threads"})
    for (bool cancel : {false, true}) {
      auto scheduler = make(engine);
      if (!scheduler) continue;
      const std::string path = directory.file(engine);
      auto written = start(*scheduler, {open_file(path, true), {bytes.data(), bytes.size()}, 0, true});
      REQUIRE(written->wait_for(milliseconds(60'000)));
      std::vector<char> first(5000), last(6000);
      const auto file = open_file(path, false);
      TransferSpec reading{file, {}, 10};
      reading.memory.add(first.data(), first.size());
      reading.memory.add_gap(70);
      reading.memory.add(last.data(), last.size());
      reading.positions = {8, gap_position, 3};
      auto request = new_request(*scheduler);
      auto transfer = Transfer::create(std::move(reading), request, 3, 64 << 10);
      REQUIRE(transfer);
      if (cancel) {
        request->cancel();
        CHECK_FALSE(file->retire(milliseconds(0)));  // a concurrent close must not become the items' fault
      }
      hand_over(*scheduler, request, *transfer);
      REQUIRE(request->wait_for(milliseconds(60'000)));
      const auto& faults = request->faults();
      if (!cancel) {
        CHECK(faults.empty());
        CHECK(std::equal(first.begin(), first.end(), bytes.begin() + 10));
        CHECK(std::equal(last.begin(), last.end(), bytes.begin() + 5080));
        continue;
      }
      REQUIRE(faults.size() == 2);
      CHECK(faults.at(8).offset == 10);
      CHECK(faults.at(8).expected == 5000);
      CHECK(faults.at(3).offset == 5080);
      CHECK(faults.at(3).error_number == ECANCELED);
    }
}

TEST_CASE("parts of chunks and segments come in any order") {
  const auto bytes = pattern(50'000, 3);
  auto source = scatter(bytes, 4);
  const Segments segments = source.segments();
  Checksums sums(7'000, true, {});
  CHECK_FALSE(sums.of_chunks());
  sums.attach(segments);
  CHECK_FALSE(sums.of_chunks());
  std::vector<std::pair<uint64_t, uint64_t>> blocks;
  for (uint64_t begin = 0; begin < bytes.size(); begin += 3'333) {
    blocks.emplace_back(begin, std::min<uint64_t>(3'333, bytes.size() - begin));
  }
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
  for (const auto& [begin, nbytes] : blocks) {
    Checksums::Block block(sums, begin);
    segments.each(begin, nbytes,
                  [&](const Segments::Piece& piece) { block.add(piece.memory, piece.nbytes, piece.segment); });
    CHECK_FALSE(block.keep());
  }
  CHECK(sums.of_chunks() == chunk_crcs(bytes, 7'000));
  for (size_t index = 0; index < source.parts.size(); ++index) {
    CHECK((*sums.of_segments())[index] == crc32(0, source.parts[index].data(), source.parts[index].size()));
  }
}

}  // namespace
}  // namespace tensorferry
