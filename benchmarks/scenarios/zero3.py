"""A training step of DeepSpeed's ZeRO-3 with all states on NVMe: its own engine against ours.

Rules: one process each, both alive all the time and training in turns, so that a sample is some further steps of one
of them; the same model, batches and configuration; the losses must be the same to the last bit. A third one keeps
all in memory: what is left of its step is what the drive costs.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    GB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Row,
    Sample,
    Settings,
    compare,
    ratio,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OURS, THEIRS, MEMORY = "tensorferry", "DeepSpeed", "all in memory"
STEPS = 2
# DeepSpeed's defaults, and what its tuner commonly finds.
AIO: dict[str, dict[str, Any]] = {
    "DeepSpeed's defaults": {},
    "queue depth 32, 4 threads": {"queue_depth": 32, "intra_op_parallelism": 4},
}


def run(settings: Settings) -> Outcome:
    if not settings.deepspeed:
        return Outcome(notes=["DeepSpeed was left out on request"])
    outcome = Outcome()
    for name, aio in AIO.items():
        with files.scratch_directory(settings.directory) as directory, workers() as make:
            comparison = Comparison(
                f"zero3 step, {name}", "seconds a step", "s", higher_is_better=False
            )
            losses: dict[str, list[str]] = {}
            contenders = _contenders(settings, make, directory, aio, losses)
            compare(settings, comparison, contenders)
        outcome.comparisons.append(comparison)
        ours, theirs = comparison.row(OURS), comparison.row(THEIRS)
        outcome.figures.append(
            Figure(f"ZeRO-3 step, ours/DeepSpeed's, {name}", "<=", 1.0, ratio(ours, theirs))
        )
        if ours and theirs:
            differences = sum(a != b for a, b in zip(losses[OURS], losses[THEIRS], strict=False))
            outcome.figures.append(Figure(f"losses that differ, {name}", "<=", 0, differences))
        outcome.notes += [
            _split(name, row) for row in comparison.rows if row.usable and row.label != MEMORY
        ]
    return outcome


def _split(name: str, row: Row) -> str:
    """Say what a step's time goes into."""
    gb = statistics.median(sample.details["nbytes"] for sample in row.samples) / STEPS / GB
    held = statistics.median(sample.details["seconds_in_handle"] for sample in row.samples) / STEPS
    return f"{name}: {row.label} moves {gb:.2f} GB a step; {held:.2f} of {row.median:.2f} s are spent in its handles"


def _contenders(
    settings: Settings,
    make: Callable[..., Worker],
    directory: Path,
    aio: dict[str, Any],
    losses: dict[str, list[str]],
) -> list[Contender]:
    size = {"layers": 1, "hidden": 512} if settings.smoke else {"layers": 4, "hidden": 1024}

    def contender(label: str, kind: Any, served: bool, offload: str) -> Contender:
        worker = make(
            "benchmarks.peers.zero3:Trainer",
            directory=str(directory / label.replace(" ", "-")),
            served=served,
            offload=offload,
            aio=aio,
            **size,
        )

        def measure(number: int) -> Sample:
            if number == 0:  # first steps make the files and the optimizer's states
                losses[label] = worker.call("steps", count=2)["losses"]
            found = worker.call("steps", count=STEPS)
            losses[label] += found["losses"]
            seconds = found["seconds"]
            details = {"nbytes": found["nbytes"], "seconds_in_handle": found["seconds_in_handle"]}
            return Sample(seconds / STEPS, seconds, details=details)

        return Contender(label, kind, measure)

    return [
        contender(OURS, "ours", True, "both"),
        contender(THEIRS, "peer", False, "both"),
        contender(MEMORY, "peer", True, "nothing"),
    ]
