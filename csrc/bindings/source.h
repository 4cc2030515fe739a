// Files that a function of Python's reads.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

void bind_sources(nanobind::module_& module);

}  // namespace tensorferry
