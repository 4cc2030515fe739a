"""The search for better settings: which to measure next, when to drop some, and what is proven in the end.

Pure decisions; what a measurement is, the caller knows. First a race nominates: all settings are tried on short
stretches of the file, in interleaved rounds of changing order, so that a drive which gets slower or faster meanwhile
does so for all of them; the better ones go on, round after round. The winner of so many is always one that noise was
kind to, so that what the race has measured proves nothing. The nominee and the default settings are then measured
anew, one after the other in alternating order, until it is sure that the nominee is better, or not worth more time.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tensorferry.errors import EngineUnavailableError
from tensorferry.tuning.intervals import Interval, interval, ratio_interval
from tensorferry.tuning.space import in_flight_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.transfer.settings import Settings
    from tensorferry.tuning.drive import Measurement

# How many rounds are run before one setting in so many goes on, and of those that are left at last. A stretch is an
# eighth of the file, or twice what a queue holds, if that is more. Chosen on simulated drives, for what is found in
# the time of a fifth of a full sweep (tests/tuning/test_tune_race.py).
_RUNGS = ((2, 2), (2, 3), (6, 4))
_STRETCH_SHARE = 8
_FINALISTS = 8
_FINAL_ROUNDS = 8
_FULL_ROUNDS = 3

# Pairs of nominee and default on a quarter of the file, after which the outcome is looked at. So sure for each look
# is 98 of 100, at least, for all of them: looking several times gives noise several chances.
_LOOKS = (10, 20, 40, 80)
_LIKELY_LOOK = 20  # the last one, most often
_PAIR_SHARE = 4
_SURE = 0.995
# How far towards the upper bound of a gain the true one is hoped to be. Where the last look would not prove even that,
# there are no more: giving up early can make nothing seem proven.
_HOPE = 0.4
# What is less better is not worth a change.
GAIN_MIN = 1.02

# What has taken so much longer than the best so far is stopped in the middle.
_HOPELESS = 2.0
# Finalists within this of the fastest are as good where they take less processor time.
_AS_GOOD = 0.99


@dataclass(frozen=True)
class Step:
    """One point's turn: its settings, how much of the file, and after which times to give up."""

    stage: str
    round: int
    settings: Settings
    nbytes: int
    write_limit_seconds: float | None = None
    read_limit_seconds: float | None = None


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
    def cpu_seconds_per_gb(self) -> float:
        """Processor time for each 10^9 bytes."""
        measured = [each for each in (self.write, self.read) if each is not None]
        nbytes = sum(each.nbytes for each in measured)
        return sum(each.cpu_seconds for each in measured) / max(nbytes, 1) * 1e9


@dataclass(frozen=True)
class Trial:
    """A nominee against the default settings: the turns of both in pairs, and how many times as fast it is."""

    nominee: Settings
    pairs: list[tuple[Turn, Turn]]
    gain: Interval
    proven: bool


@dataclass
class Found:
    """The outcome: the settings chosen, and what is known of them and the others."""

    chosen: Settings
    default: Settings
    finals: dict[Settings, list[Turn]]
    trials: list[Trial]  # the last one is that of what was chosen, if it is not the default
    turns: list[Turn] = field(default_factory=list)

    @property
    def gain(self) -> Interval | None:
        """How many times as fast as the default settings the chosen ones are; None if they are these."""
        return None if self.chosen == self.default else self.trials[-1].gain

    def turns_of(self, settings: Settings) -> list[Turn]:
        """Return what was measured of settings last: in a trial, or in the race's final."""
        for trial in reversed(self.trials):
            if settings in (trial.nominee, self.default):
                return [pair[settings == self.default] for pair in trial.pairs]
        return self.finals.get(settings) or [t for t in self.turns if t.settings == settings]

    def interval(self, settings: Settings, action: str) -> Interval | None:
        """Return the bytes in a second of an action, "write" or "read"; None where it was not looked at."""
        measured = [getattr(turn, action) for turn in self.turns_of(settings)]
        return None if measured[0] is None else interval([each.rate for each in measured])


class Runner(Protocol):
    """What the search runs on."""

    def __call__(self, step: Step) -> Turn:
        """Measure one step."""

    def begin(self, stage: str, points: int, left_nbytes: int) -> None:
        """Hear that a stage begins, and how much the steps from here on to the end are likely to move."""


def search(
    points: Sequence[Settings],
    default: Settings,
    nbytes: int,
    run: Runner,
    *,
    full: bool = False,
    stored: Sequence[Settings] = (),
) -> Found:
    """Find settings that are surely better than the default ones, if there are any.

    Parameters
    ----------
    points : sequence of Settings
        What to choose from.
    default : Settings
        Chosen unless another is proven to be better by 2 %.
    nbytes : int
        Size of the file.
    run : Runner
        Measures.
    full : bool
        Measure all points on the whole file three times before the better ones go on.
    stored : sequence of Settings
        What an earlier search has found: tried as well where this one's nominee is not proven.
    """
    race = _Race(default, nbytes, run, full)
    finals = race.run_to_the_final(list(dict.fromkeys([*points, default])))
    nominee = race.nominee(finals)
    nominees = [each for each in dict.fromkeys([nominee, *stored]) if each != default]
    trials: list[Trial] = []
    for each in nominees:
        try:
            trials.append(race.try_against_default(each))
        except EngineUnavailableError as refusal:
            _warn_of(each, refusal)
            continue
        if trials[-1].proven:
            return Found(each, default, finals, trials, race.turns)
    return Found(default, default, finals, trials, race.turns)


def expected_nbytes(points: Sequence[Settings], nbytes: int, *, full: bool) -> int:
    """Return how much a search is likely to move each way before it ends."""
    left = sum(each.nbytes(points, nbytes) for each in _stages(len(points), full))
    return left + _pairs_nbytes(points, nbytes, _LIKELY_LOOK)


@dataclass(frozen=True)
class _Stage:
    """Rounds of so many settings, on one part of the file in `share`."""

    name: str
    count: int
    rounds: int
    share: int

    def nbytes(self, points: Sequence[Settings], file_nbytes: int) -> int:
        """Return what it moves each way, if it is played by settings like these."""
        each = statistics.fmean(_stretch(point, file_nbytes, self.share) for point in points)
        return round(self.count * self.rounds * each)


def _stages(count: int, full: bool) -> list[_Stage]:
    """Return what is played by how many settings, the final last."""
    stages = []
    if full:
        stages.append(_Stage("full sweep", count, _FULL_ROUNDS, 1))
        count = min(count, _FINALISTS)
    for rounds, kept in _RUNGS:
        if count > _FINALISTS:
            stages.append(_Stage(f"{count} settings", count, rounds, _STRETCH_SHARE))
            count = max(_FINALISTS, math.ceil(count / kept))
    return [*stages, _Stage("final", count, _FINAL_ROUNDS, _STRETCH_SHARE)]


class _Race:
    def __init__(self, default: Settings, nbytes: int, run: Runner, full: bool) -> None:
        self.turns: list[Turn] = []
        self._default = default
        self._nbytes = nbytes
        self._run = run
        self._full = full
        self._logs: dict[Settings, list[float]] = defaultdict(list)
        self._best_rates = {"write": 0.0, "read": 0.0}

    def run_to_the_final(self, points: list[Settings]) -> dict[Settings, list[Turn]]:
        """Play stage after stage with those that were better in all before; return the turns of the final."""
        stages = _stages(len(points), self._full)
        played: dict[Settings, list[Turn]] = {}
        for number, stage in enumerate(stages):
            points = sorted(points, key=self._rank, reverse=True)[: stage.count]
            left = sum(each.nbytes(points, self._nbytes) for each in stages[number:])
            left += _pairs_nbytes(points, self._nbytes, _LIKELY_LOOK)
            self._run.begin(stage.name, len(points), left)
            played = self._play(stage, points)
            points = list(played)
        return played

    def nominee(self, finals: dict[Settings, list[Turn]]) -> Settings:
        """Return the fastest; of those as good the default, or the one that takes least processor time."""
        best = max(map(self._rank, finals))
        as_good = [each for each in finals if self._rank(each) >= best + math.log(_AS_GOOD)]
        if self._default in as_good:
            return self._default

        def cost(settings: Settings) -> tuple[bool, float]:
            # A system call for each block can only cost: where it seems not to, that is noise.
            cpu = statistics.median(turn.cpu_seconds_per_gb for turn in finals[settings])
            return settings.single_submit, cpu

        return min(as_good, key=cost)

    def try_against_default(self, nominee: Settings) -> Trial:
        """Measure both anew, in pairs, and see whether the nominee is surely better."""
        stage = "nominee and default"
        pairs: list[tuple[Turn, Turn]] = []
        nbytes = max(_stretch(each, self._nbytes, _PAIR_SHARE) for each in (nominee, self._default))
        for look in _LOOKS:
            more = max(look, _LIKELY_LOOK) - len(pairs)
            self._run.begin(stage, 2, 2 * more * nbytes)
            for number in range(len(pairs), look):
                order = [nominee, self._default] if number % 2 else [self._default, nominee]
                turns = {each: self._run(Step(stage, number, each, nbytes)) for each in order}
                self.turns += turns.values()
                pairs.append((turns[nominee], turns[self._default]))
            gain = ratio_interval([mine.score / theirs.score for mine, theirs in pairs], _SURE)
            if gain.low > GAIN_MIN:
                return Trial(nominee, pairs, gain, proven=True)
            if gain.high < GAIN_MIN or _low_at_best(gain, look) < GAIN_MIN:
                break
        return Trial(nominee, pairs, gain, proven=False)

    def _play(self, stage: _Stage, points: Sequence[Settings]) -> dict[Settings, list[Turn]]:
        """Measure all in turn; what an engine cannot be had for any more is out."""
        played: dict[Settings, list[Turn]] = {each: [] for each in points}
        for number in range(stage.rounds):
            order = list(played)
            random.Random(f"{stage.name} {number}").shuffle(order)
            if not self.turns:  # the first is what others are held to
                order.sort(key=lambda settings: settings != self._default)
            for settings in order:
                nbytes = _stretch(settings, self._nbytes, stage.share)
                limits = (self._limit(action, nbytes) for action in ("write", "read"))
                try:
                    turn = self._run(Step(stage.name, number, settings, nbytes, *limits))
                except EngineUnavailableError as refusal:
                    if settings == self._default or len(played) == 1:
                        raise
                    _warn_of(settings, refusal)
                    del played[settings]
                    continue
                self._note(turn)
                played[settings].append(turn)
        return played

    def _rank(self, settings: Settings) -> float:
        """Return the mean logarithm of all that was measured of settings."""
        logs = self._logs[settings]
        return statistics.fmean(logs) if logs else 0.0

    def _limit(self, action: str, nbytes: int) -> float | None:
        rate = self._best_rates[action]
        return None if self._full or not rate else _HOPELESS * nbytes / rate

    def _note(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._logs[turn.settings].append(math.log(turn.score))
        for action, measured in (("write", turn.write), ("read", turn.read)):
            if measured is not None:
                self._best_rates[action] = max(self._best_rates[action], measured.rate)


def _low_at_best(gain: Interval, look: int) -> float:
    """Return the lower bound that the last look would find, were the gain as large as can be hoped for by now."""
    hoped: float = gain.median * (gain.high / gain.median) ** _HOPE
    narrower: float = (gain.low / gain.median) ** math.sqrt(look / _LOOKS[-1])
    return hoped * narrower


def _warn_of(settings: Settings, refusal: EngineUnavailableError) -> None:
    warnings.warn(f"left out: {settings}: {refusal}", RuntimeWarning, stacklevel=2)


def _stretch(settings: Settings, nbytes: int, share: int) -> int:
    """Return how much of a file is moved: one part in so many, but enough to fill the queue twice."""
    wanted = max(nbytes // share, 2 * in_flight_nbytes(settings))
    return min(nbytes, wanted // 4096 * 4096)


def _pairs_nbytes(points: Sequence[Settings], nbytes: int, count: int) -> int:
    return _Stage("", 2, count, _PAIR_SHARE).nbytes(points, nbytes)
