// The state of the stand-in driver: options, counters, ordered failures, memory, streams, events. One
// mutex guards all of it, and one condition variable is notified of every change, which is simple and
// fast enough for tests. Operations run outside the mutex, those of each stream on a separate thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace standin {

enum Result : int {  // CUDA's numbers, and its names in cuda.cpp
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kCaptureUnsupported = 900,
};

inline constexpr int kDevicesMax = 2;

inline std::map<std::string, std::int64_t> default_options() {
  return {
      {"driver_version", 13000},
      {"device_count", kDevicesMax},
      {"copy_delay_us", 0},         // before each copy between host and device
      {"unregistered_allowed", 0},  // copies of host memory that is not registered
      {"poison", 0},                // every call gives this error
      {"poisoning", 0},             // a failure on a stream becomes the poison
      {"cufile_nvfs", 1},           // nvidia-fs is loaded
      {"cufile_p2p", 0},            // or the kernel's P2P DMA is there
      {"cufile_transfer_max", 0},   // a cuFile call moves no more bytes; 0: no limit
      {"cufile_delay_us", 0},       // before each cuFile transfer
  };
}

// Numbers of objects that exist now; reset does not change them.
inline const std::set<std::string> kGauges = {
    "allocations",       "allocated_nbytes",  "streams",      "events",         "contexts",       "contexts_pushed",
    "registered_ranges", "registered_nbytes", "cufile_files", "cufile_buffers", "cufile_running",
};

// Numbers of events since the last reset.
inline const std::set<std::string> kTallies = {
    "blocking_streams_made",  // by cuStreamCreate, without CU_STREAM_NON_BLOCKING
    "htod_nbytes",           "dtoh_nbytes", "cufile_read_nbytes", "cufile_written_nbytes",
    "cufile_unaligned",       // transfers with an offset or size that is not a multiple of 4096
    "cufile_registered",      // transfers of registered buffers
    "cufile_buffered_files",  // registered without O_DIRECT
    "cufile_closed_early",    // files that were closed before they were deregistered
};

struct Counter {
  std::int64_t now = 0;
  std::int64_t peak = 0;
};

struct Failure {
  std::string function;
  std::int64_t after;
  std::int64_t times;
  int code;
  bool later;
};

struct Device {  // its address is the handle of its primary context
  int ordinal = 0;
  int retained = 0;
};

// The caller gets an address that cannot be accessed; the bytes are in other memory, as with a GPU.
struct Allocation {
  Allocation(int device, std::size_t nbytes);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  bool usable() const { return address && bytes; }

  int device;
  std::size_t nbytes;
  std::uint64_t address = 0;
  char* bytes = nullptr;
  std::mutex mutex;  // of the bytes: a test may look while a stream writes
  bool freed = false;
};

struct Range {  // a part of an allocation that stays mapped while an operation is queued
  std::shared_ptr<Allocation> allocation;
  std::size_t offset = 0;

  explicit operator bool() const { return allocation != nullptr; }
};

using Operation = std::function<int()>;  // returns a Result, and is called without the mutex

struct Stream {
  int device = 0;
  int capture_status = 0;
  bool started = false;
  bool closed = false;
  bool counted = false;  // made by cuStreamCreate
  int error = 0;         // of the operation that failed since the last event
  std::uint64_t queued = 0;
  std::uint64_t done = 0;
  std::deque<Operation> queue;
};

struct Event {
  int device = 0;
  std::uint64_t recorded = 0;
  std::uint64_t completed = 0;
  int error = 0;
};

struct Registered {
  std::size_t nbytes;
  int device;  // the only one that may use it; -1: all
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<pid_t> initialized_in = 0;  // the process that called cuInit
  std::map<std::string, std::int64_t> options = default_options();
  std::map<std::string, Counter> counters;
  std::vector<Failure> failures;
  Device devices[kDevicesMax] = {{0}, {1}};
  std::map<std::uint64_t, std::shared_ptr<Allocation>> allocations;
  std::map<std::uintptr_t, Registered> registered;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::set<std::shared_ptr<Stream>> closing;  // destroyed, but not done
  std::map<std::tuple<int, int, std::thread::id>, std::shared_ptr<Stream>> default_streams;
  std::map<void*, std::shared_ptr<Event>> events;
  std::set<std::string> released;
  std::uint64_t resets = 0;

  // The caller of these holds the mutex.
  void add(const std::string& counter, std::int64_t change);
  int ordered_failure(const char* function, bool later);
  Range find(std::uint64_t address, std::size_t nbytes);
  bool is_registered(const void* host, std::size_t nbytes, int device) const;
  std::shared_ptr<Stream> stream(int device, void* handle);
  void queue(const std::shared_ptr<Stream>& stream, Operation operation);
  void close(const std::shared_ptr<Stream>& stream);
};

// Never destroyed: threads of streams may outlive main.
State& state();

// Where the calling thread is: the stack of contexts that it has pushed.
std::vector<Device*>& contexts();

// True in a child of the process that called cuInit: CUDA does not survive fork, and no more do the
// threads of streams.
bool forked();

}  // namespace standin
