// Rows of a table, chosen by their numbers: where each of them is in the file and in the caller's memory, in file
// order. This is arithmetic without I/O.
//
// The rows are sorted by number. Each page of the file is therefore read once, and pages that hold several rows, or a
// row that spans several pages, become one block (plan.h). A row that is requested several times is read once and then
// copied.
//
// A place is an index in the caller's list of row numbers. It is also the index of the row in the caller's memory,
// where rows are contiguous.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "transfer/items.h"
#include "transfer/segments.h"

namespace tensorferry {

struct NumberedRow {
  uint64_t row;
  size_t place;
};

struct OrderedRows {
  std::vector<NumberedRow> rows;  // ascending; equal numbers in the order of their places
  std::optional<size_t> outside;  // the place of the first number that is out of range; `rows` is then empty
};

// Sort row numbers. Negative numbers count from the end. With `is_unsigned` the numbers are unsigned 64-bit integers,
// so a negative value here is a large number and out of range.
OrderedRows order_rows(std::span<const int64_t> numbers, uint64_t row_count, bool is_unsigned);

// How rows are laid out in the file.
struct RowLayout {
  uint64_t row_nbytes;
  uint64_t stride_nbytes;  // from one row to the next, in the file
};

// The memory of the rows and the gaps between them, in file order from the first row on.
struct RowMemory {
  std::vector<Memory> pieces;
  std::vector<Segments::Copy> copies;  // the further places of rows that are requested several times
  uint64_t nbytes = 0;

  void add_gap(uint64_t gap_nbytes) {
    pieces.push_back({0, gap_nbytes});
    nbytes += gap_nbytes;
  }
};

// `memory` is the caller's array. If a row has several places, a read reads it into the first one and copies it to the
// others, and a write writes the bytes of the last one.
RowMemory memory_of_rows(std::span<const NumberedRow> rows, const RowLayout& layout, char* memory, bool write);

}  // namespace tensorferry
