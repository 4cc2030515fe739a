"""Comparisons of several ways to do the same work, which are called contenders: tensorferry, fio, plain Python, ...

In each round, every contender is measured once, in an order that changes from round to round. So a disturbance of the
machine, or the after-effects of a measurement on the next one, does not always affect the same contender. Contenders
are compared by the ratio of their values in the same round. Figures are medians, with the range of all samples. If a
contender fails, its error message is kept, and it is left out of the later rounds.
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
_RATES = ("GB/s", "kIOPS")  # higher is better for these units, lower for all others

# The kind of a contender: tensorferry ("ours"), fio, another program or library ("peer"), or an upper bound ("limit").
Kind = Literal["ours", "fio", "peer", "limit"]


class MeasurementError(Exception):
    """A contender returned an error, or transferred wrong bytes."""


class Estimate(float):
    """The median of several numbers, with the lowest and the highest of them."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """Return the estimate for one or more numbers."""
        ordered = sorted(values)
        estimate = cls(statistics.median(ordered))
        estimate.low, estimate.high = ordered[0], ordered[-1]
        return estimate


@dataclass(frozen=True)
class Sample:
    """One measurement. ``value`` is in the unit of the comparison."""

    value: float
    seconds: float
    nbytes: int = 0
    cpu_seconds: float | None = None
    peak_growth_nbytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        """The CPU seconds for each 10^9 bytes."""
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
    """Return a sample with GB/s as its value."""
    value = nbytes / GB / max(seconds, 1e-9)
    return Sample(value, seconds, nbytes, cpu_seconds, peak_growth_nbytes, details)


@dataclass
class Contender:
    """One way to do the work of a comparison. ``measure`` is called with the number of the round, from 0.

    ``tags`` are words by which :meth:`Comparison.best` selects contenders.
    """

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
        """Whether the contender has samples and did not fail."""
        return self.failure is None and bool(self.samples)

    @property
    def median(self) -> Estimate:
        """The median of the samples' values."""
        return Estimate.of(sample.value for sample in self.samples)

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        """The median of the samples' CPU seconds for each 10^9 bytes."""
        values = [v for s in self.samples if (v := s.cpu_seconds_per_gb) is not None]
        return statistics.median(values) if values else None

    @property
    def peak_growth_nbytes(self) -> int | None:
        """The largest growth of the process's memory in any sample."""
        values = [v for s in self.samples if (v := s.peak_growth_nbytes) is not None]
        return max(values) if values else None


@dataclass
class Comparison:
    """The rows of contenders that did the same work. ``rules`` describes the conditions of the work, for the reader."""

    name: str
    rules: str
    unit: str = "GB/s"
    rows: list[Row] = field(default_factory=list)

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values are better."""
        return self.unit in _RATES

    def row(self, label: str) -> Row | None:
        """Return the row of a contender, or None if it has no usable measurements."""
        return next((row for row in self.rows if row.label == label and row.usable), None)

    def best(self, kind: Kind, *tags: str) -> Row | None:
        """Return the row with the best median of all contenders that are of a kind and have all the tags."""
        rows = self._rows(kind, *tags)
        better = max if self.higher_is_better else min
        return better(rows, key=lambda row: row.median, default=None)

    def least_cpu(self, kind: Kind, *tags: str) -> Row | None:
        """Return the row with the least CPU time of all contenders that are of a kind and have all the tags."""
        rows = [row for row in self._rows(kind, *tags) if row.cpu_seconds_per_gb]
        return min(rows, key=lambda row: row.cpu_seconds_per_gb or 0.0, default=None)

    def over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return ``ours`` divided by ``theirs`` (their values), round by round, or None if one is missing."""
        return self._ratio(ours, theirs, lambda sample: sample.value)

    def cpu_over(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return the ratio of two contenders' CPU seconds for each GB, round by round, or None if either is missing."""
        return self._ratio(ours, theirs, lambda sample: sample.cpu_seconds_per_gb)

    def above(self, ours: str, theirs: str | Row | None) -> Estimate | None:
        """Return the values of ``ours`` minus those of ``theirs``, round by round, or None if one is missing."""
        pairs = self._pairs(ours, theirs, lambda sample: sample.value)
        return Estimate.of(a - b for a, b in pairs) if pairs else None

    def median(self, label: str) -> Estimate | None:
        """Return a contender's median, or None if it is missing."""
        row = self.row(label)
        return row.median if row else None

    def describe(self, row: Row | None, what: str = "best fio") -> str:
        """Return a text with ``what``, which is the row's role in the comparison, and the row's label and median."""
        return f"{what}: {row.label}, {row.median:.2f} {self.unit}" if row else f"no {what}"

    def sorted_rows(self) -> list[Row]:
        """Return all usable rows, the best one first."""
        rows = [row for row in self.rows if row.usable]
        return sorted(rows, key=lambda row: row.median, reverse=self.higher_is_better)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict with all samples for JSON."""
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
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Comparison:
    """Measure all contenders in rounds, each round in a different order, and fill the comparison's rows.

    ``on_progress`` is called with a description of the next measurement, the number of measurements done, and the
    total.
    """
    comparison.rows = [Row(c.label, c.kind, c.tags) for c in contenders]
    done = 0
    for number in range(rounds):
        order = list(zip(contenders, comparison.rows, strict=True))
        # The first round has the given order, because a contender may need results of an earlier one.
        if number:
            random.Random(number).shuffle(order)
        for contender, row in order:
            on_progress(f"{comparison.name} {contender.label}", done, rounds * len(order))
            done += 1
            if row.failure is None:
                try:
                    row.samples.append(contender.measure(number))
                except (MeasurementError, UnavailableError, WorkerError) as error:
                    row.failure = str(error)
    return comparison
