// Checks the arrays of one call before the first byte moves, and checks again at the end that each of them still has
// its memory. In Python this costs two microseconds for each array, a fifth of what a small read takes. The common case
// is a plain array: an exact torch.Tensor or numpy.ndarray whose memory can be used as it is. It is recognized here in
// a few calls. Every other array, and so every error, is left to the Python function that defines the rules (`check`).
#include "bindings/collect.h"

#include <Python.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "bindings/python.h"
#include "transfer/gather.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tensorferry {
namespace {

PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }

// Clear the exception by which a tensor or an array refuses an operation, which means that it is not plain. Other
// exceptions propagate: while a torch mode is active (TorchFunctionMode), reading attributes runs Python code, and in
// it a signal handler may raise any exception.
void clear_refusal() {
  if (!PyErr_Occurred()) return;
  for (PyObject* const type : {PyExc_AttributeError, PyExc_TypeError, PyExc_ValueError, PyExc_RuntimeError,
                               PyExc_BufferError, PyExc_OverflowError}) {
    if (PyErr_ExceptionMatches(type)) return PyErr_Clear();
  }
  throw nb::python_error();
}

// Attribute and method look-ups by interned names.
class Names {
 public:
  // Return the interned names, which are never freed: a destructor of this object could run after the interpreter has
  // ended.
  static const Names& get() {
    static const auto* names = new Names;
    return *names;
  }

  // If an attribute cannot be read or a method fails, these functions answer in the way that makes the tensor not
  // plain.
  bool is_cpu(PyObject* tensor) const { return attribute_is(tensor, is_cpu_, Py_True); }
  bool is_quantized(PyObject* tensor) const { return !attribute_is(tensor, is_quantized_, Py_False); }
  bool is_nested(PyObject* tensor) const { return !attribute_is(tensor, is_nested_, Py_False); }
  bool has_layout(PyObject* tensor, PyObject* layout) const { return attribute_is(tensor, layout_, layout); }
  bool is_contiguous(PyObject* tensor) const { return call_is(tensor, is_contiguous_, Py_True); }
  bool is_lazy(PyObject* tensor) const {
    return !call_is(tensor, is_neg_, Py_False) || !call_is(tensor, is_conj_, Py_False);
  }
  uint64_t data_ptr(PyObject* tensor) const { return number(call(tensor, data_ptr_)); }
  uint64_t nbytes(PyObject* tensor) const { return number(PyObject_GetAttr(tensor, nbytes_)); }

  // The owner of a tensor's memory as a new reference; null if there is none.
  PyObject* storage_of(PyObject* tensor) const {
    PyObject* storage = call(tensor, untyped_storage_);
    if (storage == nullptr) clear_refusal();
    return storage;
  }
  uint64_t storage_nbytes(PyObject* storage) const { return number(call(storage, nbytes_)); }

 private:
  static PyObject* call(PyObject* object, PyObject* name) {
    PyObject* arguments[] = {object};
    return PyObject_VectorcallMethod(name, arguments, 1, nullptr);
  }

  static bool is(PyObject* value, PyObject* expected) {
    if (value == nullptr) clear_refusal();
    const bool same = value == expected;
    Py_XDECREF(value);
    return same;
  }

  static bool attribute_is(PyObject* object, PyObject* name, PyObject* expected) {
    return is(PyObject_GetAttr(object, name), expected);
  }
  static bool call_is(PyObject* object, PyObject* name, PyObject* expected) { return is(call(object, name), expected); }

  // Convert to a number; 0 if the value is not one.
  static uint64_t number(PyObject* value) {
    const unsigned long long found = value ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    clear_refusal();
    return found == static_cast<unsigned long long>(-1) ? 0 : found;
  }

  PyObject* is_cpu_ = intern("is_cpu");
  PyObject* is_quantized_ = intern("is_quantized");
  PyObject* is_nested_ = intern("is_nested");
  PyObject* layout_ = intern("layout");
  PyObject* is_contiguous_ = intern("is_contiguous");
  PyObject* is_neg_ = intern("is_neg");
  PyObject* is_conj_ = intern("is_conj");
  PyObject* data_ptr_ = intern("data_ptr");
  PyObject* nbytes_ = intern("nbytes");
  PyObject* untyped_storage_ = intern("untyped_storage");
};

// The C functions of DLPack 1.3, which torch has from version 2.10 on. One call of show() stores a tensor's properties
// in a struct; to read them as attributes takes three times as long. The declarations follow dlpack.h, and do not
// change within a major version of DLPack.
struct DlpackFunctions {
  struct Version {
    uint32_t major;
    uint32_t minor;
  } version;
  DlpackFunctions* of_older_version;
  void* unused[3];
  int (*show)(PyObject* tensor, nb::dlpack::dltensor* out);  // may be null

  // Return the functions of the imported torch; null if it has none of a supported version.
  static const DlpackFunctions* of(nb::handle tensor_type) {
    nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto* found = static_cast<DlpackFunctions*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (found != nullptr && found->version.major > 1) found = found->of_older_version;
    return found != nullptr && found->version.major == 1 && found->show != nullptr ? found : nullptr;
  }
};

// A Python library that the program may have imported: torch or numpy.
class Library {
 public:
  explicit Library(const char* name) : name_(intern(name)) {}

  // Whether the imported module differs from the one at the last call of changed(). If so, its attributes must be
  // looked up again.
  bool changed() {
    nb::object found = module();
    // While a module is being imported, attributes may still be missing, so it counts as not imported.
    if (!found.is(module_) && found.is_valid() && is_being_imported(found)) found.reset();
    if (found.is(module_)) return false;
    found_.clear();
    module_ = std::move(found);
    return true;
  }

  // Return an attribute of the module, or None if the module lacks it; null if the library is not imported. The
  // reference is kept until the module changes.
  PyObject* get(const char* name) {
    if (!module_.is_valid()) return nullptr;
    found_.push_back(nb::getattr(module_, name, nb::none()));
    return found_.back().ptr();
  }

 private:
  nb::object module() const {
    PyObject* const modules = PyImport_GetModuleDict();
#if defined(Py_GIL_DISABLED)
    PyObject* found = nullptr;
    if (PyDict_GetItemRef(modules, name_, &found) < 0) throw nb::python_error();
    return nb::steal(found);
#else
    return nb::borrow(PyDict_GetItemWithError(modules, name_));
#endif
  }

  static bool is_being_imported(nb::handle module) {
    const nb::object spec = nb::getattr(module, "__spec__", nb::none());
    const int found = PyObject_IsTrue(nb::getattr(spec, "_initializing", nb::bool_(false)).ptr());
    if (found < 0) throw nb::python_error();
    return found != 0;
  }

  PyObject* const name_;
  nb::object module_;
  std::vector<nb::object> found_;
};

// The types of the imported libraries. They are looked up again only after the imported module has changed, because a
// look-up takes as long as all other checks of a small array.
struct Types {
  PyObject* tensor = nullptr;
  PyObject* strided = nullptr;
  PyObject* storage = nullptr;
  PyObject* ndarray = nullptr;
  const DlpackFunctions* functions = nullptr;

  static Types get() {
    static nb::ft_mutex mutex;
    static auto& torch = *new Library("torch");
    static auto& numpy = *new Library("numpy");
    static Types known;
    nb::ft_lock_guard guard(mutex);
    if (numpy.changed()) known.ndarray = numpy.get("ndarray");
    if (torch.changed()) {
      known.strided = torch.get("strided");
      known.storage = torch.get("UntypedStorage");
      known.tensor = torch.get("Tensor");
      known.functions = known.tensor ? DlpackFunctions::of(known.tensor) : nullptr;
    }
    return known;
  }
};

// Set `found` to the memory of a plain tensor, without the owner. Returns false if the tensor is not plain.
bool plain_tensor(PyObject* tensor, PyObject* strided, PlainArray& found) {
  const Names& names = Names::get();
  if (!names.is_cpu(tensor) || !names.has_layout(tensor, strided) || names.is_quantized(tensor) ||
      names.is_nested(tensor) || !names.is_contiguous(tensor)) {
    return false;
  }
  found.address = names.data_ptr(tensor);
  found.nbytes = names.nbytes(tensor);
  return true;
}

bool plain_ndarray(PyObject* array, bool writable, PlainArray& found) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    clear_refusal();
    return false;
  }
  found = {reinterpret_cast<uintptr_t>(buffer.buf), static_cast<uint64_t>(buffer.len), nb::borrow(array)};
  const bool objects = buffer.format && std::strchr(buffer.format, 'O');
  PyBuffer_Release(&buffer);
  return !objects;
}

// Whether a tensor's memory is not completely within its storage. This is the case after the storage was resized,
// because torch then does not change the shapes of its tensors.
bool storage_moved(PyObject* storage, uint64_t address, uint64_t nbytes) {
  const Names& names = Names::get();
  const uint64_t begin = names.data_ptr(storage);
  return address < begin || address + nbytes > begin + names.storage_nbytes(storage);
}

// Whether an array no longer has its memory at `address`. If the array exports no buffer, its present address is read
// from its array interface.
bool ndarray_moved(PyObject* array, uint64_t address, uint64_t nbytes) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array, &buffer, PyBUF_C_CONTIGUOUS) == 0) {
    const bool moved = reinterpret_cast<uintptr_t>(buffer.buf) != address || static_cast<uint64_t>(buffer.len) < nbytes;
    PyBuffer_Release(&buffer);
    return moved;
  }
  PyErr_Clear();
  return nb::cast<uint64_t>(nb::handle(array).attr("__array_interface__")["data"][0]) != address;
}

// Whether the owner, a torch storage or an ndarray, no longer has the memory.
bool is_moved(PyObject* owner, uint64_t address, uint64_t nbytes, const Types& types) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(owner));
  if (nbytes == 0) return false;
  if (type == types.storage) return storage_moved(owner, address, nbytes);
  return type == types.ndarray && ndarray_moved(owner, address, nbytes);
}

// Recognizes plain arrays.
class PlainArrays {
 public:
  explicit PlainArrays(bool writable) : writable_(writable) {}

  bool find(PyObject* array, PlainArray& found) {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(array));
    if (type == types_.ndarray) return plain_ndarray(array, writable_, found);
    if (type != types_.tensor) return false;
    const Names& names = Names::get();
    if (!is_shown(array, found) && !plain_tensor(array, types_.strided, found)) return false;
    if (found.address == 0 || found.nbytes == 0 || names.is_lazy(array)) return false;
    // The storage owns the memory. The tensor does not: it may be given other memory.
    found.owner = nb::steal(names.storage_of(array));
    return found.owner.is_valid() && !storage_moved(found.owner.ptr(), found.address, found.nbytes);
  }

 private:
  // Look up the memory of a contiguous tensor on the host through DLPack. Returns false if that is not possible.
  bool is_shown(PyObject* tensor, PlainArray& found) {
    nb::dlpack::dltensor shown;
    if (types_.functions == nullptr) return false;
    if (types_.functions->show(tensor, &shown) != 0) {
      clear_refusal();
      // DLPack does not support the tensor's dtype. It is not tried for the other arrays of this call, since an
      // exception for each array would cost too much.
      types_.functions = nullptr;
      return false;
    }
    if (shown.device.device_type != nb::device::cpu::value) return false;
    uint64_t count = 1;
    for (int32_t axis = shown.ndim; axis-- > 0;) {
      if (shown.shape[axis] != 1 && shown.strides[axis] != static_cast<int64_t>(count)) return false;
      count *= static_cast<uint64_t>(shown.shape[axis]);
    }
    found.address = reinterpret_cast<uintptr_t>(shown.data) + shown.byte_offset;
    found.nbytes = count * shown.dtype.bits * shown.dtype.lanes / 8;
    return true;
  }

  const bool writable_;
  Types types_ = Types::get();
};

// The destinations of one call. Blocks arrive in any order, so where two of them share memory, either could be
// overwritten.
class Destinations {
 public:
  void add(uintptr_t address, uint64_t nbytes, size_t index) {
    if (nbytes > 0) ranges_.push_back({address, nbytes, index});
  }

  // Throws ValueError if two of them share memory. `name` is that of the list in the message.
  void refuse_shared(const char* name) {
    const auto begins_before = [](const Range& one, const Range& other) { return one.begin < other.begin; };
    if (!std::is_sorted(ranges_.begin(), ranges_.end(), begins_before)) std::ranges::sort(ranges_, begins_before);
    for (size_t at = 1; at < ranges_.size(); ++at) {
      const Range& one = ranges_[at - 1];
      const Range& other = ranges_[at];
      if (other.begin - one.begin >= one.nbytes) continue;
      const auto place = [&](size_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; };
      const std::string message = place(std::max(one.index, other.index)) + ": shares memory with " +
                                  place(std::min(one.index, other.index)) + ", so one of them would get wrong bytes";
      throw nb::value_error(message.c_str());
    }
  }

 private:
  struct Range {
    uintptr_t begin;
    uint64_t nbytes;
    size_t index;
  };
  std::vector<Range> ranges_;
};

// Collect arrays, and integers (numbers of bytes of the file to pass over), as the memory of one transfer. For every
// array that is not plain, `check(index, array)` is called: it returns (address, nbytes, owner, location) or raises.
nb::typed<nb::object, PySegments> collect_segments(nb::sequence arrays, bool writable, nb::callable check) {
  PlainArrays plain(writable);
  PySegments segments;
  segments.pieces.reserve(nb::len(arrays));
  Destinations destinations;
  bool any_array = false;
  size_t index = 0;
  for (nb::handle array : arrays) {
    PlainArray found;
    std::optional<Location> location;
    const long long gap = writable && PyLong_CheckExact(array.ptr()) ? PyLong_AsLongLong(array.ptr()) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (gap >= 0) {
      found = {0, static_cast<uint64_t>(gap), nb::none()};
    } else if (!plain.find(array.ptr(), found)) {
      nb::object checked = call_python(check, index, array);
      found = {nb::cast<uintptr_t>(checked[0]), nb::cast<uint64_t>(checked[1]), nb::object(checked[2])};
      location = nb::cast<std::optional<Location>>(checked[3]);
      if (found.address == 0 && found.nbytes > 0) throw nb::value_error("array: one of the items has the address 0");
    }
    any_array = any_array || gap < 0;
    if (found.nbytes > static_cast<uint64_t>(INT64_MAX) - segments.nbytes) {
      throw nb::value_error("array: the items have more bytes than a file can hold");
    }
    segments.add({found.address, found.nbytes, location}, found.owner);
    if (writable && gap < 0) destinations.add(found.address, found.nbytes, index);
    ++index;
  }
  destinations.refuse_shared("array");
  if (index > 0 && !any_array)
    throw nb::type_error("array: all items are integers (bytes to pass over), so there is nothing to fill");
  return instance_of(std::move(segments));
}

// Find the memory of some rows of a table, which is stored in one file or in several, one behind the other. `numbers`
// is the address of the `count` row numbers. For each file that has some of the rows, return the file's index, the
// first of the rows in it, and the memory of the rows. `ends` has, for each file, the number of the first row behind
// it.
nb::typed<nb::list, std::tuple<size_t, uint64_t, PySegments>> rows_of_table(
    uintptr_t numbers, size_t count, bool is_unsigned, nb::typed<nb::sequence, uint64_t> ends_of_files,
    uint64_t row_nbytes, uint64_t stride_nbytes, uintptr_t address, nb::object owner, bool write) {
  const auto ends = numbers_of<uint64_t>(ends_of_files);
  const uint64_t row_count = ends.empty() ? 0 : ends.back();
  const std::span given(reinterpret_cast<const int64_t*>(numbers), count);
  OrderedRows ordered;
  std::vector<std::tuple<size_t, uint64_t, RowMemory>> parts;
  {
    WithoutGil release;
    ordered = order_rows(given, row_count, is_unsigned);
    auto begin = ordered.rows.begin();
    for (size_t file = 0; begin != ordered.rows.end(); ++file) {
      const auto end = std::lower_bound(begin, ordered.rows.end(), ends[file],
                                        [](const NumberedRow& one, uint64_t row) { return one.row < row; });
      if (begin == end) continue;
      const std::span rows(begin, end);
      parts.emplace_back(file, begin->row,
                         memory_of_rows(rows, {row_nbytes, stride_nbytes}, reinterpret_cast<char*>(address), write));
      begin = end;
    }
  }
  if (ordered.outside) {
    const int64_t number = given[*ordered.outside];
    const std::string text = is_unsigned ? std::to_string(static_cast<uint64_t>(number)) : std::to_string(number);
    throw nb::index_error(
        ("ids: " + text + " is outside of a table of " + std::to_string(row_count) + " rows").c_str());
  }
  nb::list found;
  for (auto& [file, first_row, memory] : parts) {
    PySegments segments;
    segments.pieces = std::move(memory.pieces);
    segments.copies = std::move(memory.copies);
    segments.nbytes = memory.nbytes;
    segments.array = Memory{address, count * row_nbytes};
    segments.owners.append(owner);
    found.append(nb::make_tuple(file, first_row, instance_of(std::move(segments))));
  }
  return found;
}

// The addresses, sizes and file offsets of all pieces that are not gaps.
std::tuple<std::vector<uintptr_t>, std::vector<uint64_t>, std::vector<uint64_t>> ranges(const PySegments& segments,
                                                                                        uint64_t offset) {
  std::tuple<std::vector<uintptr_t>, std::vector<uint64_t>, std::vector<uint64_t>> found;
  auto& [addresses, sizes, offsets] = found;
  for (const auto& piece : segments.pieces) {
    if (piece.address != 0) {
      addresses.push_back(piece.address);
      sizes.push_back(piece.nbytes);
      offsets.push_back(offset);
    }
    offset += piece.nbytes;
  }
  return found;
}

// Collect the items of a call with many transfers, each a tuple (path, array) or (path, array, offset). Return parallel
// lists: paths, addresses, sizes, offsets, owners, and locations; the last one is None if all memory is host memory.
// For every item whose array or offset is not plain, `check(index, item)` is called: it returns these six values or
// raises.
nb::tuple collect(nb::sequence items, bool writable, nb::callable check) {
  PlainArrays plain(writable);
  nb::list paths, addresses, sizes, offsets, owners, locations;
  bool any_elsewhere = false;
  Destinations destinations;
  size_t index = 0;
  for (nb::handle item : items) {
    PlainArray found;
    std::optional<uint64_t> offset = 0;
    const Py_ssize_t length = PyTuple_CheckExact(item.ptr()) ? PyTuple_Size(item.ptr()) : 0;
    const bool usable = (length == 2 || length == 3) && plain.find(PyTuple_GetItem(item.ptr(), 1), found);
    if (usable && length == 3) offset = plain_offset(PyTuple_GetItem(item.ptr(), 2), found.nbytes);
    if (usable && offset) {
      paths.append(nb::handle(PyTuple_GetItem(item.ptr(), 0)));
      addresses.append(found.address);
      sizes.append(found.nbytes);
      offsets.append(*offset);
      owners.append(found.owner);
      locations.append(nb::none());
    } else {
      nb::object checked = call_python(check, index, item);
      paths.append(checked[0]);
      addresses.append(checked[1]);
      sizes.append(checked[2]);
      offsets.append(checked[3]);
      owners.append(checked[4]);
      nb::object location = checked[5];
      any_elsewhere = any_elsewhere || !location.is_none();
      locations.append(location);
      if (writable) found = {nb::cast<uintptr_t>(checked[1]), nb::cast<uint64_t>(checked[2]), {}};
    }
    if (writable) destinations.add(found.address, found.nbytes, index);
    ++index;
  }
  destinations.refuse_shared("items");
  return nb::make_tuple(paths, addresses, sizes, offsets, owners, any_elsewhere ? nb::object(locations) : nb::none());
}

// The index of the first item whose owner no longer has the memory, or None.
std::optional<size_t> first_moved(nb::list addresses, nb::list sizes, nb::list owners) {
  const Types types = Types::get();
  for (size_t index = 0; index < owners.size(); ++index) {
    if (is_moved(nb::handle(owners[index]).ptr(), nb::cast<uint64_t>(addresses[index]),
                 nb::cast<uint64_t>(sizes[index]), types)) {
      return index;
    }
  }
  return std::nullopt;
}

bool any_moved(const PySegments& segments) {
  const Types types = Types::get();
  if (segments.of_rows()) {
    return is_moved(nb::handle(segments.owners[0]).ptr(), segments.array->address, segments.array->nbytes, types);
  }
  for (size_t index = 0; index < segments.pieces.size(); ++index) {
    const auto& piece = segments.pieces[index];
    if (is_moved(nb::handle(segments.owners[index]).ptr(), piece.address, piece.nbytes, types)) return true;
  }
  return false;
}

// For the garbage collector: an array may refer to a future that refers to the array's segments. During the transfer
// the core also holds a reference to the segments. No object that the collector visits has this reference, so the
// collector does not regard the segments as garbage.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PySegments>(self)->owners.ptr());
  return 0;
}

int clear(PyObject* self) {
  auto* segments = nb::inst_ptr<PySegments>(self);
  segments->pieces.clear();
  segments->copies.clear();
  segments->array.reset();
  nb::list owners;
  std::swap(owners, segments->owners);
  return 0;
}

PyType_Slot collected[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)}, {0, nullptr}};

}  // namespace

std::optional<PlainArray> plain_array(nb::handle array, bool writable) {
  PlainArray found;
  return PlainArrays(writable).find(array.ptr(), found) ? std::optional(std::move(found)) : std::nullopt;
}

std::optional<uint64_t> plain_offset(nb::handle offset, uint64_t nbytes) {
  const long long found = PyLong_CheckExact(offset.ptr()) ? PyLong_AsLongLong(offset.ptr()) : -1;
  if (PyErr_Occurred()) PyErr_Clear();
  if (found < 0 || nbytes > static_cast<uint64_t>(INT64_MAX - found)) return std::nullopt;
  return static_cast<uint64_t>(found);
}

bool is_moved(const PlainArray& array) {
  return is_moved(array.owner.ptr(), array.address, array.nbytes, Types::get());
}

void bind_collect(nb::module_& module) {
  nb::class_<PySegments>(module, "Segments", nb::type_slots(collected))
      .def_ro("nbytes", &PySegments::nbytes)
      .def("__len__", [](const PySegments& segments) { return segments.pieces.size(); })
      .def("moved", &any_moved)
      .def("ranges", &ranges, "offset"_a);
  module.def("collect_segments", &collect_segments, "arrays"_a, "writable"_a, "check"_a,
             nb::sig("def collect_segments(arrays: collections.abc.Sequence[typing.Any], writable: bool, "
                     "check: collections.abc.Callable[[int, typing.Any], "
                     "tuple[int, int, object, tuple[int, int] | None]]) -> Segments"));
  module.def("rows_of_table", &rows_of_table, "numbers"_a, "count"_a, "is_unsigned"_a, "ends"_a, "row_nbytes"_a,
             "stride_nbytes"_a, "address"_a, "owner"_a.none(), "write"_a);
  module.def("collect", &collect, "items"_a, "writable"_a, "check"_a,
             nb::sig("def collect(items: collections.abc.Sequence[typing.Any], writable: bool, check: "
                     "collections.abc.Callable[[int, typing.Any], "
                     "tuple[typing.Any, int, int, int, object, tuple[int, int] | None]]) -> tuple[list[typing.Any], "
                     "list[int], list[int], list[int], list[object], list[tuple[int, int] | None] | None]"));
  module.def("first_moved", &first_moved, "addresses"_a, "sizes"_a, "owners"_a,
             nb::sig("def first_moved(addresses: list[int], sizes: list[int], owners: list[object]) -> int | None"));
}

}  // namespace tensorferry
