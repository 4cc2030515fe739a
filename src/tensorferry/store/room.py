"""All the space of a store: extents are taken from segments, and come back when nobody refers to them.

Ctrl-C may come between any two lines. What is taken stands in one table; all else can be made from it anew, and is,
after a change that has not come to its end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

from tensorferry.errors import StorageError, storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.store.segments import Directory, Piece, Segment


class Extents:
    """Where one version of a tensor lies. The space is free when nobody refers to this any more.

    That may be noticed anywhere, by the garbage collector too: so a weak reference only notes it, without any bytecode
    that Ctrl-C could come between, for the store's next call.
    """

    __slots__ = ("__weakref__", "pieces")

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = pieces


class Room:
    """Space in directories. The store's lock is held by whoever calls."""

    def __init__(self, segment_nbytes: int, sweep: Callable[[], None]) -> None:
        self.directories: list[Directory] = []
        self._segment_nbytes = segment_nbytes
        self._sweep = sweep  # lets go of extents of transfers that have ended
        self._freed: deque[weakref.ref[Extents]] = deque()
        self._taken: dict[weakref.ref[Extents], tuple[Piece, ...]] = {}
        self._torn = False

    def rounded(self, nbytes: int) -> int:
        """Return the space that so many bytes take, wherever they go."""
        return max(directory.rounded(nbytes) for directory in self.directories)

    def take(self, nbytes: int) -> Extents:
        """Return space for a tensor: one piece, or several of a segment's size and a rest."""
        with self._change():
            self._give_freed()
            pieces: list[Piece] = []
            try:
                for begin in range(0, nbytes, self._segment_nbytes):
                    pieces.append(self._take_piece(min(self._segment_nbytes, nbytes - begin)))
            except StorageError:
                for piece in pieces:
                    piece.segment.directory.give(piece)
                raise
            return self._registered(tuple(pieces))

    def adopt(self, pieces: tuple[Piece, ...]) -> Extents:
        """Return what lies in segments that nothing is written to."""
        for piece in pieces:
            piece.segment.directory.count(piece)
        return self._registered(pieces)

    def reclaim(self) -> None:
        """Take back the space of all extents that nobody refers to any more."""
        if self._freed or self._torn:
            with self._change():
                self._give_freed()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have space for tensors of these sizes beside those that are there; if there is none, nothing has changed."""
        self._check_disks(
            sum(one.free_nbytes for one in self.directories), sum(map(self.rounded, sizes))
        )
        before = [set(directory.segments.values()) for directory in self.directories]
        taken: list[Extents] = []
        try:
            # Taken as the tensors will be, and given back at the end.
            for size in sorted(sizes, reverse=True):
                taken.append(self.take(size))
        except BaseException:
            taken.clear()
            self.reclaim()
            with self._change():
                for directory, had in zip(self.directories, before, strict=True):
                    for segment in set(directory.segments.values()) - had:
                        directory.drop(segment)
            raise
        taken.clear()
        self.reclaim()

    def freeze(self, segments: Sequence[Segment]) -> None:
        """Write nothing more to segments, and have space in place of theirs; if there is none, nothing has changed."""
        new = [segment for segment in segments if not segment.frozen]
        made: list[Segment] = []
        self._check_disks(0, sum(segment.nbytes for segment in new))
        with self._change():
            try:
                for directory in self.directories:
                    missing = sum(one.nbytes for one in new if one.directory is directory)
                    while missing > 0:
                        made.append(directory.grow())
                        missing -= made[-1].nbytes
            except StorageError:
                for segment in made:
                    segment.directory.drop(segment)
                raise
            for segment in new:
                segment.directory.freeze(segment)

    def retire(self, segment: Segment) -> None:
        """Write nothing more to a segment; none takes its place."""
        with self._change():
            segment.directory.freeze(segment)

    def _take_piece(self, nbytes: int) -> Piece:
        directories = self._least_used(nbytes)
        piece = directories[0].take(nbytes)
        if piece is not None:
            return piece
        self._sweep()
        self._give_freed()
        failure: StorageError | None = None
        for directory in directories:
            piece = directory.take(nbytes)
            if piece is None:
                try:
                    directory.grow()
                except StorageError as error:
                    failure = failure or error
                    continue
                piece = directory.take(nbytes)
            if piece is not None:
                return piece
        assert failure is not None
        raise failure

    def _least_used(self, nbytes: int) -> list[Directory]:
        """Return directories in the order in which they are to get so many bytes more, by their weights."""
        return sorted(self.directories, key=lambda one: (one.used_nbytes + nbytes) / one.weight)

    def _registered(self, pieces: tuple[Piece, ...]) -> Extents:
        extents = Extents(pieces)
        self._taken[weakref.ref(extents, self._freed.append)] = pieces
        return extents

    def _give_freed(self) -> None:
        while self._freed:
            pieces = self._taken.pop(self._freed[0], ())
            self._freed.popleft()
            for piece in pieces:
                piece.segment.directory.give(piece)

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
                [
                    piece
                    for pieces in self._taken.values()
                    for piece in pieces
                    if piece.segment.directory is directory
                ]
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
