"""Facts about GPUs and GPUDirect Storage, without loading their libraries into this process."""

from __future__ import annotations

import re
from pathlib import Path

from tensorferry.base.libraries import cufile_libraries, cufile_refusal
from tensorferry.tuning.machine.probe import (
    Facts,
    ProbeError,
    attempt,
    output_of,
    text,
    text_or_none,
)

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY_CLASS = "0x03"
_NVIDIA_SMI_TIMEOUT_SECONDS = 15


def gpus() -> Facts:
    """Return the GPUs on the PCI bus, and those that NVIDIA's driver reports. Memory is in bytes."""
    return {
        "on_pci": attempt(_on_pci),
        "nvidia_driver": attempt(_nvidia_driver),
        "nvidia": attempt(_nvidia_smi),
    }


def gpudirect_storage() -> Facts:
    """Return the installed parts of GPUDirect Storage: the cuFile libraries and the nvidia-fs module."""
    return {"cufile_libraries": attempt(_cufile_libraries), "nvidia_fs": attempt(_nvidia_fs)}


def _on_pci() -> list[Facts]:
    found = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(text(device / "vendor"))
        if vendor and text(device / "class").startswith(_DISPLAY_CLASS):
            found.append({"address": device.name, "vendor": vendor})
    return found


def _nvidia_driver() -> str:
    line = _first_line(Path("/proc/driver/nvidia/version"), "nvidia")
    version = re.search(r"\d+\.\d+(\.\d+)?", line)
    return version[0] if version else line


def _nvidia_fs() -> str:
    try:
        return _first_line(Path("/proc/driver/nvidia-fs/version"), "nvidia-fs")
    except ProbeError:
        modules = text_or_none(Path("/proc/modules")) or ""
        if any(line.startswith("nvidia_fs ") for line in modules.splitlines()):
            return "loaded"
        raise


def _first_line(path: Path, module: str) -> str:
    if not path.exists():
        raise ProbeError(f"the kernel module {module} is not loaded")
    return text(path).splitlines()[0]


def _nvidia_smi() -> list[Facts]:
    fields = "name,memory.total,driver_version,pci.bus_id"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = output_of(command, _NVIDIA_SMI_TIMEOUT_SECONDS).splitlines()
    found = []
    for line in lines:
        name, mebibytes, driver, address = (part.strip() for part in line.split(","))
        # For integrated GPUs without dedicated memory, nvidia-smi prints a text instead of a number.
        nbytes = int(mebibytes) << 20 if mebibytes.isdigit() else None
        found.append({"name": name, "memory_nbytes": nbytes, "driver": driver, "address": address})
    return found


def _cufile_libraries() -> list[str]:
    if found := cufile_libraries():
        return found
    raise ProbeError(str(cufile_refusal()))
