// Files whose bytes a Python function reads (file/source.h).
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

void bind_sources(nanobind::module_& module);

}  // namespace tensorferry
