"""What a figure was measured on: kernel, processors, memory, file system and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from benchmarks import fio

_QUEUE_FILES = ("scheduler", "nr_requests", "max_segments", "dma_alignment", "max_sectors_kb")


def describe(directory: Path) -> dict[str, Any]:
    """The machine and the file system of a directory, ready for JSON."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "file_system": file_system(directory),
        "python": platform.python_version(),
        "fio": fio.version(),
        **{name: _version(name) for name in ("tensorferry", "torch", "numpy", "deepspeed")},
    }


def summary(description: dict[str, Any]) -> str:
    """The same in one line."""
    disk = description["file_system"]
    return (
        f"{description['cpu_count']} x {description['cpu_model']}, "
        f"{description['memory_nbytes'] / (1 << 30):.0f} GiB, kernel {description['kernel']}, "
        f"{disk.get('type', '?')} on {disk.get('device', '?')}"
    )


def file_system(directory: Path) -> dict[str, Any]:
    """Type, device and mount options of the file system that holds a directory."""
    found: dict[str, Any] = {}
    resolved = directory.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount_point, kind, options = line.split()[:4]
        point = Path(mount_point.encode().decode("unicode_escape"))
        if resolved == point or point in resolved.parents:
            if found and len(point.parts) < found["depth"]:
                continue
            found = {
                "device": device,
                "mount_point": mount_point,
                "type": kind,
                "options": options,
                "depth": len(point.parts),
            }
    found.pop("depth", None)
    queue = Path("/sys/class/block") / Path(found.get("device", "-")).name / "queue"
    found["queue"] = {name: _read(queue / name) for name in _QUEUE_FILES if (queue / name).exists()}
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
