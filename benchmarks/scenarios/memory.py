"""Growth of peak memory while a large tensor in unaligned memory is written and read."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import GIB, MIB, Comparison, Contender, Figure, Outcome, Settings, compare
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 23
ALLOWANCE_NBYTES = 16 * MIB
OURS = "tensorferry.write/read, 64 bytes past a page"


def run(settings: Settings) -> Outcome:
    """Three rounds are enough: memory does not vary as time does."""
    nbytes = min(settings.memory_nbytes, _available_nbytes() // 3)
    outcome = Outcome()
    if nbytes < settings.memory_nbytes:
        outcome.notes.append(f"only {nbytes / GIB:.1f} GiB: the machine has no memory for more")
    few = replace(settings, rounds=min(settings.rounds, 3))
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "file"
        ours = make(
            "benchmarks.peers.ours:Functions", nbytes=nbytes, aligned=False, misalignment=64
        )

        def write(worker: Worker) -> Callable[[int], Any]:
            def measure(number: int) -> Any:
                files.remove(path)
                return _in_mib(worker.sample("write", path=str(path), seed=SEED, check=number == 0))

            return measure

        def read(worker: Worker) -> Callable[[int], Any]:
            def measure(number: int) -> Any:
                files.make_cold(path)
                return _in_mib(worker.sample("read", path=str(path), seed=SEED))

            return measure

        for verb, action in (("write", write), ("read", read)):
            if verb == "read":
                files.remove(path)
                files.write_pattern(path, nbytes, SEED)
            comparison = Comparison(
                f"memory {verb}",
                f"growth of peak memory, {nbytes / GIB:.3g} GiB",
                "MiB",
                higher_is_better=False,
            )
            compare(few, comparison, [Contender(OURS, "ours", action(ours))])
            outcome.comparisons.append(comparison)
        pool_nbytes = ours.call("pool_nbytes")["pool_nbytes"]
    limit = (pool_nbytes + ALLOWANCE_NBYTES) / MIB
    for comparison in outcome.comparisons:
        row = comparison.row(OURS)
        growth = row.peak_growth_nbytes if row else None
        outcome.figures.append(
            Figure(
                f"{comparison.name}: growth of the peak",
                "<=",
                limit,
                None if growth is None else growth / MIB,
                "MiB",
                f"the pool's {pool_nbytes / MIB:.0f} MiB + {ALLOWANCE_NBYTES / MIB:.0f}; the worst",
            )
        )
    return outcome


def _in_mib(sample: Any) -> Any:
    return replace(sample, value=(sample.peak_growth_nbytes or 0) / MIB)


def _available_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
