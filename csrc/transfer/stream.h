// A file that is written in order, from memory that is appended bit by bit, with bounded memory in flight.
//
// Each appended piece of memory is a segment. Segments are copied into buffers, one after the other; once a segment is
// copied, the stream no longer needs its memory. Full buffers are written while the next ones are filled. CRC-32s of
// segments, and of chunks (parts of the file that have equal lengths), are computed during the copy. Since bytes are
// copied in order, a segment may contain the CRC-32s of earlier segments (Made), as the headers and directories of
// archives do.
//
// Appended bytes have their place in the order of writes (write_order.h) once begin_job() or end() has returned, and so
// has the truncation at the end: a later write to the same bytes overwrites them. It waits until they are written, and
// so does a truncation, whether or not they fill a buffer.
//
// A stream has no thread. Whenever there is something to do (memory was appended, a buffer was written, a copy from a
// GPU has completed), a job is posted to a helper thread of the lane, which has the queue and the threads for files of
// one device (lane.h). A stream has one job at a time, and the job does not wait for writes. Jobs of streams have
// separate threads in the lane, so the copying does not wait behind the closing and syncing of files.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/after_fork.h"
#include "checksum/checksum.h"
#include "device/gpu.h"
#include "file/file.h"
#include "memory/allocation.h"
#include "transfer/request.h"
#include "transfer/scheduler.h"
#include "transfer/write_order.h"

namespace tensorferry {

struct StreamOptions {
  uint64_t offset = 0;        // of the first byte, in the file
  uint64_t chunk_nbytes = 0;  // length of a chunk for CRC-32s; 0: none
  bool of_segments = false;   // compute CRC-32s of segments as well
  bool background = false;    // requests that are not in the background go first
  // The maximum number of bytes that will be appended, if it is known. Short streams use short buffers.
  uint64_t expected_nbytes = UINT64_MAX;
};

// A segment that contains checksums of other bytes. Its fields, the places for these checksums, are filled in once all
// earlier segments have been copied.
struct Made {
  struct Field {
    enum class Kind : uint8_t {
      segment,  // CRC-32 of an earlier segment, 32 bits, little-endian
      own,      // CRC-32 of [begin, begin + nbytes) of these bytes, with the earlier fields filled in
      folded,   // 20 decimal digits: many CRC-32s combined to one number of 64 bits by `fold`
    };
    Kind kind;
    uint64_t position;     // of the field, in `bytes`
    uint64_t segment = 0;  // for `segment`: its index
    uint64_t begin = 0;    // for `own`: this and nbytes are the range in `bytes`
    uint64_t nbytes = 0;
    // For `folded`: CRC-32s; a negative value stands for that of the segment with the index ~value.
    std::vector<int64_t> crcs = {};
    // The number begins as 0. For each crc in turn: number ^= crc + added + (number << left) + (number >> right).
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
  // A stream has many short buffers rather than few long ones: a drive completes buffers that it received together at
  // about the same time, and is idle until the next ones are filled. With 36 buffers of 1 MiB a stream is 1.2 times as
  // fast as with 9 of 4 MiB, and with 56 another 1.1 times as fast.
  static constexpr uint64_t max_buffer_nbytes = uint64_t{1} << 20;
  static constexpr uint64_t min_buffer_nbytes = uint64_t{64} << 10;

  // The limit of buffers of the maximum size, for all streams of the process to one device together. Each stream gets
  // at least one, whatever the limit.
  static constexpr size_t max_buffers = 56;
  // While all other buffers of a stream are being written, this many are left to be filled, so the next writes can
  // begin without a pause.
  static constexpr size_t spare_buffers = 4;

  // The memory of a buffer: a part of an allocation.
  struct Memory {
    std::shared_ptr<Allocation> allocation;  // null: out of memory
    char* data = nullptr;
  };

  Stream(std::shared_ptr<Scheduler> scheduler, std::shared_ptr<File> file, const StreamOptions& options);
  ~Stream();

  // One place in the stream's lane, for Scheduler::admit(). Before each begin_job() and each end() the caller must have
  // this place admitted, so the scheduler cannot be closed in between. These calls take the place over and release it.
  std::vector<Scheduler::Places> place() const { return {{lane_, 1}}; }

  // Append memory as the next segment; with a `gate`, it is GPU memory. The memory must stay unchanged until
  // copied_segments() is greater than the segment's index, which counts the append() calls from 0 on. The caller must
  // have admitted a place(), and must call begin_job() afterwards. Returns false if has_ended(). If the stream has a
  // fault, append() ignores the memory and returns true: the caller finds the fault by fault().
  bool append(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate = nullptr);
  // Append `made` as the next segment. Returns false if has_ended(), or if one of the fields does not fit into the
  // bytes or refers to a segment that is not an earlier one.
  bool append(Made made);

  // Whether end() or abort() was called, possibly by another thread.
  bool has_ended() const;

  // Must succeed before GPU memory is appended.
  std::optional<Fault> prepare_for_gpus() { return scheduler_->prepare_for_gpus(); }

  // Start a job that copies the appended memory, if there is enough of it to be worth waking a thread; with `now`,
  // start the job in any case. Takes over the place() that the caller has admitted, and releases it.
  void begin_job(bool now = false);

  // End the stream: nothing more will be appended. The rest is written by a last request, which also truncates, syncs
  // and closes the file as far as `options` ask for it. Takes over an admitted place(), like begin_job(). Returns false
  // if the stream had ended before.
  bool end(const RequestOptions& options);

  // Wait until at most `nbytes` of the appended bytes are still to be copied, and not too many segments; or until the
  // stream has a fault or was aborted. Returns false on timeout.
  bool wait_until_uncopied_is(uint64_t nbytes, std::chrono::milliseconds timeout);
  // Wait until everything has been written, or the stream has a fault or was aborted, and until no buffer is being
  // written and no job is running. Returns false on timeout.
  bool wait_until_ended(std::chrono::milliseconds timeout);

  // Stop copying, and wait until no appended memory is being read. The caller may then free all appended memory.
  // Returns false on timeout. This does not wait for buffers that are being written, because they have their own
  // memory.
  bool abort(std::chrono::milliseconds timeout);

  // After an abort() that timed out: pass `id` to Scheduler::let_go() as soon as no appended memory is being read.
  void tell_when_aborted(uint64_t id);

  std::optional<Fault> fault() const;
  uint64_t segment_count() const;
  uint64_t copied_segments() const;  // how many segments, from the first one on, have been copied completely
  uint64_t nbytes() const;           // the bytes appended so far
  // The CRC-32s of all chunks and of all segments. Empty until everything has been written.
  std::optional<std::vector<uint32_t>> chunk_crcs() const { return complete(chunk_crcs_); }
  std::optional<std::vector<uint32_t>> segment_crcs() const { return complete(segment_crcs_); }
  uint64_t fork_generation() const { return fork_generation_; }

 private:
  std::optional<std::vector<uint32_t>> complete(const std::vector<uint32_t>& crcs) const {
    const auto lock = locked();
    return ended_ ? std::optional(crcs) : std::nullopt;
  }

  std::unique_lock<std::mutex> locked() const { return locked_unless_forked(mutex_, fork_generation_); }

  // A segment that is not yet placed in buffers, or only in part.
  struct Source {
    char* memory = nullptr;  // null: the bytes are in `made`
    uint64_t nbytes = 0;
    std::shared_ptr<cuda::Gate> gate = nullptr;  // null: host memory
    std::shared_ptr<Made> made = nullptr;
    uint64_t placed_nbytes = 0;  // bytes that have a place in a buffer
  };

  // The part of a segment that is placed in one buffer.
  struct Part {
    uint64_t begin;  // in the buffer
    uint64_t nbytes;
    const char* memory = nullptr;  // null: the bytes are in GPU memory or in `made`
    std::shared_ptr<Made> made = nullptr;
    uint64_t made_begin = 0;  // where the part begins, in the bytes of `made`
    bool of_gpu = false;
    bool ends_segment = false;
  };

  struct Buffer {
    ~Buffer();

    Memory memory;
    bool of_stock = false;  // whether the memory must be returned to the stock of buffers (stream.cpp)
    uint64_t device = 0;    // for which it was taken from the stock
    // The bytes of the buffer that are in use. `begin` equals the file offset modulo the buffer's size, so a byte's
    // address and its file offset have the same alignment.
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t offset = 0;     // file offset of the byte at `begin`
    std::deque<Part> parts;  // not yet copied, or not yet included in the CRC-32s
    size_t open_copies = 0;  // watched copies from GPUs that have not completed; guarded by mutex_
    // For each GPU, the event behind the last copy that was queued, until watch_copies() passes it to the watcher.
    std::map<cuda::Gpu*, cuda::Event> copies = {};
  };

  // A range of appended bytes in the order of writes, or all bytes behind the end, where the file is truncated.
  class Place;

  // Enter what was appended, and the truncation, in the order of writes. Returns whether the last of it must wait; it
  // then takes over an admitted place(). Requires mutex_.
  bool enter_order(WriteOrder::Writes& in_the_way);
  void turn_has_come(Place& place);
  void others_wait();
  // Leave the order with what has been written, or with everything if the stream has stopped and writes no more.
  void leave_order();

  // run() is the job. It repeats the steps below until none of them has anything to do, which they report by
  // returning false.
  void run();
  bool place_sources();   // give segments their places in buffers, and begin the copies from GPUs
  bool copy();            // copy placed parts, and write a full buffer
  bool write_early();     // write a part of a buffer, because others wait
  bool write_the_rest();  // after end(): write the last buffer

  bool take_buffer();
  bool start_copy(Source& source, uint64_t nbytes);
  void watch_copies();
  void copy_and_sum(Buffer& buffer);
  void sum(const char* bytes, uint64_t nbytes);  // include bytes in the CRC-32s
  void fill_in(Made& made) const;
  // write() passes a buffer to the drive, by hand_over(), which submits a transfer; written() is called at its end.
  void write(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last);
  void hand_over(std::shared_ptr<Buffer> buffer, const RequestOptions& options, bool last);
  void written(std::shared_ptr<Buffer> buffer, const std::optional<Fault>& fault, bool last);
  void fail(Fault fault);
  void wake();                                                      // post a job, unless there is one
  bool stopped() const { return stopping_ || fault_.has_value(); }  // requires mutex_
  // Whether a job or a copy from a GPU may be reading appended memory now. Requires mutex_.
  bool is_copying() const { return (at_work_ && !handing_over_) || open_copies_ > 0; }
  // Wake waiting threads. If no appended memory is being read, pass the id of tell_when_aborted(), if there is one, to
  // Scheduler::let_go(). Unlocks `lock`, which holds mutex_.
  void news(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Scheduler> scheduler_;
  const std::shared_ptr<File> file_;
  const std::shared_ptr<Lane> lane_;
  const StreamOptions options_;
  const uint64_t fork_generation_ = tensorferry::fork_generation();
  const uint64_t buffer_nbytes_;  // a power of two

  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Source> sources_;
  uint64_t segment_count_ = 0;
  uint64_t appended_nbytes_ = 0;
  uint64_t uncopied_nbytes_ = 0;
  uint64_t copied_segments_ = 0;
  bool running_ = false;                  // a job is posted or at work
  bool at_work_ = false;                  // a job is at work
  bool again_ = false;                    // the job must look for something to do once more before it ends
  bool handing_over_ = false;             // the job is in hand_over(), where it does not read appended memory
  bool closed_ = false;                   // after end() or abort(): nothing more is accepted
  bool stopping_ = false;                 // after abort()
  bool ended_ = false;                    // everything has been written
  std::optional<RequestOptions> ending_;  // the options of end(), until the last buffer is written
  std::optional<uint64_t> to_be_told_;    // the id of tell_when_aborted()
  std::set<uint64_t> in_flight_;          // the file offsets of buffers that are being written
  size_t open_copies_ = 0;                // watched copies from GPUs that have not completed
  bool gate_watched_ = false;             // the watcher waits for the gate of the first source
  size_t buffer_count_ = 0;               // buffers in use
  std::optional<Fault> fault_;
  std::deque<std::shared_ptr<Place>> places_;  // of bytes that are not yet written
  std::shared_ptr<Place> cut_;                 // of the truncation, until the last request has it
  uint64_t entered_end_;                       // the file offset of the first byte that has not entered the order
  uint64_t turn_end_;                          // of the first that must not be written yet
  uint64_t early_end_ = 0;                     // others wait for bytes before this file offset
  uint64_t handed_over_end_;                   // the end of the last buffer that was passed to the drive

  // Used by the job only. Other threads may read the CRC-32s once ended_ is set.
  std::shared_ptr<Buffer> filling_;
  std::deque<std::shared_ptr<Buffer>> filled_;
  uint64_t position_;             // file offset of the next byte to be placed
  RunningCrc32 chunk_, segment_;  // of the bytes so far of the present chunk and segment
  std::vector<uint32_t> chunk_crcs_, segment_crcs_;
  cuda::Copiers copiers_;
};

}  // namespace tensorferry
