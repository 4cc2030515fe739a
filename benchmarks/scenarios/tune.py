"""`tensorferry tune` against a full sweep of the same settings: in what time, and that what it finds is no slower.

Rules: the same points, file and machine; the sweep measures each point three times on the whole file. What either has
found and the default settings are then measured again, interleaved, and those figures count.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks.bench import contenders, scenario
from benchmarks.harness import MIB, Sample
from tensorferry.tuning.drive import Drives
from tensorferry.tuning.space import default_settings, default_space
from tensorferry.tuning.tune import Job, Progress, Result, tune

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure
    from tensorferry.transfer.settings import Settings as Point
    from tensorferry.tuning.race import Turn

FILE_NBYTES_MAX = 256 * MIB
ROUNDS_MIN = 9
ADAPTIVE = "what tune found"
FULL = "what a full sweep found"
DEFAULT = "default settings"


class _Quiet:
    def stage(self, name: str, points: int, progress: Progress) -> None: ...

    def turn(self, turn: Turn, progress: Progress) -> None: ...


@scenario
def run(bench: Bench) -> None:
    nbytes = min(bench.nbytes, FILE_NBYTES_MAX)
    space = default_space()
    if bench.smoke:
        space = dataclasses.replace(space, block_size=(MIB // 4, MIB), queue_depth=(2,))

    def run_once(full: bool) -> Result:
        return tune(Job((bench.directory,), space, nbytes, full=full), _Quiet(), save=False)

    adaptive, full = run_once(False), run_once(True)
    points = {ADAPTIVE: adaptive.found.chosen, DEFAULT: default_settings()}
    swept = {FULL: full.found.chosen}
    with Drives([bench.directory], nbytes) as drives:
        ours = {label: _measure(drives, point) for label, point in points.items()}
        theirs = {label: _measure(drives, point) for label, point in swept.items()}
        comparison = bench.compare(
            "tune",
            "geometric mean of writing and reading, file overwritten in place, O_DIRECT",
            contenders("ours", ours) + contenders("peer", theirs),
            rounds=bench.settings.rounds if bench.smoke else max(ROUNDS_MIN, bench.settings.rounds),
        )
    reached = comparison.over(ADAPTIVE, FULL)
    bench.at_least("tune: speed of what it finds over what a sweep finds", 0.97, reached)
    note = f"{adaptive.seconds:.0f} s and {full.seconds:.0f} s"
    part = adaptive.seconds / full.seconds
    bench.at_most("tune: time over the full sweep's", 0.3, part, note)
    for label, point in (points | swept).items():
        sizes = f"{point.block_size} x {point.queue_depth}"
        bench.note(f"{label}: {point.engine}, {sizes}, {point.intra_op_parallelism} workers")


def _measure(drives: Drives, point: Point) -> Measure:
    def measure(number: int) -> Sample:
        written, read = (drives.measure(point, write, drives.nbytes) for write in (True, False))
        value = (written.rate * read.rate) ** 0.5 / 1e9
        return Sample(
            value,
            written.seconds + read.seconds,
            written.nbytes + read.nbytes,
            written.cpu_seconds + read.cpu_seconds,
        )

    return measure
