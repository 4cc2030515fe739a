"""The contents of a store at one moment, for writing to a manifest, and the opening of contents from a manifest."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.store import manifest as manifests
from tensorferry.store.manifest import Manifest, StoredSegment, StoredTensor
from tensorferry.store.ownership import busy_error, writer_of
from tensorferry.store.segments import Extent, Piece, Segment, StoreDirectory
from tensorferry.store.transfers import CHUNK_NBYTES, TensorVersion
from tensorferry.transfer.runtime import with_descriptors

if TYPE_CHECKING:
    from array import array as numbers
    from collections.abc import Iterator, Mapping, Sequence

    from tensorferry.store.allocator import SegmentAllocator
    from tensorferry.store.tensors import TensorInfo


class KeptTensor(NamedTuple):
    """A stored tensor: its description, its pieces (ranges of segments), and for each piece the CRC-32s of its chunks.

    ``chunks`` is None if the store has no checksums.
    """

    info: TensorInfo
    pieces: tuple[Piece, ...]
    chunks: list[numbers[int]] | None


class StoreContents:
    """The tensors and the record of a commit or a snapshot. Its pieces are not overwritten while this object exists.

    The record is data of the program that is stored with them. ``segments`` are the segments of the pieces, and
    ``pieces_in`` has, for each of these segments, its pieces with their checksums.
    """

    def __init__(self, record: bytes, tensors: Mapping[str, KeptTensor]) -> None:
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
        """Yield all pieces of all tensors."""
        for kept in self.tensors.values():
            yield from kept.pieces

    def with_pieces_moved(self, copies: Mapping[Piece, Piece]) -> StoreContents:
        """Return the same contents with some pieces replaced by their copies."""
        return StoreContents(
            self.record,
            {
                name: kept._replace(pieces=tuple(copies.get(one, one) for one in kept.pieces))
                for name, kept in self.tensors.items()
            },
        )

    def manifest(self, run: str, directory_count: int, segments: Sequence[StoredSegment]) -> bytes:
        """Return the bytes of a manifest for these contents. ``segments`` describes the files of :attr:`segments`."""
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
    """Return the newest version with a successful write, starting from ``version`` and going back."""
    while version is not None and (version.write is not None or version.pieces is None):
        version = version.previous
    return version


def open_stored(
    paths: Sequence[str],
    schedulers: Sequence[_core.Scheduler],
    direct: str,
    allocator: SegmentAllocator,
    *,
    previous: bool,
) -> tuple[bytes, dict[str, TensorVersion]]:
    """Open the files of a store for reading, and register their pieces. Return the record and the tensors."""
    names = manifests.names_in(paths[0]) or [manifests.NAME]
    # A commit renames the existing manifest to PREVIOUS_NAME, and then the new one to NAME. After a process was killed
    # in between, only PREVIOUS_NAME exists: the last complete commit, which is also the one before the interrupted
    # commit. It is opened with and without `previous`. If only NAME exists, PREVIOUS_NAME is looked for, and not found.
    if previous and len(names) == 1:
        names = [manifests.PREVIOUS_NAME] * 2
    path = os.path.join(paths[0], names[previous])  # noqa: PTH118
    before: Manifest | None = None
    while True:
        # The store that wrote the manifest may still be open, and may overwrite data that the manifest names. So read()
        # checks for this store after it has read the manifest. Before this check, the store may have overwritten data,
        # committed again, and ended. It has then replaced the manifest's file, and read() reads the new one.
        manifest = manifests.read(path, lambda manifest: _check_no_writer(paths[0], manifest.run))
        try:
            directories, segments = _open_segments(paths, manifest, schedulers, direct)
            break
        except StorageError as error:
            # The first commit of another store in this directory may have replaced the manifest and removed the files.
            # Read the new manifest, but give up if the manifest is unchanged.
            if error.errno != errno.ENOENT or manifest == before:
                raise
            before = manifest
    allocator.directories[:] = directories
    versions = {}
    for name, stored in manifest.tensors.items():
        extents = [
            Extent(segments[number], offset, nbytes) for number, offset, nbytes in stored.pieces
        ]
        pieces = allocator.adopt(extents)
        versions[name] = TensorVersion(
            stored.info, pieces, None, stored.chunks, manifest.chunk_nbytes
        )
    return manifest.record, versions


def _check_no_writer(directory: str, run: str) -> None:
    """Raise StorageError (EBUSY) if a store is still open, and may overwrite the data of its commit.

    ``run`` identifies the store: it is the run in the manifest of the commit.
    """
    writer = writer_of(directory)
    if writer is not None and writer[1] == run:
        raise busy_error(
            directory,
            writer[0],
            "is open, and may overwrite the data of its commit; remedy: close that store, or open a snapshot of it",
        )


def _open_segments(
    paths: Sequence[str], manifest: Manifest, schedulers: Sequence[_core.Scheduler], direct: str
) -> tuple[list[StoreDirectory], list[Segment]]:
    if len(paths) != manifest.directory_count:
        raise StorageError(
            None,
            f"the store has {manifest.directory_count} directories (got {len(paths)}; remedy: pass all directories, in "
            "the order in which the store was created)",
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

    def open_file() -> _core.File:
        try:
            # The directory is untrusted: do not follow a symbolic link, and do not block on a FIFO.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags)
        except OSError as error:
            message = f"{error.strerror} (opening a segment of a store)"
            raise StorageError(error.errno, message, path) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < end:
                raise StorageError(
                    None,
                    f"it is not a regular file of at least {end} bytes (the manifest's size)",
                    path,
                )
            return _core.file_from_descriptor(descriptor, False, direct)
        finally:
            os.close(descriptor)

    return with_descriptors(directory.scheduler, open_file)
