"""Inspection of safetensors files without loading them: one file, or all files of a folder, with their index.

Headers are checked by the rules of the format. The format has no checksums; data are compared with the checksums that
are stored next to a file (:mod:`tensorferry.safetensors.checksums`), if there are any. Neither check needs torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING

import tensorferry
from tensorferry._core import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter
from tensorferry.checkpoint.tools.findings import Audit, Entry, Report, Shard
from tensorferry.safetensors import checksums, header, index, sources
from tensorferry.safetensors.dtypes import DTYPES
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.parsing import METADATA
from tensorferry.transfer.remote import Version, as_path, source_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.tools.formats import ConversionSource
    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.header import Header
    from tensorferry.safetensors.sources import Stored


def verify(
    path: str,
    *,
    write_checksums: bool = False,
    progress: Listener | None = None,
    **_options: object,
) -> Report:
    """Verify a file, a sharded model by its index, or a folder; see :func:`tensorferry.checkpoint.verify`."""
    return _SafetensorsAudit(path, progress, write_checksums).run()


def entries(path: str, **_options: object) -> list[Entry]:
    """Return the tensors of a file, a sharded model, or a folder, in the order of files and of their bytes.

    Raises
    ------
    OSError
        A file is missing, or cannot be read.
    CheckpointError
        A header or an index violates the format, or the files do not fit together.
    """
    try:
        held = sources.contents_of(
            path, complete=True, problem=_inconsistency_handler(path, sources.fail)
        )
    except SafetensorError as error:
        raise _checkpoint_error(error) from None
    return [_entry(shape, parts) for shape, parts in held.tensors.values()]


def find_source(path: str, **_options: object) -> ConversionSource:
    """Return the tensors to convert; one file of a sharded model is refused."""
    from tensorferry.checkpoint.storage import huggingface
    from tensorferry.checkpoint.tools.formats import ConversionSource

    file_name = as_path(path).name if as_path(path).is_file() else ""
    several = index.ONE_OF_SEVERAL.fullmatch(file_name)
    if index.RANKS_FILE.fullmatch(file_name) or (several and int(several[3]) > 1):
        raise CheckpointError("it is one of several files: pass their folder, or the index", path)
    held = sources.contents_of(path, complete=True)
    if any(as_path(checksums.path_of(each)).exists() for each in sources.files_of(path).paths):
        verify(path).require_sound()
    tensors, places = huggingface.scan(held.tensors)
    others = [f"{METADATA}.{key}" for key in sorted(held.differing)]
    metadata = {key: text for key, text in held.metadata.items() if key not in held.differing}
    return ConversionSource(tensors, huggingface.LocatedTensors(places), others, metadata)


def write(
    found: ConversionSource, folder: Path, shard_nbytes: int, progress: Listener | None
) -> Throughput:
    """Write a model in files of limited size."""
    from tensorferry.checkpoint.storage import huggingface
    from tensorferry.safetensors import sharded

    shards = sharded.split(huggingface.entries_of(found.tensors), shard_nbytes)
    nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
    meter = Meter(progress, total_nbytes=nbytes, total_files=len(shards))
    with sharded.Model(folder, sync=True) as model:
        model.check_count(len(shards))
        for name, entries in shards.items():
            tensors = {entry.name: found.tensors[entry.name] for entry in entries}
            huggingface.write_file(model, name, tensors, found.source, meter.add, found.metadata)
            meter.add(0, files=1)
        weights = {entry.name: name for name, entries in shards.items() for entry in entries}
        model.commit(weights, nbytes)
    return meter.finish()


def _inconsistency_handler(
    path: str, problem: Callable[[SafetensorError], None]
) -> Callable[[SafetensorError], None]:
    """Return the handler of inconsistencies between files; they are ignored for a single file."""
    return problem if as_path(path).is_dir() or path.endswith(index.SUFFIX) else lambda _: None


def _entry(shape: tuple[int, ...], parts: list[Stored]) -> Entry:
    name, dtype = parts[0].tensor.name, DTYPES[parts[0].tensor.dtype]
    # For F4, torch has a dtype of pairs, so its shape would differ: use the format's own name.
    kind = dtype.torch if dtype.torch and dtype.bits >= 8 else dtype.name
    shards = tuple(
        Shard(
            part.offsets or (0,) * len(shape),
            part.tensor.shape,
            as_path(part.path).name,
            part.tensor.begin,
            part.tensor.end,
        )
        for part in parts
    )
    return Entry(name, kind, shape, math.prod(shape) * dtype.bits // 8, shards)


class _SafetensorsAudit(Audit):
    def __init__(self, path: str, progress: Listener | None, write: bool) -> None:
        super().__init__(path, progress)
        self._write = write

    def run(self) -> Report:
        # An absolute path, like the paths that an index leads to: so the cache of _look() finds each file by one path.
        path = as_path(source_path(self.report.path))
        files, indexes = index.names_in(path) if path.is_dir() else ([], [])
        inside = [str(path / name) for name in files]
        models = [str(path / name) for name in indexes] if len(indexes) > 1 else [str(path)]
        known = set(inside)
        for model in models:
            with contextlib.suppress(SafetensorError, OSError):  # contents_of() reports it below
                known.update(sources.files_of(model).paths)
        nbytes = sum(as_path(file).stat().st_size for file in known if as_path(file).is_file())
        self.meter.expect(nbytes, len(known))
        look = functools.cache(self._look)
        for model in models:
            handler = _inconsistency_handler(model, self._damaged)
            try:
                sources.contents_of(
                    model, complete=True, together=False, look=look, problem=handler
                )
            except (SafetensorError, OSError) as error:
                self._damaged(error)
        for file in inside:
            look(file)
        return self.finish()

    def _look(self, file: str) -> tuple[Header, Version] | None:
        """Check a file, add the result to the report, and return the header if it is valid."""
        found = None
        try:
            found = self._check_file(file)
            if found is not None:
                self.report.entries += len(found.tensors)
        except (SafetensorError, OSError) as error:
            self._damaged(error, file)
        self.meter.add(0, files=1)
        return None if found is None else (found, Version.at(file))

    def _check_file(self, path: str) -> Header | None:
        """Check a file's header and data, and return the header if it is valid."""
        with tensorferry.open(path) as file:
            try:
                found = header.read(file)
            except SafetensorError as error:
                self._damaged(error)
                found = None
            try:
                sums = checksums.read(path, file.size)
            except FileNotFoundError:
                if self._write and found is not None:
                    self.report.written += checksums.write(path, progress=self.meter.add)
                else:
                    self.report.unverified.append(as_path(path).name)
                    self.meter.add(file.size)
                return found
            except (SafetensorError, OSError) as error:
                self._damaged(error)
                self.meter.add(file.size)
                return found
            self._check_data(file, sums, found)
        return found

    def _check_data(
        self, file: tensorferry.File, sums: FileChecksums, found: Header | None
    ) -> None:
        """Verify all chunks of a file, and name the tensors in those that differ."""
        damage: list[tuple[int, int, str]] = []
        chunks = checksums.chunk_crcs(file, sums.nbytes, sums.chunk_nbytes)
        for (begin, end, crc), expected in zip(chunks, sums.chunks, strict=True):
            self.meter.add(end - begin)
            if crc == expected:
                self.report.nbytes += end - begin
                continue
            reason = "it differs from its checksum"
            if isinstance(crc, OSError):
                reason = f"it cannot be read: {crc.strerror}"
            if damage and damage[-1][1:] == (begin, reason):  # adjacent damage is reported as one
                begin, *_ = damage.pop()
            damage.append((begin, end, reason))
        if damage and _header_crc(file, sums) != sums.header_crc32:
            reason = "its header differs from its checksum: it is damaged, or the file has been replaced since"
            self.problem(CheckpointError(reason, file.path, begin=0, end=sums.header_nbytes))
        tensors = found.tensors.values() if found else ()
        for begin, end, reason in damage:
            names = tuple(
                each.name for each in tensors if max(begin, each.begin) < min(end, each.end)
            )
            self.problem(CheckpointError(reason, file.path, names=names, begin=begin, end=end))

    def _damaged(self, error: SafetensorError | OSError, path: str = "") -> None:
        self.problem(
            _checkpoint_error(error) if isinstance(error, SafetensorError) else error, path
        )


def _header_crc(file: tensorferry.File, sums: FileChecksums) -> int | None:
    try:
        return crc32(file.read(bytearray(sums.header_nbytes)))
    except OSError:
        return None


def _checkpoint_error(error: SafetensorError) -> CheckpointError:
    names = () if error.name is None else (error.name,)
    return CheckpointError(error.reason, error.path, names=names)
