"""Optimizer state, weights and embeddings on a drive, compared with fio, with computing in memory, and with DeepSpeed.

Rules: parameters and gradients are in fp32, in tensors of the shapes of a transformer. One process has one copy of
them, and the offloaded optimizers of all budgets step them in turns. The time of a step includes its last write.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tensorferry
from benchmarks.bench import GIB, MIB, Config, measured, scenario, seeds
from benchmarks.memory import Stopwatch, drive_nbytes, touch_memory, write_pattern
from benchmarks.peers import async_io
from tensorferry.offload import (
    OffloadedOptimizer,
    TableEmbedding,
    offload_optimizer,
    stream_weights,
)
from tensorferry.tuning import fio
from tensorferry.tuning.rounds import GB, Contender, Estimate, MeasurementError, Sample
from tensorferry.tuning.scratch import make_cold, remove
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from tensorferry.tuning.rounds import Comparison, Row
    from tensorferry.tuning.workers import Worker

BUDGETS_NBYTES = (64 * MIB, 256 * MIB, GIB)
STATE_NBYTES_PER_PARAMETER = 8
THEIRS = "DeepSpeed, ZeRO-3 with NVMe"
MIXED = "fio, all state read and written at once"
# Four buffers for each of three states: one is read, one is stepped, and one is written at a time.
_DEEPSPEED_BUFFERS = 12


class Stepper:
    """Parameters, their gradients, and their optimizers, in a worker."""

    def __init__(self, shapes: list[tuple[int, ...]], threads: int) -> None:
        torch.set_num_threads(threads)
        touch_memory(2 * 4 * sum(map(math.prod, shapes)))
        self._params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for param in self._params:
            param.grad = torch.full_like(param, 1e-3)
        # The first step of an optimizer imports modules of torch, which is not part of the measurement.
        small = nn.Parameter(torch.zeros(1))
        small.grad = torch.zeros(1)
        torch.optim.AdamW([small], fused=True).step()
        self._offloaded: dict[str, OffloadedOptimizer] = {}

    def step(self, budget_nbytes: int, directories: list[Path]) -> dict[str, Any]:
        """Measure a step of an offloaded optimizer, including its writes."""
        name = f"{budget_nbytes} {directories}"
        if name not in self._offloaded:
            self._offloaded[name] = self._offload(budget_nbytes, directories)
            for _ in range(2):  # from the second step on, all steps do the same I/O
                self._offloaded[name].step()
                self._offloaded[name].drain()
        optimizer = self._offloaded[name]
        before = optimizer.stats()
        with Stopwatch() as watch:
            optimizer.step()
            optimizer.drain()
        after = optimizer.stats()
        read, written = (after[key] - before[key] for key in ("read_nbytes", "written_nbytes"))
        moved = {"read_nbytes": read, "written_nbytes": written}
        return watch.as_value(watch.seconds, read + written, **moved)

    def checkpoint(self, budget_nbytes: int, directories: list[Path], path: Path) -> dict[str, Any]:
        """Measure a checkpoint of an offloaded optimizer's state."""
        optimizer = self._offloaded[f"{budget_nbytes} {directories}"]
        with Stopwatch() as watch:
            optimizer.checkpoint(path)
        return watch.as_value(watch.seconds)

    def end(self) -> None:
        """Close all optimizers and stores, which frees their space on the drives."""
        for each in self._offloaded.values():
            each.close()
        self._offloaded = {}

    def _new(self) -> Any:
        return torch.optim.AdamW(self._params, lr=1e-4, fused=True)

    def _offload(self, budget_nbytes: int, directories: list[Path]) -> OffloadedOptimizer:
        names = [str(directory) for directory in directories]
        return offload_optimizer(self._new(), names, memory_budget=budget_nbytes)


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer with at least so many parameters: an embedding, and blocks."""
    width = 64 * max(1, min(16, round((parameters / 300e6) ** (1 / 3) * 16)))
    found: list[tuple[int, ...]] = [(max(parameters // 10 // width, 1), width)]
    block = [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block += [(width,)] * 4
    count = found[0][0] * width
    while count < parameters:
        found += block
        count += 12 * width * width + 13 * width
    return found


def _budgets_below(nbytes: int, otherwise: int) -> list[int]:
    return [budget for budget in BUDGETS_NBYTES if budget < nbytes] or [otherwise]


def _stepper(bench: Bench, parameters: int) -> Worker:
    """Start a worker with as many threads as processors, or with one thread in a smoke test, which shares them."""
    threads = 1 if bench.smoke else len(os.sched_getaffinity(0))
    return bench.worker(Stepper, shapes=shapes(parameters), threads=threads)


def _step(stepper: Worker, budget: int, *directories: Path) -> Measure:
    return measured(stepper, "step", budget_nbytes=budget, directories=list(directories))


def _checkpoint(bench: Bench, stepper: Worker, budget: int) -> Measure:
    drive, path = bench.directory / "state", bench.directory / "checkpoint"
    step = _step(stepper, budget, drive)
    how = {"budget_nbytes": budget, "directories": [drive], "path": path}
    save = measured(stepper, "checkpoint", remove, [path], **how)

    def measure(number: int) -> Sample:
        step(number)  # changes the state, so a checkpoint has to write it
        return save(number)

    return measure


@scenario
def beside_deepspeed(bench: Bench) -> None:
    """Compare steps with those of DeepSpeed's ZeRO-3, both with fp32 state on NVMe, in separate processes."""
    if not bench.deepspeed_wanted():
        return
    parameters, directory = bench.settings.parameters, bench.directory
    ours = _stepper(bench, parameters)
    theirs = bench.worker(
        OptimizerStepper,
        directory=directory / "deepspeed",
        shapes=shapes(parameters),
        buffers=_DEEPSPEED_BUFFERS,
        aio={
            "block_size": MIB,
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "overlap_events": True,
        },
    )
    state_nbytes = STATE_NBYTES_PER_PARAMETER * parameters
    budgets = _budgets_below(state_nbytes // 2, otherwise=state_nbytes // 4)

    def their_step(number: int) -> Sample:
        for _ in range(3 if number == 0 else 0):  # the first steps make files and read nothing
            theirs.call("step")
        return Sample(**theirs.call("step"))

    steps = {_label(budget): _step(ours, budget, directory / "state") for budget in budgets}
    comparison = bench.compare(
        f"offload: a step of {parameters / 1e6:.3g} M parameters, compared with DeepSpeed",
        "fp32, AdamW, fused; DeepSpeed with pipelined reads and writes",
        ours=steps,
        peer={THEIRS: their_step},
        more=_mixed(bench, state_nbytes),
        unit="s",
    )
    made = bench.compare(
        "offload: a checkpoint",
        f"{state_nbytes / GB:.3g} GB, on the file system of the state",
        ours={_label(budget): _checkpoint(bench, ours, budget) for budget in budgets},
        unit="s",
    )
    bench.at_most("offload: a checkpoint", 0.2, made.median(_label(budgets[0])), unit="s")
    ours.call("end")
    other = comparison.row(THEIRS)
    for label in steps:
        over = comparison.over(THEIRS, label)
        bench.at_least(f"offload: DeepSpeed's step over ours, {label}", 2.5, over)
        part = _moved_over(comparison.row(label), other)
        bench.at_most(f"offload: bytes moved over DeepSpeed's, {label}", 0.5, part)
    largest = max(map(math.prod, shapes(parameters)))
    bench.note(f"DeepSpeed's buffers: {_DEEPSPEED_BUFFERS * largest * 4 / MIB:.0f} MiB")
    for row in comparison.sorted_rows():
        moved = _moved_nbytes(row)
        bench.note(f"{row.label}: {moved / GB:.3f} GB, {moved / row.median / GB:.2f} GB/s")


def _moved_nbytes(row: Row) -> float:
    return statistics.median(sample.nbytes for sample in row.samples)


def _moved_over(row: Row | None, other: Row | None) -> float | None:
    """Return the ratio of the bytes moved; None if a row is missing, or the other moves none, as tiny models do."""
    return (
        _moved_nbytes(row) / _moved_nbytes(other)
        if row and other and _moved_nbytes(other)
        else None
    )


def _mixed(bench: Bench, nbytes: int) -> list[Contender]:
    """Return the contender in which fio reads and writes all state at the same time: the limit of the drive."""
    config = both_ways_config()
    found = bench.each_fio([config], lambda *_: both_ways(bench.directory, config, nbytes, nbytes))
    return [replace(each, label=MIXED, kind="limit") for each in found]


def both_ways_config() -> Config:
    """Return fio's configuration for reads and writes at the same time, with huge pages if two jobs have enough."""
    huge = fio.free_huge_pages_nbytes() >= 2 * 64 * MIB
    return Config("io_uring", MIB, 64, huge_pages=huge)


def both_ways(directory: Path, config: Config, read_nbytes: int, written_nbytes: int) -> Sample:
    """Measure fio's reads of one file and its writes of another at the same time."""
    arguments: list[str] = []
    wanted = {"read": read_nbytes // MIB * MIB, "write": written_nbytes // MIB * MIB}
    wanted = {way: nbytes for way, nbytes in wanted.items() if nbytes}
    for way, nbytes in wanted.items():
        path = directory / f"fio-{way}"
        if not path.exists() or path.stat().st_size < nbytes:
            write_pattern(path, nbytes, 1)
        make_cold(path)
        arguments += [f"--name={way}", f"--filename={path}", f"--rw={way}", "--overwrite=1"]
        arguments += [f"--size={nbytes}", *config.arguments()]
    jobs = fio.jobs_of(arguments) if wanted else []
    both = [fio.sample(job, way) for job, way in zip(jobs, wanted, strict=True)]
    seconds = max((sample.seconds for sample in both), default=0.0)
    moved = {way: sample.nbytes for way, sample in zip(wanted, both, strict=True)}
    details = {"read_nbytes": moved.get("read", 0), "written_nbytes": moved.get("write", 0)}
    cpu_seconds = sum(sample.cpu_seconds or 0 for sample in both)
    return Sample(seconds, seconds, sum(moved.values()), cpu_seconds, details=details)


def _label(budget_nbytes: int) -> str:
    return f"budget {budget_nbytes / MIB:.4g} MiB"


# A training step of DeepSpeed's ZeRO-3 with all states on NVMe: its own engine compared with ours.
#
# Each engine has a separate process. Both processes stay alive and train in turns; a sample is some more steps of one
# of them. Model, batches and configuration are the same, and the losses must be equal to the last bit. A third training
# keeps all states in memory; the difference to its time is the cost of the drive.

OURS, OF_DEEPSPEED, ALL_IN_MEMORY = "tensorferry", "DeepSpeed", "all in memory"
STEPS = 2
# DeepSpeed's defaults, and settings that its tuner commonly finds.
AIO: dict[str, dict[str, Any]] = {
    "DeepSpeed's defaults": {},
    "queue depth 32, 4 threads": {"queue_depth": 32, "intra_op_parallelism": 4},
}


class Trainer:
    """A training with DeepSpeed in one process, on its own engine or on ours; each sample continues the training."""

    def __init__(self, directory: Path, served: bool, **options: Any) -> None:
        self._clock, self._scratch = _begin(served)
        from benchmarks.training import Training

        self._training = Training(directory, **options)

    def steps(self, count: int) -> dict[str, Any]:
        """Measure some steps, and the bytes that the process reads from and writes to drives during these steps."""
        before, in_handle = drive_nbytes("read", "write"), self._clock.seconds
        with Stopwatch() as watch:
            losses = [self._training.step() for _ in range(count)]
        nbytes = drive_nbytes("read", "write") - before
        in_handle = self._clock.seconds - in_handle
        return watch.as_value(watch.seconds / count, nbytes, losses=losses, in_handle=in_handle)


class OptimizerStepper:
    """Steps of an optimizer with states on NVMe, on DeepSpeed's own engine."""

    def __init__(
        self, directory: Path, shapes: list[tuple[int, ...]], buffers: int, aio: dict[str, Any]
    ) -> None:
        _, self._scratch = _begin(served=False)
        from benchmarks.training import OptimizerOnNvme

        self._training = OptimizerOnNvme(directory, shapes, buffers, aio)

    def step(self) -> dict[str, Any]:
        """Measure a step, and the bytes moved by it and by the computation of its gradients."""
        before = drive_nbytes("read", "write")
        self._training.compute_gradients()
        with Stopwatch() as watch:
            self._training.step()
        watch.peak_growth_nbytes = None
        return watch.as_value(watch.seconds, drive_nbytes("read", "write") - before)


def _begin(served: bool) -> tuple[_HandleClock, tempfile.TemporaryDirectory[str]]:
    """Initialize DeepSpeed in this process, with its own engine or, if ``served``, with ours."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    # DeepSpeed requires these variables, but the process group below uses a file.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import tensorferry.deepspeed
    from benchmarks.training import join

    if served:
        tensorferry.deepspeed.install()
    else:
        tensorferry.deepspeed.uninstall()
    clock = _HandleClock(async_io().aio_handle)
    scratch = tempfile.TemporaryDirectory()
    join(init_method=f"file://{scratch.name}/store", rank=0, world_size=1)
    return clock, scratch


class _HandleClock:
    """The time that DeepSpeed spends in calls of a handle's methods, which submit requests and wait for them."""

    def __init__(self, kind: type) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in ("wait", "async_pread", "async_pwrite", "pread", "pwrite"):
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:  # a method of our handle may call another one
                return method(*arguments, **keywords)
            self._inside, start = True, time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed


@scenario
def zero3(bench: Bench) -> None:
    if not bench.deepspeed_wanted():
        return
    for name, aio in AIO.items():
        _trainings(bench, name, aio)
        for worker in bench.workers:  # free the memory of these trainings before the next ones
            worker.close()
        bench.workers.clear()


def _trainings(bench: Bench, name: str, aio: dict[str, Any]) -> None:
    losses: dict[str, list[str]] = {}

    def steps(label: str, *, served: bool, offload: str = "both") -> Measure:
        size = {"layers": 1, "hidden": 512} if bench.smoke else {"layers": 4, "hidden": 1024}
        directory = bench.directory / label.replace(" ", "-")
        how = {"directory": directory, "served": served, "offload": offload, "aio": aio}
        worker = bench.worker(Trainer, **how, **size)

        def measure(number: int) -> Sample:
            if number == 0:  # the first steps make the files and the optimizer's states
                losses[label] = worker.call("steps", count=2)["details"]["losses"]
            sample = Sample(**worker.call("steps", count=STEPS))
            losses[label] += sample.details["losses"]
            return sample

        return measure

    comparison = bench.compare(
        f"zero3 step, {name}",
        "all states on NVMe, except in memory",
        ours={OURS: steps(OURS, served=True)},
        peer={
            OF_DEEPSPEED: steps(OF_DEEPSPEED, served=False),
            ALL_IN_MEMORY: steps(ALL_IN_MEMORY, served=True, offload="nothing"),
        },
        unit="s",
    )
    over = comparison.over(OURS, OF_DEEPSPEED)
    bench.at_most(f"ZeRO-3 step over DeepSpeed's, {name}", 1.0, over)
    if comparison.row(OURS) and comparison.row(OF_DEEPSPEED):
        pairs = zip(losses[OURS], losses[OF_DEEPSPEED], strict=False)
        bench.at_most(f"losses that differ, {name}", 0, sum(a != b for a, b in pairs))
    for label in (OURS, OF_DEEPSPEED):
        if row := comparison.row(label):
            held = statistics.median(s.details["in_handle"] for s in row.samples) / STEPS
            moved = f"{_moved_nbytes(row) / STEPS / GB:.2f} GB in each step"
            spent = f"{held:.2f} of {row.median:.2f} s are spent in the handle"
            bench.note(f"{name}: {label} moves {moved}; {spent}")


# A model in a quarter of its memory: the time for each token, compared with its lower bound.
#
# The lower bound is the longer of two times: only reading the bytes that a token needs, and computing with all weights
# in memory. Weights are float32 in four files, and reads bypass the page cache. The batch is one token, so each read of
# a weight serves one use. accelerate's ``disk_offload`` has no budget and reads through the page cache.

STREAMED, READ, ACCELERATE = "stream_weights", "reading alone", "accelerate disk_offload"
_TOKENS = 4  # for one sample
_SHARDS = 4


class Model:
    """A model with the blocks of two linear layers of a decoder, and about so many bytes of float32 weights."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        self.width = 1024 if nbytes >= 256 * MIB else 128
        self.blocks = max(2, nbytes // (4 * 8 * self.width * self.width))
        self.directory = directory
        self.paths = [directory / f"{number}.safetensors" for number in range(_SHARDS)]
        self.token = torch.randn(1, self.width, generator=torch.Generator().manual_seed(3))
        self.model: nn.Module | None = None
        self.stream: Any = None

    def save(self) -> int:
        """Write the weights to shards; return their size in bytes."""
        from safetensors.torch import save_file

        state = self._whole().state_dict()
        names = list(state)
        each = -(-len(names) // _SHARDS)
        for number, path in enumerate(self.paths):
            some = names[number * each : (number + 1) * each]
            save_file({name: state[name] for name in some}, path)
        return sum(value.nbytes for value in state.values())

    def in_memory(self) -> dict[str, Any]:
        """Measure the time for a token with all weights in memory."""
        if self.model is None:
            self.model = self._whole()
        return self._tokens()

    def streamed(self, budget_nbytes: int) -> dict[str, Any]:
        """Measure the time for a token with streamed weights; two passes before the first sample learn the order."""
        if self.stream is None:
            with torch.device("meta"):
                self.model = self._new()
            self.stream = stream_weights(self.model, self.paths, memory_budget=budget_nbytes)
            for _ in range(2):
                self._forward()
        before = self.stream.stats()["read_nbytes"]
        result = self._tokens()
        read = (self.stream.stats()["read_nbytes"] - before) // _TOKENS
        return result | {"details": {"read_nbytes": read}}

    def read(self, nbytes: int) -> dict[str, Any]:
        """Measure only reading as many bytes as a token of the streamed model needs."""
        memory = tensorferry.empty(nbytes // _SHARDS, torch.uint8)
        with Stopwatch() as watch:
            for path in self.paths:
                tensorferry.read(path, memory[: path.stat().st_size])
        return watch.as_value(watch.seconds, nbytes)

    def disk_offload(self) -> dict[str, Any]:
        """Measure the time for a token with accelerate's ``disk_offload``, which has no budget and keeps no weights."""
        if self.model is None:
            try:
                from accelerate import disk_offload
            except ImportError as error:
                raise UnavailableError(f"accelerate: {error}") from None
            folder = self.directory / "offloaded"
            self.model = disk_offload(self._whole(), folder, execution_device=torch.device("cpu"))
        return self._tokens()

    def _tokens(self) -> dict[str, Any]:
        with Stopwatch() as watch:
            for _ in range(_TOKENS):
                self._forward()
        return watch.as_value(watch.seconds / _TOKENS)

    def _forward(self) -> None:
        assert self.model is not None
        with torch.no_grad():
            found: torch.Tensor = self.model(self.token)
        if not bool(torch.isfinite(found).all()):
            raise MeasurementError("the result is not finite")

    def _whole(self) -> nn.Module:
        torch.manual_seed(7)
        return self._new()

    def _new(self) -> nn.Module:
        width = self.width
        blocks = [
            layer
            for _ in range(self.blocks)
            for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
        return nn.Sequential(*blocks).eval().requires_grad_(False)


@scenario
def streamed_weights(bench: Bench) -> None:
    def worker() -> Worker:
        return bench.worker(Model, nbytes=2 * bench.nbytes, directory=bench.directory)

    writer = worker()
    total: int = writer.call("save")
    writer.close()
    budget = total // 4
    paths = sorted(bench.directory.glob("*.safetensors"))
    needed = total - budget

    def tokens(call: str, **options: Any) -> Measure:
        return measured(worker(), call, make_cold, paths, **options)

    ours = tokens("streamed", budget_nbytes=budget)

    def streamed(number: int) -> Sample:
        nonlocal needed
        sample = ours(number)
        needed = int(sample.details["read_nbytes"])
        return sample

    comparison = bench.compare(
        "stream_weights",
        f"{total >> 20} MiB of weights, a budget of {budget >> 20} MiB, cold files",
        ours={STREAMED: streamed},
        limit={READ: tokens("read", nbytes=lambda _: needed), ALL_IN_MEMORY: tokens("in_memory")},
        peer={ACCELERATE: tokens("disk_offload")},
        unit="s a token",
    )
    bench.leave_out(comparison, ACCELERATE, "accelerate")
    over = over_the_slower(comparison, STREAMED, READ, ALL_IN_MEMORY)
    bench.at_most("stream_weights: time for a token over max(reading, computing)", 1.1, over)


def over_the_slower(comparison: Comparison, ours: str, *bounds: str) -> Estimate | None:
    """Return ours over the slower of its bounds, round by round; None if one of them is missing."""
    rows = [comparison.row(label) for label in (ours, *bounds)]
    values = [[sample.value for sample in row.samples] for row in rows if row is not None]
    if len(values) < len(rows):
        return None
    return Estimate.of(one / max(others) for one, *others in zip(*values, strict=True))


# An embedding on a drive, followed by a pass that takes as long as its reads: the time for both, compared with the same
# in memory.
#
# A batch has 4,096 random rows of 320 bytes of a cold file. Each row is read, because the row cache is off. The pass is
# a number of matrix products in one thread, which take as long as reading the rows of a batch alone.

PREFETCHED, NOT_PREFETCHED = "TableEmbedding, prefetched", "TableEmbedding"
_ROW_ELEMENTS = 80
_BATCH_IDS = 4096
_BATCHES = 24


class Embedder:
    """A model, in a worker, that looks up the rows of batches, and computes a pass after each batch."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)
        self.shape = path.stat().st_size // (4 * _ROW_ELEMENTS), _ROW_ELEMENTS
        self.path, self.matrix = path, torch.randn(256, 256)
        self.weight: nn.Embedding | None = None

    def calibrate(self) -> int:
        """Return the number of matrix products that take as long as reading a batch."""
        self._compute(200)  # the first products are slower
        seconds = statistics.median(
            self.on_drive(0, prefetched=False, seed=seed)["value"] for seed in range(3)
        )
        with Stopwatch() as watch:
            self._compute(200)
        return math.ceil(200 * seconds / watch.seconds)

    def on_drive(self, products: int, prefetched: bool, seed: int) -> dict[str, Any]:
        """Measure passes with the weight on the drive."""
        with tensorferry.Table(self.path, self.shape, torch.float32, direct=True) as table:
            return self._passes(TableEmbedding(table), products, prefetched, seed)

    def in_memory(self, products: int, seed: int) -> dict[str, Any]:
        """Measure the same passes with the weight in memory."""
        if self.weight is None:
            weight = torch.empty(self.shape)
            tensorferry.read(self.path, weight)
            self.weight = nn.Embedding.from_pretrained(weight)
        return self._passes(self.weight, products, False, seed)

    def _passes(self, module: Any, products: int, prefetched: bool, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        batches = [
            torch.randint(self.shape[0], (_BATCH_IDS,), generator=generator)
            for _ in range(_BATCHES + 1)
        ]
        # The first batch is prefetched before the clock starts. In return the loop prefetches one batch more than it
        # uses, so the measured time includes the reads of as many batches.
        if prefetched:
            module.prefetch(batches[0])
            module._reading._prefetched()[0].wait()
        with Stopwatch() as watch:
            for ids, following in itertools.pairwise(batches):
                if prefetched:
                    module.prefetch(following)
                rows = module(ids)
                self._compute(products)
        with open(self.path, "rb") as file:
            file.seek(int(batches[-2][-1]) * 4 * _ROW_ELEMENTS)
            if rows[-1].numpy().tobytes() != file.read(4 * _ROW_ELEMENTS):
                raise MeasurementError("a row is not that of the file")
        return watch.as_value(watch.seconds / _BATCHES)

    def _compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self.matrix, self.matrix)


@scenario
def table_embedding(bench: Bench) -> None:
    path = bench.directory / "table"
    write_pattern(path, bench.nbytes, 5)

    def worker() -> Worker:
        return bench.worker(Embedder, path=path)

    make_cold(path)
    calibrating = worker()
    products: int = calibrating.call("calibrate")
    calibrating.close()

    def passes(call: str, **options: Any) -> Measure:
        options |= {"products": products, "seed": seeds(7)}
        return measured(worker(), call, make_cold, [path], **options)

    comparison = bench.compare(
        "embedding",
        f"{_BATCH_IDS:,} rows of {4 * _ROW_ELEMENTS} bytes of {bench.nbytes >> 20} MiB, cold, and a pass that takes as "
        "long as their reads",
        ours={PREFETCHED: passes("on_drive", prefetched=True)},
        limit={ALL_IN_MEMORY: passes("in_memory")},
        peer={NOT_PREFETCHED: passes("on_drive", prefetched=False)},
        unit="s a batch",
    )
    over = comparison.over(PREFETCHED, comparison.row(ALL_IN_MEMORY))
    bench.at_most("embedding: time, prefetched over in memory", 1.05, over)
