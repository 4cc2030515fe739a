"""What of a file the page cache holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib


def drop(path: pathlib.Path, begin: int = 0, nbytes: int = 0) -> None:
    """Leave nothing of a file in the page cache, or not these bytes of it (0: all behind `begin`)."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_DONTNEED)
