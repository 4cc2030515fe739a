#include "transfer/reservation.h"

#include <algorithm>

namespace tensorferry {
namespace {

// Ranges up to this size are not reserved, because the reservation's two system calls would cost more than it saves.
// For buffered writes nothing is reserved, because the kernel itself reserves their space.
constexpr uint64_t max_unreserved_nbytes = uint64_t{64} << 10;

}  // namespace

std::vector<Range> joined(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  size_t count = 0;
  for (const Range& range : ranges) {
    if (count > 0 && range.begin <= ranges[count - 1].end) {
      ranges[count - 1].end = std::max(ranges[count - 1].end, range.end);
    } else {
      ranges[count++] = range;
    }
  }
  ranges.resize(count);
  return ranges;
}

std::optional<Fault> reserve(File& file, std::vector<Range> pieces) {
  for (const Range& run : joined(std::move(pieces))) {
    const uint64_t nbytes = run.end - run.begin;
    auto fault = nbytes > 0 ? file.check_end(run.end) : std::nullopt;
    if (fault) {
      fault->offset = run.begin;
    } else if (file.direct() && nbytes > max_unreserved_nbytes) {
      fault = file.preallocate(run.begin, nbytes);
    }
    if (!fault) continue;
    fault->expected = nbytes;
    return fault;
  }
  return std::nullopt;
}

}  // namespace tensorferry
