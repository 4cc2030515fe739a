// The only place that knows Python. Thin: each function turns arguments into the core's types, lets go of the
// GIL, calls, and turns a Fault into the exception that tensorferry.errors builds.
#include <Python.h>
#include <nanobind/nanobind.h>

#include "base/after_fork.h"
#include "base/limits.h"
#include "bindings/collect.h"
#include "bindings/files.h"
#include "bindings/memory.h"
#include "bindings/python.h"
#include "bindings/scheduler.h"
#include "bindings/stream.h"
#include "checksum/checksum.h"

namespace tensorferry {
namespace {

// Shorter ones are done before another thread would have got the GIL.
constexpr Py_ssize_t gil_free_crc_nbytes = 16 << 10;

uint32_t crc32_of(nb::handle exporter, uint32_t crc) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(exporter.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto nbytes = static_cast<size_t>(buffer.len);
  if (buffer.len < gil_free_crc_nbytes) {
    crc = crc32(crc, buffer.buf, nbytes);
  } else {
    WithoutGil release;
    crc = crc32(crc, buffer.buf, nbytes);
  }
  PyBuffer_Release(&buffer);
  return crc;
}

}  // namespace
}  // namespace tensorferry

NB_MODULE(_core, module) {
  using namespace tensorferry;
  module.doc() = "The native core of tensorferry: see csrc/. Use the package's public names instead.";
  // DeepSpeed's engines, and with them our handles, are alive when the interpreter ends. All their I/O has been
  // finished by then (runtime.py), and each of a training's processes would print twenty lines.
  nb::set_leak_warnings(false);

  bind_collect(module);
  bind_files(module);
  bind_schedulers(module);
  bind_streams(module);
  bind_memory(module);
  module.def("crc32", &crc32_of, "buffer"_a, "crc"_a = 0);
  module.def("crc32_combine", &crc32_combine, "crc"_a, "next_crc"_a, "nbytes"_a);
  module.def("fork_generation", &fork_generation);
  module.def("why_no_thread", &why_no_thread);
}
