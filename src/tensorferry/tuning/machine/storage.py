"""The file system of a path: how it is mounted, what space it has, and what its files take by direct I/O."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.mounts import LOCAL_FILE_SYSTEMS, is_remote, mount_of, mounts
from tensorferry.transfer import requests as transfers
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import memory_of
from tensorferry.tuning.machine.probe import Facts, attempt, number_or_none

__all__ = ["device_number", "direct_io", "file_system", "mount_of", "mounts"]

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK_DEVICE = "block device"
IN_MEMORY = ("tmpfs", "ramfs")  # where files can be written, but never to a drive


def file_system(path: Path) -> Facts:
    """Return what is known of the file system that holds a path, or of a block device without one.

    Nothing stays behind of what is tried.
    """
    direct = attempt(direct_io, path)
    if path.is_block_device():
        number = _number_of(path.stat().st_rdev)
        return {
            "type": _BLOCK_DEVICE,
            "device_number": number,
            "in_memory": False,
            "direct_io": direct,
        }
    mount = mount_of(path)
    return mount | {
        "device_number": device_number(mount),
        "in_memory": mount["type"] in (*IN_MEMORY, "hugetlbfs"),
        "space": attempt(_space, path),
        "direct_io": direct,
        "far": _far(mount) if mount["type"] not in LOCAL_FILE_SYSTEMS else None,
    }


def device_number(mount: Facts) -> str | None:
    """Return the number of the block device that a mount lies on, or None where none is known."""
    number: str = mount["device"]
    if not number.startswith("0:"):
        return number
    # File systems over several devices (Btrfs) have a made-up number, but name one device as their source.
    with contextlib.suppress(OSError):
        status = Path(mount["source"]).stat()
        if mount["source"].startswith("/") and stat.S_ISBLK(status.st_mode):
            return _number_of(status.st_rdev)
    return None


def direct_io(path: Path) -> Facts:
    """Try direct I/O on the file, block device or folder at a path.

    A folder is tried with a file of one page that goes with this call, and has no name but on network mounts; a file or
    device is only read.

    Returns
    -------
    Facts
        works (or reason), writes (whether the library writes by it, too), memory_alignment and offset_alignment as the
        library uses them.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(b"tensorferry" * (len(page) // 11))
    with _descriptor(path) as (descriptor, made):
        # "auto" decides as the library's calls do; "always" says whether reads go there where writes do not.
        file = _core.file_from_descriptor(descriptor, made, "auto")
        scheduler = runtime.default_scheduler()
        if made:
            transfers.transfer(scheduler, file, memory_of(page, writable=False), 0, write=True)
        writes = file.direct
        if not writes:
            try:
                file = _core.file_from_descriptor(descriptor, made, "always")
            except OSError as error:
                return {"works": False, "reason": str(error.strerror)}
        return {
            "works": True,
            "writes": writes,
            "memory_alignment": file.memory_alignment,
            "offset_alignment": file.offset_alignment,
        }


def _number_of(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _far(mount: Facts) -> Facts:
    """Return what the kernel has on its way to a server, where it tells.

    That of FUSE counts direct reads, too; its control file system must be mounted.
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
    """Open what is at a path for reading, or make a file in a folder; the flag says whether it was made."""
    if path.is_dir():
        # FUSE may know files by their names only.
        make: Any = tempfile.NamedTemporaryFile if is_remote(path) else tempfile.TemporaryFile
        with make(dir=path, prefix=".tensorferry-report-") as file:
            yield file.fileno(), True
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor, False
    finally:
        os.close(descriptor)
