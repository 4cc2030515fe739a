// Helpers for tests of schedulers: files, schedulers, requests, bytes.
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transfer/reservation.h"
#include "transfer/scheduler.h"

namespace tensorferry {

using std::chrono::milliseconds;

class TemporaryDirectory {
 public:
  TemporaryDirectory() { REQUIRE(::mkdtemp(path_) != nullptr); }
  ~TemporaryDirectory() {
    for (const auto& name : names_) ::unlink(name.c_str());
    ::rmdir(path_);
  }
  std::string file(const std::string& name) {
    names_.push_back(std::string(path_) + "/" + name);
    return names_.back();
  }

 private:
  char path_[32] = "/tmp/tensorferry-cpp-XXXXXX";
  std::vector<std::string> names_;
};

// When all has ended, or after a minute. Returns whether all ended well.
inline bool close(Scheduler& scheduler) {
  scheduler.refuse();
  (void)scheduler.wait_until_idle(milliseconds(60'000));
  return scheduler.close();
}

// As it is, and closed with its last owner among the tests, if it was not before.
inline std::shared_ptr<Scheduler> closed_at_end(const std::shared_ptr<Scheduler>& scheduler) {
  if (!scheduler) return nullptr;
  return {scheduler.get(), [scheduler](Scheduler*) { (void)close(*scheduler); }};
}

inline std::shared_ptr<Scheduler> make(const std::string& engine, uint32_t workers = 1, uint32_t depth = 8,
                                       uint64_t block_nbytes = 64 << 10, uint32_t copiers = 0) {
  std::vector<EngineRefusal> refusals;
  SchedulerOptions options;
  options.engine = engine;
  options.worker_count = workers;
  options.queue_depth = depth;
  options.block_nbytes = block_nbytes;
  options.copier_count = copiers;
  auto scheduler = closed_at_end(Scheduler::create(options, refusals));
  if (!scheduler) MESSAGE("skipping ", engine, ": ", refusals.front().reason);
  return scheduler;
}

inline std::shared_ptr<File> open_file(const std::string& path, bool write, DirectMode direct = DirectMode::automatic) {
  auto file = File::open(path, {.read = !write,
                                .write = write,
                                .create = write,
                                .exclusive = false,
                                .truncate = false,
                                .replaced = false,
                                .direct = direct});
  REQUIRE(file);
  return *file;
}

// For transfers of files in TemporaryDirectories.
inline std::vector<Scheduler::Places> places(Scheduler& scheduler, size_t count = 1) {
  static const uint64_t device = [] {
    TemporaryDirectory directory;
    return open_file(directory.file("any"), true)->device();
  }();
  return {{scheduler.lane_of(device), count}};
}

// For one transfer, which has been admitted.
inline std::shared_ptr<Request> new_request(Scheduler& scheduler, const RequestOptions& options = {}) {
  REQUIRE(scheduler.admit(places(scheduler), milliseconds(60'000)) == Scheduler::Admission::admitted);
  return std::make_shared<Request>(scheduler.shared_from_this(), options);
}

inline void hand_over(Scheduler& scheduler, const std::shared_ptr<Request>& request,
                      const std::shared_ptr<Transfer>& transfer, bool blocking = false) {
  if (Scheduler::Inline taken; blocking && scheduler.try_inline(transfer, taken)) {
    REQUIRE(scheduler.go_on(taken));
    REQUIRE(request->settle_files());
    return;
  }
  scheduler.submit(request, {transfer});
  request->seal();
}

inline std::shared_ptr<Request> start(Scheduler& scheduler, TransferSpec spec, bool blocking = false,
                                      const RequestOptions& options = {}) {
  spec.lane = scheduler.lane_of(spec.file->device());  // where it is admitted, also if devices share lanes
  REQUIRE(scheduler.admit({{spec.lane, 1}}, milliseconds(60'000)) == Scheduler::Admission::admitted);
  auto request = std::make_shared<Request>(scheduler.shared_from_this(), options);
  if (spec.write) REQUIRE_FALSE(reserve(*spec.file, {{spec.offset, spec.offset + spec.memory.nbytes()}}));
  auto transfer = Transfer::create(std::move(spec), request, 0, scheduler.options().block_nbytes);
  REQUIRE(transfer);
  hand_over(scheduler, request, *transfer, blocking);
  return request;
}

// Random bytes, eight at a time: each access is work for the sanitizers.
inline std::vector<char> pattern(size_t nbytes, unsigned seed) {
  std::vector<char> bytes(nbytes);
  std::mt19937_64 random(seed);
  for (size_t begin = 0; begin < nbytes; begin += sizeof(uint64_t)) {
    const uint64_t word = random();
    memcpy(bytes.data() + begin, &word, std::min(sizeof word, nbytes - begin));
  }
  return bytes;
}

inline const std::vector<std::string> engines{"io_uring", "libaio", "threads"};

}  // namespace tensorferry
