// Rows of a table that the page cache holds: many of them are one block, since a block of its own costs a third of what
// copying a row costs; and those that are close together are one system call.
#pragma once

#include <cstdint>

#include "transfer/segments.h"

namespace tensorferry {

// Where a block of rows ends that begins at `position`, with a row: before a gap, or before what is long enough for a
// block of its own. As `position` if that is so there.
uint64_t end_of_cached_rows(const Segments& rows, uint64_t position);

// Bytes of the rows in a range; gaps are none.
uint64_t nbytes_of_rows(const Segments& rows, uint64_t begin, uint64_t end);

// Reads a range, whose gaps are passed over, from a descriptor through the page cache; the first byte of all rows lies
// at `offset` of the file. Returns how far it came, or as read(2) does; without `wait` -EAGAIN where the cache has
// nothing of what is next.
int64_t read_rows(const Segments& rows, uint64_t begin, uint64_t end, int descriptor, uint64_t offset, bool wait);

}  // namespace tensorferry
