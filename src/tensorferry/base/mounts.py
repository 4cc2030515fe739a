"""Mounts, as the kernel lists them. Imports next to nothing: the first handle that has a profile asks for one."""

from __future__ import annotations

import os
import re
from pathlib import Path

Mount = dict[str, str]

LOCAL_FILE_SYSTEMS = frozenset(
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"]
)


def mounts(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return all mounts that a process sees, as its mountinfo lists them."""
    # Names may hold all other characters that end a line or a word elsewhere.
    lines = (process / "mountinfo").read_bytes().decode(errors="replace").split("\n")
    return [_parsed(line) for line in lines if line]


def mount_of(path: Path) -> Mount:
    """Return the mount that holds a path: mount_point, type, source, options, and the device's number.

    Raises
    ------
    OSError
        There is no such path, or it cannot be reached.
    LookupError
        Its mount cannot be seen from here.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return mount_of_open(descriptor)
    except LookupError as problem:
        raise LookupError(f"{path}: {problem}") from None
    finally:
        os.close(descriptor)


def mount_if_seen(path: Path) -> Mount | None:
    """Return the mount that holds a path, None where that cannot be told."""
    try:
        return mount_of(path)
    except (OSError, LookupError, StopIteration):
        return None


def is_remote(path: Path) -> bool:
    """Return whether a path is known to lie on no local drive: on NFS, Lustre, FUSE and others."""
    mount = mount_if_seen(path)
    return mount is not None and mount["type"] not in LOCAL_FILE_SYSTEMS


def mount_of_open(descriptor: int) -> Mount:
    """Return the mount that holds an open file, as :func:`mount_of` does."""
    # The kernel knows which of several mounts at one place is meant; comparing paths does not tell.
    information = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    wanted = next(line.split()[1] for line in information.splitlines() if line.startswith("mnt_id"))
    for mount in mounts():
        if mount["id"] == wanted:
            return mount
    raise LookupError(f"mount {wanted} is not visible from here")


def _parsed(line: str) -> Mount:
    mount, _, system = line.partition(" - ")
    number, _, device, root, point, options = mount.split(" ")[:6]
    kind, source, *rest = system.split(" ")
    of_mount = options.split(",")
    of_system = rest[0].split(",") if rest else []
    return {
        "id": number,
        "mount_point": _unescaped(point),
        "root": _unescaped(root),
        "type": kind,
        "source": _unescaped(source),
        "options": ",".join(dict.fromkeys(of_mount + of_system)),
        "device": device,
    }


def _unescaped(name: str) -> str:
    # The kernel writes blanks, backslashes and so on as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
