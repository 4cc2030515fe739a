// Writes that overlap are done one after the other, in the order of submission.
//
// It is not only a courtesy. The ragged edge of one write goes through the page cache, the body of another past it;
// were both under way on one page, the kernel could write back an old copy of the rest of that page over what the
// body had stored, and bytes that only one of them covers would be lost. Writes that do not overlap never share a
// page in this way (see plan.h) and are not held up. Cutting a file writes to all that is behind its new end: a write
// there that was submitted later must not be cut off. The order holds for the process: all handles, files and threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "file/file.h"

namespace tensorferry {

// What changes [begin, end) of a file when its turn has come.
class OrderedWrite {
 public:
  OrderedWrite(const FileIdentity& identity, uint64_t begin, uint64_t end)
      : identity_(identity), begin_(begin), end_(end) {}

  const FileIdentity& identity() const { return identity_; }
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

  // Called once if enter() said that it has to wait, by the thread that ended the one before.
  virtual void turn_has_come() = 0;

 protected:
  ~OrderedWrite() = default;

 private:
  const FileIdentity identity_;
  const uint64_t begin_;
  const uint64_t end_;
};

class WriteOrder {
 public:
  using Writes = std::vector<std::shared_ptr<OrderedWrite>>;

  // In this order, with nobody in between. Whether each may begin now: for the others turn_has_come() will be called
  // when they may.
  static std::vector<bool> enter(const Writes& writes);

  // All of them, or none; they are of one file, and do not overlap.
  static bool try_to_enter(const Writes& writes);

  // For each that has begun, when it has ended.
  static void leave(const OrderedWrite& write);
};

}  // namespace tensorferry
