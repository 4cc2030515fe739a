"""A state of 2 GiB, a transformer's with AdamW, saved and loaded: by ours, by torch's, and what fio makes of it.

Rules: one process for each; fresh files and directories, all on the drive at the end: fsync inside everybody's clock.
fio moves one file of as many bytes with O_DIRECT. Before each save the machine's memory is touched: a virtual machine
may have given it back to its host, whose page faults would be counted for those that write through the page cache, or
allocate anew. Cold: the file is dropped from the page cache before each load. Warm: it is brought there. What has been
loaded is compared with what was saved. The same, smaller, on a fast block device: ext4 on a loop device with direct I/O
over memory (root only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured
from benchmarks.bench import contenders, scenario, synced_fio_writes
from benchmarks.harness import MIB, Comparison, Contender, Row, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from benchmarks.worker import Worker

WRITER = "tensorferry.checkpoint.FileSystemWriter"
READER = "tensorferry.checkpoint.FileSystemReader"
READER_BEFORE = f"{READER} verify=before"
READER_OFF = f"{READER} verify=off"
TORCH_READER = "torch FileSystemReader"
OBJECTS = "tensorferry.checkpoint.save/load"
TORCH_OBJECTS = "torch.save/load"
ASYNC_OVERLAPPED = "the same, Stager(overlap=True)"
ASYNC_DEFAULT = "torch's default"

_PEERS = "benchmarks.peers.checkpoint"
_PEAK_NBYTES_MAX = 64 * MIB
_LAZY_ROUNDS = 3
_HALF_ROUNDS_MAX = 3

# What torch's writer can be told; its best counts.
_TORCH_WRITERS: dict[str, dict[str, Any]] = {
    "torch FileSystemWriter, 1 thread": {"thread_count": 1},
    "torch FileSystemWriter, 2 threads": {"thread_count": 2},
    "torch FileSystemWriter, 4 threads": {"thread_count": 4},
    "torch FileSystemWriter, a file each, 4 threads": {
        "thread_count": 4,
        "single_file_per_rank": False,
    },
}

_SAVE_FIOS = [
    fio.Config("io_uring", MIB, 32),
    fio.Config("io_uring", MIB, 128),
    fio.Config("libaio", MIB, 128),
    fio.Config("libaio", MIB, 32, huge_pages=True),
    fio.Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]
_LOAD_FIOS = [*_SAVE_FIOS, fio.Config("io_uring", 4 * MIB, 32, registered=True)]


@scenario
def save(bench: Bench) -> None:
    """``dcp.save``; also of tensors made one by one, so that what memory a save needs beside the state is seen."""
    nbytes = 2 * bench.nbytes
    saved = _compare_saves(bench, "checkpoint save", nbytes, 1 if bench.smoke else None)
    lazy = bench.compare(
        "checkpoint lazy save",
        "tensors of 8 MiB that are made when they are asked for",
        contenders("ours", {WRITER: _saves(bench, "LazySaver", nbytes // 4)}),
        rounds=_LAZY_ROUNDS,
    )
    bench.over_fio("checkpoint save over fio", 0.90, saved, WRITER)
    best, least = saved.best("peer"), saved.least_cpu("peer")
    note = saved.described(best, "best of torch's")
    bench.at_least("checkpoint save over torch", 2.0, saved.over(WRITER, best), note)
    over_cpu = saved.cpu_over(WRITER, least)
    bench.at_most("checkpoint save, CPU seconds over torch's least", 0.5, over_cpu)
    for comparison, what in ((saved, "save"), (lazy, "lazy save")):
        title = f"checkpoint {what}, peak memory beside the state"
        bench.peak(title, _PEAK_NBYTES_MAX, comparison, WRITER)


def _compare_saves(
    bench: Bench, name: str, nbytes: int, settings_of_torch: int | None
) -> Comparison:
    theirs = list(_TORCH_WRITERS.items())[:settings_of_torch]
    peers = {n: _saves(bench, "Saver", nbytes, ours=False, options=o) for n, o in theirs}
    ours = {WRITER: _saves(bench, "Saver", nbytes, ours=True, options={})}
    by_fio = synced_fio_writes(bench, _SAVE_FIOS, bench.directory / "target", nbytes)
    compared = contenders("ours", ours) + contenders("peer", peers) + by_fio
    return bench.compare(name, "fresh directory, all of it synced", compared)


def _saves(bench: Bench, peer: str, nbytes: int, **options: Any) -> Measure:
    worker = bench.worker(f"{_PEERS}:{peer}", nbytes=nbytes, **options)
    target, remove = bench.directory / "checkpoint", files.remove_directory
    return measured(worker, "save", remove, [target], clean=True, path=str(target))


@scenario
def load(bench: Bench) -> None:
    """``dcp.load`` into tensors that are there, of a checkpoint that our writer made, which both readers take.

    Of half of the rows of each tensor it is counted what the kernel has read from the drive.
    """
    verified = {READER: "read", READER_OFF: "off", READER_BEFORE: "before", TORCH_READER: None}
    loads = _Loads(bench, 2 * bench.nbytes, verified)
    cold = loads.compare_cold("checkpoint cold load")
    warm = bench.compare("checkpoint warm load", "warm file", loads.by("load", files.make_warm))
    half = bench.compare(
        "checkpoint half of the rows",
        "cold file",
        loads.by("load_half", files.make_cold, (READER, TORCH_READER)),
        "of the bytes",
        rounds=bench.rounds_at_most(_HALF_ROUNDS_MAX),
    )
    bench.over_fio("checkpoint cold load over fio", 0.92, cold, READER)
    bench.at_least("checkpoint warm load over torch", 3.0, warm.over(READER, TORCH_READER))
    for name, comparison in (("cold", cold), ("warm", warm)):
        over = comparison.over(READER, READER_OFF)
        bench.at_least(f"checkpoint {name} load, verified over not", 0.95, over)
    bench.at_most("checkpoint half of the rows", 0.55, half.median(READER))
    bench.peak("checkpoint load, peak memory beside the state", _PEAK_NBYTES_MAX, cold, READER)


class _Loads:
    """A checkpoint, and readers of it."""

    def __init__(self, bench: Bench, nbytes: int, verified: Mapping[str, str | None]) -> None:
        self.bench = bench
        self.path = bench.directory / "checkpoint"
        self.workers = {
            label: bench.worker(f"{_PEERS}:Loader", nbytes=nbytes, verify=verify)
            for label, verify in verified.items()
        }
        self.workers[READER].call("save", path=str(self.path))
        (self.file,) = self.path.glob("*.distcp")

    def by(self, call: str, prepare: Any, labels: Iterable[str] = ()) -> list[Contender]:
        """Those with these labels, or all."""
        workers = {label: self.workers[label] for label in labels or self.workers}
        return _of_workers(workers, call, prepare, self.file, path=str(self.path))

    def compare_cold(self, name: str) -> Comparison:
        nbytes = self.file.stat().st_size
        by_fio = fio.contenders(self.bench.settings, _LOAD_FIOS, self.file, "read", nbytes)
        return self.bench.compare(name, "cold file", self.by("load", files.make_cold) + by_fio)


@scenario
def save_and_load_on_loop_device(bench: Bench) -> None:
    """Half as many bytes to and from a device that is as fast as memory (root only)."""
    nbytes = bench.nbytes
    with bench.on_loop_device(2 * nbytes + nbytes // 4 + 64 * MIB) as quick:
        saved = _compare_saves(quick, "checkpoint save, fast device", nbytes, 1)
    with bench.on_loop_device(nbytes + nbytes // 4 + 64 * MIB) as quick:
        loads = _Loads(quick, nbytes, {READER: "read", READER_OFF: "off"})
        cold = loads.compare_cold("checkpoint cold load, fast device")
    bench.over_fio("checkpoint save over fio, fast device", 0.85, saved, WRITER)
    bench.over_fio("checkpoint cold load over fio, fast device", 0.8, cold, READER)
    over = cold.over(READER, READER_OFF)
    bench.at_least("checkpoint cold load, verified over not, fast device", 0.97, over)


@scenario
def objects(bench: Bench) -> None:
    """``save`` and ``load`` of an object against ``torch.save`` and ``torch.load``; loads make new tensors."""
    ways = {OBJECTS: "ours", "torch.save to FileWriter": "file", TORCH_OBJECTS: "torch"}
    workers = {
        label: bench.worker(f"{_PEERS}:Keeper", nbytes=2 * bench.nbytes, how=how)
        for label, how in ways.items()
    }
    source, target = bench.directory / "source", bench.directory / "target"
    workers[TORCH_OBJECTS].call("save", path=str(source))  # all read the same file
    saves = _of_workers(workers, "save", files.remove, target, clean=True, path=str(target))
    compared = [(bench.compare("object save", "fresh file, fsync at the end", saves), 2.5)]
    loaders = {label: workers[label] for label in (OBJECTS, TORCH_OBJECTS)}
    for name, prepare in (("cold", files.make_cold), ("warm", files.make_warm)):
        loads = _of_workers(loaders, "load", prepare, source, path=str(source))
        comparison = bench.compare(f"object {name} load", f"{name} file, new tensors", loads)
        compared.append((comparison, 1.5))
    for comparison, target_ratio in compared:
        what = f"{comparison.name} over torch.{comparison.name.split()[-1]}"
        bench.at_least(what, target_ratio, comparison.over(OBJECTS, TORCH_OBJECTS))
    for comparison, _ in compared[:2]:
        what = f"{comparison.name}, peak memory beside the object"
        bench.peak(what, _PEAK_NBYTES_MAX, comparison, OBJECTS)


@scenario
def saved_asynchronously(bench: Bench) -> None:
    """How long ``async_save`` blocks training, and until the checkpoint is there.

    The state is saved by the same stager and writer again and again, as training does; each save is awaited before the
    next. The first one, which allocates, is not counted.
    """
    target = bench.directory / "checkpoint"

    def saves(writer: str, *, overlap: bool = False) -> Measure:
        options = {"nbytes": 2 * bench.nbytes, "writer": writer, "overlap": overlap}
        worker = bench.worker(f"{_PEERS}:AsyncSaver", **options)
        save = measured(worker, "save", files.remove_directory, [target], path=str(target))

        def measure(number: int) -> Sample:
            if number == 0:
                save(number)
            return save(number)

        return measure

    ours = {WRITER: saves("ours"), ASYNC_OVERLAPPED: saves("ours", overlap=True)}
    theirs = {ASYNC_DEFAULT: saves(""), "torch FileSystemWriter as stager": saves("torch")}
    compared = contenders("ours", ours) + contenders("peer", theirs)
    blocked = bench.compare("async_save blocks", "the training thread", compared, "s")
    rows = [
        Row(
            row.label,
            row.kind,
            row.tags,
            [Sample(s.seconds, s.seconds) for s in row.samples],
            row.failure,
        )
        for row in blocked.rows
    ]
    total = Comparison("async_save takes", "until the checkpoint is there", "s", rows)
    bench.outcome.comparisons.append(total)
    for label in ours:
        over = blocked.over(label, ASYNC_DEFAULT)
        bench.at_most(f"async_save blocks, over torch's default: {label}", 0.5, over)


def _of_workers(
    workers: Mapping[str, Worker], call: str, prepare: Any, path: Path, /, **options: Any
) -> list[Contender]:
    """Those named after torch are peers, the others ours."""
    return [
        Contender(
            label,
            "peer" if label in (TORCH_READER, TORCH_OBJECTS) else "ours",
            measured(worker, call, prepare, [path], **options),
        )
        for label, worker in workers.items()
    ]
