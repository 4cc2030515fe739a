// Whose block is next: requests in turn, small ones first, those in the background last.
//
// A request with much to move would hold up everything behind it for as long as the drive needs for it; and one with
// thousands of pieces, another one with a single piece. So requests take turns, a megabyte each. Small requests come
// before all others, and none waits for ever: of so many blocks one is of those who have to wait.
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

  bool empty() const { return requests_.empty(); }

  // At the end of its request's transfers.
  void add(std::shared_ptr<Transfer> transfer);

  // The transfer whose block is next; there must be one.
  const std::shared_ptr<Transfer>& front();

  // The same if this is the first of its request's transfers; else null.
  std::shared_ptr<Transfer> find(const Transfer& transfer) const;

  // What was taken from a transfer that front() or find() gave; exhausted, it leaves.
  void took(const Transfer& transfer, uint64_t nbytes, bool exhausted);

 private:
  enum Class : size_t { small, normal, background, class_count };
  struct Turn {
    Class in;
    std::deque<std::shared_ptr<Transfer>> transfers;
    uint64_t left_nbytes = turn_nbytes;
  };
  using Ring = std::list<Turn>;

  Class next_class() const;

  Ring rings_[class_count];
  uint32_t served_[class_count] = {};  // blocks in a row, while a later class had to wait
  std::unordered_map<const Request*, Ring::iterator> requests_;
};

}  // namespace tensorferry
