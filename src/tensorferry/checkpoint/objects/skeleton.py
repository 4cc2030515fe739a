"""A torch.save archive without its payloads, in memory: what torch unpickles while the payloads are read elsewhere.

Each payload is replaced by a mark, 24 bytes that say which one it is; the space it would take overlaps what follows,
since nobody reads it. Payloads shorter than a mark are there themselves.
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
    """The archive, as a file that has no name on any disk. Close it.

    Parameters
    ----------
    records : iterable of (name, nbytes, content)
        What it holds; where the content is an int, a mark with that number.

    Attributes
    ----------
    path : str
        Where this process finds it.
    """

    def __init__(self, records: Iterable[tuple[str, int, bytes | int]]) -> None:
        self._token = secrets.token_bytes(16)  # no other memory begins with it
        body, directory = bytearray(), bytearray()
        count = end = 0
        for text, nbytes, content in records:
            name = text.encode()
            data = content if isinstance(content, bytes) else _MARK.pack(self._token, content)
            crc = crc32(data) if isinstance(content, bytes) else 0
            directory += zips.packed_entry(name, nbytes, crc, len(body))
            body += zips.packed_header(name, nbytes, crc, len(body), _ALIGNMENT)
            end = max(end, len(body) + nbytes)
            body += data
            count += 1
        end = max(end, len(body))
        directory += zips.packed_ends(count, end, len(directory))
        self._descriptor = os.memfd_create("tensorferry-skeleton")
        self.path = f"/proc/self/fd/{self._descriptor}"
        with os.fdopen(self._descriptor, "r+b", closefd=False) as file:
            file.write(body)
            file.seek(end)  # memory that is never written takes none
            file.write(directory)

    def mark_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of the mark that a storage begins with, None for any other storage."""
        if storage.device.type != "cpu" or storage.nbytes() < MARK_NBYTES:
            return None
        token, number = _MARK.unpack(ctypes.string_at(storage.data_ptr(), MARK_NBYTES))
        return number if token == self._token else None

    def close(self) -> None:
        """Let the file go; what has been mapped stays."""
        os.close(self._descriptor)
