"""What the facts about a machine mean, and the command that helps, most important first.

Each rule looks at one finding. Nothing is said where a fact is unknown, nor where all is well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.tuning.machine.devices import flat
from tensorferry.tuning.machine.probe import Facts, is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEVELS = ("stops", "speed", "hint")

_GIB = 1 << 30
_BLOCK_KB = 1024  # of a handle's default settings
_LARGE_BLOCK_KB = 4096
_FIRST_DRIVER_OF_CUDA_13 = 580


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes
    ----------
    level : str
        "stops" (I/O cannot be done), "speed" (it is slower than it need be) or "hint".
    about : str
        The part of the report that it comes from.
    finding, meaning : str
        What was found, and what follows from it.
    remedy : str
        What helps: a command wherever there is one.
    """

    level: str
    about: str
    finding: str
    meaning: str
    remedy: str


def advise(facts: Facts) -> list[Advice]:
    """Return what follows from a report's facts, most important first."""
    found = [advice for rule in _RULES for advice in rule(facts)]
    return sorted(found, key=lambda advice: LEVELS.index(advice.level))


def known(facts: Facts, *keys: str) -> Any:
    """Return the fact under these keys, or None where there is none or it is unknown."""
    found: Any = facts
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return None if is_unknown(found) else found


def _access(facts: Facts) -> Iterator[Advice]:
    space = known(facts, "file_system", "space")
    if space is None:
        return
    path = facts["path"]
    if _is_the_kernels(facts):
        yield Advice(
            "stops",
            "file_system",
            f"{path} belongs to the kernel ({facts['file_system'].get('type')}): no drive is behind it.",
            "It holds no files of yours; nothing here can be measured or tuned.",
            "a folder on a drive (findmnt lists what is mounted where)",
        )
    elif space["read_only"]:
        point = facts["file_system"]["mount_point"]
        yield Advice(
            "stops",
            "file_system",
            f"The file system at {point} is mounted read-only.",
            "Files can be read, not written.",
            f"mount -o remount,rw {point}",
        )
    elif not space["writable"]:
        yield Advice(
            "stops",
            "file_system",
            f"{path} is not writable for this user.",
            "Files can be read, not written.",
            f"chown $USER {path}, or another folder",
        )
    elif space["free_nbytes"] < _GIB:
        yield Advice(
            "stops",
            "file_system",
            f"{space['free_nbytes'] / (1 << 20):.0f} MiB are free.",
            "Writes beyond that raise ENOSPC; benchmarks and tune need some GiB.",
            f"df -h {path}; remove files or choose another file system",
        )


def _is_the_kernels(facts: Facts) -> bool:
    """Return whether what is there are no files, but what the kernel has to say: /proc, /sys and the like."""
    return bool(known(facts, "file_system", "space", "nbytes") == 0)


def _engines(facts: Facts) -> Iterator[Advice]:
    engines = known(facts, "engines", "available") or {}
    refused = {name: reason for name, reason in engines.items() if reason}
    forced = known(facts, "engines", "forced")
    if forced:
        yield Advice(
            "hint",
            "engines",
            f"TENSORFERRY_ENGINE={forced} forces the engine.",
            "The faster ones are not tried, and nothing else is used where this one fails.",
            "unset TENSORFERRY_ENGINE",
        )
    instead = next((name for name, reason in engines.items() if not reason), None)
    what_follows = {
        "libaio": "Linux AIO takes its place: as fast for large direct transfers; through the page cache it blocks.",
        "threads": "Threads take its place: a system call for each block, at most 32 in flight for each worker.",
    }
    for name, reason in refused.items():
        cause, _, remedy = reason.partition("remedy: ")
        yield Advice(
            "speed",
            "engines",
            f"The engine {name} is refused: {cause.rstrip('; ')}.",
            what_follows.get(instead or "", "No engine is left."),
            remedy or "a kernel, or a container profile, that allows it",
        )


def _contexts(facts: Facts) -> Iterator[Advice]:
    maximum, used = known(facts, "kernel", "aio_max_nr"), known(facts, "kernel", "aio_nr")
    if maximum is None or used is None or known(facts, "engines", "chosen") != "libaio":
        return
    handles = (maximum - used) // 129
    if handles < 64:
        yield Advice(
            "speed",
            "kernel",
            f"{maximum - used} of fs.aio-max-nr = {maximum} are left: {handles} more handles of queue depth 128.",
            "Handles made after that work by threads.",
            "sysctl -w fs.aio-max-nr=1048576",
        )


def _file_system(facts: Facts) -> Iterator[Advice]:
    system = known(facts, "file_system")
    if system is None or _is_the_kernels(facts):
        return
    if system["in_memory"]:
        yield Advice(
            "speed",
            "file_system",
            f"{facts['path']} lies in memory ({system['type']}).",
            "What is written there takes memory, and what is measured there says nothing about a drive.",
            "a folder on a drive (findmnt lists what is mounted where)",
        )
        return
    if system["type"] == "overlay":
        yield Advice(
            "speed",
            "file_system",
            f"{facts['path']} is in a container's own layer (overlay).",
            "The first write to a file of the image copies it; the drive and its limits cannot be seen from here.",
            "docker run -v /folder/on/the/drive:/data ..., and files in /data",
        )
    if known(system, "direct_io", "works") is False:
        reason = system["direct_io"]["reason"]
        journal = "data=journal" in system["options"].split(",")
        yield Advice(
            "speed",
            "file_system",
            f"Direct I/O does not work on {system['type']} here: {reason}.",
            "All goes through the page cache: a copy each way, and memory that others would use.",
            "mount it without data=journal"
            if journal
            else "a file system such as ext4 or XFS on a local drive",
        )


def _memory_alignment(facts: Facts) -> Iterator[Advice]:
    alignment = known(facts, "file_system", "direct_io", "memory_alignment")
    if alignment is not None and alignment > 64:
        yield Advice(
            "hint",
            "file_system",
            f"Direct I/O takes memory at multiples of {alignment} bytes.",
            "torch's large CPU tensors lie at 64 modulo 4096, so they are copied on the way, block by block.",
            "tensorferry.empty(shape, dtype), or a handle's new_cpu_locked_tensor, for buffers that are used again",
        )


def _profile(facts: Facts) -> Iterator[Advice]:
    profile, system = known(facts, "profile"), known(facts, "file_system")
    if not profile or not system or system["in_memory"] or "mount_point" not in system:
        return
    if _is_the_kernels(facts):
        return
    if profile["file"] is not None and profile["settings"] is None:
        yield Advice(
            "hint",
            "profile",
            "This file system has not been tuned.",
            "Handles and files without explicit settings use the defaults there.",
            f"tensorferry tune {facts['path']}",
        )


def _control_groups(facts: Facts) -> Iterator[Advice]:
    numbers = {device["number"]: device["name"] for device in _devices(facts)}
    for limit in known(facts, "control_groups", "io") or []:
        if limit["device"] not in numbers:
            continue
        words = [
            f"{limit[key] / 1e6:g} MB/s of {what}" for key, what in _BPS.items() if key in limit
        ]
        words += [f"{limit[key]:,} {what} a second" for key, what in _IOPS.items() if key in limit]
        yield Advice(
            "speed",
            "control_groups",
            f"A control group limits {numbers[limit['device']]} to {' and '.join(words)}.",
            "No setting gets beyond that.",
            "start the container without --device-read-bps and the like, or raise io.max of its group",
        )
    cpus = known(facts, "control_groups", "cpus")
    if cpus is not None and cpus < 1:
        yield Advice(
            "speed",
            "control_groups",
            f"A control group limits this process to {cpus:g} processors.",
            "When the share of a period is used up, I/O stands still until the next one.",
            "docker run --cpus 2 ..., or raise cpu.max of the group",
        )


_BPS = {"rbps": "reads", "wbps": "writes"}
_IOPS = {"riops": "reads", "wiops": "writes"}


def _drives(facts: Facts) -> Iterator[Advice]:
    for device in _devices(facts):
        name, queue = device["name"], device.get("queue", {})
        hardware_kb = queue.get("max_hw_sectors_kb", 0)
        if queue.get("max_sectors_kb", _BLOCK_KB) < min(_BLOCK_KB, hardware_kb):
            pieces = -(-_BLOCK_KB // queue["max_sectors_kb"])
            yield Advice(
                "speed",
                "devices",
                f"{name} takes at most {queue['max_sectors_kb']} KiB in one request, though it could take more.",
                f"Each block of 1M becomes {pieces} requests.",
                f"echo {min(hardware_kb, _LARGE_BLOCK_KB)} > /sys/block/{name}/queue/max_sectors_kb",
            )
        if queue.get("scheduler") == "bfq" or (
            device["kind"] == "NVMe drive" and queue["scheduler"] != "none"
        ):
            yield Advice(
                "hint",
                "devices",
                f"{name} has the I/O scheduler {queue['scheduler']}.",
                "It costs processor time for each request; NVMe drives order their requests themselves.",
                f"echo none > /sys/block/{name}/queue/scheduler",
            )
        if device["kind"] == "SCSI or SATA disk" and device["rotational"]:
            yield Advice(
                "hint",
                "devices",
                f"{name} is a hard disk, as far as the kernel knows.",
                "It gives 0.1 to 0.3 GB/s for large requests and about 100 small ones a second, whatever the settings.",
                "a folder on an SSD (lsblk -o NAME,ROTA,MODEL,MOUNTPOINT lists the drives)",
            )
        if device["kind"] == "loop device" and not device["direct_io"]:
            yield Advice(
                "speed",
                "devices",
                f"The loop device {name} goes through the page cache.",
                "Everything is copied once more, and lies in memory twice.",
                f"losetup --direct-io=on /dev/{name}",
            )
        if device["kind"] == "dm-crypt":
            yield Advice(
                "hint",
                "devices",
                f"{device['model'] or name} is encrypted (dm-crypt).",
                "Encryption costs processor time for each byte, and hands requests to other threads.",
                f"cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {device['model'] or name}",
            )
        yield from _links(device)


def _links(device: Facts) -> Iterator[Advice]:
    for controller in device.get("controllers", []):
        link = controller["pcie"]
        if link is None or not link["gb_per_second"] or not link["gb_per_second_max"]:
            continue
        if link["gb_per_second"] < link["gb_per_second_max"]:
            yield Advice(
                "speed",
                "devices",
                f"{device['name']} runs at {link['speed']} x{link['width']}, and is made for {link['speed_max']} "
                f"x{link['width_max']}.",
                f"Its link carries {link['gb_per_second']:g} of {link['gb_per_second_max']:g} GB/s.",
                f"another slot; lspci -vv -s {link['address']} shows what limits it",
            )


def _numa(facts: Facts) -> Iterator[Advice]:
    nodes = known(facts, "processors", "numa_nodes") or {}
    near = {device.get("numa_node") for device in _devices(facts)} - {None}
    if len(nodes) > 1 and len(near) == 1:
        (node,) = near
        yield Advice(
            "hint",
            "devices",
            f"The drive belongs to NUMA node {node} of {len(nodes)}.",
            "From processors and memory of other nodes each byte crosses between the sockets.",
            f"numactl --cpunodebind={node} --membind={node} python ...",
        )


def _huge_pages(facts: Facts) -> Iterator[Advice]:
    if known(facts, "memory", "huge_pages", "transparent") == "never":
        yield Advice(
            "speed",
            "memory",
            "Transparent huge pages are switched off.",
            "Buffers of tensorferry lie on pages of 4 KiB: several times the processor time for each GB, and smaller "
            "requests to the drive.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _limits(facts: Facts) -> Iterator[Advice]:
    locked = known(facts, "limits", "locked_memory")
    if locked and not locked["exempt"] and locked["soft"] is not None and locked["soft"] < _GIB:
        yield Advice(
            "hint",
            "limits",
            f"RLIMIT_MEMLOCK is {locked['soft'] >> 10} KiB.",
            "Beyond it new_cpu_locked_tensor and tensorferry.empty give ordinary memory, with a warning; their speed "
            "is the same, but it can be swapped out. DeepSpeed's own engine ends the process there.",
            "ulimit -l unlimited"
            if locked["hard"] is None
            else "docker run --ulimit memlock=-1 ..., or '* - memlock unlimited' in /etc/security/limits.conf",
        )
    descriptors = known(facts, "limits", "descriptors")
    if descriptors and descriptors["soft"] is not None and descriptors["soft"] < 4096:
        hard = descriptors["hard"]
        more = 65536 if hard is None else min(hard, 65536)
        yield Advice(
            "hint",
            "limits",
            f"The process may have {descriptors['soft']} open files.",
            "Half of them are for transfers: read_many and write_many of more files take turns.",
            f"ulimit -n {more}"
            if more > descriptors["soft"]
            else "docker run --ulimit nofile=65536 ..., or '* - nofile 65536' in /etc/security/limits.conf",
        )


def _gpus(facts: Facts) -> Iterator[Advice]:
    cards = known(facts, "gpu", "nvidia") or known(facts, "gpu", "on_pci")
    if not cards:
        return
    if any(card.get("vendor", "NVIDIA") == "NVIDIA" for card in cards):
        yield from _cuda_driver(facts)
    torch_gpus = known(facts, "libraries", "torch", "gpus")
    if known(facts, "libraries", "torch", "version") and not torch_gpus:
        reason = (facts["libraries"]["torch"]["gpus"] or {}).get("unknown", "it finds none")
        yield Advice(
            "hint",
            "gpu",
            f"There are GPUs, but torch cannot use them: {reason}.",
            "Tensors are in host memory only.",
            "a CUDA (or ROCm) build of torch, and the GPU's driver: see pytorch.org/get-started",
        )


def _cuda_driver(facts: Facts) -> Iterator[Advice]:
    driver = known(facts, "gpu", "cuda")
    if driver is not None and not driver["usable"]:
        yield Advice(
            "stops",
            "gpu",
            f"There is a GPU, but its driver cannot be used: {driver['reason']}.",
            "CUDA tensors cannot be moved.",
            "the NVIDIA driver, in containers docker run --gpus all ...; nvidia-smi shows whether it works",
        )


def _cufile(facts: Facts) -> Iterator[Advice]:
    """Say why transfers do not bypass host memory, where CUDA's driver works, so that they might."""
    cufile = known(facts, "gpudirect_storage", "cufile")
    if cufile is None or not known(facts, "gpu", "cuda", "usable"):
        return
    if not cufile["usable"]:
        yield Advice(
            "hint",
            "gpudirect_storage",
            f"cuFile cannot be used: {cufile['reason'].partition('; remedy: ')[0]}.",
            "There is no gds_handle; aio_handle and all other functions move CUDA tensors without it.",
            _cufile_wheel(known(facts, "gpu", "nvidia")),
        )
    elif cufile["mode"] == "compat":
        yield Advice(
            "hint",
            "gpudirect_storage",
            "cuFile works in its compatible mode only: neither the kernel module nvidia-fs nor PCI P2P DMA is there.",
            "What is lost is the way from the drive to the GPU without host memory; gds_handle moves CUDA tensors as "
            "aio_handle does, so either is as good.",
            "modprobe nvidia-fs on the host (of the package nvidia-gds), and a drive and file system that "
            "NVIDIA's GPUDirect Storage lists as supported",
        )


def _cufile_wheel(cards: list[Facts] | None) -> str:
    """Return how to get the cuFile that suits the driver: its branches from 580 on support CUDA 13."""
    new, old = "pip install nvidia-cufile", "pip install nvidia-cufile-cu12"
    version = (cards or [{}])[0].get("driver", "").partition(".")[0]
    if not version.isdigit():
        return f"{new} (for drivers from 580 on, CUDA 13), or {old}"
    return new if int(version) >= _FIRST_DRIVER_OF_CUDA_13 else old


def _deepspeed(facts: Facts) -> Iterator[Advice]:
    operation = known(facts, "libraries", "deepspeed", "ops", "async_io")
    if operation is None or operation["served_by"] == "tensorferry":
        return
    remedy = "TENSORFERRY_DEEPSPEED=1 in the environment, or tensorferry.deepspeed.install()"
    if operation["reason"] is None:
        yield Advice(
            "hint",
            "libraries",
            "DeepSpeed's async_io is its own.",
            "It is compiled when it is first used, and loses data silently where tensorferry raises.",
            f"{remedy} before DeepSpeed is used",
        )
    else:
        yield Advice(
            "stops",
            "libraries",
            f"DeepSpeed cannot build its async_io: {operation['reason'].rstrip('.')}.",
            "Offloading to NVMe fails with its own engine.",
            f"{remedy}; or, for its own, apt install libaio-dev g++ ninja-build",
        )


def _deepspeed_gds(facts: Facts) -> Iterator[Advice]:
    operation = known(facts, "libraries", "deepspeed", "ops", "gds")
    if (
        operation is None
        or operation["served_by"] == "tensorferry"
        or not known(facts, "gpu", "nvidia")
    ):
        return
    if operation["reason"] is not None:
        yield Advice(
            "hint",
            "libraries",
            f"DeepSpeed cannot build its gds: {operation['reason'].rstrip('.')}.",
            "Its gds_handle is not available.",
            "TENSORFERRY_DEEPSPEED=1 in the environment, whose gds_handle is not compiled; or, for its own, the CUDA "
            "toolkit with cuFile, and CUDA_HOME set to its folder",
        )


def _devices(facts: Facts) -> list[Facts]:
    return flat(known(facts, "devices") or [])


_RULES: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    _access,
    _gpus,
    _cufile,
    _deepspeed,
    _deepspeed_gds,
    _file_system,
    _engines,
    _contexts,
    _control_groups,
    _drives,
    _huge_pages,
    _profile,
    _memory_alignment,
    _numa,
    _limits,
)
