// Files, engines and the scheduler together, on real files: sizes, parallelism, faults, cancellation, close.
#include "transfer/scheduler.h"
#include "transfer/completion_queue.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "memory/allocation.h"
#include "scheduling.h"

namespace tensorferry {
namespace {

TEST_CASE("written bytes are read again, on every engine, by any number of workers") {
  TemporaryDirectory directory;
  for (const auto& engine : engines)
    for (uint32_t workers : {1u, 3u}) {
      auto scheduler = make(engine, workers);
      if (!scheduler) continue;
      const std::string path = directory.file(engine + std::to_string(workers));
      for (size_t nbytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{65'537}, size_t{1'000'003}})
        for (uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{4096}, uint64_t{123'457}}) {
          auto source = pattern(nbytes + 64, static_cast<unsigned>(nbytes + offset));
          std::vector<char> found(nbytes + 64);
          auto written = start(*scheduler, {open_file(path, true), {source.data() + 1, nbytes}, offset, true});
          REQUIRE(written->wait_for(milliseconds(60'000)));
          CHECK_FALSE(written->fault());
          auto read =
              start(*scheduler, {open_file(path, false, DirectMode::never), {found.data() + 3, nbytes}, offset});
          REQUIRE(read->wait_for(milliseconds(60'000)));
          CHECK_FALSE(read->fault());
          CHECK(std::memcmp(source.data() + 1, found.data() + 3, nbytes) == 0);
        }
      CHECK(close(*scheduler));
    }
}

TEST_CASE("dropping a file after the end of its transfer closes it") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  std::vector<char> bytes(4096);
  (void)open_file(path, true);  // makes it
  REQUIRE(::truncate(path.c_str(), 4096) == 0);
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const size_t before = File::open_descriptors();
    size_t late = 0;
    for (int round = 0; round < 1000; ++round) {
      auto file = open_file(path, false);
      auto request = start(*scheduler, {file, {bytes.data(), bytes.size()}, 0});
      while (!request->done()) {
      }
      file.reset();
      late += File::open_descriptors() != before;
      while (File::open_descriptors() != before) {
      }
    }
    CHECK(late == 0);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("neighbours of a ragged write keep their bytes while both are written") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 2);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    const auto source = pattern(3'000'000, 5);
    auto file = open_file(path, true);
    std::vector<std::shared_ptr<Request>> requests;
    // Pieces of many lengths, each sharing pages with its neighbours, in two interleaved rounds.
    std::vector<std::pair<size_t, size_t>> pieces;
    for (size_t begin = 0, length = 1; begin < source.size(); length = length * 3 % 70'001 + 1) {
      const size_t nbytes = std::min(length, source.size() - begin);
      pieces.emplace_back(begin, nbytes);
      begin += nbytes;
    }
    for (size_t parity : {0u, 1u})
      for (size_t index = parity; index < pieces.size(); index += 2)
        requests.push_back(
            start(*scheduler, {file,
                               {const_cast<char*>(source.data()) + pieces[index].first, pieces[index].second},
                               pieces[index].first,
                               true}));
    for (auto& request : requests) {
      REQUIRE(request->wait_for(milliseconds(60'000)));
      CHECK_FALSE(request->fault());
    }
    std::vector<char> found(source.size());
    auto read = start(*scheduler, {open_file(path, false), {found.data(), found.size()}, 0}, true);
    REQUIRE(read->wait_for(milliseconds(60'000)));
    CHECK(found == source);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("overlapping writes run in order, also on different schedulers, and lose nothing outside the overlap") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto first = make(engine, 2);
    auto second = make("threads");
    if (!first) continue;
    const std::string path = directory.file(engine);
    std::vector<char> expected(3'000'000);
    std::vector<std::vector<char>> sources;
    std::vector<std::shared_ptr<Request>> requests;
    std::minstd_rand random(7);
    for (unsigned round = 0; round < 60; ++round) {
      const size_t begin = random() % 1'000'000;
      const size_t nbytes = random() % 2'000'000 + 1;
      sources.push_back(pattern(nbytes, round));
      std::copy(sources.back().begin(), sources.back().end(), expected.begin() + static_cast<ptrdiff_t>(begin));
      Scheduler& scheduler = round % 3 == 0 ? *second : *first;
      requests.push_back(
          start(scheduler, {open_file(path, true), {sources.back().data(), nbytes}, begin, true}, round % 5 == 0));
    }
    for (auto& request : requests) {
      REQUIRE(request->wait_for(milliseconds(60'000)));
      CHECK_FALSE(request->fault());
    }
    struct stat status;
    REQUIRE(::stat(path.c_str(), &status) == 0);
    std::vector<char> found(static_cast<size_t>(status.st_size));
    auto read = start(*first, {open_file(path, false), {found.data(), found.size()}, 0});
    REQUIRE(read->wait_for(milliseconds(60'000)));
    expected.resize(found.size());
    CHECK(found == expected);
    CHECK(close(*first));
    CHECK(close(*second));
  }
}

TEST_CASE("a file that ends during the read is a fault with the place and the count") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    auto source = pattern(300'000, 1);
    auto written = start(*scheduler, {open_file(path, true), {source.data(), source.size()}, 0, true});
    REQUIRE(written->wait_for(milliseconds(60'000)));

    std::vector<char> found(source.size());
    auto request = new_request(*scheduler);
    auto transfer = Transfer::create({open_file(path, false), {found.data(), found.size()}, 0}, request, 0, 64 << 10);
    REQUIRE(transfer);
    REQUIRE(::truncate(path.c_str(), 200'000) == 0);  // after the size was checked
    hand_over(*scheduler, request, *transfer);
    REQUIRE(request->wait_for(milliseconds(60'000)));
    REQUIRE(request->fault());
    CHECK(request->fault()->end_of_file);
    CHECK_FALSE(request->fault()->refused);
    CHECK(request->fault()->offset == 200'000);
    CHECK(request->fault()->expected == found.size());
    CHECK(std::memcmp(source.data(), found.data(), 196'608) == 0);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("the pieces of a file that is dropped with its request are written before it is closed") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 2, 16, 16 << 10);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    const auto source = pattern(32 * 5'000, 4);
    for (int round = 0; round < 100; ++round) {
      const RequestOptions options{.write = true, .truncate = round % 2 == 1, .close_files = true};
      REQUIRE(scheduler->admit(places(*scheduler, 32), milliseconds(60'000)) == Scheduler::Admission::admitted);
      auto request = std::make_shared<Request>(scheduler, options);
      auto file = open_file(path, true);
      std::vector<std::shared_ptr<Transfer>> transfers;
      for (size_t piece = 0; piece < 32; ++piece) {
        auto memory = const_cast<char*>(source.data()) + piece * 5'000;
        auto transfer = Transfer::create({file, {memory, 5'000}, piece * 5'000, true}, request, piece, 16 << 10);
        REQUIRE(transfer);
        transfers.push_back(*transfer);
      }
      scheduler->submit(request, std::exchange(transfers, {}));
      request->seal();
      file.reset();  // the request has the last one
      REQUIRE(request->wait_for(milliseconds(60'000)));
      CHECK_FALSE(request->fault());
      CHECK(scheduler->outstanding() == 0);
    }
    std::vector<char> found(source.size());
    auto read = start(*scheduler, {open_file(path, false), {found.data(), found.size()}, 0}, true);
    REQUIRE(read->wait_for(milliseconds(60'000)));
    CHECK(found == source);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("several threads submit while others wait") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 2, 16, 16 << 10);
    if (!scheduler) continue;
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    std::vector<std::string> paths;
    for (unsigned id = 0; id < 4; ++id) paths.push_back(directory.file(engine + std::to_string(id)));
    for (unsigned id = 0; id < 4; ++id)
      threads.emplace_back([&, id] {
        auto source = pattern(200'000 + id, id);
        for (int round = 0; round < 10; ++round) {
          std::vector<char> found(source.size());
          auto file = File::open(paths[id], {.write = true, .create = true});
          auto out = new_request(*scheduler);
          auto write = Transfer::create({*file, {source.data(), source.size()}, 11, true}, out, 0, 16 << 10);
          hand_over(*scheduler, out, *write, round % 2 != 0);
          while (!out->wait_for(milliseconds(100))) {
          }
          auto again = File::open(paths[id], {.read = true});
          auto in = new_request(*scheduler);
          auto read = Transfer::create({*again, {found.data(), found.size()}, 11}, in, 0, 16 << 10);
          hand_over(*scheduler, in, *read, round % 3 != 0);
          while (!in->wait_for(milliseconds(100))) {
          }
          wrong += found != source;
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(scheduler->outstanding() == 0);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("a cancelled request ends, and its queue continues") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 1, 1, 4096);
    if (!scheduler) continue;
    auto source = pattern(4 << 20, 1);
    auto memory = Allocation::create(source.size(), Locking::none);
    std::memcpy(memory->data(), source.data(), source.size());
    auto file = open_file(directory.file(engine), true);
    auto first = start(*scheduler, {file, {memory->data(), source.size()}, 0, true});
    auto second = start(*scheduler, {file, {memory->data(), 8192}, 0, true});
    first->cancel();
    REQUIRE(first->wait_for(milliseconds(60'000)));
    REQUIRE(second->wait_for(milliseconds(60'000)));
    if (first->fault()) CHECK(first->fault()->error_number == ECANCELED);
    CHECK_FALSE(second->fault());
    CHECK(close(*scheduler));
  }
}

// Ordinary pages that have not been touched.
struct FreshMemory {
  explicit FreshMemory(size_t size) : nbytes(size) {
    void* mapped = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(mapped != MAP_FAILED);
    (void)::madvise(mapped, nbytes, MADV_NOHUGEPAGE);
    data = static_cast<char*>(mapped);
  }
  ~FreshMemory() { ::munmap(data, nbytes); }
  FreshMemory(const FreshMemory&) = delete;
  FreshMemory& operator=(const FreshMemory&) = delete;

  size_t nbytes;
  char* data;
};

TEST_CASE("memory without pages gets them before its block is an engine's, once, and by other threads than workers") {
  TemporaryDirectory directory;
  constexpr size_t block_nbytes = 512 << 10;
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 1, 4, block_nbytes);
    if (!scheduler) continue;
    auto source = pattern(16 * block_nbytes, 5);
    const std::string path = directory.file(engine);
    auto file = open_file(path, true);
    if (!file->direct()) {  // cached bytes would be copied from the page cache at once
      MESSAGE("skipping: direct I/O is not available here");
      return;
    }
    auto written = start(*scheduler, {file, {source.data(), source.size()}, 0, true});
    REQUIRE(written->wait_for(milliseconds(60'000)));
    CHECK(scheduler->statistics().touched_nbytes == 0);
    uint64_t touched = 0;
    for (size_t ragged : {size_t{0}, size_t{1}}) {  // straight into memory, and through buffers
      FreshMemory memory(source.size() + 4096);
      for (bool again : {false, true}) {
        Segments segments(memory.data + ragged, source.size());
        auto read = start(*scheduler, {open_file(path, false), std::move(segments), 0});
        REQUIRE(read->wait_for(milliseconds(60'000)));
        CHECK_FALSE(read->fault());
        CHECK(std::memcmp(source.data(), memory.data + ragged, source.size()) == 0);
        if (!again) touched += source.size();
        // Where blocks do not begin with pages, two share one.
        CHECK(scheduler->statistics().touched_nbytes == touched);
      }
    }
    CHECK(close(*scheduler));
  }
}

TEST_CASE("a read that is cancelled while its memory gets pages ends, and small pieces are left alone") {
  TemporaryDirectory directory;
  auto scheduler = make("", 1, 8, 1 << 20);
  REQUIRE(scheduler);
  auto source = pattern(64 << 20, 6);
  const std::string path = directory.file("file");
  auto written = start(*scheduler, {open_file(path, true), {source.data(), source.size()}, 0, true});
  REQUIRE(written->wait_for(milliseconds(60'000)));
  {
    FreshMemory memory(source.size());
    auto read = start(*scheduler, {open_file(path, false), {memory.data, memory.nbytes}, 0});
    read->cancel();
    REQUIRE(read->wait_for(milliseconds(60'000)));
    if (read->fault()) CHECK(read->fault()->error_number == ECANCELED);
  }
  const uint64_t before = scheduler->statistics().touched_nbytes;
  FreshMemory memory(1 << 20);
  Segments pieces;
  for (size_t at = 0; at < memory.nbytes; at += 64 << 10) pieces.add(memory.data + at, 64 << 10);
  auto read = start(*scheduler, {open_file(path, false), std::move(pieces), 0});
  REQUIRE(read->wait_for(milliseconds(60'000)));
  CHECK(std::memcmp(source.data(), memory.data, memory.nbytes) == 0);
  CHECK(scheduler->statistics().touched_nbytes == before);
  CHECK(close(*scheduler));
}

TEST_CASE("who submits more to a device than may be outstanding waits, and nobody else") {
  auto scheduler = make("threads");
  using enum Scheduler::Admission;
  const milliseconds at_once(0);
  const auto hung = scheduler->lane_of(1);
  const auto other = scheduler->lane_of(2);
  const std::vector<Scheduler::Places> all{{hung, Scheduler::max_outstanding}};
  const std::vector<Scheduler::Places> one{{hung, 1}};
  const std::vector<Scheduler::Places> one_of_each{{other, 1}, {hung, 1}};
  CHECK(scheduler->admit(all, at_once) == admitted);
  CHECK(scheduler->admit(one, at_once) == full);
  CHECK(scheduler->admit(one_of_each, at_once) == full);
  CHECK(scheduler->admit({{other, Scheduler::max_outstanding}}, at_once) == admitted);
  CHECK(scheduler->outstanding() == 2 * Scheduler::max_outstanding);
  scheduler->take_back({{other, Scheduler::max_outstanding}});
  scheduler->take_back(one);
  CHECK(scheduler->admit(one_of_each, at_once) == admitted);
  CHECK(scheduler->admit(one, at_once) == full);
  scheduler->take_back({{other, 1}});
  scheduler->take_back(all);
  CHECK(scheduler->outstanding() == 0);
  CHECK(close(*scheduler));
}

TEST_CASE("callers are admitted in turn, but one that waits for a hung device holds back no other device") {
  auto scheduler = make("threads");
  using enum Scheduler::Admission;
  const milliseconds at_once(0), patience(60'000);
  const auto hung = scheduler->lane_of(1);
  const auto lane = scheduler->lane_of(2);
  const std::vector<Scheduler::Places> one{{lane, 1}}, of_hung{{hung, 1}}, more{{lane, Scheduler::max_outstanding + 1}};
  const std::vector<Scheduler::Places> both{{lane, 1}, {hung, Scheduler::max_outstanding}};
  for (const auto& [large, held] : {std::pair(more, one), std::pair(both, of_hung)}) {
    REQUIRE(scheduler->admit(held, at_once) == admitted);
    std::atomic<bool> begun{false};
    std::thread waiting([&, large = large] { begun = scheduler->admit(large, patience) == admitted; });
    // While it waits, nothing else is admitted where it has no room, though there is room for one more.
    while (scheduler->admit(held, at_once) == admitted) scheduler->take_back(held);
    if (held.front().lane == hung) {
      CHECK(scheduler->admit(one, at_once) == admitted);
      scheduler->take_back(one);
    }
    CHECK_FALSE(begun);
    scheduler->take_back(held);
    waiting.join();
    CHECK(begun);
    scheduler->take_back(large);
  }
  CHECK(close(*scheduler));
}

TEST_CASE("closing finishes what is outstanding") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    auto source = pattern(8 << 20, 3);
    const std::string path = directory.file(engine);
    auto queue = std::make_shared<CompletionQueue>();
    auto request = start(*scheduler, {open_file(path, true), {source.data(), source.size()}, 5, true});
    request->notify([queue] { queue->push(42); });
    CHECK(close(*scheduler));
    CHECK(scheduler->admit(places(*scheduler), milliseconds(0)) == Scheduler::Admission::closed);
    CHECK(request->done());
    CHECK(queue->take() == std::vector<uint64_t>{42});
    struct stat status;
    REQUIRE(::stat(path.c_str(), &status) == 0);
    CHECK(status.st_size == 5 + (8 << 20));
    CHECK(scheduler->take_finished().size() == 1);
  }
}

TEST_CASE("a bounce pool smaller than the queue still moves everything") {
  TemporaryDirectory directory;
  BouncePool::set_process_pool_nbytes(BouncePool::min_nbytes);
  for (const auto& engine : engines) {
    auto scheduler = make(engine, 3, 64, 1 << 20);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    auto source = pattern(20'000'001, 9);
    std::vector<char> found(source.size());
    auto written = start(*scheduler, {open_file(path, true), {source.data() + 1, source.size() - 1}, 0, true});
    REQUIRE(written->wait_for(milliseconds(60'000)));
    auto read =
        start(*scheduler, {open_file(path, false, DirectMode::always), {found.data() + 1, found.size() - 1}, 0});
    REQUIRE(read->wait_for(milliseconds(60'000)));
    found[0] = source[0];
    CHECK(found == source);
    CHECK(close(*scheduler));
  }
  BouncePool::set_process_pool_nbytes(BouncePool::default_nbytes);
}

TEST_CASE("percentiles are within an eighth of the exact values") {
  LatencyHistogram histogram;
  CHECK(histogram.percentile(0.5) == 0);
  for (uint64_t value = 1; value <= 100'000; ++value) histogram.add(value);
  for (double fraction : {0.01, 0.5, 0.9, 0.999}) {
    const double truth = fraction * 100'000;
    const auto found = static_cast<double>(histogram.percentile(fraction));
    CHECK(found >= truth);
    CHECK(found <= truth * 1.13 + 1);
  }
  histogram.add(UINT64_MAX);
  CHECK(histogram.percentile(1.0) > 100'000);
}

TEST_CASE("a file that is still to be closed is outstanding, though its transfers are over") {
  TemporaryDirectory directory;
  auto scheduler = make("threads");
  const auto file = open_file(directory.file("file"), true);
  auto source = std::vector<char>(5000, 'x');
  auto request = new_request(*scheduler, {.write = true, .close_files = true});
  auto transfer = Transfer::create({file, {source.data(), source.size()}, 0, true}, request, 0, 64 << 10);
  REQUIRE(transfer);
  std::mutex held;  // by which no helper closes anything
  std::unique_lock lock(held);
  for (int helper = 0; helper < 64; ++helper)  // more than there may be threads
    scheduler->lane_of(file->device())->help([&] { std::lock_guard wait(held); });
  scheduler->submit(request, {*transfer});
  request->seal();
  while (scheduler->progress() < source.size()) std::this_thread::sleep_for(milliseconds(1));
  CHECK(scheduler->outstanding() == 1);
  lock.unlock();
  REQUIRE(request->wait_for(milliseconds(60'000)));
  CHECK(scheduler->outstanding() == 0);
  CHECK(close(*scheduler));
}

}  // namespace
}  // namespace tensorferry
