"""Reading and checking `.metadata`, which is a pickle, as untrusted input.

torch reads it with `pickle.load`, which lets the author of the file run any code. This module only creates instances of
the classes that torch writes there, and checks their fields before use.

tensorferry's writers add three things, which torch ignores. The `_StorageInfo` of a tensor, which locates its blob (the
bytes that torch.save writes for the tensor), also has the location of the payload (the elements) in the blob.
`Metadata` has the checksums of the data files. After the pickle come the metric of the checkpoint, if it has one, and a
trailer with the checksum of everything before it.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import os
import pathlib
import pickle
import re
import stat
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry._core import crc32
from tensorferry.base.checks import MAX_FILE_NBYTES, can_be_path
from tensorferry.checkpoint.errors import CheckpointError, RefusedCheckpointError
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.checkpoint.storage.names import (
    METADATA_NAME,
    METRIC,
    METRIC_NBYTES,
    TRAILER,
    TRAILER_NBYTES,
)
from tensorferry.checkpoint.zipformat.blobs import torch_constant
from tensorferry.checkpoint.zipformat.unpickling import (
    MalformedError,
    RefusedError,
    StandIn,
    Unpickler,
    check_sizes,
    declared,
    record,
    stand_in,
)
from tensorferry.transfer.remote import ObjectPath, as_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.checkpoint.filesystem import _StorageInfo

# Chunk k of a data file is bytes [k * CHUNK_NBYTES, (k + 1) * CHUNK_NBYTES), up to the end of the file. Readers verify
# whole chunks, so a partial read may read up to this many extra bytes at each end.
CHUNK_NBYTES = 256 * 1024

EXTRAS = "tensorferry"
"""The attribute of `_StorageInfo` and `Metadata` that holds the additions of tensorferry's writers."""

EXTRAS_VERSION = 1
# The relative name of an object in a bucket, with no part that is empty, "." or "..". Objects have no links, so such a
# name is below the checkpoint's prefix.
_BELOW = re.compile(r"(?!(.*/)?\.{0,2}(/|$))[^\0]+")
_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 4096, 4 << 20
_PAGE_NBYTES = 4096
# The limit for a list index in `planner_data`: torch creates a list of that length.
_MAX_INDEX = 1 << 20


@dataclass(frozen=True)
class DataFileChecksums:
    """The checksums of a data file, one CRC-32 for each chunk of it.

    Attributes
    ----------
    nbytes : int
        The file's size.
    chunk_nbytes : int
        Size of the chunks; the last one may be shorter.
    crcs : memoryview
        The chunks' CRC-32, as 32-bit numbers.
    """

    nbytes: int
    chunk_nbytes: int
    crcs: memoryview


def metadata_path(folder: str | os.PathLike[str], rank: int | None = None) -> pathlib.Path:
    """Return the path of the metadata of all ranks, or of one ``rank`` that saved without collectives."""
    name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
    return as_path(folder) / name


def trailer_of(pickled: bytes) -> bytes:
    """Return the trailer that our writers put at the end: a line with the checksum of all bytes before it."""
    return b"tensorferry crc32 %08x\n" % crc32(pickled)


def metric_line_of(metric: float | None) -> bytes:
    """Return what our writers put between pickle and trailer; nothing without a metric."""
    if metric is None:
        return b""
    digits = struct.pack(">d", metric).hex().encode()
    return b"tensorferry metric %s crc32 %08x\n" % (digits, crc32(digits))


def read_metric(path: pathlib.Path) -> float | None:
    """Return the metric in a `.metadata` file, without the rest; None if there is none, or if it is damaged."""
    if not is_regular(path):
        return None
    with path.open("rb") as file:
        nbytes = METRIC_NBYTES + TRAILER_NBYTES
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        match = METRIC.fullmatch(file.read(nbytes)[:-TRAILER_NBYTES])
    if match is None or crc32(match[1]) != int(match[2], 16):
        return None
    metric: float = struct.unpack(">d", bytes.fromhex(match[1].decode()))[0]
    return metric


def read_metadata(path: pathlib.Path, *, trust_pickle: bool = False) -> Metadata:
    """Read and check a `.metadata` file.

    Parameters
    ----------
    path : Path
        The file.
    trust_pickle : bool
        Create any object in the pickle, which may run any code.

    Raises
    ------
    OSError
        The file cannot be read.
    CheckpointError
        The file is damaged, or holds objects that torch does not write.
    """
    if not is_regular(path):
        raise CheckpointError("it is not a regular file", str(path))
    return parse_metadata(path.read_bytes(), str(path), trust_pickle=trust_pickle)


@collection_paused()
def parse_metadata(data: bytes, path: str, *, trust_pickle: bool = False) -> Metadata:
    """Parse the contents of a metadata file as :func:`read_metadata` does; ``path`` is the path in errors."""
    trailer = TRAILER.fullmatch(data[-TRAILER_NBYTES:])
    body = data[: -TRAILER_NBYTES if trailer else None]
    if trailer and crc32(body) != int(trailer[1], 16):
        raise CheckpointError(
            "its bytes are not those that were written (the checksum differs)", path
        )
    # If the checksum matches, the bytes are those that were written: content that cannot be read is then refused, not
    # damaged. Without a trailer, as in torch's checkpoints, such content is more likely damaged.
    kind = RefusedCheckpointError if trailer else CheckpointError
    try:
        if trust_pickle:
            check_sizes(body)
            stream = io.BytesIO(body)
            metadata, end = pickle.Unpickler(stream).load(), stream.tell()
            _update_properties(metadata)
        else:
            unpickler = Unpickler(body, lambda name: _NAMES.get(name) or torch_constant(name))
            metadata, end = unpickler.load(), unpickler.end
    except RefusedError as error:
        raise kind(
            f"it contains {error}, which is not part of torch's metadata and may run any code; if you trust the author "
            "of this checkpoint, read it with trust_pickle=True",
            path,
        ) from None
    except Exception as error:
        if trust_pickle and isinstance(error, OSError):
            raise
        problem = "cannot be read" if trailer else "is damaged"
        raise kind(f"it {problem} ({type(error).__name__}: {error})", path) from error
    try:
        check_metadata(metadata, path)
    except CheckpointError as error:
        raise kind(error.reason, path) from None
    # Our writers always write a trailer, and torch writes nothing after the pickle: the trailer has been lost.
    if trailer is None and (end < len(body) or EXTRAS in metadata.__dict__):
        raise CheckpointError("its end, which holds the checksum, is damaged or missing", path)
    return metadata  # type: ignore[no-any-return]


def check_metadata(metadata: Any, path: str) -> None:
    """Check every field that a load relies on.

    Raises
    ------
    CheckpointError
        A field is missing or has an invalid value.
    """
    try:
        _check(metadata)
    except MalformedError as error:
        raise CheckpointError(str(error), path) from None


def file_checksums(metadata: Metadata) -> dict[str, DataFileChecksums]:
    """Return the checksums of the data files that have them, by the file's ``relative_path``."""
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    chunk_nbytes = extras["chunk_nbytes"]
    return {
        name: DataFileChecksums(nbytes, chunk_nbytes, memoryview(crcs).cast("I"))
        for name, (nbytes, crcs) in extras["files"].items()
    }


def payload_of(info: _StorageInfo) -> tuple[int, int] | None:
    """Return (offset in the blob, size in bytes) of a tensor's payload in C order; None if there is no location."""
    extras: tuple[int, int] | None = info.__dict__.get(EXTRAS)
    return extras


def chunk_of(metadata: Metadata, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """Return the chunk of a tensor (torch's term for a saved part) that an index refers to, or None."""
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    hint = index.index
    if hint is not None and 0 <= hint < len(entry.chunks):
        chunk = entry.chunks[hint]
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    for chunk in entry.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    return None


def data_file(folder: str | os.PathLike[str], relative_path: str, *, trusted: bool = False) -> str:
    """Return the path of a data file inside the checkpoint's folder.

    Raises
    ------
    CheckpointError
        The name leads out of the folder, directly or through a link.
    """
    path = as_path(folder) / relative_path
    outside = f"the checkpoint names a file outside of its folder: {relative_path!r}"
    if isinstance(path, ObjectPath):
        if not _BELOW.fullmatch(relative_path):
            raise RefusedCheckpointError(outside, str(folder))
    elif not trusted:
        inside, real = os.path.realpath(folder), os.path.realpath(path)
        if os.path.commonpath([inside, real]) != inside or real == inside:
            raise RefusedCheckpointError(f"{outside} is {real!r}", str(folder))
        if not is_regular(path):
            raise CheckpointError("it is not a regular file", str(path))
    return str(path)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return False for a pipe, a device or a folder, which may have no end; a missing file counts as regular."""
    try:
        return stat.S_ISREG(as_path(path).stat().st_mode)
    except OSError:
        return True


def _update_properties(metadata: Any) -> None:
    """Replace the properties class of torch up to 2.2, which a trusted pickle may contain."""
    entries = getattr(metadata, "state_dict_metadata", None)
    for entry in entries.values() if isinstance(entries, dict) else ():
        old: Any = getattr(entry, "properties", None)
        if f"{type(old).__module__}.{type(old).__name__}" == f"{_UP_TO_2_2}.TensorProperties":
            values = (old.dtype, old.layout, old.requires_grad, old.memory_format, old.pin_memory)
            entry.properties = TensorProperties(*values)


class _Properties(TensorProperties):
    """Tensor properties while the pickle is read: they accept the state of any version of torch."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 5:
            raise MalformedError("tensor properties that no version of torch writes")
        dtype, layout, requires_grad, encoding, pin_memory, *more = state
        strides = more[0] if more else None  # since torch 2.15
        if (
            not isinstance(dtype, torch.dtype)
            or not isinstance(layout, torch.layout)
            or type(requires_grad) is not bool
            or type(encoding) is not int
            or type(pin_memory) is not bool
            or not (strides is None or _is_size(strides) or type(strides) is tuple)
            or any(type(stride) is not int for stride in strides or ())
        ):
            raise MalformedError("damaged tensor properties")
        known: tuple[Any, ...] = (dtype, layout, requires_grad)
        known += (torch_metadata._MEM_FORMAT_ENCODING(encoding), pin_memory)
        if more and "strides" in TensorProperties.__dataclass_fields__:
            known = (*known, strides)
        TensorProperties.__setstate__(self, known)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "__class__", TensorProperties)


def _layout(name: Any) -> torch.layout:
    found = torch_constant(name) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise MalformedError("an unknown layout")
    return found


def _memory_format(value: Any) -> int:
    """Replace the enumeration with its value: a pickle could modify the members, which the whole process shares."""
    if type(value) is not int or not 0 <= value < len(torch_metadata._MEM_FORMAT_ENCODING):
        raise MalformedError("an unknown memory format")
    return value


def _member(kind: Any, name: Any) -> int:
    """Replace getattr(), by which some versions of Python pickle members of an enumeration."""
    if not isinstance(kind, StandIn) or kind.call is not _memory_format:
        raise RefusedError("builtins.getattr")
    return int(torch_metadata._MEM_FORMAT_ENCODING[name].value)


def _of_values(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a set, size or path from values that the pickle has made one by one."""

    def make(*arguments: Any) -> Any:
        # A range, for example, could be expanded to any length.
        if not {*map(type, arguments)} <= {list, tuple, torch.Size, str}:
            raise MalformedError("a size, set or path made from something other than values")
        return kind(*arguments)

    return make


_TORCH = "torch.distributed.checkpoint"
_UP_TO_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Path", "PosixPath"), pathlib.Path),
    **dict.fromkeys(("PurePath", "PurePosixPath"), pathlib.PurePosixPath),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), pathlib.PureWindowsPath),
}
SIMPLE = {
    name: stand_in(name, make)
    for name, make in {
        "torch.Size": _of_values(torch.Size),
        "torch.serialization._get_layout": _layout,
        "builtins.set": _of_values(set),
        "builtins.frozenset": _of_values(frozenset),
        **{f"pathlib.{name}": _of_values(kind) for name, kind in _PATHS.items()},
    }.items()
}
"""The stand-ins for names that `.metadata` and objects of a checkpoint may contain."""

_MADE: dict[str, Callable[..., Any]] = {
    "builtins.getattr": _member,
    "collections.OrderedDict": OrderedDict,
    f"{_TORCH}.metadata._MEM_FORMAT_ENCODING": _memory_format,
    f"{_UP_TO_2_2}.MEM_FORMAT_ENCODING": _memory_format,
}
_RECORDS = {
    f"{_TORCH}.metadata.TensorProperties": _Properties,
    f"{_UP_TO_2_2}.TensorProperties": _Properties,
    f"{_TORCH}.filesystem._StorageInfo": filesystem._StorageInfo,
    **{
        f"{_TORCH}.metadata.{kind.__name__}": kind
        for kind in (
            *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex),
            *(StorageMeta, TensorStorageMetadata),
        )
    },
}
_NAMES: dict[str, Any] = {
    **SIMPLE,
    **{name: stand_in(name, make) for name, make in _MADE.items()},
    **{name: record(name, kind) for name, kind in _RECORDS.items()},
}


def add_safe_metadata_globals(safe_globals: Sequence[Any] | Mapping[str, Iterable[str]]) -> None:
    """Declare classes or functions safe in `.metadata`, for planners that store objects of their own there.

    Parameters
    ----------
    safe_globals : list of classes and functions, or dict
        A dict has the names of classes and functions by the name of their module, as in torch's function of this name.

    Raises
    ------
    TypeError, ImportError, AttributeError
        The argument is neither, or names something that does not exist.
    """
    if isinstance(safe_globals, Mapping):
        found = [
            functools.reduce(getattr, name.split("."), importlib.import_module(module))
            for module, names in safe_globals.items()
            for name in names
        ]
    else:
        found = list(safe_globals)
    for each in found:
        _NAMES[f"{each.__module__}.{each.__qualname__}"] = declared(each)


def _check(metadata: Any) -> None:
    """Check metadata for :func:`check_metadata`.

    The messages are shown after the path of the metadata file, which they call "it".
    """
    if not isinstance(metadata, Metadata):
        raise MalformedError(f"it holds {type(metadata).__name__} instead of Metadata")
    state = getattr(metadata, "state_dict_metadata", None)
    infos = getattr(metadata, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(infos, dict):
        raise MalformedError(
            "its tables of tensors (state_dict_metadata, storage_data) are missing or damaged"
        )
    if not isinstance(getattr(metadata, "storage_meta", None), (StorageMeta, type(None))):
        raise MalformedError("its field storage_meta is damaged")
    _check_planner_data(getattr(metadata, "planner_data", None), state)
    for name, entry in state.items():
        if not isinstance(name, str):
            raise MalformedError(f"the name of an entry is of type {type(name).__name__}")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
        elif not isinstance(entry, BytesStorageMetadata):
            raise MalformedError(f"{name!r} is neither tensor nor bytes")
    files = _checked_extras(metadata)
    for index, info in infos.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise MalformedError("the locations of its tensors are damaged")
        _check_place(index, info, files)


def _check_planner_data(planner_data: Any, state: dict[str, Any]) -> None:
    """Check the paths by which torch nests entries in dicts and lists: a large index makes torch create a long list."""
    if type(planner_data) is not dict:
        return
    for name, path in planner_data.items():
        if name in state and type(path) is tuple:
            for part in path:
                if type(part) is int and abs(part) > _MAX_INDEX:
                    raise MalformedError(f"the path of {name!r} in the state is damaged")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    properties: Any
    size: Any
    properties, size, chunks = (entry.__dict__.get(key) for key in ("properties", "size", "chunks"))
    if (
        not isinstance(properties, TensorProperties)
        or not isinstance(properties.__dict__.get("dtype"), torch.dtype)
        or not isinstance(chunks, list)
        or not _is_size(size)
    ):
        raise MalformedError(f"the properties of {name!r} are damaged")
    if not _is_count(math.prod(size) * properties.dtype.itemsize):
        raise MalformedError(f"{name!r} is larger than any file")
    for chunk in chunks:
        if (
            not isinstance(chunk, ChunkStorageMetadata)
            or not _is_size(chunk.__dict__.get("offsets"))
            or not _is_size(chunk.__dict__.get("sizes"))
            or not len(chunk.offsets) == len(chunk.sizes) == len(size)
        ):
            raise MalformedError(f"the chunks of {name!r} are damaged")


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and (not value or min(value) >= 0)


def _is_count(value: Any, most: int = MAX_FILE_NBYTES) -> bool:
    return type(value) is int and 0 <= value <= most


def _check_place(index: MetadataIndex, info: _StorageInfo, files: dict[str, int]) -> None:
    values = info.__dict__
    name = index.__dict__.get("fqn")
    offset: Any = values.get("offset")
    length: Any = values.get("length")
    relative_path = values.get("relative_path")
    offsets, hint = index.__dict__.get("offset"), index.__dict__.get("index")
    if (
        not isinstance(name, str)
        or not (offsets is None or _is_size(offsets))
        or not (hint is None or type(hint) is int)
        or not isinstance(relative_path, str)
        or not _is_count(offset)
        or not _is_count(length)
        or offset + length > files.get(relative_path, MAX_FILE_NBYTES)
    ):
        raise MalformedError(f"the location of {name!r} is damaged")
    if relative_path in ("", ".") or "\0" in relative_path or not can_be_path(relative_path):
        raise MalformedError(f"{name!r} is in a file with the invalid name {relative_path!r}")
    transforms = values.get("transform_descriptors")
    if transforms is not None and not (
        type(transforms) in (list, tuple) and all(type(each) is str for each in transforms)
    ):
        raise MalformedError(f"the transformations of {name!r} are damaged")
    payload = values.get(EXTRAS)
    if payload is not None and not (
        type(payload) is tuple
        and len(payload) == 2
        and _is_count(payload[0])
        and _is_count(payload[1])
        and payload[0] + payload[1] <= length
    ):
        raise MalformedError(f"the location of the payload of {name!r} is damaged")


def _checked_extras(metadata: Metadata) -> dict[str, int]:
    """Check the form of the table of checksums in metadata, and return the sizes of the data files in it.

    As in the messages of :func:`_check`, "its checksums" are those of the metadata file, which the table is part of.
    """
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    version = extras.get("version") if isinstance(extras, dict) else None
    if version != EXTRAS_VERSION:
        raise MalformedError(
            f"its checksums do not have version {EXTRAS_VERSION}, the only one that this tensorferry reads (likely "
            "cause: a newer tensorferry saved them)"
        )
    chunk_nbytes, files = extras.get("chunk_nbytes"), extras.get("files")
    if (
        not _is_count(chunk_nbytes, _MAX_CHUNK_NBYTES)
        or chunk_nbytes < _MIN_CHUNK_NBYTES
        or chunk_nbytes % _PAGE_NBYTES
        or not isinstance(files, dict)
    ):
        raise MalformedError("the table of checksums in the metadata is malformed")
    for name, entry in files.items():
        if (
            not isinstance(name, str)
            or type(entry) is not tuple
            or len(entry) != 2
            or not _is_count(entry[0])
            or not isinstance(entry[1], bytes)
            or len(entry[1]) != 4 * -(-entry[0] // chunk_nbytes)
        ):
            raise MalformedError(f"the checksums of {name!r} are damaged")
    return {name: entry[0] for name, entry in files.items()}
