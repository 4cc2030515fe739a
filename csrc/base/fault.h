// Results as values: what went wrong with one piece of I/O, and a value-or-fault return type.
//
// Nothing in csrc/ but bindings/ throws for an operating error. A Fault says what the exception will say.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace tensorferry {

struct Fault {
  int error_number = 0;  // errno; 0 with end_of_file
  const char* operation = "";
  std::string path = {};
  uint64_t offset = 0;    // of the first byte that could not be moved, from the file's start
  uint64_t expected = 0;  // bytes the caller asked for
  uint64_t transferred = 0;
  bool end_of_file = false;
  uint64_t damaged_nbytes = 0;  // so many from offset on are not what they were: their checksum is another
  std::string hint = {};        // a remedy, where one is known
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
