"""One file over two drives beside each of them alone, and beside a file on each at once.

The drives are ext4 on loop devices over memory (root only), each held to a speed that the processors can serve twice
over where the kernel lets it (cgroup v1's blkio): without that, two of them are no faster than one where processors
are few. Fresh files, O_DIRECT, no fsync; cold reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.actions import first, measured
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB

if TYPE_CHECKING:
    from benchmarks.bench import Bench

SEED = 13
DRIVE_NBYTES_PER_SECOND = 1_000_000_000
ALONE = ("first drive alone", "second drive alone")
BOTH = "a file on each, at once"
STRIPED = "one file over both"


@scenario
def run(bench: Bench) -> None:
    size = 3 * bench.nbytes + 64 * MIB
    with bench.on_two_drives(size, DRIVE_NBYTES_PER_SECOND) as (limited, drives):
        paths = {label: [drive / "alone"] for label, drive in zip(ALONE, drives, strict=True)}
        paths[BOTH] = [drive / "share" for drive in drives]
        paths[STRIPED] = [drive / "striped" for drive in drives]
        worker = limited.worker("benchmarks.peers.ours:Drives", nbytes=bench.nbytes)
        # The last round's files are read.
        once: dict[str, Any] = {"check": first}
        for call, prepare, checked, rules in (
            ("write", files.remove, once, "fresh files, O_DIRECT, no fsync"),
            ("read", files.make_cold, {}, "cold files, O_DIRECT"),
        ):
            ways = {
                label: measured(
                    *(worker, call, prepare, each),
                    path=[str(path) for path in each],
                    striped=label == STRIPED,
                    seed=SEED,
                    **checked,
                )
                for label, each in paths.items()
            }
            comparison = bench.compare(f"striped: {call}", rules, contenders("ours", ways))
            what = f"striped: {bench.nbytes / GIB:.3g} GiB {call}, {STRIPED}"
            share, summed = comparison.over_sum(STRIPED, ALONE)
            note = f"the sum: {summed:.2f} GB/s"
            bench.at_least(f"{what} over the sum of each alone", 0.9, share, note)
            bench.at_least(f"{what} over {BOTH}", 0.95, comparison.over(STRIPED, BOTH))
