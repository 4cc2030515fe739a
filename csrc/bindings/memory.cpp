#include "bindings/memory.h"

#include <nanobind/ndarray.h>

#include "base/limits.h"
#include "bindings/python.h"
#include "device/cufile.h"
#include "device/gpu.h"
#include "memory/allocation.h"
#include "memory/bounce_pool.h"

namespace tensorferry {
namespace {

// Allocate page-aligned memory. Returns a uint8 array that owns the memory (other libraries can import it through
// DLPack and the buffer protocol), and whether the memory is locked. If `ordinal` is that of a GPU and not negative,
// the memory is also registered with CUDA, if CUDA permits that.
std::pair<nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>, bool> allocate(size_t nbytes, bool lock,
                                                                                            int ordinal) {
  auto allocation = [&] {
    WithoutGil release;
    auto made = Allocation::create(nbytes, lock ? Locking::wanted : Locking::none);
    if (made && ordinal >= 0) {
      // A failure is ignored: copies from memory that is not registered are slower, but correct.
      if (auto gpu = cuda::Gpu::of(ordinal)) (void)made->register_with(**gpu);
    }
    return made;
  }();
  if (!allocation) {
    const std::string why = why_no_memory(nbytes);
    PyErr_Format(PyExc_MemoryError, "cannot allocate %zu bytes%s%s", nbytes, why.empty() ? "" : "; ", why.c_str());
    throw nb::python_error();
  }
  const bool locked = allocation->locked();
  char* data = allocation->data();
  nb::capsule owner(new std::shared_ptr<Allocation>(std::move(allocation)),
                    [](void* kept) noexcept { delete static_cast<std::shared_ptr<Allocation>*>(kept); });
  return {nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>(data, {nbytes}, owner), locked};
}

bool is_locked(uintptr_t address, size_t nbytes) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), nbytes);
  return allocation && allocation->locked();
}

bool is_lent(uintptr_t address, size_t nbytes) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), nbytes);
  return allocation && allocation->lent();
}

// Unlock the allocation that begins at `address`. Returns false if there is none, if it was allocated without `lock`,
// or if it was given back before.
bool give_back(uintptr_t address) {
  auto allocation = Allocation::containing(reinterpret_cast<const void*>(address), 1);
  if (!allocation || reinterpret_cast<uintptr_t>(allocation->data()) != address) return false;
  WithoutGil release;
  return allocation->give_back();
}

std::optional<std::string> cuda_refusal() {
  WithoutGil release;
  std::string reason;
  return cuda::driver(&reason) ? std::nullopt : std::optional(reason);
}

int device_of(uintptr_t address) {
  auto ordinal = cuda::device_of(address);
  if (!ordinal) raise(ordinal.fault());
  if (!*ordinal) throw nb::value_error("address: not GPU memory");
  return **ordinal;
}

bool is_capturing(int device, uintptr_t stream) {
  return cuda::is_capturing(device, reinterpret_cast<cuda::StreamHandle>(stream));
}

std::tuple<std::optional<std::string>, bool, std::string> open_cufile(nb::typed<nb::sequence, std::string> given,
                                                                      int device) {
  std::vector<std::string> folders;
  for (nb::handle folder : given) folders.emplace_back(nb::cast<const char*>(folder));
  WithoutGil release;
  const cufile::Status status = cufile::open(folders, device);
  return {status.refusal.empty() ? std::nullopt : std::optional(status.refusal), status.native, status.detail};
}

void register_gpu_buffer(uintptr_t address, size_t nbytes, int device) {
  raise_fault_of([&] { return cufile::register_buffer(address, nbytes, device); });
}

bool deregister_gpu_buffer(uintptr_t address) {
  WithoutGil release;
  return cufile::deregister_buffer(address);
}

// The address and size of a C-contiguous buffer; None if the object has no such buffer (or no writable one). The
// address stays valid while the caller keeps an export, such as a memoryview, alive.
std::optional<std::pair<uintptr_t, uint64_t>> buffer_memory(nb::handle exporter, bool writable) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(exporter.ptr(), &buffer, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::pair found{reinterpret_cast<uintptr_t>(buffer.buf), static_cast<uint64_t>(buffer.len)};
  PyBuffer_Release(&buffer);
  return found;
}

// Return the memory of an array, found through DLPack: its address, its size, whether it is writable, whether it is
// C-contiguous, and an object that keeps it alive. That object is needed because the exporter may have created the
// memory for this call only.
std::tuple<uintptr_t, uint64_t, bool, bool, nb::capsule> dlpack_memory(nb::handle array) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(array, view)) throw nb::type_error("cannot import the array through DLPack");
  nb::ndarray<> writable;
  // If the exporter returns different memory at each call, it returns copies. Data that is read into a copy would not
  // reach the array, so the memory does not count as writable.
  const bool may_write = nb::try_cast(array, writable) && writable.data() == view.data();
  bool contiguous = true;
  int64_t expected = 1;
  for (size_t axis = view.ndim(); axis-- > 0;) {
    if (view.shape(axis) != 1 && view.stride(axis) != expected) contiguous = false;
    expected *= static_cast<int64_t>(view.shape(axis));
  }
  nb::capsule keeper(new nb::ndarray<nb::ro>(view),
                     [](void* kept) noexcept { delete static_cast<nb::ndarray<nb::ro>*>(kept); });
  return {reinterpret_cast<uintptr_t>(view.data()), view.nbytes(), may_write, contiguous || view.size() == 0, keeper};
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def("allocate", &allocate, "nbytes"_a, "lock"_a, "gpu"_a = -1);
  module.def("is_locked", &is_locked, "address"_a, "nbytes"_a);
  module.def("is_lent", &is_lent, "address"_a, "nbytes"_a);
  module.def("give_back", &give_back, "address"_a);
  module.def("buffer_memory", &buffer_memory, "exporter"_a, "writable"_a);
  module.def("dlpack_memory", &dlpack_memory, "array"_a);
  module.def("cuda_refusal", &cuda_refusal);
  module.def("cuda_in_use", &cuda::driver_in_use);
  module.def("device_of", &device_of, "address"_a);
  module.def("is_capturing", &is_capturing, "device"_a, "stream"_a);
  module.def("open_cufile", &open_cufile, "folders"_a, "device"_a = 0);
  module.def("register_gpu_buffer", &register_gpu_buffer, "address"_a, "nbytes"_a, "device"_a);
  module.def("deregister_gpu_buffer", &deregister_gpu_buffer, "address"_a);
  module.def("pinned_pool_nbytes", &BouncePool::pinned_pool_nbytes);
  module.def("bounce_pool_nbytes", &BouncePool::process_pool_nbytes);
  module.def("set_bounce_pool_nbytes", &BouncePool::set_process_pool_nbytes, "nbytes"_a);
  module.attr("MIN_BOUNCE_POOL_NBYTES") = BouncePool::min_nbytes;
}

}  // namespace tensorferry
