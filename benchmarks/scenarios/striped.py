"""One file over two drives beside each of them alone, and beside a file on each at once.

The drives are ext4 on loop devices over memory (root only), each held to a speed that the processors can serve twice
over where the kernel lets it (cgroup v1's blkio): without that, two of them are no faster than one where processors
are few. Fresh files, O_DIRECT, no fsync; cold reads.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Settings,
    UnavailableError,
    compare,
    ratio,
)
from benchmarks.scenarios.loop_device import loop_mounted
from benchmarks.worker import workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED = 13
DRIVE_NBYTES_PER_SECOND = 1_000_000_000
ALONE = ("first drive alone", "second drive alone")
BOTH = "a file on each, at once"
STRIPED = "one file over both"
_LIMITS = Path("/sys/fs/cgroup/blkio")


def run(settings: Settings) -> Outcome:
    size = 3 * settings.nbytes + 64 * MIB
    try:
        with contextlib.ExitStack() as stack:
            drives = [stack.enter_context(loop_mounted(size)) for _ in range(2)]
            held = [stack.enter_context(limited(drive)) for drive in drives]
            return _transfers(settings, drives, all(held))
    except UnavailableError as reason:
        return Outcome(notes=[str(reason)])


@contextlib.contextmanager
def limited(drive: Path, nbytes_per_second: int = DRIVE_NBYTES_PER_SECOND) -> Iterator[bool]:
    """Hold a drive to a speed each way; whether that could be done."""
    number = drive.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    limits = [_LIMITS / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    if not all(os.access(limit, os.W_OK) for limit in limits):
        yield False
        return
    try:
        for limit in limits:
            limit.write_text(f"{device} {nbytes_per_second}\n")
        yield True
    finally:
        for limit in limits:
            limit.write_text(f"{device} 0\n")


def _transfers(settings: Settings, drives: list[Path], held: bool) -> Outcome:
    outcome = Outcome()
    if not held:
        outcome.notes.append(f"drives at full speed: {_LIMITS} cannot be written")
    ways = {
        ALONE[0]: ([drives[0] / "alone"], False),
        ALONE[1]: ([drives[1] / "alone"], False),
        BOTH: ([drive / "share" for drive in drives], False),
        STRIPED: ([drive / "striped" for drive in drives], True),
    }
    with workers() as make:
        worker = make("benchmarks.peers.ours:Drives", nbytes=settings.nbytes)

        def action(call: str, prepare: Callable[[Path], None], label: str) -> Callable[[int], Any]:
            paths, striped = ways[label]

            def measure(number: int) -> Any:
                for path in paths:
                    prepare(path)
                names = [str(path) for path in paths]
                return worker.sample(
                    call, paths=names, striped=striped, seed=SEED, check=number == 0
                )

            return measure

        # The last round's files are read.
        for call, prepare, rules in (
            ("write", files.remove, "fresh files, O_DIRECT, no fsync"),
            ("read", files.make_cold, "cold files, O_DIRECT"),
        ):
            comparison = Comparison(f"striped: {call}", rules)
            contenders = [Contender(label, "ours", action(call, prepare, label)) for label in ways]
            outcome.comparisons.append(compare(settings, comparison, contenders))
            what = f"striped: {settings.nbytes / GIB:.3g} GiB {call}, {STRIPED}"
            striped, both = comparison.row(STRIPED), comparison.row(BOTH)
            alone = [comparison.row(label) for label in ALONE]
            summed = sum(row.median for row in alone if row)
            share = striped.median / summed if striped and all(alone) else None
            note = f"the sum: {summed:.2f} GB/s"
            outcome.figures += [
                Figure(f"{what} over the sum of each alone", ">=", 0.9, share, "", note),
                Figure(f"{what} over {BOTH}", ">=", 0.95, ratio(striped, both)),
            ]
    return outcome
