"""AdamW's state on a drive: a step beside the same bytes moved alone, and beside the step in memory.

Rules: parameters and gradients in fp32, in tensors as a transformer has them; one process has them once, and the
optimizer in memory and the offloaded ones of all budgets step them in turns. A step counts until its last write has
ended. The same I/O alone: as many buckets of the same size, read into as many slots and written from there as soon as
they are read, through a store of its own. Peak memory in a process for each budget: from before the optimizer is made
to the end of its third step, above parameters and gradients.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GB, GIB, MIB, Row, Sample, UnavailableError
from tensorferry.tuning.fio import free_huge_pages_nbytes, jobs_of

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from benchmarks.harness import Contender
    from benchmarks.worker import Worker

BUDGETS_NBYTES = (64 * MIB, 256 * MIB, GIB)
STATE_NBYTES_PER_PARAMETER = 8
ALLOWANCE_NBYTES = 64 * MIB
IN_MEMORY = "torch, in memory"
THEIRS = "DeepSpeed, ZeRO-3 with NVMe"
MIXED = "fio, all state read and written at once"
_DEEPSPEED_BUFFERS = 12  # four for each state that is read, stepped and written at a time
_PEAK_ROUNDS_MAX = 2  # it does not vary as time does
_DRIVES_PARAMETERS_MAX = 30_000_000
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


@scenario
def run(bench: Bench) -> None:
    parameters = bench.settings.parameters
    state_nbytes = parameters * STATE_NBYTES_PER_PARAMETER
    budgets = _budgets_below(state_nbytes, otherwise=max(state_nbytes // 4, 4 * MIB))
    drive = bench.directory / "state"
    stepper = _stepper(bench, parameters)
    _steps(bench, stepper, [*budgets, state_nbytes + state_nbytes // 4], drive)
    _checkpoints(bench, stepper, budgets, drive)
    stepper.close()
    _peaks(bench, [*budgets, state_nbytes + state_nbytes // 4], drive)


def _budgets_below(nbytes: int, otherwise: int) -> list[int]:
    return [budget for budget in BUDGETS_NBYTES if budget < nbytes] or [otherwise]


def _stepper(bench: Bench, parameters: int) -> Worker:
    """Its threads are as users have them; one where nothing is to be measured, and others may be at work."""
    threads = 1 if bench.smoke else len(os.sched_getaffinity(0))
    return bench.worker(
        "benchmarks.peers.offload:Stepper", shapes=shapes(parameters), threads=threads
    )


def _step(stepper: Worker, budget: int, *directories: Path) -> Measure:
    names = [str(directory) for directory in directories]
    return measured(stepper, "step", budget_nbytes=budget, directories=names)


def _steps(bench: Bench, stepper: Worker, budgets: list[int], drive: Path) -> None:
    """Steps of all budgets, and what bounds them, in turns."""
    shown: dict[int, dict[str, Any]] = {}

    def stepping(budget: int) -> Measure:
        step = _step(stepper, budget, drive)

        def measure(number: int) -> Sample:
            sample = step(number)
            shown[budget] = sample.details
            return sample

        return measure

    def alone(budget: int) -> Measure:
        def how(_: int) -> dict[str, int]:
            if budget not in shown:
                raise UnavailableError("no step has shown what is to be moved")
            return {key: int(value) for key, value in shown[budget].items()}

        where: dict[str, Any] = {"label": str(budget), "directories": [str(drive)]}
        return measured(stepper, "move_alone", **where, how=how)

    compared = contenders("limit", {IN_MEMORY: measured(stepper, "step_in_memory")})
    for budget in budgets:
        compared += contenders("ours", {_label(budget): stepping(budget)}, "step")
        if budget != budgets[-1]:
            compared += contenders("limit", {_alone_label(budget): alone(budget)}, "alone")
    comparison = bench.compare(
        f"offload: a step of {bench.settings.parameters / 1e6:.3g} M parameters",
        "AdamW, fused, fp32; with all writes",
        compared,
        "s",
    )
    for budget in budgets:
        row, last = comparison.row(_label(budget)), budget == budgets[-1]
        medians = [comparison.median(label) for label in (IN_MEMORY, _alone_label(budget))]
        limits = [median for median in medians if median]
        others = "that in memory" if last else "the greater of its I/O alone and that in memory"
        measured_ratio = row.median / max(limits) if row and limits else None
        what = f"offload: step with {_label(budget)} over {others}"
        bench.at_most(what, 1.02 if last else 1.05, measured_ratio)
        if row:
            moved = row.samples[-1].details
            read, written = (moved[f"{way}_nbytes"] / GB for way in ("read", "written"))
            bench.note(f"{row.label}: a step reads {read:.3f} GB and writes {written:.3f} GB")


def _checkpoints(bench: Bench, stepper: Worker, budgets: list[int], drive: Path) -> None:
    """Checkpoints between steps; what a budget holds has to be written first."""
    path = bench.directory / "checkpoint"

    def checkpoint(budget: int) -> Measure:
        step = _step(stepper, budget, drive)
        where: dict[str, Any] = {"directories": [str(drive)], "path": str(path)}
        save = measured(stepper, "checkpoint", _remove_tree, [path], budget_nbytes=budget, **where)

        def measure(number: int) -> Sample:
            step(number)  # the one before is outdated
            return save(number)

        return measure

    step, save = _step(stepper, budgets[0], drive), checkpoint(budgets[0])

    def step_after(number: int) -> Sample:
        save(number)
        return step(number)

    def step_without(number: int) -> Sample:
        _remove_tree(path)
        step(number)  # what the checkpoint had is replaced
        return step(number)

    nbytes = bench.settings.parameters * STATE_NBYTES_PER_PARAMETER
    made = bench.compare(
        "offload: a checkpoint",
        f"of {nbytes / GB:.3g} GB, on the file system of the state",
        contenders("ours", {_label(budget): checkpoint(budget) for budget in budgets}),
        "s",
    )
    after, without = {"after one": step_after}, {"without": step_without}
    steps = bench.compare(
        "offload: a step after a checkpoint",
        f"{_label(budgets[0])}; checkpoints there are beside it",
        contenders("ours", after) + contenders("limit", without),
        "s",
    )
    _remove_tree(path)
    bench.at_most("offload: a checkpoint", 0.2, made.median(_label(budgets[0])), unit="s")
    over = steps.over("after one", "without")
    bench.at_most("offload: a step after a checkpoint over one without", 1.1, over)


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _peaks(bench: Bench, budgets: list[int], drive: Path) -> None:
    def in_a_new_process(budget: int) -> Measure:
        def measure(_: int) -> Sample:
            stepper = _stepper(bench, bench.settings.parameters)
            sample = stepper.sample("peak", budget_nbytes=budget, directories=[str(drive)])
            stepper.close()
            return sample

        return measure

    comparison = bench.compare(
        "offload: memory",
        "growth of the peak above parameters and gradients, three steps",
        contenders("ours", {_label(budget): in_a_new_process(budget) for budget in budgets}),
        "MiB",
        rounds=bench.rounds_at_most(_PEAK_ROUNDS_MAX),
    )
    note = f"the budget + 10 % + {ALLOWANCE_NBYTES // MIB}; the worst"
    for budget in budgets:
        what, most = f"offload: peak with {_label(budget)}", 1.1 * budget + ALLOWANCE_NBYTES
        bench.peak(what, most, comparison, _label(budget), note)


@scenario
def run_on_two_drives(bench: Bench) -> None:
    """Two directories on drives of their own, beside each of them alone (root only)."""
    parameters = min(bench.settings.parameters, _DRIVES_PARAMETERS_MAX)
    state_nbytes = STATE_NBYTES_PER_PARAMETER * parameters
    budget = min(BUDGETS_NBYTES[0], max(state_nbytes // 4, 4 * MIB))
    size = 4 * state_nbytes + 256 * MIB
    with bench.on_two_drives(size, _DRIVE_NBYTES_PER_SECOND) as (limited, drives):
        stepper = _stepper(limited, parameters)

        def moved(*directories: Path) -> Measure:
            step = _step(stepper, budget, *directories)
            return lambda number: _as_throughput(step(number))

        states = [drive / "state" for drive in drives]
        ways = {
            "first drive": moved(states[0]),
            "second drive": moved(states[1]),
            "both drives": moved(*states),
        }
        rules = "loop devices over memory; steps"
        comparison = bench.compare("offload: two drives", rules, contenders("ours", ways))
        stepper.call("close")
    over, _ = comparison.over_sum("both drives", ("first drive", "second drive"))
    bench.at_least("offload: both drives over the sum of each", 0.9, over)


def _as_throughput(sample: Sample) -> Sample:
    return replace(sample, value=sample.nbytes / GB / sample.seconds)


@scenario
def run_beside_deepspeed(bench: Bench) -> None:
    """Steps of ours and of DeepSpeed's ZeRO-3, both with fp32 state on NVMe, in processes of their own."""
    if not bench.deepspeed_wanted():
        return
    parameters, directory = bench.settings.parameters, bench.directory
    aio = {"block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": True}
    ours = _stepper(bench, parameters)
    theirs = bench.worker(
        "benchmarks.peers.zero3:OptimizerStepper",
        directory=str(directory / "deepspeed"),
        shapes=shapes(parameters),
        buffers=_DEEPSPEED_BUFFERS,
        aio=aio,
    )
    state_nbytes = STATE_NBYTES_PER_PARAMETER * parameters
    budgets = _budgets_below(state_nbytes // 2, otherwise=state_nbytes // 4)

    def their_step(number: int) -> Sample:
        for _ in range(3 if number == 0 else 0):  # the first ones make files, and read nothing
            theirs.call("step")
        sample = theirs.sample("step")
        return replace(sample, value=sample.seconds, peak_growth_nbytes=None)

    steps = {_label(budget): _step(ours, budget, directory / "state") for budget in budgets}
    comparison = bench.compare(
        f"offload: a step of {parameters / 1e6:.3g} M parameters, and DeepSpeed's",
        "fp32, AdamW, fused; DeepSpeed reads and writes pipelined",
        [
            *contenders("ours", steps),
            *contenders("peer", {THEIRS: their_step}),
            *_mixed(bench, state_nbytes),
        ],
        "s",
    )
    ours.call("close")
    other = comparison.row(THEIRS)
    for label in steps:
        row = comparison.row(label)
        bench.at_least(
            f"offload: DeepSpeed's step over ours, {label}", 2.5, comparison.over(THEIRS, label)
        )
        part = None
        if row and other:
            mine, others = _moved_nbytes(row), _moved_nbytes(other)
            part = mine / others
            bench.note(
                f"{label}: a step moves {mine / GB:.3f} GB, DeepSpeed's {others / GB:.3f} GB"
            )
        bench.at_most(f"offload: bytes moved over DeepSpeed's, {label}", 0.5, part)
    largest = max(map(math.prod, shapes(parameters)))
    bench.note(f"DeepSpeed's buffers: {_DEEPSPEED_BUFFERS * largest * 4 / MIB:.0f} MiB")
    for row in comparison.rows:
        if row.usable:
            speed = statistics.median(sample.nbytes / sample.seconds for sample in row.samples)
            bench.note(f"{row.label}: {speed / GB:.2f} GB/s")


def _moved_nbytes(row: Row) -> float:
    return statistics.median(sample.nbytes for sample in row.samples)


def _mixed(bench: Bench, nbytes: int) -> list[Contender]:
    """Reads of one file beside writes of another, both of all state: the drive's limit for both at once."""
    huge = free_huge_pages_nbytes() >= 2 * 64 * MIB  # for two jobs
    configs = fio.usable([fio.Config("io_uring", MIB, 64, huge_pages=huge)], bench.settings)
    source, target = bench.directory / "fio-read", bench.directory / "fio-written"
    nbytes -= nbytes % MIB

    def measure(_: int) -> Sample:
        for path in (source, target):
            if not path.exists():
                files.write_pattern(path, nbytes, 1)
            files.make_cold(path)
        common = [f"--size={nbytes}", *configs[0].arguments()]
        read, written = jobs_of(
            [
                *("--name=read", f"--filename={source}", "--rw=read", *common),
                *("--name=write", f"--filename={target}", "--rw=write", "--overwrite=1", *common),
            ]
        )
        both = fio.sample(read, "read"), fio.sample(written, "write")
        seconds = max(sample.seconds for sample in both)
        moved = sum(sample.nbytes for sample in both)
        return Sample(seconds, seconds, moved, sum(sample.cpu_seconds or 0 for sample in both))

    return contenders("limit", {MIXED: measure} if configs else {})


def _label(budget_nbytes: int) -> str:
    return f"budget {budget_nbytes / MIB:.4g} MiB"


def _alone_label(budget_nbytes: int) -> str:
    return f"the same I/O alone, {_label(budget_nbytes)}"
