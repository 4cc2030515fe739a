"""Reading `.metadata`: a pickle, of which nothing is believed.

torch reads it by `pickle.load`, so that whoever can write the file can run code. Here only the classes that torch puts
there are made, and what they hold is checked before anything is done with it.

Writers of tensorferry add three things, all of which torch ignores: to each tensor's `_StorageInfo` where its payload
lies in the blob, to `Metadata` the checksums of the data files, and behind the pickle its own checksum.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
from collections import OrderedDict
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
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable

    from torch.distributed.checkpoint.filesystem import _StorageInfo

METADATA_NAME = ".metadata"
EXTRAS = "tensorferry"
"""The attribute under which `_StorageInfo` and `Metadata` carry what writers of tensorferry add."""

EXTRAS_VERSION = 1
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
"""What the metadata of one rank that saved without the others is called."""

_TRAILER = re.compile(rb"tensorferry crc32 ([0-9a-f]{8})\n")
TRAILER_NBYTES = 27
_MAX_FILE_NBYTES = (1 << 63) - 1
_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 4096, 4 << 20
_PAGE_NBYTES = 4096
# Up to here the slow unpickler takes some tenths of a second. What has a checksum is known not to be damaged.
_SMALL_NBYTES = 1 << 20


@dataclass(frozen=True)
class FileChecksums:
    """The checksums of a data file, one CRC-32 for each chunk of it.

    Attributes
    ----------
    nbytes : int
        The file's size.
    chunk_nbytes : int
        Size of the chunks; the last one may be shorter.
    crcs : memoryview
        Of 32-bit numbers.
    """

    nbytes: int
    chunk_nbytes: int
    crcs: memoryview


def metadata_path(folder: str | os.PathLike[str], rank: int | None = None) -> pathlib.Path:
    """Return the path of a checkpoint's metadata: of all ranks, or of one that was saved without collectives."""
    name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
    return pathlib.Path(folder) / name


def trailer_of(pickled: bytes) -> bytes:
    """Return what our writers put behind the pickle: its checksum."""
    return b"tensorferry crc32 %08x\n" % crc32(pickled)


def read_metadata(path: pathlib.Path, *, trust_pickle: bool = False) -> Metadata:
    """Read and check a `.metadata` file.

    Parameters
    ----------
    path : Path
        The file.
    trust_pickle : bool
        Make whatever objects the file asks for, which may run any code.

    Raises
    ------
    OSError
        It cannot be read.
    CheckpointError
        It is damaged, or holds what torch does not put there.
    """
    return parse_metadata(path.read_bytes(), str(path), trust_pickle=trust_pickle)


def parse_metadata(data: bytes, path: str, *, trust_pickle: bool = False) -> Metadata:
    """Do as :func:`read_metadata` does with what a file of that path holds."""
    trailer = _TRAILER.fullmatch(data[-TRAILER_NBYTES:])
    body = memoryview(data)[: -TRAILER_NBYTES if trailer else None]
    if trailer and crc32(body) != int(trailer[1], 16):
        raise CheckpointError("it is not what was written (its checksum is another)", path)
    stream = io.BytesIO(body)
    kind: Any = _Unpickler
    if trust_pickle:
        kind = pickle.Unpickler
    elif trailer is None and len(body) <= _SMALL_NBYTES:
        kind = _FrugalUnpickler
    try:
        metadata = kind(stream).load()
        rest = len(body) - stream.tell()
    except _RefusedError as error:
        raise CheckpointError(
            f"it asks for {error}, which is no part of torch's metadata and may run any code; if you trust whoever "
            "made this checkpoint, read it with trust_pickle=True",
            path,
        ) from None
    except Exception as error:
        if trust_pickle and isinstance(error, OSError):
            raise
        raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})", path) from error
    check_metadata(metadata, path)
    if trailer is None and (rest or EXTRAS in metadata.__dict__):
        raise CheckpointError("its end, with the checksum, is damaged or missing", path)
    return metadata  # type: ignore[no-any-return]


def check_metadata(metadata: Any, path: str) -> None:
    """Check all that a load relies on.

    Raises
    ------
    CheckpointError
        Something is missing, or is not what it should be.
    """
    try:
        _check(metadata)
    except _MalformedError as error:
        raise CheckpointError(str(error), path) from None


def file_checksums(metadata: Metadata) -> dict[str, FileChecksums]:
    """Return the checksums of each data file that has some, by the name in ``relative_path``."""
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    chunk_nbytes = extras["chunk_nbytes"]
    return {
        name: FileChecksums(nbytes, chunk_nbytes, memoryview(crcs).cast("I"))
        for name, (nbytes, crcs) in extras["files"].items()
    }


def payload_of(info: _StorageInfo) -> tuple[int, int] | None:
    """Return (offset in the blob, bytes) of a tensor's payload in C order; None where that is not said."""
    extras: tuple[int, int] | None = info.__dict__.get(EXTRAS)
    return extras


def chunk_of(metadata: Metadata, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """Return the chunk that an index names; None if there is none."""
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
    """Return the path of a data file, which lies inside the checkpoint.

    Raises
    ------
    CheckpointError
        It does not: the name leads out of the folder, by itself or through a link.
    """
    path = pathlib.Path(folder) / relative_path
    if not trusted:
        inside = os.path.realpath(folder)
        real = os.path.realpath(path)
        if os.path.commonpath([inside, real]) != inside or real == inside:
            raise CheckpointError(
                f"the checkpoint names a file outside of its folder: {relative_path!r} is {real!r}",
                str(folder),
            )
    return str(path)


class _RefusedError(Exception):
    """A class or function that no metadata of torch's has."""


class _MalformedError(Exception):
    """The right classes with wrong contents."""


class _Restricted:
    """Makes what torch's own metadata consists of, and nothing else.

    What the pickle gets hold of are stand-ins made for this one load, so that it cannot change torch's classes either.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)  # type: ignore[call-arg]
        self._stand_ins: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        stand_in = self._stand_ins.get(full_name)
        if stand_in is None:
            stand_in = self._stand_ins[full_name] = _stand_in(module, name)
        return stand_in

    def persistent_load(self, _identity: Any) -> Any:
        raise _RefusedError("a persistent object")


class _Unpickler(_Restricted, pickle.Unpickler):
    """The fast one, which a single damaged byte may have allocate tens of GB (for the index of a memo)."""


class _FrugalUnpickler(_Restricted, pickle._Unpickler):
    """The one written in Python, which does not."""


def _stand_in(module: str, name: str) -> Any:
    full_name = f"{module}.{name}"
    if full_name in _RECORDS:
        return _maker_of(_RECORDS[full_name])
    if full_name == f"{_TORCH}.metadata._MEM_FORMAT_ENCODING":
        return _MemoryFormats()
    if full_name in _FUNCTIONS:
        function = _FUNCTIONS[full_name]
        return lambda *arguments: function(*arguments)
    if full_name in _IMMUTABLE:
        return _IMMUTABLE[full_name]
    if module == "torch":
        value = getattr(torch, name, None)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return value
    raise _RefusedError(full_name)


def _maker_of(kind: type) -> type:
    """Return a class whose instances are empty ones of another."""

    def make(_cls: type) -> Any:
        return object.__new__(kind)

    return type(kind.__name__, (), {"__new__": make})


class _AnyProperties(TensorProperties):
    """TensorProperties that take the state of any version of torch: 2.15 added the strides."""

    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        if not isinstance(state, tuple) or len(state) < 5:
            raise _MalformedError("tensor properties that no version of torch writes")
        fields = getattr(TensorProperties, "__dataclass_fields__", {})
        known = state[:6] if "strides" in fields else state[:5]
        TensorProperties.__setstate__(self, known)  # type: ignore[no-untyped-call]


def _path(*parts: Any) -> pathlib.Path:
    return pathlib.Path(*map(_text, parts))


def _windows_path(*parts: Any) -> pathlib.PurePath:
    return pathlib.PureWindowsPath(*map(_text, parts))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _MalformedError(f"a path of {value!r}")
    return value


def _layout(name: Any) -> torch.layout:
    layout = getattr(torch, _text(name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise _MalformedError(f"no layout: {name!r}")
    return layout


class _MemoryFormats:
    """Stands for the enumeration of memory formats."""

    def __call__(self, value: Any) -> enum.Enum:
        return torch_metadata._MEM_FORMAT_ENCODING(value)


def _member(kind: Any, name: Any) -> enum.Enum:
    """Stand for getattr(), by which some versions of Python pickle members of enumerations."""
    if type(kind) is not _MemoryFormats:
        raise _RefusedError("builtins.getattr")
    return torch_metadata._MEM_FORMAT_ENCODING[_text(name)]


_TORCH = "torch.distributed.checkpoint"
_RECORDS: dict[str, type] = {
    f"{_TORCH}.filesystem._StorageInfo": filesystem._StorageInfo,
    f"{_TORCH}.metadata.TensorProperties": _AnyProperties,
    **{
        f"{_TORCH}.metadata.{name}": getattr(torch_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
        )
    },
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch.serialization._get_layout": _layout,
    "builtins.getattr": _member,
    **{
        f"{module}.{name}": function
        for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
        for name, function in {
            "Path": _path,
            "PosixPath": _path,
            "PurePath": _path,
            "PurePosixPath": _path,
            "WindowsPath": _windows_path,
            "PureWindowsPath": _windows_path,
        }.items()
    },
}
# C types, which cannot be changed.
_IMMUTABLE: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise _MalformedError(f"it holds no Metadata but {type(metadata).__name__}")
    state = getattr(metadata, "state_dict_metadata", None)
    infos = getattr(metadata, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(infos, dict):
        raise _MalformedError("it lists no tensors")
    for name, entry in state.items():
        if not isinstance(name, str):
            raise _MalformedError(f"the name of an entry is {name!r}")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
        elif not isinstance(entry, BytesStorageMetadata):
            raise _MalformedError(f"{name!r} is neither tensor nor bytes")
    files = _checked_extras(metadata)
    for index, info in infos.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise _MalformedError("the places of its tensors are damaged")
        _check_place(index, info, files)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    properties, size, chunks = (entry.__dict__.get(key) for key in ("properties", "size", "chunks"))
    if (
        not isinstance(properties, TensorProperties)
        or not isinstance(properties.__dict__.get("dtype"), torch.dtype)
        or not isinstance(chunks, list)
        or not _is_size(size)
    ):
        raise _MalformedError(f"the properties of {name!r} are damaged")
    for chunk in chunks:
        if (
            not isinstance(chunk, ChunkStorageMetadata)
            or not _is_size(chunk.__dict__.get("offsets"))
            or not _is_size(chunk.__dict__.get("sizes"))
            or len(chunk.offsets) != len(chunk.sizes)
        ):
            raise _MalformedError(f"the chunks of {name!r} are damaged")


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(length >= 0 for length in value)


def _is_count(value: Any, most: int = _MAX_FILE_NBYTES) -> bool:
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
        or offset + length > files.get(relative_path, _MAX_FILE_NBYTES)
    ):
        raise _MalformedError(f"the place of {name!r} is damaged")
    if relative_path in ("", ".") or "\0" in relative_path:
        raise _MalformedError(f"{name!r} lies in a file named {relative_path!r}")
    payload = values.get(EXTRAS)
    if payload is not None and not (
        type(payload) is tuple
        and len(payload) == 2
        and _is_count(payload[0])
        and _is_count(payload[1])
        and payload[0] + payload[1] <= length
    ):
        raise _MalformedError(f"the place of the payload of {name!r} is damaged")


def _checked_extras(metadata: Metadata) -> dict[str, int]:
    """Check the checksums' form, and return the sizes of the files that have some."""
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    version = extras.get("version") if isinstance(extras, dict) else None
    if version != EXTRAS_VERSION:
        raise _MalformedError(
            f"its checksums are of version {version!r}, known here is version {EXTRAS_VERSION}"
        )
    chunk_nbytes, files = extras.get("chunk_nbytes"), extras.get("files")
    if (
        not _is_count(chunk_nbytes, _MAX_CHUNK_NBYTES)
        or chunk_nbytes < _MIN_CHUNK_NBYTES
        or chunk_nbytes % _PAGE_NBYTES
        or not isinstance(files, dict)
    ):
        raise _MalformedError("its checksums are damaged")
    for name, entry in files.items():
        if (
            not isinstance(name, str)
            or type(entry) is not tuple
            or len(entry) != 2
            or not _is_count(entry[0])
            or not isinstance(entry[1], bytes)
            or len(entry[1]) != 4 * -(-entry[0] // chunk_nbytes)
        ):
            raise _MalformedError(f"the checksums of {name!r} are damaged")
    return {name: entry[0] for name, entry in files.items()}
