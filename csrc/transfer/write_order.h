// Overlapping writes run one after the other, in the order of submission.
//
// Without this order data could be lost. The ragged edge of a write goes through the page cache, and the body of a
// write past it (plan.h). If the edge of one write and the body of an overlapping one were in flight on the same page,
// the kernel could write back the page with the edge's bytes and old bytes around them, over what the body has stored
// there. Writes that do not overlap never share a page in this way, so they do not wait. Truncating a file counts as a
// write to everything behind its new end: a truncation that ran late would cut off what a later write has stored there.
// The order holds within the process, across all handles, files and threads.
//
// A stream enters the bytes that it has accepted, long before it writes them. Whatever has its turn must end without
// waiting for a caller, so a stream is told when others wait: then it also writes what does not fill a buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "file/file.h"

namespace tensorferry {

// An operation that changes [begin, end) of a file once its turn has come.
class OrderedWrite {
 public:
  OrderedWrite(const FileIdentity& identity, uint64_t begin, uint64_t end)
      : identity_(identity), begin_(begin), end_(end) {}

  const FileIdentity& identity() const { return identity_; }
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

  // The operation may begin now. Called once if enter() returned false for it, by the thread that ended the operation
  // for which it had to wait.
  virtual void turn_has_come() = 0;

  // Other operations wait, maybe for this one, which has its turn.
  virtual void others_wait() {}

 protected:
  ~OrderedWrite() = default;

 private:
  friend class WriteOrder;
  const FileIdentity identity_;
  const uint64_t begin_;
  uint64_t end_;  // only extend() changes it
};

class WriteOrder {
 public:
  using Writes = std::vector<std::shared_ptr<OrderedWrite>>;

  // Enter the writes atomically and in this order. Returns for each of them whether it may begin now. If not, its
  // turn_has_come() is called later. The caller must then, holding no lock, call others_wait() of those that are added
  // to `in_the_way`.
  static std::vector<bool> enter(const Writes& writes, Writes& in_the_way);

  // Enter the writes if all of them may begin now, and return whether they may; otherwise enter none. They must belong
  // to one file and not overlap.
  static bool try_to_enter(const Writes& writes);

  // Move the end of a write that has its turn. Returns false if the bytes in between would have to wait.
  static bool extend(OrderedWrite& write, uint64_t end);

  // Record that a write has ended, or will not begin.
  static void leave(const OrderedWrite& write);
};

}  // namespace tensorferry
