// Chooses the next block: requests take turns, small ones first, background ones last. A request is one call of a user.
// It has one or more transfers, each of which moves a range of a file in blocks. A line holds the transfers of one lane
// that have blocks left to be taken (lane.h).
//
// Without turns a large request would delay all later ones for as long as the drive needs for it, and a request of
// thousands of transfers would delay one with a single transfer. The requests of one class therefore take turns of a
// megabyte each. Small requests precede all others, but no class waits forever: after 16 blocks of a class in a row,
// the next waiting class gets one. For the background class, bytes count as well, since its blocks may be longer than
// those of others: after a background block, requests that wait in other classes get 16 times as many bytes first.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <unordered_map>

namespace tensorferry {

class Request;
class Transfer;

class Line {
 public:
  static constexpr uint64_t small_request_nbytes = uint64_t{1} << 20;
  static constexpr uint64_t turn_nbytes = uint64_t{1} << 20;
  static constexpr uint32_t blocks_before_the_next_class = 16;

  // The classes of requests, in order of precedence. class_count is their number, and as a `limit` it includes all.
  enum Class : uint8_t { small, normal, background, class_count };

  bool empty() const { return requests_.empty(); }

  // Whether a request of a class before `limit` is in line.
  bool has_before(Class limit) const { return next_class(limit) < class_count; }

  // Add a transfer behind the others of its request.
  void add(std::shared_ptr<Transfer> transfer);

  // The class of the transfer's request, by its options and its size so far.
  static Class class_of(const Transfer& transfer);

  // The transfer from which the next block is to be taken, among the classes before `limit`. Requires
  // has_before(limit).
  const std::shared_ptr<Transfer>& front(Class limit = class_count);

  // Return `transfer` if it is in line and the first of its request's transfers there, otherwise null.
  std::shared_ptr<Transfer> find(const Transfer& transfer) const;

  // Record that bytes were taken from a transfer returned by front() or find(). An exhausted transfer leaves the line.
  // Returns its class.
  Class took(const Transfer& transfer, uint64_t nbytes, bool exhausted);

 private:
  // A request in line, with its turn.
  struct Turn {
    Class in;
    std::deque<std::shared_ptr<Transfer>> transfers;
    uint64_t left_nbytes = turn_nbytes;  // that the request may still take in its present turn
  };
  using Ring = std::list<Turn>;

  Class next_class(Class limit) const;

  Ring rings_[class_count];
  uint32_t served_[class_count] = {};  // blocks that each class got since a class behind it last got one
  uint64_t owed_nbytes_ = 0;           // bytes that other classes may take before the next background block
  std::unordered_map<const Request*, Ring::iterator> requests_;
};

}  // namespace tensorferry
