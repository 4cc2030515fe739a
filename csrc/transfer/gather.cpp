#include "transfer/gather.h"

#include <algorithm>

namespace tensorferry {

OrderedRows order_rows(std::span<const int64_t> numbers, uint64_t row_count, bool is_unsigned) {
  OrderedRows ordered;
  ordered.rows.reserve(numbers.size());
  bool ascending = true;
  uint64_t before = 0;
  for (size_t place = 0; place < numbers.size(); ++place) {
    const bool from_end = numbers[place] < 0 && !is_unsigned;
    const uint64_t row = static_cast<uint64_t>(numbers[place]) + (from_end ? row_count : 0);
    if (row >= row_count) return {{}, place};
    ordered.rows.push_back({row, place});
    ascending = ascending && row >= before;
    before = row;
  }
  if (!ascending) {
    std::sort(ordered.rows.begin(), ordered.rows.end(), [](const NumberedRow& one, const NumberedRow& other) {
      return one.row != other.row ? one.row < other.row : one.place < other.place;
    });
  }
  return ordered;
}

RowMemory memory_of_rows(std::span<const NumberedRow> rows, const RowLayout& layout, char* memory, bool write) {
  RowMemory found;
  if (rows.empty()) return found;
  const uint64_t row_nbytes = layout.row_nbytes;
  const auto place_of = [&](size_t index) { return memory + rows[index].place * row_nbytes; };
  found.pieces.reserve(2 * rows.size());
  bool grows = false;  // whether the last piece consists of rows without copies, so the next such row may extend it
  size_t next;
  for (size_t index = 0; index < rows.size(); index = next) {
    for (next = index + 1; next < rows.size() && rows[next].row == rows[index].row;) ++next;
    const uint64_t begin = (rows[index].row - rows.front().row) * layout.stride_nbytes;
    const auto address = reinterpret_cast<uintptr_t>(place_of(write ? next - 1 : index));
    const bool copied = !write && next > index + 1;
    if (begin > found.nbytes) {
      found.add_gap(begin - found.nbytes);
      grows = false;
    }
    if (grows && !copied && found.pieces.back().address + found.pieces.back().nbytes == address) {
      found.pieces.back().nbytes += row_nbytes;
    } else {
      found.pieces.push_back({address, row_nbytes});
      grows = !copied;
    }
    found.nbytes += row_nbytes;
    for (size_t copy = index + 1; copied && copy < next; ++copy) {
      found.copies.push_back({found.pieces.size() - 1, place_of(copy)});
    }
  }
  return found;
}

}  // namespace tensorferry
