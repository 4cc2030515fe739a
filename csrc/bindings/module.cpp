// The extension module. csrc/bindings is the only folder of the core that uses Python. Its functions convert arguments
// to the core's types, release the GIL, call the core, and raise a Fault as the exception that tensorferry.errors
// builds.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <cassert>
#include <iterator>
#include <utility>

#include "base/after_fork.h"
#include "base/limits.h"
#include "bindings/collect.h"
#include "bindings/files.h"
#include "bindings/future.h"
#include "bindings/memory.h"
#include "bindings/python.h"
#include "bindings/scheduler.h"
#include "bindings/source.h"
#include "bindings/stream.h"
#include "checksum/checksum.h"
#include "codes/values.h"

namespace tensorferry {
namespace {

// The GIL is kept for smaller buffers: their CRC-32 is computed before another thread would have acquired the GIL.
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

// The arguments of type uintptr_t are addresses of the caller's tensors; the other arguments give the tensors' sizes.
void write_values_of_codes(uintptr_t codes, size_t rows, size_t columns, std::pair<size_t, size_t> block,
                           std::pair<size_t, size_t> begin, size_t scales_in_row, size_t values_per_code,
                           uintptr_t table, uintptr_t scales, uintptr_t values) {
  WithoutGil release;
  const CodeBlocks blocks{rows, columns, block.first, block.second, begin.first, begin.second, scales_in_row};
  values_of_codes(reinterpret_cast<const uint8_t*>(codes), blocks, values_per_code,
                  reinterpret_cast<const float*>(table), reinterpret_cast<const float*>(scales),
                  reinterpret_cast<float*>(values));
}

}  // namespace
}  // namespace tensorferry

// nanobind stores its data about types once for the process, and an import in a second interpreter would take the data
// from the first one. Therefore nanobind's initialization function gets another name here. The module's own
// PyInit__core(), at the end of this file, makes each import first check which interpreter runs it.
#define PyInit__core PyInit_core_of_main_interpreter
NB_MODULE(_core, module) {
  using namespace tensorferry;
  module.doc() = "The native core of tensorferry: see csrc/. Use the package's public names instead.";
  // DeepSpeed's engines, and with them our handles, are still alive when the interpreter ends. All their I/O has
  // finished by then (runtime.py), and without this call each process of a training would print twenty lines of
  // warnings.
  nb::set_leak_warnings(false);

  bind_collect(module);
  bind_files(module);
  bind_sources(module);
  bind_schedulers(module);
  bind_futures(module);
  bind_streams(module);
  bind_memory(module);
  module.def("crc32", &crc32_of, "buffer"_a, "crc"_a = 0);
  module.def("crc32_combine", &crc32_combine, "crc"_a, "next_crc"_a, "nbytes"_a);
  module.def("write_values_of_codes", &write_values_of_codes, "codes"_a, "rows"_a, "columns"_a, "block"_a, "begin"_a,
             "scales_in_row"_a, "values_per_code"_a, "table"_a, "scales"_a, "values"_a);
  module.def("fork_generation", &fork_generation);
  module.def("why_no_thread", &why_no_thread);
}

#undef PyInit__core

namespace tensorferry {
namespace {

int refuse_other_interpreters(PyObject*) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 0;
  PyErr_SetString(PyExc_ImportError,
                  "tensorferry works only in the main interpreter, and this is a sub-interpreter; remedy: use it in "
                  "the main interpreter or in a separate process");
  return -1;
}

}  // namespace
}  // namespace tensorferry

// Return nanobind's module definition with the check of the interpreter as its first execution slot. Later imports get
// the same definition, which already has the slot.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  static PyModuleDef_Slot slots[8] = {};
  PyObject* const found = PyInit_core_of_main_interpreter();
  if (found == nullptr || slots[0].slot != 0) return found;
  auto* const definition = reinterpret_cast<PyModuleDef*>(found);
  slots[0] = {Py_mod_exec, reinterpret_cast<void*>(&tensorferry::refuse_other_interpreters)};
  size_t count = 1;
  for (const PyModuleDef_Slot* slot = definition->m_slots; slot->slot != 0; ++slot) {
    assert(count + 1 < std::size(slots));
    slots[count++] = *slot;
  }
  definition->m_slots = slots;
  return found;
}
