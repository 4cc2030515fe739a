// Submit, cancel, close, drop and wait at random moments from 8 threads, on schedulers that all of them share.
// Transfers that report success are complete, refused ones have not begun, and no memory is used after their end (ASan,
// TSan).
//
// TENSORFERRY_STRESS_SECONDS sets the duration; TENSORFERRY_TEST_SEED determines the operations of each thread.
#include <doctest/doctest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "scheduling.h"
#include "transfer/scheduler.h"

namespace tensorferry {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double default_seconds = 8;
#else
constexpr double default_seconds = 20;
#endif

constexpr size_t thread_count = 8;
constexpr size_t scheduler_count = 4;
constexpr size_t file_nbytes = size_t{1} << 20;
constexpr milliseconds patience{60'000};

double seconds_to_run() {
  const char* text = ::getenv("TENSORFERRY_STRESS_SECONDS");
  return text && *text ? ::atof(text) : default_seconds;
}

unsigned seed() {
  const char* text = ::getenv("TENSORFERRY_TEST_SEED");
  return text && *text ? static_cast<unsigned>(::atol(text)) : std::random_device{}();
}

std::mutex failures_mutex;
std::vector<std::string> failures;

void failed(const std::string& what) {
  std::lock_guard lock(failures_mutex);
  failures.push_back(what);
}

// Null: refused, since the scheduler is closed.
std::shared_ptr<Request> begin(Scheduler& scheduler, TransferSpec spec, const RequestOptions& options, bool blocking) {
  spec.lane = scheduler.lane_of(spec.file->device());
  const std::vector<Scheduler::Places> place{{spec.lane, 1}};
  const auto admission = scheduler.admit(place, patience);
  if (admission == Scheduler::Admission::full) failed("a transfer was not admitted in time");
  if (admission != Scheduler::Admission::admitted) return nullptr;
  auto request = std::make_shared<Request>(scheduler.shared_from_this(), options);
  const uint64_t block_nbytes = scheduler.block_nbytes_for(spec.memory.nbytes());
  auto transfer = Transfer::create(std::move(spec), request, 0, block_nbytes);
  if (!transfer) {
    failed(std::string("refused: ") + transfer.fault().operation);
    scheduler.take_back(place);
    return nullptr;
  }
  hand_over(scheduler, request, *transfer, blocking);
  return request;
}

// A shared scheduler: when a thread closes it, a new one replaces it.
class Shared {
 public:
  Shared(std::vector<std::string> engines_to_use, unsigned first) : engines_(std::move(engines_to_use)), next_(first) {
    current_ = fresh();
  }

  std::shared_ptr<Scheduler> get() {
    std::lock_guard lock(mutex_);
    return current_;
  }

  // Closes the present one while others may be using it.
  void replace() {
    auto made = fresh();
    std::shared_ptr<Scheduler> old;
    {
      std::lock_guard lock(mutex_);
      old = std::exchange(current_, std::move(made));
    }
    close(*old);
  }

  void end() { close(*get()); }

 private:
  std::shared_ptr<Scheduler> fresh() {
    const unsigned number = next_.fetch_add(1);
    return make(engines_[number % engines_.size()], 1 + number % 2, 1u << (number % 5), 64 << 10);
  }

  static void close(Scheduler& scheduler) {
    if (!tensorferry::close(scheduler)) failed("a close gave up");
  }

  const std::vector<std::string> engines_;
  std::atomic<unsigned> next_;
  std::mutex mutex_;
  std::shared_ptr<Scheduler> current_;
};

struct Counts {
  std::atomic<uint64_t> written{0}, read{0}, cancelled{0}, refused{0}, closed{0};
};

// One thread, a file that only this thread writes, and the expected contents.
class Actor {
 public:
  Actor(std::vector<std::unique_ptr<Shared>>& schedulers, std::string path, unsigned number, Counts& counts)
      : schedulers_(schedulers), path_(std::move(path)), random_(number), model_(file_nbytes), counts_(counts) {
    auto file = open_file(path_, true);
    REQUIRE_FALSE(file->truncate(file_nbytes));
  }

  void act() {
    switch (random_() % 16) {
      case 0:
        schedulers_[random_() % schedulers_.size()]->replace();
        ++counts_.closed;
        return;
      case 1:
      case 2: write(false, true); return;
      case 3:
      case 4:
      case 5:
      case 6: read(random_() % 2); return;
      default: write(random_() % 2, false);
    }
  }

  // Returns whether the file has the expected contents.
  bool is_right() {
    std::vector<char> found(file_nbytes);
    auto file = open_file(path_, false, DirectMode::never);
    return ::pread(file->descriptor(), found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()) &&
           found == model_;
  }

 private:
  struct Piece {
    std::vector<char> bytes;
    size_t offset;
  };

  Piece piece() {
    static constexpr std::array<size_t, 6> sizes{1, 4096, 5003, 70'001, 262'144, 600'007};
    const size_t nbytes = sizes[random_() % sizes.size()];
    size_t offset = random_() % (file_nbytes - nbytes + 1);
    if (random_() % 2) offset -= offset % 4096;
    return {pattern(nbytes, static_cast<unsigned>(random_())), offset};
  }

  // Returns a file that stays open for many transfers, or a separate file for this one.
  std::shared_ptr<File> file(bool own) {
    if (kept_ && !own && random_() % 8) return kept_;
    const auto direct = random_() % 4 ? DirectMode::automatic : DirectMode::never;
    auto opened = File::open(
        path_, {.read = true, .write = true, .create = false, .exclusive = false, .truncate = false, .direct = direct});
    if (!opened) {
      failed("open: " + std::to_string(opened.fault().error_number));
      return kept_;
    }
    if (!own) kept_ = *opened;
    return *opened;
  }

  void write(bool blocking, bool cancel) {
    auto scheduler = schedulers_[random_() % schedulers_.size()]->get();
    auto [bytes, offset] = piece();
    const RequestOptions options{.write = true, .sync = random_() % 16 == 0, .close_files = random_() % 4 == 0};
    TransferSpec spec{file(options.close_files), {bytes.data(), bytes.size()}, offset, true};
    const auto request = begin(*scheduler, std::move(spec), options, blocking);
    if (!request) {
      ++counts_.refused;
      return;
    }
    if (random_() % 8 == 0) scheduler.reset();  // dropped while at work
    if (cancel) {
      if (random_() % 2) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
      request->cancel();
    }
    if (!await(*request, "a write")) return;
    const Fault* fault = request->fault();
    char* old = model_.data() + offset;
    if (!fault) {
      std::memcpy(old, bytes.data(), bytes.size());
      ++counts_.written;
      return;
    }
    if (!cancel || fault->error_number != ECANCELED) {
      failed(std::string("a write failed: ") + fault->operation + " " + std::to_string(fault->error_number));
      return;
    }
    // Each byte is the old one or the new one, and stays so.
    std::vector<char> found(bytes.size());
    auto seen = open_file(path_, false, DirectMode::never);
    if (::pread(seen->descriptor(), found.data(), found.size(), static_cast<off_t>(offset)) !=
        static_cast<ssize_t>(found.size())) {
      failed("a cancelled write made the file shorter");
      return;
    }
    for (size_t at = 0; at < found.size(); ++at) {
      if (found[at] != old[at] && found[at] != bytes[at]) {
        failed("a cancelled write wrote bytes that are not its own");
        return;
      }
    }
    std::memcpy(old, found.data(), found.size());
    ++counts_.cancelled;
  }

  void read(bool blocking) {
    auto scheduler = schedulers_[random_() % schedulers_.size()]->get();
    auto [bytes, offset] = piece();
    const auto request = begin(*scheduler, {file(false), {bytes.data(), bytes.size()}, offset}, {}, blocking);
    if (!request) {
      ++counts_.refused;
      return;
    }
    if (!await(*request, "a read")) return;
    if (request->fault()) {
      failed("a read failed");
    } else if (std::memcmp(bytes.data(), model_.data() + offset, bytes.size()) != 0) {
      failed("a read gave other bytes than were written");
    } else {
      ++counts_.read;
    }
  }

  bool await(Request& request, const char* what) {
    if (request.wait_for(patience)) return true;
    failed(std::string(what) + " hung");
    // A transfer may still write to its memory at any time, so the process cannot continue.
    MESSAGE(std::string(what), " hung");
    ::abort();
  }

  std::vector<std::unique_ptr<Shared>>& schedulers_;
  const std::string path_;
  std::minstd_rand random_;
  std::vector<char> model_;
  Counts& counts_;
  std::shared_ptr<File> kept_;
};

TEST_CASE("no bytes are lost while threads submit, cancel, close and drop at random moments") {
  TemporaryDirectory directory;
  std::vector<std::string> usable;
  for (const auto& engine : engines) {
    if (auto scheduler = make(engine)) {
      usable.push_back(engine);
      CHECK(close(*scheduler));
    }
  }
  const unsigned first = seed();
  MESSAGE("TENSORFERRY_TEST_SEED=", first);
  std::vector<std::unique_ptr<Shared>> schedulers;
  for (size_t index = 0; index < scheduler_count; ++index) {
    schedulers.push_back(std::make_unique<Shared>(usable, static_cast<unsigned>(index) * 7));
  }
  failures.clear();
  Counts counts;
  std::vector<std::unique_ptr<Actor>> actors;
  for (size_t index = 0; index < thread_count; ++index) {
    actors.push_back(std::make_unique<Actor>(schedulers, directory.file(std::to_string(index)),
                                             first + static_cast<unsigned>(index) * 7919, counts));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds_to_run());
  std::vector<std::thread> threads;
  for (auto& actor : actors) {
    threads.emplace_back([&actor, deadline] {
      while (std::chrono::steady_clock::now() < deadline) {
        actor->act();
        std::lock_guard lock(failures_mutex);
        if (!failures.empty()) return;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& scheduler : schedulers) scheduler->end();
  MESSAGE(counts.written.load(), " writes, ", counts.read.load(), " reads, ", counts.cancelled.load(), " cancelled, ",
          counts.refused.load(), " refused, ", counts.closed.load(), " closes");
  for (const auto& failure : failures) FAIL_CHECK(failure);
  for (auto& actor : actors) CHECK(actor->is_right());
  CHECK(counts.written > 0);
  CHECK(counts.read > 0);
  CHECK(counts.cancelled > 0);
  CHECK(counts.closed > 0);
}

}  // namespace
}  // namespace tensorferry
