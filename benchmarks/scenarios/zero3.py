"""A training step of DeepSpeed's ZeRO-3 with all states on NVMe: its own engine against ours.

Rules: one process each, both alive all the time and training in turns, so that a sample is some further steps of one
of them; the same model, batches and configuration; the losses must be the same to the last bit. A third one keeps
all in memory: what is left of its step is what the drive costs.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.bench import bench_in, contenders, scenario
from benchmarks.harness import GB, Row, Sample

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure

OURS, THEIRS, MEMORY = "tensorferry", "DeepSpeed", "all in memory"
STEPS = 2
# DeepSpeed's defaults, and what its tuner commonly finds.
AIO: dict[str, dict[str, Any]] = {
    "DeepSpeed's defaults": {},
    "queue depth 32, 4 threads": {"queue_depth": 32, "intra_op_parallelism": 4},
}


@scenario
def run(bench: Bench) -> None:
    if not bench.deepspeed_wanted():
        return
    for name, aio in AIO.items():
        # Two trainings at a time, and no more.
        with bench_in(bench.settings, bench.outcome) as each:
            _trainings(each, name, aio)


def _trainings(bench: Bench, name: str, aio: dict[str, Any]) -> None:
    losses: dict[str, list[str]] = {}

    def steps(label: str, *, served: bool, offload: str = "both") -> Measure:
        size = {"layers": 1, "hidden": 512} if bench.smoke else {"layers": 4, "hidden": 1024}
        worker = bench.worker(
            "benchmarks.peers.zero3:Trainer",
            directory=str(bench.directory / label.replace(" ", "-")),
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

        return measure

    ours = {OURS: steps(OURS, served=True)}
    theirs = {
        THEIRS: steps(THEIRS, served=False),
        MEMORY: steps(MEMORY, served=True, offload="nothing"),
    }
    compared = contenders("ours", ours) + contenders("peer", theirs)
    comparison = bench.compare(f"zero3 step, {name}", "seconds a step", compared, "s")
    over = comparison.over(OURS, THEIRS)
    bench.at_most(f"ZeRO-3 step, ours/DeepSpeed's, {name}", 1.0, over)
    if comparison.row(OURS) and comparison.row(THEIRS):
        differences = sum(a != b for a, b in zip(losses[OURS], losses[THEIRS], strict=False))
        bench.at_most(f"losses that differ, {name}", 0, differences)
    for label in (OURS, THEIRS):
        if row := comparison.row(label):
            bench.note(_split(name, row))


def _split(name: str, row: Row) -> str:
    """Say what a step's time goes into."""
    gb = statistics.median(sample.details["nbytes"] for sample in row.samples) / STEPS / GB
    held = statistics.median(sample.details["seconds_in_handle"] for sample in row.samples) / STEPS
    return f"{name}: {row.label} moves {gb:.2f} GB a step; {held:.2f} of {row.median:.2f} s are spent in its handles"
