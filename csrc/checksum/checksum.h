// CRC-32 (zip, zlib, PNG: reflected polynomial 0xEDB88320) of bytes, and of strings of bytes whose own are known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry {

// CRC-32 of what `crc` is that of, followed by these bytes; that of nothing is 0.
uint32_t crc32(uint32_t crc, const void* data, size_t nbytes);

// CRC-32 of two strings of bytes in a row, from those of each; the second one has `next_nbytes` bytes.
uint32_t crc32_combine(uint32_t crc, uint32_t next_crc, uint64_t next_nbytes);

// The CRC-32 of bytes that come one after the other.
struct RunningCrc32 {
  uint32_t crc = 0;
  uint64_t nbytes = 0;
};

// Adds bytes to one or two of them (null: none), reading them once where that is worth it.
void add(RunningCrc32* one, RunningCrc32* other, const void* data, uint64_t nbytes);

// Copied at a time where a checksum follows, so that it finds the bytes in the processor's cache.
constexpr uint64_t cached_step_nbytes = uint64_t{128} << 10;

}  // namespace tensorferry
