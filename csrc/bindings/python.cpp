#include "bindings/python.h"

namespace tensorferry {

PyObject* new_instance(PyTypeObject* type, PyObject*, PyObject*) noexcept {
  try {
    return nb::inst_alloc(type).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

nb::object exception_of(const Fault& fault) {
  return call_python(imported("tensorferry.errors", "storage_error"), fault.error_number, fault.operation,
                     nb::bytes(fault.path.data(), fault.path.size()), fault.offset, fault.expected, fault.transferred,
                     fault.end_of_file, fault.damaged_nbytes, fault.hint, fault.refused);
}

void raise(nb::object exception) {
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

void raise(const Fault& fault) { raise(exception_of(fault)); }

void raise_unavailable(const std::string& reason) {
  raise(call_python(imported("tensorferry.errors", "EngineUnavailableError"), reason));
}

void raise_forked(const char* what) {
  PyErr_Format(PyExc_RuntimeError,
               "%s was made before fork(): its workers run in the parent process. Make a new one in the child.", what);
  throw nb::python_error();
}

void check_signals(uint64_t generation, const char* what) {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  if (fork_generation() != generation) raise_forked(what);
}

}  // namespace tensorferry
