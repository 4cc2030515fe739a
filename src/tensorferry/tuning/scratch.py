"""Temporary files for measurements: making them cold or cached before a measurement, and removing them after it."""

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

# The unit of st_blocks, which does not depend on the file system's block size: stat(2).
_STAT_BLOCK_NBYTES = 512
_FREEING_SECONDS_MAX = 2.0
_FREEING_SLICE_SECONDS = 0.01
_READ_NBYTES = 8 << 20


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new directory, and remove it afterwards, also after Ctrl-C."""
    path = parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        path.mkdir(0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_cold(path: Path) -> None:
    """Drop a file from the page cache. This does not need root."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def make_warm(path: Path, share: float = 1.0) -> None:
    """Read a file into the page cache. With ``share`` below 1, cache only this share of it, from the first byte on."""
    if share < 1:
        make_cold(path)
    left = int(path.stat().st_size * share)
    with open(path, "rb", buffering=0) as file:
        if share < 1:  # disable the kernel's read-ahead, which would cache more than the share
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while left > 0 and (block := file.read(min(left, _READ_NBYTES))):
            left -= len(block)


def remove(path: Path) -> None:
    """Remove a file or a tree. For a file, wait until the file system has freed its space.

    Without the wait, the work of freeing and discarding blocks would slow down the next measurement.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    try:
        used, free = path.stat().st_blocks * _STAT_BLOCK_NBYTES, _free_nbytes(path.parent)
        path.unlink()
    except FileNotFoundError:
        used = free = 0
    sync_directory(path.parent)
    # The kernel closes files that a process had registered with io_uring some time after the process has ended, and
    # frees their space only then.
    end = time.monotonic() + _FREEING_SECONDS_MAX
    while _free_nbytes(path.parent) < free + used and time.monotonic() < end:
        time.sleep(_FREEING_SLICE_SECONDS)


def _free_nbytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize
