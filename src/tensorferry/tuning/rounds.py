"""What is measured beside each other: contenders take turns in rounds, and ratios are those of the same round.

Each is measured once in each round, in an order that changes, so that neither a disturbance of the machine nor what the
one before left behind hits one of them alone. Figures are medians; between the smallest and the largest all samples
lie. A contender that fails keeps its message and leaves the later rounds; the others go on.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tensorferry.tuning.workers import UnavailableError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GB = 1e9
_RATES = ("GB/s", "kIOPS")  # of which more is better; of times, sizes and parts less

Kind = Literal["ours", "fio", "peer", "limit"]


class MeasurementError(Exception):
    """A contender returned an error, or moved other bytes than it was asked to."""


class Estimate(float):
    """The median of some numbers, and between which values all of them lie."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """Return it of one number or more."""
        known = sorted(values)
        made = cls(statistics.median(known))
        made.low, made.high = known[0], known[-1]
        return made


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
        """Processor time for each 10^9 bytes."""
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
    """Return the sample whose value is GB/s."""
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
        """Whether it was measured."""
        return self.failure is None and bool(self.samples)

    @property
    def median(self) -> Estimate:
        """The median of its values."""
        return Estimate.of(sample.value for sample in self.samples)

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        """The median of its processor time for each 10^9 bytes."""
        values = [v for s in self.samples if (v := s.cpu_seconds_per_gb) is not None]
        return statistics.median(values) if values else None

    @property
    def peak_growth_nbytes(self) -> int | None:
        """The most by which its memory grew."""
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
        """Whether more of the unit is better."""
        return self.unit in _RATES

    def row(self, label: str) -> Row | None:
        """Return the row of a contender that was measured."""
        return next((row for row in self.rows if row.label == label and row.usable), None)

    def best(self, kind: Kind, *tags: str) -> Row | None:
        """Return the row of a kind, with all these tags, whose median is best."""
        rows = self._rows(kind, *tags)
        better = max if self.higher_is_better else min
        return better(rows, key=lambda row: row.median, default=None)

    def least_cpu(self, kind: Kind, *tags: str) -> Row | None:
        """Return the row of a kind, with all these tags, that needs least processor time."""
        rows = [row for row in self._rows(kind, *tags) if row.cpu_seconds_per_gb]
        return min(rows, key=lambda row: row.cpu_seconds_per_gb or 0.0, default=None)

    def over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return one contender over another, round by round; None where either is missing."""
        return self._ratio(ours, theirs, lambda sample: sample.value)

    def cpu_over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return the same of CPU seconds for each GB."""
        return self._ratio(ours, theirs, lambda sample: sample.cpu_seconds_per_gb)

    def above(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return one contender less another, round by round; None where either is missing."""
        pairs = self._pairs(ours, theirs, lambda sample: sample.value)
        return Estimate.of(a - b for a, b in pairs) if pairs else None

    def median(self, label: str) -> Estimate | None:
        """Return a contender's median, None where it is missing."""
        row = self.row(label)
        return row.median if row else None

    def over_sum(self, ours: str, theirs: Sequence[str]) -> float | None:
        """Return a median over the sum of others, None where one is missing."""
        medians = [self.median(label) for label in (ours, *theirs)]
        if any(median is None for median in medians):
            return None
        return (medians[0] or 0.0) / sum(median or 0.0 for median in medians[1:])

    def described(self, row: Row | None, what: str = "best fio") -> str:
        """Say which row is meant by what, and what it reached."""
        return f"{what}: {row.label}, {row.median:.2f} {self.unit}" if row else f"no {what}"

    def sorted_rows(self) -> list[Row]:
        """Return all that were measured, the best one first."""
        rows = [row for row in self.rows if row.usable]
        return sorted(rows, key=lambda row: row.median, reverse=self.higher_is_better)

    def as_dict(self) -> dict[str, Any]:
        """Return every sample, ready for JSON."""
        return {
            "name": self.name,
            "rules": self.rules,
            "unit": self.unit,
            "rows": [
                {
                    **{name: getattr(row, name) for name in ("label", "kind", "tags", "failure")},
                    "median": row.median if row.usable else None,
                    "range": [row.median.low, row.median.high] if row.usable else None,
                    "cpu_seconds_per_gb": row.cpu_seconds_per_gb,
                    "peak_growth_nbytes": row.peak_growth_nbytes,
                    "samples": [vars(sample) for sample in row.samples],
                }
                for row in self.rows
            ],
        }

    def _ratio(
        self, ours: str, theirs: str | Row | None, value: Callable[[Sample], float | None]
    ) -> Estimate | None:
        pairs = self._pairs(ours, theirs, value)
        if not pairs or not all(a > 0 and b > 0 for a, b in pairs):
            return None
        return Estimate.of(a / b for a, b in pairs)

    def _pairs(
        self, ours: str, theirs: str | Row | None, value: Callable[[Sample], float | None]
    ) -> list[tuple[float, float]]:
        rows = self.row(ours), self.row(theirs) if isinstance(theirs, str) else theirs
        if rows[0] is None or rows[1] is None:
            return []
        both = [
            (value(mine), value(other))
            for mine, other in zip(rows[0].samples, rows[1].samples, strict=False)
        ]
        return [(a, b) for a, b in both if a is not None and b is not None]

    def _rows(self, kind: Kind, *tags: str) -> list[Row]:
        wanted = set(tags)
        return [r for r in self.rows if r.kind == kind and r.usable and wanted <= set(r.tags)]


def take_turns(
    comparison: Comparison,
    contenders: Sequence[Contender],
    rounds: int,
    told: Callable[[str, int, int], None] = lambda *_: None,
) -> Comparison:
    """Measure every contender in rounds, each in an order of its own, and fill the comparison's rows.

    ``told`` is told what is measured next, and how many of how many measurements are done.
    """
    comparison.rows = [Row(c.label, c.kind, c.tags) for c in contenders]
    done = 0
    for number in range(rounds):
        order = list(zip(contenders, comparison.rows, strict=True))
        # The first round's is the one given: what one measures, another may need to know.
        if number:
            random.Random(number).shuffle(order)
        for contender, row in order:
            told(f"{comparison.name} {contender.label}", done, rounds * len(order))
            done += 1
            if row.failure is None:
                try:
                    row.samples.append(contender.measure(number))
                except (MeasurementError, UnavailableError, WorkerError) as error:
                    row.failure = str(error)
    return comparison
