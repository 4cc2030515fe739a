#include "transfer/write_order.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "base/after_fork.h"

namespace tensorferry {
namespace {

// The writes of one file: those in flight, which do not overlap, and the waiting ones in the order of submission. When
// a write ends, the waiting ones begin in order, up to the first that overlaps a write in flight. The writes behind
// that one wait, too, even if they overlap no write. It would be possible to let these begin, but writes wait too
// rarely for that to matter.
struct FileLine {
  std::map<uint64_t, std::shared_ptr<OrderedWrite>> under_way;  // by their begin
  std::deque<std::shared_ptr<OrderedWrite>> waiting;

  bool is_free(uint64_t begin, uint64_t end) const {
    auto after = under_way.lower_bound(begin);
    if (after != under_way.end() && after->first < end) return false;
    return after == under_way.begin() || std::prev(after)->second->end() <= begin;
  }

  bool may_begin(uint64_t begin, uint64_t end) const { return waiting.empty() && is_free(begin, end); }
};

struct Lines {
  std::mutex mutex;
  std::map<FileIdentity, FileLine> by_file;
};

Lines& lines() { return of_this_process<Lines>(); }

bool is_empty(const OrderedWrite& write) { return write.begin() == write.end(); }

}  // namespace

std::vector<bool> WriteOrder::enter(const Writes& writes, Writes& in_the_way) {
  std::vector<bool> may_begin(writes.size(), true);
  Lines& all = lines();
  std::lock_guard lock(all.mutex);
  for (size_t index = 0; index < writes.size(); ++index) {
    const auto& write = writes[index];
    if (is_empty(*write)) continue;
    FileLine& line = all.by_file[write->identity()];
    may_begin[index] = line.may_begin(write->begin(), write->end());
    if (may_begin[index]) {
      line.under_way.emplace(write->begin(), write);
      continue;
    }
    if (line.waiting.empty()) {  // otherwise they have been told
      for (const auto& [begin, other] : line.under_way) in_the_way.push_back(other);
    }
    line.waiting.push_back(write);
  }
  return may_begin;
}

bool WriteOrder::try_to_enter(const Writes& writes) {
  Lines& all = lines();
  std::lock_guard lock(all.mutex);
  const auto line = all.by_file.find(writes.front()->identity());
  for (const auto& write : writes) {
    if (line == all.by_file.end() || is_empty(*write)) continue;
    if (!line->second.may_begin(write->begin(), write->end())) return false;
  }
  for (const auto& write : writes) {
    if (!is_empty(*write)) all.by_file[write->identity()].under_way.emplace(write->begin(), write);
  }
  return true;
}

bool WriteOrder::extend(OrderedWrite& write, uint64_t end) {
  Lines& all = lines();
  std::lock_guard lock(all.mutex);
  if (!all.by_file[write.identity()].may_begin(write.end(), end)) return false;
  write.end_ = end;
  return true;
}

void WriteOrder::leave(const OrderedWrite& write) {
  if (is_empty(write)) return;
  Writes next;
  bool others_wait;
  {
    Lines& all = lines();
    std::lock_guard lock(all.mutex);
    auto found = all.by_file.find(write.identity());
    FileLine& line = found->second;
    const auto own = line.under_way.find(write.begin());
    if (own != line.under_way.end() && own->second.get() == &write) {
      line.under_way.erase(own);
    } else {
      line.waiting.erase(std::ranges::find(line.waiting, &write, &std::shared_ptr<OrderedWrite>::get));
    }
    while (!line.waiting.empty() && line.is_free(line.waiting.front()->begin(), line.waiting.front()->end())) {
      next.push_back(std::move(line.waiting.front()));
      line.waiting.pop_front();
      line.under_way.emplace(next.back()->begin(), next.back());
    }
    others_wait = !line.waiting.empty();
    if (line.under_way.empty()) all.by_file.erase(found);
  }
  // This puts transfers in line, or settles files. It happens after the lock is released, because it takes other locks.
  for (const auto& one : next) {
    one->turn_has_come();
    if (others_wait) one->others_wait();
  }
}

}  // namespace tensorferry
