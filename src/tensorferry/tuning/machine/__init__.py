"""What is known about a machine: facts as plain data, ready for JSON, from probes that never raise.

A fact that could not be had is ``{"unknown": reason}``. What the facts mean is said in ``tuning/advice.py``.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from tensorferry.tuning.machine import devices, kernel, storage
from tensorferry.tuning.machine.libraries import version
from tensorferry.tuning.machine.probe import Facts, attempt, is_unknown

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Facts", "describe", "summary"]


def describe(directory: Path) -> Facts:
    """Return what a measurement in a directory was made on, without trying anything: fast, and touches no file."""
    mount = attempt(storage.mount_of, directory)
    below = (
        [] if is_unknown(mount) else attempt(lambda: devices.behind(storage.device_number(mount)))
    )
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu_model": attempt(kernel.cpu_model),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_huge_pages": attempt(kernel.transparent_huge_pages),
        "file_system": mount,
        "devices": below,
        "python": platform.python_version(),
        **{name: version(name) for name in ("tensorferry", "torch", "numpy", "deepspeed")},
    }


def summary(description: Facts) -> str:
    """Return what describe() found in one line."""
    mount = description["file_system"]
    cpu_model = description["cpu_model"]
    return (
        f"{description['cpu_count']} x {'unknown processor' if is_unknown(cpu_model) else cpu_model}, "
        f"{description['memory_nbytes'] / (1 << 30):.0f} GiB, kernel {description['kernel']}, "
        f"{mount.get('type', 'unknown file system')} on {mount.get('source', 'unknown device')}"
    )
