"""Reading `.metadata`: a pickle, of which nothing is believed.

torch reads it by `pickle.load`, so that whoever can write the file can run code. Here only the classes that torch puts
there are made, and what they hold is checked before anything is done with it.

Writers of tensorferry add three things, all of which torch ignores: to each tensor's `_StorageInfo` where its payload
lies in the blob, to `Metadata` the checksums of the data files, and behind the pickle its own checksum.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import pickle
import re
import stat
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
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorferry._core import crc32
from tensorferry.base.checks import MAX_FILE_NBYTES, can_be_path
from tensorferry.checkpoint.errors import CheckpointError, RefusedCheckpointError
from tensorferry.checkpoint.garbage import uncollected
from tensorferry.checkpoint.storage.names import METADATA_NAME
from tensorferry.checkpoint.zipformat import pickles
from tensorferry.checkpoint.zipformat.pickles import (
    Maker,
    MalformedError,
    RefusedError,
    checked_keys,
    empty,
    record,
    table,
    text,
)
from tensorferry.transfer.remote import ObjectPath, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.filesystem import _StorageInfo

# Chunk k of a data file is bytes [k * CHUNK_NBYTES, (k + 1) * CHUNK_NBYTES), up to the end of the file. Readers verify
# whole chunks, so that this is what a partial read may read too much, at each end.
CHUNK_NBYTES = 256 * 1024

EXTRAS = "tensorferry"
"""The attribute under which `_StorageInfo` and `Metadata` carry what writers of tensorferry add."""

EXTRAS_VERSION = 1
_TRAILER = re.compile(rb"tensorferry crc32 ([0-9a-f]{8})\n")
TRAILER_NBYTES = 27
# Of an object: there are no links, and no names that lead upwards.
_BELOW = re.compile(r"(?!(.*/)?\.{0,2}(/|$))[^\0]+")
_MIN_CHUNK_NBYTES, _MAX_CHUNK_NBYTES = 4096, 4 << 20
_PAGE_NBYTES = 4096
# A list index in `planner_data`: torch makes lists of that length.
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
        Of 32-bit numbers.
    """

    nbytes: int
    chunk_nbytes: int
    crcs: memoryview


def metadata_path(folder: str | os.PathLike[str], rank: int | None = None) -> pathlib.Path:
    """Return the path of a checkpoint's metadata: of all ranks, or of one that was saved without collectives."""
    name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
    return place(folder) / name


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
    if not is_regular(path):
        raise CheckpointError("it is no regular file", str(path))
    return parse_metadata(path.read_bytes(), str(path), trust_pickle=trust_pickle)


@uncollected()
def parse_metadata(data: bytes, path: str, *, trust_pickle: bool = False) -> Metadata:
    """Do as :func:`read_metadata` does with what a file of that path holds."""
    trailer = _TRAILER.fullmatch(data[-TRAILER_NBYTES:])
    body = memoryview(data)[: -TRAILER_NBYTES if trailer else None]
    if trailer and crc32(body) != int(trailer[1], 16):
        raise CheckpointError("it is not what was written (its checksum is another)", path)
    # With a checksum that fits nothing is damaged, and an older checkpoint would be refused as well.
    kind = RefusedCheckpointError if trailer else CheckpointError
    try:
        if trust_pickle:
            stream = io.BytesIO(body)
            metadata, end = pickle.Unpickler(stream).load(), stream.tell()
            _of_today(metadata)
        else:
            metadata, end = _loads(bytes(body))
    except RefusedError as error:
        raise kind(
            f"it asks for {error}, which is no part of torch's metadata and may run any code; if you trust whoever "
            "made this checkpoint, read it with trust_pickle=True",
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
    if trailer is None and (end < len(body) or EXTRAS in metadata.__dict__):
        raise CheckpointError("its end, with the checksum, is damaged or missing", path)
    return metadata  # type: ignore[no-any-return]


def _loads(data: bytes) -> tuple[Any, int]:
    """Return what a pickle holds, and where it ends."""
    found = pickles.loads_records(data, _KNOWN)
    if found is None or type(found[0]) is not Metadata:
        return pickles.loads(data, _NAMES, older=OLDER_MODULES)
    for index in found[0].storage_data or ():
        if type(index) is _Index:
            object.__setattr__(index, "__class__", MetadataIndex)
    for entry in found[0].state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and type(entry.properties) is _Properties:
            object.__setattr__(entry.properties, "__class__", TensorProperties)
    return found


def check_metadata(metadata: Any, path: str) -> None:
    """Check all that a load relies on.

    Raises
    ------
    CheckpointError
        Something is missing, or is not what it should be.
    """
    try:
        _check(metadata)
    except MalformedError as error:
        raise CheckpointError(str(error), path) from None


def file_checksums(metadata: Metadata) -> dict[str, DataFileChecksums]:
    """Return the checksums of each data file that has some, by the name in ``relative_path``."""
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    chunk_nbytes = extras["chunk_nbytes"]
    return {
        name: DataFileChecksums(nbytes, chunk_nbytes, memoryview(crcs).cast("I"))
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
    path = place(folder) / relative_path
    if isinstance(path, ObjectPath):
        if not _BELOW.fullmatch(relative_path):
            raise RefusedCheckpointError(
                f"the checkpoint names a file outside of its folder: {relative_path!r}", str(folder)
            )
    elif not trusted:
        inside = os.path.realpath(folder)
        real = os.path.realpath(path)
        if os.path.commonpath([inside, real]) != inside or real == inside:
            raise RefusedCheckpointError(
                f"the checkpoint names a file outside of its folder: {relative_path!r} is {real!r}",
                str(folder),
            )
        if not is_regular(path):
            raise CheckpointError("it is no regular file", str(path))
    return str(path)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file whose bytes end: no pipe, device or folder. What is missing may be one."""
    try:
        return stat.S_ISREG(place(path).stat().st_mode)
    except OSError:
        return True


def _build_properties(properties: TensorProperties, state: Any) -> None:
    """Take the state that any version of torch writes: 2.15 added the strides."""
    if type(state) is not tuple or len(state) < 5:
        raise MalformedError("tensor properties that no version of torch writes")
    dtype, layout, requires_grad, encoding, pin_memory, *more = state
    strides = more[0] if more else None
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
    member = torch_metadata._MEM_FORMAT_ENCODING(encoding)
    known = (dtype, layout, requires_grad, member, pin_memory)
    if more and "strides" in getattr(TensorProperties, "__dataclass_fields__", {}):
        known = (*known, strides)  # type: ignore[assignment]
    TensorProperties.__setstate__(properties, known)  # type: ignore[no-untyped-call]


def _of_today(metadata: Any) -> None:
    """Replace the properties of torch up to 2.2, which come where a pickle is trusted."""
    entries = getattr(metadata, "state_dict_metadata", None)
    for entry in entries.values() if isinstance(entries, dict) else ():
        old: Any = getattr(entry, "properties", None)
        if f"{type(old).__module__}.{type(old).__name__}" == f"{_UP_TO_2_2}.TensorProperties":
            values = (old.dtype, old.layout, old.requires_grad, old.memory_format, old.pin_memory)
            entry.properties = TensorProperties(*values)


def _path_of(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *parts: kind(*map(text, parts))


def _layout(name: Any) -> torch.layout:
    layout = vars(torch).get(text(name).removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise MalformedError("an unknown layout")
    return layout


def _memory_format(value: Any) -> int:
    """Stand for the enumeration: its members belong to the process, and a pickle could change them."""
    if type(value) is not int or not 0 <= value < len(torch_metadata._MEM_FORMAT_ENCODING):
        raise MalformedError("an unknown memory format")
    return value


def _member(kind: Any, name: Any) -> int:
    """Stand for getattr(), by which some versions of Python pickle members of enumerations."""
    if type(kind) is not Maker or kind.make is not _memory_format:
        raise RefusedError("builtins.getattr")
    return int(torch_metadata._MEM_FORMAT_ENCODING[text(name)].value)


_SEQUENCES = (tuple, list, torch.Size)


def _size(*lengths: Any) -> torch.Size:
    """Stand for torch.Size, which makes of a range as many numbers as that says."""
    if len(lengths) > 1 or (lengths and type(lengths[0]) not in _SEQUENCES):
        raise MalformedError("a size that is none")
    return torch.Size(*lengths)


def _hashed(kind: type) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        if len(arguments) > 1 or not all(type(values) in (list, tuple) for values in arguments):
            raise MalformedError(f"a {kind.__name__} of what is no list")
        return kind(*map(checked_keys, arguments))

    return make


_TORCH = "torch.distributed.checkpoint"
_UP_TO_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
OLDER_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "pathlib._local": "pathlib",  # the name in Python 3.13
}
SIMPLE_MAKERS = [
    Maker("torch.Size", _size),
    Maker("torch.serialization._get_layout", _layout),
    Maker("builtins.set", _hashed(set)),
    Maker("builtins.frozenset", _hashed(frozenset)),
    Maker("collections.OrderedDict", empty(OrderedDict)),
    *(Maker(f"pathlib.{name}", _path_of(pathlib.Path)) for name in ("Path", "PosixPath")),
    *(
        Maker(f"pathlib.{name}", _path_of(pathlib.PurePosixPath))
        for name in ("PurePath", "PurePosixPath")
    ),
    *(
        Maker(f"pathlib.{name}", _path_of(pathlib.PureWindowsPath))
        for name in ("WindowsPath", "PureWindowsPath")
    ),
]
_NAMES = table(
    [
        *SIMPLE_MAKERS,
        Maker("builtins.getattr", _member),
        Maker(f"{_TORCH}.metadata._MEM_FORMAT_ENCODING", _memory_format),
        Maker(f"{_UP_TO_2_2}.MEM_FORMAT_ENCODING", _memory_format),
        record(f"{_TORCH}.metadata.TensorProperties", TensorProperties, _build_properties),
        record(f"{_UP_TO_2_2}.TensorProperties", TensorProperties, _build_properties),
        record(f"{_TORCH}.filesystem._StorageInfo", filesystem._StorageInfo),
        *(
            record(f"{_TORCH}.metadata.{kind.__name__}", kind)
            for kind in (
                BytesStorageMetadata,
                ChunkStorageMetadata,
                Metadata,
                MetadataIndex,
                StorageMeta,
                TensorStorageMetadata,
            )
        ),
    ]
)


class _Index(MetadataIndex):
    """Is one until it has been read: hashes are taken while it is, and this one never takes long."""

    def __hash__(self) -> int:
        fields = self.__dict__
        if type(fields.get("fqn")) is not str or type(fields.get("offset")) not in (
            type(None),
            torch.Size,
        ):
            raise MalformedError("a damaged place of a tensor")
        return super().__hash__()


class _Properties(TensorProperties):
    """Are some until they have been read."""

    def __setstate__(self, state: Any) -> None:
        _build_properties(self, state)


_KNOWN = {
    **{name: maker if maker.kind is None else maker.kind for name, maker in _NAMES.items()},
    "torch.Size": torch.Size,
    f"{_TORCH}.metadata.MetadataIndex": _Index,
    f"{_TORCH}.metadata.TensorProperties": _Properties,
}


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise MalformedError(f"it holds no Metadata but {type(metadata).__name__}")
    state = getattr(metadata, "state_dict_metadata", None)
    infos = getattr(metadata, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(infos, dict):
        raise MalformedError("it lists no tensors")
    if not isinstance(getattr(metadata, "storage_meta", None), (StorageMeta, type(None))):
        raise MalformedError("what it says of its storage is damaged")
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
            raise MalformedError("the places of its tensors are damaged")
        _check_place(index, info, files)


def _check_planner_data(planner_data: Any, state: dict[str, Any]) -> None:
    """Check the paths by which torch puts entries into dicts and lists, which it makes as long as an index says."""
    if type(planner_data) is not dict:
        return
    for name, path in planner_data.items():
        if name in state and type(path) is tuple:
            for part in path:
                if type(part) is int and abs(part) > _MAX_INDEX:
                    raise MalformedError(f"the place of {name!r} in the state is damaged")


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
        raise MalformedError(f"the place of {name!r} is damaged")
    if relative_path in ("", ".") or "\0" in relative_path or not can_be_path(relative_path):
        raise MalformedError(f"{name!r} lies in a file named {relative_path!r}")
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
        raise MalformedError(f"the place of the payload of {name!r} is damaged")


def _checked_extras(metadata: Metadata) -> dict[str, int]:
    """Check the checksums' form, and return the sizes of the files that have some."""
    extras = metadata.__dict__.get(EXTRAS)
    if extras is None:
        return {}
    version = extras.get("version") if isinstance(extras, dict) else None
    if version != EXTRAS_VERSION:
        raise MalformedError(
            f"its checksums are of another version than {EXTRAS_VERSION}, which is the one known here"
        )
    chunk_nbytes, files = extras.get("chunk_nbytes"), extras.get("files")
    if (
        not _is_count(chunk_nbytes, _MAX_CHUNK_NBYTES)
        or chunk_nbytes < _MIN_CHUNK_NBYTES
        or chunk_nbytes % _PAGE_NBYTES
        or not isinstance(files, dict)
    ):
        raise MalformedError("its checksums are damaged")
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
