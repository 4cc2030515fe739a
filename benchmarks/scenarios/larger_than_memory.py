"""A training step of a model that is larger than its memory, compared with its two lower bounds and with DeepSpeed.

Parameters, gradients and AdamW's state in fp32 are on a drive (`--parameters` parameters, in `--nbytes` of memory). Two
times are lower bounds of a step. The first is computing alone: the same training in memory, which also computes
activations again. The second is I/O alone: fio reads and writes as many bytes at the same time. DeepSpeed's ZeRO-3
trains the same model with the same batches and optimizer, with parameters and optimizer on NVMe.

Each sample runs in a separate process, and only one process exists at a time, which leaves the whole memory to it. It
makes three steps to warm up, and then measures one step until its last write has ended. Peak memory is the largest
resident memory during that step; a second figure is the largest since the process began.
"""

from __future__ import annotations

import os
import resource
import shutil
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench import MIB, scenario
from benchmarks.memory import Stopwatch, drive_nbytes
from benchmarks.models import Transformer, batch
from benchmarks.scenarios.offload import (
    _begin,
    _moved_nbytes,
    _moved_over,
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

OURS, COMPUTING, THEIRS = "tensorferry", "torch, in memory", "DeepSpeed, ZeRO-3 with NVMe"
# The first step makes the files and the states, the second is the first in a known order, and DeepSpeed frees memory
# after the second.
_WARM_UP_STEPS = 3
# The widths are multiples of the block of DeepSpeed's swapper, which is 512 elements here. With other widths DeepSpeed
# 0.19.8 trains with wrong gradients.
_WIDTHS = (512, 1024)
_WIDE_FROM = 50_000_000
_SEQUENCE = 128


class Trainer:
    """A training, in a worker; subclasses make the model and the optimizer."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def measure(self) -> dict[str, Any]:
        """Run the steps that warm up, and measure the next one."""
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
        """Train on a batch, and wait for all writes; return the exact loss as a hexadecimal string."""
        raise NotImplementedError

    def moved_nbytes(self) -> list[int]:
        """Return the bytes read and written so far, as the kernel counts them."""
        return [drive_nbytes("read"), drive_nbytes("write")]

    def close(self) -> None:
        """Close the optimizer and remove its files."""


class InMemory(Trainer):
    """The training in memory: the lower bound of computing.

    Gradients stay in the same memory in each step, because page faults of fresh memory would make the bound longer.
    """

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
    """The training with all states on a drive, in a memory budget."""

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
    """The training by DeepSpeed on its own engine, with all states on a drive except gradients and a necessary rest."""

    def __init__(self, threads: int, directory: Path, memory_budget: int, **size: int) -> None:
        super().__init__(threads)
        _, self._scratch = _begin(served=False)
        from benchmarks.training import Training

        # DeepSpeed swaps only tensors of at least one block. The head is smaller than 2 MiB, so it stays in memory,
        # which DeepSpeed needs: see benchmarks.training._hold_to.
        aio = {
            "block_size": 2 * MIB,
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
    # A block has 12 * hidden**2 parameters, and several blocks are in memory at a time, with their gradients.
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
                raise UnavailableError("no step has been measured, so its bytes are unknown")
            return both_ways(bench.directory, both_ways_config(), **moved[label])

        return Contender(_alone(label), "limit", measure)

    comparison = bench.compare(
        f"a step of {size['layers']} layers of {hidden}, in {budget / MIB:.4g} MiB",
        "fp32, AdamW, activations of blocks computed again; until all is written",
        ours={OURS: training(OURS, Offloaded)},
        limit={COMPUTING: training(COMPUTING, InMemory)},
        peer={THEIRS: training(THEIRS, OfDeepspeed)} if bench.deepspeed_wanted() else None,
        more=[alone(OURS)],
        unit="s",
    )
    for row in comparison.sorted_rows():
        last = row.samples[-1].details
        moved_gb, peak_mib = _moved_nbytes(row) / GB, last.get("peak_ever_nbytes", 0) / MIB
        bench.note(f"{row.label}: {moved_gb:.3f} GB, peak memory {peak_mib:.0f} MiB")
    theirs = comparison.row(THEIRS)
    if theirs and comparison.row(COMPUTING):
        pairs = zip(losses[THEIRS], losses[COMPUTING], strict=True)
        furthest = max(abs(float.fromhex(a) / float.fromhex(b) - 1) for a, b in pairs)
        what = "DeepSpeed: largest relative difference of a loss from training in memory"
        bench.at_most(what, 0.05, furthest)
    over = over_the_slower(comparison, OURS, COMPUTING, _alone(OURS))
    bench.at_most("a step over max(computing, I/O alone)", 1.25, over)
    bench.at_least("DeepSpeed's step over ours", 2, comparison.over(THEIRS, OURS))
    row = comparison.row(OURS)
    bench.at_most("bytes moved over DeepSpeed's", 0.6, _moved_over(row, theirs))
    if row and comparison.row(COMPUTING):
        pairs = zip(losses[OURS], losses[COMPUTING], strict=True)
        bench.at_most("losses that differ", 0, sum(a != b for a, b in pairs))


def _alone(label: str) -> str:
    return f"fio, the bytes of {label}"
