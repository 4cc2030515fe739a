"""Our handle against DeepSpeed's, each of its configurations, locked and ordinary memory.

Rules: the same tensor sizes, calls and options on both sides; O_DIRECT; fresh files for writes,
and the same again over an existing file (what a swapper does); cold files for reads.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.actions import reads, writes
from benchmarks.bench import scenario
from benchmarks.harness import Contender
from benchmarks.worker import workers

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.harness import Comparison, Kind

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


@scenario
def run(bench: Bench) -> None:
    if not bench.deepspeed_wanted():
        return
    source, target = bench.directory / "source", bench.directory / "target"
    files.write_pattern(source, bench.nbytes, SEED)
    actions = {
        "write": writes(target, seed=SEED),
        "overwrite": writes(target, lambda path: None, seed=SEED),  # as a swapper does
        "read": reads(source, seed=SEED),
    }
    for memory, wanted in (("locked", 1.0), ("unpinned", 1.5)):
        with workers() as make:
            pair = {
                kind: make(peer, nbytes=bench.nbytes, locked=memory == "locked")
                for kind, (_, peer) in _PEERS.items()
            }
            for name, action in actions.items():
                contenders = [
                    Contender(label_of(product, options), kind, action(pair[kind], **options))
                    for options in configurations(bench.smoke)
                    for kind, (product, _) in _PEERS.items()
                ]
                title = f"deepspeed {name}, {memory}"
                _figure(bench, bench.compare(title, "O_DIRECT, no fsync", contenders), wanted)


def _figure(bench: Bench, comparison: Comparison, wanted: float) -> None:
    """The worst of all configurations counts; theirs that fail are named."""
    ratios = {
        label_of("", options).strip(): value
        for options in configurations(bench.smoke)
        if (value := comparison.over(*(label_of(p, options) for p, _ in _PEERS.values())))
        is not None
    }
    failed = [f"{r.label}: {r.failure}" for r in comparison.rows if r.failure]
    worst = min(ratios, key=lambda name: ratios[name]) if ratios else None
    note = f"worst: {worst}; best: {max(ratios.values()):.2f}" if worst else ""
    note += f"; failed: {failed[0]} (and {len(failed) - 1} more)" if failed else ""
    what = f"{comparison.name} over DeepSpeed, every configuration"
    bench.at_least(what, wanted, ratios[worst] if worst else None, note.strip("; "))
