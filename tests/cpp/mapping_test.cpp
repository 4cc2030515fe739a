// Tests of mappings: files and anonymous memory in one range of addresses, and pages that are freed before the rest.
#include "file/mapping.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <fstream>
#include <numeric>

#include "refused_calls.h"
#include "scheduling.h"

namespace tensorferry {
namespace {

constexpr size_t mib = 1 << 20;

std::string bytes_of(size_t nbytes) {
  std::string bytes(nbytes, '\0');
  std::mt19937 random(29);
  for (char& byte : bytes) byte = static_cast<char>(1 + random() % 255);
  return bytes;
}

std::shared_ptr<File> file_with(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return open_file(path, false);
}

size_t addresses_nbytes() {
  std::ifstream file("/proc/self/statm");
  size_t pages = 0;
  file >> pages;
  return pages * page_nbytes();
}

TEST_CASE("pieces of files and of anonymous memory are adjacent, and changes stay in memory") {
  TemporaryDirectory directory;
  const size_t page = page_nbytes();
  const std::string bytes = bytes_of(5 * mib + 77);
  const std::string path = directory.file("file");
  const auto file = file_with(path, bytes);
  const auto made = Mapping::create({{file, page, 2 * page}, {nullptr, 0, 3 * mib}, {file, 5 * mib, 77}});
  REQUIRE(made);
  Mapping& mapping = **made;
  char* data = mapping.data();
  CHECK(reinterpret_cast<uintptr_t>(data) % (2 * mib) == page);
  REQUIRE(mapping.nbytes() == 3 * mib + 2 * page + 77);
  CHECK(std::string(data, 2 * page) == bytes.substr(page, 2 * page));
  CHECK(std::string(data + 2 * page, 3 * mib) == std::string(3 * mib, '\0'));
  CHECK(std::string(data + 2 * page + 3 * mib, 77) == bytes.substr(5 * mib));
  CHECK_FALSE(file->close());  // the mapping does not need it
  memset(data, 'x', mapping.nbytes());
  std::string kept(bytes.size(), '\0');
  std::ifstream(path, std::ios::binary).read(kept.data(), static_cast<std::streamsize>(kept.size()));
  CHECK(kept == bytes);
}

TEST_CASE("addresses are in huge pages where the first file has its bytes in them; of no file they begin one") {
  TemporaryDirectory directory;
  const size_t page = page_nbytes();
  const auto file = file_with(directory.file("file"), bytes_of(9 * mib));
  const auto into = [](const std::vector<Mapping::Piece>& pieces) {
    const auto made = Mapping::create(pieces);
    REQUIRE(made);
    const char* data = (*made)->data();
    CHECK(std::accumulate(data, data + (*made)->nbytes(), uint64_t{0}) > 0);  // all of it is there
    return reinterpret_cast<uintptr_t>(data) % (2 * mib);
  };
  for (const size_t offset : {size_t{0}, page, 2 * mib - page, 2 * mib, 2 * mib + 3 * page}) {
    CHECK(into({{file, offset, 4 * mib}}) == offset % (2 * mib));
    CHECK(into({{file, offset, 4 * mib + 5}}) == offset % (2 * mib));
    // Memory of no file before it.
    CHECK(into({{nullptr, 0, 3 * mib}, {file, offset, 2 * mib}}) == (offset + mib) % (2 * mib));
  }
  const auto refused = Mapping::create({{file, page + 1, 4 * mib}});
  REQUIRE_FALSE(refused);
  CHECK(refused.fault().error_number == EINVAL);
  const auto made = Mapping::create({{nullptr, 0, 3 * mib}});
  REQUIRE(made);
  CHECK(reinterpret_cast<uintptr_t>((*made)->data()) % (2 * mib) == 0);
}

TEST_CASE("forgetting gives back whole pages, and none of a neighbour's") {
  TemporaryDirectory directory;
  const size_t page = page_nbytes();
  const std::string bytes = bytes_of(8 * page);
  const auto file = file_with(directory.file("file"), bytes);
  const auto made = Mapping::create({{file, 0, 8 * page}, {nullptr, 0, 8 * page}});
  REQUIRE(made);
  char* data = (*made)->data();
  memset(data, 'x', 16 * page);
  (*made)->forget(page + 1, 4 * page - 1);       // of the file's: page 2
  (*made)->forget(10 * page, 12 * page + 5);     // of no file's: pages 10 and 11
  (*made)->forget(5 * page + 1, 6 * page + 20);  // no whole page
  (*made)->forget(5 * page, 5 * page);
  for (size_t index = 0; index < 16; ++index) {
    const bool gone = index == 2 || index == 10 || index == 11;
    CHECK_MESSAGE((std::string(data + index * page, page) == std::string(page, 'x')) == !gone, "page ", index);
  }
  CHECK(std::string(data, 2 * page) == std::string(2 * page, 'x'));
  CHECK(std::string(data + 2 * page, page) == bytes.substr(2 * page, page));
  CHECK(std::string(data + 3 * page, 7 * page) == std::string(7 * page, 'x'));
  CHECK(std::string(data + 10 * page, 2 * page) == std::string(2 * page, '\0'));
}

TEST_CASE("forgetting across pieces gives back both, and the end of the last one is the mapping's") {
  TemporaryDirectory directory;
  const size_t page = page_nbytes();
  const std::string bytes = bytes_of(page + 10);
  const auto file = file_with(directory.file("file"), bytes);
  const auto made = Mapping::create({{nullptr, 0, 2 * page}, {file, 0, page + 10}});
  REQUIRE(made);
  char* data = (*made)->data();
  memset(data, 'x', 3 * page + 10);
  (*made)->forget(page, 3 * page + 10);
  CHECK(std::string(data, page) == std::string(page, 'x'));
  CHECK(std::string(data + page, page) == std::string(page, '\0'));
  CHECK(std::string(data + 2 * page, page) == bytes.substr(0, page));
  CHECK(std::string(data + 3 * page, 10) == std::string(10, 'x'));
}

TEST_CASE("a piece that cannot be mapped is a fault that names it, and leaves no mapping") {
  TemporaryDirectory directory;
  constexpr size_t large = size_t{4} << 30;
  const std::string path = directory.file("file");
  const auto file = file_with(path, "bytes");
  const auto closed = file_with(path, "bytes");
  CHECK_FALSE(closed->close());
  const size_t before = addresses_nbytes();
  const auto expect = [&](const std::vector<Mapping::Piece>& pieces, int error_number, const std::string& of) {
    const auto made = Mapping::create(pieces);
    REQUIRE_FALSE(made);
    CHECK(made.fault().error_number == error_number);
    CHECK(std::string(made.fault().operation) == "mmap");
    CHECK(made.fault().path == of);
    CHECK(addresses_nbytes() < before + large / 2);
  };
  expect({{file, 0, large}, {closed, 0, page_nbytes()}}, EBADF, path);
  expect({{file, 0, large}, {file, 1, page_nbytes()}}, EINVAL, path);       // begins within a page
  expect({{file, 0, large}, {file, 0, 0}}, EINVAL, path);                   // is empty
  expect({{file, 0, large + 1}, {nullptr, 0, page_nbytes()}}, EINVAL, "");  // ends within a page
  expect({{nullptr, 0, SIZE_MAX - 5}, {file, 0, page_nbytes()}}, ENOMEM, path);
  expect({{nullptr, 0, SIZE_MAX / 2 + 2}}, ENOMEM, "");
  expect({{nullptr, 0, SIZE_MAX / 2 - page_nbytes()}}, ENOMEM, "");
}

TEST_CASE("without huge pages it is ordinary ones") {
  std::thread([] {
    refuse_calls(SYS_madvise, EINVAL);
    const auto made = Mapping::create({{nullptr, 0, 3 * mib}});
    REQUIRE(made);
    memset((*made)->data(), 'x', 3 * mib);
    (*made)->forget(0, mib);  // refused as well: the memory stays until the mapping is freed
    CHECK(std::string((*made)->data(), mib) == std::string(mib, 'x'));
  }).join();
}

}  // namespace
}  // namespace tensorferry
