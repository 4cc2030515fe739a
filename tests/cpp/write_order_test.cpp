// Tests of the order of writes: which one may write now, and which one is next. No bytes are written.
#include "transfer/write_order.h"

#include <doctest/doctest.h>

#include <string>

namespace tensorferry {
namespace {

constexpr FileIdentity file{1, 2}, other_file{1, 3};

class Named final : public OrderedWrite {
 public:
  Named(char name, std::string& turns, const FileIdentity& identity, uint64_t begin, uint64_t end)
      : OrderedWrite(identity, begin, end), name_(name), turns_(turns) {}

  void turn_has_come() override { turns_ += name_; }

 private:
  const char name_;
  std::string& turns_;
};

}  // namespace

TEST_CASE("of two writes of a file the second begins at once just where they do not overlap") {
  std::string turns;
  constexpr uint64_t size = 5;
  for (uint64_t begin = 0; begin < size; ++begin)
    for (uint64_t end = begin + 1; end <= size; ++end)
      for (uint64_t later_begin = 0; later_begin < size; ++later_begin)
        for (uint64_t later_end = later_begin + 1; later_end <= size; ++later_end) {
          INFO(begin, "-", end, " ", later_begin, "-", later_end);
          const auto first = std::make_shared<Named>('a', turns, file, begin, end);
          const auto second = std::make_shared<Named>('b', turns, file, later_begin, later_end);
          REQUIRE(WriteOrder::try_to_enter({first}));
          const bool begun = WriteOrder::try_to_enter({second});
          CHECK(begun == (later_end <= begin || end <= later_begin));
          WriteOrder::leave(*first);
          if (begun) WriteOrder::leave(*second);
        }
  CHECK(turns.empty());
}

TEST_CASE("waiting writes continue in order, as soon as the writes before them have ended") {
  std::string turns;
  const auto write = [&](char name, uint64_t begin, uint64_t end, const FileIdentity& identity = file) {
    return std::make_shared<Named>(name, turns, identity, begin, end);
  };
  const auto a = write('a', 0, 10), b = write('b', 10, 20), c = write('c', 5, 15), d = write('d', 0, 3);
  const auto elsewhere = write('e', 0, 20, other_file);
  WriteOrder::Writes in_the_way;
  CHECK(WriteOrder::enter({a, b, c, d, elsewhere}, in_the_way) == std::vector{true, true, false, false, true});
  WriteOrder::leave(*a);
  CHECK(turns.empty());  // c still waits for b, and d waits for c
  WriteOrder::leave(*b);
  CHECK(turns == "cd");
  for (const auto& ended : {c, d, elsewhere}) WriteOrder::leave(*ended);
  CHECK(WriteOrder::try_to_enter({a}));
  WriteOrder::leave(*a);
}

TEST_CASE("a write and what cuts its file behind it begin together or not at all") {
  std::string turns;
  const auto write = std::make_shared<Named>('w', turns, file, 0, 10);
  const auto cut = std::make_shared<Named>('c', turns, file, 10, UINT64_MAX);
  const auto nothing = std::make_shared<Named>('n', turns, file, 0, 0);
  const auto beyond = std::make_shared<Named>('b', turns, file, 50, 60);
  REQUIRE(WriteOrder::try_to_enter({nothing, beyond}));
  CHECK_FALSE(WriteOrder::try_to_enter({write, cut}));
  WriteOrder::Writes in_the_way;
  REQUIRE(WriteOrder::enter({write}, in_the_way).front());  // the order has no remains of it
  CHECK_FALSE(WriteOrder::enter({cut}, in_the_way).front());
  WriteOrder::leave(*beyond);
  CHECK(turns == "c");
  const auto later = std::make_shared<Named>('l', turns, file, 20, 30);
  CHECK_FALSE(WriteOrder::enter({later}, in_the_way).front());
  WriteOrder::leave(*write);
  WriteOrder::leave(*cut);
  CHECK(turns == "cl");
  WriteOrder::leave(*later);
}

}  // namespace tensorferry
