"""The files of a store: segments in its directories, and which parts of them are tensors'.

A segment gets all its space when it is made, so that a full disk is found then. It goes when it is frozen (a snapshot
has it) and nothing in it is wanted any more; else its space is used again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.runtime import scheduler_of, with_descriptors
from tensorferry.store.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.runtime import AnyScheduler

# Extents begin and end at multiples of it: of pages, for mapping, and of what drives want.
GRANULARITY = max(4096, mmap.PAGESIZE)
# And of blocks, where a file system has larger ones: the page cache writes them whole, over what lies beside a tensor's
# end and passes it. XFS has up to 64 KiB; what network file systems tell may be a megabyte and means something else.
_MAX_BLOCK_NBYTES = 64 << 10

# After so many segments of a directory the next ones are twice as large: 320 descriptors are 2 TiB at 64 MiB.
_COUNT_OF_A_SIZE = 32

_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)


class Segment:
    """One file: in the core's hands, and how much of it is wanted."""

    __slots__ = (
        "directory",
        "extent_count",
        "file",
        "frozen",
        "name",
        "nbytes",
        "number",
        "sync_failed",
    )

    def __init__(
        self, directory: Directory, number: int, file: _core.File, nbytes: int, name: str | None
    ) -> None:
        self.directory = directory
        self.number = number
        self.file = file
        self.nbytes = nbytes
        self.name = name  # None: it has none
        self.frozen = False  # nothing will be written to it any more
        self.extent_count = 0
        self.sync_failed = False  # some of it may never have reached the drive


class Piece(NamedTuple):
    """Bytes of a segment that a tensor, or a part of one, has. It has all up to where the next one may begin."""

    segment: Segment
    offset: int
    nbytes: int


class Directory:
    """One of a store's directories, with its segments and its workers."""

    def __init__(
        self,
        path: str,
        weight: float,
        scheduler: AnyScheduler,
        *,
        direct: str,
        segment_nbytes: int,
        prefix: str | None,
    ) -> None:
        self.path = path
        self.weight = weight
        self.scheduler = scheduler
        self.segments: dict[int, Segment] = {}
        self.used_nbytes = 0
        self._made_count = 0
        self._direct = direct
        self._granularity = _granularity_of(path)
        self._segment_nbytes = self.rounded(segment_nbytes)
        self._prefix = prefix  # of segments' names; None: they have none
        self._space = Space()

    @property
    def free_nbytes(self) -> int:
        """Reserved space that nothing has."""
        return self._space.free_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """All space that segments have."""
        return sum(segment.nbytes for segment in self.segments.values())

    def rounded(self, nbytes: int) -> int:
        """Return the space that so many bytes take."""
        return -(-nbytes // self._granularity) * self._granularity

    def take(self, nbytes: int) -> Piece | None:
        """Return space of what is free; None where no gap is as large."""
        found = self._space.take(self.rounded(nbytes))
        if found is None:
            return None
        piece = Piece(self.segments[found[0]], found[1], nbytes)
        self.count(piece)
        return piece

    def count(self, piece: Piece) -> None:
        """Know of a piece that is taken."""
        piece.segment.extent_count += 1
        self.used_nbytes += self.rounded(piece.nbytes)

    def give(self, piece: Piece) -> None:
        """Take space back."""
        segment = piece.segment
        segment.extent_count -= 1
        self.used_nbytes -= self.rounded(piece.nbytes)
        if not segment.frozen:
            self._space.give(segment.number, piece.offset, self.rounded(piece.nbytes))
        elif segment.extent_count == 0:
            self.drop(segment)

    def rebuild(self, taken: Sequence[Piece]) -> None:
        """Count anew what is taken; all else of segments that may be written to is free."""
        self._space = Space()
        self.used_nbytes = 0
        begins: dict[Segment, list[Piece]] = {one: [] for one in self.segments.values()}
        for segment in begins:
            segment.extent_count = 0
        for piece in sorted(taken, key=lambda one: one.offset):
            self.count(piece)
            begins[piece.segment].append(piece)
        for segment, pieces in begins.items():
            if segment.frozen:
                if not pieces:
                    self.drop(segment)
                continue
            at = 0
            for piece in pieces:
                if at < piece.offset:
                    self._space.give(segment.number, at, piece.offset - at)
                at = piece.offset + self.rounded(piece.nbytes)
            if at < segment.nbytes:
                self._space.give(segment.number, at, segment.nbytes - at)

    def freeze(self, segment: Segment) -> None:
        """Write nothing more to a segment."""
        segment.frozen = True
        self._space.drop(segment.number)

    def drop(self, segment: Segment) -> None:
        """Let go of a file of which nothing is wanted."""
        self._space.drop(segment.number)
        self.segments.pop(segment.number, None)
        self.unlink(segment.name)
        # Nothing in it is wanted: that some of it could not be kept is of no interest.
        with contextlib.suppress(StorageError):
            segment.file.close()

    def unlink(self, name: str | None) -> None:
        """Remove a segment's name, if it has one."""
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))  # noqa: PTH108, PTH118

    def grow(self) -> Segment:
        """Make one segment more; StorageError, and nothing has changed, where there is no space for it."""
        nbytes = self._segment_nbytes << min(len(self.segments) // _COUNT_OF_A_SIZE, 24)
        while True:
            try:
                return self._grow(nbytes)
            except StorageError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                if nbytes == self._segment_nbytes:
                    raise
            nbytes //= 2

    def _grow(self, nbytes: int) -> Segment:
        number = self._made_count
        self._made_count += 1  # first: a name that has been made is not made again
        name = None if self._prefix is None else f"{self._prefix}{number}.segment"
        file, name = with_descriptors(self.scheduler, lambda: self._new_file(name))
        try:
            file.preallocate(0, nbytes)
        except BaseException:
            self.unlink(name)
            with contextlib.suppress(StorageError):
                file.close()
            raise
        segment = self.segments[number] = Segment(self, number, file, nbytes, name)
        self._space.give(number, 0, nbytes)
        return segment

    def adopt(self, file: _core.File, nbytes: int) -> Segment:
        """Have a file as a segment that nothing is written to."""
        segment = Segment(self, self._made_count, file, nbytes, None)
        segment.frozen = True
        self.segments[segment.number] = segment
        self._made_count += 1
        return segment

    def _new_file(self, name: str | None) -> tuple[_core.File, str | None]:
        """Return a new file, and the name that it has; without a name, if that can be."""
        if name is not None:
            return self._named_file(name), name
        try:
            descriptor = os.open(self.path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                message = f"{error.strerror} (making a file without a name in this directory)"
                raise StorageError(error.errno, message, self.path) from None
        else:
            try:
                return _core.file_from_descriptor(descriptor, True, self._direct), None
            finally:
                os.close(descriptor)
        name = f".tensorferry-temporary-{os.getpid()}-{os.urandom(8).hex()}"
        file = self._named_file(name)
        self.unlink(name)
        try:
            file.size()
        except StorageError:
            # FUSE may know files by their names only: there a killed process leaves them behind.
            return self._named_file(name), name
        return file, None

    def _named_file(self, name: str) -> _core.File:
        path = os.path.join(self.path, name)  # noqa: PTH118
        return _core.open_file(path, True, True, True, True, False, self._direct)


def make_durable(segments: Sequence[Segment]) -> StorageError | None:
    """Sync segments, all of them at once: most of it is waiting. Return the first failure."""
    failures: list[StorageError] = []
    begun: list[_core.Request] = []
    for segment in segments:
        scheduler = scheduler_of(segment.directory.scheduler, segment.file)
        # A write of nothing, with sync=True.
        request = scheduler.new_request(True, False, True, False, False)
        begun.append(request)
        for _, refusal in scheduler.submit(request, [segment.file], [0], [0], [0], [0], None):
            failures.append(refusal)
    for segment, request in zip(segments, begun, strict=True):
        request.wait(None)
        if (failure := request.exception()) is not None:
            segment.sync_failed = True
            failures.append(failure)
    return failures[0] if failures else None


def parts_of(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield which pieces have bytes of a range of a tensor, with begin and end in each."""
    at = 0
    for piece in pieces:
        first, last = max(begin - at, 0), min(end - at, piece.nbytes)
        if first < last:
            yield piece, first, last
        at += piece.nbytes


def _granularity_of(path: str) -> int:
    try:
        block = os.statvfs(path).f_bsize
    except OSError:  # what is opened there will say so
        return GRANULARITY
    if GRANULARITY < block <= _MAX_BLOCK_NBYTES and block & (block - 1) == 0:
        return block
    return GRANULARITY
