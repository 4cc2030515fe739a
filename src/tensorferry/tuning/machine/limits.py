"""The limits of the control groups around this process, and the memory that is left."""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

from tensorferry.base.mounts import mounts
from tensorferry.tuning.machine.probe import Facts, number_or_none, text, text_or_none

if TYPE_CHECKING:
    from collections.abc import Iterator

# cgroup v1 represents "unlimited" by a number near the maximum of 64 bits.
_UNLIMITED_NBYTES = 1 << 60

# The files of cgroup v1, with the names of the same limits in version 2.
_THROTTLES = {
    "read_bps_device": "rbps",
    "write_bps_device": "wbps",
    "read_iops_device": "riops",
    "write_iops_device": "wiops",
}


def available_nbytes(process: Path = Path("/proc/self")) -> int:
    """Return the memory that a process can still allocate: that of the machine, or of a control group if it has less.

    The page cache of a group counts as free, because the kernel reclaims it when memory is needed.
    """
    nbytes: list[int] = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):
        for version, group in _groups(process, "memory"):
            names = ("memory.max", "memory.current", "")
            if version == 1:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            limit, used = (number_or_none(group / name) for name in names[:2])
            if limit is not None and used is not None and limit < _UNLIMITED_NBYTES:
                lines = (text_or_none(group / "memory.stat") or "").splitlines()
                statistics = dict(line.split() for line in lines)
                files = (f"{names[2]}{kind}_file" for kind in ("inactive", "active"))
                cached = sum(int(statistics.get(name, 0)) for name in files)
                nbytes.append(max(0, limit - used + cached))
    return min(nbytes)


def io_limits(process: Path = Path("/proc/self")) -> list[Facts]:
    """Return the tightest limits for each throttled device: rbps and wbps in bytes per second, riops and wiops."""
    tightest: dict[str, dict[str, int]] = {}
    for device, what, value in _throttles(process):
        of_device = tightest.setdefault(device, {})
        of_device[what] = min(value, of_device.get(what, value))
    return [{"device": device} | limits for device, limits in tightest.items()]


def _throttles(process: Path) -> Iterator[tuple[str, str, int]]:
    for version, group in _groups(process, "io"):
        for file, what in _THROTTLES.items() if version == 1 else [("io.max", "")]:
            name = f"blkio.throttle.{file}" if version == 1 else file
            for line in (text_or_none(group / name) or "").splitlines():
                device, *limits = line.split()
                for limit in limits:
                    key, _, value = limit.rpartition("=")
                    if value != "max":
                        yield device, key or what, int(value)


def _groups(process: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the cgroup version and the folder of each group that limits a process: its group, and all parents of it."""
    first_version = {"io": "blkio"}.get(controller, controller)
    for line in text(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and first_version not in controllers.split(","):
            continue
        for mount in mounts(process):
            if mount["type"] != ("cgroup" if controllers else "cgroup2"):
                continue
            if controllers and first_version not in mount["options"].split(","):
                continue
            top, group = Path(mount["mount_point"]), _inside(path, mount["root"])
            for folder in (group, *group.parents):
                yield (1 if controllers else 2), top / folder


def _inside(path: str, root: str) -> PurePosixPath:
    # A container may have only its part of the tree of groups mounted, while /proc shows a group's path from the root
    # of the tree.
    inner, outer = PurePosixPath(path), PurePosixPath(root)
    return inner.relative_to(outer) if inner.is_relative_to(outer) else PurePosixPath()
