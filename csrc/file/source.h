// A source reads the bytes of a file that has no descriptor, such as an object in a bucket (S3). This is its interface.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry {

class Source {
 public:
  virtual ~Source() = default;

  // Read from `offset` on, and return the number of bytes read: `nbytes`, or fewer, in which case the caller must call
  // read() again for the rest. On failure return a negative errno, and set `why` to the reason if it is known. Several
  // threads may call read() at the same time, and it may block.
  virtual int64_t read(char* memory, uint64_t nbytes, uint64_t offset, std::string& why) = 0;
};

}  // namespace tensorferry
