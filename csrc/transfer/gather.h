// Rows of a table by number: which bytes of its file are wanted, in order, and where each of them goes. Arithmetic
// only.
//
// Rows are sorted, so that each page is read once, and pages that hold several rows, or a row that lies in several
// pages, become one block (plan.h). A row that is asked for several times is read once, and copied.
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
  size_t place;  // of its number among those that were given
};

struct OrderedRows {
  std::vector<NumberedRow> rows;  // ascending; those of one number in the order of their places
  std::optional<size_t> outside;  // the place of the first number that is of no row; then there are no rows
};

// Negative numbers count from the end, unless they are numbers without a sign beyond what has one.
OrderedRows order_rows(std::span<const int64_t> numbers, uint64_t row_count, bool is_unsigned);

// How rows lie in the file, and in memory one behind the other.
struct RowLayout {
  uint64_t row_nbytes;
  uint64_t stride_nbytes;  // from one row to the next, in the file
};

// Memory and gaps from the first of the rows on.
struct RowMemory {
  std::vector<Memory> pieces;
  std::vector<Segments::Copy> copies;
  uint64_t nbytes = 0;

  void add_gap(uint64_t gap_nbytes) {
    pieces.push_back({0, gap_nbytes});
    nbytes += gap_nbytes;
  }
};

// To be read: a row's first place is read into, and the others are copies. To be written: its last place is written.
RowMemory memory_of_rows(std::span<const NumberedRow> rows, const RowLayout& layout, char* memory, bool write);

}  // namespace tensorferry
