"""Loading 2.5 GB of bfloat16 from one safetensors file, from four, and from a fast device: ours, safetensors, fio.

Rules: one process that loads to the CPU; every page of what was loaded is touched within the time, so that a map costs
what it has put off; all bytes are compared afterwards. Cold: the files are dropped from the page cache before each
load. Warm: they are brought there. Half: the first half of each is. What a cold load leaves in the cache is counted.
All free memory, of which there is little more than is needed, is touched before the clock runs, whoever loads.

By plan: what eight tensor-parallel ranks read of one cold model, one after the other, sharing the page cache as those
of a node do, in bytes that the kernel counts as fetched from storage; and by how much the peak of memory grows while
all of a model is read in a budget, and nothing kept.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import tensorferry
from benchmarks import files, fio
from benchmarks.actions import measured
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB
from benchmarks.measure import little_free_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.harness import Comparison

OURS = "tensorferry load_file"
MAP = "safetensors load_file"
PREAD = "safetensors load_file backend=pread"
RANKS = 8
_WAYS = {OURS: "ours", MAP: "map", PREAD: "pread"}
_PEERS = "benchmarks.peers.safetensors"
_BUDGET_NBYTES = 256 * MIB
_BUDGET_ALLOWANCE_NBYTES = 32 * MIB

_FIO_NBYTES = GIB  # fio starts at once, and goes on as it starts
# The best of those that `large` tries.
_FIOS = [
    fio.Config("libaio", MIB, 128),
    fio.Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]


class _Model:
    """The files of a model on some drive, and those who load them."""

    def __init__(self, bench: Bench, count: int, ways: tuple[str, ...] = (OURS, MAP)) -> None:
        self.bench = bench
        self.where = f"{count} files"
        workers = {way: bench.worker(f"{_PEERS}:Loader", way=_WAYS[way]) for way in ways}
        self.workers = workers
        self.paths = [bench.directory / f"model-{at}-of-{count}.safetensors" for at in range(count)]
        self.names = [str(path) for path in self.paths]
        nbytes = _nbytes(bench) // count
        self.crcs = [
            workers[OURS].call("save", path=name, nbytes=nbytes, seed=at)["crc"]
            for at, name in enumerate(self.names)
        ]

    def compare(self, state: str, prepare: Callable[[Path], None], with_fio: bool) -> Comparison:
        ways = {
            way: measured(
                *(worker, "load", prepare, self.paths),
                paths=self.names,
                crcs=self.crcs,
                fresh=prepare is not files.make_warm and not self.bench.smoke,
            )
            for way, worker in self.workers.items()
        }
        compared = contenders("ours", {OURS: ways.pop(OURS)}) + contenders("peer", ways)
        if with_fio:
            path, settings = self.paths[0], self.bench.settings
            nbytes = min(path.stat().st_size, _FIO_NBYTES)
            compared += fio.contenders(settings, _FIOS, path, "read", nbytes)
        name = f"{state}, {self.where}"
        return self.bench.compare(f"safetensors {name}", f"{name} in a process", compared)

    def compare_cold(self, with_fio: bool) -> None:
        """Load it cold, and look for what of it is in the page cache afterwards."""
        cold = self.compare("cold", files.make_cold, with_fio)
        if with_fio:
            self.bench.over_fio(f"cold load over fio, {self.where}", 0.92, cold, OURS)
        what = f"cold load over safetensors' best, {self.where}"
        self.bench.at_least(what, 1.0, cold.over(OURS, MAP))
        for path in self.paths:
            files.make_cold(path)
        self.workers[OURS].call("load", paths=self.names, crcs=self.crcs, fresh=False)
        what = f"cached after a cold load, {self.where}"
        self.bench.at_most(what, 0.0, _cached_share(self.paths))

    def compare_cached(self) -> None:
        """Load it when all or half of it is in the page cache."""
        for state, prepare, target in (
            ("warm", files.make_warm, 0.95),
            ("half", files.make_half_warm, 1.0),
        ):
            over = self.compare(state, prepare, with_fio=False).over(OURS, MAP)
            self.bench.at_least(f"{state} load over safetensors' map, {self.where}", target, over)


@scenario
def run(bench: Bench) -> None:
    """One cold file."""
    with _little_memory(bench):
        _Model(bench, 1).compare_cold(with_fio=True)


@scenario
def run_cached(bench: Bench) -> None:
    """One file, all of it or half in the page cache."""
    with _little_memory(bench):
        _Model(bench, 1).compare_cached()


@scenario
def run_on_four_files(bench: Bench) -> None:
    """Four files of a quarter of the bytes; fio reads no better than from one."""
    with _little_memory(bench):
        model = _Model(bench, 4)
        model.compare_cold(with_fio=False)
        model.compare_cached()


@scenario
def run_on_loop_device(bench: Bench) -> None:
    """One cold file on a device that is as fast as memory (root only)."""
    nbytes = _nbytes(bench)
    with bench.on_loop_device(nbytes + nbytes // 8 + 64 * MIB) as fast, _little_memory(fast):
        model = _Model(fast, 1, tuple(_WAYS))
        model.where += " on a loop device"
        cold = model.compare("cold", files.make_cold, with_fio=True)
        fast.leave_out(cold, PREAD, "no backends")
        fast.over_fio(f"cold load over fio, {model.where}", 0.8, cold, OURS)
        over = cold.over(OURS, cold.best("peer"))
        fast.at_least(f"cold load over safetensors' best, {model.where}", 1.5, over)
        if cold.row(PREAD):
            what = f"CPU seconds for each GB of a cold load over safetensors' pread, {model.where}"
            fast.at_most(what, 0.5, cold.cpu_over(OURS, PREAD))


@scenario
def plans(bench: Bench) -> None:
    """What ranks read, and the memory that a budget takes."""
    path = bench.directory / "model.safetensors"
    worker = bench.worker(f"{_PEERS}:Planner")
    worker.call("save", path=str(path), nbytes=bench.nbytes)
    cold = (files.make_cold, [path])
    load = measured(worker, "load", *cold, path=str(path), ranks=RANKS)
    pass_over = measured(worker, "pass_over", *cold, path=str(path), budget_nbytes=_BUDGET_NBYTES)
    ranks = contenders("ours", {"tensor_parallel_plan": load})
    shares = bench.compare("safetensors plans, eight ranks", "cold", ranks, "of the bytes needed")
    passed = bench.compare(
        "safetensors plans, a budget",
        f"{_BUDGET_NBYTES // MIB} MiB, cold",
        contenders("ours", {"load_files": pass_over}),
    )
    read = shares.median("tensor_parallel_plan")
    bench.at_most("bytes read by eight ranks over needed", 1.1, read)
    most = _BUDGET_NBYTES + _BUDGET_ALLOWANCE_NBYTES
    bench.peak("memory of load_files", most, passed, "load_files")


def _nbytes(bench: Bench) -> int:
    return 5 * bench.nbytes // 2


def _little_memory(bench: Bench) -> contextlib.AbstractContextManager[None]:
    if bench.smoke:
        return contextlib.nullcontext()
    return little_free_memory(2 * _nbytes(bench) + GIB)


def _cached_share(paths: list[Path]) -> float | None:
    """Return what part of the files the page cache holds; None where the kernel does not tell."""
    cached = total = 0
    for path in paths:
        with tensorferry.open(path) as file:
            found = file._open_file().residency(0, file.size)
        if found is None:
            return None
        cached, total = cached + found[0], total + found[1]
    return cached / total
