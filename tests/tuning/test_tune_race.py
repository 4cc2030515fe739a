"""The search for the best settings, on simulated drives: what it finds, in what time, and how sure it is."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tensorferry.tuning.drive import Measurement
from tensorferry.tuning.race import Found, Step, Turn, interval, race, sweep
from tensorferry.tuning.settings import Settings
from tensorferry.tuning.space import Space

FILE_NBYTES = 512 << 20
SPACE = Space(
    engine=("io_uring", "libaio", "threads"),
    block_size=tuple(256 << (10 + power) for power in range(6)),
    queue_depth=(4, 16, 32, 128),
    intra_op_parallelism=(1, 2, 4),
)
DEFAULT = Settings(overlap_events=True, engine="io_uring")


class SimulatedDrive:
    """Runs steps on a made-up drive with noise, drift and a clock; reading is not looked at."""

    def __init__(self, seed: int, *, noise: float = 0.05, best: Settings | None = None) -> None:
        self.seconds = 0.0
        self.stopped = 0
        self.steps: list[Step] = []
        self._random = random.Random(seed)
        self._noise = noise
        self._peak_block = self._random.choice(SPACE.block_size)
        self._engine_share = {name: self._random.uniform(0.7, 1.0) for name in SPACE.engine}
        self._best = best

    def rate(self, settings: Settings) -> float:
        """Return the true bytes a second."""
        if self._best is not None:
            return 4e9 if settings == self._best else 3e9
        distance = math.log2(settings.block_size / self._peak_block)
        in_flight = settings.block_size * settings.queue_depth * settings.intra_op_parallelism
        filled = in_flight / (in_flight + (8 << 20))
        return 4e9 * self._engine_share[settings.engine or ""] * filled * 0.93 ** abs(distance)

    def begin(self, stage: str, points: int, rounds: int) -> None:
        pass

    def __call__(self, step: Step) -> Turn:
        self.steps.append(step)
        drift = 1 + 0.2 * math.sin(self.seconds / 10)
        rate = self.rate(step.settings) * drift * self._random.lognormvariate(0, self._noise)
        seconds, nbytes = step.nbytes / rate, step.nbytes
        if step.write_limit_seconds is not None and seconds > step.write_limit_seconds:
            seconds, self.stopped = step.write_limit_seconds, self.stopped + 1
            nbytes = int(seconds * rate)
        self.seconds += seconds
        measured = Measurement(nbytes, seconds, 0.01 * seconds, nbytes < step.nbytes)
        return Turn(step.settings, step.nbytes, measured, None)


def search(drive: SimulatedDrive) -> Found:
    return race(SPACE.points(FILE_NBYTES), DEFAULT, FILE_NBYTES, drive)


def test_race_reaches_the_best_point_in_a_quarter_of_the_time_of_a_sweep() -> None:
    points = SPACE.points(FILE_NBYTES)
    reached = []
    for seed in range(40):
        drive, slow = SimulatedDrive(seed), SimulatedDrive(seed)
        found = search(drive)
        sweep(points, DEFAULT, FILE_NBYTES, slow)
        reached.append(drive.rate(found.chosen) / max(drive.rate(each) for each in points))
        assert drive.seconds <= slow.seconds / 4, f"drive {seed}"
    assert statistics.fmean(reached) > 0.99
    assert sum(share >= 0.97 for share in reached) >= 38, reached  # 5 % of noise is not nothing


def test_full_sweep_measures_every_point_in_full_three_times() -> None:
    drive = SimulatedDrive(1)
    points = SPACE.points(FILE_NBYTES)
    found = sweep(points, DEFAULT, FILE_NBYTES, drive)
    assert len(drive.steps) == 3 * len(points)
    assert {step.nbytes for step in drive.steps} == {FILE_NBYTES}
    assert drive.stopped == 0
    assert set(found.rounds) == set(points)


def test_hopeless_settings_are_stopped_in_the_middle() -> None:
    drive = SimulatedDrive(2, noise=0.01)
    found = search(drive)
    assert drive.stopped > 0
    stopped = {turn.settings for turn in found.turns if turn.write and turn.write.stopped}
    assert found.chosen not in stopped


def test_finalists_are_interleaved_in_rounds_of_changing_order() -> None:
    drive = SimulatedDrive(3)
    search(drive)
    finals = [step for step in drive.steps if step.stage == "final"]
    rounds = [[s.settings for s in finals if s.round == number] for number in range(3)]
    assert [step.round for step in finals] == sorted(step.round for step in finals)
    assert set(rounds[0]) == set(rounds[1])
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2]


def test_default_settings_are_chosen_where_nothing_is_faster_beyond_noise() -> None:
    found = search(SimulatedDrive(4, noise=0.05, best=DEFAULT))
    assert found.chosen == DEFAULT
    assert found.gain().median == 1.0


def test_a_point_that_is_clearly_best_is_found_and_nothing_is_within_noise() -> None:
    best = Settings(4 << 20, 16, False, True, 2, "libaio")
    found = search(SimulatedDrive(5, noise=0.01, best=best))
    assert found.chosen == found.fastest == best
    assert found.within_noise == []
    gain = found.gain()
    assert gain.low > 1.25
    assert gain.median == pytest.approx(4 / 3, rel=0.05)
    assert gain.confidence > 0.95


def test_settings_equal_but_for_noise_are_said_to_be_within_it() -> None:
    nobody = Settings(engine="nobody")
    found = search(SimulatedDrive(6, noise=0.05, best=nobody))
    assert len(found.within_noise) >= 1


def test_same_measurements_lead_to_the_same_steps() -> None:
    first, second = SimulatedDrive(7), SimulatedDrive(7)
    search(first)
    search(second)
    assert first.steps == second.steps


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(1, 0, 0, 0.0), (3, 0, 2, 0.75), (7, 0, 6, 0.984), (9, 1, 7, 0.961), (20, 5, 14, 0.959)],
)
def test_interval_is_of_order_statistics(
    count: int, low: int, high: int, confidence: float
) -> None:
    found = interval([float(value) for value in range(count)])
    assert (found.low, found.high) == (low, high)
    assert found.confidence == pytest.approx(confidence, abs=0.001)


def test_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(8)
    held = 0
    for _ in range(2000):
        found = interval([generator.lognormvariate(0, 1) for _ in range(9)])
        held += found.low <= 1.0 <= found.high
    assert held / 2000 == pytest.approx(0.961, abs=0.02)
