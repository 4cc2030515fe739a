"""`tensorferry-ds-io` against DeepSpeed's ds_io, the same command line, and against fio at the same settings.

Rules: each sample is a run of the command, with 1 transfer to warm up and 3 that count; its value is what it
prints as E2E speed. Files are new for each run that writes (the warm-up makes them, the others overwrite), cold and
the same for all that read. fio does the same: a run to warm up, then 3 that count, the same engine as ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tensorferry
from benchmarks import files, fio
from benchmarks.harness import (
    GIB,
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Sample,
    Settings,
    UnavailableError,
    compare,
    ratio,
    throughput,
)
from benchmarks.worker import ENVIRONMENT
from tensorferry.tuning import fio as tuning_fio

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPS = 3
# ds_io's defaults, which are the settings on all sides.
BLOCK_SIZE, QUEUE_DEPTH = "1M", 32
OURS, THEIRS = "tensorferry-ds-io", "DeepSpeed ds_io"
_BIN = Path(sys.executable).parent
_RUN_SECONDS_MAX = 600


@dataclass(frozen=True)
class Task:
    """Reading or writing, by how many processes, how much each."""

    directory: Path
    operation: str
    processes: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"ds_io {self.operation}, {self.processes} process{'es' * (self.processes > 1)}"

    @property
    def paths(self) -> list[Path]:
        """The names that ds_io gives its files."""
        return [
            self.directory / f"_aio_{self.operation}_{self.nbytes}.pt.{number}_0"
            for number in range(self.processes)
        ]

    def prepare(self) -> None:
        for path in self.paths:
            if self.operation == "write":
                files.remove(path)
            elif path.exists():
                files.make_cold(path)

    def arguments(self) -> list[str]:
        arguments = ["--folder", str(self.directory), "--io_size", str(self.nbytes)]
        arguments += ["--multi_process", str(self.processes), "--loops", str(LOOPS)]
        arguments += ["--block_size", BLOCK_SIZE, "--queue_depth", str(QUEUE_DEPTH)]
        return arguments + (["--read"] if self.operation == "read" else [])


def run(settings: Settings) -> Outcome:
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory:
        for operation in ("write", "read"):
            for processes in (1, 2):
                task = Task(directory, operation, processes, settings.nbytes // processes)
                comparison = Comparison(task.name, "O_DIRECT, 1M blocks, depth 32, locked memory")
                contenders = [Contender(OURS, "ours", _ours(task))]
                if settings.deepspeed:
                    contenders.append(Contender(THEIRS, "peer", _theirs(task)))
                for config in _configs(settings):
                    contenders.append(Contender(config.label, "fio", _fio(task, config)))
                outcome.comparisons.append(compare(settings, comparison, contenders))
                outcome.figures += _figures(comparison)
                for path in task.paths:
                    files.remove(path)
    return outcome


def _figures(comparison: Comparison) -> list[Figure]:
    ours, theirs, best = comparison.row(OURS), comparison.row(THEIRS), comparison.best("fio")
    return [
        Figure(f"{comparison.name} over DeepSpeed's", ">=", 1.0, ratio(ours, theirs)),
        Figure(
            f"{comparison.name} over fio",
            ">=",
            0.95,
            ratio(ours, best),
            note=best.label if best else "",
        ),
    ]


def _configs(settings: Settings) -> list[fio.Config]:
    engine = next(name for name, refused in tensorferry.engines().items() if not refused)
    if engine == "threads":
        return []
    # Ours and DeepSpeed's memory is locked, and ours on huge pages: fio gets the best of both.
    configs = [
        fio.Config(engine, BLOCK_SIZE, QUEUE_DEPTH, registered=registered, huge=huge)
        for registered in ((False, True) if engine == "io_uring" else (False,))
        for huge in (False, True)
    ]
    return fio.usable(configs, settings)


def _ours(task: Task) -> Callable[[int], Sample]:
    return lambda number: _measure(task, [sys.executable, "-m", "tensorferry.cli.ds_io"])


def _theirs(task: Task) -> Callable[[int], Sample]:
    def measure(number: int) -> Sample:
        command = shutil.which("ds_io", path=str(_BIN))
        if command is None:
            raise UnavailableError("DeepSpeed is not installed")
        return _measure(task, [command])

    return measure


def _measure(task: Task, command: list[str]) -> Sample:
    task.prepare()
    # DeepSpeed's op is compiled at first use, with the ninja of this environment.
    path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, *task.arguments()],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | {"PATH": path},
        timeout=_RUN_SECONDS_MAX,
    )
    metric = f"E2E {task.operation.capitalize()} Speed"
    speeds = [line.split()[-2] for line in done.stdout.splitlines() if line.startswith(metric)]
    if done.returncode or len(speeds) != 1:
        words = (done.stderr.strip() or "it printed no speed").splitlines()
        raise MeasurementError(f"exit code {done.returncode}: {words[-1][:160]}")
    nbytes = task.nbytes * task.processes * LOOPS
    return throughput(nbytes / (float(speeds[0]) * GIB), nbytes)


def _fio(task: Task, config: fio.Config) -> Callable[[int], Sample]:
    def measure(number: int) -> Sample:
        task.prepare()
        seconds = 0.0
        cpu_seconds = 0.0
        for loop in range(1 + LOOPS):
            if task.operation == "read":
                task.prepare()
            try:
                jobs = tuning_fio.run(
                    task.paths, task.operation, task.nbytes, config.settings.arguments()
                )
            except tuning_fio.FioError as error:
                raise MeasurementError(str(error)) from error
            measured = [tuning_fio.measured(job, task.operation) for job in jobs]
            if loop > 0:
                seconds += max(each.seconds for each in measured)
                cpu_seconds += sum(each.cpu_seconds for each in measured)
        return throughput(seconds, task.nbytes * task.processes * LOOPS, cpu_seconds)

    return measure
