"""Facts about a machine as plain data for JSON, from probes that never raise.

A fact that could not be determined is ``{"unknown": reason}``. ``tuning/advice.py`` interprets the facts.
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
    """Return the facts that describe the environment of a measurement. This is fast, and does not access files."""
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
    """Return the result of describe() in one line."""
    mount = description["file_system"]
    cpu_model = description["cpu_model"]
    return (
        f"{description['cpu_count']} x {'unknown processor' if is_unknown(cpu_model) else cpu_model}, "
        f"{description['memory_nbytes'] / (1 << 30):.0f} GiB, kernel {description['kernel']}, "
        f"{mount.get('type', 'unknown file system')} on {mount.get('source', 'unknown device')}"
    )
