// Tests of the screen for pickles: the pickles that it accepts, and no reads beyond its data.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "pickle/screen.h"

namespace tensorferry {
namespace {

using namespace std::string_view_literals;

// The memory has exactly this size, which lets a sanitizer detect each read beyond it.
size_t end_of(std::string_view pickle) {
  const std::vector<uint8_t> data(pickle.begin(), pickle.end());
  return screened_pickle_end(data);
}

constexpr auto record = "\x80\4\x8c\1m\x8c\1n\x93\x94)\x81}(\x8c\1aK\1\x8c\1bh\0ub.behind"sv;

TEST_CASE("a pickle of a record passes, and cut short it does not") {
  const size_t nbytes = record.size() - "behind"sv.size();
  CHECK(end_of(record) == nbytes);
  for (size_t cut = 0; cut < nbytes; ++cut) CHECK(end_of(record.substr(0, cut)) == 0);
}

TEST_CASE("states that set attributes of anything, unknown memo entries and long hashes do not pass") {
  CHECK(end_of("\x8c\1m\x8c\1n\x93N}\x86"
               "b."sv) == 0);
  CHECK(end_of("\x8c\1m\x8c\1n\x93}K\1K\1sb."sv) == 0);
  CHECK(end_of("\x8c\1m\x8c\1n\x93}K\1K\1s\x8c\1aK\1sb."sv) == 0);
  CHECK(end_of("\x8c\1m\x8c\1n\x93}\x8c\1aK\1sb."sv) == 0);  // of a class itself
  CHECK(end_of("\x8c\1m\x8c\1n\x93\x8c\1aK\1s."sv) == 0);
  CHECK(end_of("\x95\1\0\0\0\0\0\0\0N."sv) == 11);
  CHECK(end_of("\x95\3\0\0\0\0\0\0\0N."sv) == 0);
  // The same dict in the memo and on the stack.
  CHECK(end_of("\x8c\1m\x8c\1n\x93)\x81}\x94h\0K\5K\6s\x86."sv) == 0);
  CHECK(end_of("}\x94(K\1K\1u\x8c\1m\x8c\1n\x93h\0\x8c\1aK\1sb\x86."sv) == 0);
  CHECK(end_of("\x8c\1m\x8c\1n\x93K\1\x85\x81."sv) == 0);
  CHECK(end_of("Nh\0."sv) == 0);
  CHECK(end_of("N(u."sv) == 0);
  CHECK(end_of("](e."sv) == 3 + 1);
  std::string_view doubled = "h\0h\0\x86\x94"sv;
  std::vector<uint8_t> data{'}', 'K', 1, 0x94};
  for (uint8_t number = 0; number < 60; ++number) {
    for (char each : doubled) data.push_back(each == 0 ? number : static_cast<uint8_t>(each));
  }
  data.insert(data.end(), {'N', 's', '.'});
  CHECK(screened_pickle_end(data) == 0);
}

TEST_CASE("any bytes are looked at within their bounds") {
  std::mt19937 generator(7);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<uint8_t> data(record.begin(), record.end() - 6);
    for (int change = 0; change < 3; ++change) {
      data[generator() % data.size()] = static_cast<uint8_t>(
          generator() % 2 ? generator() : static_cast<uint8_t>(record[generator() % record.size()]));
    }
    data.resize(data.size() - generator() % 4);
    CHECK(screened_pickle_end(data) <= data.size());
  }
}

}  // namespace
}  // namespace tensorferry
