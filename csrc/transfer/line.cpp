#include "transfer/line.h"

#include "transfer/request.h"
#include "transfer/transfer.h"

namespace tensorferry {

Line::Class Line::class_of(const Transfer& transfer) {
  const Request& request = transfer.request();
  if (request.options().background) return background;
  return request.nbytes() <= small_request_nbytes ? small : normal;
}

void Line::add(std::shared_ptr<Transfer> transfer) {
  const Request& request = transfer->request();
  auto found = requests_.find(&request);
  if (found == requests_.end()) {
    const Class in = class_of(*transfer);
    Ring& ring = rings_[in];
    found = requests_.emplace(&request, ring.insert(ring.end(), Turn{in, {}, turn_nbytes})).first;
  }
  const auto turn = found->second;
  if (turn->in == small && request.nbytes() > small_request_nbytes) {  // the request has grown by further transfers
    turn->in = normal;
    rings_[normal].splice(rings_[normal].end(), rings_[small], turn);
  }
  turn->transfers.push_back(std::move(transfer));
}

Line::Class Line::next_class(Class limit) const {
  Class last = class_count;
  for (const Class in : {small, normal, background}) {
    if (in >= limit || rings_[in].empty()) continue;
    if (in == background && last != class_count && owed_nbytes_ > 0) break;
    last = in;
    if (served_[in] < blocks_before_the_next_class) return in;
  }
  return last;
}

const std::shared_ptr<Transfer>& Line::front(Class limit) {
  return rings_[next_class(limit)].front().transfers.front();
}

std::shared_ptr<Transfer> Line::find(const Transfer& transfer) const {
  const auto found = requests_.find(&transfer.request());
  if (found == requests_.end() || found->second->transfers.front().get() != &transfer) return nullptr;
  return found->second->transfers.front();
}

Line::Class Line::took(const Transfer& transfer, uint64_t nbytes, bool exhausted) {
  const auto found = requests_.find(&transfer.request());
  const auto turn = found->second;
  const Class in = turn->in;
  Ring& ring = rings_[in];
  // This class has got a block, so the counts of all classes before it are reset, and its own count grows by one.
  for (size_t before = 0; before < in; ++before) served_[before] = 0;
  ++served_[in];
  owed_nbytes_ =
      in == background ? nbytes * blocks_before_the_next_class : owed_nbytes_ - std::min(owed_nbytes_, nbytes);
  turn->left_nbytes -= std::min(turn->left_nbytes, nbytes);
  if (exhausted) turn->transfers.pop_front();
  if (turn->transfers.empty()) {
    ring.erase(turn);
    requests_.erase(found);
  } else if (turn->left_nbytes == 0) {
    turn->left_nbytes = turn_nbytes;
    ring.splice(ring.end(), ring, turn);
  }
  return in;
}

}  // namespace tensorferry
