// Ranges of files, one after the other in memory, as private pages: what is changed in them stays in memory. Between
// them there may be memory of no file, on huge pages where it is large enough.
//
// A page is read from its file when it is first touched, and is the file's until it is changed: whoever maps a range
// must see to it that nobody writes to it. Touching what the file has lost, or a drive cannot read, is a SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fault.h"
#include "file/file.h"

namespace tensorferry {

class Mapping {
 public:
  struct Piece {
    std::shared_ptr<File> file;  // null: memory of no file, of zeros
    uint64_t offset = 0;         // a multiple of the page
    uint64_t nbytes = 0;         // not 0; but for the last piece a multiple of the page
  };

  // At least one piece. From 2 MiB on, the first byte is where a huge page may begin, or as far behind as it is in the
  // first file.
  static Result<std::unique_ptr<Mapping>> create(const std::vector<Piece>& pieces);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Gives back the pages that lie wholly within [begin, end): what was changed or read into them is gone.
  void forget(size_t begin, size_t end);

  char* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  Mapping(char* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}

  char* data_;
  size_t nbytes_;
};

}  // namespace tensorferry
