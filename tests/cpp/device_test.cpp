// Transfers of GPU memory with the stand-in driver: order, limits, faults at every call.
#include <doctest/doctest.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "device/cufile.h"
#include "device/gpu.h"
#include "memory/bounce_pool.h"
#include "scheduling.h"
#include "standin.h"

namespace tensorferry {
namespace {

// Before the core opens the driver for the first time.
const bool stand_in_chosen = ::setenv("TENSORFERRY_LIBCUDA", TENSORFERRY_STANDIN_CUDA, 1) == 0 &&
                             ::setenv("TENSORFERRY_LIBCUFILE", TENSORFERRY_STANDIN_CUFILE, 1) == 0;

class GpuMemory {
 public:
  explicit GpuMemory(const std::vector<char>& bytes, int device = 0)
      : device_(device), nbytes_(bytes.size()), address_(standin_allocate(device, bytes.size())) {
    REQUIRE(address_ != 0);
    REQUIRE(standin_poke(address_, bytes.data(), nbytes_) == 0);
  }
  ~GpuMemory() { (void)standin_free(address_); }

  int device() const { return device_; }
  uint64_t address() const { return address_; }
  size_t nbytes() const { return nbytes_; }

  std::vector<char> bytes() const {
    std::vector<char> found(nbytes_);
    REQUIRE(standin_peek(address_, found.data(), nbytes_) == 0);
    return found;
  }

 private:
  int device_;
  size_t nbytes_;
  uint64_t address_;
};

struct GpuPiece {
  const GpuMemory& memory;
  size_t begin;
  size_t nbytes;
};

// A transfer of GPU memory, ordered after the device's legacy stream.
Result<std::shared_ptr<Request>> try_start(Scheduler& scheduler, std::shared_ptr<File> file, const GpuPiece& piece,
                                           uint64_t offset, bool write, bool blocking = false) {
  auto gate = cuda::Gate::after(piece.memory.device(), nullptr);
  if (!gate) return gate.fault();
  if (auto fault = scheduler.prepare_for_gpus()) return *fault;
  Segments memory(reinterpret_cast<char*>(piece.memory.address() + piece.begin), piece.nbytes, *gate);
  TransferSpec spec{std::move(file), std::move(memory), offset, write};
  spec.use_cufile = scheduler.options().engine == "cufile";
  auto request = new_request(scheduler);
  auto transfer = Transfer::create(std::move(spec), request, 0, scheduler.options().block_nbytes);
  if (!transfer) {
    scheduler.take_back(places(scheduler));
    return transfer.fault();
  }
  hand_over(scheduler, request, *transfer, blocking);
  return request;
}

std::shared_ptr<Request> started(Scheduler& scheduler, std::shared_ptr<File> file, const GpuPiece& piece,
                                 uint64_t offset, bool write, bool blocking = false) {
  auto request = try_start(scheduler, std::move(file), piece, offset, write, blocking);
  REQUIRE(request);
  return *request;
}

void finish(const std::shared_ptr<Request>& request) {
  REQUIRE(request->wait_for(milliseconds(60'000)));
  const auto& fault = request->fault();
  if (fault) FAIL(std::string(fault->operation), " at ", fault->offset, ": ", fault->error_number, " ", fault->hint);
}

std::vector<char> bytes_of_file(Scheduler& scheduler, const std::string& path, size_t nbytes) {
  std::vector<char> found(nbytes);
  finish(start(scheduler, {open_file(path, false), {found.data(), nbytes}, 0}));
  return found;
}

std::vector<std::string> all_engines() {
  REQUIRE(cufile::open({}, 0).refusal.empty());
  std::vector<std::string> all = engines;
  all.push_back("cufile");
  return all;
}

TEST_CASE("memory of a GPU is written and read, on every engine, at any size and place") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines())
    for (uint32_t workers : {1u, 3u}) {
      auto scheduler = make(engine, workers);
      if (!scheduler) continue;
      const std::string path = directory.file(engine + std::to_string(workers));
      for (size_t nbytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{65'537}, size_t{3'000'003}})
        for (uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{8192}})
          for (bool blocking : {false, true}) {
            const auto source = pattern(nbytes + 64, static_cast<unsigned>(nbytes + offset));
            GpuMemory from(source, 0), to(std::vector<char>(nbytes + 64, 'x'), 1);
            finish(started(*scheduler, open_file(path, true), {from, 5, nbytes}, offset, true, blocking));
            finish(started(*scheduler, open_file(path, false, DirectMode::always), {to, 9, nbytes}, offset, false,
                           blocking));
            const auto found = to.bytes();
            CHECK(std::memcmp(found.data() + 9, source.data() + 5, nbytes) == 0);
            CHECK(found[8] == 'x');
            CHECK(found[9 + nbytes] == 'x');
          }
      CHECK(close(*scheduler));
    }
}

TEST_CASE("a file in the page cache is read into a GPU, by the caller and the workers") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines()) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    const auto source = pattern(5'000'000, 1);
    finish(
        start(*scheduler,
              {open_file(path, true, DirectMode::never), {const_cast<char*>(source.data()), source.size()}, 0, true}));
    GpuMemory to(std::vector<char>(source.size()), 0);
    auto gate = cuda::Gate::after(0, nullptr);
    REQUIRE(gate);
    REQUIRE_FALSE(scheduler->prepare_for_gpus());
    TransferSpec spec{open_file(path, false), {reinterpret_cast<char*>(to.address()), to.nbytes(), *gate}, 0};
    auto request = new_request(*scheduler);
    auto transfer = Transfer::create(std::move(spec), request, 0, 64 << 10);
    REQUIRE(transfer);
    hand_over(*scheduler, request, *transfer);
    REQUIRE(scheduler->share(*transfer, std::chrono::minutes(1)));
    finish(request);
    CHECK(to.bytes() == source);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("a transfer begins when what was queued before it has passed, and holds up nobody until then") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines()) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const std::string path = directory.file(engine), other = directory.file(engine + "other");
    GpuMemory late(std::vector<char>(300'000, 'a')), ready(std::vector<char>(300'000, 'r'), 1);
    const std::string latch = "open " + engine;
    REQUIRE(standin_kernel(0, nullptr, 0, latch.c_str(), late.address(), late.nbytes(), 'b') == 0);
    for (bool blocking : {false, true}) {
      auto waiting = started(*scheduler, open_file(path, true), {late, 0, late.nbytes()}, 0, true, blocking);
      finish(started(*scheduler, open_file(other, true), {ready, 0, ready.nbytes()}, 0, true, blocking));
      finish(started(*scheduler, open_file(other, false), {ready, 0, ready.nbytes()}, 0, false, blocking));
      CHECK_FALSE(waiting->done());
      if (blocking) {
        standin_release(latch.c_str());
        finish(waiting);
      }
    }
    CHECK(standin_count("blocking_streams_made") == 0);  // their copies would wait for kernels of the default stream
    REQUIRE(scheduler->wait_for_progress(milliseconds(10'000)));
    CHECK(close(*scheduler));
    auto reader = make("threads");
    CHECK(bytes_of_file(*reader, path, late.nbytes()) == std::vector<char>(late.nbytes(), 'b'));
    CHECK(close(*reader));
  }
}

TEST_CASE("every failing call of the driver makes a fault that names it, and the next transfer succeeds") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines()) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    const std::string path = directory.file(engine);
    const auto source = pattern(1'000'003, 3);
    GpuMemory memory(source);
    finish(started(*scheduler, open_file(path, true), {memory, 0, source.size()}, 0, true));
    const int64_t registered = standin_count("registered_nbytes");
    for (const char* function : {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventQuery",
                                 "cuEventSynchronize", "cuFileRead", "cuFileWrite"})
      for (int64_t after : {0, 1, 5})
        for (bool write : {true, false})
          for (bool later : {false, true}) {
            if (later && std::strncmp(function, "cuMemcpy", 8) != 0) continue;
            INFO(engine, " ", function, " ", after, write, later);
            standin_fail(function, after, 1, std::strncmp(function, "cuFile", 6) == 0 ? 5044 : 700, later);
            auto request = try_start(*scheduler, open_file(path, write), {memory, 0, source.size()}, 0, write);
            const bool failed = !request || (((*request)->wait_for(milliseconds(60'000))), (*request)->fault());
            if (request) REQUIRE((*request)->done());
            const std::string name = function;
            const bool copies = name == (write ? "cuMemcpyDtoHAsync_v2" : "cuMemcpyHtoDAsync_v2");
            const bool by_cufile = engine == "cufile" && name == (write ? "cuFileWrite" : "cuFileRead");
            if (after == 0 && (copies || by_cufile || name.starts_with("cuEvent"))) CHECK(failed);
            if (failed) {
              const Fault& fault = request ? *(*request)->fault() : request.fault();
              CHECK(fault.error_number == EIO);
              CHECK_FALSE(fault.hint.empty());
            }
            standin_reset();
            finish(started(*scheduler, open_file(path, true), {memory, 0, source.size()}, 0, true));
            finish(
                started(*scheduler, open_file(path, false, DirectMode::always), {memory, 0, source.size()}, 0, false));
            REQUIRE(memory.bytes() == source);
          }
    CHECK(standin_count("registered_nbytes") == registered);
    CHECK(close(*scheduler));
  }
}

TEST_CASE("page-locked memory is one bounded pool, made on first use; a transfer without it is a fault") {
  TemporaryDirectory directory;
  auto scheduler = make("threads", 4, 64, 4 << 20);
  const std::string path = directory.file("file");
  GpuMemory memory(pattern(40'000'000, 4));
  BouncePool::set_process_pool_nbytes(BouncePool::min_nbytes);  // frees the old pool
  standin_fail("cuMemHostRegister_v2", 0, 1, 2, false);
  auto refused = try_start(*scheduler, open_file(path, true), {memory, 0, memory.nbytes()}, 0, true);
  REQUIRE_FALSE(refused);
  CHECK(refused.fault().error_number == ENOMEM);
  standin_reset();
  const int64_t before = standin_count("registered_nbytes");
  finish(started(*scheduler, open_file(path, true), {memory, 0, memory.nbytes()}, 0, true));
  GpuMemory found(std::vector<char>(memory.nbytes()));
  finish(started(*scheduler, open_file(path, false, DirectMode::always), {found, 0, memory.nbytes()}, 0, false));
  CHECK(found.bytes() == memory.bytes());
  CHECK(standin_peak("registered_nbytes") - before <= static_cast<int64_t>(BouncePool::pinned_pool_nbytes()));
  CHECK(close(*scheduler));
  BouncePool::set_process_pool_nbytes(BouncePool::default_nbytes);
}

TEST_CASE("several threads move memory of two GPUs while copies take their time; events and streams are used again") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines()) {
    auto scheduler = make(engine, 2, 16, 64 << 10);
    if (!scheduler) continue;
    standin_set("copy_delay_us", 200);
    std::vector<std::string> paths;
    for (int id = 0; id < 4; ++id) paths.push_back(directory.file(engine + std::to_string(id)));
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int id = 0; id < 4; ++id)
      threads.emplace_back([&, id] {
        for (int round = 0; round < 5; ++round) {
          const auto source = pattern(200'000 + static_cast<size_t>(id), static_cast<unsigned>(id + round));
          GpuMemory from(source, id % 2), to(std::vector<char>(source.size()), (id + 1) % 2);
          auto out = started(*scheduler, open_file(paths[static_cast<size_t>(id)], true), {from, 0, source.size()}, 11,
                             true, round % 2 == 0);
          while (!out->wait_for(milliseconds(100))) {
          }
          auto in = started(*scheduler, open_file(paths[static_cast<size_t>(id)], false), {to, 0, source.size()}, 11,
                            false, round % 3 == 0);
          while (!in->wait_for(milliseconds(100))) {
          }
          wrong += out->fault() || in->fault() || to.bytes() != source;
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(close(*scheduler));
    standin_reset();
  }
  CHECK(standin_count("streams") <= 40);
  CHECK(standin_count("events") <= 400);
  CHECK(standin_count("cufile_files") == 0);
}

TEST_CASE("closing waits for copies and for the work queued before them") {
  TemporaryDirectory directory;
  for (const auto& engine : all_engines()) {
    auto scheduler = make(engine);
    if (!scheduler) continue;
    standin_set("copy_delay_us", 2000);
    GpuMemory memory(std::vector<char>(1'000'000, 'a'));
    REQUIRE(standin_kernel(0, nullptr, 100'000, nullptr, memory.address(), memory.nbytes(), 'b') == 0);
    const std::string path = directory.file(engine);
    auto request = started(*scheduler, open_file(path, true), {memory, 0, memory.nbytes()}, 0, true);
    CHECK(close(*scheduler));
    CHECK(request->done());
    CHECK_FALSE(request->fault());
    standin_reset();
    auto reader = make("threads");
    CHECK(bytes_of_file(*reader, path, memory.nbytes()) == std::vector<char>(memory.nbytes(), 'b'));
    CHECK(close(*reader));
  }
}

TEST_CASE("cuFile moves aligned bodies of files that it accepts; all other bytes use page-locked memory") {
  TemporaryDirectory directory;
  REQUIRE(cufile::open({}, 0).refusal.empty());
  auto scheduler = make("cufile");
  REQUIRE(scheduler);
  const std::string path = directory.file("file");
  const auto source = pattern(1'000'003, 5);
  GpuMemory memory(source);
  standin_reset();
  finish(started(*scheduler, open_file(path, true), {memory, 0, source.size()}, 7, true));
  CHECK(scheduler->statistics().gds_nbytes == 1'000'003 / 4096 * 4096 - 4096);
  CHECK(standin_count("cufile_unaligned") == 0);
  standin_fail("cuFileHandleRegister", 0, 1, 5008, false);
  const uint64_t before = scheduler->statistics().gds_nbytes;
  finish(started(*scheduler, open_file(path, true), {memory, 0, source.size()}, 7, true));
  CHECK(scheduler->statistics().gds_nbytes == before);
  standin_reset();
  standin_set("cufile_transfer_max", 10'240);  // short transfers are resumed
  GpuMemory found(std::vector<char>(source.size()));
  finish(started(*scheduler, open_file(path, false, DirectMode::always), {found, 0, source.size()}, 7, false));
  CHECK(found.bytes() == source);
  standin_reset();
  CHECK(close(*scheduler));
}

}  // namespace
}  // namespace tensorferry
