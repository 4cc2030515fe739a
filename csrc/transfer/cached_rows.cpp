#include "transfer/cached_rows.h"

#include <errno.h>
#include <sys/uio.h>

#include <array>

#include "engine/engine.h"
#include "transfer/plan.h"

namespace tensorferry {
namespace {

// The limits of a block, in rows and gaps (max_pieces) and in bytes of rows. With so many, the overhead of the block is
// small. With more, there would be too few blocks for the threads that share a request.
constexpr size_t max_pieces = 128;
constexpr uint64_t max_block_nbytes = uint64_t{256} << 10;

// Gaps up to this size are read together with the rows around them, which costs less than another system call.
constexpr uint64_t max_copied_gap_nbytes = 2048;
constexpr size_t max_places = 32;

// One call of preadv2: the buffers into which it reads rows and short gaps.
struct RowsRead {
  std::array<iovec, max_places> places;
  size_t count = 0;
  uint64_t nbytes = 0;
};

// Build the call that begins at `position`, which is within a row or at its start. Bytes of gaps are read into
// `unwanted`.
RowsRead read_at(const Segments& rows, uint64_t position, uint64_t end, char* unwanted) {
  RowsRead next_read;
  for (size_t index = rows.index_at(position); index < rows.count() && next_read.count < max_places; ++index) {
    const Segments::Piece piece = next_read.count == 0 ? rows.at(position) : rows[index];
    if (piece.begin >= end || (piece.is_gap() && piece.nbytes > max_copied_gap_nbytes)) break;
    next_read.places[next_read.count++] = {piece.is_gap() ? unwanted : piece.memory, piece.nbytes};
    next_read.nbytes += piece.nbytes;
  }
  return next_read;
}

}  // namespace

uint64_t end_of_cached_rows(const Segments& rows, uint64_t position) {
  uint64_t end = position, nbytes = 0;
  size_t pieces = 0;
  for (size_t index = rows.index_at(position); index < rows.count(); ++index) {
    const auto& piece = rows[index];
    if (piece.nbytes >= Plan::min_straight_nbytes && !piece.is_gap()) break;
    if (++pieces > max_pieces || nbytes >= max_block_nbytes) break;
    if (piece.is_gap()) continue;
    nbytes += piece.nbytes;
    end = piece.begin + piece.nbytes;
  }
  return end;
}

uint64_t nbytes_of_rows(const Segments& rows, uint64_t begin, uint64_t end) {
  uint64_t nbytes = 0;
  rows.each(begin, end - begin, [&](const Segments::Piece& piece) { nbytes += piece.is_gap() ? 0 : piece.nbytes; });
  return nbytes;
}

int64_t read_rows(const Segments& rows, uint64_t begin, uint64_t end, int descriptor, uint64_t offset, bool wait) {
  char unwanted[max_copied_gap_nbytes];
  uint64_t position = begin;
  const auto moved = [&](int64_t result) { return position > begin ? static_cast<int64_t>(position - begin) : result; };
  while (position < end) {
    const auto next = rows.at(position);
    if (next.is_gap()) {
      position += next.nbytes;
      continue;
    }
    const RowsRead next_read = read_at(rows, position, end, unwanted);
    const ssize_t result = ::preadv2(descriptor, next_read.places.data(), static_cast<int>(next_read.count),
                                     static_cast<off_t>(offset + position), wait ? 0 : RWF_NOWAIT);
    if (result <= 0) return moved(result < 0 ? -(wait ? errno : errno_of_cached()) : 0);
    position += static_cast<uint64_t>(result);
    if (static_cast<uint64_t>(result) < next_read.nbytes && !wait) return moved(0);
  }
  return moved(0);
}

}  // namespace tensorferry
