"""Uploads one data file to a bucket, in parts, at a limited rate, and verifies file and object."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import obstore

from tensorferry._core import crc32

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tensorferry.checkpoint.mirror.bucket import Bucket, StoredFile

PART_NBYTES = 8 << 20
_PARTS_AT_ONCE = 4
# S3 allows 10,000 parts for an object.
_MAX_PARTS = 9_000
_MIB = 1 << 20
# The longest single pause. Each pause counts as progress, so an upload that the rate limit holds up still counts as
# alive.
_SLICE_SECONDS = 5.0


class GoneError(Exception):
    """The local checkpoint does not exist any more."""


class DamagedError(Exception):
    """The local checkpoint is not the one that was saved."""


class Throttle:
    """Limits a rate of bytes per second; time that was not used does not allow a burst later.

    Parameters
    ----------
    rate : int, optional
        The limit in bytes per second.
    pause : function of seconds
        Sleeps; an exception that it raises ends the wait.
    clock : function
        Returns the time in seconds.
    """

    def __init__(
        self,
        rate: int | None,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._pause, self._clock = rate, pause, clock
        self._free = 0.0  # the time at which the next byte may pass

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may pass."""
        self._pause(0)
        if self._rate is None:
            return
        while (left := self._free - self._clock()) > 0:
            self._pause(min(left, _SLICE_SECONDS))
        self._free = max(self._free, self._clock()) + nbytes / self._rate


def upload(bucket: Bucket, path: Path, key: str, stored: StoredFile, throttle: Throttle) -> None:
    """Upload a data file, compare what is read with its checksums in the metadata, and the object with what is read.

    Raises
    ------
    GoneError
        The file does not exist.
    DamagedError
        The file differs from the one that was saved. There is no object.
    ValueError
        The object differs from the file.
    Exception
        Any error of obstore, or of the throttle's ``pause``.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (obstore's errors for missing objects are FileNotFoundErrors, too)
    except FileNotFoundError as error:
        raise GoneError(f"{str(path)!r} does not exist any more") from error
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != stored.nbytes:
            raise DamagedError(f"{str(path)!r} has {nbytes} bytes instead of {stored.nbytes}")
        part_nbytes = max(PART_NBYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
        digests: list[bytes] = []

        def parts() -> Iterator[bytes]:
            for part in _verified(file, stored, part_nbytes):
                throttle.wait(len(part))
                digests.append(hashlib.md5(part, usedforsecurity=False).digest())
                # These pages are not needed again, and should not displace others in the page cache.
                os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
                yield part

        obstore.put(
            bucket.store, key, parts(), chunk_size=part_nbytes, max_concurrency=_PARTS_AT_ONCE
        )
        there = obstore.head(bucket.store, key)
        if there["size"] != nbytes:
            raise ValueError(f"{key}: {there['size']} bytes instead of {nbytes}")
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        if there["e_tag"] != f'"{whole}-{len(digests)}"':
            _compare(bucket, key, file)


def _verified(file: io.BufferedReader, stored: StoredFile, part_nbytes: int) -> Iterator[bytes]:
    """Yield a file in parts whose chunks have the checksums that the metadata have."""
    at = crc = 0
    while at < stored.nbytes:
        part = file.read(min(part_nbytes, stored.nbytes - at))
        begin = 0
        while begin < len(part):
            number, done = divmod(at, stored.chunk_nbytes)
            count = min(len(part) - begin, stored.chunk_nbytes - done)
            crc = crc32(memoryview(part)[begin : begin + count], crc if done else 0)
            begin, at = begin + count, at + count
            is_whole = at % stored.chunk_nbytes == 0 or at == stored.nbytes
            if is_whole and crc != stored.crcs[number]:
                where = f"bytes {number * stored.chunk_nbytes} to {at} of {file.name!r}"
                raise DamagedError(f"{where} are not those that were saved (the checksum differs)")
        if not part:
            raise DamagedError(f"{file.name!r} has only {at} bytes instead of {stored.nbytes}")
        yield part


def _compare(bucket: Bucket, key: str, file: io.BufferedReader) -> None:
    """Download an object, and compare it with the file: outside S3, or with encryption, an ETag is not an MD5."""
    file.seek(0)
    begin = 0
    for piece in obstore.get(bucket.store, key).stream(min_chunk_size=PART_NBYTES):
        if bytes(piece) != file.read(len(piece)):
            where = f"bytes {begin} to {begin + len(piece)}"
            raise ValueError(f"{key}: {where} are not those that were uploaded")
        begin += len(piece)
    if file.read(1):
        raise ValueError(f"{key}: only {begin} bytes, which is less than was uploaded")
