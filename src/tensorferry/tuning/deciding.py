"""The decision whether any settings are faster than the default, from measurements that a function of the caller makes.

A sweep measures all candidates and the default in rounds of changing order, so a drive that becomes slower or faster
affects all of them equally. The sweep has several stages, and only the better candidates of a stage remain for the next
one. The number of rounds depends on the noise in the first rounds. The best of a dozen candidates was probably favoured
by noise, so the sweep proves nothing. Therefore its best candidate, the nominee, is measured again, in pairs with the
default, and only these pairs decide.
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

# Gains below GAIN_MIN are not worth a change. The sweep is designed to find gains from _GAIN_WANTED on.
GAIN_MIN = 1.02
_GAIN_WANTED = 1.3
# The lower bound of a gain is this number of standard errors below the mean. For normally distributed noise, the true
# gain is below this bound once in 200 times.
_ERRORS = 2.6
# _FIRST_ROUNDS is the number of rounds before the noise is estimated. _STAGES has, for each stage, the number of
# candidates that remain after it, and its precision: rounds are added until a gain of _GAIN_WANTED is as large as this
# number of standard errors of a candidate's mean.
_FIRST_ROUNDS = 3
_STAGES = ((6, 1.5), (3, 2.5), (2, 4.0), (1, 5.0))
_SWEEP_SHARE = 0.6  # the maximum share of the time budget that the sweep may use
_PAIRS_MIN, _PAIRS_MAX = 16, 1000
# The sweep overestimates the gain of its best candidate. So the number of pairs is chosen to prove a gain that is only
# this share of the sweep's estimate.
_EXPECTED_SHARE_OF_GAIN = 0.4


@dataclass(frozen=True)
class Decision:
    """The decision for one direction of one drive.

    Attributes
    ----------
    default : Settings
        The default settings.
    chosen : Settings
        The default settings, unless others are proven to be faster.
    nominee : Settings or None
        The best settings of the sweep, or None if these are the default.
    gain, low : float
        The nominee's speed relative to the default in the pairs, and its lower bound. Both are 1 without pairs.
    pairs : int
        The number of pairs.
    speedups : dict
        The speed of all settings in the sweep, relative to the default. Empty if the drive is too slow for a sweep.
    """

    default: Settings
    chosen: Settings
    nominee: Settings | None = None
    gain: float = 1.0
    low: float = 1.0
    pairs: int = 0
    speedups: dict[Settings, float] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        """Return the result of the pairs as a dict for JSON."""
        return {"median": self.gain, "low": self.low, "pairs": self.pairs}


class _Sweep:
    """The measurements of a sweep: for each candidate, the logarithm of its seconds minus that of the default's.

    Both are measured in the same round. The difference of the logarithms stands for the ratio of the two times.
    """

    def __init__(
        self,
        default: Settings,
        measure: Callable[[Settings], float],
        budget_seconds: float,
        on_progress: Callable[[float], None],
    ) -> None:
        self.default = default
        self.spent_seconds = 0.0
        self.count = 0
        self._measure = measure
        self._budget_seconds = budget_seconds
        self._on_progress = on_progress
        self._random = random.Random(0)
        self._logs: dict[Settings, list[float]] = {}

    def log_seconds(self, settings: Settings) -> float:
        """Measure once, and return the logarithm of the seconds."""
        seconds = max(self._measure(settings), 1e-9)
        self.spent_seconds += seconds
        self.count += 1
        self._on_progress(min(1.0, self.spent_seconds / self._budget_seconds))
        return math.log(seconds)

    def rounds(self, settings: Sequence[Settings], count: int) -> None:
        for _ in range(count):
            order = self._random.sample(list(settings), len(settings))
            found = {each: self.log_seconds(each) for each in order}
            # The reference is the default, which is in all rounds. A round's mean would depend on which settings are
            # still in the sweep.
            reference = found[self.default]
            for each, value in found.items():
                self._logs.setdefault(each, []).append(value - reference)

    def affordable(self, wanted: int, each: int) -> int:
        """Return how many of ``wanted`` rounds fit into the sweep's time. A round has ``each`` measurements."""
        left = _SWEEP_SHARE * self._budget_seconds - self.spent_seconds
        return max(0, min(wanted, int(left / (each * self.seconds_each()))))

    def seconds_each(self) -> float:
        return self.spent_seconds / self.count

    def noise(self) -> float:
        """Return the standard deviation of a measurement's logarithm."""
        # The values are differences of two measurements, so their variance is twice that of one measurement.
        variances = [statistics.variance(values) for values in self._logs.values() if any(values)]
        return math.sqrt(statistics.fmean(variances) / 2) if variances else 0.0

    def gain(self, settings: Settings) -> float:
        """Return the mean logarithm of a candidate's speed relative to the default."""
        return -statistics.fmean(self._logs[settings])

    def speedups(self) -> dict[Settings, float]:
        return {each: math.exp(self.gain(each)) for each in self._logs}


def decide(
    candidates: Sequence[Settings],
    default: Settings,
    measure: Callable[[Settings], float],
    budget_seconds: float,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Decision:
    """Find settings that are proven to be faster than the default, if any exist.

    Parameters
    ----------
    candidates : sequence of Settings
        The settings to choose from.
    default : Settings
        The settings that are chosen unless others are proven to be faster.
    measure : callable
        Returns the seconds that the same work takes with the given settings.
    budget_seconds : float
        The maximum total of these seconds.
    on_progress : callable
        Called after each measurement with the share of the budget that has been used.
    """
    sweep = _Sweep(default, measure, budget_seconds, on_progress)
    remaining = [default, *(each for each in dict.fromkeys(candidates) if each != default)]
    sweep.log_seconds(default)
    if sweep.spent_seconds * len(remaining) * _FIRST_ROUNDS > budget_seconds:
        # The drive is so slow that the first rounds alone would exceed the budget, and no time would be left for pairs.
        return Decision(default, default)
    sweep.rounds(remaining, _FIRST_ROUNDS)
    noise, done = sweep.noise(), _FIRST_ROUNDS
    for kept, errors in _STAGES:
        wanted = math.ceil((errors * noise / math.log(_GAIN_WANTED)) ** 2)
        more = sweep.affordable(max(0, wanted - done), len(remaining))
        sweep.rounds(remaining, more)
        done += more
        best = sorted(remaining[1:], key=sweep.gain, reverse=True)[:kept]
        remaining = [default, *best]
    nominee, found = remaining[-1], sweep.speedups()
    sweep_gain = sweep.gain(nominee)
    if nominee == default or sweep_gain < math.log(GAIN_MIN):
        return Decision(default, default, speedups=found)
    # With this standard error of the mean of the pairs, the lower bound of the expected gain is zero. A pair is the
    # difference of two measurements, so its variance is twice that of one measurement.
    error_wanted = _EXPECTED_SHARE_OF_GAIN * min(sweep_gain, math.log(_GAIN_WANTED)) / _ERRORS
    count = min(max(math.ceil(2 * (noise / error_wanted) ** 2), _PAIRS_MIN), _PAIRS_MAX)
    pairs: list[float] = []
    while len(pairs) < count and sweep.spent_seconds < budget_seconds:
        # The order alternates, which cancels any advantage of the first or the second place.
        order = (default, nominee) if len(pairs) % 2 else (nominee, default)
        seen = {each: sweep.log_seconds(each) for each in order}
        pairs.append(seen[default] - seen[nominee])
    if len(pairs) < _PAIRS_MIN:  # the drive is too slow for a reliable estimate of the noise
        return Decision(default, default, nominee, pairs=len(pairs), speedups=found)
    mean = statistics.fmean(pairs)
    low = mean - _ERRORS * statistics.stdev(pairs) / math.sqrt(len(pairs))
    proven = low > 0 and mean >= math.log(GAIN_MIN)
    gain, at_least = math.exp(mean), math.exp(low)
    return Decision(
        default, nominee if proven else default, nominee, gain, at_least, len(pairs), found
    )
