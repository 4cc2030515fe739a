"""Compaction: copying the live pieces out of nearly empty segments, to return the space to the file system.

A segment is one of the store's files. A piece is the range of a segment that a tensor, or a part of it, occupies. It is
live if a current tensor or a commit refers to it.

A segment that belongs to a snapshot is read-only, even if few of its bytes belong to current tensors. Rewrites and
snapshots therefore accumulate segments. When the segments hold much more than twice the bytes in use, or are many, a
thread copies the live pieces of the emptiest segments to other segments. A segment is evacuated completely or not at
all: the old pieces remain until the names, and the manifest of the last commit, refer to the copies. So an error, a
kill or a full disk changes nothing. Damaged data is not copied, and the read of the tensor reports it.

The thread ends when nothing is left to do. It skips segments that have changed since its last pass, because a training
run that rewrites its tensors empties such segments anyway. A write that finds no space compacts before it fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from errno import ECANCELED
from typing import TYPE_CHECKING, TypeAlias

from tensorferry.errors import StorageError
from tensorferry.store.allocator import COMPACT_TO_COUNT, COMPACT_TO_NBYTES
from tensorferry.store.contents import last_kept
from tensorferry.store.transfers import CHUNK_NBYTES, Copier, with_context

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensorferry.store.segments import Piece, Segment, StoreDirectory
    from tensorferry.store.tensor_store import TensorStore

    # The live pieces of a segment. The value is the name of the piece's tensor and the piece's checksums.
    PiecesToMove: TypeAlias = Mapping[Piece, tuple[str, Sequence[int] | None]]

_PAUSE_SECONDS = 0.25
# If the bytes of the segments minus twice the bytes in use exceed the first limit, or the number of nearly empty
# segments exceeds the second, snapshot() compacts before it returns, in the caller's thread. Otherwise frequent
# snapshots would produce segments faster than the background thread removes them.
HURRY_FROM = 64 << 20, 64
# Evacuating a segment that a snapshot also links to frees no space, so the copies need additional space. This is the
# space that must remain free on the disk.
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
    except RuntimeError:  # the interpreter is shutting down, or the system refuses another thread
        store._compactor = None


def compact(
    store: TensorStore,
    most_nbytes: int,
    most_count: int,
    before: Mapping[Segment, int] | None = None,
) -> list[Segment]:
    """Evacuate segments to meet two limits, as far as possible. Return the segments that must be evacuated for this.

    The limits ``most_nbytes`` and ``most_count`` are those of :meth:`SegmentAllocator.sparse_segments`. If ``before``
    is given, only segments are evacuated that still have as many bytes in use as ``before`` records.
    """
    allocator = store._allocator
    with store._compacting:
        with store._lock:
            store._sweep()
        allocator.reclaim()
        with store._lock:
            if before is None:  # an explicit call also retries the segments that failed before
                for segment in allocator.segments():
                    segment.stuck_at_nbytes = -1
            found = allocator.sparse_segments(most_nbytes, most_count)
        mapped = {piece.segment for one in list(store._mapped) for piece in one.pieces}
        chosen = []
        for segment in found:
            if before is not None and before.get(segment) != segment.used_nbytes:
                continue
            if not segment.frozen:
                # retire() returns the segment's free space at once. A later pass may evacuate its live pieces.
                allocator.retire([segment])
            # Evacuating a segment that is mapped frees nothing, because the mapping keeps its space. After a failed
            # sync, only checksums can show whether the data is intact.
            elif segment in mapped or (segment.sync_failed and not store._checksums):
                segment.stuck_at_nbytes = segment.used_nbytes
            else:
                chosen.append(segment)
        pieces = _pieces_to_move(store, chosen, committed=True) if chosen else {}
        for segment in chosen:
            used_nbytes = segment.used_nbytes
            try:
                # pop() drops this reference to the pieces, so they are freed after the move.
                _evacuate(store, segment, pieces.pop(segment))
            except StorageError:
                if store._ending.is_set():
                    break
                segment.stuck_at_nbytes = used_nbytes
            allocator.reclaim()
        return found


def move_out(store: TensorStore, segments: Sequence[Segment]) -> None:
    """Copy the current tensors' pieces in some segments to other segments.

    Raises
    ------
    StorageError
        A piece cannot be read, or does not match its checksums.
    """
    with store._compacting:
        for segment, pieces in _pieces_to_move(store, segments, committed=False).items():
            _refer_to_copies(store, _copy(store, segment.directory, pieces), pieces)


def _work(reference: weakref.ref[TensorStore], ending: threading.Event) -> None:
    seen: dict[Segment, int] = {}  # the used bytes of the segments that the last pass has found
    while not ending.wait(_PAUSE_SECONDS):
        store = reference()
        if store is None:
            return
        try:
            found = compact(store, COMPACT_TO_NBYTES, COMPACT_TO_COUNT, seen)
        except (ValueError, RuntimeError):  # the store was closed, or the process is exiting
            return
        with store._lock:
            seen = {one: one.used_nbytes for one in found if one.used_nbytes != one.stuck_at_nbytes}
            if not seen:
                store._allocator.note_compacted()
                store._compactor = None
                return
        # During the pause, the thread must not keep a store alive that the program has dropped.
        del store


def _pieces_to_move(
    store: TensorStore, segments: Sequence[Segment], *, committed: bool
) -> dict[Segment, dict[Piece, tuple[str, Sequence[int] | None]]]:
    """Return the pieces of the current tensors in some segments; with ``committed``, also those of the commits."""
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


def _evacuate(store: TensorStore, segment: Segment, pieces: PiecesToMove) -> None:
    """Move all live pieces out of a segment, which is then dropped. On StorageError nothing changes."""
    directory = segment.directory
    if not pieces:  # the segment has been dropped, or will be once transfers have ended
        return
    # If more space is in use, a transfer holds other pieces, and the segment could not be dropped.
    if sum(directory.rounded(piece.nbytes) for piece in pieces) != segment.used_nbytes:
        raise _cancelled()
    # All links except the store's own name are those of snapshots.
    links = os.fstat(segment.file.descriptor).st_nlink - (segment.name is not None)
    if links > 0:
        with contextlib.suppress(OSError):
            disk = os.statvfs(directory.path)
            if disk.f_bavail * disk.f_frsize < _FREE_NBYTES + segment.used_nbytes:
                raise _cancelled()
    moved = _copy(store, directory, pieces)
    with store._committing:
        store._check_open()
        committed = list(store._committed)
        if any(piece in moved for one in store._previous for piece in one.pieces()):
            raise _cancelled()  # the previous commit will be dropped soon, which frees the space
        if any(piece in moved for one in committed for piece in one.pieces()):
            # After a failed commit it is unknown which of the two commits the manifest on the disk names.
            if len(committed) > 1:
                raise _cancelled()
            store._publish(committed[0].with_pieces_moved(moved), sync=store._committed_sync)
        _refer_to_copies(store, moved, pieces)


def _copy(
    store: TensorStore, directory: StoreDirectory, pieces: PiecesToMove
) -> dict[Piece, Piece]:
    """Copy pieces within a directory, and verify them. Return the copy of each piece."""
    moved: dict[Piece, Piece] = {}
    if not pieces:
        return moved
    ahead_nbytes = sum(directory.rounded(piece.nbytes) for piece in pieces)
    copier = Copier(max(piece.nbytes for piece in pieces), background=True)
    for piece, (name, sums) in pieces.items():
        if store._ending.is_set():
            raise _cancelled()
        try:
            moved[piece] = store._allocator.allocate_piece(piece.nbytes, ahead_nbytes, [directory])
            copier.copy(piece, sums, CHUNK_NBYTES, moved[piece])
        except StorageError as error:
            raise with_context([error], f"moving tensor {name!r}") from None
        ahead_nbytes -= directory.rounded(piece.nbytes)
    copier.finish()
    return moved


def _refer_to_copies(
    store: TensorStore, moved: Mapping[Piece, Piece], pieces: PiecesToMove
) -> None:
    """Replace the moved pieces with their copies in all versions of the tensors."""
    with store._lock:
        for name, _ in pieces.values():
            version = store._names.get(name)
            while version is not None:
                if version.pieces is not None and any(one in moved for one in version.pieces):
                    version.pieces = tuple(moved.get(one, one) for one in version.pieces)
                version = version.previous
        store._moved_nbytes += sum(piece.nbytes for piece in moved)


def _cancelled() -> StorageError:
    return StorageError(ECANCELED, os.strerror(ECANCELED))
