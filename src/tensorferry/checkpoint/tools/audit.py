"""Checkpoints of torch.distributed.checkpoint: listed by their metadata, and verified without loading.

A blob is the bytes that torch.save wrote for one tensor or object. Files that tensorferry wrote have a checksum for
each chunk, a range of fixed size; they are read once, including the bytes between blobs. In other files, which torch
wrote, each blob is a zip archive, and its records have checksums that torch itself never checks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, BinaryIO

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from tensorferry._core import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.metadata import file_checksums, read_metadata
from tensorferry.checkpoint.storage.names import metadata_files
from tensorferry.checkpoint.tools.findings import Audit, Entry, Report, Shard
from tensorferry.checkpoint.zipformat import blobs, zips
from tensorferry.safetensors.sources import tiles
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.python_files import reopen_python_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata

    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.storage.reading import DataFile

_SMALL_NBYTES = 64 << 10


def verify(
    path: str,
    *,
    trust_pickle: bool = False,
    progress: Listener | None = None,
    **_options: object,
) -> Report:
    """Verify a checkpoint's folder by its own checksums."""
    return _CheckpointAudit(path, progress, trust_pickle).run()


def entries(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> list[Entry]:
    """Return the entries of a checkpoint by name; no data file is opened.

    Raises
    ------
    OSError
        The metadata are missing, or cannot be read.
    CheckpointError
        The metadata are damaged, or hold objects that torch does not write.
    """
    found: dict[str, Entry] = {}
    for file in metadata_files(path):
        for entry in entries_of(read_metadata(file, trust_pickle=trust_pickle)):
            # Each rank's metadata has that rank's shards.
            others = found[entry.name].shards if entry.name in found else ()
            found[entry.name] = dataclasses.replace(entry, shards=others + entry.shards)
    return [found[name] for name in sorted(found)]


def incomplete(metadata: Metadata) -> Iterator[str]:
    """Yield the names of tensors that are not covered exactly by their parts."""
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            boxes = dict.fromkeys((chunk.offsets, chunk.sizes) for chunk in described.chunks)
            if not tiles(described.size, boxes):
                yield name


def entries_of(metadata: Metadata) -> list[Entry]:
    """Return the entries that metadata describes."""
    infos = metadata.storage_data
    entries = []
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            dtype = described.properties.dtype
            nbytes = math.prod(described.size) * dtype.itemsize
            shards = tuple(
                _shard(chunk.offsets, chunk.sizes, infos.get(MetadataIndex(name, chunk.offsets)))
                for chunk in described.chunks
            )
            kind = str(dtype).removeprefix("torch.")
            entries.append(Entry(name, kind, tuple(described.size), nbytes, shards))
        else:
            shard = _shard((), (), infos.get(MetadataIndex(name)))
            entries.append(Entry(name, None, (), shard.end - shard.begin, (shard,)))
    return entries


def _shard(offsets: tuple[int, ...], sizes: tuple[int, ...], info: _StorageInfo | None) -> Shard:
    if info is None:
        return Shard(tuple(offsets), tuple(sizes), None)
    end = info.offset + info.length
    return Shard(tuple(offsets), tuple(sizes), info.relative_path, info.offset, end)


class _CheckpointAudit(Audit):
    def __init__(self, path: str, progress: Listener | None, trusted: bool) -> None:
        super().__init__(path, progress)
        self._trusted = trusted

    def run(self) -> Report:
        checkpoints = []
        for file in metadata_files(self.report.path):
            try:
                metadata = read_metadata(file, trust_pickle=self._trusted)
            except Exception as error:  # a trusted pickle may do anything
                self.problem(error, str(file))
                continue
            checkpoints.append((file, metadata))
            if not file_checksums(metadata):
                self.report.unverified.append(file.name)
            infos = metadata.storage_data.values()
            names = {*file_checksums(metadata), *(info.relative_path for info in infos)}
            self.meter.expect(sum(info.length for info in infos), len(names))
        for file, metadata in checkpoints:
            try:
                self._check_complete(file, metadata)
                self._check_files(metadata)
            except Exception as error:
                self.problem(error, str(file))
        return self.finish()

    def _check_complete(self, file: Path, metadata: Metadata) -> None:
        entries = entries_of(metadata)
        self.report.entries += len(entries)
        for entry in entries:
            missing = sum(shard.file is None for shard in entry.shards)
            if missing:
                reason = f"the metadata does not say in which files {missing} of its {len(entry.shards)} parts are"
                self.problem(CheckpointError(reason, str(file), names=(entry.name,)))

        for name in incomplete(metadata):
            reason = "parts of it are missing or overlap: they do not cover its shape exactly"
            self.problem(CheckpointError(reason, str(file), names=(name,)))

    def _check_files(self, metadata: Metadata) -> None:
        contents = Contents(self.report.path, metadata, trusted=self._trusted)
        by_file: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {
            name: [] for name in file_checksums(metadata)
        }
        for index, info in metadata.storage_data.items():
            by_file.setdefault(info.relative_path, []).append((index, info))
        for name, infos in sorted(by_file.items()):
            infos.sort(key=lambda each: each[1].offset)
            begin = self.meter.nbytes
            try:
                self._check_file(contents, name, infos)
            except Exception as error:
                self.problem(error, f"{self.report.path}/{name}")
            rest = begin + sum(info.length for _, info in infos) - self.meter.nbytes
            self.meter.add(rest, files=1)

    def _check_file(
        self, contents: Contents, name: str, infos: list[tuple[MetadataIndex, _StorageInfo]]
    ) -> None:
        if contents.has_checksums(name):
            self.report.nbytes += contents.verify_file(name, self.problem, self.meter.add)
            return
        file = contents.open(name, damaged=self.problem)
        try:
            end = 0
            with reopen_python_file(file.file) as plain:
                for index, info in infos:
                    if info.offset > end:
                        self.report.unverified.append(f"bytes {end} to {info.offset} of {name}")
                    self._check_blob(contents, file, plain, index, info)
                    end = max(end, info.offset + info.length)
            if file.nbytes > end:
                self.report.unverified.append(f"bytes {end} to {file.nbytes} of {name}")
        finally:
            file.file.close()

    def _check_blob(
        self,
        contents: Contents,
        file: DataFile,
        plain: BinaryIO,
        index: MetadataIndex,
        info: _StorageInfo,
    ) -> None:
        end = info.offset + info.length
        try:
            file.check_end(end)
        except CheckpointError as error:
            self.problem(error)
            return
        read, _ = zips.reader_of(plain, info.offset, info.length)

        def crc_of(begin: int, end: int) -> int:
            if end - begin <= _SMALL_NBYTES:
                return crc32(read(begin, end))
            sums = Checksums(segments=True)  # the core reads and discards the data
            file.file.read([end - begin, bytearray()], info.offset + begin, checksums=sums)
            return sums.segments[0]

        problem, verified = blobs.examine_range(info.length, read, crc_of)
        if problem is None and verified:
            problem = contents.contradiction(index, info, read)
        if problem is not None:
            self.problem(
                CheckpointError(problem, file.path, names=(index.fqn,), begin=info.offset, end=end)
            )
        elif verified:
            self.report.nbytes += info.length
        else:
            self.report.unverified.append(index.fqn)
        self.meter.add(info.length)
