// Streams, and the objects that keep appended memory valid.
#include "transfer/stream.h"

#include <nanobind/stl/string_view.h>

#include <deque>

#include "base/reserve.h"
#include "bindings/scheduler.h"
#include "bindings/stream.h"

namespace tensorferry {

// The Python form of a Made::Field: (kind, position, segment, begin, nbytes, crcs, fold).
using FieldTuple = std::tuple<std::string_view, uint64_t, uint64_t, uint64_t, uint64_t,
                              nb::typed<nb::sequence, int64_t>, std::tuple<uint64_t, uint32_t, uint32_t>>;

class PyStream {
 public:
  PyStream(PyScheduler& scheduler, const PyFile& file, const StreamOptions& options)
      : scheduler_(scheduler.core_),
        core_(std::make_shared<Stream>(scheduler.core_, file.core, options)),
        left_(scheduler.owners_) {
    scheduler.check_usable();
    (void)lease_of(file);
    // Ragged ends need this descriptor. It is opened now, because here the caller can still wait for a free descriptor.
    auto descriptor = interruptibly("this stream", [&] { return file.core->buffered_descriptor(); });
    if (!descriptor) raise(descriptor.fault());
  }

  ~PyStream() { let_go(); }

  // Append the pieces of a Segments object. The stream keeps a reference to the object until the pieces have been
  // copied and take_copied() has returned it.
  void append(PyScheduler& scheduler, nb::handle segments) {
    const auto& given = nb::cast<const PySegments&>(segments);
    check_process();
    Gates gates;
    std::vector<std::shared_ptr<cuda::Gate>> passed;
    bool on_gpu = false;
    for (const auto& piece : given.pieces) {
      auto gate = gates.of(piece.location);
      if (!gate) PyScheduler::refuse(gate.fault());
      on_gpu = on_gpu || *gate;
      passed.push_back(std::move(*gate));
    }
    PyScheduler::Admitted admitted(scheduler, core_->place());
    if (on_gpu) {
      if (auto fault = core_->prepare_for_gpus()) PyScheduler::refuse(*fault);
    }
    const UsesReserve reserve;  // the stream gets all pieces, and keeps their owner
    bool taken = true;
    for (size_t index = 0; taken && index < given.pieces.size(); ++index) {
      const auto& piece = given.pieces[index];
      taken = core_->append(reinterpret_cast<char*>(piece.address), piece.nbytes, std::move(passed[index]));
    }
    owners_.push_back({core_->segment_count(), nb::borrow(segments)});
    admitted.handed_over();
    core_->begin_job();
    if (!taken) raise_ended();
  }

  void append_with_fields(PyScheduler& scheduler, nb::bytes bytes, nb::typed<nb::sequence, FieldTuple> fields) {
    check_process();
    Made made{.bytes = std::vector<char>(bytes.c_str(), bytes.c_str() + bytes.size()), .fields = {}};
    for (nb::handle field : fields) {
      const auto [kind, position, segment, begin, nbytes, crcs, fold] = nb::cast<FieldTuple>(field);
      const auto of = kind == "segment" ? Made::Field::Kind::segment
                      : kind == "own"   ? Made::Field::Kind::own
                                        : Made::Field::Kind::folded;
      const auto [added, left, right] = fold;
      made.fields.push_back({of, position, segment, begin, nbytes, numbers_of<int64_t>(crcs), {added, left, right}});
    }
    PyScheduler::Admitted admitted(scheduler, core_->place());
    if (!core_->append(std::move(made))) {
      if (core_->has_ended()) raise_ended();
      throw nb::value_error("fields: one does not fit, or refers to a segment that is not an earlier one");
    }
    admitted.handed_over();
    core_->begin_job();
  }

  void end(PyScheduler& scheduler, bool truncate, bool sync, bool sync_names) {
    check_process();
    PyScheduler::Admitted admitted(scheduler, core_->place());
    admitted.handed_over();
    if (!core_->end(RequestOptions{.write = true, .truncate = truncate, .sync = sync, .sync_names = sync_names})) {
      raise_ended();
    }
  }

  // Wait until at most this many bytes are left to be copied.
  void wait_for_copies(PyScheduler& scheduler, uint64_t uncopied_nbytes) const {
    check_process();
    if (core_->wait_until_uncopied_is(uncopied_nbytes, milliseconds(0))) return;  // without releasing the GIL
    PyScheduler::Admitted admitted(scheduler, core_->place());
    admitted.handed_over();
    core_->begin_job(true);
    (void)wait_interruptibly(std::nullopt,
                             [&](milliseconds slice) { return core_->wait_until_uncopied_is(uncopied_nbytes, slice); });
  }

  // Wait until everything has been written, or the stream has failed or was aborted.
  bool wait(std::optional<double> timeout_seconds) const {
    check_process();
    return wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return core_->wait_until_ended(slice); });
  }

  // Return the arguments of append() that have been copied completely and were not returned before.
  nb::list take_copied() {
    nb::list copied;
    const uint64_t count = core_->copied_segments();
    while (!owners_.empty() && owners_.front().end <= count) {
      copied.append(std::move(owners_.front().segments));
      owners_.pop_front();
    }
    return copied;
  }

  // Stop copying and release the appended memory. Returns false if a copy is still in progress after the patience; the
  // memory is then kept until that copy has ended.
  bool abort(double patience_seconds) {
    check_process();
    const bool over = wait_interruptibly(patience_seconds, [&](milliseconds slice) { return core_->abort(slice); });
    let_go();
    return over;
  }

  nb::object exception() const {
    const auto fault = core_->fault();
    return fault ? exception_of(*fault) : nb::none();
  }

  // For the garbage collector.
  int traverse(visitproc visit, void* arg) const {
    for (const auto& owner : owners_) Py_VISIT(owner.segments.ptr());
    return 0;
  }
  // Release the appended memory. It must not wait, because the garbage collector calls it.
  void let_go() {
    const UsesReserve reserve;
    std::deque<Owner> dropped;  // destroyed at the end: the destructor of an owner may call this stream again
    dropped.swap(owners_);
    if (core_->fork_generation() != fork_generation()) {
      new std::shared_ptr<Stream>(core_);  // never destroyed: a thread of the parent may have held its mutex
    } else if (!core_->abort(milliseconds(0)) && !dropped.empty()) {
      const uint64_t id = scheduler_->next_request_id();
      for (auto& owner : dropped) left_->keep(id, std::move(owner.segments));
      core_->tell_when_aborted(id);
    }
  }

  const Stream& core() const { return *core_; }

 private:
  // An argument of append().
  struct Owner {
    uint64_t end;  // the number of the stream's segments after that append()
    nb::object segments;
  };

  // Another thread ended the stream while this one was in a call.
  [[noreturn]] static void raise_ended() { throw nb::value_error("the stream has ended"); }

  void check_process() const {
    if (core_->fork_generation() != fork_generation()) raise_forked("this stream");
  }

  std::shared_ptr<Scheduler> scheduler_;
  std::shared_ptr<Stream> core_;
  const std::shared_ptr<Owners> left_;  // keeps memory that is still being copied after let_go()
  std::deque<Owner> owners_;
};

namespace {

int traverse_stream(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PyStream>(self)->traverse(visit, arg) : 0;
}

int clear_stream(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<PyStream>(self)->let_go();
  return 0;
}

PyType_Slot stream_slots[] = {constructed[0],
                              {Py_tp_traverse, reinterpret_cast<void*>(&traverse_stream)},
                              {Py_tp_clear, reinterpret_cast<void*>(&clear_stream)},
                              {0, nullptr}};

}  // namespace

void bind_streams(nb::module_& module) {
  nb::class_<PyStream>(module, "Stream", nb::type_slots(stream_slots))
      .def(
          "__init__",
          [](PyStream* self, PyScheduler& scheduler, const PyFile& file, uint64_t offset, uint64_t chunk_nbytes,
             bool of_segments, bool background, uint64_t expected_nbytes) {
            new (self) PyStream(scheduler, file, {offset, chunk_nbytes, of_segments, background, expected_nbytes});
          },
          "scheduler"_a, "file"_a, "offset"_a, "chunk_nbytes"_a, "of_segments"_a, "background"_a, "expected_nbytes"_a)
      .def("append", &PyStream::append, "scheduler"_a, "segments"_a,
           nb::sig("def append(self, scheduler: Scheduler, segments: Segments) -> None"))
      .def("append_with_fields", &PyStream::append_with_fields, "scheduler"_a, "data"_a, "fields"_a)
      .def("end", &PyStream::end, "scheduler"_a, "truncate"_a, "sync"_a, "sync_names"_a)
      .def("wait_for_copies", &PyStream::wait_for_copies, "scheduler"_a, "uncopied_nbytes"_a)
      .def("wait", &PyStream::wait, "timeout_seconds"_a.none())
      .def("take_copied", &PyStream::take_copied, nb::sig("def take_copied(self) -> list[Segments]"))
      .def("abort", &PyStream::abort, "patience_seconds"_a)
      .def("exception", &PyStream::exception, nb::sig("def exception(self) -> tensorferry.errors.StorageError | None"))
      .def_prop_ro("nbytes", [](const PyStream& stream) { return stream.core().nbytes(); })
      .def_prop_ro("segment_count", [](const PyStream& stream) { return stream.core().segment_count(); })
      .def_prop_ro("chunks", [](const PyStream& stream) { return stream.core().chunk_crcs(); })
      .def_prop_ro("segments", [](const PyStream& stream) { return stream.core().segment_crcs(); });
}

}  // namespace tensorferry
