// Ranges of files, mapped one behind the other in memory as private pages: changes in memory do not reach the files.
// Between the ranges there may be anonymous memory, on huge pages where it is large enough.
//
// A page is read from its file at the first access. Until the page is changed in memory, it shows what the file
// contains at the moment, so the code that maps a range must ensure that the file is not written meanwhile. Access to a
// page that is behind the end of a file that was shortened, or that the drive cannot read, raises SIGBUS.
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
    std::shared_ptr<File> file;  // null: anonymous memory, zeroed
    uint64_t offset = 0;         // a multiple of the page size
    uint64_t nbytes = 0;         // greater than 0; a multiple of the page size except in the last piece
  };

  // Map at least one piece. If the pieces have 2 MiB or more in total, the address and the file offset of the first
  // file piece agree modulo 2 MiB (without a file piece, the memory begins at a multiple of 2 MiB), which lets the
  // kernel use huge pages.
  static Result<std::unique_ptr<Mapping>> create(const std::vector<Piece>& pieces);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Release the pages that are completely within [begin, end), with everything that was read into them or changed in
  // them. The next access reads them from the file again, or finds zeros.
  void forget(size_t begin, size_t end);

  char* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  Mapping(char* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}

  char* data_;
  size_t nbytes_;
};

}  // namespace tensorferry
