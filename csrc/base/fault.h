// Results as values: a Fault describes what went wrong with one piece of I/O, and a Result holds a value or a Fault.
//
// Only bindings/ throws exceptions for operating errors. The exception is made from the fields of the Fault.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace tensorferry {

struct Fault {
  int error_number = 0;  // errno; 0 if end_of_file is set
  const char* operation = "";
  std::string path = {};
  uint64_t offset = 0;          // file offset of the first byte that was not moved
  uint64_t expected = 0;        // the number of bytes that the caller asked for
  uint64_t transferred = 0;     // how many of them were moved
  bool end_of_file = false;     // the file ends before the range that is read
  bool refused = false;         // nothing was moved, and the hint has the offset and the size
  uint64_t damaged_nbytes = 0;  // bytes from `offset` on that do not match their checksum
  std::string hint = {};        // a remedy, if one is known
};

template <typename T>
class Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Fault fault) : state_(std::move(fault)) {}

  explicit operator bool() const { return std::holds_alternative<T>(state_); }
  T& operator*() { return std::get<T>(state_); }
  const T& operator*() const { return std::get<T>(state_); }
  Fault& fault() { return std::get<Fault>(state_); }
  const Fault& fault() const { return std::get<Fault>(state_); }

 private:
  std::variant<T, Fault> state_;
};

}  // namespace tensorferry
