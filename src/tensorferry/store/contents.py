"""All that a store has at one moment: to be written down, or as it was read."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.store import manifest as manifests
from tensorferry.store.manifest import Manifest, StoredSegment, StoredTensor
from tensorferry.store.ownership import busy, writer_of
from tensorferry.store.segments import Extent, Piece, Segment, StoreDirectory
from tensorferry.store.transfers import CHUNK_NBYTES, TensorVersion
from tensorferry.transfer.runtime import with_descriptors

if TYPE_CHECKING:
    from array import array as numbers
    from collections.abc import Iterator, Mapping, Sequence

    from tensorferry.store.room import Room
    from tensorferry.store.tensors import TensorInfo
    from tensorferry.transfer.runtime import AnyScheduler


class Kept(NamedTuple):
    """A tensor: what it is, where it lies, and the CRC-32s of each piece."""

    info: TensorInfo
    pieces: tuple[Piece, ...]
    chunks: list[numbers[int]] | None


class StoreContents:
    """What has been kept, by name, with a record, and the segments that it is in. None of it is written over."""

    def __init__(self, record: bytes, tensors: Mapping[str, Kept]) -> None:
        self.record = record
        self.tensors = tensors
        numbers: dict[Segment, int] = {}
        self.pieces_in: list[list[tuple[Piece, Sequence[int] | None]]] = []
        for _, pieces, chunks in tensors.values():
            for at, piece in enumerate(pieces):
                number = numbers.setdefault(piece.segment, len(numbers))
                if number == len(self.pieces_in):
                    self.pieces_in.append([])
                self.pieces_in[number].append((piece, None if chunks is None else chunks[at]))
        self.segments = list(numbers)

    def pieces(self) -> Iterator[Piece]:
        """Yield where all of it lies."""
        for kept in self.tensors.values():
            yield from kept.pieces

    def moved(self, places: Mapping[Piece, Piece]) -> StoreContents:
        """Return the same, where some pieces have been copied elsewhere."""
        return StoreContents(
            self.record,
            {
                name: kept._replace(pieces=tuple(places.get(one, one) for one in kept.pieces))
                for name, kept in self.tensors.items()
            },
        )

    def manifest(self, run: str, directory_count: int, segments: Sequence[StoredSegment]) -> bytes:
        """Return the manifest, with the segments as they are called there."""
        numbers = {segment: number for number, segment in enumerate(self.segments)}
        tensors = {
            name: StoredTensor(
                kept.info,
                tuple((numbers[one.segment], one.offset, one.nbytes) for one in kept.pieces),
                kept.chunks,
            )
            for name, kept in self.tensors.items()
        }
        return manifests.to_bytes(
            Manifest(run, directory_count, CHUNK_NBYTES, self.record, segments, tensors)
        )


def last_kept(version: TensorVersion | None) -> TensorVersion | None:
    """Return the newest version, from one back, whose write has ended well."""
    while version is not None and (version.write is not None or version.pieces is None):
        version = version.previous
    return version


def open_stored(
    paths: Sequence[str],
    schedulers: Sequence[AnyScheduler],
    direct: str,
    room: Room,
    *,
    previous: bool,
) -> tuple[bytes, dict[str, TensorVersion]]:
    """Return the record and the tensors of what is stored in directories, which are the room's then."""
    names = manifests.names_in(paths[0]) or [manifests.NAME]
    if (
        previous and len(names) == 1
    ):  # the last one was moved aside, and a kill came before the next one
        names = [manifests.PREVIOUS_NAME] * 2
    path = os.path.join(paths[0], names[previous])  # noqa: PTH118
    before: Manifest | None = None
    while True:
        # Its store may have committed again, written over what this one names, and ended, just before it was asked for.
        manifest = manifests.read(path, lambda manifest: _check_no_writer(paths[0], manifest.run))
        try:
            directories, segments = _opened(paths, manifest, schedulers, direct)
            break
        except StorageError as error:
            # Another store's first commit may just have replaced this one.
            if error.errno != errno.ENOENT or manifest == before:
                raise
            before = manifest
    room.directories[:] = directories
    versions = {}
    for name, stored in manifest.tensors.items():
        places = [
            Extent(segments[number], offset, nbytes) for number, offset, nbytes in stored.pieces
        ]
        version = versions[name] = TensorVersion(stored.info, room.adopt(places), None)
        version.chunks = stored.chunks
        version.chunk_nbytes = manifest.chunk_nbytes
    return manifest.record, versions


def _check_no_writer(directory: str, run: str) -> None:
    writer = writer_of(directory)
    if writer is not None and writer[1] == run:
        raise busy(
            directory,
            writer[0],
            "goes on writing over what it has committed here; remedy: a snapshot of it",
        )


def _opened(
    paths: Sequence[str], manifest: Manifest, schedulers: Sequence[AnyScheduler], direct: str
) -> tuple[list[StoreDirectory], list[Segment]]:
    if len(paths) != manifest.directory_count:
        raise StorageError(
            None,
            f"what is stored here lies in {manifest.directory_count} directories, and {len(paths)} are given",
            paths[0],
        )
    directories = [
        StoreDirectory(path, 1.0, scheduler, direct=direct, segment_nbytes=1, prefix=None)
        for path, scheduler in zip(paths, schedulers, strict=True)
    ]
    ends = [0] * len(manifest.segments)
    for stored in manifest.tensors.values():
        for number, offset, nbytes in stored.pieces:
            ends[number] = max(ends[number], offset + nbytes)
    segments = []
    for one, end in zip(manifest.segments, ends, strict=True):
        directory = directories[one.directory]
        file = _open_segment(directory, one.name, end, direct)
        segments.append(directory.adopt(file, one.nbytes))
    return directories, segments


def _open_segment(directory: StoreDirectory, name: str, end: int, direct: str) -> _core.File:
    path = os.path.join(directory.path, name)  # noqa: PTH118

    def opened() -> _core.File:
        try:
            # Not through a link to somewhere else, and not waiting for the other end of a pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags)
        except OSError as error:
            message = f"{error.strerror} (opening a segment of a store)"
            raise StorageError(error.errno, message, path) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < end:
                raise StorageError(
                    None, f"this is no regular file of {end} bytes, as the manifest says", path
                )
            return _core.file_from_descriptor(descriptor, False, direct)
        finally:
            os.close(descriptor)

    return with_descriptors(directory.scheduler, opened)
