"""What a stored store has, as text: names, what each tensor is, where it lies, and its CRC-32s.

The first line says what follows, and its CRC-32; the second one has the rest:

    {"format": "tensorferry.store", "version": 1, "nbytes": 4711, "crc32": 123456}
    {"run": ..., "directories": 1, "chunk_nbytes": ..., "record": ..., "segments": [...], "tensors": [...]}

``segments``: ``[directory, name, nbytes]``. ``tensors``: ``[name, dtype, shape, nbytes, pieces, checksums]``, where a
piece is ``[segment, offset, nbytes]``, and checksums are one base64 text (32-bit numbers, little-endian) a piece.

Manifests may be anybody's: nothing of one is used before all of it has been looked at.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import sys
import zlib
from array import array as numbers
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tensorferry.base.checks import MAX_FILE_NBYTES
from tensorferry.errors import StorageError
from tensorferry.store.tensors import TensorInfo, checked_info, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NAME = "tensorferry-store.json"
# The manifest of the commit before, where that is kept; moved aside before the new one gets its name.
PREVIOUS_NAME = "tensorferry-store-previous.json"
FORMAT, VERSION = "tensorferry.store", 1

# Pieces begin at multiples of it wherever they were written.
_ALIGNMENT = 4096
_MAX_NBYTES = 1 << 30
_MAX_HEAD_NBYTES = 4096
_MAX_SEGMENTS = 1 << 20
_MAX_DIRECTORIES = 1 << 10

_SEGMENT_NAME = re.compile(r"tensorferry-([0-9a-f]{16})-\d{1,10}-\d{1,10}\.segment", re.ASCII)


class StoredSegment(NamedTuple):
    """A file: which directory it is in, its name there, and the size that it has at least."""

    directory: int
    name: str
    nbytes: int


class StoredTensor(NamedTuple):
    """A tensor: what it is, its pieces (segment, offset, bytes), and the CRC-32s of each."""

    info: TensorInfo
    pieces: tuple[tuple[int, int, int], ...]
    chunks: list[numbers[int]] | None


class Manifest(NamedTuple):
    """All of it."""

    run: str
    directory_count: int
    chunk_nbytes: int
    record: bytes
    segments: Sequence[StoredSegment]
    tensors: Mapping[str, StoredTensor]


def new_run() -> str:
    """Return what files of one store have in their names, and those of no other."""
    return os.urandom(8).hex()


def segment_prefix(run: str, directory: int) -> str:
    """Return what the names of a directory's segments begin with."""
    return f"tensorferry-{run}-{directory}-"


def run_of(name: str) -> str | None:
    """Return the run that a segment's name is of; None for the name of something else."""
    match = _SEGMENT_NAME.fullmatch(name)
    return None if match is None else match[1]


def to_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as it is stored."""
    body = json.dumps(
        {
            "run": manifest.run,
            "directories": manifest.directory_count,
            "chunk_nbytes": manifest.chunk_nbytes,
            "record": base64.b64encode(manifest.record).decode(),
            "segments": manifest.segments,
            "tensors": [
                [
                    name,
                    text_of(stored.info.dtype),
                    stored.info.shape,
                    stored.info.nbytes,
                    stored.pieces,
                    None if stored.chunks is None else [_text_of(sums) for sums in stored.chunks],
                ]
                for name, stored in manifest.tensors.items()
            ],
        },
        separators=(",", ":"),
    ).encode()
    if len(body) > _MAX_NBYTES:
        raise ValueError(f"the manifest has {len(body)} bytes, more than the {_MAX_NBYTES} it may")
    head = {
        "format": FORMAT,
        "version": VERSION,
        "nbytes": len(body),
        "crc32": zlib.crc32(body),
    }
    return json.dumps(head).encode() + b"\n" + body + b"\n"


def names_in(directory: str) -> list[str]:
    """Return the names of manifests in a directory: of the last commit, and of the one before if it is kept."""
    return [
        name
        for name in (NAME, PREVIOUS_NAME)
        if os.path.exists(os.path.join(directory, name))  # noqa: PTH110, PTH118
    ]


def opened(path: str) -> BinaryIO:
    """Open a file that may be anybody's, and is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return open(descriptor, "rb")
    except BaseException:  # it is a directory
        os.close(descriptor)
        raise


def read(path: str, still_valid: Callable[[Manifest], None] | None = None) -> Manifest:
    """Read and check a manifest; StorageError where there is none, or it cannot be trusted.

    Where ``still_valid`` is given it is asked, and when another manifest has taken the place of the one it was asked
    about, that one is read.
    """
    while True:
        try:
            with opened(path) as file:
                manifest = from_bytes(file.read(_MAX_HEAD_NBYTES + _MAX_NBYTES + 1))
                if still_valid is None:
                    return manifest
                still_valid(manifest)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # noqa: PTH116
                    return manifest
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                error.errno, f"{error.strerror} (reading the manifest of a store)", path
            ) from None
        except (ValueError, RecursionError) as error:
            raise StorageError(
                None,
                f"no manifest of a store that can be used: {error} (remedy: open a snapshot or another copy; to begin "
                "anew in this directory, remove tensorferry-* from it, the tensors too)",
                path,
            ) from None


def from_bytes(data: bytes) -> Manifest:
    """Return what a manifest says; ValueError where that is not sound."""
    line, _, rest = data.partition(b"\n")
    if len(line) > _MAX_HEAD_NBYTES:
        raise ValueError("its first line is too long")
    head = _json(line, "first line")
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("its first line is not that of a store")
    if head.get("version") != VERSION:
        raise ValueError(f"it is of version {head.get('version')!r}, and only {VERSION} is known")
    body = rest.removesuffix(b"\n")
    if head.get("nbytes") != len(body) or head.get("crc32") != zlib.crc32(body):
        raise ValueError(
            "it is not whole (likely cause: a power cut after a commit without sync=True)"
        )
    return _checked(_json(body, "body"))


def _checked(body: Any) -> Manifest:
    if not isinstance(body, dict):
        raise ValueError("its body is no object")
    run = body.get("run")
    if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run, re.ASCII):
        raise ValueError(f"run {run!r} is none")
    count = _integer(body.get("directories"), 1, _MAX_DIRECTORIES, "directories")
    chunk = _integer(body.get("chunk_nbytes"), 4096, 4 << 20, "chunk_nbytes")
    segments = [_segment(one, count) for one in _list(body.get("segments"), 3, "segments")]
    if len(segments) > _MAX_SEGMENTS:
        raise ValueError(f"it has {len(segments)} segments")
    tensors: dict[str, StoredTensor] = {}
    for one in _list(body.get("tensors"), 6, "tensors"):
        name, dtype, shape, nbytes, pieces, chunks = one
        if not isinstance(name, str) or name in tensors:
            raise ValueError(f"tensor {name!r} has no name of its own")
        try:
            tensors[name] = _tensor(dtype, shape, nbytes, pieces, chunks, segments, chunk)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
    return Manifest(run, count, chunk, _base64(body.get("record")), segments, tensors)


def _segment(one: list[Any], directory_count: int) -> StoredSegment:
    directory, name, nbytes = one
    _integer(directory, 0, directory_count - 1, "a segment's directory")
    if not isinstance(name, str) or run_of(name) is None:
        raise ValueError(f"{name!r} is no segment's name")
    return StoredSegment(directory, name, _integer(nbytes, 0, MAX_FILE_NBYTES, "a segment's size"))


def _tensor(
    dtype: Any,
    shape: Any,
    nbytes: Any,
    pieces: Any,
    chunks: Any,
    segments: list[StoredSegment],
    chunk_nbytes: int,
) -> StoredTensor:
    info = checked_info(dtype, shape, nbytes)
    found: list[tuple[int, int, int]] = []
    for segment, offset, size in _list(pieces, 3, "pieces"):
        _integer(segment, 0, len(segments) - 1, "a piece's segment")
        _integer(size, 1, MAX_FILE_NBYTES, "a piece's size")
        _integer(offset, 0, segments[segment].nbytes - size, "a piece's offset")
        if offset % _ALIGNMENT != 0:
            raise ValueError(f"a piece begins at {offset}, which is no multiple of {_ALIGNMENT}")
        found.append((segment, offset, size))
    if sum(size for _, _, size in found) != info.nbytes:
        raise ValueError(f"its pieces have not the {info.nbytes} bytes that it has")
    sizes = [size for _, _, size in found]
    if len(sizes) > 1 and (
        len(set(sizes[:-1])) > 1 or sizes[0] % _ALIGNMENT or sizes[-1] > sizes[0]
    ):
        raise ValueError(f"its pieces are not of one size: {sizes}")
    if chunks is None:
        return StoredTensor(info, tuple(found), None)
    if not isinstance(chunks, list) or len(chunks) != len(found):
        raise ValueError("its checksums are not those of its pieces")
    sums = [_numbers(text) for text in chunks]
    for of_piece, size in zip(sums, sizes, strict=True):
        if len(of_piece) != -(-size // chunk_nbytes):
            raise ValueError(f"a piece of {size} bytes has {len(of_piece)} checksums")
    return StoredTensor(info, tuple(found), sums)


def _json(text: bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"its {what} is no JSON: {error}") from None


def _list(value: Any, length: int, what: str) -> Iterable[list[Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{what} are no list")
    for one in value:
        if not isinstance(one, list) or len(one) != length:
            raise ValueError(f"one of the {what} has not {length} parts")
    return value


def _integer(value: Any, minimum: int, maximum: int, what: str) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{what} is {value!r}, and must be between {minimum} and {maximum}")
    return value


def _base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a base64 text is missing")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a base64 text is none") from None


def _text_of(sums: numbers[int]) -> str:
    return base64.b64encode(_little_endian(sums).tobytes()).decode()


def _numbers(text: Any) -> numbers[int]:
    data = _base64(text)
    if len(data) % 4 != 0:
        raise ValueError("its checksums are no 32-bit numbers")
    return _little_endian(numbers("I", data))


def _little_endian(sums: numbers[int]) -> numbers[int]:
    if sys.byteorder == "little":
        return sums
    swapped = numbers("I", sums)
    swapped.byteswap()
    return swapped
