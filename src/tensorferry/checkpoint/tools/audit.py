"""Checking a checkpoint without loading it: whether it is complete, and every byte as it was written.

Files with chunk checksums are read once, headers and gaps included. Of others (those that torch wrote) each blob is a
zip archive, whose records have checksums that torch itself never looks at.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Progress
from tensorferry.checkpoint.storage.contents import Contents
from tensorferry.checkpoint.storage.delivery import Delivery, Memory
from tensorferry.checkpoint.storage.metadata import file_checksums, read_metadata
from tensorferry.checkpoint.storage.reading import Reading, Want
from tensorferry.checkpoint.tools.findings import Report
from tensorferry.checkpoint.tools.kinds import metadata_files
from tensorferry.checkpoint.tools.listing import entries_of, incomplete
from tensorferry.checkpoint.zipformat import blobs
from tensorferry.checksums import Checksums

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    import tensorferry
    from tensorferry.checkpoint.storage.reading import DataFile


def verify(
    path: str,
    *,
    trust_pickle: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Verify a checkpoint's folder; see :func:`tensorferry.checkpoint.verify`."""
    return _Audit(path, trust_pickle, progress).run()


class _Audit:
    def __init__(
        self, path: str, trusted: bool, progress: Callable[[Progress], None] | None
    ) -> None:
        self._report = Report(path)
        self._trusted = trusted
        self._progress = progress
        self._done = self._total = 0
        self._files_done = self._files_total = 0

    def run(self) -> Report:
        checkpoints = []
        for file in metadata_files(self._report.path):
            try:
                metadata = read_metadata(file, trust_pickle=self._trusted)
            except (CheckpointError, OSError) as error:
                self._report.problems.append(error)
                continue
            except Exception as error:  # a trusted pickle may do anything
                self._report.problems.append(_unexpected(error, str(file)))
                continue
            checkpoints.append((file, metadata))
            if not file_checksums(metadata):
                self._report.unverified.append(file.name)
            infos = metadata.storage_data.values()
            self._total += sum(info.length for info in infos)
            names = {*file_checksums(metadata), *(info.relative_path for info in infos)}
            self._files_total += len(names)
        for file, metadata in checkpoints:
            try:
                self._check_complete(file, metadata)
                self._check_files(metadata)
            except Exception as error:
                self._report.problems.append(_unexpected(error, str(file)))
        return self._report

    def _check_complete(self, file: Path, metadata: Metadata) -> None:
        entries = entries_of(metadata)
        self._report.entries += len(entries)
        for entry in entries:
            missing = sum(shard.file is None for shard in entry.shards)
            if missing:
                reason = f"{missing} of {len(entry.shards)} parts are nowhere"
                self._report.problems.append(
                    CheckpointError(reason, str(file), names=(entry.name,))
                )

        for name in incomplete(metadata):
            reason = "parts of it are missing, or there twice: they do not fill its shape"
            self._report.problems.append(CheckpointError(reason, str(file), names=(name,)))

    def _check_files(self, metadata: Metadata) -> None:
        contents = Contents(self._report.path, metadata, trusted=self._trusted)
        by_file: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {
            name: [] for name in file_checksums(metadata)
        }
        for index, info in metadata.storage_data.items():
            by_file.setdefault(info.relative_path, []).append((index, info))
        for name, infos in sorted(by_file.items()):
            infos.sort(key=lambda each: each[1].offset)
            begin = self._done
            try:
                self._check_file(contents, name, infos)
            except (CheckpointError, OSError) as error:
                self._report.problems.append(error)
            except Exception as error:
                self._report.problems.append(_unexpected(error, f"{self._report.path}/{name}"))
            self._files_done += 1
            self._advance(begin + sum(info.length for _, info in infos) - self._done)

    def _check_file(
        self, contents: Contents, name: str, infos: list[tuple[MetadataIndex, _StorageInfo]]
    ) -> None:
        file = contents.open(name, damaged=self._report.problems.append)
        if contents.has_checksums(name):
            self._check_chunks(file)
            return
        try:
            end = 0
            for index, info in infos:
                if info.offset > end:
                    self._report.unverified.append(f"bytes {end} to {info.offset} of {name}")
                self._check_blob(contents, file, index, info)
                end = max(end, info.offset + info.length)
            if file.nbytes > end:
                self._report.unverified.append(f"bytes {end} to {file.nbytes} of {name}")
        finally:
            file.file.close()

    def _check_chunks(self, file: DataFile) -> None:
        everything = Memory(Delivery(file.nbytes, count=self._advance))
        with Reading() as reading:
            reading.begin_file(file)
            if file.nbytes:
                reading.add(iter([Want(0, file.nbytes, everything)]))
            reading.finish()
        self._report.nbytes += file.nbytes

    def _check_blob(
        self, contents: Contents, file: DataFile, index: MetadataIndex, info: _StorageInfo
    ) -> None:
        end = info.offset + info.length
        try:
            file.require(end)
        except CheckpointError as error:
            self._report.problems.append(error)
            return
        blob = _Blob(file.file, info.offset, info.length)
        problem, verified = blobs.examine_range(info.length, blob.read, blob.crc_of)
        if problem is None and verified:
            problem = contents.contradiction(index, info, blob.read)
        if problem is not None:
            self._report.problems.append(
                CheckpointError(problem, file.path, names=(index.fqn,), begin=info.offset, end=end)
            )
        elif verified:
            self._report.nbytes += info.length
        else:
            self._report.unverified.append(index.fqn)
        self._advance(info.length)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            done = min(self._done, self._total)
            self._progress(Progress(done, self._total, self._files_done, self._files_total))


def _unexpected(error: Exception, path: str) -> CheckpointError:
    """Return as damage what no check has foreseen."""
    return CheckpointError(f"it cannot be read ({type(error).__name__}: {error})", path)


class _Blob:
    """A range of a file. Small parts of it, which are asked for again and again, are kept."""

    def __init__(self, file: tensorferry.File, begin: int, nbytes: int) -> None:
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._page = functools.lru_cache(_KEPT_PAGES)(self._read_page)

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes, as many of them as there are."""
        end = min(end, self._nbytes)
        pages = range(begin // _PAGE_NBYTES, -(-end // _PAGE_NBYTES))
        first = pages.start * _PAGE_NBYTES
        return b"".join(map(self._page, pages))[begin - first : max(begin, end) - first]

    def crc_of(self, begin: int, end: int) -> int:
        """Return the CRC-32 of bytes, which the core reads and keeps nothing of."""
        if end - begin <= _PAGE_NBYTES:
            return crc32(self.read(begin, end))
        sums = Checksums(segments=True)
        self._file.read([end - begin, bytearray()], self._begin + begin, checksums=sums)
        return sums.segments[0]

    def _read_page(self, number: int) -> bytearray:
        begin = number * _PAGE_NBYTES
        page = bytearray(min(_PAGE_NBYTES, self._nbytes - begin))
        return self._file.read(page, self._begin + begin)


_PAGE_NBYTES = 64 << 10
_KEPT_PAGES = 4
