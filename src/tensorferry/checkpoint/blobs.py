"""Looking into blobs that do not say where their payload lies: what torch.save(tensor) wrote.

The zip directory at the end and the pickle at the beginning say where the elements are and in what order; the payload
between them is not touched. The pickle is read by an unpickler that makes nothing but descriptions. What is not as
torch writes dense tensors is left to torch.load.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from tensorferry.checkpoint.archive import UnknownArchiveError, directory_records
from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.ranges import memory_order

if TYPE_CHECKING:
    from collections.abc import Callable

# The pickle comes first and the directory last; each takes some hundred bytes.
HEAD_NBYTES = TAIL_NBYTES = 4096

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_END_NBYTES = 22
_READ_NBYTES = 1 << 20

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


class Payload(NamedTuple):
    """A tensor's elements in a file.

    Attributes
    ----------
    begin, nbytes : int
        Where they lie.
    dtype : torch.dtype
        What they are.
    sizes : tuple of int
        The tensor's size.
    order : tuple of int
        The order of its dimensions in which it is in C order.
    crc : int or None
        The CRC-32 of these bytes that the zip directory has; None if it has none.
    """

    begin: int
    nbytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    crc: int | None = None

    @property
    def ordered_sizes(self) -> tuple[int, ...]:
        """Its sizes in that order."""
        return tuple(self.sizes[dim] for dim in self.order)


def parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    """Return where in a blob of ``nbytes`` bytes the elements lie; None if it is not what is known here."""
    try:
        return _parse(head, tail, nbytes)
    except (UnknownArchiveError, pickle.UnpicklingError, ArithmeticError):
        return None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, EOFError):
        return None


class Verdict(NamedTuple):
    """What a look at the checksums in a blob has shown.

    Attributes
    ----------
    problem : str or None
        What is wrong with it.
    verified : bool
        Whether all of it could be verified.
    """

    problem: str | None
    verified: bool


def examine(stream: IO[bytes]) -> Verdict:
    """Verify a blob by its own checksums, if it is a zip archive, as what torch.save writes is."""
    if not _is_archive(stream):
        return Verdict(None, False)
    verified = True
    try:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                crc, expected = 0, entry.CRC
                entry.CRC = None  # type: ignore[assignment]  # zipfile's own check is slower
                with archive.open(entry) as record:
                    while data := record.read(_READ_NBYTES):
                        crc = crc32(data, crc)
                if crc != expected == 0:  # torch's compute_crc32 was off
                    verified = False
                elif crc != expected:
                    problem = f"the record {entry.filename!r} has the CRC-32 {crc:08x} instead of {expected:08x}"
                    return Verdict(problem, verified)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error) as error:
        return Verdict(f"the archive is damaged: {error}", verified)
    return Verdict(None, verified)


def _is_archive(stream: IO[bytes]) -> bool:
    """Return whether a blob begins or ends as an archive does: one of the two may be damaged."""
    nbytes = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    begins = stream.read(4) == b"PK\3\4"
    stream.seek(max(0, nbytes - _END_NBYTES))
    return begins or stream.read(4) == b"PK\5\6"


class _Tensor(NamedTuple):
    storage: tuple[Any, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    records = directory_records(tail, nbytes - len(tail))
    by_name = {record.name.partition(b"/")[2].decode(): record for record in records}

    def data_of(name: str) -> tuple[int, int, int]:
        record = by_name[name]
        fields = _LOCAL_HEADER.unpack_from(head, record.header)
        if fields[0] != b"PK\3\4" or record.header < 0:
            raise UnknownArchiveError("no local header")
        begin = record.header + _LOCAL_HEADER.size + fields[9] + fields[10]
        at = record.header + _LOCAL_HEADER.size
        if head[at : at + len(record.name)] != record.name or begin + record.nbytes > nbytes:
            raise UnknownArchiveError("a record that is not where the directory says")
        return begin, record.nbytes, record.crc

    def small(name: str) -> bytes:
        begin, count, crc = data_of(name)
        data = head[begin : begin + count]
        if begin + count > len(head) or crc32(data) != crc != 0:
            raise UnknownArchiveError("a record beyond the head, or damaged")
        return data

    if "byteorder" in by_name and small("byteorder") != b"little":
        return None
    tensor = _Unpickler(io.BytesIO(small("data.pkl"))).load()
    if type(tensor) is not _Tensor:
        return None
    _, kind, key, _, count = tensor.storage
    dtype = tensor.dtype
    itemsize = dtype.itemsize
    begin, storage_nbytes, crc = data_of(f"data/{key}")
    order = memory_order(tensor.sizes, tensor.strides)
    payload_nbytes = math.prod(tensor.sizes) * itemsize
    first = tensor.offset * itemsize
    if (
        order is None
        or storage_nbytes != count * kind.itemsize
        or not 0 <= first <= first + payload_nbytes <= storage_nbytes
    ):
        return None
    whole = payload_nbytes == storage_nbytes
    return Payload(
        begin + first, payload_nbytes, dtype, tensor.sizes, order, (crc or None) if whole else None
    )


class _Unpickler(pickle.Unpickler):
    """Describes the tensor that a pickle of torch's would make."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _FUNCTIONS.get(f"{module}.{name}")
        if stand_in is not None:
            return lambda *arguments: stand_in(*arguments)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise pickle.UnpicklingError("an unknown persistent object")
        return identity


def _checked(
    storage: Any, offset: Any, sizes: Any, strides: Any, dtype: Any, rest: tuple[Any, ...]
) -> _Tensor:
    counts = (storage[4], offset, *sizes, *strides)
    if (
        any(rest)
        or not isinstance(storage[1], torch.dtype)
        or type(sizes) is not tuple
        or type(strides) is not tuple
        or len(sizes) != len(strides)
        or not isinstance(dtype, torch.dtype)
        or any(type(count) is not int or count < 0 for count in counts)
    ):
        raise pickle.UnpicklingError("an unknown kind of tensor")
    return _Tensor(storage, offset, sizes, strides, dtype)


def _tensor_v2(
    storage: Any, offset: Any, sizes: Any, strides: Any, _grad: Any, *rest: Any
) -> _Tensor:
    return _checked(storage, offset, sizes, strides, storage[1], rest)


def _tensor_v3(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    _grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> _Tensor:
    return _checked(storage, offset, sizes, strides, dtype, (hooks, *rest))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "collections.OrderedDict": dict,
}
