"""Compaction: segments of which little is wanted are copied out, and given back to the file system.

A segment of a snapshot is never written again, however little of it is still a tensor's, so that rewrites and snapshots
leave ever more segments behind. When these hold much more than twice the bytes that are wanted, or are many, a thread
copies what is wanted in the emptiest ones to others. A segment goes as a whole or not at all: both copies are there
until the names, and the manifest of the last commit, have the new one. So an error, a kill or a full disk leaves
everything as it was, and data that is damaged stays where it is and is reported to the reader that asks for it.

The thread ends when there is nothing to do. It leaves alone what has changed since it looked last: a training that
rewrites everything empties segments by itself. A write that finds no space compacts before it fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from errno import ECANCELED
from typing import TYPE_CHECKING, TypeAlias

from tensorferry.errors import StorageError
from tensorferry.store.contents import last_kept
from tensorferry.store.room import COMPACT_TO_COUNT, COMPACT_TO_NBYTES
from tensorferry.store.transfers import CHUNK_NBYTES, Copier, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensorferry.store.segments import Piece, Segment, StoreDirectory
    from tensorferry.store.tensor_store import TensorStore

    # What is wanted of a segment: whose each piece is, and its checksums.
    Wanted: TypeAlias = Mapping[Piece, tuple[str, Sequence[int] | None]]

_PAUSE_SECONDS = 0.25
# With so many bytes to give up, or segments, a snapshot does not leave it to the thread.
HURRY_FROM = 64 << 20, 64
# To give up a segment that a snapshot has too frees nothing yet: this much must be free for the copies.
_FREE_NBYTES = 64 << 20


def start(store: TensorStore) -> None:
    """Begin to compact in the background."""
    store._compactor = threading.Thread(
        target=_work,
        args=(weakref.ref(store), store._ending),
        name="tensorferry-compaction",
        daemon=True,
    )
    try:
        store._compactor.start()
    except RuntimeError:  # the interpreter leaves, or there are too many threads
        store._compactor = None


def compact(
    store: TensorStore,
    most_nbytes: int,
    most_count: int,
    before: Mapping[Segment, int] | None = None,
) -> list[Segment]:
    """Give up segments, as far as that can be done; return which ones should be.

    Where ``before`` is given, only those are that have as many bytes in use as it says.
    """
    room = store._room
    with store._compacting:
        with store._lock:
            store._sweep()
        room.reclaim()
        with store._lock:
            if before is None:  # what could not be done before is tried again
                for segment in room.segments():
                    segment.stuck_at_nbytes = -1
            found = room.sparse_segments(most_nbytes, most_count)
        mapped = {piece.segment for one in list(store._mapped) for piece in one.pieces}
        chosen = []
        for segment in found:
            if before is not None and before.get(segment) != segment.used_nbytes:
                continue
            if not segment.frozen:
                room.retire([segment])  # its free space goes back at once
            elif segment in mapped or (segment.sync_failed and not store._checksums):
                segment.stuck_at_nbytes = segment.used_nbytes
            else:
                chosen.append(segment)
        wanted = _wanted(store, chosen, committed=True) if chosen else {}
        for segment in chosen:
            used_nbytes = segment.used_nbytes
            try:
                _give_up(store, segment, wanted.pop(segment))
            except StorageError:
                if store._ending.is_set():
                    break
                segment.stuck_at_nbytes = used_nbytes
            room.reclaim()
        return found


def move_out(store: TensorStore, segments: Sequence[Segment]) -> None:
    """Copy what names have in segments to others; StorageError where it is not what was written."""
    with store._compacting:
        for segment, wanted in _wanted(store, segments, committed=False).items():
            _switch(store, _copied(store, segment.directory, wanted), wanted)


def _work(reference: weakref.ref[TensorStore], ending: threading.Event) -> None:
    seen: dict[Segment, int] = {}
    while not ending.wait(_PAUSE_SECONDS):
        store = reference()
        if store is None:
            return
        try:
            found = compact(store, COMPACT_TO_NBYTES, COMPACT_TO_COUNT, seen)
        except (ValueError, RuntimeError):  # the store has been closed, or the process leaves
            return
        with store._lock:
            seen = {one: one.used_nbytes for one in found if one.used_nbytes != one.stuck_at_nbytes}
            if not seen:
                store._room.compacted()
                store._compactor = None
                return
        del store


def _wanted(
    store: TensorStore, segments: Sequence[Segment], *, committed: bool
) -> dict[Segment, dict[Piece, tuple[str, Sequence[int] | None]]]:
    """Return what names have in segments, and the last commit if that is asked for."""
    found: dict[Segment, dict[Piece, tuple[str, Sequence[int] | None]]]
    found = {segment: {} for segment in segments}
    with store._lock:
        kept = [(name, last_kept(version)) for name, version in store._names.copy().items()]
        tensors = [(name, one.pieces, one.chunks) for name, one in kept if one is not None]
        if committed:
            for contents in (*store._committed, *store._previous):
                tensors += [
                    (name, one.pieces, one.chunks) for name, one in contents.tensors.items()
                ]
    for name, pieces, chunks in tensors:
        for at, piece in enumerate(pieces or ()):
            if piece.segment in found:
                found[piece.segment][piece] = name, None if chunks is None else chunks[at]
    return found


def _give_up(store: TensorStore, segment: Segment, wanted: Wanted) -> None:
    """Move all that is wanted out of a segment, which is dropped then; StorageError, and it stays as it is."""
    directory = segment.directory
    if not wanted:  # it has gone, or will
        return
    # What else it has is a transfer's, and goes with that.
    if sum(directory.rounded(piece.nbytes) for piece in wanted) != segment.used_nbytes:
        raise _cancelled()
    links = os.fstat(segment.file.descriptor).st_nlink - (segment.name is not None)
    if links > 0:
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory.path)
            if disk.f_bavail * disk.f_frsize < _FREE_NBYTES + segment.used_nbytes:
                raise _cancelled()
    moved = _copied(store, directory, wanted)
    with store._committing:
        store._check_open()
        committed = list(store._committed)
        if any(piece in moved for one in store._previous for piece in one.pieces()):
            raise _cancelled()  # the commit before will be dropped, and its space be free
        if any(piece in moved for one in committed for piece in one.pieces()):
            if len(committed) > 1:  # a commit has failed: which one the manifest has is not known
                raise _cancelled()
            store._publish(committed[0].moved(moved), sync=store._committed_sync)
        _switch(store, moved, wanted)


def _copied(store: TensorStore, directory: StoreDirectory, wanted: Wanted) -> dict[Piece, Piece]:
    """Copy pieces to others of the same directory, verified; return which one is where."""
    moved: dict[Piece, Piece] = {}
    if not wanted:
        return moved
    ahead_nbytes = sum(directory.rounded(piece.nbytes) for piece in wanted)
    copier = Copier(max(piece.nbytes for piece in wanted), background=True)
    for piece, (name, sums) in wanted.items():
        if store._ending.is_set():
            raise _cancelled()
        try:
            moved[piece] = store._room.take_piece(piece.nbytes, ahead_nbytes, [directory])
            copier.copy(piece, sums, CHUNK_NBYTES, moved[piece])
        except StorageError as error:
            raise told([error], f"moving tensor {name!r}") from None
        ahead_nbytes -= directory.rounded(piece.nbytes)
    copier.finish()
    return moved


def _switch(store: TensorStore, moved: Mapping[Piece, Piece], wanted: Wanted) -> None:
    """Have names refer to the copies."""
    with store._lock:
        for name, _ in wanted.values():
            version = store._names.get(name)
            while version is not None:
                if version.pieces is not None and any(one in moved for one in version.pieces):
                    version.pieces = tuple(moved.get(one, one) for one in version.pieces)
                version = version.previous
        store._moved_nbytes += sum(piece.nbytes for piece in moved)


def _cancelled() -> StorageError:
    return StorageError(ECANCELED, os.strerror(ECANCELED))
