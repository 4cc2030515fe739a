"""Reading data files: read requests become transfers of the core, which verifies bytes before it delivers them.

Terms of the reading side of this package:

chunk
    A part of a file with its own checksum. A chunk is read whole or not at all.
request
    A range of a file, and the sink for its bytes.
sink
    The object that supplies memory for the bytes of a request (none for bytes that are only verified), and is notified
    when they have arrived.
slab
    A small box of a stored tensor that is read into temporary memory first, and copied from there.
run
    Requests that lie close together, rounded to whole chunks: one transfer reads a run and discards the bytes between
    the requests. No run crosses a multiple of about RUN_NBYTES, which bounds the bytes in flight and delivers them
    steadily.
segment
    A part of a transfer: the array for one request, or a gap, whose bytes are discarded.

This module neither copies nor interprets tensor data. One thread, the one that loads, adds requests, waits for the
oldest transfer and notifies the sinks.
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
# Limits on the temporary memory (slabs) of reads in flight, and on open files.
_MEMORY_NBYTES = 24 << 20
_MAX_FILES = 128
# A gap of up to this many unwanted bytes is read rather than split into two transfers, for files without checksums.
GAP_NBYTES = 64 << 10


class Sink(Protocol):
    """The receiver of a request's bytes."""

    @property
    def needs_crc(self) -> bool:
        """Whether :meth:`arrived` needs the CRC-32 of the bytes."""

    def memory(self, begin: int, end: int) -> Any:
        """Return an array for bytes of the file, or None if they are only to be verified."""

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Handle the arrival of bytes of the file; ``crc`` is 0 unless :attr:`needs_crc` is set."""


class ReadRequest(NamedTuple):
    """A range of a file and the sink for it; the sink may receive the range in several parts."""

    begin: int
    end: int
    sink: Sink


class DataFile:
    """A data file that is open for reading.

    Parameters
    ----------
    path : str
        The file's path.
    name : str
        The file's name in the metadata.
    checksums : DataFileChecksums, optional
        The checksums of its chunks.
    names_at : function of (name, begin, end)
        Returns the names of the tensors in a range of the file.
    verify : bool
        Whether to verify bytes by the checksums.
    damaged : function of an error, optional
        Called for each damaged chunk; by default the error is raised.

    Raises
    ------
    StorageError
        The file cannot be opened.
    CheckpointError
        The file is shorter than it was when it was written.
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
        # The largest gap that a run may contain. With checksums only whole chunks are read: a gap inside a chunk is
        # read anyway, and a gap of whole chunks is not worth reading.
        self.gap_nbytes = GAP_NBYTES if self._checksums is None else 0
        try:
            if checksums is not None:
                self.check_end(checksums.nbytes)
                self.nbytes = checksums.nbytes
        except CheckpointError:
            self.file.close()
            raise

    def check_end(self, end: int) -> None:
        """Check that the file has bytes up to ``end``."""
        if end > self.nbytes:
            reason = f"the file is cut short: it has {self.nbytes} bytes"
            raise self._error(reason, self.nbytes, end)

    def round_to_chunks(self, begin: int, end: int) -> tuple[int, int]:
        """Return a range extended to whole chunks."""
        chunk = self.chunk_nbytes
        return begin // chunk * chunk, min(-(-end // chunk) * chunk, self.nbytes)

    def run_begin(self, place: int) -> int:
        """Return the last run boundary at or before ``place``."""
        return place // self.run_nbytes * self.run_nbytes

    def checksums_for(self, begin: int, end: int, *, of_requests: bool) -> Checksums | None:
        """Return the checksums that a transfer of whole chunks computes and compares; None if it needs none.

        With ``of_requests`` they include one for each segment of the transfer, and so for each request.
        """
        if self._checksums is None:
            return Checksums(segments=True) if of_requests else None
        expected = self._expected(begin, end) if self._damaged is None else None
        return Checksums(self.chunk_nbytes, segments=of_requests, expected=expected)

    def check(self, begin: int, end: int, sums: Checksums | None) -> None:
        """Report each damaged chunk of a transfer to ``damaged``, if that was given."""
        if self._damaged is None or self._checksums is None or sums is None:
            return
        starts = range(begin, end, self.chunk_nbytes)
        for start, found, wanted in zip(
            starts, sums.chunks, self._expected(begin, end), strict=True
        ):
            if found != wanted:
                reason = f"CRC-32 {found:08x} instead of {wanted:08x}"
                self._damaged(self._damage(*self.round_to_chunks(start, start + 1), reason))

    def translate_error(self, error: Exception) -> Exception:
        """Return a transfer's failure as an error that names the checkpoint's file and tensors."""
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


class _RequestRun(Read):
    """Requests that one transfer reads."""

    def __init__(self, file: DataFile, begin: int, end: int, requests: list[ReadRequest]) -> None:
        self.file = file
        self.nbytes = end - begin
        self._begin = begin
        self._requests = requests
        self._places: list[int] = []  # the index of each request's segment
        self._needs_crcs = any(request.sink.needs_crc for request in requests)
        self._sums: Checksums | None = None

    def begin(self) -> None:
        begin, end = self._begin, self._begin + self.nbytes
        segments: list[Any] = []
        at = begin
        for request in self._requests:
            if request.begin > at:
                segments.append(request.begin - at)
            self._places.append(len(segments))
            memory = request.sink.memory(request.begin, request.end)
            segments.append(request.end - request.begin if memory is None else memory)
            at = request.end
        if end > at:
            segments.append(end - at)
        if all(isinstance(segment, int) for segment in segments):
            segments.append(bytearray())  # read_into() refuses segments that are gaps alone
        self._sums = self.file.checksums_for(begin, end, of_requests=self._needs_crcs)
        self.futures = (self.file.file.read_into(segments, begin, checksums=self._sums),)

    def notify_sinks(self) -> None:
        """Tell the sinks that their bytes have arrived."""
        self.file.check(self._begin, self._begin + self.nbytes, self._sums)
        crcs = self._sums.segments if self._sums is not None and self._needs_crcs else None
        for request, index in zip(self._requests, self._places, strict=True):
            request.sink.arrived(request.begin, request.end, crcs[index] if crcs else 0)


class _EndOfFile(Read):
    """Marks the end of a file in the pipeline: all of its requests come before this."""

    def __init__(self, file: DataFile) -> None:
        self.file = file

    def begin(self) -> None:
        pass


class Reading:
    """A context manager that reads requests of one file after the other; for use by one thread.

    Parameters
    ----------
    file_done : function without arguments, optional
        Called when all requests of a file are complete.
    """

    def __init__(self, file_done: Callable[[], object] = lambda: None) -> None:
        self._file_done = file_done
        self._file: DataFile | None = None  # the file of the requests that are added
        # A heap with the next request of each iterator, ordered by the request's offset (the first int). The second
        # int is unique, which keeps heapq from comparing requests.
        self._waiting: list[tuple[int, int, ReadRequest, Iterator[ReadRequest]]] = []
        self._count = 0
        self._pipeline: Pipeline[_RequestRun | _EndOfFile] = Pipeline(memory_nbytes=_MEMORY_NBYTES)

    @property
    def nbytes_read(self) -> int:
        """The bytes that have been requested from files so far."""
        return self._pipeline.nbytes_read

    def begin_file(self, file: DataFile) -> None:
        """Set the file of the requests that follow. It is closed when they are complete."""
        self._pipeline.files[file] = file.file
        self._end_file()
        self._file = file
        while len(self._pipeline.files) > _MAX_FILES:
            self._complete()

    def add(self, requests: Iterator[ReadRequest]) -> None:
        """Add requests for the current file. The requests must be in the order of their offsets."""
        if (first := next(requests, None)) is not None:
            self._count += 1
            heapq.heappush(self._waiting, (first.begin, self._count, first, requests))

    def advance(self, limit: int | None = None) -> None:
        """Begin to read requests of the file; without ``limit``, all of them.

        ``limit`` is the offset of the next request that will be added: requests that may share a run with it must wait.
        """
        while self._waiting and (
            limit is None or self._waiting[0][0] < self._current_file.run_begin(limit)
        ):
            self._read(self._next_requests())

    def drain(self) -> None:
        """Return when all requests added so far are complete.

        Raises
        ------
        CheckpointError, StorageError
            A request's bytes are damaged, or could not be read.
        """
        self.advance()
        while self._pipeline.oldest is not None:
            self._complete()

    def finish(self) -> None:
        """Complete all requests, and close the files."""
        self._end_file()
        self.drain()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.close()

    @property
    def _current_file(self) -> DataFile:
        assert self._file is not None
        return self._file

    def _end_file(self) -> None:
        self.advance()
        if self._file is not None:
            self._begin(_EndOfFile(self._file))
            self._file = None

    def _next_requests(self) -> list[ReadRequest]:
        """Remove and return the requests up to the next run boundary."""
        stop = self._current_file.run_begin(self._waiting[0][0]) + self._current_file.run_nbytes
        found = []
        while self._waiting and self._waiting[0][0] < stop:
            _, number, request, requests = self._waiting[0]
            following: ReadRequest | None
            if request.end > stop:
                found.append(request._replace(end=stop))
                following = request._replace(begin=stop)
            else:
                found.append(request)
                following = next(requests, None)
            if following is None:
                heapq.heappop(self._waiting)
            else:
                heapq.heapreplace(self._waiting, (following.begin, number, following, requests))
        return found

    def _read(self, requests: list[ReadRequest]) -> None:
        """Divide requests, which are in the order of their offsets, into runs, and begin to read the runs."""
        file = self._current_file
        run: list[ReadRequest] = []
        # Requests that overlap an earlier one: their bytes are read again, by other runs.
        twice: list[ReadRequest] = []
        end = run_begin = run_end = 0
        for request in requests:
            begin, stop = file.round_to_chunks(request.begin, request.end)
            if run and request.begin < end:
                twice.append(request)
                continue
            if run and begin > run_end + file.gap_nbytes:
                self._begin(_RequestRun(file, run_begin, run_end, run))
                run = []
            if not run:
                run_begin = begin
            run.append(request)
            end, run_end = request.end, stop
        if run:
            self._begin(_RequestRun(file, run_begin, run_end, run))
        if twice:
            self._read(twice)

    def _begin(self, read: _RequestRun | _EndOfFile) -> None:
        """Begin a read when the pipeline has memory for it, and deliver completed reads meanwhile."""
        pipeline = self._pipeline
        pipeline.add(read)
        while not pipeline.advance():
            self._complete()
        while (oldest := pipeline.oldest) is not None and oldest.done():
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest read, and notify its sinks."""
        oldest = self._pipeline.oldest
        assert oldest is not None
        if isinstance(oldest, _EndOfFile):
            self._pipeline.release(oldest)
            self._pipeline.files.pop(oldest.file).close()
            self._file_done()
            return
        try:
            oldest.wait()
        except Exception as error:
            raise oldest.file.translate_error(error) from None
        self._pipeline.release(oldest)
        oldest.notify_sinks()
