// Open files.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "file/file.h"

namespace tensorferry {

// Shared with the core by plain shared_ptr, whose release needs no GIL.
struct PyFile {
  std::shared_ptr<File> core;
};

// ValueError where it is closed.
File::Lease lease_of(const PyFile& file);

void bind_files(nanobind::module_& module);

}  // namespace tensorferry
