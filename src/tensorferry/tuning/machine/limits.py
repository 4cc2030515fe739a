"""The resource limits of this process, and the limits of its control groups."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

from tensorferry.tuning.machine.kernel import status_of_process
from tensorferry.tuning.machine.probe import (
    Facts,
    attempt,
    number,
    number_or_none,
    text,
    text_or_none,
)
from tensorferry.tuning.machine.storage import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

_CAP_IPC_LOCK = 14

# cgroup v1 represents "unlimited" by a number near the maximum of 64 bits.
_UNLIMITED_NBYTES = 1 << 60

# The files of cgroup v1, with the names of the same limits in version 2.
_THROTTLES = {
    "read_bps_device": "rbps",
    "write_bps_device": "wbps",
    "read_iops_device": "riops",
    "write_iops_device": "wiops",
}


def resources() -> Facts:
    """Return the resource limits that affect I/O. None means unlimited. Sizes are in bytes."""
    return {
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK) | {"exempt": attempt(_may_lock_all)},
        "descriptors": _limit(resource.RLIMIT_NOFILE),
    }


def control_groups(process: Path = Path("/proc/self")) -> Facts:
    """Return the tightest limits of the control groups of a process.

    Parameters
    ----------
    process : Path
        The folder of the process in /proc.

    Returns
    -------
    Facts
        ``memory`` has nbytes, used_nbytes and group of the tightest group. ``cpus`` is a float. ``io`` is a list with
        rbps and wbps in bytes per second, and riops and wiops in requests per second, for each throttled device. Facts
        without a limit are None or empty.
    """
    return {
        "memory": attempt(_memory_limit, process),
        "cpus": attempt(_cpu_limit, process),
        "io": attempt(_io_limits, process),
    }


def available_nbytes(process: Path = Path("/proc/self")) -> int:
    """Return the memory that a process can still allocate: that of the machine, or of a control group if it has less.

    The page cache of a group counts as free, because the kernel reclaims it when memory is needed.
    """
    nbytes: list[int] = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):
        for version, group in _groups(process, "memory"):
            limit, used = _memory_of(version, group)
            if limit is not None and used is not None:
                lines = (text_or_none(group / "memory.stat") or "").splitlines()
                statistics = dict(line.split() for line in lines)
                names = ("inactive_file", "active_file")
                prefix = "total_" if version == 1 else ""
                cached = sum(int(statistics.get(prefix + name, 0)) for name in names)
                nbytes.append(max(0, limit - used + cached))
    return min(nbytes)


def _limit(which: int) -> Facts:
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    )
    return {"soft": soft, "hard": hard}


def _may_lock_all() -> bool:
    # The kernel ignores RLIMIT_MEMLOCK for a process with CAP_IPC_LOCK.
    return bool(int(status_of_process()["CapEff"], 16) >> _CAP_IPC_LOCK & 1)


def _memory_limit(process: Path) -> Facts | None:
    tightest: Facts | None = None
    for version, group in _groups(process, "memory"):
        limit, used = _memory_of(version, group)
        if limit is not None and (tightest is None or limit < tightest["nbytes"]):
            tightest = {"nbytes": limit, "used_nbytes": used, "group": str(group)}
    return tightest


def _memory_of(version: int, group: Path) -> tuple[int | None, int | None]:
    """Return the memory limit of a group and its used memory, or (None, None) if it has no limit."""
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit = number_or_none(group / names[0])
    if limit is None or limit >= _UNLIMITED_NBYTES:
        return None, None
    return limit, number(group / names[1])


def _cpu_limit(process: Path) -> float | None:
    quotas = []
    for version, group in _groups(process, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(text_or_none(group / name) or "" for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words):  # else "max", or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _io_limits(process: Path) -> list[Facts]:
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
