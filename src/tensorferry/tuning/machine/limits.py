"""What this process may use: resource limits, and those of the control groups around it."""

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

# cgroup v1 says "unlimited" as a number near the largest there is.
_UNLIMITED_NBYTES = 1 << 60

# cgroup v1's files and the names of version 2 for the same.
_THROTTLES = {
    "read_bps_device": "rbps",
    "write_bps_device": "wbps",
    "read_iops_device": "riops",
    "write_iops_device": "wiops",
}


def resources() -> Facts:
    """Return the resource limits that matter to I/O; None is no limit, sizes are in bytes."""
    return {
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK) | {"exempt": attempt(_may_lock_all)},
        "descriptors": _limit(resource.RLIMIT_NOFILE),
    }


def control_groups(process: Path = Path("/proc/self")) -> Facts:
    """Return the tightest limits of the control groups around a process.

    Parameters
    ----------
    process : Path
        The process's folder in /proc.

    Returns
    -------
    Facts
        memory_nbytes and memory_used_nbytes of the tightest group, cpus (a float), io (for each throttled device:
        rbps and wbps in bytes, riops and wiops in requests a second). None or empty where there is no limit.
    """
    return {
        "memory": attempt(_memory_limit, process),
        "cpus": attempt(_cpu_limit, process),
        "io": attempt(_io_limits, process),
    }


def available_nbytes(process: Path = Path("/proc/self")) -> int:
    """Return how much memory a process may still have: the machine's, or less where a control group has less.

    What a group's page cache holds is given back when it is needed, and counts as free.
    """
    nbytes: list[int] = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):
        for version, group in _groups(process, "memory"):
            limit, used = _memory_of(version, group)
            if limit is not None and used is not None:
                told = (text_or_none(group / "memory.stat") or "").splitlines()
                statistics = dict(line.split() for line in told)
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
    # With CAP_IPC_LOCK the kernel does not look at the limit.
    return bool(int(status_of_process()["CapEff"], 16) >> _CAP_IPC_LOCK & 1)


def _memory_limit(process: Path) -> Facts | None:
    tightest: Facts | None = None
    for version, group in _groups(process, "memory"):
        limit, used = _memory_of(version, group)
        if limit is not None and (tightest is None or limit < tightest["nbytes"]):
            tightest = {"nbytes": limit, "used_nbytes": used, "group": str(group)}
    return tightest


def _memory_of(version: int, group: Path) -> tuple[int | None, int | None]:
    """Return a group's limit, None if it has none, and what is used of it."""
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
    """Yield version and folder of the groups that limit a process, from its own outwards."""
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
    # A container may see only its part of the tree mounted, while its path is told from the tree's top.
    inner, outer = PurePosixPath(path), PurePosixPath(root)
    return inner.relative_to(outer) if inner.is_relative_to(outer) else PurePosixPath()
