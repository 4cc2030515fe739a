"""The block devices of a file system, from the mounted device down to the drives, as found in /sys.

This follows partitions, device mapper (LVM, dm-crypt, multipath), MD arrays, loop devices and NVMe multipath.
"""

from __future__ import annotations

import re
from pathlib import Path

from tensorferry.tuning.machine import storage
from tensorferry.tuning.machine.probe import (
    Facts,
    attempt,
    chosen,
    is_unknown,
    number_or_none,
    text_or_none,
)

# The kinds of device-mapper devices by the first part of their UUIDs, and of other devices by the first letters of
# their names.
_MAPPED = {"CRYPT": "dm-crypt", "LVM": "LVM volume", "mpath": "multipath"}
_KINDS = {
    "nvme": "NVMe drive",
    "vd": "virtio disk",
    "sd": "SCSI or SATA disk",
    "nbd": "network block device",
}


def behind(device_number: str | None, sys: Path = Path("/sys")) -> list[Facts]:
    """Return the block device with this number ("8:1") and all devices under it, from the top down, each of them once.

    Parameters
    ----------
    device_number : str or None
        The major and minor number. None, for a file system without a device, returns an empty list.
    sys : Path
        The mount point of sysfs.
    """
    found: dict[str, Facts] = {}
    left = [device_number] if device_number else []
    while left:
        number = left.pop(0)
        if number not in found:
            found[number] = attempt(_device, number, sys)
            below = attempt(_below, sys / "dev/block" / number)
            left += [] if is_unknown(below) else filter(None, below)
    return list(found.values())


def _below(folder: Path) -> list[str | None]:
    folder = folder.resolve(strict=True)
    if (folder / "partition").exists():
        return [text_or_none(folder.parent / "dev")]
    below = [text_or_none(slave / "dev") for slave in sorted((folder / "slaves").glob("*"))]
    if backing := text_or_none(folder / "loop/backing_file"):
        below.append(storage.device_number(storage.mount_of(Path(backing))))
    return below


def _device(number: str, sys: Path) -> Facts:
    folder = (sys / "dev/block" / number).resolve(strict=True)
    facts: Facts = {"name": folder.name, "number": number}
    if (folder / "partition").exists():
        return facts | {"kind": "partition", "model": None}
    queue = folder / "queue"
    controllers = _controllers(folder)
    return facts | {
        **_kind(folder, controllers),
        "scheduler": chosen(text_or_none(queue / "scheduler") or "none"),
        "max_sectors_kb": number_or_none(queue / "max_sectors_kb"),
        "max_hw_sectors_kb": number_or_none(queue / "max_hw_sectors_kb"),
        "numa_node": _numa_node(folder),
        "pcie": [link for each in controllers if (link := _pcie_link(each))],
    }


def _kind(folder: Path, controllers: list[Path]) -> Facts:
    if (folder / "dm").is_dir():
        uuid = text_or_none(folder / "dm/uuid") or ""
        kind = _MAPPED.get(uuid.partition("-")[0], "device mapper")
        return {"kind": kind, "model": text_or_none(folder / "dm/name")}
    if (folder / "md").is_dir():
        return {"kind": "MD array", "model": text_or_none(folder / "md/level")}
    if (folder / "loop").is_dir():
        direct = text_or_none(folder / "loop/dio") == "1"
        return {"kind": "loop device", "model": None, "direct_io": direct}
    models = (text_or_none(each / "model") for each in (folder / "device", *controllers))
    kinds = (kind for head, kind in _KINDS.items() if folder.name.startswith(head))
    return {"kind": next(kinds, "block device"), "model": next(filter(None, models), None)}


def _controllers(folder: Path) -> list[Path]:
    if not folder.name.startswith("nvme") or not (folder / "device").exists():
        return []
    device = (folder / "device").resolve()
    # With native multipath, the drive belongs to a subsystem, which has links to the controllers of all paths.
    paths = [device, *sorted(device.glob("nvme*"))]
    return [path.resolve() for path in paths if re.fullmatch(r"nvme\d+", path.name)]


def _numa_node(folder: Path) -> int | None:
    for place in (folder / "device", *folder.parents):
        node = number_or_none(place / "numa_node")
        if node is not None:
            return node if node >= 0 else None
    return None


def _pcie_link(controller: Path) -> Facts | None:
    """Return the speed of a controller's link as it is and as the drive supports it, and both in GB/s."""
    for place in controller.parents:
        if text_or_none(place / "current_link_speed") is not None:
            facts: Facts = {"address": place.name}
            for now, name in (("current", ""), ("max", "_max")):
                speed = text_or_none(place / f"{now}_link_speed")
                width = number_or_none(place / f"{now}_link_width")
                facts[f"link{name}"] = f"{speed} x{width}"
                facts[f"gb_per_second{name}"] = _link_gb_per_second(speed, width)
            return facts
    return None


def _link_gb_per_second(speed: str | None, width: int | None) -> float | None:
    """Return the bandwidth of a link in each direction, in GB/s, without the overhead of packets."""
    found = re.match(r"[\d.]+", speed or "")
    if not found or not width:
        return None
    giga_transfers = float(found[0])
    # PCIe encodes 8 bits in 10 at 2.5 and 5 GT/s, and 128 bits in 130 at higher speeds.
    efficiency = 8 / 10 if giga_transfers < 8 else 128 / 130
    return round(giga_transfers * width * efficiency / 8, 2)
