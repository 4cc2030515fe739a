"""The segments of a store, which are the files in its directories, and the pieces of tensors in them.

All space of a segment is allocated when it is created, so a full disk is reported at that time. Freed space is reused.
A frozen segment is read-only: its freed space is not reused, and it is dropped once it has no pieces. The tables of
segments and free ranges, and the counters of bytes, change under the store's lock. Files are created and closed without
it, because a slow drive must not block calls that use other drives.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.store.space import Space
from tensorferry.transfer.requests import submit_one
from tensorferry.transfer.runtime import with_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Extents begin and end at multiples of this number. It is a multiple of the page size, which mapping requires, and of
# 4096, which direct I/O requires.
GRANULARITY = max(4096, mmap.PAGESIZE)
# If a file system has larger blocks, up to this size, extents also begin and end at multiples of a block. Otherwise the
# page cache, which writes whole blocks, could overwrite the neighbour of a tensor that is written with direct I/O. XFS
# supports blocks of up to 64 KiB. A larger f_bsize, which network file systems report, is a preferred I/O size and not
# a block size.
_MAX_BLOCK_NBYTES = 64 << 10

# After this number of segments in a directory, the next ones are twice as large. So 320 descriptors suffice for 2 TiB
# with segments of 64 MiB. A segment that is smaller than the store's segment size has at least 1/32 of the space of all
# segments.
_COUNT_OF_A_SIZE = 32
# The size of the first segment, if the total is unknown. Each of the next segments doubles the total.
_FIRST_NBYTES = 1 << 20

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)


@dataclass(eq=False, slots=True)
class Segment:
    """One file of a store, with the amount of its space in use."""

    directory: StoreDirectory
    number: int
    file: _core.File
    nbytes: int
    name: str | None  # None for an unnamed file
    frozen: bool = False  # read-only from now on
    held_nbytes: int = field(init=False)  # space on the drive, less than the size once it has holes
    used_nbytes: int = field(default=0, init=False)  # the space of its pieces
    # reserve() has promised its space: compaction must not return it.
    reserved: bool = field(default=False, init=False)
    # The value of used_nbytes with which compaction failed.
    stuck_at_nbytes: int = field(default=-1, init=False)
    # Some of its data may not have reached the drive.
    sync_failed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.held_nbytes = self.nbytes

    @property
    def is_small(self) -> bool:
        """Whether the segment has too few bytes in use to be worth its descriptor."""
        return self.frozen and 4 * self.used_nbytes < max(self.nbytes, self.directory.first_nbytes)


class Extent(NamedTuple):
    """A range of a segment. Its space is ``nbytes`` rounded up to the directory's granularity."""

    segment: Segment
    offset: int
    nbytes: int


class Piece:
    """The extent of a tensor, or of a part of a tensor. The extent is freed once nothing refers to this object.

    The garbage collector may drop the last reference at any point of any thread. The callback of a weak reference
    therefore only adds the reference to a list of freed pieces, in a single C call that KeyboardInterrupt cannot
    divide. The store's next call frees the space.
    """

    __slots__ = ("__weakref__", "nbytes", "offset", "segment")

    def __init__(self, extent: Extent) -> None:
        self.segment, self.offset, self.nbytes = extent


class StoreDirectory:
    """One of a store's directories, with its segments and its scheduler."""

    def __init__(
        self,
        path: str,
        weight: float,
        scheduler: _core.Scheduler,
        *,
        direct: str,
        segment_nbytes: int,
        prefix: str | None,
    ) -> None:
        self.path = path
        self.weight = weight
        self.scheduler = scheduler
        self.segments: dict[int, Segment] = {}
        self.used_nbytes = 0  # the space of all pieces
        self.held_nbytes = 0  # the space of all segments
        self.growing = threading.RLock()  # held by the thread that creates a segment
        # Whether a thread is creating a segment. Other threads read this without waiting for `growing`.
        self.is_growing = False
        self.dropped: deque[Segment] = deque()  # segments with files that must still be closed
        self._numbers = itertools.count()
        self._direct = direct
        self._granularity = _granularity_of(path)
        self._segment_nbytes = self.rounded(segment_nbytes)
        self.first_nbytes = min(_FIRST_NBYTES, self._segment_nbytes)
        self._prefix = prefix  # the prefix of the segments' names; None for unnamed files
        self._space = Space()

    @property
    def free_nbytes(self) -> int:
        """The space in segments that no piece occupies."""
        return self._space.free_nbytes

    def rounded(self, nbytes: int) -> int:
        """Return the space for ``nbytes``, rounded up to the granularity."""
        return -(-nbytes // self._granularity) * self._granularity

    def has_gap(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` can be allocated without a new segment."""
        return self._space.largest_nbytes >= self.rounded(nbytes)

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate an extent in a free range, or return None if no gap is large enough."""
        found = self._space.allocate(self.rounded(nbytes))
        if found is None:
            return None
        extent = Extent(self.segments[found[0]], found[1], nbytes)
        self.account(extent)
        return extent

    def account(self, extent: Extent) -> None:
        """Add an allocated extent to the counters."""
        extent.segment.used_nbytes += self.rounded(extent.nbytes)
        self.used_nbytes += self.rounded(extent.nbytes)

    def free(self, extent: Extent) -> None:
        """Free an extent. A frozen segment is dropped with its last extent."""
        segment, nbytes = extent.segment, self.rounded(extent.nbytes)
        segment.used_nbytes -= nbytes
        self.used_nbytes -= nbytes
        if not segment.frozen:
            self._space.free(segment.number, extent.offset, nbytes)
        elif segment.used_nbytes == 0:
            self.drop(segment)

    def rebuild(self, allocated: Sequence[Extent]) -> None:
        """Recompute all tables from the allocated extents. The rest of each writable segment is free."""
        self._space = Space()
        self.used_nbytes = 0
        self.held_nbytes = sum(one.held_nbytes for one in self.segments.values())
        extents_of: dict[Segment, list[Extent]] = {one: [] for one in self.segments.values()}
        for segment in extents_of:
            segment.used_nbytes = 0
        for extent in sorted(allocated, key=lambda one: one.offset):
            self.account(extent)
            extents_of[extent.segment].append(extent)
        for segment, extents in extents_of.items():
            if segment.frozen:
                if not extents:
                    self.drop(segment)
                continue
            at = 0
            for extent in extents:
                if at < extent.offset:
                    self._space.free(segment.number, at, extent.offset - at)
                at = extent.offset + self.rounded(extent.nbytes)
            if at < segment.nbytes:
                self._space.free(segment.number, at, segment.nbytes - at)

    def freeze(self, segment: Segment) -> list[tuple[int, int]]:
        """Make a segment read-only. Return its free ranges as pairs of offset and nbytes."""
        segment.frozen = True
        ranges = self._space.drop(segment.number)
        if segment.used_nbytes == 0:
            self.drop(segment)
        return ranges

    def count_holes(self, segment: Segment, nbytes: int) -> None:
        """Subtract bytes that a segment has returned to the file system, as holes, from the counters."""
        if segment.number in self.segments:  # it may have been dropped in the meantime
            segment.held_nbytes -= nbytes
            self.held_nbytes -= nbytes

    def drop(self, segment: Segment) -> None:
        """Remove a segment without pieces from the tables. :meth:`close_dropped` closes its file."""
        self._space.drop(segment.number)
        if self.segments.pop(segment.number, None) is not None:
            self.held_nbytes -= segment.held_nbytes
            self.dropped.append(segment)

    def close_dropped(self) -> None:
        """Close the files of dropped segments. The caller must not hold the store's lock, as this may be slow."""
        with contextlib.suppress(IndexError):
            while True:
                segment = self.dropped.popleft()
                self.unlink(segment.name)
                # The file has no live data, so a write error that close() reports does not matter.
                with contextlib.suppress(StorageError):
                    segment.file.close()

    def unlink(self, name: str | None) -> None:
        """Remove a segment's name, if it has one."""
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))  # noqa: PTH108, PTH118

    def next_segment_nbytes(self, ahead_nbytes: int) -> int:
        """Return the size of the next segment. ``ahead_nbytes`` are expected to be allocated soon; 0 if unknown."""
        open_nbytes = sum(one.nbytes for one in self.segments.values() if not one.frozen)
        part = max(open_nbytes, self.held_nbytes) // _COUNT_OF_A_SIZE
        nbytes = max(ahead_nbytes or open_nbytes, part, self.first_nbytes)
        return min(nbytes, self._segment_nbytes << min(len(self.segments) // _COUNT_OF_A_SIZE, 24))

    def make_segment(self, needed_nbytes: int, ideal_nbytes: int) -> Segment:
        """Create a segment without adding it to the tables. The caller must not hold the store's lock.

        If the disk lacks space for the ideal size, smaller sizes are tried, down to the needed size. With many
        segments, the smallest size may be larger than needed, because each segment costs a descriptor.

        Raises
        ------
        StorageError
            The disk lacks space for the minimum, or the file cannot be created. Nothing has changed.
        """
        minimum = self._granularity << min(len(self.segments) // _COUNT_OF_A_SIZE, 24)
        smallest = max(self.rounded(needed_nbytes), minimum)
        nbytes = first = max(smallest, self.rounded(ideal_nbytes))
        while True:
            try:
                return self._make_segment(nbytes)
            except StorageError as error:
                if error.errno not in NO_SPACE:
                    raise
                if nbytes == smallest:
                    raise self._no_space_error(error, first) from None
            nbytes = max(smallest, self.rounded(nbytes // 2))

    def _no_space_error(self, error: StorageError, first_nbytes: int) -> StorageError:
        """Return the core's error for a full disk, with the larger size that was tried before in the message."""
        message, nbytes = str(error.strerror), error.expected
        # Other errors, such as a directory without space for a name, have no number of bytes.
        if 0 < nbytes < first_nbytes:
            message = f"{message.removesuffix(')')}; {first_nbytes} bytes were tried first)"
        return StorageError(error.errno, message, self.path, expected=nbytes)

    def _make_segment(self, nbytes: int) -> Segment:
        number = next(self._numbers)  # numbers are never reused, and neither are names
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
        """Add a segment to the tables. All space of a new one is free."""
        self.segments[segment.number] = segment
        self.held_nbytes += segment.held_nbytes
        if not segment.frozen:
            self._space.free(segment.number, 0, segment.nbytes)

    def adopt(self, file: _core.File, nbytes: int) -> Segment:
        """Add an existing file as a read-only segment."""
        segment = Segment(self, next(self._numbers), file, nbytes, None, frozen=True)
        self.add(segment)
        return segment

    def _new_file(self, name: str | None) -> tuple[_core.File, str | None]:
        """Create a file, and return it with its name. Without ``name``, create an unnamed file if possible."""
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
            # Some FUSE file systems access files by name, so an unlinked file is unusable there. The named file then
            # remains if the process is killed.
            return self._named_file(name), name
        return file, None

    def _named_file(self, name: str) -> _core.File:
        path = os.path.join(self.path, name)  # noqa: PTH118
        return _core.open_file(path, True, True, True, True, False, self._direct)


def make_durable(segments: Sequence[Segment]) -> StorageError | None:
    """Sync segments concurrently, because a sync is mostly waiting. Return the first error."""
    failures: list[StorageError] = []
    requests: list[_core.Request] = []
    for segment in segments:
        scheduler = segment.directory.scheduler
        # A write of 0 bytes with sync=True is a sync.
        request = scheduler.new_request(True, False, True, False, False)
        requests.append(request)
        try:
            submit_one(scheduler, request, segment.file, (0, 0, None, None), 0, None)
        except StorageError as refusal:
            failures.append(refusal)
    for segment, request in zip(segments, requests, strict=True):
        request.wait(None)
        if (failure := request.exception()) is not None:
            segment.sync_failed = True
            failures.append(failure)
    return failures[0] if failures else None


def parts_of(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces that contain bytes of a tensor's range, each with the range of these bytes in the piece."""
    at = 0
    for piece in pieces:
        first, last = max(begin - at, 0), min(end - at, piece.nbytes)
        if first < last:
            yield piece, first, last
        at += piece.nbytes


def _granularity_of(path: str) -> int:
    try:
        block = os.statvfs(path).f_bsize
    except OSError:  # opening a file in the directory will report the error
        return GRANULARITY
    if GRANULARITY < block <= _MAX_BLOCK_NBYTES and block & (block - 1) == 0:
        return block
    return GRANULARITY
