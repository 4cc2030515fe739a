"""The manifest of a commit or a snapshot: the names, descriptions, pieces and CRC-32s of its tensors, as JSON.

Commits are numbered, and each has its own file, ``tensorferry-store-NUMBER.json``. The last commit is the one with the
highest number. The first line has the CRC-32 and the size of the rest, which is one line with all data:

    {"format": "tensorferry.store", "version": 3, "store": ..., "run": ..., "directories": 1, "directory": 0,
     "previous": 6, "record": ..., "segments": [...], "tensors": [...]}

"store" is a random identifier that all commits in a directory have, and "run" that of the store object that wrote the
manifest, which is in its file names. "previous" is the number of the commit that was kept with this one, or null.
"record" is data of the program, in base64. Each segment, which is a file with tensors, is ``[directory, name]``. Each
tensor is ``[name, dtype, shape, nbytes, segment, offset, checksums]``, with one CRC-32 for each 256 KiB of it, or null.
The first of several directories has the manifests of all commits. Each of the others has one without tensors, which
shows to which store it belongs, as the directory with the number "directory".

The text is UTF-8 in which surrogates are allowed, because names may be any strings, and JSON's escapes would join two
surrogates to one character. A manifest is untrusted input: it is validated completely before any part of it is used.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from array import array as numbers
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.base.checks import MAX_FILE_NBYTES
from tensorferry.errors import StorageError
from tensorferry.store.tensors import CHUNK_NBYTES, MAX_DIMENSIONS, TensorInfo
from tensorferry.transfer.publication import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tensorferry.store.folder import Folder

MAX_DIRECTORIES = 1 << 10
_FORMAT = {"format": "tensorferry.store", "version": 3}
# Pieces begin at multiples of this, on every file system.
_ALIGNMENT = 4096
_MAX_NBYTES = 1 << 31

_NAME = re.compile(r"tensorferry-store-([1-9]\d{0,17})\.json", re.ASCII)
_OLD_NAME = "tensorferry-store.json"  # of a format that was never released
_IDENTIFIERS = re.compile(r"[0-9a-f]{16} [0-9a-f]{16}", re.ASCII)
_SEGMENT = re.compile(r"tensorferry-store-([0-9a-f]{16})-\d{1,18}\.segment", re.ASCII)


class StoredTensor(NamedTuple):
    """A tensor: its description with the text of its dtype, its segment and offset, and the CRC-32s of its chunks."""

    info: TensorInfo
    segment: int
    offset: int
    chunks: numbers[int] | None


class Manifest(NamedTuple):
    """The content of a manifest. The fields are those of the JSON in the module's description."""

    store: str
    run: str
    directories: int
    directory: int = 0
    previous: int | None = None
    record: bytes = b""
    segments: Sequence[tuple[int, str]] = ()
    tensors: Mapping[str, StoredTensor] = {}


def name_of(number: int) -> str:
    """Return the file name of the manifest with a number."""
    return f"tensorferry-store-{number}.json"


def run_of(name: str) -> str | None:
    """Return the run in the name of a segment, or None for any other name."""
    match = _SEGMENT.fullmatch(name)
    return match and match[1]


def numbers_in(names: Iterable[str], directory: str) -> list[int]:
    """Return the numbers of the manifests among the names of a directory's files, the highest first.

    Raises
    ------
    StorageError
        The directory has a store in a format that is not supported.
    """
    names = list(names)
    if _OLD_NAME in names:
        raise StorageError(
            None,
            "this directory has a store of a tensorferry before its first release, in a format that is not supported "
            "(remedy: use another directory, or the tensorferry that wrote it)",
            directory,
        )
    return sorted((int(each[1]) for each in map(_NAME.fullmatch, names) if each), reverse=True)


def names_in(directory: str) -> list[str]:
    """Return the names of the manifests in a directory, that of the last commit first; none if it does not exist."""
    with storage_errors(directory, "looking for the manifest of a store"):
        names = os.listdir(directory) if os.path.lexists(directory) else []  # noqa: PTH208
    return [name_of(number) for number in numbers_in(names, directory)]


def to_bytes(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, after checking that they can be read again.

    Raises
    ------
    ValueError
        They are too many, or they would be another manifest when they are read.
    """
    tensors = [
        (name, *info, segment, offset, None if chunks is None else chunks.tolist())
        for name, (info, segment, offset, chunks) in manifest.tensors.items()
    ]
    record = base64.b64encode(manifest.record).decode()
    content = _FORMAT | manifest._asdict() | {"record": record, "tensors": tensors}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    body = text.encode("utf-8", "surrogatepass")
    data = b"%08x %016x\n%b\n" % (zlib.crc32(body), len(body), body)
    if len(data) > _MAX_NBYTES or from_bytes(data) != manifest:
        raise ValueError(f"tensors and record do not fit a manifest ({len(data)} bytes)")
    return data


def from_bytes(data: bytes) -> Manifest | None:
    """Parse and validate a manifest. Return None if it is incomplete, and raise ValueError if it is damaged."""
    head = re.match(rb"([0-9a-f]{8}) ([0-9a-f]{16})\n", data)
    body = data[26:-1]
    if not data.strip(b"\0") or len(data) < 26 or (head and len(body) < int(head[2], 16)):
        return None
    if head is None or len(body) > int(head[2], 16) or zlib.crc32(body) != int(head[1], 16):
        raise ValueError("its checksum is wrong")
    try:
        content = json.loads(body.decode("utf-8", "surrogatepass"))
        form = {key: content.pop(key) for key in _FORMAT}
        if form != _FORMAT:
            raise ValueError(f"it has {form}, and this tensorferry reads {_FORMAT}")
        return _checked(Manifest(**content))
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _checked(content: Manifest) -> Manifest:
    store, run, count, directory, previous, *_ = content
    record: Any = content.record
    segments: Any = content.segments
    tensors: Any = content.tensors
    sizes = [count, directory, 1 if previous is None else previous]
    if not (
        _IDENTIFIERS.fullmatch(f"{store} {run}") and _are_sizes(*sizes, *(at for at, _ in segments))
    ):
        raise ValueError("an identifier or a number is invalid")
    if not directory < count <= MAX_DIRECTORIES:
        raise ValueError(f"it is number {directory} of {count} directories")
    for at, name in segments:
        if at >= count or run_of(name) is None:
            raise ValueError(f"{name!r} in directory {at} is not a segment")
    found: dict[str, StoredTensor] = {}
    for name, *stored in tensors:
        if type(name) is not str or name in found:
            raise ValueError(f"tensor name {name!r} is not a string, or is a duplicate")
        found[name] = _tensor(name, len(segments), *stored)
    return content._replace(
        record=base64.b64decode(record, validate=True),
        segments=tuple((at, name) for at, name in segments),
        tensors=found,
    )


def _tensor(tensor: str, count: int, *stored: Any) -> StoredTensor:
    dtype, shape, nbytes, segment, offset, sums = stored
    chunks = None if sums is None else numbers("I", sums)
    if not (
        isinstance(dtype, (str, type(None)))
        and _are_sizes(nbytes, segment, offset, *shape)
        and len(shape) <= MAX_DIMENSIONS
        and (segment < count and offset % _ALIGNMENT == 0 and offset + nbytes <= MAX_FILE_NBYTES)
        and (chunks is None or len(chunks) == -(-nbytes // CHUNK_NBYTES))
    ):
        raise ValueError(f"tensor {tensor!r}: {stored!r:.500} is invalid")
    return StoredTensor(TensorInfo(dtype, tuple(shape), nbytes), segment, offset, chunks)


def _are_sizes(*values: Any) -> bool:
    return {*map(type, values)} == {int} and min(values) >= 0 and max(values) <= MAX_FILE_NBYTES


def read(folder: Folder, number: int) -> Manifest | None:
    """Read and validate a manifest. Return None if it is incomplete, as a power cut may leave it.

    Raises
    ------
    StorageError
        The manifest cannot be read, or is damaged.
    """
    name = name_of(number)
    with (
        folder.opened(name, os.O_RDONLY, "reading the manifest of a store") as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        data = file.read(_MAX_NBYTES + 1)
    try:
        return from_bytes(data)
    except ValueError as error:
        raise StorageError(
            None,
            f"the manifest of the store is damaged: {error} (remedy: open a snapshot or another copy; to create a new "
            "store in this directory, remove tensorferry-store-* from it, which deletes the tensors)",
            folder.join(name),
        ) from None


def find(folder: Folder, *, previous: bool = False) -> tuple[int, Manifest] | None:
    """Return the number and the manifest of the last commit, or of the one that was kept with it. None: not there.

    An incomplete manifest is ignored: its commit was interrupted.

    Raises
    ------
    StorageError
        A manifest cannot be read, or is damaged.
    """
    numbers = numbers_in(folder.names(), folder.path)
    for number in numbers:
        if (found := read(folder, number)) is not None:
            if previous:
                number = found.previous or 0
                found = read(folder, number) if number in numbers else None
            return None if found is None else (number, found)
    return None
