// One GPU as transfers use it: its primary context (which torch and all other libraries of the process use, too), and
// its events and copiers, which are kept for reuse.
//
// A Gpu lives until the process ends. Contexts are never released, because at exit the driver may be unloaded before
// us.
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

// Makes a GPU's context current on the calling thread for a scope. If that fails, fault() has the reason.
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

// Select the relaxed capture mode for the calling thread. Each thread of the core that calls CUDA must do this, because
// otherwise its calls would break a graph capture that another thread has begun.
void leave_captures_alone();

// A point in the work that is queued on a stream. The Event's destructor returns the driver's event to the Gpu for
// reuse.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { *this = std::move(other); }
  Event& operator=(Event&& other) noexcept;
  ~Event() { reset(); }

  std::optional<Fault> record(StreamHandle stream);  // the point is behind everything queued on the stream so far
  Result<bool> passed() const;                       // whether the work before the point has completed
  std::optional<Fault> wait() const;                 // until it has completed
  void reset();

 private:
  friend class Gpu;
  Event(Gpu& gpu, EventHandle handle) : gpu_(&gpu), handle_(handle) {}

  Gpu* gpu_ = nullptr;
  EventHandle handle_ = nullptr;
};

enum class Direction { to_gpu, from_gpu };

// Copies between host memory and one GPU. A copier has a separate stream for each direction, so reads and writes
// overlap. Only one thread at a time may use a copier.
class Copier {
 public:
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Queue a copy between page-locked host memory and the GPU. The caller must leave both sides alone until the returned
  // event has passed.
  Result<Event> start(Direction direction, char* host, Address address, size_t nbytes);

 private:
  friend class Gpu;
  explicit Copier(Gpu& gpu) : gpu_(gpu) {}

  Gpu& gpu_;
  StreamHandle streams_[2] = {nullptr, nullptr};
};

class Gpu {
 public:
  // Return the GPU, creating its primary context at first use.
  static Result<Gpu*> of(int ordinal);

  const Driver& driver() const { return driver_; }
  ContextHandle context() const { return context_; }

  // Return an idle event or copier, or create one. give_back() makes a copier idle again.
  Result<Event> take_event();
  Result<std::unique_ptr<Copier>> take_copier();
  void give_back(std::unique_ptr<Copier> copier);

  // Page-lock host memory and register it with CUDA, for the contexts of all GPUs.
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

// The copiers of one worker or stream. of() takes a copier of a GPU at first use, and the destructor gives all copiers
// back. Only one thread at a time may use this object.
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

// Whether the work that is queued on a stream is being captured into a graph. Captured work does not run, so a transfer
// cannot wait for it.
bool is_capturing(int ordinal, StreamHandle stream);

// The point from which a transfer may use GPU memory: everything that was queued on the user's stream when the transfer
// was requested has completed. The transfer is put in line, where workers take blocks from it, once its gates have
// passed. A worker could instead queue its copies at once and let its CUDA stream wait for the gate. The copies of the
// worker's other transfers would then wait behind them.
class Gate {
 public:
  // Create a gate behind everything that is queued on the stream now. The stream must not be capturing.
  static Result<std::shared_ptr<Gate>> after(int ordinal, StreamHandle stream);

  Gpu& gpu() const { return gpu_; }
  Result<bool> passed() const { return event_.passed(); }

 private:
  Gate(Gpu& gpu, Event event) : gpu_(gpu), event_(std::move(event)) {}

  Gpu& gpu_;
  Event event_;
};

}  // namespace tensorferry::cuda
