// Tests of lanes: the calls that one device delays, and lanes of devices that appear and vanish.
#include "transfer/lane.h"

#include <atomic>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "scheduling.h"
#include "transfer/stream.h"

namespace tensorferry {
namespace {

std::shared_ptr<Scheduler> with_lanes(const std::string& engine, size_t max_lanes, milliseconds idle_patience) {
  std::vector<EngineRefusal> refusals;
  SchedulerOptions options;
  options.engine = engine;
  options.queue_depth = 8;
  options.max_lanes = max_lanes;
  options.idle_patience = idle_patience;
  auto scheduler = closed_at_end(Scheduler::create(options, refusals));
  if (!scheduler) MESSAGE("skipping ", engine, ": ", refusals.front().reason);
  return scheduler;
}

constexpr milliseconds for_ever{3'600'000};

// Jobs of a lane that end only when they are released.
class HungJobs {
 public:
  explicit HungJobs(const std::shared_ptr<Lane>& lane) {
    hung_.lock();
    for (int job = 0; job < 64; ++job) {
      lane->help([this, lane] { wait(); });
      lane->help_to_sync([this, lane] { wait(); });
      lane->help_stream([this, lane] { wait(); });
    }
  }
  void release() { hung_.unlock(); }

 private:
  void wait() { const std::lock_guard until_released(hung_); }
  std::mutex hung_;
};

}  // namespace

TEST_CASE("a lane with only hung helpers does not delay other devices' reads, writes, syncs, closes and streams") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = with_lanes(engine, 16, for_ever);
    if (!scheduler) continue;
    CAPTURE(engine);
    HungJobs hung(scheduler->lane_of(1));
    const auto source = pattern(3 << 20, 1);
    auto read = std::vector<char>(source.size());
    for (const DirectMode direct : {DirectMode::automatic, DirectMode::never}) {
      const auto path = directory.file("file");
      auto file = open_file(path, true, direct);
      auto request = start(*scheduler, {file, {const_cast<char*>(source.data()), source.size()}, 0, true}, false,
                           {.write = true, .truncate = true, .sync = true, .close_files = true});
      REQUIRE(request->wait_for(milliseconds(60'000)));
      CHECK(request->faults().empty());
      request = start(*scheduler, {open_file(path, false, direct), {read.data(), read.size()}});
      REQUIRE(request->wait_for(milliseconds(60'000)));
      CHECK(read == source);
    }
    auto file = open_file(directory.file("stream"), true);
    auto stream = std::make_shared<Stream>(scheduler, file, StreamOptions{});
    for (int job = 0; job < 2; ++job) {
      REQUIRE(scheduler->admit(stream->place(), milliseconds(0)) == Scheduler::Admission::admitted);
    }
    stream->append(const_cast<char*>(source.data()), source.size());
    stream->begin_job();
    stream->end({.sync = true});
    CHECK(stream->wait_until_ended(milliseconds(60'000)));
    CHECK_FALSE(stream->fault());
    hung.release();
    CHECK(close(*scheduler));
  }
}

TEST_CASE("a small read passes large blocks that wait for bounce memory") {
  TemporaryDirectory directory;
  const auto path = directory.file("file");
  const auto source = pattern(3 << 20, 1);
  for (const auto& engine : engines) {
    auto scheduler = with_lanes(engine, 16, for_ever);
    if (!scheduler) continue;
    CAPTURE(engine);
    auto writing =
        start(*scheduler, {open_file(path, true), {const_cast<char*>(source.data()), source.size()}, 0, true});
    REQUIRE(writing->wait_for(milliseconds(60'000)));
    const auto file = open_file(path, false);
    if (!file->direct()) continue;
    const auto pool = scheduler->lane_of(file->device())->pool();
    auto all = pool->try_acquire(pool->nbytes(), nullptr);
    REQUIRE(all);
    auto into = std::vector<char>(source.size() + 1);
    auto large = start(*scheduler, {open_file(path, false, DirectMode::always), {into.data() + 1, source.size()}});
    std::vector<char> few(4096);
    auto small = start(*scheduler, {open_file(path, false, DirectMode::never), {few.data(), few.size()}});
    REQUIRE(small->wait_for(milliseconds(60'000)));
    CHECK(std::equal(few.begin(), few.end(), source.begin()));
    CHECK_FALSE(large->done());
    all.reset();
    REQUIRE(large->wait_for(milliseconds(60'000)));
    CHECK(std::equal(source.begin(), source.end(), into.begin() + 1));
    CHECK(close(*scheduler));
  }
}

TEST_CASE("each device has a separate lane up to the limit; then devices share the lanes that are used least") {
  auto scheduler = with_lanes("threads", 3, for_ever);
  std::vector<std::shared_ptr<Lane>> lanes;
  for (uint64_t device = 1; device <= 3; ++device) lanes.push_back(scheduler->lane_of(device));
  CHECK(std::set(lanes.begin(), lanes.end()).size() == 3);
  CHECK(std::set{lanes[0]->queue(), lanes[1]->queue(), lanes[2]->queue()}.size() == 3);
  CHECK(scheduler->lane_of(2) == lanes[1]);
  const auto another = lanes[0];
  const auto shared = scheduler->lane_of(4);
  CHECK(shared != lanes[0]);
  CHECK(shared->device() != 4);
  lanes.clear();
  CHECK(scheduler->lane_of(5)->device() == 5);  // it replaces an unused lane
  CHECK(scheduler->lane_count() == 3);
  CHECK(close(*scheduler));
}

TEST_CASE("unused lanes are given back, except one; those in use stay") {
  auto scheduler = with_lanes("threads", 16, milliseconds(1));
  const auto used = scheduler->lane_of(1);
  for (uint64_t device = 2; device <= 9; ++device) {
    const auto lane = scheduler->lane_of(device);
    (void)lane->queue();
    lane->help([lane] {});
  }
  while (scheduler->lane_count() > 1) std::this_thread::sleep_for(milliseconds(1));
  CHECK(scheduler->lane_of(1) == used);
  CHECK(close(*scheduler));
}

TEST_CASE("devices appear and vanish at random while files are written, read, synced and closed, without losses") {
  TemporaryDirectory directory;
  for (const auto& engine : engines) {
    auto scheduler = with_lanes(engine, 4, milliseconds(1));
    if (!scheduler) continue;
    CAPTURE(engine);
    std::atomic<int> jobs = 0;
    std::atomic<int> done = 0;
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < 4; ++thread) {
      const auto path = directory.file("file" + std::to_string(thread));
      threads.emplace_back([&, thread, path] {
        std::mt19937 random(thread);
        for (int round = 0; round < 60; ++round) {
          const auto lane = scheduler->lane_of(random() % 12 + 1);
          for (int count = static_cast<int>(random() % 4); count > 0; --count) {
            ++jobs;
            if (random() % 2) {
              lane->help([&, lane] { ++done; });
            } else {
              lane->help_to_sync([&, lane] { ++done; });
            }
          }
          if (random() % 4 == 0) (void)lane->queue();
          if (const auto pool = lane->pool(); random() % 4 == 0)
            (void)pool->try_acquire(random() % 100'000 + 1, nullptr);
          const auto source = pattern(random() % 300'000 + 1, thread);
          auto request =
              start(*scheduler, {open_file(path, true), {const_cast<char*>(source.data()), source.size()}, 0, true},
                    random() % 2, {.write = true, .truncate = true, .close_files = true});
          if (!request->wait_for(milliseconds(60'000)) || !request->faults().empty()) return;
          auto read = std::vector<char>(source.size());
          request = start(*scheduler, {open_file(path, false), {read.data(), read.size()}}, random() % 2);
          if (!request->wait_for(milliseconds(60'000)) || read != source) return;
          ++jobs;
          ++done;
        }
        ++jobs;
        ++done;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(close(*scheduler));  // after the jobs that are still in line
    CHECK(done == jobs);
    CHECK(done >= 4 * 61);
  }
}

}  // namespace tensorferry
