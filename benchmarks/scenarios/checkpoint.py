"""torch.distributed.checkpoint: a state of 2 GiB saved by our writer and torch's, and what fio makes of the same bytes.

Rules: one process, fresh directories, all on the drive at the end: fsync inside everybody's clock. fio writes one file
of as many bytes with O_DIRECT. Before each save the machine's memory is touched: a virtual machine may have given it
back to its host, whose page faults would be counted for those that write through the page cache. The last comparison
saves a state whose tensors are made one by one as they are asked for, so that what memory a save needs beside the state
is seen.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    cpu_ratio,
    peak_figure,
    ratio,
)
from benchmarks.measure import Stopwatch, touch_memory
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS = "tensorferry.checkpoint.FileSystemWriter"
_PEAK_NBYTES_MAX = 64 * MIB
_LAZY_NBYTES = 8 * MIB

# What torch's writer can be told; its best counts.
_TORCHS = {
    "torch FileSystemWriter, 1 thread": {"thread_count": 1},
    "torch FileSystemWriter, 2 threads": {"thread_count": 2},
    "torch FileSystemWriter, 4 threads": {"thread_count": 4},
    "torch FileSystemWriter, a file each, 4 threads": {
        "thread_count": 4,
        "single_file_per_rank": False,
    },
}

_FIOS = [
    fio.Config("io_uring", "1M", 32),
    fio.Config("io_uring", "1M", 128),
    fio.Config("libaio", "1M", 128),
    fio.Config("libaio", "1M", 32, huge=True),
    fio.Config("io_uring", "4M", 32, registered=True, huge=True),
]


class Saver:
    """Saves a state again and again, in a worker."""

    def __init__(
        self, nbytes: int, ours: bool, options: dict[str, Any], lazy: bool = False
    ) -> None:
        import torch.distributed.checkpoint as dcp

        from benchmarks.scenarios.checkpoint_state import state, state_nbytes
        from tensorferry.checkpoint import FileSystemWriter

        warnings.filterwarnings("ignore", module="torch")
        self._dcp = dcp
        self._writer: Any = FileSystemWriter if ours else dcp.FileSystemWriter
        self._options = options
        self._planner = _lazy_planner if lazy else None
        self._state = _described(nbytes) if lazy else state(nbytes)
        self._nbytes = state_nbytes(self._state)

    def save(self, path: str) -> dict[str, Any]:
        """Save to a directory that is not there."""
        planner = self._planner() if self._planner else None
        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            writer = self._writer(path, **self._options)
            self._dcp.save(self._state, storage_writer=writer, planner=planner, no_dist=True)
        return watch.result(self._nbytes)


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        nbytes = 2 * settings.nbytes
        comparison = _save(settings, directory, make, nbytes)
        lazy = _save_lazily(settings, directory, make, nbytes // 4)
    outcome = Outcome([comparison, lazy])
    ours, theirs = comparison.row(OURS), comparison.best("peer")
    limit = comparison.best("fio")
    note = f"best of torch's: {theirs.label}" if theirs else ""
    outcome.figures = [
        Figure("checkpoint save over fio", ">=", 0.90, ratio(ours, limit)),
        Figure("checkpoint save over torch", ">=", 2.0, ratio(ours, theirs), "", note),
        Figure(
            "checkpoint save, CPU seconds over torch's least",
            "<=",
            0.5,
            cpu_ratio(ours, comparison.least_cpu("peer")),
        ),
        *(
            peak_figure(f"checkpoint {what}, peak memory beside the state", row, _PEAK_NBYTES_MAX)
            for row, what in ((ours, "save"), (lazy.row(OURS), "lazy save"))
        ),
    ]
    if limit is None:
        outcome.notes.append("fio is not installed: nothing to compare with")
    return outcome


def _save(
    settings: Settings, directory: Path, make: Callable[..., Worker], nbytes: int
) -> Comparison:
    peer = "benchmarks.scenarios.checkpoint:Saver"
    written = 0

    def save(worker: Worker) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            nonlocal written
            target = directory / "checkpoint"
            files.remove_directory(target)
            sample = worker.sample("save", path=str(target))
            written = sum(path.stat().st_size for path in target.iterdir())
            files.remove_directory(target)
            return sample

        return measure

    def by_fio(config: fio.Config) -> Callable[[int], Sample]:
        target = directory / "target"  # as large as a checkpoint, once there is one
        return lambda number: fio.writes(config, target, written, "--end_fsync=1")(number)

    contenders = [
        Contender(OURS, "ours", save(make(peer, nbytes=nbytes, ours=True, options={}))),
    ]
    for label, options in list(_TORCHS.items())[: 1 if settings.smoke else None]:
        worker = make(peer, nbytes=nbytes, ours=False, options=options)
        contenders.append(Contender(label, "peer", save(worker)))
    contenders += [
        Contender(config.label, "fio", by_fio(config), config.tags)
        for config in fio.usable(_FIOS, settings)
    ]
    comparison = Comparison("checkpoint save", "fresh directory, all of it synced")
    return compare(settings, comparison, contenders)


def _save_lazily(
    settings: Settings, directory: Path, make: Callable[..., Worker], nbytes: int
) -> Comparison:
    peer = "benchmarks.scenarios.checkpoint:Saver"
    worker = make(peer, nbytes=nbytes, ours=True, options={}, lazy=True)

    def measure(number: int) -> Sample:
        target = directory / "lazy"
        files.remove_directory(target)
        return worker.sample("save", path=str(target))

    rules = f"tensors of {_LAZY_NBYTES // MIB} MiB that are made when they are asked for"
    comparison = Comparison("checkpoint lazy save", rules)
    return compare(settings, comparison, [Contender(OURS, "ours", measure)], rounds=3)


def _described(nbytes: int) -> dict[str, Any]:
    """As many tensors as the planner will make, without their memory."""
    import torch

    count = max(1, nbytes // _LAZY_NBYTES)
    return {f"tensor{k}": torch.zeros(1).expand(_LAZY_NBYTES // 4) for k in range(count)}


def _lazy_planner() -> Any:
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner

    # The C library is to give back at once what is freed (M_MMAP_THRESHOLD): its holes are not the save's.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)

    class LazyPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return torch.full((_LAZY_NBYTES // 4,), 1.0)

    return LazyPlanner()
