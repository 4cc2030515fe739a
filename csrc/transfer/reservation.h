// Reserves space for writes, so a full disk is detected before anything is written.
//
// When a file grows, the kernel waits for the writes to it that are in flight (ext4, XFS). All pieces of a call are
// therefore reserved before the first one is written, and adjacent pieces are reserved together. Nothing is reserved
// beyond the request, because releasing the excess could cut off data that another process has written there meanwhile.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/fault.h"
#include "file/file.h"

namespace tensorferry {

struct Range {
  uint64_t begin;
  uint64_t end;
};

// Sort the ranges and join those that touch.
std::vector<Range> joined(std::vector<Range> ranges);

// Reserve file space for the ranges `pieces`, in ascending order. Returns the fault of the first one for which there is
// no space or which exceeds the file size limit. Buffered files and short ranges need no reservation; for these, only
// the limit is checked.
std::optional<Fault> reserve(File& file, std::vector<Range> pieces);

}  // namespace tensorferry
