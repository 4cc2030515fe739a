"""How sure a figure is: the one record of a measurement repeated, and two ways to come by it.

Both go by ranks alone and ask for no particular distribution of the noise. Figures are medians of what was measured;
where two ways were measured in turn, their ratios tell more than their figures do.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Interval:
    """An estimate, and between which values the true one lies with a probability of `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median of independent values, and the narrowest pair of them that holds it so surely.

    With few values that is the smallest and the largest, and the confidence is what it is. The count of values below
    the true median is binomial, whatever their distribution.
    """
    ordered = sorted(values)
    count = len(ordered)
    return _between(
        ordered,
        statistics.median(ordered),
        [math.comb(count, below) for below in range((count + 1) // 2)],
        2**count,
        confidence,
    )


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return by how much one is more than the other, from ratios of independent pairs.

    Noise is taken to treat both of a pair alike, so that their logarithms are symmetric about the true one: then
    this needs two thirds of the pairs that :func:`interval` would (Wilcoxon's signed ranks, after Hodges and Lehmann).
    """
    logs = [math.log(ratio) for ratio in ratios]
    averages = sorted(
        math.exp((one + other) / 2)
        for number, one in enumerate(logs)
        for other in logs[: number + 1]
    )
    ways = _ways_of_rank_sums(len(logs))[: (len(averages) + 1) // 2]
    return _between(averages, statistics.median(averages), ways, 2 ** len(logs), confidence)


def _between(
    ordered: list[float], middle: float, ways: list[int], all_ways: int, confidence: float
) -> Interval:
    """Cut as many values off both ends as the probability of each cut, ways of all ways, lets."""
    cut, beyond = 0, ways[0]
    while cut + 1 < len(ways) and 2 * (beyond + ways[cut + 1]) <= (1 - confidence) * all_ways:
        cut += 1
        beyond += ways[cut]
    sure = max(0.0, 1 - 2 * beyond / all_ways)
    return Interval(middle, ordered[cut], ordered[-1 - cut], sure)


@functools.cache
def _ways_of_rank_sums(count: int) -> list[int]:
    """Return in how many ways ranks from 1 to `count` can be chosen, for each sum of those chosen."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = [*ways, *[0] * rank]
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    return ways
