// A file written in order from memory that comes bit by bit, with bounded memory in flight.
//
// What is appended is copied into buffers, one after the other, and with that let go of; full buffers are written while
// the next ones are filled. CRC-32s of chunks and of segments are taken on the way, and since bytes are copied in
// order, a segment may contain those of segments before it (Made): headers and directories of archives do.
//
// No thread is a stream's own. Whatever may go on (something was appended, a buffer was written, a GPU's copy is over)
// is done by a job, one at a time, which never waits for I/O: on threads of the device's lane that are for nothing
// else, so that what computes does not stand behind what closes and syncs files.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/after_fork.h"
#include "checksum/checksum.h"
#include "device/gpu.h"
#include "file/file.h"
#include "memory/allocation.h"
#include "transfer/request.h"
#include "transfer/scheduler.h"

namespace tensorferry {

struct StreamOptions {
  uint64_t offset = 0;        // in the file, of its first byte
  uint64_t chunk_nbytes = 0;  // of which CRC-32s are taken; 0: of none
  bool of_segments = false;   // CRC-32s of segments as well
  bool background = false;    // let others go first
  // Of how many bytes at most there will be, as far as that is known: short streams have short buffers.
  uint64_t expected_nbytes = UINT64_MAX;
};

// Bytes that depend on the checksums of others: numbers are put into them when all before them has been copied.
struct Made {
  struct Field {
    enum class Kind : uint8_t {
      segment,  // the CRC-32 of an earlier segment, 32 bits, little-endian
      own,      // that of [begin, begin + nbytes) of these bytes, with the fields before this one in place
      folded,   // 20 decimal digits: many CRC-32s made one number of 64 bits, by `fold`
    };
    Kind kind;
    uint64_t position;  // in `bytes`
    uint64_t segment = 0;
    uint64_t begin = 0;
    uint64_t nbytes = 0;
    std::vector<int64_t> crcs = {};  // CRC-32s; negative: ~index of the segment whose it is
    // One after the other: number ^= crc + added + (number << left) + (number >> right).
    struct Fold {
      uint64_t added;
      uint32_t left, right;
    } fold = {};
  };

  static constexpr uint64_t folded_nbytes = 20;

  std::vector<char> bytes;
  std::vector<Field> fields;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  // Many short ones rather than few long ones: a drive finishes what it got at one time at one time, and idles until
  // the next ones are filled. 36 of 1 MiB write 1.2 times as fast as 9 of 4 MiB, and 56 again 1.1 times as fast.
  static constexpr uint64_t max_buffer_nbytes = uint64_t{1} << 20;
  static constexpr uint64_t min_buffer_nbytes = uint64_t{64} << 10;

  // Of the longest kind, of all streams of the process to one device; but each stream gets one.
  static constexpr size_t max_buffers = 56;
  // All but so many are with the drive at once, for the same reason.
  static constexpr size_t spare_buffers = 4;

  // A buffer's bytes: a part of an allocation.
  struct Memory {
    std::shared_ptr<Allocation> allocation;  // null: none could be had
    char* data = nullptr;
  };

  Stream(std::shared_ptr<Scheduler> scheduler, std::shared_ptr<File> file, const StreamOptions& options);

  // What begin_job() and end() each take over an admission to.
  std::vector<Scheduler::Places> place() const { return {{lane_, 1}}; }

  // At the end. The memory must stay as it is until copied_segments() is beyond its index. The caller has been admitted
  // to a place(), which begin_job() takes over. False: has_ended(). After a fault nothing is done, and all is well.
  bool append(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr);
  // False as well where a field does not fit, or names a segment that is not before it.
  bool append(Made made);

  // By end() or abort(), of another thread perhaps.
  bool has_ended() const;

  // To be called, with success, before memory of a GPU is appended.
  std::optional<Fault> prepare_for_gpus() { return scheduler_->prepare_for_gpus(); }

  // After append(): what there is to do is done from now on, if it is worth it or has to be `now`. Takes over one
  // admission.
  void begin_job(bool now = false);

  // Nothing more comes: the rest is written, by a request that also does what `options` say. Takes over one admission,
  // as begin_job(). False: has_ended() before.
  bool end(const RequestOptions& options);

  // Waits; false when time is over. True at once after a fault.
  bool wait_until_uncopied_is(uint64_t nbytes, std::chrono::milliseconds timeout);
  bool wait_until_ended(std::chrono::milliseconds timeout);

  // Lets go of all memory that is still to be copied, and waits until none is being copied; false when time is over.
  // What is with the drive is left to end by itself.
  bool abort(std::chrono::milliseconds timeout);

  // After abort(): has the scheduler name `id` among what has finished as soon as no memory is being copied.
  void tell_when_aborted(uint64_t id);

  std::optional<Fault> fault() const;
  uint64_t segment_count() const;
  uint64_t copied_segments() const;  // from the first one on
  uint64_t nbytes() const;           // appended so far
  // Nothing until all has been written.
  std::optional<std::vector<uint32_t>> chunk_crcs() const { return complete(chunk_crcs_); }
  std::optional<std::vector<uint32_t>> segment_crcs() const { return complete(segment_crcs_); }
  uint64_t fork_generation() const { return fork_generation_; }

 private:
  std::optional<std::vector<uint32_t>> complete(const std::vector<uint32_t>& crcs) const {
    const auto lock = locked();
    return ended_ ? std::optional(crcs) : std::nullopt;
  }

  std::unique_lock<std::mutex> locked() const { return locked_unless_forked(mutex_, fork_generation_); }

  struct Source {
    char* memory = nullptr;  // null: made
    uint64_t nbytes = 0;
    std::shared_ptr<cuda::Gate> gate = nullptr;  // null: host memory
    std::shared_ptr<Made> made = nullptr;
    uint64_t placed_nbytes = 0;  // that have their place in a buffer
  };

  // A part of a source, and its place in a buffer.
  struct Part {
    uint64_t begin;  // in the buffer
    uint64_t nbytes;
    const char* memory = nullptr;  // null: of a GPU, or made
    std::shared_ptr<Made> made = nullptr;
    uint64_t made_begin = 0;  // in it
    bool of_gpu = false;
    bool ends_segment = false;
  };

  struct Buffer {
    ~Buffer();

    Memory memory;
    bool of_stock = false;  // where it goes back to, and for which device it was taken
    uint64_t device = 0;
    uint64_t begin = 0;  // of its bytes: as far from its own beginning as theirs is from a multiple of its size
    uint64_t end = 0;
    uint64_t offset = 0;                            // in the file, of `begin`
    std::deque<Part> parts;                         // not yet copied and summed
    size_t open_copies = 0;                         // of GPUs, under way; guarded by mutex_
    std::map<cuda::Gpu*, cuda::Event> copies = {};  // the last one of each, not yet watched
  };

  // Steps of a job: each does something, or returns false.
  void run();
  bool place_sources();
  bool copy();
  bool write_the_rest();

  bool take_buffer();
  bool start_copy(Source& source, uint64_t nbytes);
  void watch_copies();
  void copy_and_sum(Buffer& buffer);
  void sum(const char* bytes, uint64_t nbytes);
  void fill_in(Made& made) const;
  void write(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last);
  void hand_over(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last);
  void written(std::shared_ptr<Buffer> buffer, const std::optional<Fault>& fault, bool last);
  void fail(Fault fault);
  void wake();
  bool stopped() const { return stopping_ || fault_.has_value(); }  // with mutex_ held
  bool is_copying() const { return (at_work_ && !handing_over_) || open_copies_ > 0; }
  void news(std::unique_lock<std::mutex>& lock);  // lets go of it

  const std::shared_ptr<Scheduler> scheduler_;
  const std::shared_ptr<File> file_;
  const std::shared_ptr<Lane> lane_;
  const StreamOptions options_;
  const uint64_t fork_generation_ = tensorferry::fork_generation();
  const uint64_t buffer_nbytes_;  // a power of two

  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Source> sources_;  // not yet placed to their ends
  uint64_t segment_count_ = 0;
  uint64_t appended_nbytes_ = 0;
  uint64_t uncopied_nbytes_ = 0;
  uint64_t copied_segments_ = 0;
  bool running_ = false;       // a job waits for a thread, or has one
  bool at_work_ = false;       // it has
  bool again_ = false;         // and there is more for it to do
  bool handing_over_ = false;  // it is with the file, and with nobody's memory
  bool closed_ = false;        // nothing more is taken
  bool stopping_ = false;
  bool ended_ = false;
  std::optional<RequestOptions> ending_;
  std::optional<uint64_t> to_be_told_;  // when nothing is being copied any more
  size_t in_flight_ = 0;                // buffers with the drive
  size_t open_copies_ = 0;              // of GPUs
  bool gate_watched_ = false;           // of the first source
  size_t buffer_count_ = 0;
  std::optional<Fault> fault_;

  // The job's alone; the checksums are everybody's once it has ended.
  std::shared_ptr<Buffer> filling_;
  std::deque<std::shared_ptr<Buffer>> filled_;
  uint64_t position_;             // in the file, of what is placed next
  RunningCrc32 chunk_, segment_;  // those under way
  std::vector<uint32_t> chunk_crcs_, segment_crcs_;
  cuda::Copiers copiers_;
};

}  // namespace tensorferry
