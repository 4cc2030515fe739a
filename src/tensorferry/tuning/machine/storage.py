"""Facts about the file system of a path: its mount, its space, and the requirements of direct I/O."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.mounts import LOCAL_FILE_SYSTEMS, is_remote, mount_of
from tensorferry.transfer import requests as transfers
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import memory_of
from tensorferry.tuning.machine.probe import Facts, attempt, number_or_none

__all__ = ["device_number", "file_system", "mount_of"]

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_MEMORY = ("tmpfs", "ramfs")  # file systems with regular files, but without a drive


def file_system(path: Path) -> Facts:
    """Return the facts about the file system of a path, or about a block device. Test files are removed."""
    direct = attempt(_direct_io, path)
    if path.is_block_device():
        number = _number_of(path.stat().st_rdev)
        facts: Facts = {"type": "block device", "device_number": number, "in_memory": False}
        return facts | {"direct_io": direct}
    mount = mount_of(path)
    shown = {name: mount[name] for name in ("type", "mount_point", "source", "options", "device")}
    return shown | {
        "device_number": device_number(mount),
        "in_memory": mount["type"] in (*IN_MEMORY, "hugetlbfs"),
        "space": attempt(_space, path),
        "direct_io": direct,
        "far": _far(mount) if mount["type"] not in LOCAL_FILE_SYSTEMS else None,
    }


def device_number(mount: Facts) -> str | None:
    """Return the number of the block device under a mount, or None if it is unknown."""
    number: str = mount["device"]
    if not number.startswith("0:"):
        return number
    # File systems on several devices (Btrfs) have an anonymous number, but name one device as their source.
    with contextlib.suppress(OSError):
        status = Path(mount["source"]).stat()
        if mount["source"].startswith("/") and stat.S_ISBLK(status.st_mode):
            return _number_of(status.st_rdev)
    return None


def _direct_io(path: Path) -> Facts:
    """Test direct I/O on the file, block device or folder at a path.

    In a folder, the test uses a temporary file of one page, which has a name only on network mounts. A file or device
    is only read.

    Returns
    -------
    Facts
        works (with reason if False), and writes: whether tensorferry also writes with direct I/O.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(b"tensorferry" * (len(page) // 11))
    with _descriptor(path) as (descriptor, is_new):
        # "auto" decides as tensorferry's calls do. If it does not choose direct I/O for writes, "always" shows whether
        # reads support it.
        file = _core.file_from_descriptor(descriptor, is_new, "auto")
        scheduler = runtime.default_scheduler()
        if is_new:
            transfers.transfer(scheduler, file, memory_of(page, writable=False), 0, write=True)
        writes = file.direct
        if not writes:
            try:
                _core.file_from_descriptor(descriptor, is_new, "always")
            except OSError as error:
                return {"works": False, "reason": str(error.strerror)}
        return {"works": True, "writes": writes}


def _number_of(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _far(mount: Facts) -> Facts:
    """Return the kernel's limits for requests to the server of a network mount, as far as they are known.

    FUSE's max_background also limits direct reads. It is known only if the fusectl file system is mounted.
    """
    device = mount["device"]
    connection = Path("/sys/fs/fuse/connections") / device.partition(":")[2]
    return {
        "read_ahead_kb": number_or_none(Path("/sys/class/bdi") / device / "read_ahead_kb"),
        "fuse_max_background": number_or_none(connection / "max_background"),
    }


def _space(path: Path) -> Facts:
    status = os.statvfs(path)
    return {
        "nbytes": status.f_blocks * status.f_frsize,
        "free_nbytes": status.f_bavail * status.f_frsize,
        "read_only": bool(status.f_flag & os.ST_RDONLY),
        "writable": os.access(path, os.W_OK),
    }


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[tuple[int, bool]]:
    """Open the file or device at a path for reading, or create a file in a folder. The flag is True for a new file."""
    if path.is_dir():
        # Some FUSE file systems access files by name, so an unnamed file would be unusable there.
        make: Any = tempfile.NamedTemporaryFile if is_remote(path) else tempfile.TemporaryFile
        with make(dir=path, prefix=".tensorferry-report-") as file:
            yield file.fileno(), True
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor, False
    finally:
        os.close(descriptor)
