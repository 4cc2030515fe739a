// libdeflate computes the CRC-32s (see README.md). Combining two is polynomial arithmetic, which is implemented here.
#include "checksum/checksum.h"

#include <libdeflate.h>

#include <array>

namespace tensorferry {
namespace {

// For shorter pieces, add() computes each of the two CRC-32s from the bytes, because that costs less than
// crc32_combine().
constexpr uint64_t min_combined_nbytes = 4096;

// A CRC-32 is a polynomial over GF(2); the highest bit of the number is the coefficient of x^0.
constexpr uint32_t generator = 0xEDB88320;
constexpr uint32_t one = 1U << 31;
constexpr uint32_t x = 1U << 30;

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (; a != 0; a <<= 1) {
    if (a & one) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? generator : 0);  // times x
  }
  return sum;
}

// x to the powers 1, 2, 4, 8 and so on, modulo the generator. The 33rd would be x again.
constexpr auto squares = [] {
  std::array<uint32_t, 32> found{x};
  for (size_t k = 1; k < found.size(); ++k) found[k] = product(found[k - 1], found[k - 1]);
  return found;
}();
static_assert(product(squares.back(), squares.back()) == x);

// x to the power of the number of bits in `nbytes` bytes, modulo the generator. The loop begins with squares[3], which
// is x^8, for the lowest bit of nbytes.
constexpr uint32_t x_to_bits_of(uint64_t nbytes) {
  uint32_t power = one;
  for (size_t k = 3; nbytes != 0; nbytes >>= 1, ++k) {
    if (nbytes & 1) power = product(squares[k % squares.size()], power);
  }
  return power;
}

// libdeflate examines the processor in its first call and stores the result without synchronization, so that call must
// happen before there are threads.
const uint32_t of_nothing = libdeflate_crc32(0, "", 0);

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t nbytes) {
  // Empty data may have a null pointer, for which libdeflate_crc32() returns the initial value, whatever `crc` is.
  return nbytes == 0 ? crc ^ of_nothing : libdeflate_crc32(crc, data, nbytes);
}

void add(RunningCrc32* one, RunningCrc32* other, const void* data, uint64_t nbytes) {
  const bool shared = one && other && nbytes >= min_combined_nbytes;
  const uint32_t crc = shared ? crc32(0, data, nbytes) : 0;
  for (RunningCrc32* sum : {one, other}) {
    if (!sum) continue;
    sum->crc = !shared ? crc32(sum->crc, data, nbytes) : sum->nbytes == 0 ? crc : crc32_combine(sum->crc, crc, nbytes);
    sum->nbytes += nbytes;
  }
}

uint32_t crc32_combine(uint32_t crc, uint32_t next_crc, uint64_t next_nbytes) {
  // A CRC-32 is a remainder of polynomials. To append bytes multiplies the polynomial by x to the number of their bits
  // and adds theirs, and the remainder of a sum is the sum of the remainders.
  return product(x_to_bits_of(next_nbytes), crc) ^ next_crc;
}

}  // namespace tensorferry
