"""The block devices of a file system, from the mounted device down to the drives, as found in /sys.

This follows partitions, device mapper (LVM, dm-crypt, multipath), MD arrays, loop devices and NVMe multipath.
"""

from __future__ import annotations

import re
from pathlib import Path

from tensorferry.tuning.machine import storage
from tensorferry.tuning.machine.probe import (
    Facts,
    ProbeError,
    attempt,
    chosen,
    number_or_none,
    text_or_none,
    texts,
)

_SECTOR_NBYTES = 512  # the unit of sizes in /sys, independent of the drive's sectors
_MAX_DEPTH = 8  # the maximum number of stacked devices
_QUEUE_NUMBERS = (
    "nr_requests",
    "max_sectors_kb",
    "max_hw_sectors_kb",
    "max_segments",
    "logical_block_size",
    "physical_block_size",
    "dma_alignment",
    "read_ahead_kb",
)
# The kinds of device-mapper devices by the first part of their UUIDs, and of other devices by the first letters of
# their names.
_MAPPED = {"CRYPT": "dm-crypt", "LVM": "LVM volume", "mpath": "multipath"}
_KINDS = {
    "nvme": "NVMe drive",
    "vd": "virtio disk",
    "sd": "SCSI or SATA disk",
    "xvd": "Xen disk",
    "nbd": "network block device",
}


def behind(device_number: str | None, sys: Path = Path("/sys")) -> list[Facts]:
    """Return the block device with this number ("8:1"), with the devices under it in ``below``.

    Parameters
    ----------
    device_number : str or None
        The major and minor number. None, for a file system without a device, returns an empty list.
    sys : Path
        The mount point of sysfs.
    """
    return [] if device_number is None else _devices([device_number], sys, _MAX_DEPTH)


def flat(devices: list[Facts]) -> list[Facts]:
    """Return devices and all devices under them in one list, from the top down, each of them once."""
    found = {}
    for device in devices:
        if "number" in device:
            found[device["number"]] = device
            found.update((below["number"], below) for below in flat(device["below"]))
    return list(found.values())


def _devices(numbers: list[str], sys: Path, depth: int) -> list[Facts]:
    return [attempt(_device, number, sys, depth) for number in numbers]


def _device(number: str, sys: Path, depth: int) -> Facts:
    if depth == 0:
        raise ProbeError(f"more than {_MAX_DEPTH} stacked devices")
    folder = (sys / "dev/block" / number).resolve(strict=True)
    sectors = number_or_none(folder / "size")
    facts: Facts = {
        "name": folder.name,
        "number": number,
        "nbytes": None if sectors is None else sectors * _SECTOR_NBYTES,
    }
    if (folder / "partition").exists():
        facts["kind"] = "partition"
        below = [text_or_none(folder.parent / "dev")]
    else:
        facts |= _kind(folder) | {
            "rotational": number_or_none(folder / "queue/rotational") == 1,
            "queue": _queue(folder),
            "numa_node": _numa_node(folder),
        }
        if folder.name.startswith("nvme"):
            facts["controllers"] = [_controller(path) for path in _controllers(folder)]
        below = [text_or_none(slave / "dev") for slave in sorted((folder / "slaves").glob("*"))]
        if "backing_file" in facts:
            backing = attempt(_number_below, Path(facts["backing_file"]))
            below.append(backing if isinstance(backing, str) else None)
    return facts | {"below": _devices([found for found in below if found], sys, depth - 1)}


def _number_below(path: Path) -> str | None:
    return storage.device_number(storage.mount_of(path))


def _kind(folder: Path) -> Facts:
    if (folder / "dm").is_dir():
        uuid = text_or_none(folder / "dm/uuid") or ""
        kind = _MAPPED.get(uuid.partition("-")[0], "device mapper")
        return {"kind": kind, "model": text_or_none(folder / "dm/name")}
    if (folder / "md").is_dir():
        chunk = number_or_none(folder / "md/chunk_size")
        level = text_or_none(folder / "md/level")
        return {"kind": "MD array", "model": level, "chunk_nbytes": chunk}
    if (folder / "loop").is_dir():
        backing = text_or_none(folder / "loop/backing_file")
        direct = text_or_none(folder / "loop/dio") == "1"
        loop: Facts = {"kind": "loop device", "model": None}
        return loop | {"backing_file": backing, "direct_io": direct}
    words = texts(folder / "device", "vendor", "model").values()
    # The "vendor" of a virtio device is a number, not a name.
    model = " ".join(word for word in words if word and not word.startswith("0x")) or None
    if model is None and (controllers := _controllers(folder)):
        model = text_or_none(controllers[0] / "model")
    kinds = (kind for head, kind in _KINDS.items() if folder.name.startswith(head))
    return {"kind": next(kinds, "block device"), "model": model}


def _queue(folder: Path) -> Facts:
    numbers = {name: number_or_none(folder / "queue" / name) for name in _QUEUE_NUMBERS}
    return {
        "scheduler": chosen(text_or_none(folder / "queue/scheduler") or "none"),
        **{name: value for name, value in numbers.items() if value is not None},
        "write_cache": text_or_none(folder / "queue/write_cache"),
        "hardware_queues": len(list((folder / "mq").glob("[0-9]*"))) or None,
    }


def _controllers(folder: Path) -> list[Path]:
    if not folder.name.startswith("nvme") or not (folder / "device").exists():
        return []
    device = (folder / "device").resolve()
    # With native multipath, the drive belongs to a subsystem, which has links to the controllers of all paths.
    paths = [device, *sorted(device.glob("nvme*"))]
    return [path.resolve() for path in paths if re.fullmatch(r"nvme\d+", path.name)]


def _controller(folder: Path) -> Facts:
    attributes = texts(folder, "model", "firmware_rev", "transport", "state")
    attributes["firmware"] = attributes.pop("firmware_rev")
    more = {"numa_node": _numa_node(folder), "pcie": _pcie_link(folder)}
    return {"name": folder.name} | attributes | more


def _numa_node(folder: Path) -> int | None:
    for place in (folder / "device", *folder.parents):
        node = number_or_none(place / "numa_node")
        if node is not None:
            return node if node >= 0 else None
    return None


def _pcie_link(folder: Path) -> Facts | None:
    for place in folder.parents:
        speed, speed_max = texts(place, "current_link_speed", "max_link_speed").values()
        if speed is None:
            continue
        width = number_or_none(place / "current_link_width")
        width_max = number_or_none(place / "max_link_width")
        return {
            "address": place.name,
            "speed": speed,
            "width": width,
            "speed_max": speed_max,
            "width_max": width_max,
            "gb_per_second": _link_gb_per_second(speed, width),
            "gb_per_second_max": _link_gb_per_second(speed_max, width_max),
        }
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
