"""A skeleton of a torch.save archive: the archive in memory without payloads, which torch unpickles to load.

Each payload (the bytes of a storage) is replaced by a mark: 24 bytes with a random token and the payload's number. The
directory says that the payload has its full size, but nothing reads more of it than the mark. So the following
records are written directly after the mark, and the skeleton stays small. Payloads shorter than a mark are kept.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
from typing import TYPE_CHECKING

from tensorferry._core import crc32
from tensorferry.checkpoint.zipformat import zips

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_MARK = struct.Struct("<16sQ")
MARK_NBYTES = _MARK.size

_ALIGNMENT = 64


class Skeleton:
    """A skeleton, as an anonymous file in memory. The caller must close it.

    Parameters
    ----------
    records : iterable of (name, nbytes, content)
        The records of the archive; an int as content stands for a mark with that number.

    Attributes
    ----------
    path : str
        The path of the file, valid in this process.
    """

    def __init__(self, records: Iterable[tuple[str, int, bytes | int]]) -> None:
        self._token = secrets.token_bytes(16)  # random, so that only marks begin with it
        body, directory = bytearray(), bytearray()
        count = end = 0
        for text, nbytes, content in records:
            name = text.encode()
            data = content if isinstance(content, bytes) else _MARK.pack(self._token, content)
            crc = crc32(data) if isinstance(content, bytes) else 0
            directory += zips.pack_entry(name, nbytes, crc, len(body))
            body += zips.pack_header(name, nbytes, crc, len(body), _ALIGNMENT)
            end = max(end, len(body) + nbytes)
            body += data
            count += 1
        end = max(end, len(body))
        directory += zips.pack_ends(count, end, len(directory))
        self._descriptor = os.memfd_create("tensorferry-skeleton")
        self.path = f"/proc/self/fd/{self._descriptor}"
        with os.fdopen(self._descriptor, "r+b", closefd=False) as file:
            file.write(body)
            file.seek(end)  # the gap is never written, so it uses no memory
            file.write(directory)

    def mark_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of the mark at the beginning of a storage; None for a storage without a mark."""
        if storage.device.type != "cpu" or storage.nbytes() < MARK_NBYTES:
            return None
        token, number = _MARK.unpack(ctypes.string_at(storage.data_ptr(), MARK_NBYTES))
        return number if token == self._token else None

    def close(self) -> None:
        """Close the file; existing mappings of it remain valid."""
        os.close(self._descriptor)
