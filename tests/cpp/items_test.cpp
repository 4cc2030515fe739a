// Tests of a call's items: which are moved together, and which are refused.
#include "transfer/items.h"

#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#include "scheduling.h"
#include "transfer/plan.h"

namespace tensorferry {
namespace {

class Call {
 public:
  explicit Call(bool write)
      : write_(write), file_(open_file(path(write), write)), other_(open_file(path(true), true)) {}
  ~Call() {
    if (request_) {
      request_->cancel();
      request_->seal();
    }
    (void)close(*scheduler_);
  }

  void add(uint64_t offset, uint64_t nbytes, bool other = false) {
    const auto& file = other ? other_ : file_;
    items_.push_back(
        {file, file->lease(), {reinterpret_cast<uintptr_t>(memory_.data()), nbytes}, offset, items_.size()});
  }

  // How many items each transfer has, and which are refused.
  std::vector<size_t> groups() const {
    std::vector<size_t> found;
    for (size_t index = 0; index < items_.size();) {
      const size_t end = std::max(end_of_neighbours(items_, index, write_), index + 1);
      found.push_back(end - index);
      index = end;
    }
    return found;
  }

  Prepared prepared() {
    if (request_) request_->seal();
    request_ = std::make_shared<Request>(scheduler_, RequestOptions{.write = write_});
    return prepare(items_, *scheduler_, request_);
  }

  std::vector<Item> items_;

 private:
  std::string path(bool written) {
    auto name = directory_.file(written ? "written" : "read");
    if (!written) {
      auto file = open_file(name, true);
      REQUIRE(::ftruncate(file->descriptor(), 1 << 20) == 0);
    }
    return name;
  }

  const bool write_;
  TemporaryDirectory directory_;
  std::vector<char> memory_ = std::vector<char>(1 << 20);
  std::shared_ptr<Scheduler> scheduler_ = make("threads");
  std::shared_ptr<File> file_, other_;
  std::shared_ptr<Request> request_;
};

using Groups = std::vector<size_t>;

}  // namespace

TEST_CASE("small neighbours are joined, reads over gaps of 16 KiB, and writes only where they touch") {
  for (const bool write : {false, true}) {
    CAPTURE(write);
    Call call(write);
    call.add(0, 4096);
    call.add(4096, 100);
    call.add(4196 + (16 << 10), 100);
    call.add(4296 + (32 << 10) + 1, 100);
    CHECK(call.groups() == (write ? Groups{2, 1, 1} : Groups{3, 1}));
  }
}

TEST_CASE("an item that is large, overlaps, goes backwards, is empty, or is of another file is moved alone") {
  Call call(false);
  call.add(0, 100);
  call.add(50, 100);                         // overlaps
  call.add(0, 100);                          // backwards
  call.add(100, 0);                          // has no bytes
  call.add(100, Plan::min_straight_nbytes);  // is large
  call.add(200, 100);
  call.add(300, 100, true);  // is of another file
  call.add(400, 100);
  CHECK(call.groups() == Groups(8, 1));
  call.items_[7].memory.location = Location{0, 0};
  call.add(500, 100);
  CHECK(call.groups() == Groups(9, 1));
}

TEST_CASE("joined items have their positions, and gaps between them have none") {
  Call call(false);
  call.add(8192, 100);
  call.add(8192 + 200, 100);
  std::swap(call.items_[0].position, call.items_[1].position);
  const auto found = call.prepared();
  REQUIRE(found.transfers.size() == 1);
  const Transfer& transfer = *found.transfers.front();
  CHECK(transfer.begin() == 8192);
  CHECK(transfer.nbytes() == 300);
  CHECK(transfer.index == 0);
  CHECK(transfer.spec().positions == std::vector<size_t>{1, gap_position, 0});
}

TEST_CASE("of joined items that do not fit a file only those are refused that do not") {
  Call call(false);
  call.add((1 << 20) - 300, 100);
  call.add((1 << 20) - 200, 100);
  call.add((1 << 20) - 50, 100);
  const auto found = call.prepared();
  CHECK_FALSE(found.fault);
  CHECK(found.transfers.size() == 2);
  REQUIRE(found.refused.size() == 1);
  CHECK(found.refused.front().first == 2);
  CHECK(found.refused.front().second.end_of_file);
  CHECK(found.refused.front().second.refused);
}

TEST_CASE("an error that no single item causes refuses all items, which may be prepared again") {
  Call call(true);
  call.add(1, 100);  // an edge, which needs a second descriptor
  call.add(0, 100, true);
  if (!call.items_[0].file->direct()) return;
  struct rlimit before;
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const struct rlimit none{0, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  auto found = call.prepared();
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(found.fault);
  CHECK(found.fault->error_number == EMFILE);
  CHECK(found.refused.empty());
  CHECK(found.transfers.empty());
  found = call.prepared();
  CHECK_FALSE(found.fault);
  CHECK(found.transfers.size() == 2);
}

TEST_CASE("a file that is refused in a first attempt is truncated in the second one") {
  TemporaryDirectory directory;
  const auto scheduler = make("threads");
  std::vector<char> memory(1 << 20, 1);
  const auto name = directory.file("shorter");
  auto written = open_file(name, true);
  auto other = open_file(directory.file("other"), true);
  if (!other->direct()) return;
  REQUIRE(::ftruncate(written->descriptor(), 1 << 20) == 0);
  REQUIRE(written->retire(milliseconds(60'000)));
  const auto item = [&](const std::shared_ptr<File>& file, uint64_t offset, size_t position) {
    return Item{file, file->lease(), {reinterpret_cast<uintptr_t>(memory.data()), 100}, offset, position};
  };
  const auto request = new_request(*scheduler, {.write = true, .truncate = true});
  std::vector<Item> items;
  items.push_back(item(written, 0, 0));
  items.push_back(item(other, 1, 1));  // an edge, which needs a second descriptor
  struct rlimit before;
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const struct rlimit none{0, before.rlim_max};
  (void)find_lanes(items, *scheduler);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  const auto first = prepare(items, *scheduler, request);
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(first.fault);
  CHECK(first.refused.empty());

  written = open_file(name, true);
  items.clear();
  items.push_back(item(written, 0, 0));
  (void)find_lanes(items, *scheduler);
  auto second = prepare(items, *scheduler, request);
  REQUIRE_FALSE(second.fault);
  scheduler->submit(request, second.transfers);
  request->seal();
  REQUIRE(request->wait_for(milliseconds(60'000)));
  CHECK(request->faults().empty());
  const auto size = written->size_for_reading();
  CHECK(**size == 100);
}

TEST_CASE("a closed file refuses its items, and no others") {
  Call call(true);
  call.add(0, 100);
  call.add(0, 100, true);
  call.items_[0].lease = {};
  while (!call.items_[0].file->retire(milliseconds(1))) {
  }
  const auto found = call.prepared();
  CHECK(found.transfers.size() == 1);
  REQUIRE(found.refused.size() == 1);
  CHECK(found.refused.front().first == 0);
  CHECK(found.refused.front().second.error_number == EBADF);
}

}  // namespace tensorferry
