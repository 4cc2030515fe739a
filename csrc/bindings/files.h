// Open files, as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "bindings/without_gil.h"
#include "file/file.h"

namespace tensorferry {

// A File as a Python object. The core does not refer to this object but to the File, whose shared_ptr can be released
// without the GIL.
struct PyFile {
  explicit PyFile(std::shared_ptr<File> file) : core(std::move(file)) {}
  PyFile(const PyFile&) = default;
  PyFile(PyFile&&) = default;
  PyFile& operator=(const PyFile&) = default;
  PyFile& operator=(PyFile&&) = default;
  // The last reference closes the descriptors, which may take long: a server may not answer. A source has none, and its
  // Python function is released with the GIL.
  ~PyFile() {
    if (core.use_count() != 1 || core->source()) return;
    const WithoutGil release;
    core.reset();
  }

  std::shared_ptr<File> core;
};

nanobind::object path_of(const PyFile& file);

// Return a lease that keeps the file open. Raises ValueError if the file is closed.
File::Lease lease_of(const PyFile& file);

void bind_files(nanobind::module_& module);

}  // namespace tensorferry
