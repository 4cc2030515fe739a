"""What the facts about a machine mean, and the command that helps, most important first.

Each rule looks at one part of the report and yields what it found, what follows from it, and what helps. Nothing is
said where a fact is unknown, where all is well, or where nobody could change anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.tuning.machine.devices import flat
from tensorferry.tuning.machine.probe import Facts, is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Look = Callable[[Facts], Iterator[tuple[str, str, str]]]

LEVELS = ("stops", "speed", "hint")

_GIB = 1 << 30
_SMALL_READ_AHEAD_KB = 128  # the kernel's own default
_FUSE_REQUESTS = 32  # of 1 MiB, that the library has on their way in any case
_BLOCK_KB, _LARGE_BLOCK_KB = 1024, 4096  # of a handle's default settings
_FIRST_DRIVER_OF_CUDA_13 = 580
_SERVED = "TENSORFERRY_DEEPSPEED=1 in the environment, or tensorferry.deepspeed.install()"


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


@dataclass(frozen=True)
class Rule:
    """What looks at facts, and how important, and of which part of the report, its findings are."""

    level: str
    about: str
    look: Look


_RULES: list[Rule] = []  # in the order of what is as important


def _rule(level: str, about: str) -> Callable[[Look], Look]:
    def decorated(look: Look) -> Look:
        _RULES.append(Rule(level, about, look))
        return look

    return decorated


def advise(facts: Facts) -> list[Advice]:
    """Return what follows from a report's facts, most important first."""
    found = [
        Advice(rule.level, rule.about, *texts) for rule in _RULES for texts in rule.look(facts)
    ]
    return sorted(found, key=lambda each: LEVELS.index(each.level))


def known(facts: Facts, *keys: str) -> Any:
    """Return the fact under these keys, or None where there is none or it is unknown."""
    found: Any = facts
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return None if is_unknown(found) else found


def _is_the_kernels(facts: Facts) -> bool:
    """Return whether what is there are no files, but what the kernel has to say: /proc, /sys and the like."""
    return bool(known(facts, "file_system", "space", "nbytes") == 0)


@_rule("stops", "file_system")
def _access(facts: Facts) -> Iterator[tuple[str, str, str]]:
    space, path = known(facts, "file_system", "space"), facts["path"]
    if space is None:
        return
    system = facts["file_system"]
    if _is_the_kernels(facts):
        yield (
            f"{path} belongs to the kernel ({system.get('type')}): no drive is behind it.",
            "It holds no files of yours; nothing here can be measured or tuned.",
            "a folder on a drive (findmnt lists what is mounted where)",
        )
    elif space["read_only"]:
        point = system["mount_point"]
        yield (
            f"The file system at {point} is mounted read-only.",
            "Files can be read, not written.",
            f"mount -o remount,rw {point}",
        )
    elif not space["writable"]:
        yield (
            f"{path} is not writable for this user.",
            "Files can be read, not written.",
            f"chown $USER {path}, or another folder",
        )
    elif space["free_nbytes"] < _GIB:
        yield (
            f"{space['free_nbytes'] / (1 << 20):.0f} MiB are free.",
            "Writes beyond that raise ENOSPC; benchmarks and tune need some GiB.",
            f"df -h {path}; remove files or choose another file system",
        )


@_rule("stops", "gpu")
def _gpu_driver(facts: Facts) -> Iterator[tuple[str, str, str]]:
    cards = known(facts, "gpu", "nvidia") or known(facts, "gpu", "on_pci") or []
    driver = known(facts, "gpu", "cuda")
    nvidia = any(card.get("vendor", "NVIDIA") == "NVIDIA" for card in cards)
    if nvidia and driver is not None and not driver["usable"]:
        yield (
            f"There is a GPU, but its driver cannot be used: {driver['reason']}.",
            "CUDA tensors cannot be moved.",
            "the NVIDIA driver, in containers docker run --gpus all ...; nvidia-smi shows whether it works",
        )


@_rule("stops", "libraries")
def _deepspeed_lacks(facts: Facts) -> Iterator[tuple[str, str, str]]:
    operation = known(facts, "libraries", "deepspeed", "ops", "async_io") or {}
    if operation.get("served_by") == "deepspeed" and operation["reason"] is not None:
        yield (
            f"DeepSpeed cannot build its async_io: {operation['reason'].rstrip('.')}.",
            "Offloading to NVMe fails with its own engine.",
            f"{_SERVED}; or, for its own, apt install libaio-dev g++ ninja-build",
        )


@_rule("speed", "file_system")
def _file_system(facts: Facts) -> Iterator[tuple[str, str, str]]:
    system = known(facts, "file_system")
    if system is None or _is_the_kernels(facts):
        return
    path, kind = facts["path"], system["type"]
    if system["in_memory"]:
        yield (
            f"{path} lies in memory ({kind}).",
            "What is written there takes memory, and what is measured there says nothing about a drive.",
            "a folder on a drive (findmnt lists what is mounted where)",
        )
        return
    if kind == "overlay":
        yield (
            f"{path} is in a container's own layer (overlay).",
            "The first write to a file of the image copies it; the drive and its limits cannot be seen from here.",
            "docker run -v /folder/on/the/drive:/data ..., and files in /data",
        )
    if known(system, "direct_io", "works") is False:
        journal = "data=journal" in system["options"].split(",")
        other = "a file system such as ext4 or XFS on a local drive"
        yield (
            f"Direct I/O does not work on {kind} here: {system['direct_io']['reason']}.",
            "All goes through the page cache: a copy each way, and memory that others would use.",
            "mount it without data=journal" if journal else other,
        )


@_rule("speed", "file_system")
def _far(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Say what the kernel keeps on its way to the server of a network mount, where that is little."""
    far = known(facts, "file_system", "far")
    if far is None or _is_the_kernels(facts):
        return
    device = facts["file_system"]["device"]
    at_once, read_ahead_kb = far["fuse_max_background"], far["read_ahead_kb"]
    if at_once is not None and at_once < _FUSE_REQUESTS:
        connection = device.partition(":")[2]
        yield (
            f"FUSE has at most {at_once} requests of direct reads, or of the kernel's reading ahead, on their way.",
            f"With 10 ms a request, each of 1 MiB or less, that is at most {at_once * 0.105:.2g} GB/s.",
            f"echo 128 > /sys/fs/fuse/connections/{connection}/max_background, or the server's option max_background",
        )
    if read_ahead_kb is not None and read_ahead_kb <= _SMALL_READ_AHEAD_KB:
        yield (
            f"The kernel reads {read_ahead_kb} KiB ahead on this mount.",
            "What maps its files or reads them through the page cache (safetensors itself, cp, direct=False) waits for "
            "the server again after that much. tensorferry's reads go past the page cache, many at once.",
            f"echo 4096 > /sys/class/bdi/{device}/read_ahead_kb",
        )


@_rule("speed", "engines")
def _refused(facts: Facts) -> Iterator[tuple[str, str, str]]:
    engines = known(facts, "engines", "available") or {}
    instead = next((name for name, reason in engines.items() if not reason), "")
    what_follows = {
        "libaio": "Linux AIO takes its place: as fast for large direct transfers; through the page cache it blocks.",
        "threads": "Threads take its place: a system call for each block, at most 32 in flight for each worker.",
    }
    for name, reason in engines.items():
        if reason:
            cause, _, remedy = reason.partition("remedy: ")
            yield (
                f"The engine {name} is refused: {cause.rstrip('; ')}.",
                what_follows.get(instead, "No engine is left."),
                remedy or "a kernel, or a container profile, that allows it",
            )


@_rule("speed", "kernel")
def _contexts(facts: Facts) -> Iterator[tuple[str, str, str]]:
    maximum, used = known(facts, "kernel", "aio_max_nr"), known(facts, "kernel", "aio_nr")
    if maximum is None or used is None or known(facts, "engines", "chosen") != "libaio":
        return
    handles = (maximum - used) // 129
    if handles < 64:
        yield (
            f"{maximum - used} of fs.aio-max-nr = {maximum} are left: {handles} more handles of queue depth 128.",
            "Handles made after that work by threads.",
            "sysctl -w fs.aio-max-nr=1048576",
        )


@_rule("speed", "control_groups")
def _throttled(facts: Facts) -> Iterator[tuple[str, str, str]]:
    names = {device["number"]: device["name"] for device in _devices(facts)}
    for limit in known(facts, "control_groups", "io") or []:
        if limit["device"] in names:
            words = [
                f"{limit[key] / 1e6:g} MB/s of {what}"
                for key, what in (("rbps", "reads"), ("wbps", "writes"))
                if key in limit
            ]
            words += [
                f"{limit[key]:,} {what} a second"
                for key, what in (("riops", "reads"), ("wiops", "writes"))
                if key in limit
            ]
            yield (
                f"A control group limits {names[limit['device']]} to {' and '.join(words)}.",
                "No setting gets beyond that.",
                "start the container without --device-read-bps and the like, or raise io.max of its group",
            )


@_rule("speed", "devices")
def _drives(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for device in _devices(facts):
        name, queue = device["name"], device.get("queue", {})
        largest, maximum = queue.get("max_hw_sectors_kb", 0), queue.get("max_sectors_kb", _BLOCK_KB)
        if maximum < min(_BLOCK_KB, largest):
            yield (
                f"{name} takes at most {maximum} KiB in one request, though it could take more.",
                f"Each block of 1M becomes {-(-_BLOCK_KB // maximum)} requests.",
                f"echo {min(largest, _LARGE_BLOCK_KB)} > /sys/block/{name}/queue/max_sectors_kb",
            )
        if device["kind"] == "loop device" and not device["direct_io"]:
            yield (
                f"The loop device {name} goes through the page cache.",
                "Everything is copied once more, and lies in memory twice.",
                f"losetup --direct-io=on /dev/{name}",
            )
        for controller in device.get("controllers", []):
            link = controller["pcie"] or {}
            reached, possible = link.get("gb_per_second"), link.get("gb_per_second_max")
            if reached and possible and reached < possible:
                yield (
                    f"{name} runs at {link['speed']} x{link['width']}, and is made for {link['speed_max']} "
                    f"x{link['width_max']}.",
                    f"Its link carries {reached:g} of {possible:g} GB/s.",
                    f"another slot; lspci -vv -s {link['address']} shows what limits it",
                )


@_rule("speed", "memory")
def _small_pages(facts: Facts) -> Iterator[tuple[str, str, str]]:
    if known(facts, "memory", "huge_pages", "transparent") == "never":
        yield (
            "Transparent huge pages are switched off.",
            "Buffers of tensorferry lie on pages of 4 KiB: several times the processor time for each GB, and smaller "
            "requests to the drive.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


@_rule("hint", "gpu")
def _torch_without_gpus(facts: Facts) -> Iterator[tuple[str, str, str]]:
    torch = known(facts, "libraries", "torch") or {}
    cards = known(facts, "gpu", "nvidia") or known(facts, "gpu", "on_pci")
    if cards and known(torch, "version") and not known(torch, "gpus"):
        reason = (torch["gpus"] or {}).get("unknown", "it finds none")
        yield (
            f"There are GPUs, but torch cannot use them: {reason}.",
            "Tensors are in host memory only.",
            "a CUDA (or ROCm) build of torch, and the GPU's driver: see pytorch.org/get-started",
        )


@_rule("hint", "gpudirect_storage")
def _cufile(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Say why transfers do not bypass host memory, where CUDA's driver works, so that they might."""
    cufile = known(facts, "gpudirect_storage", "cufile")
    if cufile is None or not known(facts, "gpu", "cuda", "usable"):
        return
    if not cufile["usable"]:
        yield (
            f"cuFile cannot be used: {cufile['reason'].partition('; remedy: ')[0]}.",
            "There is no gds_handle; aio_handle and all other functions move CUDA tensors without it.",
            _cufile_wheel(known(facts, "gpu", "nvidia")),
        )
    elif cufile["mode"] == "compat":
        yield (
            "cuFile works in its compatible mode only: neither the kernel module nvidia-fs nor PCI P2P DMA is there.",
            "What is lost is the way from the drive to the GPU without host memory; gds_handle moves CUDA tensors as "
            "aio_handle does, so either is as good.",
            "modprobe nvidia-fs on the host (of the package nvidia-gds), and a drive and file system that NVIDIA's "
            "GPUDirect Storage lists as supported",
        )


def _cufile_wheel(cards: list[Facts] | None) -> str:
    """Return how to get the cuFile that suits the driver: its branches from 580 on support CUDA 13."""
    new, old = "pip install nvidia-cufile", "pip install nvidia-cufile-cu12"
    version = (cards or [{}])[0].get("driver", "").partition(".")[0]
    if not version.isdigit():
        return f"{new} (for drivers from 580 on, CUDA 13), or {old}"
    return new if int(version) >= _FIRST_DRIVER_OF_CUDA_13 else old


@_rule("hint", "libraries")
def _deepspeeds_own(facts: Facts) -> Iterator[tuple[str, str, str]]:
    operation = known(facts, "libraries", "deepspeed", "ops", "async_io") or {}
    if operation.get("served_by") == "deepspeed" and operation["reason"] is None:
        yield (
            "DeepSpeed's async_io is its own.",
            "It is compiled when it is first used, and loses data silently where tensorferry raises.",
            f"{_SERVED} before DeepSpeed is used",
        )


@_rule("hint", "engines")
def _forced(facts: Facts) -> Iterator[tuple[str, str, str]]:
    if forced := known(facts, "engines", "forced"):
        yield (
            f"TENSORFERRY_ENGINE={forced} forces the engine.",
            "The faster ones are not tried, and nothing else is used where this one fails.",
            "unset TENSORFERRY_ENGINE",
        )


@_rule("hint", "devices")
def _queues(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for device in _devices(facts):
        name, scheduler = device["name"], device.get("queue", {}).get("scheduler")
        if scheduler == "bfq" or (device["kind"] == "NVMe drive" and scheduler != "none"):
            yield (
                f"{name} has the I/O scheduler {scheduler}.",
                "It costs processor time for each request; NVMe drives order their requests themselves.",
                f"echo none > /sys/block/{name}/queue/scheduler",
            )
        if device["kind"] == "dm-crypt":
            name = device["model"] or name
            yield (
                f"{name} is encrypted (dm-crypt).",
                "Encryption costs processor time for each byte, and hands requests to other threads.",
                f"cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {name}",
            )


@_rule("hint", "profile")
def _untuned(facts: Facts) -> Iterator[tuple[str, str, str]]:
    profile, system = known(facts, "profile"), known(facts, "file_system")
    if not profile or not system or _is_the_kernels(facts):
        return
    on_drive = "mount_point" in system and not system["in_memory"]
    if on_drive and profile["file"] is not None and not profile["settings"]:
        yield (
            "No settings are stored for this file system.",
            "Handles and files without explicit settings use the defaults there.",
            f"tensorferry tune {facts['path']}",
        )


@_rule("hint", "devices")
def _numa(facts: Facts) -> Iterator[tuple[str, str, str]]:
    nodes = known(facts, "processors", "numa_nodes") or {}
    near = {device.get("numa_node") for device in _devices(facts)} - {None}
    if len(nodes) > 1 and len(near) == 1:
        node = near.pop()
        yield (
            f"The drive belongs to NUMA node {node} of {len(nodes)}.",
            "From processors and memory of other nodes each byte crosses between the sockets.",
            f"numactl --cpunodebind={node} --membind={node} python ...",
        )


@_rule("hint", "limits")
def _locked_memory(facts: Facts) -> Iterator[tuple[str, str, str]]:
    locked = known(facts, "limits", "locked_memory")
    if locked and not locked["exempt"] and locked["soft"] is not None and locked["soft"] < _GIB:
        lasting = "docker run --ulimit memlock=-1 ..., or '* - memlock unlimited' in /etc/security/limits.conf"
        yield (
            f"RLIMIT_MEMLOCK is {locked['soft'] >> 10} KiB.",
            "Beyond it new_cpu_locked_tensor and tensorferry.empty give ordinary memory, with a warning; their speed "
            "is the same, but it can be swapped out. DeepSpeed's own engine ends the process there.",
            "ulimit -l unlimited" if locked["hard"] is None else lasting,
        )


def _devices(facts: Facts) -> list[Facts]:
    return flat(known(facts, "devices") or [])
