"""A training step of a model that is larger than its memory, beside its two bounds and DeepSpeed.

Parameters, gradients and AdamW's state in fp32 on a drive (`--parameters` of them, in `--nbytes` of memory). A step
cannot be shorter than computing alone, which is the same training in memory, with activations computed again as well;
nor than its I/O alone, which is fio reading and writing as many bytes at once. DeepSpeed's ZeRO-3 has the same model,
batch and optimizer, and parameters and optimizer on NVMe.

Each sample is a process of its own, so that one training's memory is there at a time: three steps to warm up, and the
one that counts, until its last write has ended. Peak memory is what is resident at most during that step, and beside it
since the process began.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench import MIB, scenario
from benchmarks.memory import Stopwatch, drive_nbytes
from benchmarks.models import Transformer, batch
from benchmarks.scenarios.offload import (
    _begin,
    _moved_nbytes,
    both_ways,
    both_ways_config,
    over_the_slower,
)
from tensorferry.offload import offload_training
from tensorferry.tuning.rounds import GB, Contender, Sample
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from tensorferry.tuning.rounds import Comparison, Row

OURS, IN_BACKWARD = "tensorferry", "tensorferry, step_in_backward"
COMPUTING, THEIRS = "torch, in memory", "DeepSpeed, ZeRO-3 with NVMe"
# The first makes files and states, the second is the first one with known order, and after it DeepSpeed frees memory.
_WARM_UP_STEPS = 3
# With widths that are not whole blocks of its swapper, 512 elements here, DeepSpeed 0.19.8 trains with wrong gradients.
_WIDTHS = (512, 1024)
_WIDE_FROM = 50_000_000
_SEQUENCE = 128


class Trainer:
    """A training from its first step on; subclasses have the models and optimizers."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def measure(self) -> dict[str, Any]:
        """Warm up, and time one step."""
        losses = [self.step(number) for number in range(_WARM_UP_STEPS)]
        ever = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = self.moved_nbytes()
        with Stopwatch() as watch:
            losses.append(self.step(_WARM_UP_STEPS))
        moved = [
            after - earlier for after, earlier in zip(self.moved_nbytes(), before, strict=True)
        ]
        details = {"read_nbytes": moved[0], "written_nbytes": moved[1], "losses": losses}
        peak = watch.peak_nbytes or 0
        details |= {"peak_nbytes": peak, "peak_ever_nbytes": max(peak, ever)}
        self.close()
        return watch.as_value(watch.seconds, sum(moved), **details)

    def step(self, number: int) -> str:
        """Learn from a batch until all is written; return the loss to the last bit, hexadecimal."""
        raise NotImplementedError

    def moved_nbytes(self) -> list[int]:
        """Return the bytes read and written so far; here, by the kernel's count."""
        return [drive_nbytes("read"), drive_nbytes("write")]

    def close(self) -> None:
        """Give up what is on the drive."""


class InMemory(Trainer):
    """All of it in memory, and gradients in the same memory in each step: fresh pages would make the bound longer."""

    zeroing: dict[str, bool] = {"set_to_none": False}  # noqa: RUF012

    def __init__(self, threads: int, layers: int, hidden: int) -> None:
        super().__init__(threads)
        torch.manual_seed(1)
        self._model: Any = Transformer(layers, hidden, checkpoint_activations=True)
        self._optimizer: Any = _adamw(self._model)

    def step(self, number: int) -> str:
        loss = self._model(batch(number, _SEQUENCE))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(**self.zeroing)
        return float(loss).hex()


class Offloaded(InMemory):
    """All of it on a drive, but for what a budget has room for."""

    zeroing: dict[str, bool] = {}  # noqa: RUF012

    def __init__(
        self, threads: int, layers: int, hidden: int, directory: Path, **options: Any
    ) -> None:
        Trainer.__init__(self, threads)
        torch.manual_seed(1)
        model = Transformer(layers, hidden)
        self._model, self._optimizer = offload_training(
            model,
            _adamw(model),
            str(directory),
            blocks=model.blocks,
            checkpoint_activations=True,
            **options,
        )

    def step(self, number: int) -> str:
        loss = super().step(number)
        self._optimizer.drain()
        return loss

    def moved_nbytes(self) -> list[int]:
        stats = self._optimizer.stats()
        return [stats["read_nbytes"], stats["written_nbytes"]]

    def close(self) -> None:
        self._optimizer.close()


class OfDeepspeed(Trainer):
    """All of it on a drive by DeepSpeed, on its own engine, but for gradients and what it cannot do without."""

    def __init__(self, threads: int, directory: Path, memory_budget: int, **size: int) -> None:
        super().__init__(threads)
        _, self._scratch = _begin(served=False)
        from benchmarks.training import Training

        aio = {
            "block_size": 2
            * MIB,  # and the head, used twice in a row, stays in memory: see _hold_to
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "overlap_events": True,
        }
        self._training = Training(
            directory, "both", sequence=_SEQUENCE, aio=aio, memory_budget=memory_budget, **size
        )

    def step(self, number: int) -> str:
        return self._training.step()


def _adamw(model: Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@scenario
def step(bench: Bench) -> None:
    parameters = bench.settings.parameters
    hidden = _WIDTHS[parameters >= _WIDE_FROM]
    # A block has 12 hidden^2 parameters, and some blocks are in memory at a time, with gradients.
    budget = max(bench.nbytes, 64 * 4 * hidden * hidden)
    size = {"hidden": hidden, "layers": max(2, round(parameters / (12 * hidden * hidden)))}
    threads = 1 if bench.smoke else len(os.sched_getaffinity(0))
    losses: dict[str, list[str]] = {}
    moved: dict[str, dict[str, int]] = {}

    def training(label: str, kind: type, **options: Any) -> Measure:
        folder = bench.directory / "state"
        if kind is not InMemory:
            options |= {"directory": folder, "memory_budget": budget}

        def measure(_: int) -> Sample:
            worker = bench.worker(kind, threads=threads, **size, **options)
            try:
                sample = Sample(**worker.call("measure"))
            finally:
                worker.close()
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
            losses[label] = sample.details["losses"]
            moved[label] = {way: sample.details[way] for way in ("read_nbytes", "written_nbytes")}
            return sample

        return measure

    def alone(label: str) -> Contender:
        def measure(_: int) -> Sample:
            if label not in moved:
                raise UnavailableError("no step has shown what is to be moved")
            return both_ways(bench.directory, both_ways_config(), **moved[label])

        return Contender(_alone(label), "limit", measure)

    ours = {OURS: False, IN_BACKWARD: True}
    comparison = bench.compare(
        f"a step of {size['layers']} layers of {hidden}, in {budget / MIB:.4g} MiB",
        "fp32, AdamW, activations of blocks computed again; with all writes",
        ours={
            label: training(label, Offloaded, step_in_backward=way) for label, way in ours.items()
        },
        limit={COMPUTING: training(COMPUTING, InMemory)},
        peer={THEIRS: training(THEIRS, OfDeepspeed)} if bench.deepspeed_wanted() else None,
        more=[alone(label) for label in ours],
        unit="s",
    )
    with torch.device("meta"):
        exact = sum(param.numel() for param in Transformer(**size).parameters())
    _tell(bench, comparison, exact)
    theirs = comparison.row(THEIRS)
    if theirs and comparison.row(COMPUTING):
        pairs = zip(losses[THEIRS], losses[COMPUTING], strict=True)
        furthest = max(abs(float.fromhex(a) / float.fromhex(b) - 1) for a, b in pairs)
        bench.at_most("DeepSpeed: how far it is from training in memory", 0.05, furthest)
    for label in ours:
        over = over_the_slower(comparison, label, COMPUTING, _alone(label))
        bench.at_most(f"{label}: a step over max(computing, I/O alone)", 1.15, over)
        bench.at_least(f"{label}: DeepSpeed's step over ours", 2, comparison.over(THEIRS, label))
        row = comparison.row(label)
        part = _moved_nbytes(row) / _moved_nbytes(theirs) if row and theirs else None
        bench.at_most(f"{label}: bytes moved over DeepSpeed's", 0.6, part)
        if row and comparison.row(COMPUTING):
            pairs = zip(losses[label], losses[COMPUTING], strict=True)
            bench.at_most(f"{label}: losses that differ", 0, sum(a != b for a, b in pairs))


def _alone(label: str) -> str:
    return f"fio, the bytes of {label}"


def _tell(bench: Bench, comparison: Comparison, parameters: int) -> None:
    """Tell what a step of each costs, as a table."""
    heads = ("s a step", "GB read", "written", "B/param", "peak MiB", "of all", "CPU s")
    heads += ("of bound", "of peer")
    lines = [("", *heads)]
    for row in comparison.sorted_rows():
        bound = over_the_slower(comparison, row.label, COMPUTING, _alone(row.label))
        theirs = comparison.over(row.label, THEIRS)
        cells = (
            f"{row.median:.3g}",
            *(f"{_detail(row, f'{way}_nbytes') / GB:.3f}" for way in ("read", "written")),
            f"{_moved_nbytes(row) / parameters:.1f}",
            *(f"{_detail(row, name) / MIB:.0f}" for name in ("peak_nbytes", "peak_ever_nbytes")),
            f"{statistics.median(sample.cpu_seconds or 0 for sample in row.samples):.2f}",
            *("-" if over is None else f"{over:.2f}" for over in (bound, theirs)),
        )
        lines.append((row.label, *cells))
    for label, *cells in lines:
        bench.note(f"{label:47}" + "".join(f"{cell:>10}" for cell in cells))


def _detail(row: Row, name: str) -> float:
    return statistics.median(sample.details.get(name, 0) for sample in row.samples)
