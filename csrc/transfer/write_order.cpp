#include "transfer/write_order.h"

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "memory/after_fork.h"

namespace tensorferry {
namespace {

// The writes of one file: those under way, which do not overlap, and those behind them in order. Only the first in
// line is looked at; overlapping writes are too rare for more.
struct Line {
  std::map<uint64_t, uint64_t> under_way;  // begin -> end
  std::deque<std::shared_ptr<OrderedWrite>> waiting;

  bool is_free(const OrderedWrite& write) const {
    auto after = under_way.lower_bound(write.begin());
    if (after != under_way.end() && after->first < write.end()) return false;
    return after == under_way.begin() || std::prev(after)->second <= write.begin();
  }
};

struct Lines {
  std::mutex mutex;
  std::map<FileIdentity, Line> by_file;
};

Lines& lines() {
  static auto* instance = new ForkSafe<Lines>;
  return instance->get();
}

bool is_empty(const OrderedWrite& write) { return write.begin() == write.end(); }

}  // namespace

bool WriteOrder::enter(const std::shared_ptr<OrderedWrite>& write, bool may_wait) {
  if (is_empty(*write)) return true;
  Lines& all = lines();
  std::lock_guard lock(all.mutex);
  Line& line = all.by_file[write->identity()];
  if (line.waiting.empty() && line.is_free(*write)) {
    line.under_way.emplace(write->begin(), write->end());
    return true;
  }
  if (may_wait) line.waiting.push_back(write);
  return false;
}

void WriteOrder::leave(const OrderedWrite& write) {
  if (is_empty(write)) return;
  std::vector<std::shared_ptr<OrderedWrite>> next;
  {
    Lines& all = lines();
    std::lock_guard lock(all.mutex);
    auto found = all.by_file.find(write.identity());
    Line& line = found->second;
    line.under_way.erase(write.begin());
    while (!line.waiting.empty() && line.is_free(*line.waiting.front())) {
      line.under_way.emplace(line.waiting.front()->begin(), line.waiting.front()->end());
      next.push_back(std::move(line.waiting.front()));
      line.waiting.pop_front();
    }
    if (line.under_way.empty()) all.by_file.erase(found);
  }
  for (const auto& one : next) one->turn_has_come();
}

}  // namespace tensorferry
