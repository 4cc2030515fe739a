// The interface of the engines, which pass blocks to the kernel. README.md in this folder explains each engine.
//
// Any thread may create an engine. From then on the engine belongs to one thread, the worker, and only the worker calls
// its functions, except wake(), which every thread may call. The outcome of a block is data: a count of bytes or a
// negative errno. Code in transfer/ decides whether to resume, retry or fail the block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tensorferry {

enum class Operation : uint8_t { read, write };

// The maximum number of bytes that the kernel moves in one call: INT_MAX rounded down to a page (see read(2)).
constexpr uint64_t max_call_nbytes = 0x7ffff000;

// One read or write. It must live from add() until reap() has returned it.
struct Block {
  Operation operation = Operation::read;
  int descriptor = -1;
  char* memory = nullptr;
  uint64_t nbytes = 0;
  uint64_t offset = 0;
  int64_t result = 0;                       // after completion: bytes moved, -errno, or the result of `call`
  int64_t (*call)(const Block&) = nullptr;  // run in place of the system call; only engines with threads support it
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const char* name() const = 0;

  // Whether blocks run on threads of the engine. If so, a block that copies from the page cache delays no other block.
  virtual bool has_threads() const { return false; }

  // Whether buffered I/O runs inside submit(), on the calling thread.
  virtual bool blocks_on_buffered() const { return false; }

  // Called once by the worker, before all other functions.
  virtual void start() {}

  // Called once by the worker, after all other functions. The destructor may run on any thread, so state of the
  // worker's thread is released here.
  virtual void end() {}

  // Add a block. The number of blocks that were added and not yet returned by reap() must not exceed the queue depth.
  // If the kernel refuses a block, reap() returns it with the error as its result. If the kernel refuses all
  // submissions for a tenth of a second, reap() returns all blocks that wait for submission in the same way.
  virtual void add(Block& block) = 0;

  // Ensure that all added blocks have been passed to the kernel or to a thread.
  virtual void submit() = 0;

  // Submit the added blocks, and append the completed blocks to `completed`. With `wait`, sleep until a block completes
  // or wake() is called.
  virtual void reap(std::vector<Block*>& completed, bool wait) = 0;

  // End the sleep of reap(), or the next one if the worker does not sleep now.
  virtual void wake() = 0;
};

// A new engine; or null, and `refusal` is the reason why the engine cannot be created, with the remedy.
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
  bool on_request_only = false;  // used only if the options name this engine
};

// The engines in the order in which they are tried. The last one that is not on_request_only always works.
const std::vector<EngineKind>& engine_kinds();

// Move a block on the calling thread by one system call (or by `call`), and return the result, which may be short. This
// is the only implementation of synchronous I/O in the core.
int64_t execute_now(const Block& block);

// Read as much of the beginning of a block as the page cache holds, on the calling thread and without waiting for a
// drive. Returns the number of bytes read (fewer than the block has if the rest is not cached, 0 at the end of the
// file), -EAGAIN if nothing can be read without waiting, or another -errno. The kernel starts read-ahead for the part
// that is not cached. The block's descriptor must be one without O_DIRECT.
int64_t read_cached(const Block& block);

// Return errno after a preadv2 with RWF_NOWAIT, as in read_cached(), has failed. The errors by which kernels and file
// systems report that they do not support RWF_NOWAIT become EAGAIN, because they mean the same to a caller: the data is
// not available without waiting.
int errno_of_cached();

}  // namespace tensorferry
