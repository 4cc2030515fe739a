// A lane holds everything that transfers of one device may have to wait for. Since each device has its own lane, a
// device that is slow or hangs delays only its own transfers.
//
// A lane has a queue, helper threads for operations that may block, and a pool of bounce buffers. A queue is a line of
// transfers (line.h) and the workers, threads that each own an engine, which take blocks from it. All of these are
// created at first use: if only the callers' own threads read and write the files of a device, its lane has no thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "memory/bounce_pool.h"
#include "transfer/helpers.h"
#include "transfer/line.h"

namespace tensorferry {

class Lanes;
class Scheduler;
class Worker;
struct WorkBlock;

class Queue {
 public:
  explicit Queue(Scheduler& scheduler) : scheduler_(scheduler) {}

  // Start workers with engines of this kind. Returns an empty string, or the reason for a failure. May be called once.
  std::string start(const EngineKind& kind);

  // Add transfers at the end of the line.
  void add(const std::vector<std::shared_ptr<Transfer>>& transfers);

  // Take the next block in line, and return whether there was one. Requests have a class: small, normal or background,
  // in order of precedence (Line::Class). Only blocks of the classes before `limit` are taken. If `only` is given, only
  // blocks of that transfer are taken, whatever its class. If there is no such block and `hungry` is given, add() will
  // wake this worker when it adds transfers of a class before `limit`.
  bool take_block(WorkBlock& block, Worker* hungry, const Transfer* only, Line::Class limit = Line::class_count);

  // Whether the queue was told to stop and its line is empty. A worker that has no block left then ends.
  bool is_over() const;

  // Let the workers finish the transfers in line, and wait until their threads have ended.
  void stop();
  // Detach the workers' threads, because a transfer hangs. They continue until let_end() is called and the line is
  // empty.
  void abandon();
  void let_end();

 private:
  // A worker that found no block of the classes before `limit`. add() wakes it when it adds such blocks.
  struct Hungry {
    std::shared_ptr<Worker> worker;
    Line::Class limit;
  };

  Scheduler& scheduler_;
  mutable std::mutex mutex_;
  Line line_;
  std::vector<Hungry> hungry_;
  bool stopping_ = false;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

class Lane {
 public:
  Lane(Lanes& lanes, uint64_t device);

  uint64_t device() const { return device_; }

  // The queue, created at first use. If no further queue can be created, this lane uses that of another lane.
  std::shared_ptr<Queue> queue();

  // The pool of bounce buffers; null if there is no memory for it.
  std::shared_ptr<BouncePool> pool();

  // Post a job that opens, closes or truncates a file, pauses, or does buffered I/O that would block the engine.
  void help(Helpers::Job job) { jobs_.post(std::move(job)); }
  // Post a job that may wait for bounce memory until a worker's blocks release it. Such jobs have separate threads: the
  // blocks may be waiting for a thread of help().
  void help_to_wait(Helpers::Job job) { waits_.post(std::move(job)); }
  // Post a sync. Syncs have separate threads, because many may run at once and each may take long.
  void help_to_sync(Helpers::Job job) { syncs_.post(std::move(job)); }
  // Post a job of a stream (stream.h), which copies memory, computes checksums and submits full buffers. Streams have
  // separate threads, so their copying does not wait behind jobs that the device delays.
  void help_stream(Helpers::Job job) { streams_.post(std::move(job)); }

  // End, detach, or let end the helpers' threads, as the functions of Helpers with these names do. The queue is not
  // stopped here, because other lanes may share it: Lanes has the set of queues.
  void stop();
  void abandon();
  void let_end();
  // Give up the lane's reference to its queue and return it; null if the lane has none. stop() must have been called.
  std::shared_ptr<Queue> give_queue_back() {
    std::lock_guard lock(mutex_);
    return std::exchange(queue_, nullptr);
  }

 private:
  std::array<Helpers*, 4> all_helpers() { return {&jobs_, &waits_, &syncs_, &streams_}; }

  Lanes& lanes_;
  const uint64_t device_;
  std::mutex mutex_;  // guards the creation of the queue and the pool
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<BouncePool> pool_;
  Helpers jobs_;
  Helpers waits_;
  Helpers syncs_;
  Helpers streams_;
  friend class Scheduler;
  size_t outstanding_ = 0;  // transfers and other work that Scheduler::close() waits for; guarded by its mutex
};

}  // namespace tensorferry
