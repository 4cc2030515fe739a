// Streams (transfer/stream.h), as Python objects.
#pragma once

#include <nanobind/nanobind.h>

namespace tensorferry {

void bind_streams(nanobind::module_& module);

}  // namespace tensorferry
