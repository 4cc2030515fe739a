// Tests of engines alone: their results when the kernel refuses system calls, and reads of cached bytes.
#include "engine/engine.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "file/file.h"
#include "refused_calls.h"
#include "scheduling.h"

namespace tensorferry {
namespace {

// A loop that asks in vain makes millions of calls until then.
constexpr int max_calls = 5000;

std::unique_ptr<Engine> make_engine(const std::string& name, uint32_t queue_depth = 8) {
  for (const auto& kind : engine_kinds()) {
    if (kind.name != name) continue;
    auto attempt = kind.create({.queue_depth = queue_depth});
    if (!attempt.engine) MESSAGE("skipping ", name, ": ", attempt.refusal);
    return std::move(attempt.engine);
  }
  return nullptr;
}

// Reaps until `count` blocks are back or too many calls were made.
std::vector<Block*> reap_until(Engine& engine, size_t count, int& calls) {
  std::vector<Block*> completed;
  for (calls = 0; completed.size() < count && calls < max_calls; ++calls) engine.reap(completed, true);
  return completed;
}

struct Blocks {
  Blocks(int descriptor, size_t count) : memory(count * 4096), all(count) {
    for (size_t index = 0; index < count; ++index) {
      all[index].operation = Operation::read;
      all[index].descriptor = descriptor;
      all[index].memory = memory.data() + index * 4096;
      all[index].nbytes = 4096;
      all[index].offset = index * 4096;
    }
  }
  std::vector<char> memory;
  std::vector<Block> all;
};

const std::vector<std::pair<std::string, long>> submissions{{"io_uring", SYS_io_uring_enter},
                                                            {"libaio", SYS_io_submit}};

TEST_CASE("blocks that the kernel refuses are returned with its error, in every round") {
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  for (const auto& [name, call] : submissions)
    for (int error_number : {EPERM, ENOMEM, EFAULT, EAGAIN, EBUSY}) {
      CAPTURE(name);
      CAPTURE(error_number);
      auto engine = make_engine(name);
      if (!engine) continue;
      std::thread([&, call = call] {
        engine->start();
        refuse_calls(call, error_number);
        for (int round = 0; round < 2; ++round) {
          Blocks blocks(file->descriptor(), 5);
          for (auto& block : blocks.all) engine->add(block);
          int calls = 0;
          const auto completed = reap_until(*engine, 5, calls);
          REQUIRE(completed.size() == 5);
          CHECK(std::set<Block*>(completed.begin(), completed.end()).size() == 5);
          for (Block* block : completed) CHECK(block->result == -error_number);
        }
      }).join();
    }
}

TEST_CASE("a temporary refusal is retried, and no block is lost") {
  // Only a submission of three is refused: that of the first three, until a fourth joins them.
  auto engine = make_engine("io_uring");
  if (!engine) return;
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  REQUIRE_FALSE(open_file(path, true)->truncate(1 << 20));
  auto file = open_file(path, false, DirectMode::never);
  std::thread([&] {
    engine->start();
    refuse_calls(SYS_io_uring_enter, EAGAIN, Where::equal, 1, 3);
    Blocks blocks(file->descriptor(), 4);
    std::vector<Block*> completed;
    for (int index = 0; index < 3; ++index) engine->add(blocks.all[static_cast<size_t>(index)]);
    engine->submit();
    engine->reap(completed, false);
    CHECK(completed.empty());
    engine->add(blocks.all[3]);
    int calls = 0;
    for (Block* block : reap_until(*engine, 4, calls)) completed.push_back(block);
    REQUIRE(completed.size() == 4);
    for (Block* block : completed) CHECK(block->result == 4096);
  }).join();
}

TEST_CASE("submitted blocks are waited for, although the kernel accepts no more") {
  auto engine = make_engine("io_uring");
  if (!engine) return;
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  std::thread([&] {
    engine->start();
    Blocks taken(pipe[0], 1), refused(file->descriptor(), 1);
    engine->add(taken.all[0]);
    engine->submit();
    // Submissions fail; asking for completions does not.
    refuse_calls(SYS_io_uring_enter, EPERM, Where::different, 1, 0);
    engine->add(refused.all[0]);
    int calls = 0;
    auto completed = reap_until(*engine, 1, calls);
    REQUIRE(completed.size() == 1);
    CHECK(completed[0] == &refused.all[0]);
    CHECK(completed[0]->result == -EPERM);
    REQUIRE(::write(pipe[1], "news", 4) == 4);
    completed = reap_until(*engine, 1, calls);
    REQUIRE(completed.size() == 1);
    CHECK(completed[0] == &taken.all[0]);
    CHECK(completed[0]->result == 4);
  }).join();
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST_CASE("an engine without work that the kernel refuses sleeps until it is woken") {
  for (const auto& [name, call] : std::vector<std::pair<std::string, long>>{{"io_uring", SYS_io_uring_enter},
                                                                            {"libaio", SYS_io_submit},
                                                                            {"libaio", SYS_io_getevents},
                                                                            {"threads", SYS_pread64}}) {
    CAPTURE(name);
    CAPTURE(call);
    auto engine = make_engine(name);
    if (!engine) continue;
    std::atomic<int> reaps{0};
    std::atomic<bool> stop{false};
    std::thread worker([&, call = call] {
      engine->start();
      refuse_calls(call, EPERM);
      std::vector<Block*> completed;
      while (!stop && reaps < max_calls) {
        engine->reap(completed, true);
        ++reaps;
      }
      CHECK(completed.empty());
    });
    for (int wake = 0; wake < 5; ++wake) {
      const int before = reaps;
      engine->wake();
      while (reaps == before) std::this_thread::yield();
    }
    std::this_thread::sleep_for(milliseconds(50));
    CHECK(reaps < max_calls);
    stop = true;
    engine->wake();
    worker.join();
  }
}

TEST_CASE("an engine that can start no thread lends the worker's to every block, round after round") {
  TemporaryDirectory directory;
  auto file = open_file(directory.file("file"), true);
  pthread_attr_t usual, too_large;
  REQUIRE(::pthread_getattr_default_np(&usual) == 0);
  REQUIRE(::pthread_getattr_default_np(&too_large) == 0);
  REQUIRE(::pthread_attr_setstacksize(&too_large, size_t{1} << 46) == 0);  // no address space has room for it
  auto engine = make_engine("threads");
  std::thread([&] {
    engine->start();
    REQUIRE(::pthread_setattr_default_np(&too_large) == 0);
    for (int round = 0; round < 2; ++round) {
      Blocks blocks(file->descriptor(), 5);
      for (auto& block : blocks.all) engine->add(block);
      int calls = 0;
      CHECK(reap_until(*engine, 5, calls).size() == 5);
      CHECK(calls <= 10);
    }
    REQUIRE(::pthread_setattr_default_np(&usual) == 0);
  }).join();
  (void)::pthread_attr_destroy(&usual);
  (void)::pthread_attr_destroy(&too_large);
}

TEST_CASE("only libaio does I/O through the page cache while it is submitted") {
  for (const auto& name : engines) {
    if (auto engine = make_engine(name)) CHECK(engine->blocks_on_buffered() == (name == "libaio"));
  }
}

TEST_CASE("cached bytes are read without waiting, up to the first uncached one") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  const auto source = pattern(1 << 20, 3);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT, 0666);
  REQUIRE(::pwrite(descriptor, source.data(), source.size(), 0) == static_cast<ssize_t>(source.size()));
  REQUIRE(::fsync(descriptor) == 0);
  std::vector<char> found(source.size());
  Block block;
  block.descriptor = descriptor;
  block.memory = found.data();
  block.nbytes = found.size();
  CHECK(read_cached(block) == static_cast<int64_t>(source.size()));
  CHECK(found == source);
  block.offset = source.size();
  CHECK(read_cached(block) == 0);
  block.offset = 0;
  REQUIRE(::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED) == 0);
  std::fill(found.begin(), found.end(), 0);
  // A fast drive may have it read ahead before the kernel looks.
  const int64_t moved = read_cached(block);
  CHECK((moved == -EAGAIN || moved > 0));
  if (moved > 0) CHECK(std::equal(found.begin(), found.begin() + moved, source.begin()));
  ::close(descriptor);
  CHECK(read_cached(block) == -EBADF);
}

TEST_CASE("if the kernel cannot promise not to wait, no bytes count as cached") {
  TemporaryDirectory directory;
  const std::string path = directory.file("file");
  REQUIRE_FALSE(open_file(path, true)->truncate(4096));
  auto file = open_file(path, false, DirectMode::never);
  for (int error_number : {EOPNOTSUPP, ENOSYS, EINVAL}) {
    where_call_fails(SYS_preadv2, static_cast<uint32_t>(file->descriptor()), error_number, [&] {
      Blocks blocks(file->descriptor(), 1);
      CHECK(read_cached(blocks.all[0]) == -EAGAIN);
    });
  }
}

}  // namespace
}  // namespace tensorferry
