// What transfers of one device wait for, so that a device that is slow, or hangs, holds up nobody else's.
//
// A lane has a queue (a line of transfers, and workers that each own an engine), helpers for what may block, and a
// share of the memory in between. All of it is made when it is first needed: a device whose files are only read and
// written by callers' own threads has a lane without a thread.
#pragma once

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

  // Starts workers with engines of this kind; empty, or why not. To be called once.
  std::string start(const EngineKind& kind);

  // At the end of the line.
  void add(const std::vector<std::shared_ptr<Transfer>>& transfers);

  // The next block in line of a class before `limit`, or of `only` if that is given. Where there is nothing to take,
  // the worker `hungry`, if given, will be woken when there is.
  bool take_block(WorkBlock& block, Worker* hungry, const Transfer* only, Line::Class limit = Line::class_count);

  // Whether workers are to end, now that there is nothing to do.
  bool is_over() const;

  // Ends the workers when they have nothing to do any more, and waits for that.
  void stop();
  // The same without joining the threads: they end by themselves after let_end().
  void abandon();
  void let_end();

 private:
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

  // Made at first use; where there can be no further one, another lane's.
  std::shared_ptr<Queue> queue();

  // Null where there is no memory for it.
  std::shared_ptr<BouncePool> pool();

  // Opening, closing, cutting; I/O through the page cache where an engine would block; pauses.
  void help(Helpers::Job job) { jobs_.post(std::move(job)); }
  // Syncs, which may take long and all at once.
  void help_to_sync(Helpers::Job job) { syncs_.post(std::move(job)); }
  // What computes, and only then waits for the device: copies and sums of streams.
  void help_stream(Helpers::Job job) { streams_.post(std::move(job)); }

  // Ends the helpers' threads when they have nothing to do any more; the queue is the scheduler's to end.
  void stop();
  void abandon();
  void let_end();
  // Once stopped.
  std::shared_ptr<Queue> give_queue_back() {
    std::lock_guard lock(mutex_);
    return std::exchange(queue_, nullptr);
  }

 private:
  Lanes& lanes_;
  const uint64_t device_;
  std::mutex mutex_;  // for making the queue and the pool
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<BouncePool> pool_;
  Helpers jobs_;
  Helpers syncs_;
  Helpers streams_;
  friend class Scheduler;
  size_t outstanding_ = 0;  // the scheduler's mutex guards it
};

}  // namespace tensorferry
