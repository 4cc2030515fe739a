"""What the facts about a machine mean, and the command that helps, most important first.

Each rule looks at one part and yields the names of what it found, with what the texts of the table leave open. Nothing
is said where a fact is unknown, nor where all is well.
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

# A finding's name, level, and part of the report; what was found; what follows from it; what helps.
_TABLE = """
kernel's: stops, file_system
{path} belongs to the kernel ({type}): no drive is behind it.
It holds no files of yours; nothing here can be measured or tuned.
a folder on a drive (findmnt lists what is mounted where)

read-only: stops, file_system
The file system at {point} is mounted read-only.
Files can be read, not written.
mount -o remount,rw {point}

not writable: stops, file_system
{path} is not writable for this user.
Files can be read, not written.
chown $USER {path}, or another folder

full: stops, file_system
{mib:.0f} MiB are free.
Writes beyond that raise ENOSPC; benchmarks and tune need some GiB.
df -h {path}; remove files or choose another file system

in memory: speed, file_system
{path} lies in memory ({type}).
What is written there takes memory, and what is measured there says nothing about a drive.
a folder on a drive (findmnt lists what is mounted where)

overlay: speed, file_system
{path} is in a container's own layer (overlay).
The first write to a file of the image copies it; the drive and its limits cannot be seen from here.
docker run -v /folder/on/the/drive:/data ..., and files in /data

no direct I/O: speed, file_system
Direct I/O does not work on {type} here: {reason}.
All goes through the page cache: a copy each way, and memory that others would use.
{remedy}

alignment: hint, file_system
Direct I/O takes memory at multiples of {alignment} bytes.
torch's large CPU tensors lie at 64 modulo 4096, so they are copied on the way, block by block.
tensorferry.empty(shape, dtype), or a handle's new_cpu_locked_tensor, for buffers that are used again

forced: hint, engines
TENSORFERRY_ENGINE={forced} forces the engine.
The faster ones are not tried, and nothing else is used where this one fails.
unset TENSORFERRY_ENGINE

refused: speed, engines
The engine {name} is refused: {cause}.
{instead}
{remedy}

contexts: speed, kernel
{left} of fs.aio-max-nr = {maximum} are left: {handles} more handles of queue depth 128.
Handles made after that work by threads.
sysctl -w fs.aio-max-nr=1048576

untuned: hint, profile
This file system has not been tuned.
Handles and files without explicit settings use the defaults there.
tensorferry tune {path}

throttled: speed, control_groups
A control group limits {name} to {limits}.
No setting gets beyond that.
start the container without --device-read-bps and the like, or raise io.max of its group

few processors: speed, control_groups
A control group limits this process to {cpus:g} processors.
When the share of a period is used up, I/O stands still until the next one.
docker run --cpus 2 ..., or raise cpu.max of the group

split blocks: speed, devices
{name} takes at most {maximum} KiB in one request, though it could take more.
Each block of 1M becomes {pieces} requests.
echo {better} > /sys/block/{name}/queue/max_sectors_kb

scheduler: hint, devices
{name} has the I/O scheduler {scheduler}.
It costs processor time for each request; NVMe drives order their requests themselves.
echo none > /sys/block/{name}/queue/scheduler

hard disk: hint, devices
{name} is a hard disk, as far as the kernel knows.
It gives 0.1 to 0.3 GB/s for large requests and about 100 small ones a second, whatever the settings.
a folder on an SSD (lsblk -o NAME,ROTA,MODEL,MOUNTPOINT lists the drives)

loop: speed, devices
The loop device {name} goes through the page cache.
Everything is copied once more, and lies in memory twice.
losetup --direct-io=on /dev/{name}

encrypted: hint, devices
{name} is encrypted (dm-crypt).
Encryption costs processor time for each byte, and hands requests to other threads.
cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue {name}

slow link: speed, devices
{name} runs at {speed} x{width}, and is made for {speed_max} x{width_max}.
Its link carries {gb_per_second:g} of {gb_per_second_max:g} GB/s.
another slot; lspci -vv -s {address} shows what limits it

numa: hint, devices
The drive belongs to NUMA node {node} of {nodes}.
From processors and memory of other nodes each byte crosses between the sockets.
numactl --cpunodebind={node} --membind={node} python ...

small pages: speed, memory
Transparent huge pages are switched off.
Buffers of tensorferry lie on pages of 4 KiB: several times the processor time for each GB, and smaller requests to \
the drive.
echo madvise > /sys/kernel/mm/transparent_hugepage/enabled

locked memory: hint, limits
RLIMIT_MEMLOCK is {kib} KiB.
Beyond it new_cpu_locked_tensor and tensorferry.empty give ordinary memory, with a warning; their speed is the same, \
but it can be swapped out. DeepSpeed's own engine ends the process there.
{remedy}

descriptors: hint, limits
The process may have {soft} open files.
Half of them are for transfers: read_many and write_many of more files take turns.
{remedy}

driver: stops, gpu
There is a GPU, but its driver cannot be used: {reason}.
CUDA tensors cannot be moved.
the NVIDIA driver, in containers docker run --gpus all ...; nvidia-smi shows whether it works

torch: hint, gpu
There are GPUs, but torch cannot use them: {reason}.
Tensors are in host memory only.
a CUDA (or ROCm) build of torch, and the GPU's driver: see pytorch.org/get-started

cufile: hint, gpudirect_storage
cuFile cannot be used: {reason}.
There is no gds_handle; aio_handle and all other functions move CUDA tensors without it.
{remedy}

compatible mode: hint, gpudirect_storage
cuFile works in its compatible mode only: neither the kernel module nvidia-fs nor PCI P2P DMA is there.
What is lost is the way from the drive to the GPU without host memory; gds_handle moves CUDA tensors as aio_handle \
does, so either is as good.
modprobe nvidia-fs on the host (of the package nvidia-gds), and a drive and file system that NVIDIA's GPUDirect \
Storage lists as supported

deepspeed's own: hint, libraries
DeepSpeed's async_io is its own.
It is compiled when it is first used, and loses data silently where tensorferry raises.
TENSORFERRY_DEEPSPEED=1 in the environment, or tensorferry.deepspeed.install() before DeepSpeed is used

async_io: stops, libraries
DeepSpeed cannot build its async_io: {reason}.
Offloading to NVMe fails with its own engine.
TENSORFERRY_DEEPSPEED=1 in the environment, or tensorferry.deepspeed.install(); or, for its own, apt install \
libaio-dev g++ ninja-build

gds: hint, libraries
DeepSpeed cannot build its gds: {reason}.
Its gds_handle is not available.
TENSORFERRY_DEEPSPEED=1 in the environment, whose gds_handle is not compiled; or, for its own, the CUDA toolkit with \
cuFile, and CUDA_HOME set to its folder
"""


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


def _of_table(row: str) -> tuple[str, Advice]:
    heading, *texts = row.splitlines()
    name, _, level_and_part = heading.partition(": ")
    return name, Advice(*level_and_part.split(", "), *texts)


_ADVICE = dict(map(_of_table, _TABLE.strip().split("\n\n")))

Found = tuple[str, dict[str, Any]]


def advise(facts: Facts) -> list[Advice]:
    """Return what follows from a report's facts, most important first."""
    advice = []
    for name, words in (found for rule in _RULES for found in rule(facts)):
        row = _ADVICE[name]
        texts = (text.format(**words) for text in (row.finding, row.meaning, row.remedy))
        advice.append(Advice(row.level, row.about, *texts))
    return sorted(advice, key=lambda each: LEVELS.index(each.level))


def known(facts: Facts, *keys: str) -> Any:
    """Return the fact under these keys, or None where there is none or it is unknown."""
    found: Any = facts
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return None if is_unknown(found) else found


def _access(facts: Facts) -> Iterator[Found]:
    space, path = known(facts, "file_system", "space"), facts["path"]
    if space is None:
        return
    if _is_the_kernels(facts):
        yield "kernel's", {"path": path, "type": facts["file_system"].get("type")}
    elif space["read_only"]:
        yield "read-only", {"point": facts["file_system"]["mount_point"]}
    elif not space["writable"]:
        yield "not writable", {"path": path}
    elif space["free_nbytes"] < _GIB:
        yield "full", {"mib": space["free_nbytes"] / (1 << 20), "path": path}


def _is_the_kernels(facts: Facts) -> bool:
    """Return whether what is there are no files, but what the kernel has to say: /proc, /sys and the like."""
    return bool(known(facts, "file_system", "space", "nbytes") == 0)


def _file_system(facts: Facts) -> Iterator[Found]:
    system = known(facts, "file_system")
    if system is None or _is_the_kernels(facts):
        return
    about = {"path": facts["path"], "type": system["type"]}
    if system["in_memory"]:
        yield "in memory", about
        return
    if system["type"] == "overlay":
        yield "overlay", about
    if known(system, "direct_io", "works") is False:
        remedy = "a file system such as ext4 or XFS on a local drive"
        if "data=journal" in system["options"].split(","):
            remedy = "mount it without data=journal"
        yield "no direct I/O", about | {"reason": system["direct_io"]["reason"], "remedy": remedy}


def _memory_alignment(facts: Facts) -> Iterator[Found]:
    alignment = known(facts, "file_system", "direct_io", "memory_alignment")
    if alignment is not None and alignment > 64:
        yield "alignment", {"alignment": alignment}


def _engines(facts: Facts) -> Iterator[Found]:
    engines = known(facts, "engines", "available") or {}
    if forced := known(facts, "engines", "forced"):
        yield "forced", {"forced": forced}
    instead = next((name for name, reason in engines.items() if not reason), "")
    what_follows = {
        "libaio": "Linux AIO takes its place: as fast for large direct transfers; through the page cache it blocks.",
        "threads": "Threads take its place: a system call for each block, at most 32 in flight for each worker.",
    }.get(instead, "No engine is left.")
    for name, reason in engines.items():
        if reason:
            cause, _, remedy = reason.partition("remedy: ")
            words = {"name": name, "cause": cause.rstrip("; "), "instead": what_follows}
            remedy = remedy or "a kernel, or a container profile, that allows it"
            yield "refused", words | {"remedy": remedy}


def _contexts(facts: Facts) -> Iterator[Found]:
    maximum, used = known(facts, "kernel", "aio_max_nr"), known(facts, "kernel", "aio_nr")
    if maximum is None or used is None or known(facts, "engines", "chosen") != "libaio":
        return
    handles = (maximum - used) // 129
    if handles < 64:
        yield "contexts", {"left": maximum - used, "maximum": maximum, "handles": handles}


def _profile(facts: Facts) -> Iterator[Found]:
    profile, system = known(facts, "profile"), known(facts, "file_system")
    if not profile or not system or _is_the_kernels(facts):
        return
    on_drive = "mount_point" in system and not system["in_memory"]
    if on_drive and profile["file"] is not None and profile["settings"] is None:
        yield "untuned", {"path": facts["path"]}


def _control_groups(facts: Facts) -> Iterator[Found]:
    names = {device["number"]: device["name"] for device in _devices(facts)}
    for limit in known(facts, "control_groups", "io") or []:
        if limit["device"] in names:
            bps = {"rbps": "reads", "wbps": "writes"}
            iops = {"riops": "reads", "wiops": "writes"}
            words = [f"{limit[key] / 1e6:g} MB/s of {bps[key]}" for key in bps if key in limit]
            words += [f"{limit[key]:,} {iops[key]} a second" for key in iops if key in limit]
            yield "throttled", {"name": names[limit["device"]], "limits": " and ".join(words)}
    cpus = known(facts, "control_groups", "cpus")
    if cpus is not None and cpus < 1:
        yield "few processors", {"cpus": cpus}


def _drives(facts: Facts) -> Iterator[Found]:
    for device in _devices(facts):
        queue, kind = device.get("queue", {}), device["kind"]
        words = {"name": device["name"], "scheduler": queue.get("scheduler")}
        largest, maximum = queue.get("max_hw_sectors_kb", 0), queue.get("max_sectors_kb", _BLOCK_KB)
        if maximum < min(_BLOCK_KB, largest):
            better = min(largest, _LARGE_BLOCK_KB)
            pieces = -(-_BLOCK_KB // maximum)
            yield "split blocks", words | {"maximum": maximum, "pieces": pieces, "better": better}
        if words["scheduler"] == "bfq" or (kind == "NVMe drive" and words["scheduler"] != "none"):
            yield "scheduler", words
        if kind == "SCSI or SATA disk" and device["rotational"]:
            yield "hard disk", words
        if kind == "loop device" and not device["direct_io"]:
            yield "loop", words
        if kind == "dm-crypt":
            yield "encrypted", {"name": device["model"] or device["name"]}
        for controller in device.get("controllers", []):
            link = controller["pcie"] or {}
            reached, possible = link.get("gb_per_second"), link.get("gb_per_second_max")
            if reached and possible and reached < possible:
                yield "slow link", words | link


def _numa(facts: Facts) -> Iterator[Found]:
    nodes = known(facts, "processors", "numa_nodes") or {}
    near = {device.get("numa_node") for device in _devices(facts)} - {None}
    if len(nodes) > 1 and len(near) == 1:
        yield "numa", {"node": near.pop(), "nodes": len(nodes)}


def _huge_pages(facts: Facts) -> Iterator[Found]:
    if known(facts, "memory", "huge_pages", "transparent") == "never":
        yield "small pages", {}


def _limits(facts: Facts) -> Iterator[Found]:
    locked = known(facts, "limits", "locked_memory")
    if locked and not locked["exempt"] and locked["soft"] is not None and locked["soft"] < _GIB:
        remedy = "docker run --ulimit memlock=-1 ..., or '* - memlock unlimited' in /etc/security/limits.conf"
        remedy = "ulimit -l unlimited" if locked["hard"] is None else remedy
        yield "locked memory", {"kib": locked["soft"] >> 10, "remedy": remedy}
    descriptors = known(facts, "limits", "descriptors")
    if descriptors and descriptors["soft"] is not None and descriptors["soft"] < 4096:
        soft, hard = descriptors["soft"], descriptors["hard"]
        more = 65536 if hard is None else min(hard, 65536)
        remedy = "docker run --ulimit nofile=65536 ..., or '* - nofile 65536' in /etc/security/limits.conf"
        yield (
            "descriptors",
            {"soft": soft, "remedy": f"ulimit -n {more}" if more > soft else remedy},
        )


def _gpus(facts: Facts) -> Iterator[Found]:
    cards = known(facts, "gpu", "nvidia") or known(facts, "gpu", "on_pci")
    if not cards:
        return
    driver, torch = known(facts, "gpu", "cuda"), known(facts, "libraries", "torch") or {}
    nvidia = any(card.get("vendor", "NVIDIA") == "NVIDIA" for card in cards)
    if nvidia and driver is not None and not driver["usable"]:
        yield "driver", driver
    if known(torch, "version") and not known(torch, "gpus"):
        yield "torch", {"reason": (torch["gpus"] or {}).get("unknown", "it finds none")}


def _cufile(facts: Facts) -> Iterator[Found]:
    """Say why transfers do not bypass host memory, where CUDA's driver works, so that they might."""
    cufile = known(facts, "gpudirect_storage", "cufile")
    if cufile is None or not known(facts, "gpu", "cuda", "usable"):
        return
    if not cufile["usable"]:
        reason = cufile["reason"].partition("; remedy: ")[0]
        yield "cufile", {"reason": reason, "remedy": _cufile_wheel(known(facts, "gpu", "nvidia"))}
    elif cufile["mode"] == "compat":
        yield "compatible mode", {}


def _cufile_wheel(cards: list[Facts] | None) -> str:
    """Return how to get the cuFile that suits the driver: its branches from 580 on support CUDA 13."""
    new, old = "pip install nvidia-cufile", "pip install nvidia-cufile-cu12"
    version = (cards or [{}])[0].get("driver", "").partition(".")[0]
    if not version.isdigit():
        return f"{new} (for drivers from 580 on, CUDA 13), or {old}"
    return new if int(version) >= _FIRST_DRIVER_OF_CUDA_13 else old


def _deepspeed(facts: Facts) -> Iterator[Found]:
    for name in ("async_io", "gds"):
        operation = known(facts, "libraries", "deepspeed", "ops", name)
        if operation is None or operation["served_by"] == "tensorferry":
            continue
        if name == "gds" and not known(facts, "gpu", "nvidia"):
            continue
        if operation["reason"] is not None:
            yield name, {"reason": operation["reason"].rstrip(".")}
        elif name == "async_io":
            yield "deepspeed's own", {}


def _devices(facts: Facts) -> list[Facts]:
    return flat(known(facts, "devices") or [])


# In the order of what is as important.
_RULES: tuple[Callable[[Facts], Iterator[Found]], ...] = (
    _access,
    _gpus,
    _cufile,
    _deepspeed,
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
