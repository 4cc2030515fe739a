// What a file is read by whose bytes no descriptor of the kernel's has: an object of a bucket.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

class Source {
 public:
  virtual ~Source() = default;

  // Reads from `offset` on, and returns how many bytes came: `nbytes`, or fewer if the rest is to be asked for again.
  // Else a negative errno, and in `why` what is known of the reason. Any number of threads may call it; it may block.
  virtual int64_t read(char* memory, uint64_t nbytes, uint64_t offset, std::string& why) = 0;
};

}  // namespace tensorferry
