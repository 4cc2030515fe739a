"""A benchmark's scratch files: made fresh, dropped from or kept in the page cache, removed.

Every contender gets the same treatment, outside the clock: a written file is new each time (the
old one is unlinked and the directory synced, so that the file system's discards do not fall into
the next measurement); a file for a cold read is synced and dropped from the page cache, which
needs no root.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from benchmarks import pattern
from benchmarks.harness import MIB
from tensorferry.tuning import scratch
from tensorferry.tuning.scratch import make_cold as make_cold
from tensorferry.tuning.scratch import remove as remove

if TYPE_CHECKING:
    from pathlib import Path


def remove_directory(path: Path) -> None:
    """Remove a directory and what is in it, if it is there, as :func:`remove` does a file."""
    shutil.rmtree(path, ignore_errors=True)
    scratch.sync_directory(path.parent)


def make_warm(path: Path) -> None:
    """Bring a whole file into the page cache."""
    _bring(path, path.stat().st_size)


def make_half_warm(path: Path) -> None:
    """Have the first half of a file in the page cache, and no more."""
    make_cold(path)
    _bring(path, path.stat().st_size // 2, os.POSIX_FADV_RANDOM)  # nothing is read ahead


def _bring(path: Path, nbytes: int, advice: int = os.POSIX_FADV_NORMAL) -> None:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, advice)
        while nbytes > 0 and (block := file.read(min(nbytes, 8 * MIB))):
            nbytes -= len(block)


def write_pattern(path: Path, nbytes: int, seed: int) -> None:
    """Make a file of the pattern, and sync it."""
    block = bytearray(min(nbytes, 64 * MIB))
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            part = memoryview(block)[: min(len(block), nbytes - start)]
            pattern.fill(part, seed, start)
            while part:
                part = part[file.write(part) :]
        os.fsync(file.fileno())


def file_matches(path: Path, nbytes: int, seed: int, offset: int = 0) -> bool:
    """Whether a file holds exactly the pattern, read through the page cache."""
    if path.stat().st_size != offset + nbytes:
        return False
    block = bytearray(min(nbytes, 64 * MIB))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        for start in range(0, nbytes, len(block)):
            view = memoryview(block)[: min(len(block), nbytes - start)]
            got = 0
            while got < len(view):
                count = file.readinto(view[got:])
                if not count:
                    return False
                got += count
            if not pattern.matches(view, seed, start):
                return False
    return True
