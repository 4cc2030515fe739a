"""`tensorferry tune` against a full sweep of the same settings: in what time, and that what it finds is no slower.

Rules: the same points, file and machine; the sweep measures each point three times on the whole file. What either has
found and the default settings are then measured again, interleaved, and those figures count.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from benchmarks import files
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    ratio,
)
from tensorferry.tuning.drive import Drives
from tensorferry.tuning.space import default_settings, default_space
from tensorferry.tuning.tune import Job, Progress, Result, tune

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.settings import Settings as Point
    from tensorferry.tuning.race import Turn

FILE_NBYTES_MAX = 256 * MIB
ROUNDS_MIN = 9
ADAPTIVE = "what tune found"
FULL = "what a full sweep found"
DEFAULT = "default settings"


class _Quiet:
    def stage(self, name: str, points: int, progress: Progress) -> None: ...

    def turn(self, turn: Turn, progress: Progress) -> None: ...


def run(settings: Settings) -> Outcome:
    nbytes = min(settings.nbytes, FILE_NBYTES_MAX)
    space = default_space()
    if settings.smoke:
        space = dataclasses.replace(space, block_size=(MIB // 4, MIB), queue_depth=(2,))
    with files.scratch_directory(settings.directory) as directory:

        def run_once(full: bool) -> Result:
            return tune(Job((directory,), space, nbytes, full=full), _Quiet(), save=False)

        adaptive, full = run_once(False), run_once(True)
        comparison = Comparison(
            "tune", "geometric mean of writing and reading, file overwritten in place, O_DIRECT"
        )
        with Drives([directory], nbytes) as drives:
            points = {
                ADAPTIVE: adaptive.found.chosen,
                FULL: full.found.chosen,
                DEFAULT: default_settings(),
            }
            contenders = [
                Contender(label, "peer" if label == FULL else "ours", _measure(drives, point))
                for label, point in points.items()
            ]
            rounds = settings.rounds if settings.smoke else max(ROUNDS_MIN, settings.rounds)
            compare(settings, comparison, contenders, rounds=rounds)
    reached = ratio(comparison.row(ADAPTIVE), comparison.row(FULL))
    return Outcome(
        [comparison],
        [
            Figure("tune: speed of what it finds over what a sweep finds", ">=", 0.97, reached),
            Figure(
                "tune: time over the full sweep's",
                "<=",
                0.3,
                adaptive.seconds / full.seconds,
                "",
                f"{adaptive.seconds:.0f} s and {full.seconds:.0f} s",
            ),
        ],
        [
            f"{label}: {point.engine}, {point.block_size} x {point.queue_depth}, {point.intra_op_parallelism} workers"
            for label, point in points.items()
        ],
    )


def _measure(drives: Drives, point: Point) -> Callable[[int], Sample]:
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
