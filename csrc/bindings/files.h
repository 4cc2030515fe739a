// Open files, as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "file/file.h"

namespace tensorferry {

// A File as a Python object. The core does not refer to this object but to the File, whose shared_ptr can be released
// without the GIL.
struct PyFile {
  std::shared_ptr<File> core;
};

// Return a lease that keeps the file open. Raises ValueError if the file is closed.
File::Lease lease_of(const PyFile& file);

void bind_files(nanobind::module_& module);

}  // namespace tensorferry
