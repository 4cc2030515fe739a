"""What every scenario shares: contenders measured in interleaved rounds, and figures to meet.

A scenario returns comparisons and figures. A comparison holds one row for each contender; each is
measured once in each round, in an order that changes (A B C, C A B, ...), so that neither a
disturbance of the machine nor what the one before left behind hits one of them alone. Medians count,
and ratios of the same round; each comes with the interval that holds the true one with 95 %, and a
figure whose target lies in it is neither met nor missed. A contender that raises keeps its message
and leaves the later rounds; the others go on.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.others import OthersClock
from tensorferry.tuning.fio import FioError
from tensorferry.tuning.intervals import Interval, interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.progress import Progress

GB = 1e9
MIB = 1 << 20
GIB = 1 << 30

_TRIES_MAX = 4
_PAUSE_SECONDS = 0.5
_CONFIDENCE_MIN = 0.9  # of an interval that decides anything: 5 rounds have it, 4 do not

_RATES = ("GB/s", "kIOPS")  # of which more is better; of times, sizes and parts less

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
    parameters: int = 300_000_000
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


class Estimate(float):
    """A number, and between which values the true one lies."""

    interval: Interval

    @classmethod
    def of(cls, found: Interval) -> Estimate:
        number = cls(found.median)
        number.interval = found
        return number

    @property
    def sure(self) -> bool:
        """Whether there were rounds enough for the interval to mean anything."""
        return self.interval.confidence >= _CONFIDENCE_MIN


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
    def median(self) -> Estimate:
        return Estimate.of(interval([sample.value for sample in self.samples]))

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
    rows: list[Row] = field(default_factory=list)

    @property
    def higher_is_better(self) -> bool:
        return self.unit in _RATES

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label and row.usable), None)

    def best(self, kind: Kind, *tags: str) -> Row | None:
        """The row of a kind (and with all these tags) whose median is best."""
        rows = self._rows(kind, *tags)
        better = max if self.higher_is_better else min
        return better(rows, key=lambda row: row.median) if rows else None

    def least_cpu(self, kind: Kind, *tags: str) -> Row | None:
        """The row of a kind (and with all these tags) that needs least CPU time."""
        rows = [row for row in self._rows(kind, *tags) if row.cpu_seconds_per_gb]
        return min(rows, key=lambda row: row.cpu_seconds_per_gb or 0.0) if rows else None

    def over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """One contender over another, round by round; None where either is missing."""
        return ratio(self.row(ours), self._row(theirs))

    def cpu_over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """The same in CPU seconds for each GB."""
        return _ratio(self.row(ours), self._row(theirs), lambda sample: sample.cpu_seconds_per_gb)

    def above(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """One contender less another, round by round; None where either is missing."""
        pairs = _pairs(self.row(ours), self._row(theirs), lambda sample: sample.value)
        return Estimate.of(interval([a - b for a, b in pairs])) if pairs else None

    def median(self, label: str) -> Estimate | None:
        """A contender's median, None where it is missing."""
        row = self.row(label)
        return row.median if row else None

    def over_sum(self, ours: str, theirs: Sequence[str]) -> tuple[float | None, float]:
        """A median over the sum of others, None where one is missing; and that sum."""
        medians = [self.median(label) for label in (ours, *theirs)]
        known = [median for median in medians[1:] if median]
        complete = medians[0] and len(known) == len(theirs)
        return (medians[0] or 0.0) / sum(known) if complete else None, sum(known)

    def described(self, row: Row | None, what: str = "best fio") -> str:
        """Say which row is meant by what, and what it reached."""
        return f"{what}: {row.label}, {row.median:.2f} {self.unit}" if row else f"no {what}"

    def sorted_rows(self) -> list[Row]:
        """All that were measured, the best one first."""
        rows = [row for row in self.rows if row.usable]
        return sorted(rows, key=lambda row: row.median, reverse=self.higher_is_better)

    def as_good_as_the_best(self) -> list[Row]:
        """Those besides the best of which it cannot be told that they are worse."""
        best, *rest = self.sorted_rows() or [None]
        return [row for row in rest if row and not _tells_apart(ratio(row, best))]

    def _row(self, which: str | Row | None) -> Row | None:
        return self.row(which) if isinstance(which, str) else which

    def _rows(self, kind: Kind, *tags: str) -> list[Row]:
        wanted = set(tags)
        return [r for r in self.rows if r.kind == kind and r.usable and wanted <= set(r.tags)]


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
        """Whether it is; None where it was not measured, or its interval lies on both sides of the target."""
        if self.measured is None:
            return None
        low = high = float(self.measured)
        if isinstance(self.measured, Estimate):
            low, high = self.measured.interval.low, self.measured.interval.high
            if low != high and not self.measured.sure:
                return None
        if self.relation == "<=":
            low, high, target = -high, -low, -self.target
        else:
            target = self.target
        return True if low >= target else False if high < target else None

    @property
    def verdict(self) -> str:
        """That in a word or two."""
        if self.measured is None:
            return "not measured"
        return {True: "met", False: "missed", None: "cannot tell"}[self.met]


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
    """Measure every contender in rounds, each in an order of its own, and fill the comparison's rows."""
    rounds = rounds or settings.rounds
    comparison.rows = [Row(c.label, c.kind, c.tags) for c in contenders]
    with _task(settings, comparison.name, rounds * len(contenders)) as advance:
        for number in range(rounds):
            order = list(zip(contenders, comparison.rows, strict=True))
            # The first round's is the one given: what one measures, another may need to know.
            if number:
                random.Random(number).shuffle(order)
            for contender, row in order:
                if row.failure is None:
                    try:
                        row.samples.append(_measure_undisturbed(settings, contender, number))
                    except (MeasurementError, UnavailableError, FioError) as error:
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


def ratio(ours: Row | None, theirs: Row | None) -> Estimate | None:
    """Ours over theirs, round by round; None where either is missing."""
    return _ratio(ours, theirs, lambda sample: sample.value)


def _ratio(
    ours: Row | None, theirs: Row | None, value: Callable[[Sample], float | None]
) -> Estimate | None:
    pairs = _pairs(ours, theirs, value)
    if not pairs or not all(a > 0 and b > 0 for a, b in pairs):
        return None
    return Estimate.of(ratio_interval([a / b for a, b in pairs]))


def _pairs(
    ours: Row | None, theirs: Row | None, value: Callable[[Sample], float | None]
) -> list[tuple[float, float]]:
    if ours is None or theirs is None:
        return []
    samples = zip(ours.samples, theirs.samples, strict=False)
    both = [(value(mine), value(other)) for mine, other in samples]
    return [(a, b) for a, b in both if a is not None and b is not None]


def _tells_apart(found: Estimate | None) -> bool:
    """Whether a ratio is surely not 1."""
    if found is None:
        return True  # of 0: there is no doubt
    return found.sure and not found.interval.low <= 1 <= found.interval.high


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
