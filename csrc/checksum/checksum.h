// The CRC-32 of zip, zlib and PNG (reflected polynomial 0xEDB88320): of bytes, and of the concatenation of two byte
// strings whose CRC-32s are known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry {

// Return the CRC-32 of a byte string and `data` behind it. `crc` is the CRC-32 of the byte string: 0 if it is empty.
uint32_t crc32(uint32_t crc, const void* data, size_t nbytes);

// The CRC-32 of two concatenated byte strings, from the CRC-32 of each and the length of the second one.
uint32_t crc32_combine(uint32_t crc, uint32_t next_crc, uint64_t next_nbytes);

// The CRC-32 of bytes that arrive piece by piece, and their number so far.
struct RunningCrc32 {
  uint32_t crc = 0;
  uint64_t nbytes = 0;
};

// Add bytes to one or two running CRC-32s (either may be null), reading the bytes once where that is faster.
void add(RunningCrc32* one, RunningCrc32* other, const void* data, uint64_t nbytes);

// Code that both copies bytes and computes their CRC-32 does so in steps of this size: after a step has been copied,
// its bytes are still in the processor's cache.
constexpr uint64_t cached_step_nbytes = uint64_t{128} << 10;

}  // namespace tensorferry
