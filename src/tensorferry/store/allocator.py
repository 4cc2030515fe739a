"""The allocator of a store's space.

A segment is one of the store's files, and an extent is a range of a segment. A piece is the object that owns the extent
of a tensor, or of a part of a tensor. The allocator finds extents for pieces in the segments, and creates segments as
needed. Once nothing refers to a piece, the allocator frees the piece's extent.

The tables are `_allocated`, which has the extent of each piece, and the directories' free ranges and counters of bytes.
KeyboardInterrupt may be raised between any two bytecodes. `_allocated` is authoritative: after an interrupted change,
all other tables are rebuilt from it. Tables change under the store's lock, which is held for computations only. Files
are created, queried and closed without the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from tensorferry.errors import StorageError, storage_error
from tensorferry.store.segments import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensorferry.store.segments import Extent, Segment, StoreDirectory

# The excess is the space of a store's segments, minus twice the bytes in use. Compaction starts when the excess, plus
# 1 MiB for each segment because of its descriptor, is larger than _COMPACT_FROM_NBYTES. It ends once the excess,
# without this addition, and the number of nearly empty segments are below the COMPACT_TO limits.
_COMPACT_FROM_NBYTES = 48 << 20
COMPACT_TO_NBYTES, COMPACT_TO_COUNT = 16 << 20, 16
_SEGMENT_OVERHEAD_NBYTES = 1 << 20
_WAIT_SECONDS = 1.0


class SegmentAllocator:
    """An allocator for the space in all directories of a store."""

    def __init__(
        self, lock: threading.RLock, segment_nbytes: int, sweep: Callable[[], None]
    ) -> None:
        self.directories: list[StoreDirectory] = []
        self.closed = False
        self._lock = lock
        self._grown = threading.Condition(lock)  # notified after each attempt to create a segment
        self._segment_nbytes = segment_nbytes
        self._sweep = sweep  # drops the pieces of transfers that have ended
        # Weak references to dropped pieces, the oldest first. Appending to a deque is atomic, so the callbacks of the
        # references need no lock.
        self._freed: deque[weakref.ref[Piece]] = deque()
        self._allocated: dict[weakref.ref[Piece], Extent] = {}
        self._is_inconsistent = False
        self._compact_from_nbytes = _COMPACT_FROM_NBYTES  # the current limit; see is_sparse()

    def rounded(self, nbytes: int) -> int:
        """Return the space for ``nbytes``, rounded up to the coarsest granularity of the directories."""
        return max(directory.rounded(nbytes) for directory in self.directories)

    def allocate(self, nbytes: int, ahead_nbytes: int = 0) -> tuple[Piece, ...]:
        """Allocate a tensor: one piece or, for a large tensor, several pieces of a segment's size and one for the rest.

        The caller must not hold the lock. ``ahead_nbytes`` is the total that the caller is about to allocate, including
        this tensor. It determines the size of new segments.
        """
        return tuple(
            self.allocate_piece(
                min(self._segment_nbytes, nbytes - begin), ahead_nbytes, self.directories
            )
            for begin in range(0, nbytes, self._segment_nbytes)
        )

    def allocate_piece(
        self, nbytes: int, ahead_nbytes: int, directories: Sequence[StoreDirectory]
    ) -> Piece:
        """Allocate a piece in one of the directories. The caller must not hold the lock."""
        failures: dict[StoreDirectory, StorageError] = {}
        while True:
            with self._lock:
                piece, full = self._find(nbytes, directories, failures)
                if piece is None and full is None and len(failures) < len(directories):
                    # Other threads are creating segments in all remaining directories. The wait has a timeout, because
                    # an interrupted thread may not notify this one.
                    self._grown.wait(_WAIT_SECONDS)
                    continue
            self.close_dropped()
            if piece is not None:
                return piece
            if full is None:
                raise next(iter(failures.values()))
            try:
                self._grow(full, nbytes, ahead_nbytes)
            except StorageError as error:
                failures[full] = error

    def adopt(self, extents: Sequence[Extent]) -> tuple[Piece, ...]:
        """Register extents of read-only segments as allocated, and return their pieces."""
        for extent in extents:
            extent.segment.directory.account(extent)
        return tuple(map(self._register, extents))

    def reclaim(self) -> None:
        """Free the space of all pieces that nothing refers to any more."""
        with self._lock:
            if self._freed or self._is_inconsistent:
                with self._change():
                    self._free_dropped()
        self.close_dropped()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserve space for tensors of these sizes, in addition to those that exist. On failure nothing is reserved.

        The caller must not hold the lock. Reserved space is returned to the file system only when the store is closed.
        """
        ahead = sum(map(self.rounded, sizes))
        self._check_disks(sum(one.free_nbytes for one in self.directories), ahead)
        before = set(self.segments())
        taken: list[tuple[Piece, ...]] = []
        try:
            # Allocate exactly what the tensors will need, and free it at the end. The segments remain.
            for size in sorted(sizes, reverse=True):
                taken.append(self.allocate(size, ahead))
                ahead -= self.rounded(size)
        except BaseException:
            taken.clear()
            with self._lock, self._change():
                self._free_dropped()
                for segment in set(self.segments()) - before:
                    if segment.used_nbytes == 0:
                        segment.directory.drop(segment)
            self.close_dropped()
            raise
        with self._lock:
            for segment in self.segments():
                segment.reserved = segment.reserved or not segment.frozen
        taken.clear()
        self.reclaim()

    def freeze(self, segments: Sequence[Segment]) -> None:
        """Make segments read-only, and replace their space with new segments. On failure nothing changes.

        The caller must not hold the lock. Free space in the old segments is returned to the file system.
        """
        writable = [segment for segment in segments if not segment.frozen]
        missing: dict[StoreDirectory, int] = {}
        reserved = {segment.directory for segment in writable if segment.reserved}
        for segment in writable:
            nbytes = segment.nbytes if segment.reserved else segment.used_nbytes
            missing[segment.directory] = missing.get(segment.directory, 0) + nbytes
        self._check_disks(0, sum(missing.values()))
        made: list[Segment] = []
        try:
            for directory, nbytes in missing.items():
                while nbytes > 0:
                    needed = min(nbytes, self._segment_nbytes)
                    with directory.growing:
                        segment = self._make_segment(directory, needed, nbytes)
                    made.append(segment)
                    segment.reserved = directory in reserved
                    nbytes -= segment.nbytes
        except StorageError:
            for segment in made:
                segment.directory.dropped.append(segment)
            self.close_dropped()
            raise
        self._add(made)
        self.retire(writable)

    def retire(self, segments: Sequence[Segment]) -> None:
        """Make segments read-only, and return their free space to the file system.

        The caller must not hold the lock.
        """
        for segment in segments:
            with self._lock, self._change():
                holes = segment.directory.freeze(segment)
            punched = 0
            with contextlib.suppress(StorageError):  # the file system may not support holes
                for offset, nbytes in holes:
                    segment.file.punch(offset, nbytes)
                    punched += nbytes
            with self._lock, self._change():
                segment.directory.count_holes(segment, punched)
        self.close_dropped()

    def close_dropped(self) -> None:
        """Close the files of segments without pieces. The caller must not hold the lock."""
        for directory in self.directories:
            if directory.dropped:
                directory.close_dropped()

    # Compaction

    def is_sparse(self) -> bool:
        """Return whether the unused space justifies compaction now.

        note_compacted() may have raised the limit above the default. The limit falls again with the excess.
        """
        now = self._sparse_nbytes()
        least = min(self._compact_from_nbytes, now + COMPACT_TO_NBYTES)
        self._compact_from_nbytes = max(least, _COMPACT_FROM_NBYTES)
        return now > self._compact_from_nbytes

    def note_compacted(self) -> None:
        """Raise the limit for the next compaction, because this one has done all that is possible now."""
        self._compact_from_nbytes = self._sparse_nbytes() + COMPACT_TO_NBYTES

    def sparse_segments(self, most_nbytes: int, most_count: int) -> list[Segment]:
        """Return the segments that compaction should empty to meet the limits, the emptiest first.

        Each of them has less than half of its space in use, or so few bytes in use that it is not worth its descriptor.
        Segments of the second kind are returned only if there are more than ``most_count`` of them. The space of the
        remaining segments is at most twice the bytes in use plus ``most_nbytes``. The caller must hold the lock.
        """
        segments = [
            one
            for one in self.segments()
            if (one.frozen or not one.reserved) and one.used_nbytes != one.stuck_at_nbytes
        ]
        excess = sum(one.held_nbytes - 2 * one.used_nbytes for one in self.directories)
        found = []
        for segment in sorted(segments, key=lambda one: one.used_nbytes / one.held_nbytes):
            if excess <= most_nbytes or 2 * segment.used_nbytes >= segment.held_nbytes:
                break
            found.append(segment)
            excess -= segment.held_nbytes - segment.used_nbytes
        small = [one for one in segments if one.is_small and one not in found]
        if len(small) > most_count:
            small.sort(key=lambda one: one.used_nbytes)
            found += small[: len(small) - min(most_count, COMPACT_TO_COUNT)]
        return found

    def _sparse_nbytes(self) -> int:
        return sum(
            one.held_nbytes - 2 * one.used_nbytes + len(one.segments) * _SEGMENT_OVERHEAD_NBYTES
            for one in self.directories
        )

    def segments(self) -> Iterator[Segment]:
        """Yield all segments."""
        for directory in self.directories:
            yield from list(directory.segments.values())

    def _find(
        self,
        nbytes: int,
        directories: Sequence[StoreDirectory],
        failures: Mapping[StoreDirectory, StorageError],
    ) -> tuple[Piece | None, StoreDirectory | None]:
        """Allocate a piece, and return (piece, None).

        Without space, return (None, the directory in which to create a segment). If other threads are creating segments
        in all directories that have not failed, return (None, None).
        """
        if self.closed:
            raise ValueError("the store is closed")
        with self._change():
            self._free_dropped()
            # The first choice is the directory with the lowest ratio of used bytes to weight after this allocation.
            order = sorted(directories, key=lambda one: (one.used_nbytes + nbytes) / one.weight)
            if not order[0].has_gap(nbytes):
                self._sweep()
                self._free_dropped()
            for directory in order:
                extent = directory.allocate(nbytes)
                if extent is not None:
                    return self._register(extent), None
                if directory in failures:
                    continue
                if not directory.is_growing:
                    return None, directory
                # Another thread is creating a segment there, which may be slow. Try the next directory.
            return None, None

    def _grow(self, directory: StoreDirectory, nbytes: int, ahead_nbytes: int) -> None:
        """Create a segment in a directory, unless it has a gap of ``nbytes``. The caller must not hold the lock."""
        with directory.growing:
            with self._lock:
                # Another thread may have created a segment while this one waited for the lock.
                if directory.has_gap(nbytes):
                    return
            share = directory.weight / sum(one.weight for one in self.directories)
            self._add([self._make_segment(directory, nbytes, int(ahead_nbytes * share))])

    def _make_segment(
        self, directory: StoreDirectory, needed_nbytes: int, ahead_nbytes: int
    ) -> Segment:
        try:
            with self._lock:
                ideal_nbytes = directory.next_segment_nbytes(ahead_nbytes)
                directory.is_growing = True
            return directory.make_segment(needed_nbytes, ideal_nbytes)
        finally:
            directory.is_growing = False
            with self._lock:
                self._grown.notify_all()

    def _add(self, made: Sequence[Segment]) -> None:
        """Add new segments to the tables. If the store was closed in the meantime, close them and raise ValueError."""
        with self._lock:
            if not self.closed:
                with self._change():
                    for segment in made:
                        segment.directory.add(segment)
                return
        for segment in made:
            segment.directory.dropped.append(segment)
        self.close_dropped()
        raise ValueError("the store was closed during this call")

    def _register(self, extent: Extent) -> Piece:
        """Return a piece for an allocated extent. The extent is freed after the last reference to the piece is gone."""
        piece = Piece(extent)
        # The callback is a C function, so KeyboardInterrupt cannot be raised within it, and it takes no lock: garbage
        # collection may run it in any thread at any point.
        self._allocated[weakref.ref(piece, self._freed.append)] = extent
        return piece

    def _free_dropped(self) -> None:
        """Free the extents of all pieces in `_freed`, which nothing refers to any more."""
        while self._freed:
            # An interrupt between these lines leaves the reference in `_freed`. The next call pops it again, which has
            # no effect, and _rebuild() recomputes the tables.
            extent = self._allocated.pop(self._freed[0], None)
            self._freed.popleft()
            if extent is not None:
                extent.segment.directory.free(extent)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Mark the tables as inconsistent during the block. After an interrupt, the next block rebuilds them first."""
        if self._is_inconsistent:
            self._rebuild()
        self._is_inconsistent = True
        try:
            yield
        except StorageError:
            self._is_inconsistent = False
            raise
        self._is_inconsistent = False

    def _rebuild(self) -> None:
        """Recompute the directories' tables from `_allocated`, after an interrupted change."""
        while self._freed:
            self._allocated.pop(self._freed[0], None)
            self._freed.popleft()
        for directory in self.directories:
            directory.rebuild(
                [one for one in self._allocated.values() if one.segment.directory is directory]
            )

    def _check_disks(self, free_nbytes: int, nbytes: int) -> None:
        """Raise StorageError if the disks, and ``free_nbytes`` in existing segments, have less space than ``nbytes``.

        The check comes before any allocation: a failing attempt would fill the disks, and other programs would find
        them full for a while.
        """
        disks = {}
        for directory in self.directories:
            try:
                disk = os.statvfs(directory.path)
                device = os.stat(directory.path).st_dev  # noqa: PTH116
            except OSError as error:
                message = f"{error.strerror} (asking how much space is free)"
                raise StorageError(error.errno, message, directory.path) from None
            if disk.f_blocks == 0:
                return  # the file system does not report its size
            disks[device] = disk.f_bavail * disk.f_frsize
        available = free_nbytes + sum(disks.values())
        if nbytes > available:
            raise storage_error(
                errno.ENOSPC,
                "reserve space",
                os.fsencode(self.directories[0].path),
                0,
                nbytes,
                0,
                False,
                0,
                f"{available} bytes are free",
            )
