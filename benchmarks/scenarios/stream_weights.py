"""A model in a quarter of its memory: the time for each token, beside what it cannot be below.

That is the slower of two: reading the bytes that a token needs, alone, and computing with all weights in memory.
Weights are float32 in four files, past the page cache; one token at a time, so that each weight is used once for each
read. accelerate's ``disk_offload`` has no budget and reads through the page cache.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.actions import measured
from benchmarks.bench import contenders, scenario

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure
    from benchmarks.harness import Row, Sample
    from benchmarks.worker import Worker

OURS, MEMORY, READ = "stream_weights", "in memory", "reading alone"
THEIRS = "accelerate disk_offload"


@scenario
def run(bench: Bench) -> None:
    def worker() -> Worker:
        peer = "benchmarks.peers.streaming:Model"
        return bench.worker(peer, nbytes=2 * bench.nbytes, directory=str(bench.directory))

    writer = worker()
    total = int(writer.call("save")["nbytes"])
    writer.close()
    budget = total // 4
    paths = sorted(bench.directory.glob("*.safetensors"))

    def tokens(call: str, **options: Any) -> Measure:
        return measured(worker(), call, files.make_cold, paths, **options)

    ours = tokens("streamed", budget_nbytes=budget)
    needed = total - budget

    def streamed(number: int) -> Sample:
        nonlocal needed
        sample = ours(number)
        needed = int(sample.details["read_nbytes"])
        return sample

    limits = {READ: tokens("read", nbytes=lambda _: needed), MEMORY: tokens("in_memory")}
    comparison = bench.compare(
        "stream_weights",
        f"{total >> 20} MiB of weights, a budget of {budget >> 20} MiB, cold files",
        [
            *contenders("ours", {OURS: streamed}),
            *contenders("limit", limits),
            *contenders("peer", {THEIRS: tokens("disk_offload")}),
        ],
        "s a token",
    )
    bench.leave_out(comparison, THEIRS, "accelerate")
    over = _over_the_slower(*(comparison.row(label) for label in (OURS, READ, MEMORY)))
    bench.at_most("stream_weights: time for a token over max(reading, computing)", 1.1, over)


def _over_the_slower(ours: Row | None, *others: Row | None) -> float | None:
    """Return the median of rounds' ratios, each of what was measured one after the other."""
    if ours is None or any(other is None for other in others):
        return None
    limits = [[sample.value for sample in other.samples] for other in others if other is not None]
    ratios = [
        sample.value / max(values) for sample, *values in zip(ours.samples, *limits, strict=True)
    ]
    return statistics.median(ratios)
