"""The search for better settings, on simulated drives: what it finds, what it never claims, and in what time.

A simulated drive has a clock, noise on every measurement, and drift; the search is the one that runs on real ones.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import TYPE_CHECKING

import pytest

from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer.settings import Settings
from tensorferry.tuning.drive import Measurement
from tensorferry.tuning.race import GAIN_MIN, Found, Step, Turn, expected_nbytes, search
from tensorferry.tuning.space import in_flight_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

# So large that each of the queues fits twice into an eighth: what counts is how often each is measured.
FILE_NBYTES = 1 << 36
FILE_SECONDS = 0.2
DEFAULT = Settings(overlap_events=True, engine="io_uring")
POINTS = [
    Settings(256 << (10 + power), depth, False, True, workers, engine)
    for engine, power, depth, workers in itertools.product(
        ("io_uring", "libaio", "threads"), range(6), (4, 16, 32, 128), (1, 2, 4)
    )
]
random.Random(0).shuffle(POINTS)
POINTS = [DEFAULT, *(point for point in POINTS if point != DEFAULT)][:189]
FULL_SWEEP_SECONDS = 3 * len(POINTS) * FILE_SECONDS


class SimulatedDrive:
    """Runs steps on a made-up drive on which some settings are faster than the others; reading is not looked at."""

    def __init__(
        self, seed: int, *, noise: float, gains: dict[Settings, float] | None = None
    ) -> None:
        self.seconds = 0.0
        self.stopped = 0
        self.steps: list[Step] = []
        self.left_nbytes: list[int] = []
        self._gains = gains or {}
        self._random = random.Random(seed)
        self._noise = noise

    def begin(self, stage: str, points: int, left_nbytes: int) -> None:
        self.left_nbytes.append(left_nbytes)

    def __call__(self, step: Step) -> Turn:
        self.steps.append(step)
        drift = 1 + 0.2 * math.sin(self.seconds / 10)
        gain = self._gains.get(step.settings, 1.0)
        noise = self._random.lognormvariate(0, self._noise)
        rate = gain * drift * noise * FILE_NBYTES / FILE_SECONDS
        seconds, nbytes = step.nbytes / rate, step.nbytes
        if step.write_limit_seconds is not None and seconds > step.write_limit_seconds:
            seconds, self.stopped = step.write_limit_seconds, self.stopped + 1
            nbytes = int(seconds * rate)
        self.seconds += seconds
        measured = Measurement(nbytes, seconds, 0.01 * seconds, nbytes < step.nbytes)
        return Turn(step.settings, step.nbytes, measured, None)


def find(
    drive: SimulatedDrive,
    points: Sequence[Settings] = POINTS,
    *,
    full: bool = False,
    stored: Sequence[Settings] = (),
) -> Found:
    return search(points, DEFAULT, FILE_NBYTES, drive, full=full, stored=stored)


# What it claims


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("noise", [0.03, 0.1, 0.3, 0.6])
def test_settings_that_do_not_differ_are_almost_never_preferred(noise: float, full: bool) -> None:
    chosen = [find(SimulatedDrive(seed, noise=noise), full=full).chosen for seed in range(100)]
    assert sum(settings != DEFAULT for settings in chosen) <= 2


@pytest.mark.parametrize("noise", [0.1, 0.6])
def test_few_settings_that_do_not_differ_are_almost_never_preferred_either(noise: float) -> None:
    few = POINTS[:6]
    chosen = [find(SimulatedDrive(seed, noise=noise), few).chosen for seed in range(100)]
    assert sum(settings != DEFAULT for settings in chosen) <= 2


@pytest.mark.parametrize(("gain", "at_least"), [(1.3, 95), (1.1, 60)])
def test_settings_that_are_faster_are_found_in_a_fraction_of_the_time_of_a_sweep(
    gain: float, at_least: int
) -> None:
    count = 0
    for seed in range(100):
        best = random.Random(seed).choice(POINTS[1:])
        drive = SimulatedDrive(seed, noise=0.1, gains={best: gain})
        chosen = find(drive).chosen
        assert chosen in (best, DEFAULT), "a false one"
        count += chosen == best
        assert drive.seconds <= 0.3 * FULL_SWEEP_SECONDS
    assert count >= at_least


@pytest.mark.parametrize(("gain", "at_least"), [(1.0, 0), (1.1, 60), (1.3, 95)])
def test_fewer_settings_are_as_well_tuned_in_a_fraction_of_the_time_on_average(
    gain: float, at_least: int
) -> None:
    """As many as there are on two processors, where what comes after the first rounds is most of it."""
    few, shares, count = POINTS[:64], [], 0
    for seed in range(100):
        best = random.Random(seed).choice(few[1:])
        adaptive, full = (SimulatedDrive(seed, noise=0.1, gains={best: gain}) for _ in range(2))
        chosen = find(adaptive, few).chosen
        assert chosen in (best, DEFAULT), "a false one"
        count += chosen == best
        find(full, few, full=True)
        shares.append(adaptive.seconds / full.seconds)
    assert count >= at_least
    assert statistics.fmean(shares) <= 0.3


def test_a_gain_too_small_to_matter_is_left() -> None:
    best = POINTS[17]
    for seed in range(10):
        found = find(SimulatedDrive(seed, noise=0.001, gains={best: 1.015}))
        assert found.chosen == DEFAULT
        assert found.gain is None
        assert found.trials[-1].gain.high < GAIN_MIN


def test_a_gain_is_told_with_what_was_measured_anew() -> None:
    best = POINTS[17]
    found = find(SimulatedDrive(5, noise=0.05, gains={best: 4 / 3}))
    assert found.chosen == best
    (trial,) = found.trials
    assert trial.proven
    assert found.gain == trial.gain
    assert trial.gain.low > 1.2
    assert trial.gain.median == pytest.approx(4 / 3, rel=0.05)
    assert trial.gain.confidence >= 0.995
    assert found.turns_of(best) == [mine for mine, _ in trial.pairs]
    assert found.turns_of(DEFAULT) == [theirs for _, theirs in trial.pairs]


def test_what_was_stored_must_prove_itself_again() -> None:
    lost, still_better = POINTS[17], POINTS[18]
    few = [DEFAULT, *POINTS[30:34]]
    drive = SimulatedDrive(6, noise=0.1, gains={still_better: 1.3})
    assert find(drive, few, stored=[still_better]).chosen == still_better
    assert find(drive, few, stored=[lost]).chosen == DEFAULT


# How it goes about it


def test_nominee_and_default_alternate_in_their_order() -> None:
    drive = SimulatedDrive(3, noise=0.05, gains={POINTS[17]: 1.3})
    find(drive)
    pairs = [step for step in drive.steps if step.stage == "nominee and default"]
    orders = [
        (one.settings, other.settings) for one, other in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    assert orders[::2] == [(DEFAULT, POINTS[17])] * len(orders[::2])
    assert orders[1::2] == [(POINTS[17], DEFAULT)] * len(orders[1::2])
    assert {step.write_limit_seconds for step in pairs} == {None}


def test_rounds_are_interleaved_in_changing_order() -> None:
    drive = SimulatedDrive(3, noise=0.05)
    find(drive)
    finals = [step for step in drive.steps if step.stage == "final"]
    rounds = [[step.settings for step in finals if step.round == number] for number in range(3)]
    assert [step.round for step in finals] == sorted(step.round for step in finals)
    assert set(rounds[0]) == set(rounds[1])
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2]


def test_full_sweep_measures_every_point_in_full_three_times() -> None:
    drive = SimulatedDrive(1, noise=0.05)
    find(drive, full=True)
    swept = [step for step in drive.steps if step.stage == "full sweep"]
    assert len(swept) == 3 * len(POINTS)
    assert {step.nbytes for step in swept} == {FILE_NBYTES}
    assert drive.stopped == 0


def test_every_queue_fits_twice_into_what_it_is_measured_with() -> None:
    drive = SimulatedDrive(1, noise=0.05)
    search(POINTS, DEFAULT, 1 << 33, drive)
    for step in drive.steps:
        assert step.nbytes >= min(1 << 33, 2 * in_flight_nbytes(step.settings))
        assert step.nbytes % 4096 == 0


@pytest.mark.parametrize("seed", range(3))
def test_settings_whose_engine_cannot_be_had_in_the_middle_are_left_out(seed: int) -> None:
    best, lost = POINTS[17], set(POINTS[20:60])

    class Short(SimulatedDrive):
        def __call__(self, step: Step) -> Turn:
            if step.settings in lost and len(self.steps) > 250:
                raise EngineUnavailableError("no memory for a ring")
            return super().__call__(step)

    gains = {best: 1.5} | dict.fromkeys(lost, 2.0)
    with pytest.warns(RuntimeWarning, match="no memory for a ring"):
        found = find(Short(seed, noise=0.05, gains=gains))
    assert found.chosen == best
    assert lost.isdisjoint(found.finals)


def test_a_nominee_whose_engine_cannot_be_had_any_more_leaves_the_default() -> None:
    class Short(SimulatedDrive):
        def __call__(self, step: Step) -> Turn:
            if step.settings != DEFAULT and step.stage == "nominee and default":
                raise EngineUnavailableError("no memory for a ring")
            return super().__call__(step)

    with pytest.warns(RuntimeWarning, match="no memory for a ring"):
        found = find(Short(1, noise=0.05, gains=dict.fromkeys(POINTS[1:], 1.5)))
    assert found.chosen == DEFAULT
    assert found.turns_of(DEFAULT)
    assert found.interval(DEFAULT, "write") is not None


def test_hopeless_settings_are_stopped_in_the_middle() -> None:
    slow = dict.fromkeys(POINTS[100:], 0.3)
    drive = SimulatedDrive(2, noise=0.01, gains=slow)
    found = find(drive)
    stopped = {turn.settings for turn in found.turns if turn.write and turn.write.stopped}
    assert stopped == set(slow)


def test_of_settings_that_are_as_good_the_one_without_more_system_calls_is_nominated() -> None:
    single, plain = (Settings(8 << 20, 32, single, True, 1, "io_uring") for single in (True, False))
    gains = {single: 1.3, plain: 1.299}
    for seed in range(10):
        drive = SimulatedDrive(seed, noise=0.002, gains=gains)
        assert find(drive, [single, plain, DEFAULT]).chosen == plain


def test_the_time_left_is_about_right_from_the_beginning() -> None:
    drive = SimulatedDrive(8, noise=0.05)
    find(drive)
    moved = sum(step.nbytes for step in drive.steps)
    assert expected_nbytes(POINTS, FILE_NBYTES, full=False) == drive.left_nbytes[0]
    assert 0.8 * moved <= drive.left_nbytes[0] <= 1.3 * moved
    assert drive.left_nbytes == sorted(drive.left_nbytes, reverse=True)


def test_same_measurements_lead_to_the_same_steps() -> None:
    first, second = SimulatedDrive(7, noise=0.1), SimulatedDrive(7, noise=0.1)
    find(first)
    find(second)
    assert first.steps == second.steps
