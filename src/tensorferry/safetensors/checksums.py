"""Checksums kept beside safetensors files: the format has none, so that nothing else would tell a flipped bit.

Those of ``model.safetensors`` are in ``model.safetensors.crc32``: JSON with the file's size, the CRC-32 of its header
and of each chunk, chunks being counted from the beginning of the file. It gets its name when it is whole, at one
stroke, and is read as what anybody may have made.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import tensorferry
from tensorferry._core import crc32
from tensorferry.base.checks import Path, checked_path
from tensorferry.errors import StorageError
from tensorferry.safetensors import header, small
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.parsing import LENGTH_NBYTES
from tensorferry.transfer.checksums import MAX_CHUNK_NBYTES, MIN_CHUNK_NBYTES, Checksums
from tensorferry.transfer.pipeline import Pipeline, Read
from tensorferry.transfer.remote import Version, checked_text, place, text_of
from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.transfer.files import File

SUFFIX = ".crc32"

CHUNK_NBYTES = 256 << 10
"""What is read too much, at most, at each end of a part that is verified."""

_VERSION = 1
_BATCH_NBYTES = 32 << 20  # read at a time; nothing of it comes to Python
_CRC_DIGITS = 8
_OTHER_NBYTES = 4096  # of the JSON, beside the chunks' digits

Listener: TypeAlias = "Callable[[int], object]"
"""Is told how many bytes more have been read."""


class FileChecksums(NamedTuple):
    """The checksums of a file.

    Attributes
    ----------
    chunk_nbytes : int
        Of each chunk but the last, which may be shorter.
    chunks : list of int
        The CRC-32 of each, from the beginning of the file on.
    nbytes : int
        Of the file.
    header_nbytes, header_crc32 : int
        Of the header with the length before it: where the first tensor begins, and the CRC-32 of what is before.
    """

    chunk_nbytes: int
    chunks: list[int]
    nbytes: int
    header_nbytes: int
    header_crc32: int

    def covering(self, begin: int, end: int) -> tuple[int, int, list[int]]:
        """Return the chunks that a range of the file lies in: where they begin and end, and their CRC-32s."""
        first, last = begin // self.chunk_nbytes, -(-end // self.chunk_nbytes)
        ends = min(last * self.chunk_nbytes, self.nbytes)
        return first * self.chunk_nbytes, ends, self.chunks[first:last]


def path_of(path: Path) -> str:
    """Return where the checksums of a file are, or would be."""
    return checked_text(path) + SUFFIX


def write(
    paths: Path | Iterable[Path],
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    sync: bool = True,
    progress: Listener | None = None,
) -> list[str]:
    """Read safetensors files from end to end, and keep their checksums beside them.

    Parameters
    ----------
    paths : path, or iterable of paths
        The files. Checksums that are there are replaced: they are of what the files are now.
    chunk_nbytes : int
        Of a chunk, 4096 to 4 MiB.
    sync : bool
        Whether the checksums will survive a power cut.
    progress : function of int, optional
        Is told how many bytes more have been read.

    Returns
    -------
    list of str
        Where they are.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable; nothing was touched.
    SafetensorError
        A file breaks a rule of the format, or changes meanwhile. It has the checksums that it had, or none.
    StorageError, OSError
        A file cannot be read, or its checksums cannot be written.
    """
    Checksums(chunk_nbytes)  # says what is wrong with it
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
    places = [checked_path(each) for each in several]
    for path in places:
        with contextlib.suppress(FileNotFoundError):
            # A name that is too long is found before anything is read.
            pathlib.Path(path_of(path)).lstat()
    for path in places:
        before = Version.at(path)
        with tensorferry.open(path) as file:
            sums = take(file, chunk_nbytes=chunk_nbytes, progress=progress)
        if Version.at(path) != before:
            raise _changed(path)
        keep(path, sums, sync=sync)
        if Version.at(path) != before:  # they are of a file that is not there any more
            pathlib.Path(path_of(path)).unlink(missing_ok=True)
            raise _changed(path)
    return [path_of(path) for path in places]


def take(
    file: File, *, chunk_nbytes: int = CHUNK_NBYTES, progress: Listener | None = None
) -> FileChecksums:
    """Return the checksums of an open file; see :func:`write`."""
    before = Version.at(file.path)
    found = header.read(file)
    begin = bytes(file.read(bytearray(found.nbytes)))
    chunks: list[int] = []
    for _, end, crcs in chunk_crcs(file, found.file_nbytes, chunk_nbytes):
        if isinstance(crcs, OSError):
            raise crcs
        if progress is not None:
            progress(end - len(chunks) * chunk_nbytes)
        chunks += crcs
    after = Version.at(file.path)
    if before != after or file.size != found.file_nbytes:
        raise _changed(file.path)
    return FileChecksums(chunk_nbytes, chunks, found.file_nbytes, found.nbytes, crc32(begin))


def keep(path: Path, sums: FileChecksums, *, sync: bool = True) -> None:
    """Write checksums of a file beside it; for those who took them while they wrote the file.

    Raises
    ------
    StorageError, OSError
        They cannot be written. What was there is there.
    """
    digits = _digits(sums.chunks)
    content = {
        "version": _VERSION,
        "nbytes": sums.nbytes,
        "header_nbytes": sums.header_nbytes,
        "header_crc32": _digits([sums.header_crc32]),
        "chunk_nbytes": sums.chunk_nbytes,
        "chunks_crc32": digits,
    }
    content["crc32"] = _own_crc(content)
    with Replacement(path_of(path), sync=sync) as new:
        new.file.write_bytes(json.dumps(content, indent=1).encode() + b"\n")


def read(path: Path, file_nbytes: int | None = None) -> FileChecksums:
    """Return the checksums that are kept beside a file.

    Parameters
    ----------
    path : path
        The file's, not that of its checksums.
    file_nbytes : int, optional
        Its size, where that is known.

    Raises
    ------
    FileNotFoundError
        There are none.
    SafetensorError
        They are damaged, or those of a file of another size.
    OSError
        They cannot be read.
    """
    text, kept = text_of(path), path_of(path)
    if file_nbytes is None:
        file_nbytes = place(text).stat().st_size
    # Of the smallest chunks: what is read is a 512th of the file at most.
    most = _OTHER_NBYTES + _CRC_DIGITS * -(-file_nbytes // MIN_CHUNK_NBYTES)
    try:
        data = small.read(kept, most)
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), kept) from None
    sums = _parsed(data, kept)
    if sums.nbytes != file_nbytes:
        raise SafetensorError(
            f"the file has {file_nbytes} bytes, and its checksums are of {sums.nbytes}: it was cut short or replaced",
            text,
        )
    return sums


def chunk_crcs(
    file: File, nbytes: int, chunk_nbytes: int
) -> Iterator[tuple[int, int, list[int] | OSError]]:
    """Read a file's first bytes, from end to end, and return the CRC-32s of its chunks, some at a time.

    Yields
    ------
    begin, end : int
        A range of whole chunks.
    crcs : list of int or OSError
        Of its chunks, or why it cannot be read; what cannot be read is narrowed down to chunks.
    """
    batch_nbytes = max(1, _BATCH_NBYTES // chunk_nbytes) * chunk_nbytes
    batches = (
        _ChunkBatch(file, begin, min(begin + batch_nbytes, nbytes), chunk_nbytes)
        for begin in range(0, nbytes, batch_nbytes)
    )
    with Pipeline(batches) as pipeline:
        for batch in iter(pipeline.first, None):
            yield from batch.crcs()
            pipeline.release(batch)


class _ChunkBatch(Read):
    """Chunks next to each other."""

    def __init__(self, file: File, begin: int, end: int, chunk_nbytes: int) -> None:
        self.nbytes = end - begin
        self._file = file
        self._range = begin, end
        self._chunk_nbytes = chunk_nbytes
        self._sums = Checksums(chunk_nbytes)

    def begin(self) -> None:
        # A number is passed over, but for its checksums; there must be an array, if one of no bytes.
        wanted: list[int | bytearray] = [self.nbytes, bytearray()]
        self.futures = (self._file.read_into(wanted, self._range[0], checksums=self._sums),)

    def crcs(self) -> Iterator[tuple[int, int, list[int] | OSError]]:
        begin, end = self._range
        chunk_nbytes = self._chunk_nbytes
        try:
            self.wait()
        except OSError as error:
            count = -(-self.nbytes // chunk_nbytes)
            if count <= 1:
                yield begin, end, error
                return
            middle = begin + count // 2 * chunk_nbytes
            for part in ((begin, middle), (middle, end)):
                batch = _ChunkBatch(self._file, *part, chunk_nbytes)
                batch.begin()
                yield from batch.crcs()
        else:
            yield begin, end, self._sums.chunks


def _changed(path: str) -> SafetensorError:
    return SafetensorError("the file changed while its checksums were taken", path)


def _digits(crcs: Sequence[int]) -> str:
    return "".join(f"{crc:0{_CRC_DIGITS}x}" for crc in crcs)


def _own_crc(content: dict[str, object]) -> str:
    """Return the CRC-32 of all that checksums say, so that damage to them is not taken for the file's."""
    said = json.dumps([content[key] for key in _FIELDS])
    return _digits([crc32(said.encode())])


_FIELDS = ("version", "nbytes", "header_nbytes", "header_crc32", "chunk_nbytes", "chunks_crc32")


def _parsed(data: bytes, place: str) -> FileChecksums:
    content = small.json_of(data, place, "these are no checksums")
    if not isinstance(content, dict) or not {*_FIELDS, "crc32"} <= content.keys():
        raise SafetensorError("these are no checksums", place)
    version = content["version"]
    if type(version) is not int or version != _VERSION:
        raise SafetensorError(
            f"they have version {shortened(version)}, and this tensorferry knows {_VERSION}", place
        )
    if content["crc32"] != _own_crc(content):
        raise SafetensorError("the checksums themselves are damaged", place)
    nbytes, header_nbytes = (
        _number(content, "nbytes", place),
        _number(content, "header_nbytes", place),
    )
    chunk_nbytes = _number(content, "chunk_nbytes", place)
    if not MIN_CHUNK_NBYTES <= chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise SafetensorError(f"their chunks have {chunk_nbytes} bytes", place)
    if not LENGTH_NBYTES <= header_nbytes <= min(nbytes, LENGTH_NBYTES + header.MAX_NBYTES):
        raise SafetensorError(f"a header of {header_nbytes} bytes is none", place)
    chunks = _crcs(content, "chunks_crc32", -(-nbytes // chunk_nbytes), place)
    [header_crc32] = _crcs(content, "header_crc32", 1, place)
    return FileChecksums(chunk_nbytes, chunks, nbytes, header_nbytes, header_crc32)


def _number(content: dict[str, object], key: str, place: str) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise SafetensorError(f"their {key} is {shortened(value)}", place)
    return value


def _crcs(content: dict[str, object], key: str, count: int, place: str) -> list[int]:
    value = content[key]
    if not isinstance(value, str) or len(value) != count * _CRC_DIGITS:
        raise SafetensorError(f"their {key} are not {count}", place)
    try:
        packed = bytes.fromhex(value)
    except ValueError:
        packed = b""
    if len(packed) * 2 != len(value):  # fromhex() passes over white space
        raise SafetensorError(f"their {key} are no digits", place)
    return [int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)]
