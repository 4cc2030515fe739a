"""torch.save and torch.load of one tensor against ours and plain Python, equally durable.

Rules: every write ends with fsync inside the clock (`sync=True` for ours), to a fresh file; reads
are cold. torch.load makes its tensor new each time, as it always does; the others fill memory that
is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import Comparison, Contender, Figure, Outcome, Settings, compare, ratio
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 29
OURS = "tensorferry.write/read, torch.empty"
ALIGNED = "tensorferry.write/read, tensorferry.empty"
TORCH = "torch.save/load"


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        nbytes = settings.nbytes
        peers: list[tuple[str, Any, Worker, dict[str, Any]]] = [
            (
                OURS,
                "ours",
                make("benchmarks.peers.ours:Functions", nbytes=nbytes, aligned=False),
                {"sync": True},
            ),
            (
                ALIGNED,
                "ours",
                make("benchmarks.peers.ours:Functions", nbytes=nbytes, aligned=True),
                {"sync": True},
            ),
            (
                "plain Python write/readinto",
                "peer",
                make("benchmarks.peers.plain:Buffered", nbytes=nbytes),
                {},
            ),
            (TORCH, "peer", make("benchmarks.peers.pytorch:SaveLoad", nbytes=nbytes), {}),
        ]
        target = directory / "target"
        sources = {}
        for number, (label, _, worker, _) in enumerate(peers):
            sources[label] = directory / f"source{number}"
            if label == TORCH:
                worker.call("write", path=str(sources[label]), seed=SEED, check=False)
            else:
                files.write_pattern(sources[label], nbytes, SEED)

        def write(label: str, worker: Worker, options: dict[str, Any]) -> Callable[[int], Any]:
            def measure(number: int) -> Any:
                files.remove(target)
                check = number == 0
                return worker.sample("write", path=str(target), seed=SEED, check=check, **options)

            return measure

        def read(label: str, worker: Worker, options: dict[str, Any]) -> Callable[[int], Any]:
            def measure(number: int) -> Any:
                files.make_cold(sources[label])
                return worker.sample("read", path=str(sources[label]), seed=SEED)

            return measure

        outcome = Outcome()
        for name, rules, action in (
            ("torch_save write", "fresh files, fsync at the end", write),
            ("torch_save read", "cold files", read),
        ):
            comparison = Comparison(name, rules)
            contenders = [
                Contender(label, kind, action(label, worker, options))
                for label, kind, worker, options in peers
            ]
            outcome.comparisons.append(compare(settings, comparison, contenders))
            ours, theirs = comparison.row(OURS), comparison.row(TORCH)
            outcome.figures.append(Figure(f"{name} over torch", ">=", 1.0, ratio(ours, theirs)))
    return outcome
