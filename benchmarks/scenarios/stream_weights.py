"""A model in a quarter of its memory: the time for each token, beside what it cannot be below.

That is the slower of two: reading the bytes that a token needs, alone, and computing with all weights in memory.
Weights are float32 in four files, past the page cache; one token at a time, so that each weight is used once for each
read. accelerate's ``disk_offload`` has no budget and reads through the page cache.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    Comparison,
    Contender,
    Figure,
    Outcome,
    Row,
    Sample,
    Settings,
    compare,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable

OURS, MEMORY, READ = "stream_weights", "in memory", "reading alone"
THEIRS = "accelerate disk_offload"


def run(settings: Settings) -> Outcome:
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:

        def worker() -> Worker:
            peer = "benchmarks.peers.streaming:Model"
            return make(peer, nbytes=2 * settings.nbytes, directory=str(directory))

        writer = worker()
        total = int(writer.call("save")["nbytes"])
        writer.close()
        budget = total // 4
        paths = sorted(directory.glob("*.safetensors"))

        def tokens(peer: Worker, call: str, **options: Any) -> Callable[[int], Sample]:
            def measure(_: int) -> Sample:
                for path in paths:
                    files.make_cold(path)
                found = peer.call(call, **options)
                return Sample(
                    found["token_seconds"],
                    found["seconds"],
                    details={name: found[name] for name in ("read_nbytes",) if name in found},
                )

            return measure

        ours = tokens(worker(), "streamed", budget_nbytes=budget)
        needed = [total - budget]

        def streamed(number: int) -> Sample:
            sample = ours(number)
            needed[0] = int(sample.details["read_nbytes"])
            return sample

        reader = worker()

        def read(_: int) -> Sample:
            for path in paths:
                files.make_cold(path)
            found = reader.call("read", nbytes=needed[0])
            return Sample(found["seconds"], found["seconds"], found["nbytes"])

        comparison = Comparison(
            "stream_weights",
            f"{total >> 20} MiB of weights, a budget of {budget >> 20} MiB, cold files",
            unit="s a token",
            higher_is_better=False,
        )
        contenders = [
            Contender(OURS, "ours", streamed),
            Contender(READ, "limit", read),
            Contender(MEMORY, "limit", tokens(worker(), "in_memory")),
            Contender(THEIRS, "peer", tokens(worker(), "disk_offload", budget_nbytes=budget)),
        ]
        outcome.comparisons.append(compare(settings, comparison, contenders))
        if (theirs := comparison.rows[-1]).failure and "accelerate" in theirs.failure:
            outcome.notes.append(f"{THEIRS}: {theirs.failure}")
            comparison.rows.pop()
    rows = [comparison.row(label) for label in (OURS, READ, MEMORY)]
    outcome.figures.append(
        Figure(
            "stream_weights: time for a token over max(reading, computing)",
            "<=",
            1.1,
            _over_the_slower(*rows),
        )
    )
    return outcome


def _over_the_slower(ours: Row | None, *others: Row | None) -> float | None:
    """Return the median of rounds' ratios, each of what was measured one after the other."""
    if ours is None or any(other is None for other in others):
        return None
    limits = [[sample.value for sample in other.samples] for other in others if other is not None]
    ratios = [
        sample.value / max(values) for sample, *values in zip(ours.samples, *limits, strict=True)
    ]
    return statistics.median(ratios)
