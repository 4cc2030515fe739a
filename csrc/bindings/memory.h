// Memory of our own, of others, and of GPUs.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

void bind_memory(nanobind::module_& module);

}  // namespace tensorferry
