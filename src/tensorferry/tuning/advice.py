"""Advice that follows from the facts about a machine, most important first, with the commands that help.

Facts are the nested dict that ``tensorferry report`` collects. Its keys on the first level, such as "kernel" or "gpu",
are the parts of the report. Each rule is a function that examines the facts. For each problem, it yields three texts:
the finding, its consequence and a remedy. It yields nothing if a fact is unknown, if there is no problem, or if the
user cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.tuning.machine.probe import Facts, is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Examine = Callable[[Facts], Iterator[tuple[str, str, str]]]

LEVELS = ("stops", "speed", "hint")

_GIB = 1 << 30
_SMALL_READ_AHEAD_KB = 128  # the kernel's own default
_FUSE_REQUESTS = 32  # the requests of 1 MiB that tensorferry keeps in flight by default
_BLOCK_KB, _LARGE_BLOCK_KB = 1024, 4096  # the block sizes of a handle's default settings
_FIRST_DRIVER_OF_CUDA_13 = 580
# The limits of a control group by their keys in io.max: the divisor for the unit of the text, and the text.
_LIMITS = {
    "rbps": (1e6, "MB/s of reads"),
    "wbps": (1e6, "MB/s of writes"),
    "riops": (1, "reads a second"),
    "wiops": (1, "writes a second"),
}


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes
    ----------
    level : str
        "stops" (I/O is impossible), "speed" (I/O is slower than necessary) or "hint".
    about : str
        The part of the report with the fact.
    finding : str
        The fact.
    meaning : str
        The consequence of the fact.
    remedy : str
        The remedy, which is a command where possible.
    """

    level: str
    about: str
    finding: str
    meaning: str
    remedy: str


# The rules: the level, the part of the report, and the function. Within a level, advice has the order of this list.
_RULES: list[tuple[str, str, Examine]] = []


def _rule(level: str, about: str) -> Callable[[Examine], Examine]:
    """Return a decorator that adds a function to the rules."""

    def register(examine: Examine) -> Examine:
        _RULES.append((level, about, examine))
        return examine

    return register


def advise(facts: Facts) -> list[Advice]:
    """Return the advice for the facts of a report, most important first."""
    found = [
        Advice(level, about, *texts) for level, about, examine in _RULES for texts in examine(facts)
    ]
    return sorted(found, key=lambda each: LEVELS.index(each.level))


def known(facts: Facts, *keys: str) -> Any:
    """Return the fact under these nested keys, or None if it is missing or unknown."""
    found: Any = facts
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return None if is_unknown(found) else found


def _is_pseudo_file_system(facts: Facts) -> bool:
    """Return whether the path is on a pseudo file system of the kernel, such as /proc or /sys, which has no space."""
    return bool(known(facts, "file_system", "space", "nbytes") == 0)


@_rule("stops", "file_system")
def _access(facts: Facts) -> Iterator[tuple[str, str, str]]:
    space, path = known(facts, "file_system", "space"), facts["path"]
    if space is None:
        return
    system = facts["file_system"]
    if _is_pseudo_file_system(facts):
        yield (
            f"{path} is on a pseudo file system of the kernel ({system.get('type')}), without a drive.",
            "It cannot store files, so nothing can be measured or tuned there.",
            "use a folder on a drive (findmnt lists all mounts)",
        )
    elif space["read_only"]:
        point = system["mount_point"]
        yield (
            f"The file system at {point} is mounted read-only.",
            "Files can be read, but not written.",
            f"mount -o remount,rw {point}",
        )
    elif not space["writable"]:
        yield (
            f"{path} is not writable for this user.",
            "Files can be read, but not written.",
            f"chown $USER {path}, or use another folder",
        )
    elif space["free_nbytes"] < _GIB:
        yield (
            f"{space['free_nbytes'] / (1 << 20):.0f} MiB are free.",
            "Larger writes fail with ENOSPC. Benchmarks and tune need a few GiB.",
            f"remove files (df -h {path} shows the free space), or use another file system",
        )


@_rule("stops", "gpu")
def _gpu_driver(facts: Facts) -> Iterator[tuple[str, str, str]]:
    driver = known(facts, "gpu", "cuda")
    nvidia = "NVIDIA" in (known(facts, "gpu", "vendors") or [])
    if nvidia and driver is not None and not driver["usable"]:
        yield (
            f"There is a GPU, but its driver cannot be used: {driver['reason']}.",
            "CUDA tensors cannot be transferred.",
            "install the NVIDIA driver, or in a container use docker run --gpus all ...; nvidia-smi shows whether it "
            "works",
        )


@_rule("speed", "file_system")
def _file_system(facts: Facts) -> Iterator[tuple[str, str, str]]:
    system = known(facts, "file_system")
    if system is None or _is_pseudo_file_system(facts):
        return
    path, kind = facts["path"], system["type"]
    if system["in_memory"]:
        yield (
            f"{path} is in memory ({kind}).",
            "Files there take memory, and measurements there do not show the speed of a drive.",
            "use a folder on a drive (findmnt lists all mounts)",
        )
        return
    if kind == "overlay":
        yield (
            f"{path} is in a container's writable layer (overlay).",
            "The first write to a file of the image copies the whole file. The report cannot see the drive below, nor "
            "its queue and request limits.",
            "use docker run -v /folder/on/the/drive:/data ..., and put the files into /data",
        )
    if known(system, "direct_io", "works") is False:
        journal = "data=journal" in system["options"].split(",")
        other = "use a file system such as ext4 or XFS on a local drive"
        yield (
            f"Direct I/O does not work on this {kind}: {system['direct_io']['reason']}.",
            "All data passes through the page cache, which costs a copy in each direction, and memory.",
            "mount it without data=journal" if journal else other,
        )


@_rule("speed", "file_system")
def _far(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Report a low limit of the kernel's concurrent requests, or of its read-ahead, for a network mount."""
    far = known(facts, "file_system", "far")
    if far is None or _is_pseudo_file_system(facts):
        return
    device = facts["file_system"]["device"]
    at_once, read_ahead_kb = far["fuse_max_background"], far["read_ahead_kb"]
    if at_once is not None and at_once < _FUSE_REQUESTS:
        connection = device.partition(":")[2]
        yield (
            f"FUSE has at most {at_once} requests in flight for direct reads and for the kernel's read-ahead.",
            f"With 10 ms for each request, of 1 MiB or less, that is at most {at_once * 0.105:.2g} GB/s.",
            f"echo 128 > /sys/fs/fuse/connections/{connection}/max_background, or set the server's option "
            "max_background",
        )
    if read_ahead_kb is not None and read_ahead_kb <= _SMALL_READ_AHEAD_KB:
        yield (
            f"The kernel reads {read_ahead_kb} KiB ahead on this mount.",
            "Programs that map files or read them through the page cache (safetensors itself, cp, direct=False) wait "
            "for the server after each such range. tensorferry uses direct I/O, with many concurrent reads.",
            f"echo 4096 > /sys/class/bdi/{device}/read_ahead_kb",
        )


@_rule("speed", "engines")
def _refused(facts: Facts) -> Iterator[tuple[str, str, str]]:
    engines = known(facts, "engines", "available") or {}
    instead = next((name for name, reason in engines.items() if not reason), "")
    consequences = {
        "libaio": "Linux AIO replaces it. It is as fast for large direct transfers, but blocks in the page cache.",
        "threads": "Threads are used instead: each block takes a system call, and each worker has at most 32 blocks in "
        "flight.",
    }
    for name, reason in engines.items():
        if reason:
            cause, _, remedy = reason.partition("remedy: ")
            yield (
                f"The engine {name} is refused: {cause.rstrip('; ')}.",
                consequences.get(instead, "No engine is left."),
                remedy or "use a kernel, or a container profile, that allows it",
            )


@_rule("speed", "engines")
def _contexts(facts: Facts) -> Iterator[tuple[str, str, str]]:
    maximum, used = known(facts, "system", "aio_max_nr"), known(facts, "system", "aio_nr")
    if maximum is None or used is None or known(facts, "engines", "chosen") != "libaio":
        return
    # A handle of queue depth 128 reserves 129 requests for each worker (csrc/engine/libaio.cpp).
    handles = (maximum - used) // 129
    if handles < 64:
        yield (
            f"The kernel's limit of asynchronous requests, fs.aio-max-nr = {maximum}, leaves {maximum - used}, enough "
            f"for {handles} more handles of queue depth 128.",
            "Further handles use threads.",
            "sysctl -w fs.aio-max-nr=1048576",
        )


@_rule("speed", "limits")
def _throttled(facts: Facts) -> Iterator[tuple[str, str, str]]:
    names = {device["number"]: device["name"] for device in _devices(facts)}
    for limit in known(facts, "limits") or []:
        if limit["device"] in names:
            words = [
                f"{limit[key] / scale:,.10g} {what}"
                for key, (scale, what) in _LIMITS.items()
                if key in limit
            ]
            yield (
                f"A control group limits {names[limit['device']]} to {' and '.join(words)}.",
                "No setting can exceed this limit.",
                "start the container without --device-read-bps and similar options, or raise io.max of its group",
            )


@_rule("speed", "devices")
def _drives(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for device in _devices(facts):
        name = device["name"]
        largest = device.get("max_hw_sectors_kb") or 0
        maximum = device.get("max_sectors_kb") or _BLOCK_KB
        if maximum < min(_BLOCK_KB, largest):
            yield (
                f"{name} accepts at most {maximum} KiB in one request, although its hardware supports more.",
                f"Each block of 1M becomes {-(-_BLOCK_KB // maximum)} requests.",
                f"echo {min(largest, _LARGE_BLOCK_KB)} > /sys/block/{name}/queue/max_sectors_kb",
            )
        if device["kind"] == "loop device" and not device["direct_io"]:
            yield (
                f"The loop device {name} uses the page cache.",
                "All data is copied an additional time, and is in memory twice.",
                f"losetup --direct-io=on /dev/{name}",
            )
        for link in device.get("pcie", []):
            reached, possible = link["gb_per_second"], link["gb_per_second_max"]
            if reached and possible and reached < possible:
                yield (
                    f"{name} runs at {link['link']}, and supports {link['link_max']}.",
                    f"Its link carries {reached:g} of {possible:g} GB/s.",
                    f"use another slot; lspci -vv -s {link['address']} shows the limit",
                )


@_rule("speed", "system")
def _small_pages(facts: Facts) -> Iterator[tuple[str, str, str]]:
    if known(facts, "system", "transparent_huge_pages") == "never":
        yield (
            "Transparent huge pages are disabled.",
            "tensorferry's buffers consist of pages of 4 KiB, which needs several times the processor time for each "
            "GB, and makes requests to the drive smaller.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


@_rule("hint", "gpu")
def _torch_without_gpus(facts: Facts) -> Iterator[tuple[str, str, str]]:
    torch = known(facts, "libraries", "torch") or {}
    if known(facts, "gpu", "vendors") and known(torch, "version") and not known(torch, "gpus"):
        reason = (torch["gpus"] or {}).get("unknown", "it does not find any")
        yield (
            f"There are GPUs, but torch cannot use them: {reason}.",
            "Tensors can only be in host memory.",
            "install a CUDA (or ROCm) build of torch, and the GPU's driver: see pytorch.org/get-started",
        )


@_rule("hint", "gpu")
def _cufile(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Report why transfers do not bypass host memory, if CUDA's driver works."""
    cufile = known(facts, "gpu", "cufile")
    if cufile is None or not known(facts, "gpu", "cuda", "usable"):
        return
    if not cufile["usable"]:
        yield (
            f"cuFile cannot be used: {cufile['reason'].partition('; remedy: ')[0]}.",
            "gds_handle is unavailable. aio_handle and all other functions transfer CUDA tensors without it.",
            _cufile_wheel(known(facts, "gpu", "nvidia_driver")),
        )
    elif cufile["mode"] == "compat":
        yield (
            "cuFile works only in compatibility mode: the kernel module nvidia-fs and PCI P2P DMA are unavailable.",
            "Transfers between the drive and the GPU pass through host memory. gds_handle transfers CUDA tensors as "
            "aio_handle does, with the same speed.",
            "modprobe nvidia-fs on the host (from the package nvidia-gds), with a drive and a file system that NVIDIA "
            "lists as supported by GPUDirect Storage",
        )


def _cufile_wheel(driver: str | None) -> str:
    """Return the command that installs the right cuFile for the driver. Drivers from version 580 on support CUDA 13."""
    new, old = "pip install nvidia-cufile", "pip install nvidia-cufile-cu12"
    version = (driver or "").partition(".")[0]
    if not version.isdigit():
        return f"{new} (for drivers from 580 on, CUDA 13), or {old}"
    return new if int(version) >= _FIRST_DRIVER_OF_CUDA_13 else old


@_rule("hint", "libraries")
def _deepspeeds_own(facts: Facts) -> Iterator[tuple[str, str, str]]:
    if known(facts, "libraries", "deepspeed", "served_by") == "deepspeed":
        yield (
            "DeepSpeed uses its own async_io.",
            "It is compiled at its first use, and loses data silently in cases where tensorferry raises an error.",
            "use TENSORFERRY_DEEPSPEED=1 in the environment, or tensorferry.deepspeed.install() before DeepSpeed is "
            "used",
        )


@_rule("hint", "devices")
def _queues(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for device in _devices(facts):
        name, scheduler = device["name"], device.get("scheduler")
        if scheduler == "bfq" or (device["kind"] == "NVMe drive" and scheduler != "none"):
            yield (
                f"{name} uses the I/O scheduler {scheduler}.",
                "It costs processor time for each request, and NVMe drives order their requests internally.",
                f"echo none > /sys/block/{name}/queue/scheduler",
            )
        if device["kind"] == "dm-crypt":
            name = device["model"] or name
            yield (
                f"{name} is encrypted (dm-crypt).",
                "Encryption costs processor time for each byte, and passes requests to other threads.",
                f"cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {name}",
            )


@_rule("hint", "devices")
def _numa(facts: Facts) -> Iterator[tuple[str, str, str]]:
    nodes = known(facts, "system", "numa_nodes") or 1
    near = {device.get("numa_node") for device in _devices(facts)} - {None}
    if nodes > 1 and len(near) == 1:
        node = near.pop()
        yield (
            f"The drive is attached to NUMA node {node} of {nodes}.",
            "With processors or memory of other nodes, each byte crosses the link between the sockets.",
            f"numactl --cpunodebind={node} --membind={node} python ...",
        )


def _devices(facts: Facts) -> list[Facts]:
    return [device for device in known(facts, "devices") or [] if not is_unknown(device)]
