// Writes that overlap are done one after the other, in the order of submission.
//
// It is not only a courtesy. The ragged edge of one write goes through the page cache, the body of another past it;
// were both under way on one page, the kernel could write back an old copy of the rest of that page over what the
// body had stored, and bytes that only one of them covers would be lost. Writes that do not overlap never share a
// page in this way (see plan.h) and are not held up. The order holds for the process: all handles, files and threads.
#pragma once

#include <cstdint>
#include <memory>

namespace tensorferry {

class Scheduler;
class Transfer;

class WriteOrder {
 public:
  // Whether the write may begin now. If not, and a scheduler is given, that will be asked to begin it when it may.
  static bool enter(const std::shared_ptr<Transfer>& transfer, const std::shared_ptr<Scheduler>& scheduler);

  // For each write that entered, when it has ended.
  static void leave(const Transfer& transfer);
};

}  // namespace tensorferry
