"""What every scenario shares: contenders measured in interleaved rounds, and figures to meet.

A scenario returns comparisons and figures. A comparison holds one row for each contender; a
contender is measured once in each round (A B C, A B C, ...), so a disturbance of the machine hits
all of them. Medians count. A contender that raises keeps its message and leaves the later rounds;
the others go on.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.others import OthersClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.progress import Progress

GB = 1e9
MIB = 1 << 20
GIB = 1 << 30

_TRIES_MAX = 4
_PAUSE_SECONDS = 0.5

Kind = Literal["ours", "fio", "peer", "limit"]


class UnavailableError(Exception):
    """A tool or a right that a scenario or contender needs is missing; the message says which."""


class MeasurementError(Exception):
    """A contender crashed, returned an error or moved other bytes than it was asked to."""


@dataclass(frozen=True)
class Settings:
    """How the scenarios run; the command line fills it."""

    directory: Path
    rounds: int = 7
    nbytes: int = GIB
    random_reads: int = 10_000
    latency_reads: int = 2_000
    memory_nbytes: int = 4 * GIB
    huge_pages: bool = True
    deepspeed: bool = True
    others_share_max: float | None = None
    progress: Progress | None = None
    finished: Callable[[Comparison], None] | None = None

    @property
    def smoke(self) -> bool:
        """Whether sizes are too small for the numbers to mean anything (the tests do this)."""
        return self.nbytes < 64 * MIB


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    value: float
    seconds: float
    nbytes: int = 0
    cpu_seconds: float | None = None
    peak_growth_nbytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        if self.cpu_seconds is None or not self.nbytes:
            return None
        return self.cpu_seconds / (self.nbytes / GB)


def throughput(
    seconds: float,
    nbytes: int,
    cpu_seconds: float | None = None,
    peak_growth_nbytes: int | None = None,
    **details: Any,
) -> Sample:
    """The sample whose value is GB/s."""
    value = nbytes / GB / max(seconds, 1e-9)
    return Sample(value, seconds, nbytes, cpu_seconds, peak_growth_nbytes, details)


@dataclass
class Contender:
    """One way to do a comparison's work. ``measure`` gets the round, counted from 0."""

    label: str
    kind: Kind
    measure: Callable[[int], Sample]
    tags: tuple[str, ...] = ()


@dataclass
class Row:
    """A contender's samples in one comparison."""

    label: str
    kind: Kind
    tags: tuple[str, ...] = ()
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    @property
    def usable(self) -> bool:
        return self.failure is None and bool(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(sample.value for sample in self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        values = [sample.value for sample in self.samples]
        if len(values) < 2:
            return values[0], values[0]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        values = [v for s in self.samples if (v := s.cpu_seconds_per_gb) is not None]
        return statistics.median(values) if values else None

    @property
    def peak_growth_nbytes(self) -> int | None:
        values = [v for s in self.samples if (v := s.peak_growth_nbytes) is not None]
        return max(values) if values else None


@dataclass
class Comparison:
    """Contenders that did the same work by the same rules."""

    name: str
    rules: str
    unit: str = "GB/s"
    higher_is_better: bool = True
    rows: list[Row] = field(default_factory=list)

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label and row.usable), None)

    def best(self, kind: Kind, *tags: str) -> Row | None:
        """The row of a kind (and with all these tags) whose median is best."""
        rows = [r for r in self.rows if r.kind == kind and r.usable and set(tags) <= set(r.tags)]
        if not rows:
            return None
        return (max if self.higher_is_better else min)(rows, key=lambda row: row.median)

    def least_cpu(self, kind: Kind, *tags: str) -> Row | None:
        """The row of a kind (and with all these tags) that needs least CPU time."""
        rows = [
            r
            for r in self.rows
            if r.kind == kind and r.usable and set(tags) <= set(r.tags) and r.cpu_seconds_per_gb
        ]
        return min(rows, key=lambda row: row.cpu_seconds_per_gb or 0.0) if rows else None


@dataclass
class Figure:
    """One promise about speed, and what was measured for it."""

    what: str
    relation: Literal[">=", "<="]
    target: float
    measured: float | None
    unit: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        if self.relation == ">=":
            return self.measured >= self.target
        return self.measured <= self.target


@dataclass
class Outcome:
    """What a scenario found."""

    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(
    settings: Settings,
    comparison: Comparison,
    contenders: Sequence[Contender],
    *,
    rounds: int | None = None,
) -> Comparison:
    """Measure every contender in interleaved rounds, and fill the comparison's rows."""
    rounds = rounds or settings.rounds
    comparison.rows = [Row(c.label, c.kind, c.tags) for c in contenders]
    with _task(settings, comparison.name, rounds * len(contenders)) as advance:
        for number in range(rounds):
            for contender, row in zip(contenders, comparison.rows, strict=True):
                if row.failure is None:
                    try:
                        row.samples.append(_measure_undisturbed(settings, contender, number))
                    except (MeasurementError, UnavailableError) as error:
                        row.failure = str(error)
                advance(contender.label)
    if settings.finished:
        settings.finished(comparison)
    return comparison


def _measure_undisturbed(settings: Settings, contender: Contender, number: int) -> Sample:
    """Measure once; where a limit is set, again as long as others disturb, and keep the best try."""
    tries: list[tuple[float, Sample]] = []
    while True:
        others = OthersClock()
        sample = contender.measure(number)
        share = others.share()
        tries.append((share, replace(sample, details=sample.details | {"others_share": share})))
        limit = settings.others_share_max
        if limit is None or share <= limit or len(tries) == _TRIES_MAX:
            return min(tries, key=lambda attempt: attempt[0])[1]
        time.sleep(_PAUSE_SECONDS)


def ratio(ours: Row | None, theirs: Row | None) -> float | None:
    """Ours over theirs, medians; None where either is missing."""
    if ours is None or theirs is None or not theirs.median:
        return None
    return ours.median / theirs.median


def cpu_ratio(ours: Row | None, theirs: Row | None) -> float | None:
    """Ours over theirs in CPU seconds for each GB, medians; None where either is missing."""
    if ours is None or theirs is None:
        return None
    if not (mine := ours.cpu_seconds_per_gb) or not (other := theirs.cpu_seconds_per_gb):
        return None
    return mine / other


def peak_figure(what: str, row: Row | None, limit_nbytes: int) -> Figure:
    """A promise about the growth of peak memory."""
    peak = row.peak_growth_nbytes if row else None
    measured = None if peak is None else peak / MIB
    return Figure(what, "<=", limit_nbytes // MIB, measured, "MiB")


@contextlib.contextmanager
def _task(settings: Settings, name: str, total: int) -> Iterator[Callable[[str], None]]:
    if settings.progress is None:
        yield lambda label: None
        return
    progress = settings.progress
    task = progress.add_task(name, total=total)

    def advance(label: str) -> None:
        progress.update(task, advance=1, description=f"{name}: {label}")

    try:
        yield advance
    finally:
        progress.remove_task(task)
