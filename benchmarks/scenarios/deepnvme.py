"""Our handle against DeepSpeed's, each of its configurations, locked and ordinary memory.

Rules: the same tensor sizes, calls and options on both sides; O_DIRECT; fresh files for writes,
and the same again over an existing file (what a swapper does); cold files for reads.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.actions import reads, writes
from benchmarks.harness import (
    Comparison,
    Contender,
    Estimate,
    Figure,
    Kind,
    Outcome,
    Settings,
    compare,
    ratio,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from pathlib import Path

SEED = 11
_PEERS: dict[Kind, tuple[str, str]] = {
    "ours": ("tensorferry", "benchmarks.peers.ours:Handle"),
    "peer": ("DeepSpeed", "benchmarks.peers.deepnvme:Handle"),
}


def configurations(smoke: bool) -> list[dict[str, Any]]:
    """Submission, overlap, parallelism; not 3: theirs refuses sizes it does not divide."""
    parallelisms = (1,) if smoke else (1, 2, 4)
    switches = (False,) if smoke else (False, True)
    return [
        {"single_submit": single, "overlap_events": overlap, "intra_op_parallelism": threads}
        for single, overlap, threads in itertools.product(switches, switches, parallelisms)
    ]


def label_of(product: str, options: dict[str, Any]) -> str:
    words = [product, f"T{options['intra_op_parallelism']}"]
    words += ["single"] if options["single_submit"] else []
    words += ["overlap"] if options["overlap_events"] else []
    return " ".join(words)


def run(settings: Settings) -> Outcome:
    if not settings.deepspeed:
        return Outcome(notes=["DeepSpeed was left out on request"])
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory:
        source = directory / "source"
        files.write_pattern(source, settings.nbytes, SEED)
        for locked in (True, False):
            with workers() as make:
                pair: dict[Kind, Worker] = {
                    kind: make(target, nbytes=settings.nbytes, locked=locked)
                    for kind, (_, target) in _PEERS.items()
                }
                memory = "locked" if locked else "unpinned"
                target = directory / "target"
                actions = {
                    "write": writes(target, seed=SEED),
                    "overwrite": writes(target, _nothing, seed=SEED),
                    "read": reads(source, seed=SEED),
                }
                for name, action in actions.items():
                    contenders = [
                        Contender(label_of(product, options), kind, action(pair[kind], **options))
                        for options in configurations(settings.smoke)
                        for kind, (product, _) in _PEERS.items()
                    ]
                    comparison = Comparison(f"deepspeed {name}, {memory}", "O_DIRECT, no fsync")
                    outcome.comparisons.append(compare(settings, comparison, contenders))
                    outcome.figures += _figures(settings, comparison, locked)
    return outcome


def _nothing(path: Path) -> None:
    """A swapper's file is written over as it is."""


def _figures(settings: Settings, comparison: Comparison, locked: bool) -> list[Figure]:
    """The worst of all configurations counts; theirs that fail are named."""
    ratios: dict[str, Estimate] = {}
    for options in configurations(settings.smoke):
        ours, theirs = (comparison.row(label_of(p, options)) for p, _ in _PEERS.values())
        if (value := ratio(ours, theirs)) is not None:
            ratios[label_of("", options).strip()] = value
    failed = [f"{r.label}: {r.failure}" for r in comparison.rows if r.failure]
    worst = min(ratios, key=lambda name: ratios[name]) if ratios else None
    note = f"worst: {worst}; best: {max(ratios.values()):.2f}" if worst else ""
    note += f"; failed: {failed[0]} (and {len(failed) - 1} more)" if failed else ""
    return [
        Figure(
            f"{comparison.name} over DeepSpeed, every configuration",
            ">=",
            1.0 if locked else 1.5,
            ratios[worst] if worst else None,
            "",
            note.strip("; "),
        )
    ]
