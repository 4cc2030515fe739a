"""Streams: sequential writes of arrays to a file, one array at a time, with a bounded amount of memory in flight.

The core copies each array into buffers, and writes the buffers. Each appended array is a segment, which may get a
CRC-32.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import MAX_FILE_NBYTES, one_of
from tensorferry.base.reprs import safe_repr
from tensorferry.errors import memory_moved
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import collect_segments, has_moved, is_iterable_of_arrays
from tensorferry.transfer.checksums import checked
from tensorferry.transfer.runtime import (
    wait_while_progressing,
    warn_of_abandoned_io,
    with_descriptors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorferry.transfer.checksums import Checksums

# append() returns with at most this many bytes still to be copied: the core copies them while Python prepares the next
# array.
MAX_UNCOPIED_NBYTES = 8 << 20

# The core's name of each kind of field, and the constants with which it folds CRC-32s into one number: the seed and
# the two shifts of c10::hash_combine.
_KINDS = {"segment": "segment", "own": "own", "torch_id": "folded"}
_TORCH_FOLD = (0x9E3779B9, 6, 2)

# append() passes several arrays to the core in portions: at most _PORTION_COUNT arrays in one call of the core. An
# iterator may create its arrays on demand, so a portion from an iterator also ends once it has _PORTION_NBYTES bytes or
# more.
_PORTION_COUNT, _PORTION_NBYTES = 1024, 4 << 20


class Field(NamedTuple):
    """A place in the bytes of :meth:`Stream.append_with_fields` that gets a checksum once earlier arrays are copied.

    Attributes
    ----------
    kind : str
        "segment": the CRC-32 of an earlier segment. "own": the CRC-32 of a range of these bytes, after the fields
        before this one have been filled in. Both are 32-bit little-endian. "torch_id": torch's hash of many CRC-32s
        as 20 decimal digits (``c10::hash_combine``, caffe2/serialize/inline_container.cc).
    position : int
        The position of the field in the bytes.
    segment : int
        For "segment": the number of the segment. The first segment of a stream is 0.
    begin, nbytes : int
        For "own": the range of the bytes.
    crcs : sequence of int
        For "torch_id": the CRC-32s. A negative value ``~number`` stands for the CRC-32 of segment ``number``.
    """

    kind: str
    position: int
    segment: int = 0
    begin: int = 0
    nbytes: int = 0
    crcs: Sequence[int] = ()


class Stream:
    """A sequential writer of consecutive arrays to a file, made by :meth:`tensorferry.File.stream`.

    Appended arrays are copied into a few buffers and released, while earlier buffers are being written. Only one
    thread at a time may use a stream. The end of a ``with`` block finishes the stream, or aborts it if the block raises
    an exception.

    Notes
    -----
    All streams of a process to one device share 56 MiB of buffers, and each stream has one more buffer. In addition,
    appended arrays stay referenced until they have been copied: :meth:`append` returns when 8 MiB or less remain to be
    copied, unless the caller keeps the arrays anyway (``kept``).
    """

    def __init__(
        self,
        scheduler: _core.Scheduler,
        file: _core.File,
        offset: int,
        *,
        checksums: Checksums | None,
        background: bool,
        nbytes_reserved: int,
    ) -> None:
        self._scheduler = scheduler
        self._path = file.path
        self._offset = offset

        def make(chunk_nbytes: int, of_segments: bool) -> _core.Stream:
            if nbytes_reserved:
                file.preallocate(offset, nbytes_reserved)
            expected_nbytes = nbytes_reserved or MAX_FILE_NBYTES
            how = chunk_nbytes, of_segments, background, expected_nbytes
            return with_descriptors(
                scheduler, lambda: _core.Stream(scheduler, file, offset, *how), opens=False
            )

        self._core = (
            make(0, False) if checksums is None else checked(checksums)._attach_stream(make)
        )
        self._open = True
        # begin_finish() has been called, and wait() has not yet returned.
        self._finish_pending = False
        self._failure: Exception | None = None  # the reason for an abort

    @property
    def nbytes(self) -> int:
        """The number of bytes appended so far."""
        return self._core.nbytes

    @property
    def segment_count(self) -> int:
        """The number of arrays appended so far, which is the segment number of the next one."""
        return self._core.segment_count

    def append(self, array: Any, *, kept: bool = False) -> None:
        """Append an array, or several consecutive ones.

        Parameters
        ----------
        array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
            As for :func:`tensorferry.write`, or any iterable of such arrays. A generator is advanced only when the
            stream needs the next array. Do not change an array until it has been copied: see
            :meth:`wait_until_copied`.
        kept : bool
            The caller keeps the arrays in memory anyway: do not wait for copies before returning.

        Raises
        ------
        ValueError, TypeError
            An array is invalid (of several, some that precede it may have been appended), or the stream has ended.
        StorageError
            Bytes appended earlier could not be written. The stream writes nothing more.
        """
        if not isinstance(array, (list, tuple, Iterator)):
            try:
                segments = collect_segments([array], writable=False)
            except TypeError:
                if not is_iterable_of_arrays(array):
                    raise
            else:
                self._append(segments, kept)
                return
        for portion in _portions(array):
            self._append(collect_segments(portion, writable=False), kept)

    def append_with_fields(self, data: bytes, fields: Sequence[Field] = ()) -> None:
        """Append bytes that contain checksums of earlier segments, as the headers and directories of archives do.

        Raises
        ------
        ValueError
            A field is outside of ``data``, or refers to a segment that is not before it, or the stream does not compute
            the CRC-32s of segments.
        """
        self._check_open()
        for field in fields:
            one_of(field.kind, "kind", _KINDS)
        core_fields = [(_KINDS[field.kind], *field[1:], _TORCH_FOLD) for field in fields]
        self._core.append_with_fields(self._scheduler, data, core_fields)
        if len(data) > MAX_UNCOPIED_NBYTES:
            self._core.wait_for_copies(self._scheduler, MAX_UNCOPIED_NBYTES)
        self._collect()

    def wait_until_copied(self) -> None:
        """Return when all appended arrays have been copied into the stream's buffers. The caller may then change them.

        Raises
        ------
        StorageError
            Some bytes could not be written.
        """
        self._check_open()
        self._core.wait_for_copies(self._scheduler, 0)
        self._collect()

    def finish(self, *, truncate: bool = False, sync: bool = False) -> int:
        """Write the remaining bytes, and return the number of bytes in the stream.

        Parameters
        ----------
        truncate : bool
            Truncate the file after the last byte.
        sync : bool
            Return only when data and size are durable, as for :func:`tensorferry.write`.

        Raises
        ------
        StorageError
            Not all bytes could be written.
        """
        self.begin_finish(truncate=truncate, sync=sync)
        return self.wait()

    def begin_finish(
        self, *, truncate: bool = False, sync: bool = False, sync_names: bool = True
    ) -> None:
        """Start to finish the stream, as :meth:`finish` does, without waiting; then call :meth:`wait`.

        With ``sync_names=False`` the caller makes the file's name durable.
        """
        self._check_open()
        # Set before the call of the core: if a KeyboardInterrupt arrives between the two, __exit__ still waits.
        self._finish_pending = True
        self._core.end(self._scheduler, truncate, sync, sync_names)
        self._open = False
        if _core.is_exiting():  # nothing waits later
            self.wait()

    def wait(self) -> int:
        """Wait for the completion of :meth:`begin_finish`, and return the number of bytes in the stream."""
        if self._open:
            raise ValueError(f"begin_finish() has not been called for the stream to {self._path!r}")
        if self._failure is not None:
            raise self._failure
        self._core.wait(None)
        self._finish_pending = False
        self._collect()
        return self._core.nbytes

    def abort(self) -> None:
        """Cancel all writes that have not started, and release all arrays. The file then has some of the bytes.

        If no byte moves for 60 seconds, stop waiting and emit a ``RuntimeWarning``; arrays in use stay referenced.
        """
        self._abort_with(ValueError(f"the stream to {self._path!r} was aborted"))
        if not wait_while_progressing(self._core.wait, self._scheduler):
            warn_of_abandoned_io(f"the stream to {self._path!r}")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._open and not self._finish_pending:
            return
        try:
            if kind is None:
                (self.finish if self._open else self.wait)()
                return
        except BaseException:  # also a KeyboardInterrupt: the arrays are released in any case
            self.abort()
            raise
        self.abort()

    @safe_repr
    def __repr__(self) -> str:
        state = "open" if self._open else "ended"
        where = f"{self._path!r} from offset {self._offset}"
        return f"<tensorferry.Stream to {where}: {self.nbytes} bytes appended, {state}>"

    def __del__(self) -> None:
        unfinished = getattr(self, "_open", False) or getattr(self, "_finish_pending", False)
        if unfinished and self._scheduler.belongs_to_this_process():
            warnings.warn(
                f"the stream to {self._path!r} was never finished and is aborted",
                ResourceWarning,
                2,
                self,
            )

    def _append(self, segments: _core.Segments, kept: bool) -> None:
        self._check_open()
        self._core.append(self._scheduler, segments)
        # No stream has more bytes than MAX_FILE_NBYTES, so with `kept` this does not wait.
        self._core.wait_for_copies(
            self._scheduler, MAX_FILE_NBYTES if kept else MAX_UNCOPIED_NBYTES
        )
        self._collect()

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"the stream to {self._path!r} has ended")

    def _collect(self) -> None:
        """Release the arrays that have been copied, and raise the stream's error if there is one."""
        for segments in self._core.take_copied():
            if has_moved((segments, segments.nbytes, None, None)):
                self._abort_with(memory_moved(self._path, self._offset, segments.nbytes))
                assert self._failure is not None
                raise self._failure
        failure = self._core.exception()
        if failure is not None:
            self._open = self._finish_pending = False
            raise failure

    def _abort_with(self, why: Exception) -> None:
        self._open = self._finish_pending = False
        self._failure = self._failure or why
        if not self._core.abort(runtime.CLOSE_PATIENCE_SECONDS):
            warn_of_abandoned_io(f"the copying of arrays for {self._path!r}")


def _portions(arrays: Iterable[Any]) -> Iterator[list[Any]]:
    if not isinstance(arrays, Iterator):
        iterator = iter(arrays)
        while portion := list(itertools.islice(iterator, _PORTION_COUNT)):
            yield portion
        return
    portion, nbytes = [], 0
    for array in arrays:
        portion.append(array)
        nbytes += getattr(array, "nbytes", _PORTION_NBYTES)
        # Otherwise the loop variable would keep the last array alive after it has been copied.
        del array
        if nbytes >= _PORTION_NBYTES or len(portion) == _PORTION_COUNT:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion
