"""The bytes that torch.save writes around payloads: torch itself creates them, and checksums are filled in later.

torch.save writes a zip archive in which payloads (the storages' bytes) are uncompressed. No byte before a payload
depends on its contents. Three places after it depend on its CRC-32: the record's descriptor, directly after the
payload; the central directory, at the end of the archive; and the record `.data/serialization_id`, half of which is a
hash of the CRC-32s of all records, and which has its own CRC-32.

So torch first writes an archive without payloads (`torch.serialization.skip_data`), and this module finds the places of
these numbers in it. Each place is a :class:`tensorferry.transfer.streams.Field`. The file is then written by a stream,
as a sequence of arrays, its segments. The stream computes the CRC-32 of each segment, and fills in the fields that
depend on it.

The module checks the structure of every archive: if torch wrote other numbers than expected, the archive is refused,
and the caller saves with torch alone.
"""

from __future__ import annotations

import bisect
import functools
import io
import math
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tensorferry._core import crc32
from tensorferry.base.ranges import memory_order
from tensorferry.checkpoint.zipformat import zips
from tensorferry.checkpoint.zipformat.zips import UnknownArchiveError as UnknownArchiveError
from tensorferry.transfer.streams import Field

if TYPE_CHECKING:
    from collections.abc import Sequence


# An archive has about 1.6 KB in addition to the payload; only tensors with dozens of dimensions need more than 4 KiB.
MAX_OVERHEAD_NBYTES = 4096

_CRC = struct.Struct("<L")
_DIGITS = 20  # of each half of the serialization id


@dataclass(frozen=True)
class Archive:
    """An archive without its payloads.

    Attributes
    ----------
    pieces : tuple of bytes
        ``pieces[k]`` precedes payload k, the last piece follows the last payload. The CRC-32s of payloads are missing.
    payload_nbytes : tuple of int
        The payloads' sizes.
    payload_keys: tuple of str
        The names of the payloads' storages in the pickle; torch before 2.7 orders payloads by these names as text.
    """

    pieces: tuple[bytes, ...]
    payload_nbytes: tuple[int, ...]
    payload_keys: tuple[str, ...]
    _fields: tuple[tuple[Field, ...], ...]  # of each piece; payload k is segment k in them

    @property
    def nbytes(self) -> int:
        """The size of the whole archive."""
        return sum(map(len, self.pieces)) + sum(self.payload_nbytes)

    def fields(self, index: int, segments: Sequence[int]) -> list[Field]:
        """Return the checksum fields of ``pieces[index]``; ``segments`` are the numbers of the payloads' segments."""
        return [
            field._replace(
                segment=segments[field.segment] if field.kind == "segment" else 0,
                crcs=[crc if crc >= 0 else ~segments[~crc] for crc in field.crcs],
            )
            for field in self._fields[index]
        ]


def archive_of(obj: Any, pickle_module: Any = pickle) -> Archive:
    """Return the archive that torch.save would write for an object, without the payloads.

    Raises
    ------
    UnknownArchiveError
        This torch cannot leave out payloads, or writes archives in an unknown way.
    """
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:  # torch 2.4
        raise UnknownArchiveError("this torch has no skip_data")
    sink = _Sink()
    with skip_data():
        torch.save(obj, sink, pickle_module)  # type: ignore[arg-type]
    return sink.archive()


def tensor_archive(dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Archive:
    """Return the archive of a plain dense CPU tensor, with one payload of all elements in memory order.

    Raises
    ------
    UnknownArchiveError
        As for :func:`archive_of`.
    """
    return _tensor_archive(dtype, tuple(size), tuple(stride), _settings())


@functools.lru_cache(maxsize=4096)
def _tensor_archive(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], _made_with: object
) -> Archive:
    # The elements are never accessed, so they use no physical memory.
    archive = archive_of(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))
    if archive.payload_nbytes != (math.prod(size) * dtype.itemsize,):
        raise UnknownArchiveError(f"payloads of {archive.payload_nbytes} bytes")
    return archive


def _settings() -> object:
    """Return the settings of torch that affect archives, as a cache key."""
    try:
        from torch.utils.serialization import config
    except ImportError:  # before torch 2.7
        return None
    return getattr(config.save, "storage_alignment", None)


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a tensor in memory order, if :func:`tensor_archive` supports the tensor; otherwise None.

    The tensor may be on a GPU: torch saves it like the same tensor in host memory.
    """
    if (
        type(tensor) is not torch.Tensor
        or tensor.device.type not in ("cpu", "cuda")
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.requires_grad
        or tensor.numel() == 0
        or tensor.__dict__
        or not (tensor.is_contiguous() or memory_order(tensor.size(), tensor.stride()) is not None)
    ):
        return None
    begin = tensor.storage_offset() * tensor.element_size()
    return bytes_of(tensor.untyped_storage())[begin : begin + tensor.nbytes]


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a tensor on the same device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Sink(io.RawIOBase):
    """The file that torch.save writes to: it collects the bytes, and the sizes of omitted payloads."""

    def __init__(self) -> None:
        self._pieces = [bytearray()]
        self._gaps: list[int] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._pieces[-1] += view
        return view.nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or offset < 0:
            raise UnknownArchiveError(f"seek({offset}, {whence})")
        if offset:
            self._gaps.append(offset)
            self._pieces.append(bytearray())
        return 0

    def archive(self) -> Archive:
        """Locate the numbers that depend on payloads, and return the archive."""
        try:
            return _parse(self._pieces, self._gaps)
        except (struct.error, IndexError, ValueError) as error:
            raise UnknownArchiveError(f"not an archive: {error}") from error


def _parse(pieces: list[bytearray], gaps: list[int]) -> Archive:
    starts = [0]
    for piece, gap in zip(pieces, gaps, strict=False):
        starts.append(starts[-1] + len(piece) + gap)
    payloads = {start - gap: k for k, (start, gap) in enumerate(zip(starts[1:], gaps, strict=True))}
    last, last_start = pieces[-1], starts[-1]

    def find(position: int, nbytes: int) -> tuple[int, int]:
        """Return the piece that contains a range of the archive, and the offset in it."""
        index = bisect.bisect_right(starts, position) - 1
        if position + nbytes > starts[index] + len(pieces[index]):
            raise UnknownArchiveError("a structure extends into an omitted payload")
        return index, position - starts[index]

    fields: list[list[Field]] = [[] for _ in pieces]
    entries: list[Field] = []  # those in the directory
    identity: list[Field] = []
    keys: list[str] = []
    crcs: list[int] = []  # of all records, ~k for payload k
    written: list[int] = []
    for record in zips.last_entries(last, last_start):
        if record.nbytes == 0:  # empty records have no descriptor, and are not part of the id
            continue
        index, position = find(record.header, zips.LOCAL_HEADER.size)
        data = record.header + zips.local_header(pieces[index], position)[1]
        descriptor_piece, descriptor = find(data + record.nbytes, 8)
        if not zips.is_descriptor(pieces[descriptor_piece][descriptor : descriptor + 4]):
            raise UnknownArchiveError("a record has no descriptor")
        descriptor += zips.DESCRIPTOR_CRC
        entry = record.at - last_start + zips.ENTRY_CRC
        if record.name.endswith(b"/.data/serialization_id"):
            content_piece, content = find(data, 2 * _DIGITS)
            if content_piece != len(pieces) - 1 or record.nbytes != 2 * _DIGITS:
                raise UnknownArchiveError("an unknown serialization id")
            if int(last[content + _DIGITS : content + 2 * _DIGITS]) != _hash(written):
                raise UnknownArchiveError("an unknown serialization id")
            identity = [
                Field("torch_id", content + _DIGITS, crcs=crcs),
                Field("own", descriptor, begin=content, nbytes=2 * _DIGITS),
                Field("own", entry, begin=content, nbytes=2 * _DIGITS),
            ]
            break  # the last record, which is not part of its own hash
        written.append(record.crc)
        payload = payloads.get(data)
        if payload is not None:
            if payload != len(keys) or gaps[payload] != record.nbytes:
                raise UnknownArchiveError("payloads and records differ in order")
            fields[descriptor_piece].append(Field("segment", descriptor, segment=payload))
            entries.append(Field("segment", entry, segment=payload))
            keys.append(record.name.decode().partition("/data/")[2])
            crcs.append(~payload)
            continue
        content_piece, content = find(data, record.nbytes)
        crc = crc32(pieces[content_piece][content : content + record.nbytes])
        if record.crc not in (crc, 0):
            raise UnknownArchiveError("a checksum does not match its record")
        # Fill in checksums that torch has left out (compute_crc32 off), as they cost nothing here.
        _CRC.pack_into(pieces[descriptor_piece], descriptor, crc)
        _CRC.pack_into(last, entry, crc)
        crcs.append(crc)
    if len(keys) != len(gaps):
        raise UnknownArchiveError("a payload has no record")
    fields[-1] += entries + identity
    return Archive(tuple(map(bytes, pieces)), tuple(gaps), tuple(keys), tuple(map(tuple, fields)))


def _hash(crcs: Sequence[int]) -> int:
    """Return torch's hash of all records' CRC-32s (c10::hash_combine, inline_container.cc)."""
    seed = 0
    for crc in crcs:
        seed ^= crc + 0x9E3779B9 + (seed << 6 & (1 << 64) - 1) + (seed >> 2)
        seed &= (1 << 64) - 1
    return seed
