"""Files of a measurement: fresh or cold before it, gone after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.transfer.publication import sync_directory
from tensorferry.tuning.crew import ending_signals_blocked

if TYPE_CHECKING:
    from collections.abc import Iterator

_STAT_BLOCK_NBYTES = 512  # of st_blocks, whatever the file system's are: stat(2)
_FREEING_SECONDS_MAX = 2.0
_FREEING_SLICE_SECONDS = 0.01


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Give a new directory that is gone afterwards, also after Ctrl-C."""
    path: Path | None = None
    try:
        with ending_signals_blocked():
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        yield path
    finally:
        if path is not None:
            with ending_signals_blocked():
                shutil.rmtree(path, ignore_errors=True)


def make_cold(path: Path) -> None:
    """Drop a file from the page cache, which needs no root."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Unlink a file, if it is there, and let the file system finish with it: its discards are nobody's time."""
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
