#include "transfer/line.h"

#include "transfer/request.h"
#include "transfer/transfer.h"

namespace tensorferry {

void Line::add(std::shared_ptr<Transfer> transfer) {
  const Request& request = transfer->request();
  auto found = requests_.find(&request);
  if (found == requests_.end()) {
    const Class in = request.options().background               ? background
                     : request.nbytes() <= small_request_nbytes ? small
                                                                : normal;
    Ring& ring = rings_[in];
    found = requests_.emplace(&request, ring.insert(ring.end(), Turn{in, {}, turn_nbytes})).first;
  }
  const auto turn = found->second;
  if (turn->in == small && request.nbytes() > small_request_nbytes) {  // more of it has come
    turn->in = normal;
    rings_[normal].splice(rings_[normal].end(), rings_[small], turn);
  }
  turn->transfers.push_back(std::move(transfer));
}

Line::Class Line::next_class() const {
  Class last = class_count;
  for (const Class in : {small, normal, background}) {
    if (rings_[in].empty()) continue;
    last = in;
    if (served_[in] < blocks_before_the_next_class) return in;
  }
  return last;
}

const std::shared_ptr<Transfer>& Line::front() { return rings_[next_class()].front().transfers.front(); }

std::shared_ptr<Transfer> Line::find(const Transfer& transfer) const {
  const auto found = requests_.find(&transfer.request());
  if (found == requests_.end() || found->second->transfers.front().get() != &transfer) return nullptr;
  return found->second->transfers.front();
}

void Line::took(const Transfer& transfer, uint64_t nbytes, bool exhausted) {
  const auto found = requests_.find(&transfer.request());
  const auto turn = found->second;
  const Class in = turn->in;
  Ring& ring = rings_[in];
  // Those before it had their share; it had one block more of its own.
  for (size_t before = 0; before < in; ++before) served_[before] = 0;
  ++served_[in];
  turn->left_nbytes -= std::min(turn->left_nbytes, nbytes);
  if (exhausted) turn->transfers.pop_front();
  if (turn->transfers.empty()) {
    ring.erase(turn);
    requests_.erase(found);
  } else if (turn->left_nbytes == 0) {
    turn->left_nbytes = turn_nbytes;
    ring.splice(ring.end(), ring, turn);
  }
}

}  // namespace tensorferry
