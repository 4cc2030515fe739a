"""Bytes of files that torch.save writes."""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.checkpoint.zipformat import zips

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.transfer.streams import Field


def saved(obj: Any) -> bytes:
    """Return the bytes that torch.save writes to a file object."""
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def archive_with(pickled: bytes) -> bytes:
    """Return an archive with any bytes in place of the pickle."""
    file = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(file)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return file.getvalue()


def places(data: bytes) -> dict[str, zips.Span]:
    """Return the positions of an archive's records, by their names in its folder."""
    found = zips.layout(lambda begin, end: data[begin:end], len(data))
    return {place.name.partition("/")[2]: place for place in found}


def pickle_in(data: bytes) -> bytes:
    """The pickle in an archive."""
    place = places(data)["data.pkl"]
    return data[place.begin : place.begin + place.nbytes]


def filled(data: bytes, fields: Sequence[Field], crcs: Sequence[int]) -> bytes:
    """Return the bytes with their fields filled, as by a stream with these CRC-32s of its segments."""
    made = bytearray(data)
    for field in fields:
        if field.kind == "torch_id":
            seed = 0
            for given in field.crcs:
                crc = crcs[~given] if given < 0 else given
                seed ^= crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)
                seed %= 1 << 64
            made[field.position : field.position + 20] = b"%020d" % seed
        else:
            own = made[field.begin : field.begin + field.nbytes]
            crc = crcs[field.segment] if field.kind == "segment" else zlib.crc32(own)
            made[field.position : field.position + 4] = crc.to_bytes(4, "little")
    return bytes(made)
