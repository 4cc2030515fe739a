"""Files of a measurement: fresh or cold before it, gone after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.tuning.crew import ending_signals_blocked

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
