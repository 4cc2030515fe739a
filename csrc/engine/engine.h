// How blocks reach the kernel: the interface of the three engines. README.md in this folder says why each is
// as it is.
//
// An engine is made by any thread and then belongs to one, the worker, which alone calls the rest; but wake() is
// for everybody.
// A block's fate travels as data: its result is a count of bytes or a negative errno, and what follows from it
// (resume, retry, fail) is decided above, in transfer/.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tensorferry {

enum class Operation : uint8_t { read, write };

// The longest that the kernel moves in one call, rounded down to a page: see read(2).
constexpr uint64_t max_call_nbytes = 0x7ffff000;

// What one submission carries. Lives until its completion has been reaped.
struct Block {
  Operation operation = Operation::read;
  int descriptor = -1;
  char* memory = nullptr;
  uint64_t nbytes = 0;
  uint64_t offset = 0;
  int64_t result = 0;                       // after completion: bytes moved, or -errno (or what `call` has returned)
  int64_t (*call)(const Block&) = nullptr;  // moves it in the place of a system call, by engines with threads only
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const char* name() const = 0;

  // Whether blocks run in threads of its own, so that one that copies from the page cache holds up nobody.
  virtual bool has_threads() const { return false; }

  // Whether I/O through the page cache is done inside submit(), by the calling thread.
  virtual bool blocks_on_buffered() const { return false; }

  // Called once, first of all, by the thread that will own the engine.
  virtual void start() {}

  // Takes a block; at most the queue depth may be outstanding. Blocks that the kernel refuses come back from
  // reap() with the error as their result; so do those that it has not taken after a tenth of a second of failures.
  virtual void add(Block& block) = 0;

  // Makes sure that all added blocks have been handed over.
  virtual void submit() = 0;

  // Hands over what was added, appends completed blocks to `completed` and returns. With `wait`, sleeps until
  // there is one, or until wake() is called.
  virtual void reap(std::vector<Block*>& completed, bool wait) = 0;

  virtual void wake() = 0;
};

// Either an engine, or why not and what would help.
struct EngineAttempt {
  std::unique_ptr<Engine> engine;
  std::string refusal;
};

struct EngineOptions {
  uint32_t queue_depth = 128;
  bool single_submit = false;  // one system call for each block
};

EngineAttempt create_io_uring_engine(const EngineOptions& options);
EngineAttempt create_libaio_engine(const EngineOptions& options);
EngineAttempt create_threads_engine(const EngineOptions& options);
EngineAttempt create_cufile_engine(const EngineOptions& options);

struct EngineKind {
  const char* name;
  EngineAttempt (*create)(const EngineOptions&);
  bool on_request_only = false;
};

// In order of preference. The last that is not for requests only always works.
const std::vector<EngineKind>& engine_kinds();

// One block, on the calling thread, to its first result. The one implementation of "just do it now".
int64_t execute_now(const Block& block);

// What the page cache holds of a block's beginning, on the calling thread and without waiting for a drive: bytes read
// (fewer than asked where the rest is not cached; 0 at the file's end), -EAGAIN where nothing can be had that way, or
// another -errno. The kernel begins to read ahead what is not cached. The block's descriptor is one through the page
// cache.
int64_t read_cached(const Block& block);

// What errno means behind such a read: kernels and file systems that cannot promise not to wait refuse, which is
// EAGAIN.
int errno_of_cached();

}  // namespace tensorferry
