"""Checking a checkpoint without loading it: whether it is complete, and every byte as it was written.

Files with chunk checksums are read once, headers and gaps included. Of others (those that torch wrote) each blob is a
zip archive, whose records have checksums that torch itself never looks at.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorferry.checkpoint import blobs
from tensorferry.checkpoint.contents import Contents
from tensorferry.checkpoint.delivery import Nothing
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.listing import entries_of, metadata_files
from tensorferry.checkpoint.metadata import file_checksums, read_metadata
from tensorferry.checkpoint.pipeline import READING_BUFFER_COUNT, Pipeline
from tensorferry.checkpoint.sweep import Sweep, cuts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from tensorferry.checkpoint.sweep import DataFile


@dataclass
class Report:
    """What :func:`verify` found.

    Attributes
    ----------
    path : str
        The checkpoint.
    entries : int
        How many tensors and objects it has.
    nbytes : int
        How many bytes were verified.
    problems : list of CheckpointError or OSError
        What is damaged, missing or unreadable; each names tensors, file and range where it can.
    unverified : list of str
        Names of what has no checksum to verify it by: tensors and objects, and files of metadata, which torch's own
        writer never gives one.
    """

    path: str
    entries: int = 0
    nbytes: int = 0
    problems: list[CheckpointError | OSError] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: str | os.PathLike[str],
    *,
    trust_pickle: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read a whole checkpoint, and verify it.

    Parameters
    ----------
    path : str or PathLike
        The checkpoint's folder.
    trust_pickle : bool
        As for :class:`tensorferry.checkpoint.FileSystemReader`.
    progress : function of (bytes done, bytes in all), optional
        Called now and then.

    Returns
    -------
    Report
        Damage does not raise; it is in ``problems``.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint.
    """
    return _Audit(os.fspath(path), trust_pickle, progress).run()


class _Audit:
    def __init__(
        self, path: str, trusted: bool, progress: Callable[[int, int], None] | None
    ) -> None:
        self._report = Report(path)
        self._trusted = trusted
        self._progress = progress
        self._done = self._total = 0

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
            self._total += sum(info.length for info in metadata.storage_data.values())
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
        with Pipeline(READING_BUFFER_COUNT) as pipeline, Sweep(pipeline) as sweep:
            sweep.begin_file(file)
            nothing = Nothing()
            for begin, end in cuts(0, file.nbytes):
                sweep.want(begin, end, nothing)
                self._advance(end - begin)
            sweep.finish()
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
        view = _View(file.path, info.offset, info.length)
        with io.BufferedReader(view, _READ_NBYTES) as stream:  # type: ignore[type-var]
            problem, verified = blobs.examine(stream)
            if problem is None and verified:
                problem = contents.contradiction(index, info, stream)
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
            self._progress(min(self._done, self._total), self._total)


_READ_NBYTES = 1 << 20


def _unexpected(error: Exception, path: str) -> CheckpointError:
    """Return as damage what no check has foreseen."""
    return CheckpointError(f"it cannot be read ({type(error).__name__}: {error})", path)


class _View(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, path: str, begin: int, nbytes: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close())
        self._begin = begin
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        nbytes = max(0, min(len(buffer), self._nbytes - self._position))
        count = os.preadv(
            self._file.fileno(), [memoryview(buffer)[:nbytes]], self._begin + self._position
        )
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
