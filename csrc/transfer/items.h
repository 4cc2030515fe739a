// Turns the items of one call into transfers. An item is a piece of memory and the range of a file that it is moved
// from or to. File space is reserved for all items of the call at once, and small items that are neighbours in a file
// are joined to one transfer. An error that concerns one item refuses that item alone. A lane has the queue and the
// threads for the files of one device (lane.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "device/gpu.h"
#include "file/file.h"
#include "transfer/checksums.h"
#include "transfer/request.h"
#include "transfer/scheduler.h"
#include "transfer/transfer.h"

namespace tensorferry {

// Where GPU memory is used: the device's ordinal and a stream. The transfer waits for the work that is queued on the
// stream when the call is made.
using Location = std::pair<int, uintptr_t>;

struct Memory {
  uintptr_t address = 0;  // 0: no memory; a gap, or an empty piece
  uint64_t nbytes = 0;
  std::optional<Location> location = {};  // empty: host memory
};

struct Item {
  std::shared_ptr<File> file;
  File::Lease lease;
  Memory memory;
  uint64_t offset = 0;
  size_t position = 0;                            // in the call
  const std::vector<Memory>* segments = nullptr;  // replace `memory`, with the same total size
  // Set if `segments` are rows of a table, even if it is empty: the further places to which rows are copied after they
  // are read.
  const std::vector<Segments::Copy>* copies = nullptr;
  std::shared_ptr<Checksums> checksums = nullptr;
  std::shared_ptr<Lane> lane = nullptr;  // of the file's device; set by find_lanes()
};

// The gates of one call, one for each location. A gate is the point in a stream's work from which the transfer may use
// GPU memory (device/gpu.h).
class Gates {
 public:
  // The gate of a location, created at first use. Null for host memory.
  Result<std::shared_ptr<cuda::Gate>> of(const std::optional<Location>& location);

 private:
  std::vector<std::pair<Location, std::shared_ptr<cuda::Gate>>> made_;
};

// Set the items' lanes. Returns the number of items in each lane, which the scheduler must admit (Scheduler::admit).
std::vector<Scheduler::Places> find_lanes(std::vector<Item>& items, Scheduler& scheduler);

struct Prepared {
  std::vector<std::shared_ptr<Transfer>> transfers;
  // The items that get no transfer: their positions in the call, and why.
  std::vector<std::pair<size_t, Fault>> refused;
  std::vector<std::shared_ptr<File>> incomplete;  // the files of these items
  // A fault that refuses the whole call, because it concerns all items (no CUDA driver) or is temporary (too many open
  // descriptors, an interruption by a signal). Then there are no transfers and no refused items, and the items may be
  // prepared again.
  std::optional<Fault> fault;
};

// Create the transfers of the items. This moves the leases out of the items, and may block.
Prepared prepare(std::vector<Item>& items, Scheduler& scheduler, const std::shared_ptr<Request>& request);

// Find the items from `index` on that are joined to one transfer: small pieces of host memory that are neighbours in
// one file. Returns the index after the last of them, or `index` itself if that item is not small.
size_t end_of_neighbours(const std::vector<Item>& items, size_t index, bool write);

}  // namespace tensorferry
