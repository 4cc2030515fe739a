"""Mounts, from the kernel's list in /proc."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

Mount = dict[str, str]

# File systems that belong to one machine alone, as mountinfo names them, each with its statfs.f_type (statfs(2)).
_LOCAL_TYPES = {
    "bcachefs": 0xCA451A4E,
    "btrfs": 0x9123683E,
    "ext2": 0xEF53,
    "ext3": 0xEF53,
    "ext4": 0xEF53,
    "f2fs": 0xF2F52010,
    "overlay": 0x794C7630,
    "ramfs": 0x858458F6,
    "tmpfs": 0x01021994,
    "xfs": 0x58465342,
    "zfs": 0x2FC12FC1,
}
LOCAL_FILE_SYSTEMS = frozenset(_LOCAL_TYPES)
_libc = ctypes.CDLL(None)


def mounts(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return all mounts that are visible to a process, from its mountinfo."""
    # Split at "\n" only: names may contain the other characters at which str.splitlines() and str.split() split.
    lines = (process / "mountinfo").read_bytes().decode(errors="replace").split("\n")
    return [_parse(line) for line in lines if line]


def mount_of(path: Path) -> Mount:
    """Return the mount that holds a path: mount_point, type, source, options and device number.

    Raises
    ------
    OSError
        The path does not exist, or it cannot be reached.
    LookupError
        Its mount is not visible to this process.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return mount_of_open(descriptor)
    except LookupError as problem:
        raise LookupError(f"{path}: {problem}") from None
    finally:
        os.close(descriptor)


def mount_or_none(path: Path) -> Mount | None:
    """Return the mount that holds a path, or None if it cannot be determined."""
    try:
        return mount_of(path)
    except (OSError, LookupError):
        return None


def is_remote(path: Path) -> bool:
    """Return whether a path is known to be on a file system that is not local, such as NFS, Lustre or FUSE."""
    mount = mount_or_none(path)
    return mount is not None and mount["type"] not in LOCAL_FILE_SYSTEMS


def is_local(descriptor: int) -> bool:
    """Return whether an open file is on a file system that is known to belong to this machine alone.

    This asks the kernel each time: a device number is given to another file system after an unmount.
    """
    status = (ctypes.c_long * 32)()  # struct statfs is smaller, and begins with f_type
    return (
        _libc.fstatfs(descriptor, status) == 0 and status[0] & 0xFFFFFFFF in _LOCAL_TYPES.values()
    )


def mount_of_open(descriptor: int) -> Mount:
    """Return the mount that holds an open file; see :func:`mount_of`."""
    # fdinfo has the id of the mount. Comparing paths would be ambiguous: several mounts may have the same mount point.
    found = re.search(
        r"^mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.MULTILINE
    )
    if found is None:  # gVisor, for example
        raise LookupError("the kernel does not tell which mount a file is on")
    for mount in mounts():
        if mount["id"] == found[1]:
            return mount
    raise LookupError(f"mount {found[1]} is not visible to this process")


def _parse(line: str) -> Mount:
    mount, _, system = line.partition(" - ")
    number, _, device, root, point, options = mount.split(" ")[:6]
    kind, source, *rest = system.split(" ")
    of_mount = options.split(",")
    of_system = rest[0].split(",") if rest else []
    return {
        "id": number,
        "mount_point": _unescape(point),
        "root": _unescape(root),
        "type": kind,
        "source": _unescape(source),
        "options": ",".join(dict.fromkeys(of_mount + of_system)),
        "device": device,
    }


def _unescape(name: str) -> str:
    # The kernel writes a space, tab, newline or backslash as a backslash and three octal digits (proc(5), mountinfo).
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
