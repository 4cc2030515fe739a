#include "pickle/screen.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace tensorferry {
namespace {

static_assert(std::endian::native == std::endian::little, "the numbers in pickles are read in the native byte order");

constexpr uint32_t max_key_values = 256;

// What is known of a value on the unpickler's stack: `text` is a string, `global` a class or function, `called` the
// result of a call, `dict` an empty dict, `fields` a dict with string keys only, `mixed` any other dict, `pair` a
// tuple of two values, `tuple` any other tuple, and `plain` is None, a bool, a number or bytes.
enum class Kind : uint8_t { plain, text, global, called, dict, fields, mixed, list, pair, tuple };

struct Value {
  Kind kind;
  // The number of values that Python must hash for the hash of this value: 1 for a string or a number, and for a tuple
  // the sum of its values and one more. More than max_key_values if the number is not known.
  uint16_t count;
};

bool is_dict(Kind kind) { return kind == Kind::dict || kind == Kind::fields || kind == Kind::mixed; }

constexpr Value plain{Kind::plain, 1};
constexpr Value text{Kind::text, 1};
constexpr Value global{Kind::global, 1};
constexpr Value called{Kind::called, max_key_values + 1};

// Simulates the stack, the marks and the memo of Python's unpickler, with Values in place of objects.
class Screen {
 public:
  explicit Screen(std::span<const uint8_t> data) : data_(data) {}

  // Process the next opcode. Returns false if the opcode is not allowed there.
  bool step();

  bool done() const { return done_; }
  size_t end() const { return at_; }

 private:
  bool skip(uint64_t nbytes) {
    if (nbytes > data_.size() - at_) return false;
    at_ += nbytes;
    return true;
  }

  template <class Number>
  bool number(uint64_t* value) {
    Number found;
    if (data_.size() - at_ < sizeof found) return false;
    std::memcpy(&found, data_.data() + at_, sizeof found);
    at_ += sizeof found;
    *value = found;
    return true;
  }

  // A frame's length is a hint for reading ahead, but must lie within the data.
  bool frame() {
    uint64_t nbytes;
    return number<uint64_t>(&nbytes) && nbytes <= data_.size() - at_;
  }

  template <class Length>
  bool sized(Value value) {
    uint64_t nbytes;
    return number<Length>(&nbytes) && skip(nbytes) && push(value);
  }

  template <class Index>
  bool get() {
    uint64_t index;
    return number<Index>(&index) && index < memo_.size() && push(memo_[index]);
  }

  // The stacks grow by at most one entry for each opcode, so their size is bounded by the length of the data.
  bool push(Value value) {
    stack_.push_back(value);
    return true;
  }

  // The number of values above the last mark.
  size_t height() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  // Remove the last mark and set `count` to the number of values above it.
  bool unmark(size_t* count) {
    if (marks_.empty()) return false;
    *count = height();
    marks_.pop_back();
    return true;
  }

  bool tuple(size_t count) {
    if (height() < count) return false;
    uint32_t values = 1;
    for (size_t each = stack_.size() - count; each < stack_.size(); ++each) {
      values = std::min(values + stack_[each].count, max_key_values + 1);
    }
    stack_.resize(stack_.size() - count);
    return push({count == 2 ? Kind::pair : Kind::tuple, static_cast<uint16_t>(values)});
  }

  bool set_items(size_t count) {
    // Remove `count` values, which are keys and values in turn, from the stack, and add them to the object below. A key
    // with too many values to hash is refused, and so is one with an unknown number, unless it is `called`: the code
    // that unpickles decides which classes there are, and so how their objects are hashed.
    if (count % 2 != 0 || height() < count + 1) return false;
    bool named = true;
    for (size_t key = stack_.size() - count; key < stack_.size(); key += 2) {
      if (stack_[key].kind != Kind::called && stack_[key].count > max_key_values) return false;
      named = named && stack_[key].kind == Kind::text;
    }
    stack_.resize(stack_.size() - count);
    Kind& kind = stack_.back().kind;
    if (is_dict(kind)) {
      kind = named && kind != Kind::mixed ? Kind::fields : Kind::mixed;
      return true;
    }
    return kind == Kind::called;
  }

  bool append(size_t count) {
    if (height() < count + 1) return false;
    stack_.resize(stack_.size() - count);
    return stack_.back().kind == Kind::list;
  }

  bool is_tuple() const { return stack_.back().kind == Kind::tuple || stack_.back().kind == Kind::pair; }

  bool call() {
    if (height() < 2 || !is_tuple()) return false;
    stack_.pop_back();
    stack_.back() = called;
    return true;
  }

  // NEWOBJ, which is allowed only with an empty tuple of arguments.
  bool make() { return height() >= 2 && is_tuple() && stack_.back().count == 1 && call(); }

  bool build() {
    // The state must not be a tuple of two values: if the second one is a dict, BUILD calls setattr() for each of its
    // items.
    if (height() < 2 || (stack_.back().kind != Kind::fields && stack_.back().kind != Kind::tuple)) return false;
    stack_.pop_back();
    return stack_.back().kind == Kind::called;
  }

  bool find_global() {
    if (height() < 2) return false;
    stack_.pop_back();
    stack_.back() = global;
    return true;
  }

  std::span<const uint8_t> data_;
  size_t at_ = 0;
  bool done_ = false;
  std::vector<Value> stack_, memo_;
  std::vector<size_t> marks_;
};

bool Screen::step() {
  if (at_ == data_.size()) return false;
  size_t count;
  switch (data_[at_++]) {
    case 0x80:  // PROTO
      return at_ < data_.size() && data_[at_] <= 5 && skip(1);
    case 0x95:  // FRAME
      return frame();
    case 0x94:  // MEMOIZE
      if (height() == 0) return false;
      memo_.push_back(stack_.back());
      // The memo has a copy of what is known now. So a dict that is fetched may not get items, nor be a state.
      if (is_dict(stack_.back().kind)) memo_.back().kind = Kind::plain;
      return true;
    case 0x68:  // BINGET
      return get<uint8_t>();
    case 0x6A:  // LONG_BINGET
      return get<uint32_t>();
    case 0x4B:  // BININT1
      return skip(1) && push(plain);
    case 0x4D:  // BININT2
      return skip(2) && push(plain);
    case 0x4A:  // BININT
      return skip(4) && push(plain);
    case 0x47:  // BINFLOAT
      return skip(8) && push(plain);
    case 0x4E:  // NONE
    case 0x88:  // NEWTRUE
    case 0x89:  // NEWFALSE
      return push(plain);
    case 0x8A:  // LONG1
    case 0x43:  // SHORT_BINBYTES
      return sized<uint8_t>(plain);
    case 0x42:  // BINBYTES
      return sized<uint32_t>(plain);
    case 0x8E:  // BINBYTES8
      return sized<uint64_t>(plain);
    case 0x8C:  // SHORT_BINUNICODE
      return sized<uint8_t>(text);
    case 0x58:  // BINUNICODE
      return sized<uint32_t>(text);
    case 0x7D:  // EMPTY_DICT
      return push({Kind::dict, called.count});
    case 0x5D:  // EMPTY_LIST
      return push({Kind::list, called.count});
    case 0x29:  // EMPTY_TUPLE
      return tuple(0);
    case 0x85:  // TUPLE1
      return tuple(1);
    case 0x86:  // TUPLE2
      return tuple(2);
    case 0x87:  // TUPLE3
      return tuple(3);
    case 0x28:  // MARK
      marks_.push_back(stack_.size());
      return true;
    case 0x74:  // TUPLE
      return unmark(&count) && tuple(count);
    case 0x75:  // SETITEMS
      return unmark(&count) && set_items(count);
    case 0x65:  // APPENDS
      return unmark(&count) && append(count);
    case 0x73:  // SETITEM
      return set_items(2);
    case 0x61:  // APPEND
      return append(1);
    case 0x93:  // STACK_GLOBAL
      return find_global();
    case 0x52:  // REDUCE
      return call();
    case 0x81:  // NEWOBJ
      return make();
    case 0x62:  // BUILD
      return build();
    case 0x2E:  // STOP
      done_ = true;
      return height() == 1 && marks_.empty();
    default: return false;
  }
}

}  // namespace

size_t screened_pickle_end(std::span<const uint8_t> data) {
  Screen screen(data);
  while (!screen.done()) {
    if (!screen.step()) return 0;
  }
  return screen.end();
}

}  // namespace tensorferry
