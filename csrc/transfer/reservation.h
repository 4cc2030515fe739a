// Space for what is going to be written, so that the drive's being full is found before anything is.
//
// Where a file grows, the kernel waits for the writes to it that are under way (ext4, XFS); so all pieces of a call are
// reserved at once, in as few steps as there are gaps between them. Nothing is reserved ahead of what was asked for:
// taking it back could cut off what another process has written there meanwhile.
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

// The ranges in order, those that touch joined.
std::vector<Range> joined(std::vector<Range> ranges);

std::optional<Fault> reserve(File& file, std::vector<Range> pieces);

}  // namespace tensorferry
