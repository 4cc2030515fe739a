"""Reading data files: what is wanted of them becomes transfers of the core, which verifies before it delivers.

The words of this package's reading side:

chunk
    Bytes of a file that have a checksum of their own. They are read whole, or not at all.
want
    A range of a file, and the sink that says where its bytes go: to memory, or nowhere, where they are only verified.
slab
    A small box of a stored tensor that comes to temporary memory first, and is copied from there.
run
    Wants next to each other, rounded to chunks: what one transfer reads. The bytes between them are passed over. No run
    crosses a multiple of about RUN_NBYTES, so that few bytes are on their way at a time, and all of it moves on.

Nothing of tensor data is copied or looked at here: the one thread that loads says what goes where, waits for the oldest
transfer, and tells the sinks.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import tensorferry
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.errors import ChecksumError
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.checkpoint.storage.metadata import DataFileChecksums

RUN_NBYTES = 8 << 20
# Reads that have begun have no more temporary memory (slabs); and so many files are open.
_MEMORY_NBYTES = 24 << 20
_MAX_FILES = 128
# Unwanted bytes in a row that are read rather than begin another transfer, where checksums do not ask for more.
GAP_NBYTES = 64 << 10


class Sink(Protocol):
    """Where the bytes of wants go."""

    @property
    def takes_crc(self) -> bool:
        """Whether it needs the CRC-32 of what has come."""

    def memory(self, begin: int, end: int) -> Any:
        """Return an array for bytes of the file, or None if nobody needs them."""

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Take note that bytes of the file are there; ``crc`` is 0 if :attr:`takes_crc` is not set."""


class Want(NamedTuple):
    """Bytes of a file, and who gets them; perhaps in several parts."""

    begin: int
    end: int
    sink: Sink


class DataFile:
    """A data file that is read.

    Parameters
    ----------
    path : str
        Where it is.
    name : str
        What the metadata calls it.
    checksums : DataFileChecksums, optional
        To verify by.
    names_at : function of (name, begin, end)
        Returns the tensors that lie in a range of the file.
    verify : bool
        Whether to look at the checksums.
    damaged : function of an error, optional
        What to do with damage that is found; by default the error is raised.

    Raises
    ------
    StorageError
        It cannot be opened.
    CheckpointError
        It is shorter than it was.
    """

    def __init__(
        self,
        path: str,
        name: str,
        checksums: DataFileChecksums | None,
        names_at: Callable[[str, int, int], tuple[str, ...]],
        *,
        verify: bool = True,
        damaged: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self._checksums = checksums if verify else None
        self._names_at = names_at
        self._damaged = damaged
        self.file = tensorferry.open(path)
        self.nbytes = self.file.size
        self.chunk_nbytes = 1 if self._checksums is None else self._checksums.chunk_nbytes
        self.run_nbytes = max(1, RUN_NBYTES // self.chunk_nbytes) * self.chunk_nbytes
        # Unwanted bytes in a row that a run may have: of chunks, none may be read in vain.
        self.gap_nbytes = GAP_NBYTES if self._checksums is None else 0
        try:
            if checksums is not None:
                self.require(checksums.nbytes)
                self.nbytes = checksums.nbytes
        except CheckpointError:
            self.file.close()
            raise

    def require(self, end: int) -> None:
        """Check that the file has bytes up to ``end``."""
        if end > self.nbytes:
            reason = f"the file is cut short: it has {self.nbytes} bytes"
            raise self._error(reason, self.nbytes, end)

    def rounded(self, begin: int, end: int) -> tuple[int, int]:
        """Return a range of whole chunks."""
        chunk = self.chunk_nbytes
        return begin // chunk * chunk, min(-(-end // chunk) * chunk, self.nbytes)

    def run_begin(self, place: int) -> int:
        """Return the last place up to a given one that no run crosses."""
        return place // self.run_nbytes * self.run_nbytes

    def sums(self, begin: int, end: int, *, of_wants: bool) -> Checksums | None:
        """Return what a transfer of whole chunks is verified by."""
        if self._checksums is None:
            return Checksums(segments=True) if of_wants else None
        expected = self._expected(begin, end) if self._damaged is None else None
        return Checksums(self.chunk_nbytes, segments=of_wants, expected=expected)

    def check(self, begin: int, end: int, sums: Checksums | None) -> None:
        """Report all chunks of a transfer that are damaged, where that is not raised."""
        if self._damaged is None or self._checksums is None or sums is None:
            return
        starts = range(begin, end, self.chunk_nbytes)
        for start, found, wanted in zip(
            starts, sums.chunks, self._expected(begin, end), strict=True
        ):
            if found != wanted:
                reason = f"CRC-32 {found:08x} instead of {wanted:08x}"
                self._damaged(self._damage(*self.rounded(start, start + 1), reason))

    def explained(self, error: Exception) -> Exception:
        """Return a transfer's failure as what it says of the checkpoint."""
        if not isinstance(error, ChecksumError):
            return error
        begin, end = error.offset, error.offset + error.nbytes
        (wanted,) = self._expected(begin, end)
        return self._damage(begin, end, f"their CRC-32 is not {wanted:08x}")

    def _expected(self, begin: int, end: int) -> memoryview:
        assert self._checksums is not None
        return self._checksums.crcs[begin // self.chunk_nbytes : -(-end // self.chunk_nbytes)]

    def _damage(self, begin: int, end: int, found: str) -> CheckpointError:
        reason = f"the bytes are not those that were written ({found})"
        return self._error(reason, begin, end)

    def _error(self, reason: str, begin: int, end: int) -> CheckpointError:
        names = self._names_at(self.name, begin, end)
        return CheckpointError(reason, self.path, names=names, begin=begin, end=end)


class _WantRun(Read):
    """Wants that one transfer reads."""

    def __init__(self, file: DataFile, begin: int, end: int, wants: list[Want]) -> None:
        self.file = file
        self.nbytes = end - begin
        self._begin = begin
        self._wants = wants
        self._places: list[int] = []  # which of the segments each want is
        self._takes_crcs = any(want.sink.takes_crc for want in wants)
        self._sums: Checksums | None = None

    def begin(self) -> None:
        begin, end = self._begin, self._begin + self.nbytes
        segments: list[Any] = []
        at = begin
        for want in self._wants:
            if want.begin > at:
                segments.append(want.begin - at)
            self._places.append(len(segments))
            memory = want.sink.memory(want.begin, want.end)
            segments.append(want.end - want.begin if memory is None else memory)
            at = want.end
        if end > at:
            segments.append(end - at)
        if all(isinstance(segment, int) for segment in segments):
            segments.append(bytearray())  # gaps alone would be refused
        self._sums = self.file.sums(begin, end, of_wants=self._takes_crcs)
        self.futures = (self.file.file.read_into(segments, begin, checksums=self._sums),)

    def deliver(self) -> None:
        """Tell those who wanted it that it is there."""
        self.file.check(self._begin, self._begin + self.nbytes, self._sums)
        crcs = self._sums.segments if self._sums is not None and self._takes_crcs else None
        for want, index in zip(self._wants, self._places, strict=True):
            want.sink.arrived(want.begin, want.end, crcs[index] if crcs else 0)


class _End(Read):
    """The end of a file: all that was wanted of it has come."""

    def __init__(self, file: DataFile) -> None:
        self.file = file

    def begin(self) -> None:
        pass


class Reading:
    """A context manager that reads what is wanted of one file after the other; for one thread.

    Parameters
    ----------
    file_done : function without arguments, optional
        Called when all that was wanted of a file has come.
    """

    def __init__(self, file_done: Callable[[], object] = lambda: None) -> None:
        self._file_done = file_done
        self._file: DataFile | None = None  # that of the wants
        # What is to come of each source of wants, by where that begins; numbers keep heapq from comparing wants.
        self._waiting: list[tuple[int, int, Want, Iterator[Want]]] = []
        self._count = 0
        self._pipeline: Pipeline[_WantRun | _End] = Pipeline(memory_nbytes=_MEMORY_NBYTES)

    @property
    def nbytes_read(self) -> int:
        """How much has been asked of the files so far."""
        return self._pipeline.nbytes_read

    def begin_file(self, file: DataFile) -> None:
        """Say of which file the next wants are. It is closed when it is done."""
        self._pipeline.files[file] = file.file
        self._end_file()
        self._file = file
        while len(self._pipeline.files) > _MAX_FILES:
            self._complete()

    def add(self, wants: Iterator[Want]) -> None:
        """Want bytes of the present file, given in the order in which they begin."""
        if (first := next(wants, None)) is not None:
            self._count += 1
            heapq.heappush(self._waiting, (first.begin, self._count, first, wants))

    def advance(self, limit: int | None = None) -> None:
        """Begin to read what is wanted and cannot be in a run with what begins at ``limit``, or all."""
        while self._waiting and (
            limit is None or self._waiting[0][0] < self._present.run_begin(limit)
        ):
            self._read(self._next_wants())

    def drain(self) -> None:
        """Return when all that was wanted so far has come.

        Raises
        ------
        CheckpointError, StorageError
            Something of it is damaged, or could not be read.
        """
        self.advance()
        while self._pipeline.oldest is not None:
            self._complete()

    def finish(self) -> None:
        """Do so, and close the files."""
        self._end_file()
        self.drain()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.close()

    @property
    def _present(self) -> DataFile:
        assert self._file is not None
        return self._file

    def _end_file(self) -> None:
        self.advance()
        if self._file is not None:
            self._begin(_End(self._file))
            self._file = None

    def _next_wants(self) -> list[Want]:
        """Take the first wants, up to a place that no run crosses."""
        stop = self._present.run_begin(self._waiting[0][0]) + self._present.run_nbytes
        found = []
        while self._waiting and self._waiting[0][0] < stop:
            _, number, want, wants = self._waiting[0]
            following: Want | None
            if want.end > stop:
                found.append(want._replace(end=stop))
                following = want._replace(begin=stop)
            else:
                found.append(want)
                following = next(wants, None)
            if following is None:
                heapq.heappop(self._waiting)
            else:
                heapq.heapreplace(self._waiting, (following.begin, number, following, wants))
        return found

    def _read(self, wants: list[Want]) -> None:
        """Begin to read runs of wants, which come in the order in which they begin."""
        file = self._present
        run: list[Want] = []
        twice: list[Want] = []  # bytes that another want has as well: read again
        end = run_begin = run_end = 0
        for want in wants:
            begin, stop = file.rounded(want.begin, want.end)
            if run and want.begin < end:
                twice.append(want)
                continue
            if run and begin > run_end + file.gap_nbytes:
                self._begin(_WantRun(file, run_begin, run_end, run))
                run = []
            if not run:
                run_begin = begin
            run.append(want)
            end, run_end = want.end, stop
        if run:
            self._begin(_WantRun(file, run_begin, run_end, run))
        if twice:
            self._read(twice)

    def _begin(self, read: _WantRun | _End) -> None:
        """Begin a read when there is room for it, and deliver what has come meanwhile."""
        pipeline = self._pipeline
        pipeline.add(read)
        while not pipeline.advance():
            self._complete()
        while (oldest := pipeline.oldest) is not None and oldest.done():
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest read, and deliver it."""
        oldest = self._pipeline.oldest
        assert oldest is not None
        if isinstance(oldest, _End):
            self._pipeline.release(oldest)
            self._pipeline.files.pop(oldest.file).close()
            self._file_done()
            return
        try:
            oldest.wait()
        except Exception as error:
            raise oldest.file.explained(error) from None
        self._pipeline.release(oldest)
        oldest.deliver()
