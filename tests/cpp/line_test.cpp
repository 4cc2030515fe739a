// Tests of the order of blocks: which transfer's block is next when blocks are taken from a line.
#include "transfer/line.h"

#include <algorithm>
#include <map>
#include <utility>

#include "scheduling.h"

namespace tensorferry {
namespace {

constexpr uint64_t block_nbytes = uint64_t{256} << 10;
constexpr uint64_t mebibyte = uint64_t{1} << 20;

// A line of requests with one transfer each, named by letters; their bytes are never moved.
class Requests {
 public:
  void add(char name, uint64_t nbytes, bool background = false) {
    auto request = std::make_shared<Request>(scheduler_, RequestOptions{.background = background});
    auto transfer = Transfer::create({file_, {&never_moved_, nbytes}, 0, true}, request, 0, block_nbytes);
    REQUIRE(transfer);
    request->add({*transfer});
    left_[(*transfer).get()] = {name, nbytes};
    line_.add(*transfer);
  }

  // Takes so many blocks of classes before `limit`, and returns the names of their transfers. The blocks of
  // transfers with capital letters are four times as long.
  std::string take(size_t count, Line::Class limit = Line::class_count) {
    std::string names;
    while (names.size() < count && line_.has_before(limit)) {
      const std::shared_ptr<Transfer> transfer = line_.front(limit);
      auto& [name, left] = left_[transfer.get()];
      const uint64_t nbytes = std::min(left, name < 'a' ? 4 * block_nbytes : block_nbytes);
      left -= nbytes;
      line_.took(*transfer, nbytes, left == 0);
      names += name;
    }
    return names;
  }

  ~Requests() { (void)close(*scheduler_); }  // no block was handed to a worker

 private:
  char never_moved_ = 0;
  TemporaryDirectory directory_;
  std::shared_ptr<Scheduler> scheduler_ = make("threads");
  std::shared_ptr<File> file_ = open_file(directory_.file("file"), true, DirectMode::never);
  std::map<const Transfer*, std::pair<char, uint64_t>> left_;
  Line line_;
};

}  // namespace

TEST_CASE("requests take turns of a megabyte") {
  Requests line;
  line.add('a', 3 * mebibyte);
  line.add('b', 3 * mebibyte);
  CHECK(line.take(100) == "aaaabbbbaaaabbbbaaaabbbb");
}

TEST_CASE("small requests come first, and the others in every seventeenth block") {
  Requests line;
  line.add('g', 2 * mebibyte, true);
  line.add('n', 2 * mebibyte);
  CHECK(line.take(2) == "nn");
  for (int count = 0; count < 40; ++count) line.add('s', 4096);
  const std::string sixteen(16, 's');
  CHECK(line.take(34) == sixteen + "n" + sixteen + "n");
  CHECK(line.take(100) == std::string(8, 's') + "nnnn" + std::string(8, 'g'));
}

TEST_CASE("background requests get a seventeenth of the bytes, although their blocks are longer") {
  Requests line;
  line.add('G', 4 * mebibyte, true);
  line.add('n', 20 * mebibyte);
  const std::string sixteen(16, 'n');
  CHECK(line.take(100) == sixteen + "G" + std::string(64, 'n') + "GGG");
}

TEST_CASE("while a class has to wait, only blocks of better classes are taken") {
  Requests line;
  line.add('g', mebibyte, true);
  line.add('n', 2 * mebibyte);
  for (int count = 0; count < 20; ++count) line.add('s', 4096);
  CHECK(line.take(100, Line::small).empty());
  CHECK(line.take(100, Line::normal) == std::string(20, 's'));
  CHECK(line.take(100, Line::background) == std::string(8, 'n'));
  CHECK(line.take(100) == std::string(4, 'g'));
}

}  // namespace tensorferry
