#include "transfer/items.h"

#include <errno.h>

#include <algorithm>
#include <map>

#include "transfer/plan.h"
#include "transfer/reservation.h"

namespace tensorferry {
namespace {

// Gaps up to this size between joined items are read together with them, because a separate read of each item would
// take the drive longer.
constexpr uint64_t max_joined_gap_nbytes = uint64_t{16} << 10;

// From this number of items of one file on, one look-up for the whole file (File::snapshot) costs less than one for
// each item.
constexpr size_t snapshot_items = 5;

using Made = Result<std::shared_ptr<Transfer>>;

char* address_of(const Memory& memory) { return reinterpret_cast<char*>(memory.address); }

// Reserve file space for all items. Returns the files that have not enough space, with their faults.
std::map<const File*, Fault> reserve_all(const std::vector<Item>& items) {
  std::map<File*, std::vector<Range>> pieces;
  for (const Item& item : items) {
    pieces[item.file.get()].push_back({item.offset, item.offset + item.memory.nbytes});
  }
  std::map<const File*, Fault> full;
  for (auto& [file, ranges] : pieces) {
    if (auto fault = reserve(*file, std::move(ranges))) full.emplace(file, std::move(*fault));
  }
  return full;
}

Result<Segments> segments_of(const Item& item, Gates& gates) {
  Segments segments;
  const size_t count = item.segments ? item.segments->size() : 1;
  segments.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    const Memory& memory = item.segments ? (*item.segments)[index] : item.memory;
    auto gate = gates.of(memory.location);
    if (!gate) return gate.fault();
    segments.add(address_of(memory), memory.nbytes, std::move(*gate));
  }
  if (item.copies) segments.are_rows(*item.copies);
  return segments;
}

// State that the transfers of one call share.
struct Call {
  Scheduler& scheduler;
  const std::shared_ptr<Request>& request;
  Gates gates = {};
  std::optional<File::Snapshot> snapshot = {};  // of the current file

  Made create(TransferSpec spec, size_t position) const {
    const uint64_t block_nbytes = scheduler.block_nbytes_for(spec.memory.nbytes());
    return Transfer::create(std::move(spec), request, position, block_nbytes, snapshot ? &*snapshot : nullptr);
  }

  Made one(Item& item) {
    auto memory = segments_of(item, gates);
    std::optional<Fault> fault = memory ? std::nullopt : std::optional(memory.fault());
    if (!fault && !(*memory).gates().empty()) fault = scheduler.prepare_for_gpus();
    if (fault) {
      fault->path = item.file->path();
      fault->offset = item.offset;
      fault->expected = item.memory.nbytes;
      return *fault;
    }
    TransferSpec spec{item.file, std::move(*memory), item.offset, request->options().write};
    spec.lease = std::move(item.lease);
    spec.lane = item.lane;
    spec.checksums = item.checksums;
    spec.use_cufile = scheduler.options().engine == "cufile";
    return create(std::move(spec), item.position);
  }

  Made joined(const std::vector<Item>& items, size_t begin, size_t end) const {
    const Item& first = items[begin];
    TransferSpec spec{first.file, {}, first.offset, request->options().write};
    spec.lease = first.file->lease();
    spec.lane = first.lane;
    for (size_t index = begin; index < end; ++index) {
      const Item& item = items[index];
      if (const uint64_t at = first.offset + spec.memory.nbytes(); at < item.offset) {
        spec.memory.add_gap(item.offset - at);
        spec.positions.push_back(gap_position);
      }
      spec.memory.add(address_of(item.memory), item.memory.nbytes);
      spec.positions.push_back(item.position);
    }
    const size_t position = *std::min_element(spec.positions.begin(), spec.positions.end());
    return create(std::move(spec), position);
  }
};

}  // namespace

Result<std::shared_ptr<cuda::Gate>> Gates::of(const std::optional<Location>& location) {
  if (!location) return std::shared_ptr<cuda::Gate>();
  for (const auto& [known, gate] : made_) {
    if (known == *location) return gate;
  }
  auto gate = cuda::Gate::after(location->first, reinterpret_cast<cuda::StreamHandle>(location->second));
  if (gate) made_.emplace_back(*location, *gate);
  return gate;
}

size_t end_of_neighbours(const std::vector<Item>& items, size_t index, bool write) {
  const auto joins = [](const Item& item) {
    return item.memory.address != 0 && item.memory.nbytes > 0 && item.memory.nbytes < Plan::min_straight_nbytes &&
           !item.memory.location && !item.segments && !item.checksums;
  };
  const uint64_t gap_nbytes = write ? 0 : max_joined_gap_nbytes;
  uint64_t at = items[index].offset;
  size_t end = index;
  for (; end < items.size() && joins(items[end]) && items[end].file == items[index].file; ++end) {
    const Item& item = items[end];
    if (item.offset < at || item.offset - at > (end > index ? gap_nbytes : 0)) break;
    at = item.offset + item.memory.nbytes;
  }
  return end;
}

std::vector<Scheduler::Places> find_lanes(std::vector<Item>& items, Scheduler& scheduler) {
  std::vector<Scheduler::Places> places;
  const Item* before = nullptr;
  for (Item& item : items) {
    const bool same = before && item.file->device() == before->file->device();
    item.lane = same ? before->lane : scheduler.lane_of(item.file->device());
    auto own = std::ranges::find(places, item.lane, &Scheduler::Places::lane);
    if (own == places.end()) own = places.insert(own, {item.lane, 0});
    ++own->count;
    before = &item;
  }
  return places;
}

Prepared prepare(std::vector<Item>& items, Scheduler& scheduler, const std::shared_ptr<Request>& request) {
  const bool write = request->options().write;
  Prepared prepared;
  prepared.transfers.reserve(items.size());
  const auto full = write ? reserve_all(items) : std::map<const File*, Fault>();
  for (const auto& [file, fault] : full) {
    if (fault.error_number == EINTR) prepared.fault = fault;
  }
  Call call{scheduler, request};
  const File* seen = nullptr;
  size_t next;
  for (size_t index = 0; index < items.size() && !prepared.fault; index = next) {
    Item& item = items[index];
    next = index + 1;
    if (item.file.get() != std::exchange(seen, item.file.get())) {
      call.snapshot.reset();
      const size_t last = std::min(index + snapshot_items, items.size()) - 1;
      if (!write && last > index && items[last].file == item.file) {
        auto taken = item.file->snapshot();
        if (taken) call.snapshot = *taken;  // after a failure, the look-up of each item reports its own fault
      }
    }
    if (auto found = full.find(seen); found != full.end()) {
      prepared.incomplete.push_back(item.file);
      prepared.refused.emplace_back(item.position, found->second);
      continue;
    }
    if (const size_t end = end_of_neighbours(items, index, write); end > next) {
      if (auto transfer = call.joined(items, index, end)) {
        prepared.transfers.push_back(std::move(*transfer));
        next = end;
        continue;
      }  // after a failure, each item gets a separate transfer or reports its own fault
    }
    auto transfer = call.one(item);
    if (transfer) {
      prepared.transfers.push_back(std::move(*transfer));
      continue;
    }
    for (const int of_all : {EMFILE, ENFILE, ENODEV, EINTR}) {
      if (transfer.fault().error_number == of_all) prepared.fault = transfer.fault();
    }
    if (prepared.fault) break;  // the caller may prepare the items again
    prepared.incomplete.push_back(item.file);
    prepared.refused.emplace_back(item.position, std::move(transfer.fault()));
  }
  if (prepared.fault) return {.fault = prepared.fault};
  return prepared;
}

}  // namespace tensorferry
