"""Looking into blobs that do not say where their payload lies: what torch.save(tensor) wrote.

The zip directory at the end and the pickle at the beginning say where the elements are and in what order; the payload
between them is not touched. The pickle is read by an unpickler that makes nothing but descriptions. What is not as
torch writes dense tensors is left to torch.load.
"""

from __future__ import annotations

import io
import math
import struct
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from tensorferry._core import crc32
from tensorferry.base.ranges import memory_order
from tensorferry.checkpoint.zipformat import pickles, zips
from tensorferry.checkpoint.zipformat.pickles import Maker, MalformedError, RefusedError, table
from tensorferry.checkpoint.zipformat.zips import UnknownArchiveError

if TYPE_CHECKING:
    from collections.abc import Callable

# The pickle comes first and the directory last; each takes some hundred bytes.
HEAD_NBYTES = TAIL_NBYTES = 4096


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
        Where they lie.
    dtype : torch.dtype
        What they are.
    sizes : tuple of int
        The tensor's size.
    order : tuple of int
        The order of its dimensions in which it is in C order.
    crc : int or None
        The CRC-32 of these bytes that the zip directory has; None if it has none.
    conj, neg : bool
        Whether the tensor is the conjugate of these elements, and whether it is their negative.
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
        """Its sizes in that order."""
        return tuple(self.sizes[dim] for dim in self.order)


def parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    """Return where in a blob of ``nbytes`` bytes the elements lie; None if it is not what is known here."""
    try:
        return _parse(head, tail, nbytes)
    except (UnknownArchiveError, RefusedError, MalformedError, ArithmeticError):
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
    """Do as :func:`examine_range` with what a file has."""
    nbytes = stream.seek(0, io.SEEK_END)

    def read(begin: int, end: int) -> bytes:
        stream.seek(begin)
        return stream.read(end - begin)

    return examine_range(nbytes, read, lambda begin, end: crc32(read(begin, end)))


def examine_range(
    nbytes: int, read: Callable[[int, int], bytes], crc_of: Callable[[int, int], int]
) -> Verdict:
    """Verify a blob by its own checksums, if it is a zip archive, as what torch.save writes is.

    Parameters
    ----------
    nbytes : int
        Its size.
    read, crc_of : function of (begin, end)
        Return bytes of it, or their CRC-32.

    Nothing that torch.load goes by is without a check: all that stands in the archive twice is compared, and records
    fill it without gaps.
    """
    # One of the two may be damaged.
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
    """What a pickle says of a tensor: its storage, as :func:`storage_of` has it, and a place in it, in elements.

    ``conj`` and ``neg`` are as for :class:`Payload`.
    """

    storage: tuple[Any, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False


def _parse(head: bytes, tail: bytes, nbytes: int) -> Payload | None:
    records = zips.last_entries(tail, nbytes - len(tail))
    by_name = {record.name.partition(b"/")[2].decode(): record for record in records}

    def data_of(name: str) -> tuple[int, int, int]:
        record = by_name[name]
        found, header_nbytes, _ = zips.local_header(head, record.header)
        begin = record.header + header_nbytes
        if found[: len(record.name)] != record.name or begin + record.nbytes > nbytes:
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
    tensor, _ = pickles.loads(small("data.pkl"), DESCRIPTIONS, storage_of)
    if type(tensor) is not PickledTensor:
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
    """Return ("storage", dtype, key, device, count) for what a pickle says of a storage."""
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise MalformedError("an unknown persistent object")
    if type(identity[2]) is not str:  # tuples of the same tuple have no end as text
        raise MalformedError("a storage that is not named by text")
    _, kind, *rest = identity
    return ("storage", STORAGES.get(kind.name) if type(kind) is Maker else None, *rest)


def tensor_makers(finish: Callable[[PickledTensor, Any, Any, dict[Any, Any]], Any]) -> list[Maker]:
    """Return what stands for the functions by which torch makes tensors again.

    ``finish`` is called with a tensor as the pickle describes it, checked, whether it is to have a gradient, its hooks,
    and what else is said of it.
    """

    def tensor_v3(
        storage: Any,
        offset: Any,
        sizes: Any,
        strides: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        bits: Any = None,
    ) -> Any:
        if (
            not isinstance(storage, tuple)
            or len(storage) != 5
            or not (bits is None or type(bits) is dict)
        ):
            raise MalformedError("a tensor without a storage, or with what is not known of it")
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
        return finish(
            PickledTensor(storage, offset, sizes, strides, dtype, conj, neg), grad, hooks, more
        )

    def tensor_v2(
        storage: Any,
        offset: Any,
        sizes: Any,
        strides: Any,
        grad: Any = None,
        hooks: Any = None,
        bits: Any = None,
    ) -> Any:
        return tensor_v3(storage, offset, sizes, strides, grad, hooks, None, bits)

    return [
        Maker("torch._utils._rebuild_tensor_v2", tensor_v2),
        Maker("torch._utils._rebuild_tensor_v3", tensor_v3),
    ]


def _plain(tensor: PickledTensor, _grad: Any, hooks: Any, more: dict[Any, Any]) -> PickledTensor:
    if hooks or more or tensor.conj or tensor.neg:
        raise MalformedError("an unknown kind of tensor")
    return tensor


def _nothing(*_arguments: Any) -> Any:
    raise MalformedError("a storage made by the pickle")


DESCRIPTIONS = table(
    [
        *tensor_makers(_plain),
        Maker("collections.OrderedDict", lambda *_: {}),
        *(Maker(name, _nothing) for name in STORAGES),
    ]
)
