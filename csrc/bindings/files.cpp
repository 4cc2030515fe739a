#include "bindings/files.h"

#include <nanobind/ndarray.h>

#include "bindings/python.h"
#include "file/mapping.h"

namespace tensorferry {
namespace {

DirectMode direct_mode_of(std::string_view name) {
  if (name == "auto") return DirectMode::automatic;
  return name == "always" ? DirectMode::always : DirectMode::never;
}

// Return the bytes of a path, which the file system needs. Bytes that are not valid text are surrogate escapes in the
// str.
std::string bytes_of(nb::handle path) {
  nb::object encoded = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
  if (!encoded.is_valid()) throw nb::python_error();
  return std::string(PyBytes_AsString(encoded.ptr()), static_cast<size_t>(PyBytes_Size(encoded.ptr())));
}

nb::typed<nb::object, PyFile> open_file(nb::str path, bool read, bool write, bool create, bool exclusive, bool truncate,
                                        const char* direct, bool replaced, bool for_request) {
  const std::string name = bytes_of(path);
  const OpenOptions options{read, write, create, exclusive, truncate, replaced, for_request, direct_mode_of(direct)};
  auto file = interruptibly("this file", [&] { return File::open(name, options); });
  if (!file) raise(file.fault());
  return instance_of(PyFile{*file});
}

nb::typed<nb::object, PyFile> file_from_descriptor(int descriptor, bool write, const char* direct, bool for_request) {
  const DirectMode mode = direct_mode_of(direct);
  auto file = interruptibly("this file", [&] { return File::from_descriptor(descriptor, write, mode, for_request); });
  if (!file) raise(file.fault());
  return instance_of(PyFile{*file});
}

// Refuse further transfers of the file, and wait until no transfer uses it any more. Returns false on timeout.
bool retire(const PyFile& file, double timeout_seconds) {
  return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return file.core->retire(slice); });
}

using Bytes = nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::device::cpu>;

// A mapping of files, and an object that is kept alive together with the mapping.
struct PyMapping {
  std::shared_ptr<Mapping> core;
  nb::object owner;
};

nb::typed<nb::object, PyMapping> map_pieces(nb::typed<nb::sequence, std::optional<PyFile>> files,
                                            nb::typed<nb::sequence, uint64_t> offsets,
                                            nb::typed<nb::sequence, uint64_t> nbytes, nb::object owner) {
  const size_t count = nb::len(files);
  if (count == 0 || nb::len(offsets) != count || nb::len(nbytes) != count) {
    throw nb::value_error("files, offsets and nbytes: they must have the same length, at least one");
  }
  std::vector<Mapping::Piece> pieces;
  for (size_t index = 0; index < count; ++index) {
    const auto* const file = nb::cast<const PyFile*>(files[index]);
    pieces.push_back(
        {file ? file->core : nullptr, nb::cast<uint64_t>(offsets[index]), nb::cast<uint64_t>(nbytes[index])});
  }
  auto mapping = [&] {
    WithoutGil release;
    return Mapping::create(pieces);
  }();
  if (!mapping) raise(mapping.fault());
  return instance_of(PyMapping{std::shared_ptr<Mapping>(std::move(*mapping)), std::move(owner)});
}

// A view of some bytes of a mapping. If `alone`, no other view has these bytes, so their pages are released with this
// one.
struct MappedBytes {
  PyMapping of;
  size_t begin;
  size_t end;
  bool alone;

  ~MappedBytes() {
    // If this is the last view, the mapping is destroyed with it, which releases all pages.
    if (alone && of.core.use_count() > 1) of.core->forget(begin, end);
  }
};

Bytes mapped_bytes(const PyMapping& self, size_t begin, size_t nbytes, bool alone) {
  if (begin > self.core->nbytes() || nbytes > self.core->nbytes() - begin) {
    throw nb::value_error("begin, nbytes: the range is not within the mapping");
  }
  nb::capsule keeper(new MappedBytes{self, begin, begin + nbytes, alone},
                     [](void* kept) noexcept { delete static_cast<MappedBytes*>(kept); });
  return Bytes(self.core->data() + begin, {nbytes}, keeper);
}

std::optional<std::pair<uint64_t, uint64_t>> residency(const PyFile& file, uint64_t offset, uint64_t nbytes) {
  const auto lease = lease_of(file);
  WithoutGil release;
  const auto found = file.core->residency(offset, nbytes);
  if (!found) return std::nullopt;
  return std::pair(found->cached_pages, found->total_pages);
}

// Apply an action to a file, which stays open meanwhile, and raise the fault that the action returns, if any.
template <typename Action>
void act_on(const PyFile& file, Action action) {
  const auto lease = lease_of(file);
  raise_fault_of([&] { return action(*file.core); });
}

}  // namespace

nb::object path_of(const PyFile& file) {
  const std::string& bytes = file.core->path();
  nb::object path = nb::steal(PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
  if (!path.is_valid()) throw nb::python_error();
  return path;
}

File::Lease lease_of(const PyFile& file) {
  auto lease = file.core->lease();
  if (!lease) throw nb::value_error("this file is closed");
  return lease;
}

void bind_files(nb::module_& module) {
  nb::class_<PyFile>(module, "File")
      .def_prop_ro("path", path_of, nb::sig("def path(self) -> str"))
      .def_prop_ro("device", [](const PyFile& file) { return file.core->file_system(); })
      .def_prop_ro("identity", [](const PyFile& file) { return file.core->identity(); })
      .def_prop_ro("direct", [](const PyFile& file) { return file.core->direct(); })
      .def_prop_ro("regular", [](const PyFile& file) { return file.core->regular(); })
      .def_prop_ro("readable", [](const PyFile& file) { return file.core->readable(); })
      .def_prop_ro("writable", [](const PyFile& file) { return file.core->writable(); })
      .def_prop_ro("descriptor",
                   [](const PyFile& file) {
                     (void)lease_of(file);
                     return file.core->descriptor();
                   })
      .def("size",
           [](const PyFile& file) {
             const auto lease = lease_of(file);
             const auto size = interruptibly("this file", [&] { return file.core->size(); });
             if (!size) raise(size.fault());
             return *size;
           })
      .def("sync",
           [](const PyFile& file) {
             if (file.core->fork_generation() != fork_generation()) raise_forked("this file");
             act_on(file, [](File& core) { return core.sync(); });
           })
      .def(
          "truncate",
          [](const PyFile& file, uint64_t size) { act_on(file, [&](File& core) { return core.truncate(size); }); },
          "size"_a)
      .def(
          "preallocate",
          [](const PyFile& file, uint64_t offset, uint64_t nbytes) {
            act_on(file, [&](File& core) { return core.preallocate(offset, nbytes); });
          },
          "offset"_a, "nbytes"_a)
      .def("residency", &residency, "offset"_a, "nbytes"_a)
      .def("retire", &retire, "timeout_seconds"_a)
      .def("close", [](const PyFile& file) { raise_fault_of([&] { return file.core->close(); }); });

  nb::class_<PyMapping>(module, "Mapping").def("bytes", &mapped_bytes, "begin"_a, "nbytes"_a, "alone"_a = false);

  module.def("open_file", &open_file, "path"_a, "read"_a, "write"_a, "create"_a, "exclusive"_a, "truncate"_a,
             "direct"_a, "replaced"_a = false, "for_request"_a = false);
  module.def("file_from_descriptor", &file_from_descriptor, "descriptor"_a, "write"_a, "direct"_a,
             "for_request"_a = false);
  module.def("map_pieces", &map_pieces, "files"_a, "offsets"_a, "nbytes"_a, "owner"_a.none() = nb::none());
  module.def("open_descriptors", &File::open_descriptors);
  module.def("files_of_requests", [] {
    const auto [open, given_back] = File::of_requests();
    return std::pair(open, given_back);
  });
}

}  // namespace tensorferry
