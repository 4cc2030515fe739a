"""Facts about a machine as plain data for JSON, from probes that never raise.

A fact that could not be determined is ``{"unknown": reason}``. ``tuning/advice.py`` interprets the facts.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from tensorferry.tuning.machine import devices, limits, storage
from tensorferry.tuning.machine.libraries import version
from tensorferry.tuning.machine.probe import (
    Facts,
    attempt,
    chosen,
    is_unknown,
    number_or_none,
    text,
    text_or_none,
)

__all__ = ["Facts", "describe", "graphics", "system", "versions"]

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY_CLASS = "0x03"


def versions() -> Facts:
    """Return the versions of the kernel, of Python and of the libraries that a measurement depends on, or None."""
    names = ("tensorferry", "torch", "numpy", "deepspeed")
    libraries = {name: attempt(version, name) for name in names}
    return {"kernel": platform.release(), "python": platform.python_version(), **libraries}


def system() -> Facts:
    """Return what the kernel and the machine allow: asynchronous requests, NUMA nodes, memory and huge pages."""
    return {
        "aio_max_nr": number_or_none(Path("/proc/sys/fs/aio-max-nr")),
        "aio_nr": number_or_none(Path("/proc/sys/fs/aio-nr")),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "available_nbytes": attempt(limits.available_nbytes),
        "transparent_huge_pages": attempt(_transparent_huge_pages),
    }


def graphics() -> Facts:
    """Return the vendors of the GPUs on the PCI bus, and the version of NVIDIA's driver or None."""
    driver = text_or_none(Path("/proc/driver/nvidia/version"))
    found = re.search(r"\d+\.\d+(\.\d+)?", driver or "")
    return {"vendors": attempt(_vendors), "nvidia_driver": found and found[0]}


def describe(directory: Path) -> Facts:
    """Return the facts that describe the environment of a measurement. This is fast, and does not access files."""
    mount = attempt(storage.mount_of, directory)
    number = None if is_unknown(mount) else storage.device_number(mount)
    return {
        **versions(),
        "cpu_model": attempt(_cpu_model),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_huge_pages": attempt(_transparent_huge_pages),
        "file_system": mount,
        "devices": devices.behind(number),
    }


def _vendors() -> list[str]:
    cards = Path("/sys/bus/pci/devices").glob("*")
    found = [text(card / "vendor") for card in cards if text(card / "class")[:4] == _DISPLAY_CLASS]
    return [_VENDORS[vendor] for vendor in found if vendor in _VENDORS]


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.machine()


def _transparent_huge_pages() -> str:
    """Return the mode of transparent huge pages: always, madvise or never."""
    return chosen(text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
