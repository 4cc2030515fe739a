"""Looking into safetensors files without loading them: one, or all of a folder, with what its index says of them.

A header is checked by the rules of the format. The format has no checksums; data are compared with those that are kept
beside a file (:mod:`tensorferry.safetensors.checksums`), where there are any. Neither needs torch.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import tensorferry
from tensorferry._core import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Progress
from tensorferry.checkpoint.tools.findings import Entry, Report, Shard
from tensorferry.safetensors import checksums, header, index, sources
from tensorferry.safetensors.dtypes import DTYPES
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.header import Header
    from tensorferry.safetensors.sources import Stored


def verify(
    path: str,
    *,
    write_checksums: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Verify a file, a sharded model by its index, or a folder; see :func:`tensorferry.checkpoint.verify`."""
    return _Audit(path, write_checksums, progress).run()


def entries(path: str) -> list[Entry]:
    """Return the tensors of a file, a sharded model, or a folder, in the order of files and of their bytes.

    Raises
    ------
    OSError
        A file is missing, or cannot be read.
    CheckpointError
        A header or an index breaks a rule of the format, or files do not go together.
    """
    try:
        held = sources.hold(path, complete=True, problem=_missed(path, sources.fail))
    except SafetensorError as error:
        raise _plain(error) from None
    return [_entry(shape, parts) for shape, parts in held.tensors.values()]


def _missed(
    path: str, problem: Callable[[SafetensorError], None]
) -> Callable[[SafetensorError], None]:
    """Return what is told of what does not go together: a file by itself is looked at without others."""
    return problem if Path(path).is_dir() or path.endswith(index.SUFFIX) else lambda _: None


def _entry(shape: tuple[int, ...], parts: list[Stored]) -> Entry:
    name, dtype = parts[0].tensor.name, DTYPES[parts[0].tensor.dtype]
    # torch counts pairs of F4.
    kind = dtype.torch if dtype.torch and dtype.bits >= 8 else dtype.name
    shards = tuple(
        Shard(
            part.offsets or (0,) * len(shape),
            part.tensor.shape,
            Path(part.path).name,
            part.tensor.begin,
            part.tensor.end,
        )
        for part in parts
    )
    return Entry(name, kind, shape, math.prod(shape) * dtype.bits // 8, shards)


class _Audit:
    def __init__(self, path: str, write: bool, progress: Callable[[Progress], None] | None) -> None:
        self._report = Report(path)
        self._write = write
        self._progress = progress
        self._done = self._total = 0
        self._files_done = self._files_total = 0

    def run(self) -> Report:
        path = Path(self._report.path)
        files, indexes = index.names_in(path) if path.is_dir() else ([], [])
        inside = [str(path / name) for name in files]
        models = [str(path / name) for name in indexes] if len(indexes) > 1 else [str(path)]
        known = set(inside)
        for model in models:
            with contextlib.suppress(SafetensorError, OSError):  # which will be found
                known.update(sources.files_of(model).paths)
        self._files_total = len(known)
        self._total = sum(Path(file).stat().st_size for file in known if Path(file).is_file())
        look = functools.cache(self._look)
        for model in models:
            told = _missed(model, self._problem)
            try:
                sources.hold(model, complete=True, together=False, look=look, problem=told)
            except (SafetensorError, OSError) as error:
                self._problem(error)
        for file in inside:
            look(file)
        return self._report

    def _look(self, file: str) -> tuple[Header, Version] | None:
        found = None
        try:
            found = self._check_file(file)
            if found is not None:
                self._report.entries += len(found.tensors)
        except (SafetensorError, OSError) as error:
            self._problem(error, file)
        self._files_done += 1
        self._advance(0)
        return None if found is None else (found, Version.at(file))

    def _check_file(self, path: str) -> Header | None:
        """Check a file, and return its header if that is right."""
        with tensorferry.open(path) as file:
            try:
                found = header.read(file)
            except SafetensorError as error:
                self._problem(error)
                found = None
            try:
                sums = checksums.read(path, file.size)
            except FileNotFoundError:
                if self._write and found is not None:
                    self._report.written += checksums.write(path, progress=self._advance)
                else:
                    self._report.unverified.append(Path(path).name)
                    self._advance(file.size)
                return found
            except (SafetensorError, OSError) as error:
                self._problem(error)
                self._advance(file.size)
                return found
            self._check_data(file, sums, found)
        return found

    def _check_data(
        self, file: tensorferry.File, sums: FileChecksums, found: Header | None
    ) -> None:
        """Compare all chunks of a file, and name the tensors in those that differ."""
        chunk = sums.chunk_nbytes
        damage: list[tuple[int, int, str]] = []
        for begin, end, crcs in checksums.chunk_crcs(file, sums.nbytes, chunk):
            self._advance(end - begin)
            if isinstance(crcs, OSError):
                damage.append((begin, end, f"it cannot be read: {crcs.strerror}"))
                continue
            _, _, expected = sums.covering(begin, end)
            for number, (crc, wanted) in enumerate(zip(crcs, expected, strict=True)):
                at = begin + number * chunk
                if crc == wanted:
                    self._report.nbytes += min(chunk, end - at)
                else:
                    damage.append((at, min(at + chunk, end), "it is not what its checksum is of"))
        if damage and _header_crc(file, sums) != sums.header_crc32:
            reason = "its header is not what its checksum is of: it is damaged, or the file was replaced since"
            self._report.problems.append(
                CheckpointError(reason, file.path, begin=0, end=sums.header_nbytes)
            )
        where = _Places(found)
        for begin, end, reason in _joined(damage):
            self._report.problems.append(
                CheckpointError(
                    reason, file.path, names=where.names(begin, end), begin=begin, end=end
                )
            )

    def _problem(self, error: SafetensorError | OSError, path: str = "") -> None:
        if isinstance(error, SafetensorError):
            self._report.problems.append(_plain(error))
            return
        error.filename = error.filename or path
        self._report.problems.append(error)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            done = min(self._done, self._total)
            self._progress(Progress(done, self._total, self._files_done, self._files_total))


class _Places:
    """Which tensors lie where in a file."""

    def __init__(self, found: Header | None) -> None:
        self._tensors = [each for each in found.tensors.values() if each.nbytes] if found else []
        self._begins = [each.begin for each in self._tensors]

    def names(self, begin: int, end: int) -> tuple[str, ...]:
        first = max(0, bisect.bisect_right(self._begins, begin) - 1)
        last = bisect.bisect_left(self._begins, end)
        return tuple(each.name for each in self._tensors[first:last] if each.end > begin)


def _header_crc(file: tensorferry.File, sums: FileChecksums) -> int | None:
    try:
        return crc32(file.read(bytearray(sums.header_nbytes)))
    except OSError:
        return None


def _joined(damage: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """Return neighbours with one reason as one."""
    at = 0
    while at < len(damage):
        begin, end, reason = damage[at]
        at += 1
        while at < len(damage) and damage[at][0] == end and damage[at][2] == reason:
            end = damage[at][1]
            at += 1
        yield begin, end, reason


def _plain(error: SafetensorError) -> CheckpointError:
    names = () if error.name is None else (error.name,)
    return CheckpointError(error.reason, error.path, names=names)
