"""One file into a bucket, in parts, at a limited rate; and what lies there then is what the file holds."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import obstore

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tensorferry.checkpoint.mirror.bucket import Bucket

PART_NBYTES = 8 << 20
_PARTS_AT_ONCE = 4
# S3 takes 10,000 parts of an object.
_MAX_PARTS = 9_000
_MIB = 1 << 20
_SLICE_SECONDS = 5.0


class GoneError(Exception):
    """The local checkpoint is no longer there."""


class Throttle:
    """Lets so many bytes pass in a second, and no burst of those that it did not let pass before.

    Parameters
    ----------
    rate : int, optional
        Bytes in a second.
    pause : function of seconds
        Waits.
    clock : function
        Tells seconds.
    """

    def __init__(
        self,
        rate: int | None,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._pause, self._clock = rate, pause, clock
        self._free = 0.0  # from when on the next byte may pass

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may pass."""
        self._pause(0)
        if self._rate is None:
            return
        while (left := self._free - self._clock()) > 0:
            self._pause(min(left, _SLICE_SECONDS))
        self._free = max(self._free, self._clock()) + nbytes / self._rate


def upload(bucket: Bucket, path: Path, key: str, throttle: Throttle) -> int:
    """Put a file into the bucket, make sure that it is there byte for byte, and return its size.

    Raises
    ------
    GoneError
        There is no such file.
    ValueError
        What lies in the bucket differs.
    Exception
        What obstore says, or who waits for the throttle.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (obstore's FileNotFoundError would be another one)
    except FileNotFoundError as error:
        raise GoneError(f"{str(path)!r} has gone") from error
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        part_nbytes = max(PART_NBYTES, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
        digests: list[bytes] = []

        def parts() -> Iterator[bytes]:
            while part := file.read(part_nbytes):
                throttle.wait(len(part))
                digests.append(hashlib.md5(part, usedforsecurity=False).digest())
                # It came from the drive for this alone, and should not drive other things out of the page cache.
                os.posix_fadvise(file.fileno(), 0, file.tell(), os.POSIX_FADV_DONTNEED)
                yield part

        obstore.put(
            bucket.store,
            bucket.key(key),
            parts(),
            chunk_size=part_nbytes,
            max_concurrency=_PARTS_AT_ONCE,
        )
        there = obstore.head(bucket.store, bucket.key(key))
        if there["size"] != nbytes:
            raise ValueError(f"{bucket.key(key)}: {there['size']} bytes instead of {nbytes}")
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        if there["e_tag"] != f'"{whole}-{len(digests)}"':
            _compare(bucket, key, file)
    return nbytes


def _compare(bucket: Bucket, key: str, file: io.BufferedReader) -> None:
    """Read an object again, and compare it: ETags are other things where objects are encrypted, or not of S3."""
    file.seek(0)
    begin = 0
    for piece in obstore.get(bucket.store, bucket.key(key)).stream(min_chunk_size=PART_NBYTES):
        if bytes(piece) != file.read(len(piece)):
            where = f"bytes {begin} to {begin + len(piece)}"
            raise ValueError(f"{bucket.key(key)}: {where} are not those that were uploaded")
        begin += len(piece)
    if file.read(1):
        raise ValueError(f"{bucket.key(key)}: {begin} bytes instead of more")
