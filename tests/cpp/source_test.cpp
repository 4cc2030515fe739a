// Files that a source reads: blocks, checksums, faults and resumed reads; without Python.
#include "file/source.h"

#include <doctest/doctest.h>
#include <errno.h>

#include <atomic>
#include <cstring>

#include "checksum/checksum.h"
#include "scheduling.h"

namespace tensorferry {
namespace {

// Bytes in memory, given a part at a time.
class Given final : public Source {
 public:
  explicit Given(std::vector<char> bytes) : bytes_(std::move(bytes)) {}

  int64_t read(char* memory, uint64_t nbytes, uint64_t offset, std::string& why) override {
    ++calls;
    if (offset <= broken && broken < offset + nbytes) {
      why = "it is broken there";
      return -ECOMM;
    }
    const uint64_t part = std::min<uint64_t>(nbytes, most);
    std::memcpy(memory, bytes_.data() + offset, part);
    return static_cast<int64_t>(part);
  }

  const std::vector<char>& bytes() const { return bytes_; }

  uint64_t most = ~uint64_t{0};
  uint64_t broken = ~uint64_t{0};
  std::atomic<int> calls{0};

 private:
  std::vector<char> bytes_;
};

constexpr size_t all = 3'000'017;

struct Reading {
  std::shared_ptr<Given> source = std::make_shared<Given>(pattern(all, 5));
  std::shared_ptr<Scheduler> scheduler = make("threads");
  std::shared_ptr<File> file = File::of_source("s3://bucket/key", all, 1, source);

  std::optional<Fault> read(std::vector<char>& found, uint64_t offset) const {
    auto request = start(*scheduler, {file, {found.data(), found.size()}, offset});
    REQUIRE(request->wait_for(milliseconds(60'000)));
    const Fault* const fault = request->fault();
    return fault ? std::optional(*fault) : std::nullopt;
  }
};

TEST_CASE("a source's bytes come, whole and in parts, at any place") {
  Reading reading;
  for (uint64_t most : {~uint64_t{0}, uint64_t{1000}}) {
    reading.source->most = most;
    for (size_t nbytes : {size_t{1}, size_t{4096}, size_t{200'001}, all - 12'345})
      for (uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{12'345}}) {
        std::vector<char> found(nbytes);
        CHECK_FALSE(reading.read(found, offset));
        CHECK(std::memcmp(found.data(), reading.source->bytes().data() + offset, nbytes) == 0);
      }
  }
}

TEST_CASE("a source has a size, and neither a descriptor nor cached pages") {
  Reading reading;
  CHECK(**reading.file->size() == all);
  CHECK(reading.file->descriptor() == -1);
  CHECK_FALSE(reading.file->residency(0, all));
  CHECK(reading.source->calls == 0);
}

TEST_CASE("the fault has the source's description of a failure") {
  Reading reading;
  reading.source->broken = 1'000'000;
  std::vector<char> found(all);
  const auto fault = reading.read(found, 0);
  REQUIRE(fault);
  CHECK(fault->error_number == ECOMM);
  CHECK(fault->hint == "it is broken there");
  CHECK(fault->path == "s3://bucket/key");
  reading.source->broken = ~uint64_t{0};
  CHECK_FALSE(reading.read(found, 0));
  CHECK(found == reading.source->bytes());
}

TEST_CASE("an engine without threads refuses it") {
  Reading reading;
  for (const char* engine : {"io_uring", "libaio"}) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    std::vector<char> found(4096);
    auto request = start(*scheduler, {reading.file, {found.data(), found.size()}, 0});
    REQUIRE(request->wait_for(milliseconds(60'000)));
    CHECK(request->fault());
  }
}

TEST_CASE("bytes that differ from their checksum are not delivered") {
  Reading reading;
  constexpr uint64_t chunk = 65'536;
  std::vector<uint32_t> expected;
  for (size_t at = 0; at < all; at += chunk) {
    expected.push_back(crc32(0, reading.source->bytes().data() + at, std::min<size_t>(chunk, all - at)));
  }
  expected[3] ^= 1;
  std::vector<char> found(all);
  TransferSpec spec{reading.file, {found.data(), found.size()}, 0};
  spec.checksums = std::make_shared<Checksums>(chunk, false, expected);
  auto request = start(*reading.scheduler, std::move(spec));
  REQUIRE(request->wait_for(milliseconds(60'000)));
  const auto fault = request->fault();
  REQUIRE(fault);
  CHECK(fault->offset == 3 * chunk);
  CHECK(std::all_of(found.begin() + 3 * chunk, found.begin() + 4 * chunk, [](char one) { return one == 0; }));
}

}  // namespace
}  // namespace tensorferry
