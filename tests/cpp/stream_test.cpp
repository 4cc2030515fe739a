#include "transfer/stream.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "checksum/checksum.h"
#include "scheduling.h"

using namespace tensorferry;

namespace {

std::vector<char> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<char> bytes(static_cast<size_t>(file.tellg()));
  file.seekg(0).read(bytes.data(), static_cast<long>(bytes.size()));
  return bytes;
}

// Appends, as bindings do.
struct Writer {
  Scheduler& scheduler;
  std::shared_ptr<Stream> stream;

  void append(const std::vector<char>& bytes) {
    stream->append(const_cast<char*>(bytes.data()), bytes.size());
    begin();
  }
  void begin() {
    REQUIRE(scheduler.admit(stream->place(), milliseconds(60'000)) == Scheduler::Admission::admitted);
    stream->begin_job();
  }
  void end(const RequestOptions& options = {.truncate = true}) {
    REQUIRE(scheduler.admit(stream->place(), milliseconds(60'000)) == Scheduler::Admission::admitted);
    stream->end(options);
    REQUIRE(stream->wait_until_ended(milliseconds(60'000)));
  }
};

Writer begin(Scheduler& scheduler, const std::shared_ptr<File>& file, const StreamOptions& options = {}) {
  return {scheduler, std::make_shared<Stream>(scheduler.shared_from_this(), file, options)};
}

std::vector<char> joined(const std::vector<std::vector<char>>& pieces) {
  std::vector<char> all;
  for (const auto& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
  return all;
}

}  // namespace

TEST_CASE("the file has the appended bytes, with their checksums") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 2);
    if (!scheduler) continue;
    for (const uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{4096}, (uint64_t{4} << 20) - 1}) {
      // As it cannot be known before, or is: then buffers are short.
      const uint64_t expected_nbytes = offset == 7 ? 70'000 : UINT64_MAX;
      CAPTURE(engine);
      CAPTURE(offset);
      const uint64_t chunk_nbytes = 256 << 10;
      std::vector<std::vector<char>> pieces;
      unsigned seed = 0;
      for (const size_t nbytes : {0u, 1u, 4096u, 3u << 20, 9u << 20, 5u, 0u, 4u << 20, 100'000u}) {
        pieces.push_back(pattern(nbytes, ++seed));
      }
      const auto path = directory.file("stream");
      const auto before = pattern(offset + 50, 99);
      std::ofstream(path, std::ios::binary | std::ios::trunc).write(before.data(), static_cast<long>(before.size()));
      auto file = open_file(path, true);
      auto writer = begin(
          *scheduler, file,
          {.offset = offset, .chunk_nbytes = chunk_nbytes, .of_segments = true, .expected_nbytes = expected_nbytes});
      for (const auto& piece : pieces) {
        writer.append(piece);
        REQUIRE(writer.stream->wait_until_uncopied_is(1 << 20, milliseconds(60'000)));
      }
      writer.end();
      REQUIRE_FALSE(writer.stream->fault());
      const auto all = joined(pieces);
      auto expected = before;
      expected.resize(offset);
      expected.insert(expected.end(), all.begin(), all.end());
      CHECK(contents(path) == expected);
      const auto crcs = *writer.stream->segment_crcs();
      REQUIRE(crcs.size() == pieces.size());
      for (size_t index = 0; index < pieces.size(); ++index) {
        CHECK(crcs[index] == crc32(0, pieces[index].data(), pieces[index].size()));
      }
      const auto chunks = *writer.stream->chunk_crcs();
      REQUIRE(chunks.size() == (all.size() + chunk_nbytes - 1) / chunk_nbytes);
      for (size_t index = 0; index < chunks.size(); ++index) {
        const uint64_t from = index * chunk_nbytes;
        CHECK(chunks[index] == crc32(0, all.data() + from, std::min(chunk_nbytes, all.size() - from)));
      }
      CHECK(writer.stream->copied_segments() == pieces.size());
      writer.stream.reset();
      CHECK(scheduler->outstanding() == 0);
    }
    CHECK(close(*scheduler));
  }
}

TEST_CASE("an empty stream cuts the file") {
  TemporaryDirectory directory;
  auto scheduler = make("threads");
  const auto path = directory.file("empty");
  std::ofstream(path) << "something";
  auto writer = begin(*scheduler, open_file(path, true), {.offset = 4});
  writer.end();
  CHECK_FALSE(writer.stream->fault());
  CHECK(contents(path).size() == 4);
}

TEST_CASE("made segments have the checksums of those before them, wherever buffers end") {
  TemporaryDirectory directory;
  auto scheduler = make("threads");
  const auto path = directory.file("made");
  using Kind = Made::Field::Kind;
  for (const uint64_t nbytes : {uint64_t{10}, Stream::max_buffer_nbytes - 4, Stream::max_buffer_nbytes - 2,
                                Stream::max_buffer_nbytes, 3 * Stream::max_buffer_nbytes - 30}) {
    CAPTURE(nbytes);
    const auto payload = pattern(nbytes, 5);
    auto writer = begin(*scheduler, open_file(path, true), {.of_segments = true});
    writer.append(payload);
    Made made{.bytes = std::vector<char>(40, 'x'), .fields = {}};
    made.fields.push_back({.kind = Kind::segment, .position = 2, .segment = 0});
    made.fields.push_back(
        {.kind = Kind::folded, .position = 10, .crcs = {17, ~int64_t{0}}, .fold = {0x9E3779B9, 6, 2}});
    made.fields.push_back({.kind = Kind::own, .position = 36, .begin = 0, .nbytes = 36});
    REQUIRE(writer.stream->append(made));
    writer.begin();
    writer.end();
    REQUIRE_FALSE(writer.stream->fault());
    const auto found = contents(path);
    REQUIRE(found.size() == nbytes + 40);
    const char* tail = found.data() + nbytes;
    const uint32_t crc = crc32(0, payload.data(), nbytes);
    uint32_t stored;
    std::memcpy(&stored, tail + 2, 4);
    CHECK(stored == crc);
    uint64_t seed = 0;
    for (const uint64_t one : {uint64_t{17}, uint64_t{crc}}) seed ^= one + 0x9E3779B9 + (seed << 6) + (seed >> 2);
    auto digits = std::to_string(seed);
    digits.insert(0, 20 - digits.size(), '0');
    CHECK(std::string(tail + 10, 20) == digits);
    std::memcpy(&stored, tail + 36, 4);
    CHECK(stored == crc32(0, tail, 36));
    CHECK(writer.stream->segment_crcs()->at(1) == crc32(0, tail, 40));
  }
}

TEST_CASE("fields that do not fit are refused") {
  TemporaryDirectory directory;
  auto scheduler = make("threads");
  using Kind = Made::Field::Kind;
  auto writer = begin(*scheduler, open_file(directory.file("refused"), true), {.of_segments = true});
  const std::vector<Made::Field> bad = {{.kind = Kind::segment, .position = 0, .segment = 0},
                                        {.kind = Kind::own, .position = 7, .begin = 0, .nbytes = 1},
                                        {.kind = Kind::own, .position = 0, .begin = 9, .nbytes = UINT64_MAX},
                                        {.kind = Kind::folded, .position = 0},
                                        {.kind = Kind::own, .position = UINT64_MAX}};
  for (const auto& field : bad) {
    CHECK_FALSE(writer.stream->append(Made{.bytes = std::vector<char>(10), .fields = {field}}));
  }
  CHECK(writer.stream->segment_count() == 0);
  writer.end();
}

TEST_CASE("a write that fails makes the stream fail, and ends all waits") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    auto file = open_file(directory.file("closed"), true);
    auto writer = begin(*scheduler, file);
    const auto bytes = pattern(24 << 20, 1);
    CHECK(file->retire(milliseconds(1'000)));  // as closing does
    writer.append(bytes);
    REQUIRE(writer.stream->wait_until_uncopied_is(0, milliseconds(60'000)));
    writer.end();
    REQUIRE(writer.stream->fault());
    CHECK(writer.stream->fault()->error_number == EBADF);
    CHECK_FALSE(writer.stream->chunk_crcs());
    writer.append(bytes);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("memory is free to go after abort, at any moment") {
  TemporaryDirectory directory;
  const auto source = pattern(12 << 20, 3);
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 2);
    if (!scheduler) continue;
    for (int round = 0; round < 30; ++round) {
      auto file = open_file(directory.file("aborted"), true);
      auto writer = begin(*scheduler, file);
      auto bytes = std::make_unique<std::vector<char>>(source);
      writer.append(*bytes);
      std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      CHECK(writer.stream->abort(milliseconds(60'000)));
      bytes.reset();
      writer.stream.reset();
    }
    CHECK(close(*scheduler));
  }
}

TEST_CASE("streams meet the end of their scheduler") {
  TemporaryDirectory directory;
  for (int round = 0; round < 20; ++round) {
    auto scheduler = make("threads", 2);
    auto file = open_file(directory.file("closing"), true);
    auto stream = std::make_shared<Stream>(scheduler, file, StreamOptions{});
    const auto bytes = pattern(1 << 20, 3);
    std::thread writer([&] {
      for (int count = 0; count < 40; ++count) {
        if (scheduler->admit(stream->place(), milliseconds(60'000)) != Scheduler::Admission::admitted) break;
        stream->append(const_cast<char*>(bytes.data()), bytes.size());
        stream->begin_job();
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
    CHECK(close(*scheduler));
    writer.join();
    CHECK(stream->abort(milliseconds(60'000)));
  }
}

TEST_CASE("streams, writes and truncations take effect in the order in which they were accepted") {
  TemporaryDirectory directory;
  const auto source = pattern(4 << 20, 5);
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    for (unsigned seed = 0; seed < 12; ++seed) {
      CAPTURE(engine);
      CAPTURE(seed);
      std::mt19937 random(seed);
      const auto below = [&](size_t limit) { return static_cast<size_t>(random()) % limit; };
      const auto file = open_file(directory.file(std::string(engine) + std::to_string(seed)), true);
      std::vector<char> model;
      std::vector<std::shared_ptr<Stream>> streams, ended;  // `streams` are open
      std::vector<std::shared_ptr<Request>> requests;
      std::map<const Stream*, size_t> ends;  // file offsets
      const auto admit = [&](const Stream& stream) {
        REQUIRE(scheduler->admit(stream.place(), milliseconds(60'000)) == Scheduler::Admission::admitted);
      };
      const auto end_one = [&] {
        std::swap(streams[below(streams.size())], streams.back());
        const bool cuts = below(2) == 0;
        if (cuts) model.resize(ends[streams.back().get()]);
        admit(*streams.back());
        streams.back()->end({.truncate = cuts});
        ended.push_back(std::move(streams.back()));
        streams.pop_back();
      };
      for (int step = 0; step < 80; ++step) {
        const size_t kind = below(8);
        if (streams.empty() || (kind == 0 && streams.size() < 3)) {
          const size_t offset = below(100'000);
          streams.push_back(std::make_shared<Stream>(scheduler, file, StreamOptions{.offset = offset}));
          ends[streams.back().get()] = offset;
          continue;
        }
        if (kind == 1) {
          end_one();
          continue;
        }
        const size_t nbytes = 1 + below(below(4) == 0 ? 2 << 20 : 5000);
        char* const bytes = const_cast<char*>(source.data()) + below(source.size() - nbytes);
        const auto& stream = streams[below(streams.size())];
        size_t& at = ends[stream.get()];
        const size_t offset = kind < 5 ? std::exchange(at, at + nbytes) : below(200'000);
        model.resize(std::max(model.size(), offset + nbytes));
        std::copy_n(bytes, nbytes, model.begin() + static_cast<long>(offset));
        if (kind < 5) {
          admit(*stream);
          stream->append(bytes, nbytes);
          stream->begin_job();
          continue;
        }
        const RequestOptions options{.truncate = kind == 5};
        requests.push_back(start(*scheduler, {file, {bytes, nbytes}, offset, true}, kind == 6, options));
        if (kind == 5) model.resize(offset + nbytes);
        if (kind == 6) REQUIRE(requests.back()->wait_for(milliseconds(60'000)));
      }
      while (!streams.empty()) end_one();
      for (const auto& request : requests) {
        REQUIRE(request->wait_for(milliseconds(60'000)));
        CHECK(request->faults().empty());
      }
      for (const auto& stream : ended) {
        REQUIRE(stream->wait_until_ended(milliseconds(60'000)));
        CHECK_FALSE(stream->fault());
      }
      CHECK(contents(file->path()) == model);
    }
    CHECK(close(*scheduler));
  }
}

TEST_CASE("a write waits no longer for a stream that is given up") {
  TemporaryDirectory directory;
  auto scheduler = make("threads");
  const auto file = open_file(directory.file("given up"), true);
  const auto bytes = pattern(3000, 6);
  for (const bool aborts : {true, false}) {
    auto writer = begin(*scheduler, file);
    writer.append(bytes);
    if (aborts) CHECK(writer.stream->abort(milliseconds(60'000)));
    writer.stream.reset();
    auto request = start(*scheduler, {file, {const_cast<char*>(bytes.data()), bytes.size()}, 1000, true});
    CHECK(request->wait_for(milliseconds(60'000)));
  }
  CHECK(close(*scheduler));
}

TEST_CASE("a stream whose job waits for a thread is given up at once, and one whose memory is in use when it is not") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    CAPTURE(engine);
    auto file = open_file(directory.file("stream"), true);
    auto writer = begin(*scheduler, file);
    // All helpers hang, as in a close(2).
    std::mutex hung;
    hung.lock();
    std::atomic<int> over = 0;
    for (int helper = 0; helper < 8; ++helper) {
      scheduler->lane_of(file->device())->help_stream([&] {
        const std::lock_guard until_released(hung);
        ++over;
      });
    }
    auto data = std::make_unique<std::vector<char>>(pattern(1 << 20, 1));
    writer.append(*data);
    CHECK(writer.stream->abort(milliseconds(0)));
    CHECK(writer.stream->wait_until_ended(milliseconds(0)));
    data.reset();
    CHECK(scheduler->take_finished().empty());
    writer.stream->tell_when_aborted(7);
    CHECK(scheduler->take_finished() == std::vector<uint64_t>{7});
    hung.unlock();
    CHECK(close(*scheduler));
    CHECK(over == 8);
  }
}
