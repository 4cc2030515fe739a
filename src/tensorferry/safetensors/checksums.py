"""Checksums of safetensors files, in a sidecar file: the format has no checksums, so a flipped bit goes unnoticed.

The checksums of ``model.safetensors`` are in the sidecar file ``model.safetensors.crc32``. This file is JSON with the
model file's size, the CRC-32 of its header and the CRC-32 of each chunk. Chunks are ranges of equal size (256 KiB by
default), from the model file's first byte on. The sidecar file is replaced atomically. It is untrusted input, as the
model itself is: its size is limited and every field is validated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import tensorferry
from tensorferry._core import crc32
from tensorferry.base.checks import Path, checked_path
from tensorferry.errors import ChecksumError, StorageError
from tensorferry.safetensors import header, index
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.parsing import LENGTH_NBYTES
from tensorferry.transfer.checksums import MAX_CHUNK_NBYTES, MIN_CHUNK_NBYTES, Checksums
from tensorferry.transfer.piece_checksums import piece_crcs
from tensorferry.transfer.remote import Version, as_path, checked_text
from tensorferry.transfer.replacement import Replacement
from tensorferry.transfer.sidecars import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.transfer.files import File

CHUNK_NBYTES = 256 << 10
"""The default chunk size. Verifying a range reads less than one extra chunk at each end of it."""

_VERSION = 1
_CRC_DIGITS = 8
# The limit for the size of the JSON without the hexadecimal digits of the chunks' CRC-32s.
_OTHER_NBYTES = 4096

Listener: TypeAlias = "Callable[[int], object]"
"""A callback that receives the number of bytes read since its last call."""


class FileChecksums(NamedTuple):
    """The checksums of a file.

    Attributes
    ----------
    chunk_nbytes : int
        The size of each chunk. The last chunk may be shorter.
    chunks : list of int
        The CRC-32 of each chunk, from the beginning of the file.
    nbytes : int
        The size of the file.
    header_nbytes : int
        The size of the header with its length field, which is the offset of the first tensor.
    header_crc32 : int
        The CRC-32 of the header with its length field.
    """

    chunk_nbytes: int
    chunks: list[int]
    nbytes: int
    header_nbytes: int
    header_crc32: int

    def check_header(self, data: bytes, path: str) -> None:
        """Raise ChecksumError if the bytes of a header, with its length field, are not those of the checksums."""
        if (len(data), crc32(data)) != (self.header_nbytes, self.header_crc32):
            reason = (
                "the header is damaged, or the file was replaced after its checksums were written"
            )
            error = ChecksumError(None, f"Checksum mismatch ({reason})", path)
            error.nbytes = len(data)
            raise error

    def covering(self, begin: int, end: int) -> tuple[int, int, list[int]]:
        """Return the start and end of the chunks that contain a range of the file, and the CRC-32s of these chunks."""
        first, last = begin // self.chunk_nbytes, -(-end // self.chunk_nbytes)
        ends = min(last * self.chunk_nbytes, self.nbytes)
        return first * self.chunk_nbytes, ends, self.chunks[first:last]


def path_of(path: Path) -> str:
    """Return the path of the sidecar file with a file's checksums, whether or not it exists."""
    return checked_text(path) + SUFFIX


def write(
    paths: Path | Iterable[Path],
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    sync: bool = True,
    progress: Listener | None = None,
) -> list[str]:
    """Read safetensors files from end to end, and write their checksums next to them.

    Parameters
    ----------
    paths : path, or iterable of paths
        The files. Existing checksums are replaced by those of the files' current content.
    chunk_nbytes : int
        The size of a chunk, from 4096 bytes to 4 MiB.
    sync : bool
        Whether the checksums survive a power cut once this returns.
    progress : function of int, optional
        Called with the number of bytes read since its last call.

    Returns
    -------
    list of str
        The paths of the sidecar files.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid. No file was read or written.
    SafetensorError
        A file breaks a rule of the format, or changed during the call. Its old checksums remain, or it has none.
    StorageError, OSError
        A file cannot be read, or its checksums cannot be written.
    """
    Checksums(chunk_nbytes)  # raises if the size is invalid
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
    checked = [checked_path(each) for each in several]
    for path in checked:
        with contextlib.suppress(FileNotFoundError):
            # If the suffix makes the name too long, lstat() raises an error now, and not after hours of reading.
            pathlib.Path(path_of(path)).lstat()
    for path in checked:
        before = Version.at(path)
        with tensorferry.open(path) as file:
            sums = compute(file, chunk_nbytes=chunk_nbytes, progress=progress)
        if Version.at(path) != before:
            raise _changed(path)
        keep(path, sums, sync=sync)
        # The file may have been replaced between the check and keep(). The checksums then belong to the old file, and
        # readers would report the new file as damaged, so the checksums are removed.
        if Version.at(path) != before:
            pathlib.Path(path_of(path)).unlink(missing_ok=True)
            raise _changed(path)
    return [path_of(path) for path in checked]


def compute(
    file: File, *, chunk_nbytes: int = CHUNK_NBYTES, progress: Listener | None = None
) -> FileChecksums:
    """Compute the checksums of an open file. See :func:`write`."""
    before = Version.at(file.path)
    found = header.read(file)
    header_bytes = bytes(file.read(bytearray(found.nbytes)))
    chunks: list[int] = []
    for begin, end, crc in chunk_crcs(file, found.file_nbytes, chunk_nbytes):
        if isinstance(crc, OSError):
            raise crc
        if progress is not None:
            progress(end - begin)
        chunks.append(crc)
    after = Version.at(file.path)
    if before != after or file.size != found.file_nbytes:
        raise _changed(file.path)
    return FileChecksums(chunk_nbytes, chunks, found.file_nbytes, found.nbytes, crc32(header_bytes))


def keep(path: Path, sums: FileChecksums, *, sync: bool = True) -> None:
    """Write the sidecar file of a file, with checksums that the caller has computed.

    Raises
    ------
    StorageError, OSError
        The checksums cannot be written. The old ones remain.
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
    content["crc32"] = _crc_of_fields(content)
    with Replacement(path_of(path), sync=sync) as new:
        new.file.write_bytes(json.dumps(content, indent=1).encode() + b"\n")


def read(path: Path, file_nbytes: int | None = None) -> FileChecksums:
    """Return the checksums that are stored next to a file.

    Parameters
    ----------
    path : path
        The path of the file, not of its checksums.
    file_nbytes : int, optional
        The size of the file, if the caller has it.

    Raises
    ------
    FileNotFoundError
        The file has no checksums.
    SafetensorError
        The checksums are damaged, or belong to a file of another size.
    OSError
        The checksums cannot be read.
    """
    text, kept = checked_text(path), path_of(path)
    if file_nbytes is None:
        file_nbytes = as_path(text).stat().st_size
    # The limit assumes the smallest chunks: 8 digits for each 4096 bytes, which is 1/512 of the file.
    most = _OTHER_NBYTES + _CRC_DIGITS * -(-file_nbytes // MIN_CHUNK_NBYTES)
    try:
        # The suffix can make the name too long. A file with such a long name cannot have checksums.
        content = index.json_in(kept, most, "this is not a file of checksums")
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), kept) from None
    sums = _parse(content, kept)
    if sums.nbytes != file_nbytes:
        raise SafetensorError(
            f"the file has {file_nbytes} bytes, and its checksums are for {sums.nbytes}: it was cut short or replaced",
            text,
        )
    return sums


def chunk_crcs(
    file: File, nbytes: int, chunk_nbytes: int
) -> Iterator[tuple[int, int, int | OSError]]:
    """Read the first ``nbytes`` of a file; yield each chunk's range, and its CRC-32 or the error of reading it."""
    begins = range(0, nbytes, chunk_nbytes)
    sizes = (min(chunk_nbytes, nbytes - begin) for begin in begins)
    for begin, crc in zip(begins, piece_crcs(file, 0, sizes), strict=True):
        yield begin, min(begin + chunk_nbytes, nbytes), crc


def _changed(path: str) -> SafetensorError:
    return SafetensorError("the file changed while its checksums were computed", path)


def _digits(crcs: Sequence[int]) -> str:
    return "".join(f"{crc:0{_CRC_DIGITS}x}" for crc in crcs)


def _crc_of_fields(content: dict[str, object]) -> str:
    """Return the CRC-32 of the sidecar file's fields.

    It is stored in the sidecar file, too. A reader that finds another value knows that the checksums are damaged, and
    not the file to which they belong.
    """
    text = json.dumps([content[key] for key in _FIELDS])
    return _digits([crc32(text.encode())])


_FIELDS = ("version", "nbytes", "header_nbytes", "header_crc32", "chunk_nbytes", "chunks_crc32")


def _parse(content: Any, path: str) -> FileChecksums:
    if not isinstance(content, dict) or not {*_FIELDS, "crc32"} <= content.keys():
        raise SafetensorError("this is not a file of checksums", path)
    version = content["version"]
    if type(version) is not int or version != _VERSION:
        raise SafetensorError(
            f"the checksums have version {shortened(version)}, and this tensorferry reads version {_VERSION}",
            path,
        )
    if content["crc32"] != _crc_of_fields(content):
        raise SafetensorError("the checksums themselves are damaged", path)
    nbytes, header_nbytes = (
        _number(content, "nbytes", path),
        _number(content, "header_nbytes", path),
    )
    chunk_nbytes = _number(content, "chunk_nbytes", path)
    if not MIN_CHUNK_NBYTES <= chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise SafetensorError(f"chunk_nbytes: {chunk_nbytes} is out of range", path)
    if not LENGTH_NBYTES <= header_nbytes <= min(nbytes, LENGTH_NBYTES + header.MAX_NBYTES):
        raise SafetensorError(f"header_nbytes: {header_nbytes} is out of range", path)
    chunks = _crcs(content, "chunks_crc32", -(-nbytes // chunk_nbytes), path)
    [header_crc32] = _crcs(content, "header_crc32", 1, path)
    return FileChecksums(chunk_nbytes, chunks, nbytes, header_nbytes, header_crc32)


def _number(content: dict[str, object], key: str, path: str) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise SafetensorError(f"{key}: {shortened(value)} is not a number of bytes", path)
    return value


def _crcs(content: dict[str, object], key: str, count: int, path: str) -> list[int]:
    value = content[key]
    if not isinstance(value, str) or len(value) != count * _CRC_DIGITS:
        raise SafetensorError(f"{key}: these are not {count} checksums", path)
    try:
        packed = bytes.fromhex(value)
    except ValueError:
        packed = b""
    if len(packed) * 2 != len(value):  # fromhex() skips white space, which must not count as digits
        raise SafetensorError(f"{key}: not hexadecimal digits", path)
    return [int.from_bytes(packed[at : at + 4], "big") for at in range(0, len(packed), 4)]
