"""The segments of a store, which are the files in its directories, and the space in them.

A *segment* is a file, and a *piece* is the range of a segment that a tensor occupies. A tensor of at least
``LARGE_NBYTES`` is *alone* in its segment, and the others share segments: to make, sync, link and remove a file takes
about as long as to write 1 MiB. Named segments alone are opened for each use.
Unnamed ones are open for as long as they exist, so only a part of the process's descriptors is used for them, and
further large tensors share segments, too.

The space of a piece is allocated on the drive before the piece is used, so a full disk is reported at that time. Once
nothing refers to a piece, it is free, and the next tensor of exactly its size gets it: training writes tensors of the
same sizes again and again, and data that replace data are written fastest. Free segments beyond an allowance are
removed. If too much space in shared segments is free, the store copies the tensors in them to new ones. So the file
system is the allocator.

A segment is *frozen* if a snapshot links to it, or if its data may be lost: no piece in it is used again. If much of a
frozen shared segment is unused, and the snapshot was removed, the next commit or snapshot copies the rest out of it.

KeyboardInterrupt may be raised between any two bytecodes. The tables change in such an order that an interrupt can lose
the space of a piece until its file is removed, but never give a piece to two tensors. Tables change under the store's
lock, which is held for computations only. Files are created, removed and closed without it, because a slow drive must
not block calls that use other drives.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import threading
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.transfer.runtime import with_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.store.folder import Folder

# Pieces begin and end at multiples of this number. It is a multiple of the page size, which mapping requires, and of
# 4096, which direct I/O requires.
GRANULARITY = max(4096, mmap.PAGESIZE)
# If a file system has larger blocks, up to this size, pieces also begin and end at multiples of a block. Otherwise the
# page cache, which writes whole blocks, could overwrite the neighbour of a tensor that is written with direct I/O. XFS
# supports blocks of up to 64 KiB. A larger f_bsize, which network file systems report, is a preferred I/O size and not
# a block size.
_MAX_BLOCK_NBYTES = 64 << 10

LARGE_NBYTES = 4 << 20
# A shared segment grows in steps that double its size, between these two limits.
_MIN_STEP_NBYTES, _MAX_STEP_NBYTES = 1 << 20, 8 << 20
# It has at most this size, or a larger one in a directory that would need more than _SHARED_COUNT of them.
_SHARED_NBYTES, _SHARED_COUNT = 64 << 20, 64
# Free pieces of this size are kept in any case.
_KEPT_NBYTES = 24 << 20

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Segment:
    """One file of a store.

    Attributes
    ----------
    name : str
        Empty for an unnamed file.
    file : _core.File or None
        The open file; None for a named segment alone.
    nbytes, end : int
        The size of the file, and the end of the last piece.
    extents : dict of int to Extent
        By their offsets, the ranges that belong to pieces, in use or free.
    written, synced : int
        How many writes have ended, and how many of them are durable.
    """

    def __init__(
        self, directory: StoreDirectory, name: str, file: _core.File | None, alone: bool
    ) -> None:
        self.directory, self.name, self.file, self.alone = directory, name, file, alone
        self.nbytes = self.end = self.written = self.synced = 0
        self.extents: dict[int, Extent] = {}
        self.frozen = self.sync_failed = False

    @property
    def used_nbytes(self) -> int:
        """The space of the pieces, in use or free."""
        return sum(one.nbytes for one in self.extents.values())

    def check_synced(self) -> None:
        """Raise StorageError if a sync has failed: a later one may succeed although data were lost."""
        if self.sync_failed:
            why = "an earlier sync of the file has failed; remedy: write its tensors again"
            path = self.directory.folder.join(self.name)
            raise StorageError(errno.EIO, f"{os.strerror(errno.EIO)} ({why})", path)

    def open(self) -> _core.File:
        """Return the open file. If it is a named segment alone, the request that uses it closes it."""
        if self.file is not None:
            return self.file
        directory, name = self.directory, self.name
        file = with_descriptors(directory.scheduler, lambda: directory.open(name, alone=self.alone))
        self.file = None if self.alone else file
        return file


class Piece:
    """A range of a segment. Once nothing refers to this object, the range is free."""

    __slots__ = ("__weakref__", "nbytes", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.segment, self.offset, self.nbytes = segment, offset, nbytes
        extent = Extent(self, segment.directory.dropped.append)
        extent.segment, extent.offset, extent.nbytes = segment, offset, nbytes
        segment.extents[offset] = extent


class Extent(weakref.ref[Piece]):
    """A range that is allocated on the drive, as a weak reference to the piece that owns it.

    The garbage collector may drop the last reference to a piece at any point of any thread, and an interrupt between
    any two lines. The callback adds the extent to a list, in one C call that KeyboardInterrupt cannot divide, and the
    store's next call frees the extents in the list. If that is interrupted, the call after it repeats it.
    """

    __slots__ = ("nbytes", "offset", "segment")
    segment: Segment
    offset: int
    nbytes: int


class StoreDirectory:
    """One of a store's directories, with its segments and its scheduler.

    ``lock`` is the store's lock. ``new_name`` returns the names of new segments, or is None for unnamed ones.
    """

    def __init__(
        self,
        number: int,
        folder: Folder,
        scheduler: _core.Scheduler,
        lock: threading.RLock,
        weight: float = 1.0,
        writable: bool = True,
        new_name: Callable[[], str] | None = None,
    ) -> None:
        self.number, self.folder, self.scheduler, self.weight = number, folder, scheduler, weight
        self._lock, self._writable, self.new_name = lock, writable, new_name
        self.segments: dict[Segment, None] = {}
        self.growing = threading.RLock()  # held by the thread that makes or extends a file
        self.closed = False
        self.names_made, self.names_synced = (
            1,
            0,
        )  # the names of files, and how many of them are durable
        self.live_nbytes = 0  # the space of the pieces in use, except those in frozen segments
        self.free_nbytes = 0  # the space of the free pieces
        self.reserved_nbytes = 0  # the space that reserve() has promised
        # The bytes that were written since the last commit, and between that and the one before it.
        self.changed_nbytes = self.earlier_nbytes = 0
        self.dropped: deque[Extent] = deque()
        self._free: dict[int, deque[Piece]] = {}  # by size; the size that was freed last comes last
        self._shared: Segment | None = None  # the shared segment that gets new pieces
        self._has_empty = False
        block = os.fstatvfs(folder.descriptor).f_bsize
        is_power = GRANULARITY < block <= _MAX_BLOCK_NBYTES and block & (block - 1) == 0
        self._granularity = block if is_power else GRANULARITY

    def rounded(self, nbytes: int) -> int:
        """Return the space for ``nbytes``: at least one block."""
        return max(-(-nbytes // self._granularity), 1) * self._granularity

    # Tables. The caller holds the store's lock.

    def take(self, nbytes: int) -> Piece | None:
        """Return a free piece of exactly this space, or None."""
        if not (pieces := self._free.get(nbytes)):
            return None
        piece = pieces.pop()
        self.free_nbytes -= nbytes
        self.live_nbytes += nbytes
        return piece

    def carve(self, nbytes: int) -> Piece | None:
        """Return a new piece for a small tensor if the shared file has space for it at its end, else None."""
        return self._carve(self._shared, nbytes) if nbytes < LARGE_NBYTES else None

    def reclaim(self) -> None:
        """Make the pieces free to which nothing refers any more."""
        while self.dropped:
            extent = self.dropped[0]
            segment = extent.segment
            # Otherwise an interrupted call has freed the extent already, or it was cut.
            if segment.extents.get(extent.offset) is extent:
                if segment.frozen:
                    del segment.extents[extent.offset]
                    self._has_empty = True
                else:
                    self.live_nbytes -= extent.nbytes
                    self._add_free(Piece(segment, extent.offset, extent.nbytes))
            self.dropped.popleft()

    def count(self) -> tuple[int, int]:
        """Return the space of the pieces in use, and of the segments. Correct the counters, after interrupts."""
        self.reclaim()
        used = {one: one.used_nbytes for one in self.segments}
        self._free = {size: pieces for size, pieces in self._free.items() if pieces}
        self.free_nbytes = sum(piece.nbytes for piece in self.free_pieces())
        self.live_nbytes = sum(n for one, n in used.items() if not one.frozen) - self.free_nbytes
        self._has_empty = True
        tail = 0 if self._shared is None else self._shared.nbytes - self._shared.end
        return sum(used.values()) - self.free_nbytes, sum(used.values()) + tail

    def stats(self) -> dict[str, Any]:
        """Return the space of the directory."""
        used_nbytes, nbytes = self.count()
        return {
            "path": self.folder.path,
            "segments": len(self.segments),
            "reserved_nbytes": nbytes,
            "used_nbytes": used_nbytes,
            "free_nbytes": nbytes - used_nbytes,
        }

    def free_pieces(self) -> list[Piece]:
        """Return all free pieces."""
        return list(itertools.chain(*self._free.values()))

    def free_sizes(self) -> Counter[int]:
        """Return how many pieces of each size are free."""
        return Counter({size: len(pieces) for size, pieces in self._free.items()})

    def purge(self) -> None:
        """Drop the free pieces in frozen segments."""
        for size in list(self._free):
            pieces = self._free[size]
            self._free[size] = deque(one for one in pieces if not one.segment.frozen)
        self.count()

    def _add_free(self, piece: Piece) -> None:
        pieces = self._free.pop(piece.nbytes, deque())
        # Files that were written before come first: the first write of a file takes half as long again.
        (pieces.append if piece.segment.written else pieces.appendleft)(piece)
        self._free[piece.nbytes] = pieces
        self.free_nbytes += piece.nbytes

    # Files. The caller does not hold the store's lock.

    def open(self, name: str, flags: int = os.O_RDWR, *, alone: bool = False) -> _core.File:
        """Open or create a file."""
        try:
            with self.folder.opened(name, flags if self._writable else os.O_RDONLY) as descriptor:
                return _core.file_from_descriptor(descriptor, self._writable, "auto", alone)
        except BaseException as error:
            if flags == _CREATE and getattr(error, "errno", None) != errno.EEXIST:
                self.folder.unlink(name)
            raise

    def grow(self, nbytes: int, *, keep: bool) -> Piece:
        """Make a file for a piece, or extend a shared one in steps.

        If the disk is full, free files are removed, unless the caller wants to ``keep`` them.

        Raises
        ------
        StorageError
            The disk is full, or the file cannot be created. Nothing has changed.
        ValueError
            The store was closed meanwhile.
        """
        with self.growing:
            alone = nbytes >= LARGE_NBYTES and self._may_have_file()
            segment = None if alone else self._shared
            # Another thread may have extended the file while this one waited, or may take what this one adds.
            while (piece := self._carve(segment, nbytes)) is None:
                largest = max(_SHARED_NBYTES, self.live_nbytes // _SHARED_COUNT)
                if segment is None or segment.frozen or segment.end + nbytes > largest:
                    segment = with_descriptors(self.scheduler, lambda: self._new_segment(alone))
                step = min(max(segment.nbytes, _MIN_STEP_NBYTES), _MAX_STEP_NBYTES)
                try:
                    self._extend(segment, nbytes, 0 if alone else step, keep)
                except BaseException:
                    if not segment.extents and segment is not self._shared:
                        self._remove(segment)
                    raise
        if alone and self.new_name is not None and (file := piece.segment.file) is not None:
            file.close()
            piece.segment.file = None
        return piece

    def _may_have_file(self) -> bool:
        """Return whether a large tensor gets a file: named ones, and unnamed ones while descriptors are left."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        return self.new_name is not None or 2 * len(self.segments) < limit

    def _carve(self, segment: Segment | None, nbytes: int) -> Piece | None:
        """Return a new piece at the end of a segment, or None if it has to be extended first."""
        with self._lock:
            if self.closed:
                raise ValueError("the store was closed during this call")
            if segment is None or segment.frozen or segment.end + nbytes > segment.nbytes:
                return None
            offset = segment.end
            self.segments[segment] = None
            self._shared = self._shared if segment.alone else segment
            # First, so after an interrupt the next piece comes behind this range.
            segment.end += nbytes
            self.live_nbytes += nbytes
            return Piece(segment, offset, nbytes)

    def _extend(self, segment: Segment, nbytes: int, step: int, keep: bool) -> None:
        """Extend a segment for a piece, and remove free segments if that is necessary and allowed."""
        needed = segment.end + nbytes - segment.nbytes
        try:
            segment.open().preallocate(segment.nbytes, max(needed, step))
        except StorageError as error:
            if error.errno not in NO_SPACE:
                raise
            if needed >= step and (keep or not self.shrink(nbytes)):
                what = (error.errno, str(error.strerror), self.folder.path)
                raise StorageError(*what, expected=nbytes) from None
            self._extend(segment, nbytes, 0, keep)
        else:
            segment.nbytes += max(needed, step)

    def _new_segment(self, alone: bool) -> Segment:
        if self.new_name is not None:
            segment = Segment(self, name := self.new_name(), self.open(name, _CREATE), alone)
            self.names_made += (
                1  # only now, so a sync that has begun before does not count for this name
            )
            return segment
        try:
            return Segment(self, "", self.open(".", os.O_RDWR | os.O_TMPFILE), alone)
        except StorageError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
        name = f".tensorferry-temporary-{os.getpid()}-{os.urandom(8).hex()}"
        file = self.open(name, _CREATE)
        self.folder.unlink(name)
        try:
            file.size()
        except StorageError:
            # Some FUSE file systems access files by name, so an unlinked file is unusable there. The named file then
            # remains if the process is killed.
            return Segment(self, name, self.open(name, _CREATE), alone)
        return Segment(self, "", file, alone)

    def sync(self, segments: list[Segment]) -> list[StorageError]:
        """Make segments durable, all at the same time, because a sync is mostly waiting. Return all errors.

        After a failed sync no piece of the segment is used again.
        """
        for segment in segments:
            segment.check_synced()
        written = [segment.written for segment in segments]
        try:
            files = [segment.open() for segment in segments]
        except StorageError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or len(segments) == 1:
                raise
            return [failure for one in segments for failure in self.sync([one])]
        scheduler = self.scheduler
        # A write of 0 bytes with sync=True is a sync. If it is interrupted, it is unknown whether data were lost.
        request = scheduler.new_request(True, False, True, False, False)
        for segment in segments:
            segment.sync_failed = True
        zeros = [0] * len(files)
        refused = scheduler.submit(request, files, zeros, zeros, zeros, range(len(files)), None)
        request.wait(None)
        failed = dict([*refused, *request.failures()])
        for at, segment in enumerate(segments):
            if at not in failed:
                segment.synced, segment.sync_failed = written[at], False
            else:
                segment.frozen = True
        return list(failed.values())

    def sync_names(self) -> None:
        """Make the names of new files durable."""
        if self.names_synced != (names_made := self.names_made):
            self.folder.sync()
            self.names_synced = names_made

    def tidy(self, *, with_frozen: bool) -> list[Segment]:
        """Remove free segments beyond the allowance, and return shared ones from which to copy the tensors to others.

        These have more than a quarter of unused space: if too much is free; and ``with_frozen``, if they are frozen,
        and no snapshot has them any more.
        """
        reserved = max(self.reserved_nbytes - self.live_nbytes, 0)
        due = max(reserved, self.earlier_nbytes - self.changed_nbytes) + _KEPT_NBYTES
        if self.free_nbytes > due or self._has_empty:
            self.shrink(self.free_nbytes - due, reserved)
        found = []
        with self._lock:  # no other thread closes the file of a segment that has extents
            excess, free = self.free_nbytes - due, Counter[Segment]()
            if self.closed or not (excess > 0 or with_frozen):
                return []
            for piece in self.free_pieces():
                free[piece.segment] += piece.nbytes
            for one in sorted(self.segments, key=lambda one: -free[one]):
                is_due = with_frozen if one.frozen else excess > 0
                if one.alone or not is_due or 4 * (one.used_nbytes - free[one]) >= 3 * one.end:
                    continue
                links = os.fstat(one.open().descriptor).st_nlink if one.frozen else 0
                if one.extents and links <= bool(one.name):
                    excess -= free[one]
                    found.append(one)
        return found

    def shrink(self, nbytes: int, kept_nbytes: int = 0) -> bool:
        """Remove free segments of ``nbytes`` or slightly more: those of the sizes that were freed the longest time ago.

        ``kept_nbytes`` of free space remain. Return whether any were removed.
        """
        found = False
        with self._lock:
            self.reclaim()
            for size in [one for one in self._free if one >= LARGE_NBYTES]:
                count = max(min(-(-nbytes // size), (self.free_nbytes - kept_nbytes) // size), 0)
                alone = [piece for piece in self._free[size] if piece.segment.alone][:count]
                due = set(alone)
                self._free[size] = deque(piece for piece in self._free[size] if piece not in due)
                nbytes -= size * len(alone)
                for piece in alone:
                    self.free_nbytes -= piece.nbytes
                    del piece.segment.extents[0]
                    found = self._has_empty = True
        if self._has_empty:
            self._has_empty = False
            for segment in list(self.segments):
                if not segment.extents and segment is not self._shared:
                    self._remove(segment)
        return found

    def close(self, *, remove: bool = False) -> list[StorageError]:
        """Close all files, and remove those with names if ``remove`` is set. Return the errors."""
        failures = []
        for segment in list(self.segments):
            try:
                if segment.file is not None:
                    segment.file.close()
                if remove and segment.name:
                    self.folder.unlink(segment.name)
            except StorageError as error:
                failures.append(error)
        return failures

    def _remove(self, segment: Segment) -> None:
        """Remove the file of a segment without pieces. If that fails, the next store in the directory does it."""
        self.segments.pop(segment, None)
        with contextlib.suppress(StorageError):
            if segment.name:
                self.folder.unlink(segment.name)
        with contextlib.suppress(StorageError):
            if segment.file is not None:
                segment.file.close()
