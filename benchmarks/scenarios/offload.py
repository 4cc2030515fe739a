"""AdamW's state on a drive: a step beside the same bytes moved alone, and beside the step in memory.

Rules: parameters and gradients in fp32, in tensors as a transformer has them; one process has them once, and the
optimizer in memory and the offloaded ones of all budgets step them in turns. A step counts until its last write has
ended. The same I/O alone: as many buckets of the same size, read into as many slots and written from there as soon as
they are read, through a store of its own. Peak memory in a process for each budget: from before the optimizer is made
to the end of its third step, above parameters and gradients.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    GB,
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Row,
    Sample,
    Settings,
    UnavailableError,
    compare,
    ratio,
)
from benchmarks.measure import Stopwatch, touch_memory
from benchmarks.scenarios.loop_device import loop_mounted
from benchmarks.scenarios.striped import limited
from benchmarks.worker import Worker, workers
from tensorferry.tuning.offload import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.offload import OffloadedOptimizer

BUDGETS_NBYTES = (64 * MIB, 256 * MIB, GIB)
STATE_NBYTES_PER_PARAMETER = 8
ALLOWANCE_NBYTES = 64 * MIB
IN_MEMORY = "torch, in memory"
THEIRS = "DeepSpeed, ZeRO-3 with NVMe"
MIXED = "fio, all state read and written at once"
_STEPPER = f"{__name__}:Stepper"
_DEEPSPEED_BUFFERS = 12  # four for each state that is read, stepped and written at a time
# Two such drives both ways at once leave processors, which play the drives as well, time to step.
_DRIVE_NBYTES_PER_SECOND = 400_000_000


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """The tensors of a transformer of at least so many parameters: an embedding, and blocks."""
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


class Stepper:
    """Parameters and gradients, and optimizers of them, in a worker."""

    def __init__(self, parameters: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        touch_memory(2 * 4 * parameters)
        self._params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes(parameters)]
        for param in self._params:
            param.grad = torch.full_like(param, 1e-3)
        # What torch imports with the first step of all.
        small = torch.nn.Parameter(torch.zeros(1))
        small.grad = torch.zeros(1)
        torch.optim.AdamW([small], fused=True).step()
        self._in_memory: torch.optim.Optimizer | None = None
        self._offloaded: dict[str, OffloadedOptimizer] = {}
        self._alone: dict[str, Traffic] = {}

    def step_in_memory(self) -> dict[str, Any]:
        """Step the optimizer as it is."""
        if self._in_memory is None:
            self._in_memory = self._new()
            self._in_memory.step()
        with Stopwatch() as watch:
            self._in_memory.step()
        return _seconds(watch)

    def step(self, budget_nbytes: int, directories: list[str]) -> dict[str, Any]:
        """Step an offloaded one, and wait for its writes."""
        name = f"{budget_nbytes} {directories}"
        if name not in self._offloaded:
            self._offloaded[name] = self._offload(budget_nbytes, directories)
            for _ in range(2):  # the second one is as all that follow
                self._offloaded[name].step()
                self._offloaded[name].drain()
        optimizer = self._offloaded[name]
        before = optimizer.stats()
        with Stopwatch() as watch:
            optimizer.step()
            optimizer.drain()
        after = optimizer.stats()
        return _seconds(
            watch,
            read_nbytes=after["read_nbytes"] - before["read_nbytes"],
            written_nbytes=after["written_nbytes"] - before["written_nbytes"],
            wait_seconds=after["wait_seconds"] - before["wait_seconds"],
            buckets=after["buckets"],
            bucket_nbytes=after["state_nbytes"] // after["buckets"],
            memory_nbytes=after["memory_nbytes"],
        )

    def move_alone(self, label: str, directories: list[str], how: dict[str, int]) -> dict[str, Any]:
        """Move what a step has moved."""
        if label not in self._alone:
            bucket = how["bucket_nbytes"]
            slots = max(how["memory_nbytes"] // bucket, 1)
            self._alone[label] = Traffic(directories, bucket, how["buckets"], slots)
        alone = self._alone[label]
        with Stopwatch() as watch:
            alone.move(how["read_nbytes"], how["written_nbytes"])
        return _seconds(watch)

    def peak(self, budget_nbytes: int, directories: list[str]) -> dict[str, Any]:
        """Make an offloaded optimizer and take its first steps."""
        with Stopwatch() as watch:
            optimizer = self._offload(budget_nbytes, directories)
            for _ in range(3):
                optimizer.step()
            optimizer.drain()
        optimizer.close()
        growth = watch.peak_growth_nbytes
        if growth is None:
            raise UnavailableError("the kernel does not tell the peak of memory")
        return _seconds(watch, peak_nbytes=growth)

    def checkpoint(self, budget_nbytes: int, directories: list[str], path: str) -> dict[str, Any]:
        """Keep the state as a checkpoint."""
        optimizer = self._offloaded[f"{budget_nbytes} {directories}"]
        with Stopwatch() as watch:
            optimizer.checkpoint(path)
        return _seconds(watch)

    def close(self) -> None:
        """Give space on drives back."""
        for optimizer in self._offloaded.values():
            optimizer.close()
        for alone in self._alone.values():
            alone.close()
        self._offloaded, self._alone = {}, {}

    def _new(self) -> Any:
        import torch

        return torch.optim.AdamW(self._params, lr=1e-4, fused=True)

    def _offload(self, budget_nbytes: int, directories: list[str]) -> OffloadedOptimizer:
        from tensorferry.offload import offload_optimizer

        return offload_optimizer(self._new(), directories, memory_budget=budget_nbytes)


def _seconds(watch: Stopwatch, **details: Any) -> dict[str, Any]:
    return {"seconds": watch.seconds, "cpu_seconds": watch.cpu_seconds, "details": details}


def run(settings: Settings) -> Outcome:
    state_nbytes = settings.parameters * STATE_NBYTES_PER_PARAMETER
    budgets = [nbytes for nbytes in BUDGETS_NBYTES if nbytes < state_nbytes] or [
        max(state_nbytes // 4, 4 * MIB)
    ]
    budgets.append(state_nbytes + state_nbytes // 4)
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        drive = directory / "state"
        stepper = make(_STEPPER, parameters=settings.parameters, threads=_threads(settings))
        steps = _Steps(stepper, settings, budgets, [str(drive)])
        comparison = steps.run()
        outcome = Outcome([comparison], steps.figures(comparison))
        outcome.notes += [
            _moved(row) for row in comparison.rows if "step" in row.tags and row.usable
        ]
        _checkpoints(settings, outcome, stepper, budgets[:-1], str(drive), directory)
        stepper.close()
        _peaks(settings, outcome, budgets, str(drive), make)
    return outcome


class _Steps:
    """Steps of all budgets, and what bounds them, in turns."""

    def __init__(
        self, stepper: Worker, settings: Settings, budgets: list[int], drives: list[str]
    ) -> None:
        self._stepper, self._settings, self._drives = stepper, settings, drives
        self._budgets = budgets
        self._how: dict[int, dict[str, int]] = {}

    def run(self) -> Comparison:
        count = self._settings.parameters
        comparison = Comparison(
            f"offload: a step of {count / 1e6:.3g} M parameters",
            "AdamW, fused, fp32; with all writes",
            "s",
            higher_is_better=False,
        )
        contenders = [Contender(IN_MEMORY, "limit", self._in_memory)]
        for budget in self._budgets:
            contenders.append(Contender(_label(budget), "ours", self._step(budget), ("step",)))
            if budget != self._budgets[-1]:
                contenders.append(
                    Contender(_alone_label(budget), "limit", self._alone(budget), ("alone",))
                )
        return compare(self._settings, comparison, contenders)

    def figures(self, comparison: Comparison) -> list[Figure]:
        figures = []
        memory = comparison.row(IN_MEMORY)
        for budget in self._budgets:
            step, alone = comparison.row(_label(budget)), comparison.row(_alone_label(budget))
            last = budget == self._budgets[-1]
            limits = [row.median for row in (memory, alone) if row]
            measured = step.median / max(limits) if step and limits else None
            figures.append(
                Figure(
                    f"offload: step with {_label(budget)} over "
                    + (
                        "that in memory"
                        if last
                        else "the greater of its I/O alone and that in memory"
                    ),
                    "<=",
                    1.02 if last else 1.05,
                    measured,
                )
            )
        return figures

    def _in_memory(self, _: int) -> Sample:
        return _sample(self._stepper.call("step_in_memory"))

    def _step(self, budget: int) -> Callable[[int], Sample]:
        def measure(_: int) -> Sample:
            answer = self._stepper.call("step", budget_nbytes=budget, directories=self._drives)
            self._how[budget] = answer["details"]
            return _sample(answer)

        return measure

    def _alone(self, budget: int) -> Callable[[int], Sample]:
        def measure(_: int) -> Sample:
            if budget not in self._how:
                raise UnavailableError("no step has shown what is to be moved")
            how = {key: int(value) for key, value in self._how[budget].items()}
            return _sample(
                self._stepper.call(
                    "move_alone", label=str(budget), directories=self._drives, how=how
                )
            )

        return measure


def _sample(answer: dict[str, Any]) -> Sample:
    details = answer["details"]
    nbytes = details.get("read_nbytes", 0) + details.get("written_nbytes", 0)
    return Sample(
        answer["seconds"], answer["seconds"], nbytes, answer["cpu_seconds"], None, details
    )


def _moved(row: Row) -> str:
    details = row.samples[-1].details
    return (
        f"{row.label}: a step reads {details['read_nbytes'] / GB:.3f} GB and writes "
        f"{details['written_nbytes'] / GB:.3f} GB"
    )


def _checkpoints(
    settings: Settings,
    outcome: Outcome,
    stepper: Worker,
    budgets: list[int],
    drive: str,
    directory: Path,
) -> None:
    """Checkpoints between steps; what a budget holds has to be written first."""
    path = directory / "checkpoint"
    made = Comparison(
        "offload: a checkpoint",
        f"of {settings.parameters * STATE_NBYTES_PER_PARAMETER / GB:.3g} GB, on the file system of the state",
        "s",
        higher_is_better=False,
    )
    after = Comparison(
        "offload: a step after a checkpoint",
        f"{_label(budgets[0])}; checkpoints there are beside it",
        "s",
        higher_is_better=False,
    )

    def step(budget: int) -> Sample:
        return _sample(stepper.call("step", budget_nbytes=budget, directories=[drive]))

    def checkpoint(budget: int) -> Callable[[int], Sample]:
        def measure(_: int) -> Sample:
            step(budget)  # the one before is outdated
            shutil.rmtree(path, ignore_errors=True)
            return _sample(
                stepper.call(
                    "checkpoint", budget_nbytes=budget, directories=[drive], path=str(path)
                )
            )

        return measure

    def step_after(number: int) -> Sample:
        checkpoint(budgets[0])(number)
        return step(budgets[0])

    def step_without(_: int) -> Sample:
        shutil.rmtree(path, ignore_errors=True)
        step(budgets[0])  # what the checkpoint had is replaced
        return step(budgets[0])

    compare(
        settings,
        made,
        [Contender(_label(budget), "ours", checkpoint(budget)) for budget in budgets],
    )
    compare(
        settings,
        after,
        [Contender("after one", "ours", step_after), Contender("without", "limit", step_without)],
    )
    shutil.rmtree(path, ignore_errors=True)
    outcome.comparisons += [made, after]
    row = made.row(_label(budgets[0]))
    outcome.figures.append(
        Figure("offload: a checkpoint", "<=", 0.2, row.median if row else None, "s")
    )
    outcome.figures.append(
        Figure(
            "offload: a step after a checkpoint over one without",
            "<=",
            1.1,
            ratio(after.row("after one"), after.row("without")),
        )
    )


def _peaks(
    settings: Settings,
    outcome: Outcome,
    budgets: list[int],
    drive: str,
    make: Callable[..., Worker],
) -> None:
    def measure(budget: int) -> Callable[[int], Sample]:
        def in_a_new_process(_: int) -> Sample:
            worker = make(_STEPPER, parameters=settings.parameters, threads=_threads(settings))
            answer = worker.call("peak", budget_nbytes=budget, directories=[drive])
            worker.close()
            nbytes = answer["details"]["peak_nbytes"]
            return Sample(nbytes / MIB, answer["seconds"], peak_growth_nbytes=nbytes)

        return in_a_new_process

    comparison = Comparison(
        "offload: memory",
        "growth of the peak above parameters and gradients, three steps",
        "MiB",
        higher_is_better=False,
    )
    few = replace(settings, rounds=min(settings.rounds, 2))  # it does not vary as time does
    contenders = [Contender(_label(budget), "ours", measure(budget)) for budget in budgets]
    outcome.comparisons.append(compare(few, comparison, contenders))
    for budget in budgets:
        row = comparison.row(_label(budget))
        peak = row.peak_growth_nbytes if row else None
        limit = (1.1 * budget + ALLOWANCE_NBYTES) / MIB
        outcome.figures.append(
            Figure(
                f"offload: peak with {_label(budget)}",
                "<=",
                limit,
                None if peak is None else peak / MIB,
                "MiB",
                f"the budget + 10 % + {ALLOWANCE_NBYTES // MIB}; the worst",
            )
        )


def run_on_two_drives(settings: Settings) -> Outcome:
    """Two directories on drives of their own, beside each of them alone (root only)."""
    outcome = Outcome()
    parameters = min(settings.parameters, 30_000_000)
    size = 4 * STATE_NBYTES_PER_PARAMETER * parameters + 256 * MIB
    budget = min(BUDGETS_NBYTES[0], max(STATE_NBYTES_PER_PARAMETER * parameters // 4, 4 * MIB))
    try:
        with contextlib.ExitStack() as stack:
            drives = [str(stack.enter_context(loop_mounted(size)) / "state") for _ in range(2)]
            held = [
                stack.enter_context(limited(Path(drive).parent, _DRIVE_NBYTES_PER_SECOND))
                for drive in drives
            ]
            make = stack.enter_context(workers())
            stepper = make(_STEPPER, parameters=parameters, threads=_threads(settings))
            ways = {"first drive": drives[:1], "second drive": drives[1:], "both drives": drives}

            def measure(directories: list[str]) -> Callable[[int], Sample]:
                def step(_: int) -> Sample:
                    answer = stepper.call("step", budget_nbytes=budget, directories=directories)
                    sample = _sample(answer)
                    return replace(sample, value=sample.nbytes / GB / sample.seconds)

                return step

            comparison = Comparison("offload: two drives", "loop devices over memory; steps")
            contenders = [Contender(name, "ours", measure(at)) for name, at in ways.items()]
            outcome.comparisons.append(compare(settings, comparison, contenders))
            rows = [comparison.row(name) for name in ways]
            stepper.call("close")
    except UnavailableError as reason:
        return Outcome(notes=[str(reason)])
    if not all(held):
        outcome.notes.append("drives at full speed, with which processors may not keep up")
    measured = None
    if rows[0] and rows[1] and rows[2]:
        measured = rows[2].median / (rows[0].median + rows[1].median)
    outcome.figures.append(Figure("offload: both drives over the sum of each", ">=", 0.9, measured))
    return outcome


def run_beside_deepspeed(settings: Settings) -> Outcome:
    """Steps of ours and of DeepSpeed's ZeRO-3, both with fp32 state on NVMe, in processes of their own."""
    if not settings.deepspeed:
        return Outcome(notes=["DeepSpeed was left out on request"])
    outcome = Outcome()
    tensors = shapes(settings.parameters)
    aio = {"block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": True}
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        ours = make(_STEPPER, parameters=settings.parameters, threads=_threads(settings))
        theirs = make(
            "benchmarks.peers.zero3:OptimizerStepper",
            directory=str(directory / "deepspeed"),
            shapes=tensors,
            buffers=_DEEPSPEED_BUFFERS,
            aio=aio,
        )
        state_nbytes = STATE_NBYTES_PER_PARAMETER * settings.parameters
        budgets = [nbytes for nbytes in BUDGETS_NBYTES if nbytes < state_nbytes // 2] or [
            state_nbytes // 4
        ]

        def step(budget: int) -> Callable[[int], Sample]:
            return lambda _: _sample(
                ours.call("step", budget_nbytes=budget, directories=[str(directory / "state")])
            )

        def their_step(number: int) -> Sample:
            for _ in range(3 if number == 0 else 0):  # the first ones make files, and read nothing
                theirs.call("step")
            found = theirs.call("step")
            return Sample(
                found["seconds"], found["seconds"], found["nbytes"], found["cpu_seconds"], None, {}
            )

        comparison = Comparison(
            f"offload: a step of {settings.parameters / 1e6:.3g} M parameters, and DeepSpeed's",
            "fp32, AdamW, fused; DeepSpeed reads and writes pipelined",
            "s",
            higher_is_better=False,
        )
        contenders = [Contender(_label(budget), "ours", step(budget)) for budget in budgets]
        contenders.append(Contender(THEIRS, "peer", their_step))
        huge = fio.free_huge_pages_nbytes() >= 2 * 64 * MIB  # for two jobs
        configs = fio.usable([fio.Config("io_uring", "1M", 64, huge=huge)], settings)
        contenders += [
            Contender(MIXED, "limit", _mixed(config, directory, state_nbytes)) for config in configs
        ]
        outcome.comparisons.append(compare(settings, comparison, contenders))
        ours.call("close")
    other = comparison.row(THEIRS)
    for budget in budgets:
        row = comparison.row(_label(budget))
        moved = None
        if row and other:
            moved, others = (
                statistics.median(sample.nbytes for sample in each.samples) for each in (row, other)
            )
            outcome.notes.append(
                f"{_label(budget)}: a step moves {moved / GB:.3f} GB, DeepSpeed's {others / GB:.3f} GB"
            )
            moved /= others
        outcome.figures += [
            Figure(
                f"offload: DeepSpeed's step over ours, {_label(budget)}",
                ">=",
                2.5,
                ratio(other, row),
            ),
            Figure(f"offload: bytes moved over DeepSpeed's, {_label(budget)}", "<=", 0.5, moved),
        ]
    outcome.notes.append(
        f"DeepSpeed's buffers: {_DEEPSPEED_BUFFERS * max(map(math.prod, tensors)) * 4 / MIB:.0f} MiB"
    )
    outcome.notes += [
        f"{row.label}: {statistics.median(sample.nbytes / sample.seconds for sample in row.samples) / GB:.2f} GB/s"
        for row in comparison.rows
        if row.usable
    ]
    return outcome


def _mixed(config: fio.Config, directory: Path, nbytes: int) -> Callable[[int], Sample]:
    """Reads of one file beside writes of another, both of all state: the drive's limit for both at once."""
    source, target = directory / "fio-read", directory / "fio-written"
    nbytes -= nbytes % MIB
    jobs = [
        option
        for path, kind in ((source, "read"), (target, "write"))
        for option in (f"--name={kind}", f"--filename={path}", f"--rw={kind}", f"--size={nbytes}")
        + ("--overwrite=1",) * (kind == "write")
        + tuple(config.settings.arguments())
    ]

    def measure(_: int) -> Sample:
        for path in (source, target):
            if not path.exists():
                files.write_pattern(path, nbytes, 1)
            files.make_cold(path)
        read, written = fio.run_jobs(*jobs)
        both = fio.sample(read, "read"), fio.sample(written, "write")
        seconds = max(sample.seconds for sample in both)
        moved = sum(sample.nbytes for sample in both)
        return Sample(seconds, seconds, moved, sum(sample.cpu_seconds or 0 for sample in both))

    return measure


def _threads(settings: Settings) -> int:
    """As users have them; one where nothing is to be measured, and others may be at work."""
    return 1 if settings.smoke else len(os.sched_getaffinity(0))


def _label(budget_nbytes: int) -> str:
    return f"budget {budget_nbytes / MIB:.4g} MiB"


def _alone_label(budget_nbytes: int) -> str:
    return f"the same I/O alone, {_label(budget_nbytes)}"
