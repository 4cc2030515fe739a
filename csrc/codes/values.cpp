#include "codes/values.h"

#include <algorithm>

namespace tensorferry {
namespace {

template <size_t count>
void write_values(const uint8_t* codes, const CodeBlocks& blocks, const float* table, const float* scales,
                  float* values) {
  for (size_t row = 0; row < blocks.rows; ++row) {
    const float* scale = scales + (blocks.top + row) / blocks.block_rows * blocks.scales_in_row;
    size_t in_block = blocks.left;
    for (size_t column = 0; column < blocks.columns; in_block = 0) {
      const size_t run = std::min(blocks.block_columns - in_block, blocks.columns - column);
      const float factor = *scale++;
      // The loop is unrolled because its machine code would otherwise be so short that the loop takes twice as long if
      // the code happens to cross the boundary of a cache line.
#pragma GCC unroll 8
      for (size_t i = 0; i < run; ++i) {
        const float* const found = table + count * codes[i];
        for (size_t j = 0; j < count; ++j) values[count * i + j] = found[j] * factor;
      }
      codes += run;
      values += count * run;
      column += run;
    }
  }
}

}  // namespace

void values_of_codes(const uint8_t* codes, const CodeBlocks& blocks, size_t values_per_code, const float* table,
                     const float* scales, float* values) {
  if (values_per_code == 1) {
    write_values<1>(codes, blocks, table, scales, values);
  } else {
    write_values<2>(codes, blocks, table, scales, values);
  }
}

}  // namespace tensorferry
