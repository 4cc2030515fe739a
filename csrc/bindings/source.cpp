#include "bindings/source.h"

#include <errno.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/files.h"
#include "bindings/python.h"
#include "file/source.h"

namespace tensorferry {
namespace {

// References to Python objects that threads without the GIL no longer need. Such a thread does not acquire the GIL to
// drop a reference: the thread that has the GIL may be waiting for this one, and neither would continue. The next
// thread with the GIL that calls release() drops them.
class LetGo {
 public:
  void add(PyObject* object) {
    std::lock_guard lock(mutex_);
    objects_.push_back(object);
  }

  // Requires the GIL.
  void release() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

LetGo& let_go() {
  static auto* const objects = new LetGo;  // never freed: threads may outlive the interpreter
  return *objects;
}

// Acquires the GIL for a scope.
class WithGil {
 public:
  WithGil() : state_(until_exit([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

// Reads by calls of a Python function, which returns an iterable of buffers.
class PySource final : public Source {
 public:
  explicit PySource(nb::object read) : read_(read.release().ptr()) {}
  ~PySource() override {
    let_go().add(read_);
    if (PyGILState_Check()) let_go().release();
  }

  int64_t read(char* memory, uint64_t nbytes, uint64_t offset, std::string& why) override {
    const WithGil hold;
    let_go().release();
    try {
      return copy(call_python(read_, offset, nbytes), memory, nbytes);
    } catch (nb::python_error& error) {
      return describe(error.value(), why);
    } catch (const std::exception& error) {
      why = error.what();
      return -EREMOTEIO;
    }
  }

 private:
  // Set `why` to the text of the function's exception, and return its errno as a negative number. The exception's class
  // may raise in both; that must not leave this engine thread, because it would end the process.
  static int64_t describe(nb::handle exception, std::string& why) {
    const auto text = nb::steal(until_exit([&] { return PyObject_Str(exception.ptr()); }));
    const auto bytes =
        text.is_valid() ? nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"))  // surrogates
                        : nb::object();
    if (!bytes.is_valid()) PyErr_Clear();
    why = bytes.is_valid() ? PyBytes_AS_STRING(bytes.ptr()) : Py_TYPE(exception.ptr())->tp_name;
    const auto number = nb::steal(until_exit([&] { return PyObject_GetAttrString(exception.ptr(), "errno"); }));
    if (!number.is_valid()) PyErr_Clear();
    int error_number = 0;
    const bool known = number.is_valid() && nb::try_cast(number, error_number) && error_number > 0;
    return known ? -error_number : -EREMOTEIO;
  }

  // Copy the buffers that the Python function returns, as an iterable, to `memory`, one behind the other. The GIL is
  // released during each copy.
  static int64_t copy(const nb::object& returned, char* memory, uint64_t nbytes) {
    const auto chunks = nb::steal(until_exit([&] { return PyObject_GetIter(returned.ptr()); }));
    uint64_t moved = 0;
    while (chunks.is_valid()) {
      const auto next = nb::steal(until_exit([&] { return PyIter_Next(chunks.ptr()); }));
      if (!next.is_valid()) break;
      Py_buffer chunk;
      if (until_exit([&] { return PyObject_GetBuffer(next.ptr(), &chunk, PyBUF_C_CONTIGUOUS); }) != 0) break;
      const auto chunk_nbytes = static_cast<uint64_t>(chunk.len);
      const bool fits = chunk_nbytes <= nbytes - moved;
      if (fits) {
        const WithoutGil release;
        std::memcpy(memory + moved, chunk.buf, chunk_nbytes);
      }
      PyBuffer_Release(&chunk);
      if (!fits) throw std::length_error("the source returned more bytes than requested");
      moved += chunk_nbytes;
    }
    if (PyErr_Occurred()) throw nb::python_error();
    return static_cast<int64_t>(moved);
  }

  PyObject* const read_;
};

nb::typed<nb::object, PyFile> file_of_source(const char* path, uint64_t nbytes, uint64_t device, nb::object read) {
  let_go().release();
  return instance_of(PyFile(File::of_source(path, nbytes, device, std::make_shared<PySource>(std::move(read)))));
}

}  // namespace

void bind_sources(nb::module_& module) {
  module.def("file_of_source", &file_of_source, "path"_a, "nbytes"_a, "device"_a, "read"_a);
}

}  // namespace tensorferry
