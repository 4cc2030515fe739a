"""The manifest of a committed store or a snapshot: the names, descriptions, pieces and CRC-32s of its tensors, as JSON.

The first line has the size and the CRC-32 of the second line, which has all data:

    {"format": "tensorferry.store", "version": 1, "nbytes": 4711, "crc32": 123456}
    {"run": ..., "directories": 1, "chunk_nbytes": ..., "record": ..., "segments": [...], "tensors": [...]}

"run" is the random identifier in the file names of the store object that wrote the manifest. "record" is data of the
program, in base64. Each segment, which is a file with tensors, is ``[directory, name, nbytes]``. Each tensor is
``[name, dtype, shape, nbytes, pieces, checksums]``. A piece is the range ``[segment, offset, nbytes]`` of a segment.
The checksums of a piece, one for each ``chunk_nbytes`` of it, are a base64 text of 32-bit little-endian numbers.

A manifest is untrusted input: it is validated completely before any part of it is used.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import sys
import zlib
from array import array as numbers
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tensorferry.base.checks import MAX_FILE_NBYTES, integer
from tensorferry.errors import StorageError
from tensorferry.store.tensors import TensorInfo, checked_info, text_of
from tensorferry.transfer.publication import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NAME = "tensorferry-store.json"
# The manifest of the previous commit, if it is kept: a commit renames the existing manifest to this name before it
# renames the new manifest to NAME.
PREVIOUS_NAME = "tensorferry-store-previous.json"
FORMAT, VERSION = "tensorferry.store", 1

# Pieces begin at multiples of this, on every file system.
_ALIGNMENT = 4096
_MAX_NBYTES = 1 << 30
_MAX_HEAD_NBYTES = 4096
_MAX_SEGMENTS = 1 << 20
MAX_DIRECTORIES = 1 << 10

_SEGMENT_NAME = re.compile(r"tensorferry-([0-9a-f]{16})-\d{1,10}-\d{1,10}\.segment", re.ASCII)


class StoredSegment(NamedTuple):
    """A segment file: the number of its directory, its name there, and its minimum size."""

    directory: int
    name: str
    nbytes: int


class StoredTensor(NamedTuple):
    """A tensor: its description, its pieces (segment, offset, nbytes), and for each piece the CRC-32s of its chunks."""

    info: TensorInfo
    pieces: tuple[tuple[int, int, int], ...]
    chunks: list[numbers[int]] | None


class Manifest(NamedTuple):
    """The content of a manifest. The fields are those of the JSON in the module's description."""

    run: str
    directory_count: int
    chunk_nbytes: int
    record: bytes
    segments: Sequence[StoredSegment]
    tensors: Mapping[str, StoredTensor]


def new_run() -> str:
    """Return a random identifier for the file names of one store."""
    return os.urandom(8).hex()


def segment_prefix(run: str, directory: int) -> str:
    """Return the prefix of the names of a directory's segments."""
    return f"tensorferry-{run}-{directory}-"


def run_of(name: str) -> str | None:
    """Return the run in a segment's file name, or None if it is not the name of a segment."""
    match = _SEGMENT_NAME.fullmatch(name)
    return None if match is None else match[1]


def to_bytes(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
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
        raise ValueError(
            f"the manifest has {len(body)} bytes, more than the limit of {_MAX_NBYTES}"
        )
    head = {
        "format": FORMAT,
        "version": VERSION,
        "nbytes": len(body),
        "crc32": zlib.crc32(body),
    }
    return json.dumps(head).encode() + b"\n" + body + b"\n"


def names_in(directory: str) -> list[str]:
    """Return the file names of the manifests in a directory: of the last commit, and of the previous one if kept.

    Raises
    ------
    StorageError
        It is unknown whether a manifest exists. The segments that it may name must not be removed then.
    """
    found = []
    for name in (NAME, PREVIOUS_NAME):
        path = os.path.join(directory, name)  # noqa: PTH118
        context = storage_errors(path, "looking for the manifest of a store")
        with context, contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # a symbolic link counts, even if its target is missing now
            found.append(name)
    return found


def open_untrusted(path: str) -> BinaryIO:
    """Open an untrusted file. O_NONBLOCK keeps open() from waiting for the writer of a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return open(descriptor, "rb")
    except BaseException:  # for example, IsADirectoryError
        os.close(descriptor)
        raise


def read(path: str, still_valid: Callable[[Manifest], None] | None = None) -> Manifest:
    """Read and validate a manifest.

    ``still_valid`` is called with the manifest, and may raise. If the file was replaced before ``still_valid``
    returned, the new file is read.

    Raises
    ------
    StorageError
        The manifest does not exist, cannot be read, or is invalid.
    """
    while True:
        try:
            with open_untrusted(path) as file:
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
                f"the manifest of the store is unusable: {error} (remedy: open a snapshot or another copy; to create a "
                "new store in this directory, remove tensorferry-* from it, which deletes the tensors)",
                path,
            ) from None


def from_bytes(data: bytes) -> Manifest:
    """Parse and validate a manifest. Raise ValueError if it is invalid."""
    line, _, rest = data.partition(b"\n")
    if len(line) > _MAX_HEAD_NBYTES:
        raise ValueError("its first line is too long")
    head = _json(line, "first line")
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("its first line is not that of a store")
    if head.get("version") != VERSION:
        raise ValueError(
            f"it has version {head.get('version')!r}, and this tensorferry reads version {VERSION}"
        )
    body = rest.removesuffix(b"\n")
    if head.get("nbytes") != len(body) or head.get("crc32") != zlib.crc32(body):
        raise ValueError(
            "it is incomplete or damaged (likely cause: a power cut after a commit without sync=True)"
        )
    try:
        return _validate(_json(body, "body"))
    except TypeError as error:  # from integer()
        raise ValueError(str(error)) from None


def _validate(body: Any) -> Manifest:
    if not isinstance(body, dict):
        raise ValueError("its body is not an object")
    run = body.get("run")
    if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run, re.ASCII):
        raise ValueError(f"run {run!r} is invalid")
    count = integer(body.get("directories"), "directories", 1, MAX_DIRECTORIES)
    chunk = integer(body.get("chunk_nbytes"), "chunk_nbytes", 4096, 4 << 20)
    segments = [_segment(one, count) for one in _list(body.get("segments"), 3, "segments")]
    if len(segments) > _MAX_SEGMENTS:
        raise ValueError(f"it has {len(segments)} segments")
    tensors: dict[str, StoredTensor] = {}
    for one in _list(body.get("tensors"), 6, "tensors"):
        name, dtype, shape, nbytes, pieces, chunks = one
        if not isinstance(name, str) or name in tensors:
            raise ValueError(f"tensor name {name!r} is not a string, or is a duplicate")
        try:
            tensors[name] = _tensor(dtype, shape, nbytes, pieces, chunks, segments, chunk)
        except (ValueError, TypeError) as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
    return Manifest(run, count, chunk, _base64(body.get("record")), segments, tensors)


def _segment(one: list[Any], directory_count: int) -> StoredSegment:
    directory, name, nbytes = one
    integer(directory, "a segment's directory", 0, directory_count - 1)
    if not isinstance(name, str) or run_of(name) is None:
        raise ValueError(f"{name!r} is not the name of a segment")
    return StoredSegment(directory, name, integer(nbytes, "a segment's size", 0, MAX_FILE_NBYTES))


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
        integer(segment, "a piece's segment", 0, len(segments) - 1)
        integer(size, "a piece's size", 1, MAX_FILE_NBYTES)
        most = segments[segment].nbytes - size
        integer(offset, "a piece's offset", 0, most, multiple_of=_ALIGNMENT)
        found.append((segment, offset, size))
    if sum(size for _, _, size in found) != info.nbytes:
        raise ValueError(f"its pieces do not have the {info.nbytes} bytes of the tensor")
    sizes = [size for _, _, size in found]
    if len(sizes) > 1 and (
        len(set(sizes[:-1])) > 1 or sizes[0] % _ALIGNMENT or sizes[-1] > sizes[0]
    ):
        raise ValueError(
            f"all of its pieces except the last must have the same size, a multiple of {_ALIGNMENT}, and the last must "
            f"not be larger (got {sizes})"
        )
    if chunks is None:
        return StoredTensor(info, tuple(found), None)
    if not isinstance(chunks, list) or len(chunks) != len(found):
        raise ValueError("its checksums are not a list with one entry for each of its pieces")
    sums = [_numbers(text) for text in chunks]
    for of_piece, size in zip(sums, sizes, strict=True):
        if len(of_piece) != -(-size // chunk_nbytes):
            raise ValueError(f"a piece of {size} bytes has {len(of_piece)} checksums")
    return StoredTensor(info, tuple(found), sums)


def _json(text: bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"its {what} is not JSON: {error}") from None


def _list(value: Any, length: int, what: str) -> Iterable[list[Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    for one in value:
        if not isinstance(one, list) or len(one) != length:
            raise ValueError(f"one of the {what} does not have {length} items")
    return value


def _base64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("a base64 text is missing")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a text is not valid base64") from None


def _text_of(sums: numbers[int]) -> str:
    return base64.b64encode(_little_endian(sums).tobytes()).decode()


def _numbers(text: Any) -> numbers[int]:
    data = _base64(text)
    if len(data) % 4 != 0:
        raise ValueError("its checksums are not 32-bit numbers")
    return _little_endian(numbers("I", data))


def _little_endian(sums: numbers[int]) -> numbers[int]:
    if sys.byteorder == "little":
        return sums
    swapped = numbers("I", sums)
    swapped.byteswap()
    return swapped
