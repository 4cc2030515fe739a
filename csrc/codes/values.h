// What codes of one byte mean, in blocks that have a scale each: quantised tensors. One pass over the codes, which
// libraries of tensors need several for; and no threads, whose spinning would take the processors from the workers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry {

// A part of a matrix of codes, and how blocks lie in it.
struct CodeBlocks {
  size_t rows;
  size_t columns;
  size_t block_rows;  // of all blocks but those at the edges, as the next
  size_t block_columns;
  size_t top;  // codes of the first block that are not in the part
  size_t left;
  size_t scales_in_row;  // of the matrix of scales, which begins with the first block's
};

// Writes the values of all codes, in C order; `table` has one or two of them (`values_per_code`) for each of 256 codes.
void values_of_codes(const uint8_t* codes, const CodeBlocks& blocks, size_t values_per_code, const float* table,
                     const float* scales, float* values);

}  // namespace tensorferry
