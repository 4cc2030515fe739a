"""The files of a store: segments in its directories, and which parts of them are tensors'.

A segment gets all its space when it is made, so that a full disk is found then. It is dropped when nothing in it is
wanted and nothing more is written to it; until then its space is used again. Tables change under the lock of the store;
files are made and closed without it, because a slow drive must not stop the others.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.store.space import Space
from tensorferry.transfer.requests import submit_one
from tensorferry.transfer.runtime import scheduler_of, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.transfer.runtime import AnyScheduler

# Extents begin and end at multiples of it: of pages, for mapping, and of what drives want.
GRANULARITY = max(4096, mmap.PAGESIZE)
# And of blocks, where a file system has larger ones: the page cache writes them whole, over what lies beside a tensor's
# end and passes it. XFS has up to 64 KiB; what network file systems tell may be a megabyte and means something else.
_MAX_BLOCK_NBYTES = 64 << 10

# After so many segments of a directory the next ones are twice as large: 320 descriptors are 2 TiB at 64 MiB. Segments
# below the size that was chosen have a part of all space that is not smaller than one in so many.
_COUNT_OF_A_SIZE = 32
# The first segment, where it is not known how much will be written. The next ones double all space.
_FIRST_NBYTES = 1 << 20

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)


class Segment:
    """One file: in the core's hands, and how much of it is wanted."""

    __slots__ = (
        "directory",
        "file",
        "frozen",
        "held_nbytes",
        "name",
        "nbytes",
        "number",
        "promised",
        "stuck_at_nbytes",
        "sync_failed",
        "used_nbytes",
    )

    def __init__(
        self,
        directory: StoreDirectory,
        number: int,
        file: _core.File,
        nbytes: int,
        name: str | None,
    ) -> None:
        self.directory = directory
        self.number = number
        self.file = file
        self.nbytes = nbytes
        self.held_nbytes = nbytes  # space on the drive: less than its size once it has holes
        self.used_nbytes = 0  # of it, what is wanted
        self.name = name  # None: it has none
        self.frozen = False  # nothing will be written to it any more
        self.promised = False  # reserved by the user: not given back
        self.stuck_at_nbytes = -1  # with so much in it, it could not be copied out
        self.sync_failed = False  # some of it may never have reached the drive

    @property
    def is_small(self) -> bool:
        """Whether it is hardly worth its descriptor."""
        return self.frozen and 4 * self.used_nbytes < max(self.nbytes, self.directory.first_nbytes)


class Extent(NamedTuple):
    """Bytes of a segment, up to where the next tensor may begin."""

    segment: Segment
    offset: int
    nbytes: int


class Piece:
    """A place that a tensor, or a part of one, has. It is free when nothing refers to this object any more.

    The garbage collector may notice that anywhere: so a weak reference only notes it, without any bytecode that Ctrl-C
    could come between, for the store's next call.
    """

    __slots__ = ("__weakref__", "nbytes", "offset", "segment")

    def __init__(self, place: Extent) -> None:
        self.segment, self.offset, self.nbytes = place


class StoreDirectory:
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
        self.held_nbytes = 0  # all space that segments have
        self.growing = threading.RLock()  # held by the thread that makes a segment
        self.is_growing = False
        self.dropped: deque[Segment] = deque()  # still to be closed
        self._numbers = itertools.count()
        self._direct = direct
        self._granularity = _granularity_of(path)
        self._segment_nbytes = self.rounded(segment_nbytes)
        self.first_nbytes = min(_FIRST_NBYTES, self._segment_nbytes)
        self._prefix = prefix  # of segments' names; None: they have none
        self._space = Space()

    @property
    def free_nbytes(self) -> int:
        """Reserved space that nothing has."""
        return self._space.free_nbytes

    def rounded(self, nbytes: int) -> int:
        """Return the space that so many bytes take."""
        return -(-nbytes // self._granularity) * self._granularity

    def has_gap(self, nbytes: int) -> bool:
        """Return whether so many bytes can be taken."""
        return self._space.largest_nbytes >= self.rounded(nbytes)

    def take(self, nbytes: int) -> Extent | None:
        """Return space of what is free; None where no gap is as large."""
        found = self._space.take(self.rounded(nbytes))
        if found is None:
            return None
        place = Extent(self.segments[found[0]], found[1], nbytes)
        self.count(place)
        return place

    def count(self, place: Extent) -> None:
        """Know of a place that is taken."""
        place.segment.used_nbytes += self.rounded(place.nbytes)
        self.used_nbytes += self.rounded(place.nbytes)

    def give(self, place: Extent) -> None:
        """Take space back."""
        segment, nbytes = place.segment, self.rounded(place.nbytes)
        segment.used_nbytes -= nbytes
        self.used_nbytes -= nbytes
        if not segment.frozen:
            self._space.give(segment.number, place.offset, nbytes)
        elif segment.used_nbytes == 0:
            self.drop(segment)

    def rebuild(self, taken: Sequence[Extent]) -> None:
        """Count anew what is taken; all else of segments that may be written to is free."""
        self._space = Space()
        self.used_nbytes = 0
        self.held_nbytes = sum(one.held_nbytes for one in self.segments.values())
        begins: dict[Segment, list[Extent]] = {one: [] for one in self.segments.values()}
        for segment in begins:
            segment.used_nbytes = 0
        for place in sorted(taken, key=lambda one: one.offset):
            self.count(place)
            begins[place.segment].append(place)
        for segment, places in begins.items():
            if segment.frozen:
                if not places:
                    self.drop(segment)
                continue
            at = 0
            for place in places:
                if at < place.offset:
                    self._space.give(segment.number, at, place.offset - at)
                at = place.offset + self.rounded(place.nbytes)
            if at < segment.nbytes:
                self._space.give(segment.number, at, segment.nbytes - at)

    def freeze(self, segment: Segment) -> list[tuple[int, int]]:
        """Write nothing more to a segment; return what was free in it: offset, bytes."""
        segment.frozen = True
        ranges = self._space.drop(segment.number)
        if segment.used_nbytes == 0:
            self.drop(segment)
        return ranges

    def count_holes(self, segment: Segment, nbytes: int) -> None:
        """Know that so much of a segment has gone back to the file system."""
        if segment.number in self.segments:  # else it has gone meanwhile
            segment.held_nbytes -= nbytes
            self.held_nbytes -= nbytes

    def drop(self, segment: Segment) -> None:
        """Let go of a file of which nothing is wanted; ``close_dropped`` closes it."""
        self._space.drop(segment.number)
        if self.segments.pop(segment.number, None) is not None:
            self.held_nbytes -= segment.held_nbytes
            self.dropped.append(segment)

    def close_dropped(self) -> None:
        """Close what has been dropped. The store's lock is not held: the file system may take its time."""
        with contextlib.suppress(IndexError):
            while True:
                segment = self.dropped.popleft()
                self.unlink(segment.name)
                # Nothing in it is wanted: that some of it could not be kept is of no interest.
                with contextlib.suppress(StorageError):
                    segment.file.close()

    def unlink(self, name: str | None) -> None:
        """Remove a segment's name, if it has one."""
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))  # noqa: PTH108, PTH118

    def wanted_nbytes(self, ahead_nbytes: int) -> int:
        """Return the next segment's size, where so much is known to be taken soon; 0: nothing is known."""
        open_nbytes = sum(one.nbytes for one in self.segments.values() if not one.frozen)
        part = max(open_nbytes, self.held_nbytes) // _COUNT_OF_A_SIZE
        wanted = max(ahead_nbytes or open_nbytes, part, self.first_nbytes)
        return min(wanted, self._segment_nbytes << min(len(self.segments) // _COUNT_OF_A_SIZE, 24))

    def make(self, needed_nbytes: int, wanted_nbytes: int) -> Segment:
        """Make one segment more, which is in no table yet. The store's lock is not held.

        Where space is short it is smaller than it is wanted, down to what is needed (and somewhat more where there are
        many, each of which costs a descriptor). StorageError, and nothing has changed, where there is no space for it.
        """
        many = self._granularity << min(len(self.segments) // _COUNT_OF_A_SIZE, 24)
        smallest = max(self.rounded(needed_nbytes), many)
        nbytes = first = max(smallest, self.rounded(wanted_nbytes))
        while True:
            try:
                return self._make(nbytes)
            except StorageError as error:
                if error.errno not in NO_SPACE:
                    raise
                if nbytes == smallest:
                    raise self._full(error, first) from None
            nbytes = max(smallest, self.rounded(nbytes // 2))

    def _full(self, error: StorageError, first_nbytes: int) -> StorageError:
        """Return what the core says of a full drive, with the larger size that was tried before."""
        message, nbytes = str(error.strerror), error.expected
        if 0 < nbytes < first_nbytes:  # else it is no file that there is no space for
            message = f"{message.removesuffix(')')}; {first_nbytes} bytes were tried first)"
        return StorageError(error.errno, message, self.path, expected=nbytes)

    def _make(self, nbytes: int) -> Segment:
        number = next(self._numbers)  # a name that has been made is not made again
        name = None if self._prefix is None else f"{self._prefix}{number}.segment"
        file, name = with_descriptors(self.scheduler, lambda: self._new_file(name))
        try:
            file.preallocate(0, nbytes)
        except BaseException:
            self.unlink(name)
            with contextlib.suppress(StorageError):
                file.close()
            raise
        return Segment(self, number, file, nbytes, name)

    def add(self, segment: Segment) -> None:
        """Have a segment that has been made."""
        self.segments[segment.number] = segment
        self.held_nbytes += segment.held_nbytes
        self._space.give(segment.number, 0, segment.nbytes)

    def adopt(self, file: _core.File, nbytes: int) -> Segment:
        """Have a file as a segment that nothing is written to."""
        segment = Segment(self, next(self._numbers), file, nbytes, None)
        segment.frozen = True
        self.segments[segment.number] = segment
        self.held_nbytes += nbytes
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
        scheduler = scheduler_of(segment.directory.scheduler, segment.file, True)
        # A write of nothing, with sync=True.
        request = scheduler.new_request(True, False, True, False, False)
        begun.append(request)
        try:
            submit_one(scheduler, request, segment.file, (0, 0, None, None), 0, None)
        except StorageError as refusal:
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
