// The Python functions for memory: allocations of the core, buffers and arrays of callers, and GPU memory.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

void bind_memory(nanobind::module_& module);

}  // namespace tensorferry
