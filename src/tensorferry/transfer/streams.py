"""Streams: a file written in order from arrays that come one by one, with bounded memory in flight."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import MAX_FILE_NBYTES, one_of
from tensorferry.base.reprs import once_made
from tensorferry.errors import memory_moved
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import collect_segments, is_several, moved
from tensorferry.transfer.runtime import patiently, warn_of_left_behind, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorferry.transfer.checksums import Checksums

# Still to be copied when append() returns, at most. The core has that to do while Python's interpreter is busy.
MAX_UNCOPIED_NBYTES = 8 << 20

# What kinds of fields are for the core, and how it makes one number of CRC-32s: c10::hash_combine.
_KINDS = {"segment": "segment", "own": "own", "torch_id": "folded"}
_TORCH_FOLD = (0x9E3779B9, 6, 2)

# Arrays handed to the core at a time.
_PORTION_COUNT, _PORTION_NBYTES = 1024, 4 << 20


class Field(NamedTuple):
    """A number that is put into bytes of :meth:`Stream.append_made`, when all before them has been copied.

    Attributes
    ----------
    kind : str
        "segment": the CRC-32 of an earlier segment; "own": that of some of these bytes, with the fields before this one
        in their places; both are 32 bits, little-endian. "torch_id": 20 decimal digits, torch's hash of many CRC-32s
        (``c10::hash_combine``, caffe2/serialize/inline_container.cc).
    position : int
        Where in the bytes it is put.
    segment : int
        The number of the segment, for the first kind. The first one of a stream is 0.
    begin, nbytes : int
        Which of the bytes, for the second kind.
    crcs : sequence of int
        For the third kind; negative ones are ``~number`` of the segment whose CRC-32 it is.
    """

    kind: str
    position: int
    segment: int = 0
    begin: int = 0
    nbytes: int = 0
    crcs: Sequence[int] = ()


class Stream:
    """Arrays that become a range of a file, one after the other; made by :meth:`tensorferry.File.stream`.

    What is appended is copied into a few buffers and let go of then, while others are written. A stream is used by one
    thread at a time. Leaving a ``with`` block finishes it, or gives it up where an exception is on its way.

    Notes
    -----
    All streams of a process to one device take 56 MiB of buffers, and one more for each stream. On top come the arrays
    that have been appended and are still to be copied: :meth:`append` returns when that is 8 MiB or less, unless they
    are kept in memory anyway.
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

        self._core = make(0, False) if checksums is None else checksums._of_stream(make)
        self._open = True
        self._unheard = False  # an end has been begun, and nobody has waited for it
        self._failure: Exception | None = None  # why it was given up

    @property
    def nbytes(self) -> int:
        """How many bytes have been appended."""
        return self._core.nbytes

    @property
    def segment_count(self) -> int:
        """How many arrays have been appended: the number that the next one will have."""
        return self._core.segment_count

    def append(self, array: Any, *, kept: bool = False) -> None:
        """Write an array behind what was appended before, or several, one after the other.

        Parameters
        ----------
        array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
            As for :func:`tensorferry.write`; or any iterable of such. Of a generator each one is asked for when it is
            needed. They must not change until they have been copied: see :meth:`wait_until_copied`.
        kept : bool
            Whether the arrays stay in memory anyway: then it does not wait for copies before it returns.

        Raises
        ------
        ValueError, TypeError
            An array is not usable; of several, some of those before it may have been appended. Or the stream has ended.
        StorageError
            Something that was appended before could not be written, and nothing more will be.
        """
        if not isinstance(array, (list, tuple, Iterator)):
            try:
                segments = collect_segments([array], writable=False)
            except TypeError:
                if not is_several(array):
                    raise
            else:
                self._append(segments, kept)
                return
        for portion in _portions(array):
            self._append(collect_segments(portion, writable=False), kept)

    def append_made(self, data: bytes, fields: Sequence[Field] = ()) -> None:
        """Write bytes with checksums of what was appended before in them, as archives' headers and directories have.

        Raises
        ------
        ValueError
            A field lies outside of ``data``, names a segment that is not before it, or the CRC-32s of segments were not
            asked for.
        """
        self._check()
        for field in fields:
            one_of(field.kind, "kind", _KINDS)
        told = [(_KINDS[field.kind], *field[1:], _TORCH_FOLD) for field in fields]
        self._core.append_made(self._scheduler, data, told)
        if len(data) > MAX_UNCOPIED_NBYTES:
            self._core.wait_for_copies(self._scheduler, MAX_UNCOPIED_NBYTES)
        self._look()

    def wait_until_copied(self) -> None:
        """Return when nothing that was appended is needed any more: it may change, though it is not yet written.

        Raises
        ------
        StorageError
            Something could not be written.
        """
        self._check()
        self._core.wait_for_copies(self._scheduler, 0)
        self._look()

    def finish(self, *, truncate: bool = False, sync: bool = False) -> int:
        """Write what is left, and return how many bytes the stream has had.

        Parameters
        ----------
        truncate : bool
            End the file behind the last byte.
        sync : bool
            Return only when all would survive a power cut, as for :func:`tensorferry.write`.

        Raises
        ------
        StorageError
            Not everything was written.
        """
        self.begin_to_finish(truncate=truncate, sync=sync)
        return self.wait()

    def begin_to_finish(
        self, *, truncate: bool = False, sync: bool = False, sync_names: bool = True
    ) -> None:
        """Do as :meth:`finish`, but leave the waiting to :meth:`wait`.

        Without ``sync_names`` the caller makes the file's name durable.
        """
        self._check()
        self._unheard = True  # first: who leaves the block waits, wherever Ctrl-C comes
        self._core.end(self._scheduler, truncate, sync, sync_names)
        self._open = False

    def wait(self) -> int:
        """Wait for the end that has been begun; return as :meth:`finish` does."""
        if self._open:
            raise ValueError(f"nothing has begun to finish the stream to {self._path!r}")
        if self._failure is not None:
            raise self._failure
        self._core.wait(None)
        self._unheard = False
        self._look()
        return self._core.nbytes

    def abort(self) -> None:
        """Write nothing more that is not on its way yet, and let go of all arrays. The file has some of the bytes.

        Where nothing moves for 60 seconds it gives up, with a ``RuntimeWarning``; arrays still in use stay referenced.
        """
        self._give_up(ValueError(f"the stream to {self._path!r} was given up"))
        if not patiently(self._core.wait, self._scheduler):
            warn_of_left_behind(f"what was being written to {self._path!r}")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._open and not self._unheard:
            return
        try:
            if kind is None:
                (self.finish if self._open else self.wait)()
                return
        except BaseException:  # Ctrl-C: the arrays are let go of all the same
            self.abort()
            raise
        self.abort()

    @once_made
    def __repr__(self) -> str:
        state = "open" if self._open else "ended"
        where = f"{self._path!r} from offset {self._offset}"
        return f"<tensorferry.Stream to {where}: {self.nbytes} bytes appended, {state}>"

    def __del__(self) -> None:
        unfinished = getattr(self, "_open", False) or getattr(self, "_unheard", False)
        if unfinished and self._scheduler.belongs_to_this_process():
            warnings.warn(
                f"a stream to {self._path!r} was never finished, and is given up",
                ResourceWarning,
                2,
                self,
            )

    def _append(self, segments: _core.Segments, kept: bool) -> None:
        self._check()
        self._core.append(self._scheduler, segments)
        self._core.wait_for_copies(
            self._scheduler, MAX_FILE_NBYTES if kept else MAX_UNCOPIED_NBYTES
        )
        self._look()

    def _check(self) -> None:
        if not self._open:
            raise ValueError(f"the stream to {self._path!r} has ended")

    def _look(self) -> None:
        """Let go of what has been copied, and raise what went wrong."""
        for segments in self._core.take_copied():
            if moved((segments, segments.nbytes, None, None)):
                self._give_up(memory_moved(self._path, self._offset, segments.nbytes))
                assert self._failure is not None
                raise self._failure
        failure = self._core.exception()
        if failure is not None:
            self._open = self._unheard = False
            raise failure

    def _give_up(self, why: Exception) -> None:
        self._open = self._unheard = False
        self._failure = self._failure or why
        if not self._core.abort(runtime.CLOSE_PATIENCE_SECONDS):
            warn_of_left_behind(f"arrays on their way to {self._path!r}")


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
        del array  # only the portion keeps it, and only until it has been copied
        if nbytes >= _PORTION_NBYTES or len(portion) == _PORTION_COUNT:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion
