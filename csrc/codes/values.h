// Values of quantised tensors. A tensor is stored as a matrix of codes of one byte, and each rectangular block of codes
// has a scale. The value of a code is its entry in a table times the scale of its block. The conversion reads the codes
// in one pass, while tensor libraries need several. It starts no threads: compute threads that spin while they wait for
// work would take processors from the I/O workers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorferry {

// A rectangular part of a matrix of codes, and how the blocks of the matrix divide it. The first block is the one that
// contains the part's first code.
struct CodeBlocks {
  size_t rows;  // rows and columns: the size of the part, in codes
  size_t columns;
  size_t block_rows;  // these two: the size of a block; an edge of the matrix may cut a block off
  size_t block_columns;
  size_t top;            // the rows of the first block that are above the part
  size_t left;           // the columns of the first block that are to the left of the part
  size_t scales_in_row;  // the length of a row in the matrix of scales, which has one scale for each block
};

// Write the values of all codes of a part to `values`, in C order. `table` has `values_per_code` (one or two) entries
// for each of the 256 codes, and `scales` points to the scale of the first block.
void values_of_codes(const uint8_t* codes, const CodeBlocks& blocks, size_t values_per_code, const float* table,
                     const float* scales, float* values);

}  // namespace tensorferry
