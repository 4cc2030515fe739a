"""All the space of a store: pieces are taken from segments, and come back when nothing refers to them.

Ctrl-C may come between any two lines. `_taken` is authoritative; all other tables are rebuilt from it after a change
that was interrupted. Tables change under the store's lock, which is held for arithmetic only: what makes, closes or
asks for files is done without it.
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

# A store is compacted when it has so much more than twice the bytes that are wanted, each segment counted as a mebibyte
# more, and then until that is so much, and so few segments are hardly worth their descriptors.
_COMPACT_FROM_NBYTES = 48 << 20
COMPACT_TO_NBYTES, COMPACT_TO_COUNT = 16 << 20, 16
_COUNTED_AS_NBYTES = 1 << 20
_WAIT_SECONDS = 1.0


class Room:
    """Space in directories."""

    def __init__(
        self, lock: threading.RLock, segment_nbytes: int, sweep: Callable[[], None]
    ) -> None:
        self.directories: list[StoreDirectory] = []
        self.closed = False
        self._lock = lock
        self._grown = threading.Condition(lock)
        self._segment_nbytes = segment_nbytes
        self._sweep = sweep  # lets go of pieces of transfers that have ended
        self._freed: deque[weakref.ref[Piece]] = deque()
        self._taken: dict[weakref.ref[Piece], Extent] = {}
        self._torn = False
        self._compact_from_nbytes = _COMPACT_FROM_NBYTES

    def rounded(self, nbytes: int) -> int:
        """Return the space that so many bytes take, wherever they go."""
        return max(directory.rounded(nbytes) for directory in self.directories)

    def take(self, nbytes: int, ahead_nbytes: int = 0) -> tuple[Piece, ...]:
        """Return space for a tensor: one piece, or several of a segment's size and a rest. The lock is not held.

        With ``ahead_nbytes`` it is known that so much is going to be taken, this included.
        """
        return tuple(
            self.take_piece(
                min(self._segment_nbytes, nbytes - begin), ahead_nbytes, self.directories
            )
            for begin in range(0, nbytes, self._segment_nbytes)
        )

    def take_piece(
        self, nbytes: int, ahead_nbytes: int, directories: Sequence[StoreDirectory]
    ) -> Piece:
        """Return space in one of some directories. The lock is not held."""
        failures: dict[StoreDirectory, StorageError] = {}
        while True:
            with self._lock:
                piece, full = self._find(nbytes, directories, failures)
                if piece is None and full is None and len(failures) < len(directories):
                    # Other threads make segments in all that are left; not for ever, since Ctrl-C may stop a notice.
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

    def adopt(self, places: Sequence[Extent]) -> tuple[Piece, ...]:
        """Return what lies in segments that nothing is written to."""
        for place in places:
            place.segment.directory.count(place)
        return tuple(map(self._registered, places))

    def reclaim(self) -> None:
        """Take back the space of all pieces that nothing refers to any more."""
        with self._lock:
            if self._freed or self._torn:
                with self._change():
                    self._give_freed()
        self.close_dropped()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have space for tensors of these sizes beside those that are there; if there is none, nothing has changed.

        The lock is not held. Space that is reserved is not given back before the end.
        """
        ahead = sum(map(self.rounded, sizes))
        self._check_disks(sum(one.free_nbytes for one in self.directories), ahead)
        before = set(self.segments())
        taken: list[tuple[Piece, ...]] = []
        try:
            # Taken as the tensors will be, and given back at the end.
            for size in sorted(sizes, reverse=True):
                taken.append(self.take(size, ahead))
                ahead -= self.rounded(size)
        except BaseException:
            taken.clear()
            with self._lock, self._change():
                self._give_freed()
                for segment in set(self.segments()) - before:
                    if segment.used_nbytes == 0:
                        segment.directory.drop(segment)
            self.close_dropped()
            raise
        with self._lock:
            for segment in self.segments():
                segment.promised = segment.promised or not segment.frozen
        taken.clear()
        self.reclaim()

    def freeze(self, segments: Sequence[Segment]) -> None:
        """Write nothing more to segments, and have space in place of theirs; if there is none, nothing has changed.

        The lock is not held. What is free in them goes back to the file system.
        """
        new = [segment for segment in segments if not segment.frozen]
        missing: dict[StoreDirectory, int] = {}
        promised = {segment.directory for segment in new if segment.promised}
        for segment in new:
            nbytes = segment.nbytes if segment.promised else segment.used_nbytes
            missing[segment.directory] = missing.get(segment.directory, 0) + nbytes
        self._check_disks(0, sum(missing.values()))
        made: list[Segment] = []
        try:
            for directory, nbytes in missing.items():
                while nbytes > 0:
                    needed = min(nbytes, self._segment_nbytes)
                    with directory.growing:
                        segment = self._make(directory, needed, nbytes)
                    made.append(segment)
                    segment.promised = directory in promised
                    nbytes -= segment.nbytes
        except StorageError:
            for segment in made:
                segment.directory.dropped.append(segment)
            self.close_dropped()
            raise
        self._add(made)
        self.retire(new)

    def retire(self, segments: Sequence[Segment]) -> None:
        """Write nothing more to segments; what is free in them goes back to the file system. The lock is not held."""
        for segment in segments:
            with self._lock, self._change():
                holes = segment.directory.freeze(segment)
            punched = 0
            with contextlib.suppress(StorageError):  # a file system that cannot do that
                for offset, nbytes in holes:
                    segment.file.punch(offset, nbytes)
                    punched += nbytes
            with self._lock, self._change():
                segment.directory.count_holes(segment, punched)
        self.close_dropped()

    def close_dropped(self) -> None:
        """Close the files of which nothing is wanted. The lock is not held."""
        for directory in self.directories:
            if directory.dropped:
                directory.close_dropped()

    # Compaction

    def is_sparse(self) -> bool:
        """Return whether it is time to look for segments that may be given up."""
        now = self._sparse_nbytes()
        least = min(self._compact_from_nbytes, now + COMPACT_TO_NBYTES)
        self._compact_from_nbytes = max(least, _COMPACT_FROM_NBYTES)
        return now > self._compact_from_nbytes

    def compacted(self) -> None:
        """Note that all has been done that can be done: more has to come together before the next attempt."""
        self._compact_from_nbytes = self._sparse_nbytes() + COMPACT_TO_NBYTES

    def sparse_segments(self, most_nbytes: int, most_count: int) -> list[Segment]:
        """Return which segments are to be given up, the emptiest first, so that the limits are kept. The lock is held.

        Each has less than half of its space in use, so that all that stay take at most twice the bytes that are
        wanted; or it is hardly worth its descriptor.
        """
        segments = [
            one
            for one in self.segments()
            if (one.frozen or not one.promised) and one.used_nbytes != one.stuck_at_nbytes
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
            one.held_nbytes - 2 * one.used_nbytes + len(one.segments) * _COUNTED_AS_NBYTES
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
        """Return a piece, or the directory that is to grow first; neither where none can now."""
        if self.closed:
            raise ValueError("the store is closed")
        with self._change():
            self._give_freed()
            # In the order in which they are to get so many bytes more, by their weights.
            order = sorted(directories, key=lambda one: (one.used_nbytes + nbytes) / one.weight)
            if not order[0].has_gap(nbytes):
                self._sweep()
                self._give_freed()
            for directory in order:
                place = directory.take(nbytes)
                if place is not None:
                    return self._registered(place), None
                if directory in failures:
                    continue
                if not directory.is_growing:
                    return None, directory
                # Another thread makes a segment there: perhaps slowly, while others have space.
            return None, None

    def _grow(self, directory: StoreDirectory, nbytes: int, ahead_nbytes: int) -> None:
        """Make a directory have a gap of so many bytes. The lock is not held."""
        with directory.growing:
            with self._lock:
                if directory.has_gap(nbytes):  # another thread has made a segment meanwhile
                    return
            share = directory.weight / sum(one.weight for one in self.directories)
            self._add([self._make(directory, nbytes, int(ahead_nbytes * share))])

    def _make(self, directory: StoreDirectory, needed_nbytes: int, ahead_nbytes: int) -> Segment:
        try:
            with self._lock:
                wanted = directory.wanted_nbytes(ahead_nbytes)
                directory.is_growing = True
            return directory.make(needed_nbytes, wanted)
        finally:
            directory.is_growing = False
            with self._lock:
                self._grown.notify_all()

    def _add(self, made: Sequence[Segment]) -> None:
        with self._lock:
            if not self.closed:
                with self._change():
                    for segment in made:
                        segment.directory.add(segment)
                return
        for segment in made:
            segment.directory.dropped.append(segment)
        self.close_dropped()
        raise ValueError("the store was closed meanwhile")

    def _registered(self, place: Extent) -> Piece:
        piece = Piece(place)
        self._taken[weakref.ref(piece, self._freed.append)] = place
        return piece

    def _give_freed(self) -> None:
        while self._freed:
            place = self._taken.pop(self._freed[0], None)
            self._freed.popleft()
            if place is not None:
                place.segment.directory.give(place)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Change what is free. Where that is interrupted, the next change begins with what is taken."""
        if self._torn:
            self._rebuild()
        self._torn = True
        try:
            yield
        except StorageError:
            self._torn = False
            raise
        self._torn = False

    def _rebuild(self) -> None:
        while self._freed:
            self._taken.pop(self._freed[0], None)
            self._freed.popleft()
        for directory in self.directories:
            directory.rebuild(
                [place for place in self._taken.values() if place.segment.directory is directory]
            )

    def _check_disks(self, free_nbytes: int, nbytes: int) -> None:
        """Raise where the disks have not so much: before they are filled, and others find them full."""
        disks = {}
        for directory in self.directories:
            try:
                disk = os.statvfs(directory.path)
                device = os.stat(directory.path).st_dev  # noqa: PTH116
            except OSError as error:
                message = f"{error.strerror} (asking how much space is free)"
                raise StorageError(error.errno, message, directory.path) from None
            if disk.f_blocks == 0:
                return  # a file system that does not tell
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
