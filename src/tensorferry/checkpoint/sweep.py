"""One pass over data files: each needed chunk is read once, verified, and its bytes handed to those who want them.

What is wanted comes as pieces, (file, begin, end, sink), in the order in which they begin. The granules that they touch
(chunks with a checksum of their own, or pages where there are none) are laid one behind the other into 4 MiB buffers,
whatever lies between them is not read, and small pieces next to each other share their granules. A full buffer is read
while others are on their way; a thread then verifies each granule and gives the sinks their bytes, which never see any
of a granule that is damaged.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import tensorferry
from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.pipeline import BUFFER_NBYTES, Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tensorferry.checkpoint.metadata import FileChecksums
    from tensorferry.checkpoint.pipeline import Buffer

# Pieces are cut at multiples of this: one that begins within another is then never far from its end.
_CUT_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
# What is verified, then given out, at once: it stays in the processor's cache between.
_STEP_NBYTES = 256 << 10
# Files that are open at most; a checkpoint may have one for each tensor.
_MAX_OPEN_FILES = 128


def cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a file into pieces."""
    while begin < end:
        stop = min(end, (begin // _CUT_NBYTES + 1) * _CUT_NBYTES)
        yield begin, stop
        begin = stop


class Sink(Protocol):
    """Takes the bytes of a piece; called by several threads, for several parts of it, in any order."""

    def take(self, position: int, buffer: Buffer, begin: int, nbytes: int) -> None:
        """Take ``nbytes`` bytes at ``begin`` in the buffer: those from ``position`` on of the piece."""


# (begin and end in the file, who takes the bytes, what the sink knows the first of them by)
Wanted: TypeAlias = "tuple[int, int, Sink, int]"


class DataFile:
    """A data file that is read.

    Parameters
    ----------
    path : str
        Where it is.
    name : str
        What the metadata calls it.
    checksums : FileChecksums, optional
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
        checksums: FileChecksums | None,
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
        self.granule_nbytes = (
            _PAGE_NBYTES if self._checksums is None else self._checksums.chunk_nbytes
        )
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
            raise CheckpointError(
                f"the file is cut short: it has {self.nbytes} bytes",
                self.path,
                names=self._names_at(self.name, self.nbytes, end),
                begin=self.nbytes,
                end=end,
            )

    def verify(self, begin: int, data: memoryview) -> None:
        """Check granules that lie next to each other."""
        if self._checksums is None:
            return
        granule = self.granule_nbytes
        for number, at in enumerate(range(0, len(data), granule), begin // granule):
            wanted, found = self._checksums.crcs[number], crc32(data[at : at + granule])
            if found != wanted:
                start, end = begin + at, begin + min(at + granule, len(data))
                error = CheckpointError(
                    f"the bytes are not those that were written (CRC-32 {found:08x} instead of {wanted:08x})",
                    self.path,
                    names=self._names_at(self.name, start, end),
                    begin=start,
                    end=end,
                )
                if self._damaged is None:
                    raise error
                self._damaged(error)


class _Want(NamedTuple):
    """A part of a piece, and where in the buffer it is."""

    begin: int
    nbytes: int
    sink: Sink
    position: int


@dataclass
class _Run:
    """Granules next to each other, in file and buffer."""

    file: DataFile
    begin: int  # in the file
    end: int
    at: int  # in the buffer
    wants: list[_Want] = field(default_factory=list)


@dataclass
class _Block:
    """What one buffer gets."""

    buffer: Buffer
    runs: list[_Run] = field(default_factory=list)
    used: int = 0


class Sweep:
    """A context manager; leave it only after :meth:`finish`, or to give up, and then the pipeline too.

    Attributes
    ----------
    nbytes_read : int
        How much has been asked of the files so far.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.nbytes_read = 0
        self._pipeline = pipeline
        self._open: list[
            _Block
        ] = []  # not submitted: the last one, and a full one in which pieces may still begin
        self._reading: deque[list[tensorferry.Future]] = deque()  # of the blocks read last
        self._failed = threading.Event()
        self._file: DataFile | None = None
        self._files: list[DataFile] = []
        self._covered = 0  # up to here granules of the present file have their places

    def begin_file(self, file: DataFile) -> None:
        """Say of which file the next pieces are. The sweep closes it."""
        self._file = file
        self._files.append(file)
        self._covered = 0
        self._submit(len(self._open) - 1)
        if len(self._files) > _MAX_OPEN_FILES:
            self.settle()
            self._close_files(keep=1)

    def want(self, begin: int, end: int, sink: Sink, position: int = 0) -> None:
        """Have bytes of the present file, at most what :func:`cuts` gives, given to a sink.

        Parameters
        ----------
        begin, end : int
            Where in the file. No later piece of the file begins before ``begin``.
        sink : Sink
            Who takes them.
        position : int
            What the sink knows the first of them by.
        """
        file = self._file
        assert file is not None
        if len(self._open) > 1:
            last = self._open[0].runs[-1]
            if last.file is not file or begin >= last.end:
                self._submit(1)
        at = begin
        while at < end:
            if at >= self._covered:
                self._cover(file, at, end)
            run = next(
                run
                for block in self._open
                if (run := block.runs[-1]).file is file and run.begin <= at < run.end
            )
            nbytes = min(end, run.end) - at
            run.wants.append(_Want(run.at + at - run.begin, nbytes, sink, position + at - begin))
            at += nbytes

    def settle(self) -> None:
        """Return when all that was wanted so far has been given.

        Raises
        ------
        CheckpointError, StorageError
            Something of it is damaged, or could not be read.
        """
        self._submit(len(self._open))
        self._covered = 0  # what is wanted again is read again
        self._pipeline.wait_until_copied()

    def finish(self) -> None:
        """Settle, and close the files."""
        self.settle()
        self._close_files()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failed.set()
        self._open.clear()
        self._close_files()

    def _cover(self, file: DataFile, begin: int, end: int) -> None:
        """Give granules from ``begin`` on their places, as many as the buffer takes."""
        granule = file.granule_nbytes
        start = begin // granule * granule
        stop = min(-(-end // granule) * granule, file.nbytes)
        if not self._open or BUFFER_NBYTES - self._open[-1].used < granule:
            self._submit(len(self._open) - 1)
            self._open.append(_Block(self._pipeline.take_buffer()))
        block = self._open[-1]
        room = (BUFFER_NBYTES - block.used) // granule * granule
        stop = min(stop, start + room)
        last = block.runs[-1] if block.runs else None
        if last is not None and last.file is file and last.end == start:
            last.end = stop
        else:
            block.runs.append(_Run(file, start, stop, block.used))
        block.used = -(-(block.used + stop - start) // _PAGE_NBYTES) * _PAGE_NBYTES
        self._covered = stop

    def _submit(self, count: int) -> None:
        """Begin to read the first blocks."""
        for _ in range(count):
            self._read(self._open.pop(0))

    def _read(self, block: _Block) -> None:
        if len(self._reading) == self._pipeline.in_flight_count:
            for read in self._reading.popleft():
                read.exception()  # for those who process it
        reads = []
        for run in block.runs:
            nbytes = run.end - run.begin
            self.nbytes_read += nbytes
            view = block.buffer.view[run.at : run.at + nbytes]
            reads.append(run.file.file.read_into(view, run.begin))
        self._reading.append(reads)
        self._pipeline.submit(lambda: self._process(block, reads), block.buffer.filled)

    def _process(self, block: _Block, reads: list[tensorferry.Future]) -> None:
        try:
            failures = [failure for read in reads if (failure := read.exception()) is not None]
            if failures:
                raise failures[0]
            for run in block.runs:
                if self._failed.is_set():
                    return
                self._give(block.buffer, run)
        except BaseException:
            self._failed.set()
            raise

    def _give(self, buffer: Buffer, run: _Run) -> None:
        """Verify a run, and give out what is wanted of it, granule by granule: it is in the processor's cache then."""
        wants = iter(run.wants)
        want = next(wants, None)
        # Wants are in the order in which they begin, but those of overlapping pieces may end in any; these wait here.
        begun: list[tuple[_Want, int]] = []
        step = run.file.granule_nbytes * max(1, _STEP_NBYTES // run.file.granule_nbytes)
        for begin in range(run.begin, run.end, step):
            end = min(begin + step, run.end)
            at = run.at + begin - run.begin
            limit = at + end - begin
            run.file.verify(begin, buffer.view[at:limit])
            while want is not None and want.begin < limit:
                begun.append((want, 0))
                want = next(wants, None)
            rest = []
            for each, done in begun:
                nbytes = min(each.nbytes, limit - each.begin) - done
                each.sink.take(each.position + done, buffer, each.begin + done, nbytes)
                if done + nbytes < each.nbytes:
                    rest.append((each, done + nbytes))
            begun = rest

    def _close_files(self, keep: int = 0) -> None:
        while len(self._files) > keep:
            self._files.pop(0).file.close()


class Queue:
    """Brings the pieces of many items, each in order, into one order, and begins with an item as late as can be."""

    def __init__(self, want: Callable[[Wanted], None]) -> None:
        self._want = want
        self._items: list[
            tuple[int, int, Wanted, Iterator[Wanted]]
        ] = []  # by where the next piece begins
        self._count = 0

    def add(self, begin: int, start: Callable[[], Iterator[Wanted]]) -> None:
        """Want the pieces of an item, of which none begins before ``begin``; nor do those of later items."""
        self.advance(begin)
        pieces = start()
        first = next(pieces, None)
        if first is not None:
            self._count += 1
            heapq.heappush(self._items, (first[0], self._count, first, pieces))

    def advance(self, limit: int | None = None) -> None:
        """Want all pieces that begin before ``limit``, or all there are."""
        while self._items and (limit is None or self._items[0][0] < limit):
            _, number, piece, pieces = self._items[0]
            self._want(piece)
            following = next(pieces, None)
            if following is None:
                heapq.heappop(self._items)
            else:
                heapq.heapreplace(self._items, (following[0], number, following, pieces))
