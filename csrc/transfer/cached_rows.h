// Rows of a table that the page cache holds. Many of them form one block, because a separate block for each row would
// cost a third of the time that copying the row takes. Rows that are close together in the file are read by one system
// call.
//
// A table's rows are the segments of a transfer, and a gap is the file's data between two of them (segments.h).
#pragma once

#include <cstdint>

#include "transfer/segments.h"

namespace tensorferry {

// The end of a block of rows that begins at `position`, which must be the start of a row. The block is as long as its
// limit allows, includes the gaps between its rows, and ends with a row. It ends early before a row that is long enough
// for a separate block. Returns `position` if the first row is that long.
uint64_t end_of_cached_rows(const Segments& rows, uint64_t position);

// The bytes of rows in a range, without its gaps.
uint64_t nbytes_of_rows(const Segments& rows, uint64_t begin, uint64_t end);

// Read the rows of a range from a buffered descriptor, passing over the gaps. `offset` is the file offset of position
// 0. Returns the distance from `begin` to the position that was reached, gaps included. If that is 0, returns 0 at the
// end of the file, or a negative errno: without `wait`, -EAGAIN if the cache holds nothing of the next row.
int64_t read_rows(const Segments& rows, uint64_t begin, uint64_t end, int descriptor, uint64_t offset, bool wait);

}  // namespace tensorferry
