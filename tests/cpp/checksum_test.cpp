// CRC-32: known values, pieces of all lengths and addresses, and combinations.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "checksum/checksum.h"

namespace tensorferry {
namespace {

uint32_t crc_of(std::string_view text) { return crc32(0, text.data(), text.size()); }

// The definition, a bit at a time.
uint32_t plain_crc32(uint32_t crc, const unsigned char* data, size_t nbytes) {
  crc = ~crc;
  for (size_t index = 0; index < nbytes; ++index) {
    crc ^= data[index];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

std::vector<unsigned char> random_bytes(size_t nbytes, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<unsigned char> bytes(nbytes);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(generator());
  return bytes;
}

// The CRC-32 of `nbytes` zeros, by doubling: none of them is looked at.
uint32_t crc_of_zeros(uint64_t nbytes) {
  const unsigned char zero = 0;
  uint32_t crc = 0, doubled = crc32(0, &zero, 1);
  for (uint64_t length = 1; length <= nbytes; length *= 2) {
    if (nbytes & length) crc = crc32_combine(crc, doubled, length);
    doubled = crc32_combine(doubled, doubled, length);
  }
  return crc;
}

// This test is the first one, because the first call of a process chooses the implementation for all threads.
TEST_CASE("the first CRC-32 of a process may be taken by many threads") {
  const auto bytes = random_bytes(100'000, 5);
  std::vector<uint32_t> found(8);
  std::vector<std::thread> threads;
  for (uint32_t& crc : found) threads.emplace_back([&] { crc = crc32(0, bytes.data(), bytes.size()); });
  for (std::thread& thread : threads) thread.join();
  for (uint32_t crc : found) CHECK(crc == plain_crc32(0, bytes.data(), bytes.size()));
}

TEST_CASE("known CRC-32s come out") {
  CHECK(crc_of("") == 0);
  CHECK(crc_of("a") == 0xE8B7BE43);
  CHECK(crc_of("123456789") == 0xCBF43926);
  CHECK(crc_of("The quick brown fox jumps over the lazy dog") == 0x414FA339);
  CHECK(crc_of(std::string(32, '\0')) == 0x190A55AD);
  CHECK(crc_of(std::string(32, '\xff')) == 0xFF6CAB0B);
}

TEST_CASE("a CRC-32 of no bytes equals the value that it continues from") {
  CHECK(crc32(0x12345678, nullptr, 0) == 0x12345678);
  CHECK(crc32(0x12345678, "", 0) == 0x12345678);
  CHECK(crc32_combine(0x12345678, 0, 0) == 0x12345678);
  CHECK(crc32_combine(0, 0x12345678, 1000) == 0x12345678);
}

TEST_CASE("each length and address has the CRC-32 of the definition") {
  const auto bytes = random_bytes(3000, 1);
  for (size_t begin = 0; begin < 64; begin += 7) {
    uint32_t plain = 5;
    for (size_t nbytes = 0; begin + nbytes < bytes.size(); ++nbytes) {
      if (nbytes < 300 || nbytes % 61 == 0) REQUIRE(crc32(5, bytes.data() + begin, nbytes) == plain);
      plain = plain_crc32(plain, bytes.data() + begin + nbytes, 1);
    }
  }
}

TEST_CASE("pieces continue, and combine, to the CRC-32 of the whole") {
  constexpr size_t size = 1 << 20;
  const auto bytes = random_bytes(size, 2);
  const uint32_t whole = crc32(0, bytes.data(), size);
  CHECK(whole == plain_crc32(0, bytes.data(), size));
  std::mt19937 generator(3);
  for (int round = 0; round < 200; ++round) {
    uint32_t continued = 0, combined = 0;
    for (size_t begin = 0; begin < size;) {
      const size_t largest = size_t{1} << (generator() % 21);
      const size_t nbytes = std::min<size_t>(generator() % (largest + 1), size - begin);
      continued = crc32(continued, bytes.data() + begin, nbytes);
      combined = crc32_combine(combined, crc32(0, bytes.data() + begin, nbytes), nbytes);
      begin += nbytes;
    }
    REQUIRE(continued == whole);
    REQUIRE(combined == whole);
  }
}

TEST_CASE("strings of more than 4 GiB combine") {
  // zlib's of so many zeros.
  CHECK(crc_of_zeros(uint64_t{1} << 30) == 0x5B64C2B0);
  CHECK(crc_of_zeros(uint64_t{5} << 30) == 0x193838C3);
}

TEST_CASE("lengths are 64 bits wide") {
  std::mt19937_64 generator(4);
  for (int round = 0; round < 2000; ++round) {
    const auto crc = static_cast<uint32_t>(generator());
    const uint64_t first = generator() >> (generator() % 63 + 1), second = generator() >> (generator() % 63 + 1);
    // Behind zeros of the one and the other length, or of both.
    REQUIRE(crc32_combine(crc32_combine(crc, 0, first), 0, second) == crc32_combine(crc, 0, first + second));
  }
  // x to the power of 2^32 - 1 is 1.
  CHECK(crc32_combine(0x12345678, 0, (uint64_t{1} << 32) - 1) == 0x12345678);
  CHECK(crc32_combine(0x12345678, 0, UINT64_MAX) == 0x12345678);
}

}  // namespace
}  // namespace tensorferry
