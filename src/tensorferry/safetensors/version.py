"""Which file it was: told from one that has its name later, and from itself after a change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tensorferry.transfer.files import File


class Version(NamedTuple):
    """What tells a file from the one that has its name later, and from itself after a change."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(file: File) -> Version:
        """Return that of an open file."""
        return _version(os.fstat(file._open_file().descriptor))

    @staticmethod
    def at(path: str) -> Version:
        """Return that of the file that has a name now."""
        return _version(os.stat(path))  # noqa: PTH116


def _version(status: os.stat_result) -> Version:
    return Version(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
