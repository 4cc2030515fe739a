"""The search for the best settings: which point to measure next, when to drop one, and how sure the outcome is.

Pure decisions; what a measurement is, the caller knows. The idea is successive halving: all points are tried on a
short stretch of the file, the better third again on a longer one, and so on; the few that are left run the whole file
in interleaved rounds, so that a drive which gets slower or faster meanwhile does so for all of them. Medians count,
and order statistics say how sure they are, which needs no assumption about how the noise is distributed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.tuning.drive import Measurement
    from tensorferry.tuning.settings import Settings

# Of the file, one part in so many is moved in a rung; of the points, one in so many goes on.
_RUNGS = ((8, 3), (4, 3), (2, 2))
# One point in so many runs the final, within limits. The final goes on while the whole race has measured for less than
# this part of the time that a full sweep would, going by the first rung. Few finalists and many rounds: on simulated
# drives (tests/tuning/test_tune_race.py) a good one was always among them, and too few rounds let a worse one win.
_FINALISTS_SHARE = 24
_FINALISTS_MIN, _FINALISTS_MAX = 6, 12
_ROUNDS_MIN, _ROUNDS_MAX = 7, 25
_ROUNDS_BEFORE_DROPPING = 3
_BUDGET = 0.17
_FULL_ROUNDS = 3

# What has taken so much longer than the best so far is stopped in the middle.
_HOPELESS = 2.0
# A finalist that is surely slower, by so much in the median, needs no more rounds.
_CLEARLY_SLOWER = 0.98
# Settings within noise of the fastest, and within this of it, are as good where they take less processor time; and
# the default settings are as good within a little more, for what is not proven is not worth a change.
_AS_GOOD = 0.99
_DEFAULT_AS_GOOD = 0.98


@dataclass(frozen=True)
class Step:
    """One point's turn: its settings, how much of the file, and after which times to give up."""

    stage: str
    round: int
    settings: Settings
    nbytes: int
    write_limit_seconds: float | None
    read_limit_seconds: float | None


@dataclass(frozen=True)
class Turn:
    """What a step measured; None for what is not looked at."""

    settings: Settings
    nbytes: int
    write: Measurement | None
    read: Measurement | None

    @property
    def score(self) -> float:
        """Bytes in a second; of writing and reading the geometric mean, so that a percent of either counts the same."""
        rates = [measured.rate for measured in (self.write, self.read) if measured is not None]
        return math.prod(rates) ** (1 / len(rates))

    @property
    def seconds(self) -> float:
        """The time it took."""
        return sum(each.seconds for each in (self.write, self.read) if each is not None)

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor time for each 10^9 bytes."""
        measured = [each for each in (self.write, self.read) if each is not None]
        nbytes = sum(each.nbytes for each in measured)
        return sum(each.cpu_seconds for each in measured) / max(nbytes, 1) * 1e9


@dataclass(frozen=True)
class Interval:
    """A median, and between which values the true one lies with a probability of `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


@dataclass
class Found:
    """The outcome: the settings chosen, and what is known of them and the others."""

    chosen: Settings
    fastest: Settings
    default: Settings
    rounds: dict[Settings, list[Turn]]  # of the finalists that stayed to the end
    within_noise: list[Settings]  # of the chosen ones, not counting them
    turns: list[Turn] = field(default_factory=list)

    def interval(self, settings: Settings, action: str | None = None) -> Interval | None:
        """Return a finalist's bytes in a second: of "write", "read" or, without an action, of both together."""
        turns = self.rounds[settings]
        if action is None:
            return interval([turn.score for turn in turns])
        measured = [getattr(turn, action) for turn in turns]
        return None if measured[0] is None else interval([each.rate for each in measured])

    def gain(self) -> Interval:
        """Return how many times as fast the chosen settings are as the default ones, round by round."""
        return interval(_ratios(self.rounds[self.chosen], self.rounds[self.default]))


class Runner(Protocol):
    """What the search runs on."""

    def __call__(self, step: Step) -> Turn:
        """Measure one step."""

    def begin(self, stage: str, points: int, rounds: int) -> None:
        """Hear that a stage begins."""


def race(points: Sequence[Settings], default: Settings, nbytes: int, run: Runner) -> Found:
    """Find the best of the points in less than a quarter of the time that sweeping all of them takes.

    Parameters
    ----------
    points : sequence of Settings
        What to choose from.
    default : Settings
        Measured to the end for comparison, and chosen if nothing else is faster beyond noise.
    nbytes : int
        Size of the file.
    run : Runner
        Measures.
    """
    search = _Search(default, nbytes, run)
    survivors = _with_default(points, default)
    budget_seconds = 0.0
    finalists = min(max(len(survivors) // _FINALISTS_SHARE, _FINALISTS_MIN), _FINALISTS_MAX)
    for divisor, keep in _RUNGS:
        if len(survivors) <= finalists:
            break
        search.play(f"1/{divisor} of the file", survivors, nbytes // divisor, 1)
        budget_seconds = budget_seconds or _BUDGET * _FULL_ROUNDS * divisor * search.seconds
        count = max(finalists, math.ceil(len(survivors) / keep))
        survivors = _with_default(search.best(survivors)[:count], default)
    survivors = _with_default(survivors[:finalists], default)
    finals = search.play("final", survivors, nbytes, _ROUNDS_MAX, budget_seconds)
    return _conclude(finals, default, search.turns)


def sweep(points: Sequence[Settings], default: Settings, nbytes: int, run: Runner) -> Found:
    """Measure all points on the whole file, in interleaved rounds, and find the best."""
    search = _Search(default, nbytes, run, patient=True)
    everything = _with_default(points, default)
    rounds = search.play("full sweep", everything, nbytes, _FULL_ROUNDS)
    return _conclude(rounds, default, search.turns)


class _Search:
    def __init__(
        self, default: Settings, nbytes: int, run: Runner, *, patient: bool = False
    ) -> None:
        self.turns: list[Turn] = []
        self._default = default
        self._nbytes = nbytes
        self._run = run
        self._patient = patient
        self._best_rates = {"write": 0.0, "read": 0.0}

    def play(
        self,
        stage: str,
        points: Sequence[Settings],
        nbytes: int,
        rounds: int,
        budget_seconds: float | None = None,
    ) -> dict[Settings, list[Turn]]:
        """Measure points in rounds, each in another order, and return the turns of those that stayed.

        With a budget losers are dropped, and the rounds end when it is spent.
        """
        self._run.begin(stage, len(points), rounds)
        played: dict[Settings, list[Turn]] = {settings: [] for settings in points}
        for number in range(rounds):
            order = list(played)
            random.Random(f"{stage} {number}").shuffle(order)  # the same when a run is resumed
            if not self.turns:  # the first is what others are held to
                order.sort(key=lambda settings: settings != self._default)
            for settings in order:
                limits = (self._limit(action, nbytes) for action in ("write", "read"))
                turn = self._run(Step(stage, number, settings, nbytes, *limits))
                self._note(turn)
                played[settings].append(turn)
            if budget_seconds is None:
                continue
            if number + 1 >= _ROUNDS_BEFORE_DROPPING:
                played = self._without_losers(played)
            spent = self.seconds >= budget_seconds or len(played) == 1
            if number + 1 >= _ROUNDS_MIN and spent:
                break
        return played

    @property
    def seconds(self) -> float:
        """The time that all measurements so far took."""
        return sum(turn.seconds for turn in self.turns)

    def best(self, points: Sequence[Settings]) -> list[Settings]:
        """Return points from the fastest to the slowest, by all that was measured of them."""
        # All of them were measured in the same stages, so sums compare without being normalized.
        sums: dict[Settings, float] = defaultdict(float)
        for turn in self.turns:
            sums[turn.settings] += turn.nbytes * math.log(turn.score)
        return sorted(points, key=lambda settings: sums[settings], reverse=True)

    def _limit(self, action: str, nbytes: int) -> float | None:
        rate = self._best_rates[action]
        return None if self._patient or not rate else _HOPELESS * nbytes / rate

    def _note(self, turn: Turn) -> None:
        self.turns.append(turn)
        for action, measured in (("write", turn.write), ("read", turn.read)):
            if measured is not None:
                self._best_rates[action] = max(self._best_rates[action], measured.rate)

    def _without_losers(self, played: dict[Settings, list[Turn]]) -> dict[Settings, list[Turn]]:
        leader = _fastest(played)

        def stays(settings: Settings) -> bool:
            ratio = interval(_ratios(played[settings], played[leader]))
            clearly_slower = ratio.high < 1 and ratio.median <= _CLEARLY_SLOWER
            return settings in (leader, self._default) or not clearly_slower

        return {settings: turns for settings, turns in played.items() if stays(settings)}


def interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values, and the narrowest pair of them that holds it with 95 % or more.

    With few values that is the smallest and the largest, and the confidence is what it is. The count of values below
    the true median is binomial, whatever their distribution.
    """
    ordered = sorted(values)
    count = len(ordered)
    confidence = [
        1 - 2 * sum(math.comb(count, below) for below in range(cut + 1)) / 2**count
        for cut in range((count + 1) // 2)
    ]
    cut = max((cut for cut, sure in enumerate(confidence) if sure >= 0.95), default=0)
    return Interval(
        statistics.median(ordered), ordered[cut], ordered[-1 - cut], max(0.0, confidence[cut])
    )


def _conclude(rounds: dict[Settings, list[Turn]], default: Settings, turns: list[Turn]) -> Found:
    fastest = _fastest(rounds)
    as_good = [
        settings
        for settings in rounds
        if _same(rounds[settings], rounds[fastest])
        and statistics.median(_ratios(rounds[settings], rounds[fastest]))
        >= (_DEFAULT_AS_GOOD if settings == default else _AS_GOOD)
    ]
    # A system call for each block can only cost: where it seems not to, that is noise.
    frugal = min(as_good, key=lambda settings: (settings.single_submit, _cpu(rounds[settings])))
    chosen = default if default in as_good else frugal
    within_noise = [
        settings
        for settings in rounds
        if settings != chosen and _same(rounds[settings], rounds[chosen])
    ]
    return Found(chosen, fastest, default, rounds, within_noise, turns)


def _fastest(rounds: dict[Settings, list[Turn]]) -> Settings:
    return max(rounds, key=lambda settings: statistics.median(t.score for t in rounds[settings]))


def _ratios(turns: list[Turn], others: list[Turn]) -> list[float]:
    return [turn.score / other.score for turn, other in zip(turns, others, strict=True)]


def _same(turns: list[Turn], others: list[Turn]) -> bool:
    """Return whether the rounds leave open which is faster."""
    ratio = interval(_ratios(turns, others))
    return ratio.low <= 1 <= ratio.high


def _cpu(turns: list[Turn]) -> float:
    return statistics.median(turn.cpu_seconds_per_gb for turn in turns)


def _with_default(points: Sequence[Settings], default: Settings) -> list[Settings]:
    return list(dict.fromkeys([*points, default]))
