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

from tensorferry.checkpoint import pickles
from tensorferry.checkpoint.archive import UnknownArchiveError, directory_records, widened
from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.pickles import Maker, MalformedError, RefusedError, table
from tensorferry.checkpoint.ranges import memory_order

if TYPE_CHECKING:
    from collections.abc import Callable

# The pickle comes first and the directory last; each takes some hundred bytes.
HEAD_NBYTES = TAIL_NBYTES = 4096

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")
_MAX_32 = 0xFFFFFFFF
_MAX_DIRECTORY_NBYTES = 256 << 20
_READ_NBYTES = 1 << 20

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


class Place(NamedTuple):
    """Where a record's bytes lie in an archive, and their CRC-32: 0 where there may be none."""

    name: str
    begin: int
    nbytes: int
    crc: int


def examine(stream: IO[bytes]) -> Verdict:
    """Verify a blob by its own checksums, if it is a zip archive, as what torch.save writes is.

    Nothing that torch.load goes by is without a check: all that stands in the archive twice is compared, and records
    fill it without gaps.
    """
    nbytes = stream.seek(0, io.SEEK_END)

    def read(begin: int, end: int) -> bytes:
        stream.seek(begin)
        return stream.read(end - begin)

    # One of the two may be damaged.
    if read(0, 4) != b"PK\3\4" and read(max(0, nbytes - _END.size), nbytes)[:4] != b"PK\5\6":
        return Verdict(None, False)
    try:
        places = layout(read, nbytes)
    except (UnknownArchiveError, struct.error, UnicodeDecodeError) as error:
        return Verdict(f"the archive is damaged: {error}", False)
    verified = True
    for place in places:
        crc, at, end = 0, place.begin, place.begin + place.nbytes
        while at < end:
            data = read(at, min(end, at + _READ_NBYTES))
            if not data:
                return Verdict(f"the archive is cut short in the record {place.name!r}", False)
            crc = crc32(data, crc)
            at += len(data)
        if crc != place.crc == 0:  # torch's compute_crc32 was off
            verified = False
        elif crc != place.crc:
            problem = (
                f"the record {place.name!r} has the CRC-32 {crc:08x} instead of {place.crc:08x}"
            )
            return Verdict(problem, False)
    return Verdict(None, verified)


def layout(read: Callable[[int, int], bytes], nbytes: int) -> list[Place]:
    """Return where the records of an archive lie, and check all that says so.

    Parameters
    ----------
    read : function of (begin, end)
        Returns bytes of the archive.
    nbytes : int
        Its size.

    Raises
    ------
    UnknownArchiveError, struct.error, UnicodeDecodeError
        It is not as torch writes archives.
    """
    count, begin, end = _directory(read, nbytes)
    directory = read(begin, end)
    entries, at = [], 0
    for _ in range(count):
        entry = _ENTRY.unpack_from(directory, at)
        name_nbytes, extra_nbytes, comment_nbytes = entry[10:13]
        at += _ENTRY.size
        name = directory[at : at + name_nbytes]
        extra = directory[at + name_nbytes : at + name_nbytes + extra_nbytes]
        size, packed, header = widened(extra, [entry[9], entry[8], entry[16]])
        _require(entry[0] == b"PK\1\2", "an entry of the directory does not begin as one")
        _require(entry[4] == 0 and size == packed, f"the record {name!r} is compressed")
        _require(not any((comment_nbytes, *entry[13:16])), f"the entry of {name!r} has odd fields")
        at += name_nbytes + extra_nbytes
        # (local header, name, fields that stand there as well, CRC-32, size)
        entries.append((header, name, (entry[2], entry[3], *entry[4:7]), entry[7], size))
    _require(at == end - begin, "the directory has another size than it says")
    entries.sort()
    places = []
    next_headers = [entry[0] for entry in entries[1:]] + [begin]
    _require(not entries or entries[0][0] == 0, "it does not begin with a record")
    for (header, name, fields, crc, size), next_header in zip(entries, next_headers, strict=True):
        local = _LOCAL_HEADER.unpack(read(header, header + _LOCAL_HEADER.size))
        at = header + _LOCAL_HEADER.size
        data = at + local[9] + local[10]
        _require(local[0] == b"PK\3\4", f"the record {name!r} does not begin as one")
        _require(local[1:6] == fields, f"the header of {name!r} is not what the directory says")
        _require(read(at, at + local[9]) == name, f"the name of {name!r} is another in its header")
        _require(local[6] in (0, crc), f"the CRC-32 of {name!r} is another in its header")
        _require({local[7], local[8]} <= {0, size, _MAX_32}, f"the size of {name!r} is another")
        descriptor = read(data + size, next_header) if data + size <= next_header else b"?"
        _require(len(descriptor) <= 24, f"there is something behind {name!r}")
        if descriptor:
            sizes = struct.pack("<2L" if len(descriptor) == 16 else "<2Q", size, size)
            wanted = struct.pack("<4sL", b"PK\7\10", crc) + sizes
            _require(descriptor == wanted, f"what stands behind {name!r} is damaged")
        else:
            _require(not size or not fields[1] & 8, f"the checksum behind {name!r} is missing")
        places.append(Place(name.decode(), data, size, crc))
    return places


def _directory(read: Callable[[int, int], bytes], nbytes: int) -> tuple[int, int, int]:
    """Return how many entries the central directory has, and where it begins and ends."""
    at = nbytes - _END.size
    end = _END.unpack(read(max(0, at), nbytes))
    count, size, begin = end[4], end[5], end[6]
    _require(end[0] == b"PK\5\6" and not any((*end[1:3], end[7])), "its end is damaged")
    _require(end[3] == count, "its end is damaged")
    locator = read(at - _LOCATOR.size, at) if at >= _LOCATOR.size else b""
    where = at
    if locator[:4] == b"PK\6\7" or _MAX_32 in (size, begin) or count == 0xFFFF:
        _, disk, where, disks = _LOCATOR.unpack(locator)
        _require(locator[:4] == b"PK\6\7" and (disk, disks) == (0, 1), "its locator is damaged")
        _require(where + _ZIP64_END.size + _LOCATOR.size == at, "its locator is damaged")
        wide = _ZIP64_END.unpack(read(where, where + _ZIP64_END.size))
        _require(wide[:2] == (b"PK\6\6", _ZIP64_END.size - 12), "its zip64 end is damaged")
        _require(not any(wide[4:6]) and wide[6] == wide[7], "its zip64 end is damaged")
        for short, most, long in zip(
            (count, size, begin), (0xFFFF, _MAX_32, _MAX_32), wide[7:], strict=True
        ):
            _require(short in (long, most), "its two ends say different things")
        count, size, begin = wide[7:]
    _require(begin + size == where and size <= _MAX_DIRECTORY_NBYTES, "its directory is not there")
    _require(count * _ENTRY.size <= size, "its directory is too short")
    return count, begin, begin + size


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise UnknownArchiveError(otherwise)


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
    tensor, _ = pickles.loads(small("data.pkl"), _NAMES, _storage)
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


def _storage(identity: Any) -> Any:
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise MalformedError("an unknown persistent object")
    _, kind, *rest = identity
    return ("storage", STORAGES.get(kind.name) if type(kind) is Maker else None, *rest)


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
        raise MalformedError("an unknown kind of tensor")
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


def _no_hooks(*_arguments: Any) -> dict[str, Any]:
    return {}


def _nothing(*_arguments: Any) -> Any:
    raise MalformedError("a storage made by the pickle")


_NAMES = table(
    [
        Maker("torch._utils._rebuild_tensor_v2", _tensor_v2),
        Maker("torch._utils._rebuild_tensor_v3", _tensor_v3),
        Maker("collections.OrderedDict", _no_hooks),
        *(Maker(name, _nothing) for name in STORAGES),
    ]
)
