// From the items of one call to transfers: space is reserved for all of them at once, small neighbours are joined, and
// what is wrong with one of them refuses that one.
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

// Where memory of a GPU is used: the device's number, and the stream whose work so far comes before.
using Location = std::pair<int, uintptr_t>;

struct Memory {
  uintptr_t address = 0;  // 0: a gap, or without bytes
  uint64_t nbytes = 0;
  std::optional<Location> location = {};  // of a GPU's
};

// Memory to or from a range of a file.
struct Item {
  std::shared_ptr<File> file;
  File::Lease lease;
  Memory memory;
  uint64_t offset = 0;
  size_t position = 0;                                  // in the call
  const std::vector<Memory>* segments = nullptr;        // in the memory's place, with as many bytes
  const std::vector<Segments::Copy>* copies = nullptr;  // of segments that are rows of a table: there may be none
  std::shared_ptr<Checksums> checksums = nullptr;
  std::shared_ptr<Lane> lane = nullptr;
};

// Gates of one call: one for each location that comes.
class Gates {
 public:
  // Null for host memory.
  Result<std::shared_ptr<cuda::Gate>> of(const std::optional<Location>& location);

 private:
  std::vector<std::pair<Location, std::shared_ptr<cuda::Gate>>> made_;
};

// Finds the items' lanes; returns what there is to be admitted.
std::vector<Scheduler::Places> find_lanes(std::vector<Item>& items, Scheduler& scheduler);

struct Prepared {
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::vector<std::pair<size_t, Fault>> refused;  // by position
  // One that is no single item's, or goes away with time (too many descriptors): it refuses all of them.
  std::optional<Fault> fault;
};

// Uses up the items' leases. Blocks.
Prepared prepare(std::vector<Item>& items, Scheduler& scheduler, const std::shared_ptr<Request>& request);

// One past the last of the items from `index` on that are moved as one: small neighbours in host memory of one file.
size_t end_of_neighbours(const std::vector<Item>& items, size_t index, bool write);

}  // namespace tensorferry
