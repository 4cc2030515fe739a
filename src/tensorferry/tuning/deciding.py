"""Which settings are faster than the default ones, if any: pure decisions on what a callable measures.

A sweep measures all candidates and the default in rounds of changing order, so that a drive that gets slower or faster
meanwhile does so for all of them; the better ones go on. How many rounds depends on the noise that the first ones show.
The best of a dozen is always one that noise was kind to, so its figures prove nothing: it is measured once more, in
pairs with the default, and only these pairs decide.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.transfer.settings import Settings

# Gains below this are not worth a change; the sweep is to find those beyond the second if there are any.
GAIN_MIN = 1.02
_GAIN_WANTED = 1.3
# A bound lies so many standard errors below the mean: wrong 1 time in 200, if noise is anything like normal.
_ERRORS = 2.6
# Rounds before the noise is estimated, candidates left after each stage, and how many standard errors of its mean the
# wanted gain is to be at the stage's end.
_FIRST_ROUNDS = 3
_STAGES = ((6, 1.5), (3, 2.5), (2, 4.0), (1, 5.0))
_SWEEP_SHARE = 0.6  # of the time, at most
_PAIRS_MIN, _PAIRS_MAX = 16, 1000
# Pairs are as many as prove this part of the gain that the sweep saw: it was kind to the best.
_HOPE = 0.4


@dataclass(frozen=True)
class Decision:
    """What was found for one direction of one drive.

    Attributes
    ----------
    chosen : Settings
        The default ones, unless others are proven to be faster.
    nominee : Settings or None
        The best of the sweep; None where the default ones were.
    gain, low : float
        How many times as fast as the default the nominee was in the pairs, and at least, surely; 1 without pairs.
    speedups : dict
        For all settings the gain that the sweep saw.
    """

    default: Settings
    chosen: Settings
    nominee: Settings | None = None
    gain: float = 1.0
    low: float = 1.0
    pairs: int = 0
    speedups: dict[Settings, float] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        """Return what the pairs showed, ready for JSON."""
        return {"median": self.gain, "low": self.low, "pairs": self.pairs}


class _Sweep:
    """Logarithms of seconds, of each round less the round's mean, by settings."""

    def __init__(
        self,
        default: Settings,
        measure: Callable[[Settings], float],
        budget_seconds: float,
        told: Callable[[float], None],
    ) -> None:
        self.default = default
        self.spent_seconds = 0.0
        self.count = 0
        self._measure = measure
        self._budget_seconds = budget_seconds
        self._told = told
        self._random = random.Random(0)
        self._logs: dict[Settings, list[float]] = {}

    def log_seconds(self, settings: Settings) -> float:
        """Measure once."""
        seconds = max(self._measure(settings), 1e-9)
        self.spent_seconds += seconds
        self.count += 1
        self._told(min(1.0, self.spent_seconds / self._budget_seconds))
        return math.log(seconds)

    def rounds(self, settings: Sequence[Settings], count: int) -> None:
        for _ in range(count):
            order = self._random.sample(list(settings), len(settings))
            found = {each: self.log_seconds(each) for each in order}
            # Of those that are in all rounds: means of rounds with fewer settings would be others'.
            middle = found[self.default]
            for each, value in found.items():
                self._logs.setdefault(each, []).append(value - middle)

    def affordable(self, wanted: int, each: int) -> int:
        """Return how many of the wanted rounds of so many measurements there is time for, before pairs."""
        left = _SWEEP_SHARE * self._budget_seconds - self.spent_seconds
        return max(0, min(wanted, int(left / (each * self.seconds_each()))))

    def seconds_each(self) -> float:
        return self.spent_seconds / self.count

    def noise(self) -> float:
        """Return the standard deviation of a measurement's logarithm."""
        spreads = [
            statistics.variance(values) for values in self._logs.values() if any(values)
        ]  # of differences: twice
        return math.sqrt(statistics.fmean(spreads) / 2) if spreads else 0.0

    def gain(self, settings: Settings) -> float:
        return -statistics.fmean(self._logs[settings])

    def speedups(self) -> dict[Settings, float]:
        return {each: math.exp(self.gain(each)) for each in self._logs}


def decide(
    candidates: Sequence[Settings],
    default: Settings,
    measure: Callable[[Settings], float],
    budget_seconds: float,
    told: Callable[[float], None] = lambda _: None,
) -> Decision:
    """Find settings that are surely faster than the default ones, if there are any.

    Parameters
    ----------
    candidates : sequence of Settings
        What to choose from.
    default : Settings
        Chosen unless another is proven to be faster.
    measure : callable
        Returns the seconds that the same work takes with some settings.
    budget_seconds : float
        How much of them there may be in all.
    told : callable
        Is told, after each, what share of the budget is used up.
    """
    sweep = _Sweep(default, measure, budget_seconds, told)
    left = [default, *(each for each in dict.fromkeys(candidates) if each != default)]
    sweep.rounds(left, _FIRST_ROUNDS)
    noise, done = sweep.noise(), _FIRST_ROUNDS
    for kept, errors in _STAGES:
        wanted = math.ceil((errors * noise / math.log(_GAIN_WANTED)) ** 2)
        more = sweep.affordable(max(0, wanted - done), len(left))
        sweep.rounds(left, more)
        done += more
        best = sorted(left[1:], key=sweep.gain, reverse=True)[:kept]
        left = [default, *best]
    nominee, found = left[-1], sweep.speedups()
    hoped = sweep.gain(nominee)
    if nominee == default or hoped < math.log(GAIN_MIN):
        return Decision(default, default, speedups=found)
    error_wanted = _HOPE * min(hoped, math.log(_GAIN_WANTED)) / _ERRORS
    count = min(max(math.ceil(2 * (noise / error_wanted) ** 2), _PAIRS_MIN), _PAIRS_MAX)
    pairs: list[float] = []
    while len(pairs) < count and sweep.spent_seconds < budget_seconds:
        # The order alternates, so that being first makes no difference on average.
        order = (default, nominee) if len(pairs) % 2 else (nominee, default)
        seen = {each: sweep.log_seconds(each) for each in order}
        pairs.append(seen[default] - seen[nominee])
    if len(pairs) < _PAIRS_MIN:  # a drive so slow that its noise cannot be told
        return Decision(default, default, nominee, pairs=len(pairs), speedups=found)
    mean = statistics.fmean(pairs)
    low = mean - _ERRORS * statistics.stdev(pairs) / math.sqrt(len(pairs))
    proven = low > 0 and mean >= math.log(GAIN_MIN)
    gain, at_least = math.exp(mean), math.exp(low)
    return Decision(
        default, nominee if proven else default, nominee, gain, at_least, len(pairs), found
    )
