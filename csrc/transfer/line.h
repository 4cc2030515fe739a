// Whose block is next: requests in turn, small ones first, those in the background last.
//
// A request with much to move would hold up everything behind it for as long as the drive needs for it; and one with
// thousands of pieces, another one with a single piece. So requests take turns, a megabyte each. Small requests come
// before all others, and none waits for ever: of so many blocks one is of those who have to wait. What is in the
// background has the same share of the bytes as well, since its blocks may be longer than those of others.
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

  enum Class : uint8_t { small, normal, background, class_count };

  bool empty() const { return requests_.empty(); }

  // Whether there is a request of a class before `limit`.
  bool has_before(Class limit) const { return next_class(limit) < class_count; }

  // At the end of its request's transfers.
  void add(std::shared_ptr<Transfer> transfer);

  // Which class it comes into when it is added now.
  static Class class_of(const Transfer& transfer);

  // The transfer whose block is next, among classes before `limit`; there must be one.
  const std::shared_ptr<Transfer>& front(Class limit = class_count);

  // The same if this is the first of its request's transfers; else null.
  std::shared_ptr<Transfer> find(const Transfer& transfer) const;

  // What was taken from a transfer that front() or find() gave; exhausted, it leaves. Returns its class.
  Class took(const Transfer& transfer, uint64_t nbytes, bool exhausted);

 private:
  struct Turn {
    Class in;
    std::deque<std::shared_ptr<Transfer>> transfers;
    uint64_t left_nbytes = turn_nbytes;
  };
  using Ring = std::list<Turn>;

  Class next_class(Class limit) const;

  Ring rings_[class_count];
  uint32_t served_[class_count] = {};  // blocks in a row, while a later class had to wait
  uint64_t owed_nbytes_ = 0;           // that are others' before the next block in the background
  std::unordered_map<const Request*, Ring::iterator> requests_;
};

}  // namespace tensorferry
