// The checks of arrays.py and transfers.py, for thousands of items in one call.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

// Adds `collect` and `first_moved` to the module.
void bind_collect(nanobind::module_& module);

}  // namespace tensorferry
