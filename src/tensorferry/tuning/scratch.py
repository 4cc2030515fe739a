"""Files of a measurement: fresh, cold or cached before it, gone after it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from typing import TYPE_CHECKING

from tensorferry.transfer.publication import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STAT_BLOCK_NBYTES = 512  # of st_blocks, whatever the file system's are: stat(2)
_FREEING_SECONDS_MAX = 2.0
_FREEING_SLICE_SECONDS = 0.01
_READ_NBYTES = 8 << 20


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Give a new directory that is gone afterwards, also after Ctrl-C."""
    path = parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        path.mkdir(0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_cold(path: Path) -> None:
    """Drop a file from the page cache, which needs no root."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_warm(path: Path, share: float = 1.0) -> None:
    """Bring a file, or a first part of it and no more, into the page cache."""
    if share < 1:
        make_cold(path)
    left = int(path.stat().st_size * share)
    with open(path, "rb", buffering=0) as file:
        if share < 1:  # nothing is read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while left > 0 and (block := file.read(min(left, _READ_NBYTES))):
            left -= len(block)


def remove(path: Path) -> None:
    """Remove a file or a tree, if it is there, and let the file system finish with it: discards are nobody's time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    try:
        taken, free = path.stat().st_blocks * _STAT_BLOCK_NBYTES, _free_nbytes(path.parent)
        path.unlink()
    except FileNotFoundError:
        taken = free = 0
    sync_directory(path.parent)
    # The kernel closes what a process had registered with io_uring some time after its end, and only then frees space.
    end = time.monotonic() + _FREEING_SECONDS_MAX
    while _free_nbytes(path.parent) < free + taken and time.monotonic() < end:
        time.sleep(_FREEING_SLICE_SECONDS)


def _free_nbytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize
