"""Locating the payload in a blob that torch.save(tensor) wrote, where the metadata does not have its location.

A blob is a zip archive; its payload is the byte range of the tensor's elements. The zip directory at the end and the
pickle at the beginning give the location and order of the elements; the payload between them is not read. The pickle is
read by an unpickler that only creates descriptions. Blobs that differ from those of dense tensors are left to
torch.load.
"""

from __future__ import annotations

import io
import math
import struct
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from tensorferry._core import crc32
from tensorferry.base.ranges import memory_order
from tensorferry.checkpoint.zipformat import zips
from tensorferry.checkpoint.zipformat.unpickling import (
    MalformedError,
    RefusedError,
    StandIn,
    Unpickler,
    refuse_call,
    stand_in,
)
from tensorferry.checkpoint.zipformat.zips import UnknownArchiveError

if TYPE_CHECKING:
    from collections.abc import Callable

# The pickle is at the beginning and the directory at the end; each has some hundred bytes.
HEAD_NBYTES = TAIL_NBYTES = 4096


# The dtype of each storage class that a pickle may name.
STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}


class Payload(NamedTuple):
    """A tensor's elements in a file.

    Attributes
    ----------
    begin, nbytes : int
        The byte range of the elements.
    dtype : torch.dtype
        The dtype of the elements.
    sizes : tuple of int
        The tensor's size.
    order : tuple of int
        The order of dimensions in which the elements are in C order.
    crc : int or None
        The CRC-32 of these bytes in the zip directory; None if there is none.
    conj, neg : bool
        Whether the tensor's values are the conjugate of these elements, and whether they are their negative.
    """

    begin: int
    nbytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    crc: int | None = None
    conj: bool = False
    neg: bool = False

    @property
    def ordered_sizes(self) -> tuple[int, ...]:
        """The tensor's sizes in the order of dimensions of :attr:`order`."""
        return tuple(self.sizes[dim] for dim in self.order)


def parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    """Return the location of the elements in a blob of ``nbytes`` bytes; None for an unknown kind of blob."""
    try:
        return _parse(head, tail, nbytes)
    except (UnknownArchiveError, RefusedError, MalformedError, ArithmeticError, struct.error):
        return None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


class Verdict(NamedTuple):
    """The result of verifying a blob by its own checksums.

    Attributes
    ----------
    problem : str or None
        A description of the damage, or None.
    verified : bool
        Whether all bytes could be verified.
    """

    problem: str | None
    verified: bool


def examine(stream: IO[bytes]) -> Verdict:
    """Verify the contents of a file object; see :func:`examine_range`."""
    nbytes = stream.seek(0, io.SEEK_END)

    def read(begin: int, end: int) -> bytes:
        stream.seek(begin)
        return stream.read(end - begin)

    return examine_range(nbytes, read, lambda begin, end: crc32(read(begin, end)))


def examine_range(
    nbytes: int, read: Callable[[int, int], bytes], crc_of: Callable[[int, int], int]
) -> Verdict:
    """Verify a blob by its own checksums, if it is a zip archive as torch.save writes them.

    Every byte that torch.load uses is checked: values that occur twice in the archive are compared, and records must
    fill the archive without gaps.

    Parameters
    ----------
    nbytes : int
        The blob's size.
    read, crc_of : function of (begin, end)
        Return bytes of the blob, or their CRC-32.
    """
    # One of the two may be damaged: if the beginning or the end is that of an archive, check the blob as an archive.
    if not zips.begins(read(0, 4)) and not zips.ends(read(max(0, nbytes - zips.END.size), nbytes)):
        return Verdict(None, False)
    try:
        places = zips.layout(read, nbytes)
    except (UnknownArchiveError, struct.error, UnicodeDecodeError) as error:
        return Verdict(f"the archive is damaged: {error}", False)
    verified = True
    for place in places:
        if place.begin + place.nbytes > nbytes:
            return Verdict(f"the archive is cut short in the record {place.name!r}", False)
        crc = crc_of(place.begin, place.begin + place.nbytes)
        if crc != place.crc == 0:  # torch's compute_crc32 was off
            verified = False
        elif crc != place.crc:
            problem = (
                f"the record {place.name!r} has the CRC-32 {crc:08x} instead of {place.crc:08x}"
            )
            return Verdict(problem, False)
    return Verdict(None, verified)


class PickledTensor(NamedTuple):
    """A tensor's description in a pickle: its storage, as :func:`storage_of` returns it, and its layout in elements.

    ``conj`` and ``neg`` are as for :class:`Payload`; ``more`` is whether the tensor has hooks or other attributes.
    """

    storage: tuple[Any, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False
    more: bool = False


def _parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    records = zips.last_entries(tail, nbytes - len(tail))
    by_name = {record.name.partition(b"/")[2].decode(): record for record in records}

    def data_of(name: str) -> tuple[int, int, int]:
        record = by_name[name]
        found, header_nbytes, _ = zips.local_header(head, record.header)
        begin = record.header + header_nbytes
        if found[: len(record.name)] != record.name or begin + record.nbytes > nbytes:
            raise UnknownArchiveError("a record is not where the directory says")
        return begin, record.nbytes, record.crc

    def small(name: str) -> bytes:
        begin, count, crc = data_of(name)
        data = head[begin : begin + count]
        if begin + count > len(head) or crc32(data) != crc != 0:
            raise UnknownArchiveError("a record is damaged, or not in the head")
        return data

    if "byteorder" in by_name and small("byteorder") != b"little":
        return None
    tensor = Describer(small("data.pkl"), _find_described).load()
    if type(tensor) is not PickledTensor or tensor.more or tensor.conj or tensor.neg:
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


def storage_of(identity: Any) -> Any:
    """Return ("storage", dtype, key, device, count) for a storage's persistent id in a pickle."""
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise MalformedError("an unknown persistent object")
    if type(identity[2]) is not str:  # formatting nested tuples as text could need unlimited memory
        raise MalformedError("a storage with a name that is not text")
    _, kind, *rest = identity
    return ("storage", STORAGES.get(kind.name) if isinstance(kind, StandIn) else None, *rest)


class Describer(Unpickler):
    """Reads a pickle of torch.save, in which tensors become :class:`PickledTensor` and no storage is needed."""

    def persistent_load(self, identity: Any) -> Any:
        """Return the description of a storage."""
        return storage_of(identity)


def torch_constant(name: str) -> Any:
    """Return a dtype, layout or memory format of torch by its full name, else None. A pickle cannot change them."""
    value = vars(torch).get(name.removeprefix("torch."))
    is_constant = isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
    return value if is_constant and name.startswith("torch.") else None


def _tensor_v3(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    _grad: Any,
    hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> PickledTensor:
    if (
        not isinstance(storage, tuple)
        or len(storage) != 5
        or not (bits is None or type(bits) is dict)
    ):
        raise MalformedError("a tensor without a storage, or with unknown attributes")
    dtype = storage[1] if dtype is None else dtype
    counts = (storage[4], offset, *sizes, *strides)
    if (
        not isinstance(storage[1], torch.dtype)
        or type(sizes) is not tuple
        or type(strides) is not tuple
        or len(sizes) != len(strides)
        or not isinstance(dtype, torch.dtype)
        or any(type(count) is not int or count < 0 for count in counts)
    ):
        raise MalformedError("an unknown kind of tensor")
    more = dict(bits or {})
    conj, neg = more.pop("conj", False) is True, more.pop("neg", False) is True
    return PickledTensor(
        storage, offset, sizes, strides, dtype, conj, neg, more=bool(hooks or more)
    )


def _tensor_v2(*arguments: Any) -> PickledTensor:
    """Take the arguments of :func:`_tensor_v3` without the dtype."""
    with_dtype = (*arguments[:6], None, *arguments[6:])
    return _tensor_v3(*with_dtype)


TENSORS = {
    "torch._utils._rebuild_tensor_v2": stand_in("torch._utils._rebuild_tensor_v2", _tensor_v2),
    "torch._utils._rebuild_tensor_v3": stand_in("torch._utils._rebuild_tensor_v3", _tensor_v3),
    **{name: stand_in(name, refuse_call) for name in STORAGES},
}
"""The stand-ins for what torch.save writes for tensors."""


def _find_described(name: str) -> Any:
    if name == "collections.OrderedDict":
        return _EMPTY
    return TENSORS.get(name) or torch_constant(name)


_EMPTY = stand_in("collections.OrderedDict", lambda *_: {})
