"""Decisions of `tensorferry tune` on simulated drives: the settings that it finds or rejects, and its duration.

A simulated drive has a clock, noise on every measurement, and drift within the run. The other code is the real one.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tensorferry.transfer.settings import Settings
from tensorferry.tuning import tune as tuning
from tensorferry.tuning.candidates import candidates, candidates_of_json, common, default_settings
from tensorferry.tuning.deciding import decide

DEFAULT = Settings(overlap_events=True, engine="io_uring")
CANDIDATES = [DEFAULT._replace(queue_depth=depth) for depth in range(1, 13)]
MEASURED_SECONDS = 0.02


class SimulatedDrive:
    """A drive on which some settings are faster than the default, others for each direction."""

    memory = "host"
    direct = True
    nbytes = 64 << 20

    def __init__(self, seed: int, noise: float, **gains: dict[Settings, float]) -> None:
        self.seconds = 0.0
        self.samples: dict[Any, Any] = {}
        self.gains = gains
        self._noise = noise
        self._random = random.Random(seed)

    def measure(self, settings: Settings, direction: str) -> float:
        gain = self.gains.get(direction, {}).get(settings, 1.0)
        drift = 1 + 0.2 * math.sin(self.seconds / 5)
        noise = self._random.lognormvariate(0, self._noise)
        seconds = MEASURED_SECONDS / gain / drift * noise
        self.seconds += seconds
        return seconds

    def rates(self, settings: Settings, direction: str) -> dict[str, float]:
        return {"median": 1.0, "low": 1.0, "high": 1.0, "cpu_seconds_per_gb": 0.0}

    def measurements(self) -> list[dict[str, Any]]:
        return []

    def __enter__(self) -> SimulatedDrive:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def gains_of(generator: random.Random, kind: str) -> dict[str, dict[Settings, float]]:
    """Return how many times as fast as the default each setting is, by direction, on a kind of drive."""
    slow = [0.3, 0.5, 0.8, 0.95, 0.97, 1.0, 1.0]
    gains = {d: {c: generator.choice(slow) for c in CANDIDATES} for d in ("write", "read")}
    best = generator.choice(CANDIDATES)
    if kind == "a good setting":
        gains["read"][best] = gains["write"][best] = 1.3
    elif kind == "fast reads, slow writes":
        gains["read"][best], gains["write"][best] = 1.5, 0.5
    elif kind == "all alike":
        gains = {d: dict.fromkeys(CANDIDATES, 1.0) for d in ("write", "read")}
    return gains


def tuned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drives: list[SimulatedDrive]
) -> list[dict[str, Settings]]:
    """Tune two drives in one run, as folders of separate file systems, and return the chosen settings of each."""
    folders = dict(zip((tmp_path, Path("/proc")), drives, strict=True))
    monkeypatch.setattr(tuning, "default_settings", lambda: DEFAULT)
    monkeypatch.setattr(tuning, "Drive", lambda folder, *_, **__: folders[folder])
    job = tuning.Job(tuple(folders), candidates=tuple(CANDIDATES), nbytes=64 << 20)
    found = tuning.tune(job).found
    return [
        {
            each.direction: each.decision.chosen
            for each in found
            if each.folder == folder and each.decision.chosen != DEFAULT
        }
        for folder in folders
    ]


def test_of_200_drives_none_is_made_slower_and_what_is_1_3_times_as_fast_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = found = 0
    kinds = ("a good setting", "fast reads, slow writes", "all alike", "nothing better")
    for seed in range(0, 200, 2):  # two unlike drives in each run
        generator = random.Random(seed)
        drives = []
        for number in (0, 1):
            gains = gains_of(generator, kinds[(seed // 2 + 3 * number) % len(kinds)])
            drives.append(SimulatedDrive(seed + number, generator.uniform(0.03, 0.6), **gains))
        for drive, stored in zip(drives, tuned(monkeypatch, tmp_path, drives), strict=True):
            assert drive.seconds < 60
            for direction, gains_there in drive.gains.items():
                gain = gains_there[stored[direction]] if direction in stored else 1.0
                assert gain >= 0.98, (seed, direction, stored)
                if max(gains_there.values()) >= 1.3:
                    wanted += 1
                    found += gain >= 1.3
    assert wanted >= 100
    assert found >= 0.95 * wanted


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.3, 0.6])
def test_settings_that_do_not_differ_are_almost_never_preferred(noise: float) -> None:
    chosen = []
    for seed in range(100):
        drive = SimulatedDrive(seed, noise)
        measure = lambda each, drive=drive: drive.measure(each, "read")  # noqa: E731
        chosen.append(decide(CANDIDATES, DEFAULT, measure, 20.0).chosen)
    assert sum(settings != DEFAULT for settings in chosen) <= 2


def test_a_drive_too_slow_to_tell_its_noise_keeps_the_default_in_about_its_time() -> None:
    seconds, shares = [], []

    def measure(settings: Settings) -> float:
        seconds.append(1.0 if settings == DEFAULT else 0.5)
        return seconds[-1]

    decision = decide(CANDIDATES, DEFAULT, measure, 40.0, shares.append)
    assert decision.chosen == DEFAULT
    assert decision.nominee != DEFAULT
    assert 0 < decision.pairs < 16
    assert sum(seconds) < 50
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    seconds.clear()
    decision = decide(CANDIDATES, DEFAULT, measure, 20.0)
    assert decision.chosen == DEFAULT
    assert len(seconds) == 1, "there is no time for a sweep"


def test_about_a_dozen_settings_are_tried_each_of_which_differs_from_the_default() -> None:
    default = default_settings()
    found = candidates(default)
    assert 8 <= len(found) <= 14
    assert default not in found
    assert len(set(found)) == len(found)


def test_one_section_for_all_is_not_slower_for_any() -> None:
    fast, faster, mixed = CANDIDATES[:3]
    reads = {DEFAULT: 1.0, fast: 1.1, faster: 1.3, mixed: 2.0}
    writes = {DEFAULT: 1.0, fast: 1.1, faster: 1.2, mixed: 0.9}
    assert common(DEFAULT, [reads, writes], [fast, faster, mixed]) == faster
    assert common(DEFAULT, [reads, writes], [mixed, DEFAULT]) == DEFAULT


def test_a_sweep_of_ds_nvme_tune_names_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        '{"block_size": ["1M", 8388608], "queue_depth": [32], "io_parallel": [1, 2],'
        ' "single_submit": [true], "sequential_requests": [true, false], "io_engine": ["threads"]}'
    )
    found = candidates_of_json(path, DEFAULT)
    sizes = [(each.block_size >> 20, each.intra_op_parallelism) for each in found]
    assert sizes == [(1, 1), (1, 2), (8, 1), (8, 2)]
    assert {(each.queue_depth, each.single_submit, each.engine) for each in found} == {
        (32, True, "threads")
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "Expecting value"),
        ("[]", "not an object"),
        ('{"colour": [1]}', "colour: not a setting"),
        ('{"block_size": 1}', "block_size: 1 is not a list"),
        ('{"block_size": [1]}', "block_size: 1 is not a number from 512"),
        ('{"block_size": ["2G"]}', "block_size: '2G' is not a number from 512"),
        ('{"block_size": ["x"]}', "block_size: "),
        ('{"queue_depth": [true]}', "queue_depth: True is not a number"),
        ('{"single_submit": ["false"]}', "neither true nor false"),
        ('{"io_engine": ["steam"]}', "no engine of that name"),
        ('{"io_parallel": [%s], "queue_depth": [%s]}', "combinations are more than 256"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "sweep.json"
    numbers = ", ".join(map(str, range(1, 33)))
    path.write_text(text % (numbers, numbers) if "%s" in text else text)
    with pytest.raises(ValueError, match=words):
        candidates_of_json(path, DEFAULT)
