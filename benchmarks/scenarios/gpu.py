"""CUDA tensors to fresh files and back: ours, whole-tensor copies and other libraries, beside two limits.

The limits are measured in the same rounds: the file system alone (the best of fio and of plain system calls from
several threads), and copies between the GPU and pinned memory. No way through host memory is faster than the lower
one. Rules: every write goes to a new file and is synced inside everybody's clock; files are dropped from the page
cache before each read, but for tmpfs, which is nothing else; the kinds of memory that peers need are allocated before.
Sizes: ``--nbytes``, and eight times as much where the machine has room for it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured, reads, writes
from benchmarks.bench import bench_in, contenders, synced_fio_writes
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    Kind,
    Outcome,
    Row,
    Settings,
    UnavailableError,
    ratio,
)
from benchmarks.worker import workers
from tensorferry.tuning.machine.limits import available_nbytes

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.worker import Worker

SEED = 17
OURS = "tensorferry aio_handle"
_PEERS = "benchmarks.peers.gpu"
_TMPFS = Path("/dev/shm")
_LARGER = 8
_LARGER_ROUNDS_MAX = 5
_THREADS = (1, 4, 16)
_LOCKED_NBYTES_MAX = 128 * MIB
_IN_MEMORY_FIOS = [fio.Config("psync", MIB, 1, direct=False)]
_FIOS = [
    fio.Config("io_uring", MIB, 32),
    fio.Config("io_uring", MIB, 128),
    fio.Config("libaio", MIB, 128),
    fio.Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]

# How much of each memory a run of one size takes, in tensors of that size: what lives at once in the workers below.
_GPU_TENSORS = 7
_PINNED_TENSORS = 3  # two whole copies, and DeepSpeed's
_FILES = 2


def run(settings: Settings) -> Outcome:
    """On the file system of the directory chosen."""
    return _run(settings, "gpu", memory_file_system=False)


def run_on_tmpfs(settings: Settings) -> Outcome:
    """The same in memory, where the copies are the limit, or the kernel's own."""
    return _run(replace(settings, directory=_TMPFS), "gpu on tmpfs", memory_file_system=True)


def _run(settings: Settings, name: str, *, memory_file_system: bool) -> Outcome:
    with workers() as make:
        device = make(f"{_PEERS}:Device").call("describe")
    if not settings.directory.is_dir():
        raise UnavailableError(f"{settings.directory} is no directory")
    outcome = Outcome(notes=[f"{device['name']}, torch {device['torch']}"])
    for factor in (1,) if settings.smoke else (1, _LARGER):
        sized = replace(settings, nbytes=factor * settings.nbytes)
        if factor > 1:
            sized = replace(sized, rounds=min(settings.rounds, _LARGER_ROUNDS_MAX))
        lack = lacking(sized.nbytes, device["free_nbytes"], settings.directory, memory_file_system)
        if lack and factor == 1:
            raise UnavailableError(lack)
        if lack:
            outcome.notes.append(lack)
            continue
        with bench_in(sized, outcome) as bench:
            for comparison, verb in _transfers(bench, name, memory_file_system):
                outcome.figures += figures(comparison, f"{name}: {size(sized.nbytes)} {verb}")
    if not fio.installed():
        outcome.notes.append("fio is not installed: the file system's limit is that of plain calls")
    return outcome


def lacking(nbytes: int, gpu_free_nbytes: int, directory: Path, in_memory: bool) -> str:
    """Say what a tensor of nbytes is too large for, or nothing."""
    host = _PINNED_TENSORS + (_FILES if in_memory else 0)
    loops = len(_THREADS) * min(nbytes, GIB)
    wanted = {
        "GPU memory": (_GPU_TENSORS * nbytes + GIB, gpu_free_nbytes),
        "host memory": (host * nbytes + loops, available_nbytes()),
        str(directory): (_FILES * nbytes + 64 * MIB, shutil.disk_usage(directory).free),
    }
    short = [
        f"{needed / GIB:.1f} GiB of {what}, of which {there / GIB:.1f} are free"
        for what, (needed, there) in wanted.items()
        if there < needed
    ]
    return f"{size(nbytes)} is left out: it needs {', and '.join(short)}" if short else ""


def limits(comparison: Comparison) -> list[Row]:
    """The best that the file system and that copies did, the lower one first; nothing where either is missing."""
    storage = [row for row in (comparison.best("fio"), comparison.best("limit", "storage")) if row]
    copy = comparison.best("limit", "copy")
    if not storage or not copy:
        return []
    return sorted([max(storage, key=_median), copy], key=_median)


def _median(row: Row) -> float:
    return row.median


def figures(comparison: Comparison, what: str) -> list[Figure]:
    """The promises about one comparison."""
    ours, found = comparison.row(OURS), limits(comparison)
    over = ratio(ours, found[0]) if found else None
    note = "; ".join(comparison.described(row, "a limit") for row in found)
    # Overlapping them pays where they are within a factor of 2.
    comparable = found and found[1].median <= 2 * found[0].median
    whole = comparison.best("peer", "whole")
    least = 1.5 if comparable else 1.0
    best = comparison.described(whole, "best")
    locked = [sample.details["locked_nbytes"] / MIB for sample in ours.samples] if ours else []
    most = _LOCKED_NBYTES_MAX // MIB
    return [
        Figure(
            f"{what}, over the lower limit",
            ">=",
            0.90,
            over,
            note=note or "a limit was not measured",
        ),
        Figure(f"{what}, over whole copy, then I/O", ">=", least, ratio(ours, whole), note=best),
        Figure(f"{what}, locked host memory", "<=", most, max(locked, default=None), "MiB"),
    ]


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.3g} GiB"


def _transfers(bench: Bench, name: str, memory_file_system: bool) -> list[tuple[Comparison, str]]:
    target, source = bench.directory / "target", bench.directory / "source"
    configs = _IN_MEMORY_FIOS if memory_file_system else _FIOS
    copies = bench.worker(f"{_PEERS}:CopyLimit", nbytes=bench.nbytes)
    movers = _movers(bench)

    def compared(action: Any, direction: str) -> list[Contender]:
        moves = [Contender(label, kind, action(w), tags) for label, kind, tags, w in movers]
        copy = {f"pinned copy {direction.replace('_', ' ')}": measured(copies, direction)}
        return moves + contenders("limit", copy, "copy")

    title = f"{name}: {size(bench.nbytes)}"
    by_fio = synced_fio_writes(bench, configs, target, bench.nbytes)
    ways = compared(writes(target, seed=SEED), "to_host") + by_fio
    written = bench.compare(f"{title} write", "CUDA tensor to a fresh file, synced", ways)
    files.remove(target)

    files.write_pattern(source, bench.nbytes, SEED)
    kind = "file in memory" if memory_file_system else "cold file"
    by_fio = fio.contenders(bench.settings, configs, source, "read", bench.nbytes)
    ways = compared(reads(source, seed=SEED), "to_device") + by_fio
    was_read = bench.compare(f"{title} read", f"{kind} to CUDA tensor", ways)
    return [(written, "write"), (was_read, "read")]


def _movers(bench: Bench) -> list[tuple[str, Kind, tuple[str, ...], Worker]]:
    """All that is no fio and no copy: label, kind, tags, and the worker that each runs in."""
    made: list[tuple[str, Kind, tuple[str, ...], Worker]] = []

    def add(label: str, kind: Kind, tags: tuple[str, ...], peer: str, **options: Any) -> None:
        worker = bench.worker(f"{_PEERS}:{peer}", **{"nbytes": bench.nbytes} | options)
        made.append((label, kind, tags, worker))

    add(OURS, "ours", (), "Handle")
    add(f"{OURS}, 4 workers", "ours", (), "Handle", options={"intra_op_parallelism": 4})
    add("tensorferry gds_handle", "ours", (), "Handle", name="gds_handle")
    whole = "whole copy, then"
    add(f"{whole} plain system calls, 4 threads", "peer", ("whole",), "CopyThen", threads=4)
    add(f"{whole} tensorferry aio_handle", "peer", ("whole",), "CopyThen")
    if bench.settings.deepspeed:
        add("DeepSpeed aio_handle", "peer", ("whole",), "DeepSpeedHandle")
    add("kvikio, 8 threads", "peer", (), "KvikIO", threads=8)
    for threads in _THREADS[: 1 if bench.smoke else None]:
        label = f"plain system calls, {threads} threads"
        nbytes = min(bench.nbytes, GIB)
        add(label, "limit", ("storage",), "StorageLimit", nbytes=nbytes, threads=threads)
    return made
