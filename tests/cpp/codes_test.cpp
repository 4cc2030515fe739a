// Values of codes: each by its own block's scale, wherever in a block the codes begin.
#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "codes/values.h"

namespace tensorferry {
namespace {

TEST_CASE("each code's values are the table's times the scale of its block") {
  for (const size_t per_code : {1U, 2U}) {
    std::vector<float> table(256 * per_code);
    std::iota(table.begin(), table.end(), 1.0F);
    for (size_t rows = 1; rows <= 7; ++rows) {
      for (size_t columns = 1; columns <= 9; ++columns) {
        for (size_t place = 0; place < 12; ++place) {
          const size_t top = place % 3, left = place / 3, in_row = (left + columns + 3) / 4;
          // The memory has exactly this size, which lets a sanitizer detect each access beyond it.
          std::vector<float> scales((top + rows + 2) / 3 * in_row), values(rows * columns * per_code);
          std::iota(scales.begin(), scales.end(), 2.0F);
          std::vector<uint8_t> codes(rows * columns);
          std::iota(codes.begin(), codes.end(), static_cast<uint8_t>(200));
          values_of_codes(codes.data(), {rows, columns, 3, 4, top, left, in_row}, per_code, table.data(), scales.data(),
                          values.data());
          for (size_t i = 0; i < values.size(); ++i) {
            const size_t code = i / per_code, row = code / columns, column = code % columns;
            const float scale = scales[(top + row) / 3 * in_row + (left + column) / 4];
            REQUIRE(values[i] == table[codes[code] * per_code + i % per_code] * scale);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tensorferry
