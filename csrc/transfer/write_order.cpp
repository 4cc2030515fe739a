#include "transfer/write_order.h"

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "memory/after_fork.h"
#include "transfer/scheduler.h"
#include "transfer/transfer.h"

namespace tensorferry {
namespace {

struct Waiting {
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<Scheduler> scheduler;
};

// The writes of one file: those under way, which do not overlap, and those behind them in order. Only the first in
// line is looked at; overlapping writes are too rare for more.
struct Line {
  std::map<uint64_t, uint64_t> under_way;  // begin -> end
  std::deque<Waiting> waiting;

  bool is_free(uint64_t begin, uint64_t end) const {
    auto after = under_way.lower_bound(begin);
    if (after != under_way.end() && after->first < end) return false;
    return after == under_way.begin() || std::prev(after)->second <= begin;
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

}  // namespace

bool WriteOrder::enter(const std::shared_ptr<Transfer>& transfer, const std::shared_ptr<Scheduler>& scheduler) {
  if (!transfer->is_write() || transfer->nbytes() == 0) return true;
  Lines& all = lines();
  std::lock_guard lock(all.mutex);
  Line& line = all.by_file[transfer->identity()];
  if (line.waiting.empty() && line.is_free(transfer->begin(), transfer->end())) {
    line.under_way.emplace(transfer->begin(), transfer->end());
    return true;
  }
  if (scheduler) line.waiting.push_back({transfer, scheduler});
  return false;
}

void WriteOrder::leave(const Transfer& transfer) {
  if (!transfer.is_write() || transfer.nbytes() == 0) return;
  std::vector<Waiting> next;
  {
    Lines& all = lines();
    std::lock_guard lock(all.mutex);
    auto found = all.by_file.find(transfer.identity());
    Line& line = found->second;
    line.under_way.erase(transfer.begin());
    while (!line.waiting.empty()) {
      Transfer& first = *line.waiting.front().transfer;
      if (!line.is_free(first.begin(), first.end())) break;
      line.under_way.emplace(first.begin(), first.end());
      next.push_back(std::move(line.waiting.front()));
      line.waiting.pop_front();
    }
    if (line.under_way.empty()) all.by_file.erase(found);
  }
  for (const Waiting& one : next) one.scheduler->begin(one.transfer);
}

}  // namespace tensorferry
