// One GPU as transfers use it: its primary context (which torch and everybody else shares), events, and copiers.
//
// A Gpu lives as long as the process: contexts are not released, since at exit the driver may be gone before us.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "device/driver.h"

namespace tensorferry::cuda {

class Gpu;

// Makes a GPU's context that of the calling thread, for a scope; unless there is a fault().
class Current {
 public:
  explicit Current(const Gpu& gpu);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  std::optional<Fault> fault() const;

 private:
  const Driver& driver_;
  const int code_;
};

// For threads of our own: what they ask of CUDA must not break the capture of a graph that another thread is making.
void leave_captures_alone();

// A point in a stream's work. Goes back to its GPU, for the next use, when dropped.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event() { reset(); }

  std::optional<Fault> record(StreamHandle stream);
  Result<bool> passed() const;
  std::optional<Fault> wait() const;
  void reset();

 private:
  friend class Gpu;
  Event(Gpu& gpu, EventHandle handle) : gpu_(&gpu), handle_(handle) {}

  Gpu* gpu_ = nullptr;
  EventHandle handle_ = nullptr;
};

enum class Direction { to_gpu, from_gpu };

// A stream for each direction, so that reads and writes overlap. One thread uses it at a time.
class Copier {
 public:
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Queues a copy between registered host memory and the GPU. Both stay as they are until the event has passed.
  Result<Event> start(Direction direction, char* host, Address address, size_t nbytes);

 private:
  friend class Gpu;
  explicit Copier(Gpu& gpu) : gpu_(gpu) {}

  Gpu& gpu_;
  StreamHandle streams_[2] = {nullptr, nullptr};
};

class Gpu {
 public:
  // Makes its primary context at first use.
  static Result<Gpu*> of(int ordinal);

  const Driver& driver() const { return driver_; }
  ContextHandle context() const { return context_; }

  Result<Event> take_event();
  Result<std::unique_ptr<Copier>> take_copier();
  void give_back(std::unique_ptr<Copier> copier);

  // Makes host memory page-locked and known to all GPUs.
  std::optional<Fault> register_host(void* memory, size_t nbytes);
  void unregister_host(void* memory);

 private:
  friend class Event;
  Gpu(const Driver& driver, ContextHandle context) : driver_(driver), context_(context) {}

  const Driver& driver_;
  const ContextHandle context_;
  std::mutex mutex_;
  std::vector<EventHandle> idle_events_;
  std::vector<std::unique_ptr<Copier>> idle_copiers_;
};

// Copiers of one user, who makes one call at a time: one for each GPU, taken at first use, given back at the end.
class Copiers {
 public:
  Copiers() = default;
  ~Copiers();
  Copiers(const Copiers&) = delete;
  Copiers& operator=(const Copiers&) = delete;

  bool empty() const { return taken_.empty(); }
  Result<Copier*> of(Gpu& gpu);

 private:
  std::map<Gpu*, std::unique_ptr<Copier>> taken_;
};

// Whether a stream's work is being captured into a graph, so that there is nothing to wait for.
bool is_capturing(int ordinal, StreamHandle stream);

// The point from which on a transfer may use GPU memory: what had been queued on a stream when the transfer was asked
// for has passed. Waiting for it is not left to a worker's stream, which then would hold up other transfers.
class Gate {
 public:
  // The stream must not be capturing.
  static Result<std::shared_ptr<Gate>> after(int ordinal, StreamHandle stream);

  Gpu& gpu() const { return gpu_; }
  Result<bool> passed() const { return event_.passed(); }

 private:
  Gate(Gpu& gpu, Event event) : gpu_(gpu), event_(std::move(event)) {}

  Gpu& gpu_;
  Event event_;
};

}  // namespace tensorferry::cuda
