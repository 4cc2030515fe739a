"""Tuning real folders: what is measured, what is stored, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import profiles
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import heatmap, space, storing
from tensorferry.tuning import tune as tuning
from tensorferry.tuning.drive import Drives
from tensorferry.tuning.intervals import interval
from tensorferry.tuning.space import Space
from tensorferry.tuning.tune import Job, Progress, tune
from tests.support import leaks, mounts, required
from tests.support.expect import assert_equal

if TYPE_CHECKING:
    from tensorferry.tuning.race import Turn
    from tests.support.data import RandomBytes

MIB = 1 << 20
SPACE = Space(("threads",), (256 << 10, 1 << 20), (2, 4), (1, 2))
SETTINGS = Settings(256 << 10, 4, engine="threads", overlap_events=True)


BAD_DEFAULT = Settings(16 << 10, 1, engine="threads", overlap_events=True)


class Notes:
    """What a watcher was told; may end the run by an exception."""

    def __init__(self, end_after: int | None = None) -> None:
        self.stages: list[str] = []
        self.turns: list[Turn] = []
        self.progress: list[Progress] = []
        self.shares: list[list[float]] = []  # by stage
        self._end_after = end_after

    def stage(self, name: str, points: int, progress: Progress) -> None:
        self.stages.append(name)
        self.progress.append(progress)
        self.shares.append([progress.share])

    def turn(self, turn: Turn, progress: Progress) -> None:
        self.turns.append(turn)
        self.progress.append(progress)
        self.shares[-1].append(progress.share)
        if len(self.turns) == self._end_after:
            raise KeyboardInterrupt


def job(*folders: pathlib.Path, **options: object) -> Job:
    return Job(folders, **({"space": SPACE, "nbytes": 16 * MIB} | options))  # type: ignore[arg-type]


@pytest.fixture
def store(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    path = tmp_path_factory.mktemp("config") / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
    return path


@pytest.fixture
def bad_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with settings so bad that any other is surely better on a real drive, too."""
    monkeypatch.setattr(tuning, "default_settings", lambda: BAD_DEFAULT)


# What is stored


@pytest.mark.usefixtures("bad_default")
def test_what_is_proven_to_be_better_is_stored_and_used(
    directory: pathlib.Path, store: pathlib.Path
) -> None:
    result = tune(job(directory), Notes())
    assert result.found.gain is not None
    assert result.found.gain.low > 1.02
    assert result.stored_for == [result.file_systems[0].mount_point]
    assert list(directory.iterdir()) == []
    with tensorferry.aio_handle() as handle:
        handle.sync_pwrite(np.arange(1000), directory / "file")
        (used,) = handle.stats()["profiles"].values()
        assert used == dataclasses.asdict(result.found.chosen)
    (profile,) = profiles.load(store)
    assert profile.found["rates"]["read"]["low"] <= profile.found["rates"]["read"]["high"]
    assert profile.found["gain"]["low"] > 1.02


def test_what_is_not_proven_is_not_stored_and_an_older_profile_is_dropped(
    directory: pathlib.Path, store: pathlib.Path
) -> None:
    system = profiles.file_system_of(directory)
    storing.save(store, profiles.Profile(system, BAD_DEFAULT))
    # Nothing else is in the race: on a busy machine others may truly be better than the default.
    none_better = Space(("threads",), (BAD_DEFAULT.block_size,), (BAD_DEFAULT.queue_depth,), (1,))
    result = tune(job(directory, space=none_better), Notes())
    assert [trial.nominee for trial in result.found.trials] == [BAD_DEFAULT]
    assert result.found.chosen == result.found.default
    assert result.dropped_for == [system.mount_point]
    assert not store.exists()


@pytest.mark.usefixtures("bad_default")
def test_nothing_is_ever_stored_for_files_in_memory(
    tmpfs_directory: pathlib.Path, store: pathlib.Path
) -> None:
    storing.save(store, profiles.Profile(profiles.file_system_of(tmpfs_directory), SETTINGS))
    result = tune(job(tmpfs_directory), Notes())
    assert result.found.chosen != BAD_DEFAULT
    assert any("in memory" in warning for warning in result.warnings)
    assert result.stored_for == []
    assert not store.exists()


@pytest.mark.usefixtures("bad_default")
def test_several_folders_are_measured_together_and_each_keeps_its_own_rate(
    directory: pathlib.Path, tmpfs_directory: pathlib.Path, store: pathlib.Path
) -> None:
    notes = Notes()
    result = tune(job(directory, tmpfs_directory), notes)
    first = notes.turns[0].read
    assert first is not None
    assert first.nbytes == 2 * notes.turns[0].nbytes
    assert len(first.drive_rates) == 2
    assert max(first.drive_seconds) <= first.seconds
    (profile,) = profiles.load(store)
    assert profile.file_system == result.file_systems[0]
    for action in ("write", "read"):
        each = [getattr(turn, action) for turn in result.found.turns_of(result.found.chosen)]
        own = interval([measured.drive_rates[0] for measured in each]).median
        assert profile.found["rates"][action]["median"] == own
        together = interval([measured.rate for measured in each]).median
        assert result.rates()[action]["median"] == together != own


def test_a_file_of_profiles_that_cannot_be_written_is_told_before_anything_is_measured(
    directory: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "profiles.json", tmp_path):
        monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
        notes = Notes()
        with pytest.raises(OSError, match=r"Not a directory|no regular file|File exists"):
            tune(job(directory), notes)
        assert notes.stages == []
    tune(job(directory), Notes(), save=False)


def test_profiles_are_compared_with_what_users_have_without_one(
    directory: pathlib.Path, store: pathlib.Path
) -> None:
    result = tune(job(directory), Notes(), save=False)
    assert result.found.default == space.default_settings()  # also where its engine is not swept
    assert not store.exists()


# What is told


def test_result_is_json_with_every_measurement_and_real_booleans(directory: pathlib.Path) -> None:
    notes = Notes()
    result = tune(job(directory), notes, save=False)
    content = json.loads(json.dumps(result.as_json()))
    assert content["deepspeed"]["aio"]["single_submit"] is False
    assert content["deepspeed"]["aio"]["overlap_events"] is True
    assert len(content["turns"]) == len(notes.turns)
    assert content["rates"]["read"]["low"] <= content["rates"]["read"]["high"]
    assert content["direct"] is True
    assert result.stored_for == []


def test_time_left_is_told_from_the_beginning_to_the_end(directory: pathlib.Path) -> None:
    notes = Notes()
    tune(job(directory), notes, save=False)
    assert notes.stages[0] == "preparing"
    assert notes.progress[0].seconds_left > 0
    assert notes.progress[0].share == 0
    assert all(0 <= each.share <= 1 for each in notes.progress)
    assert all(0 <= each.seconds_left < math.inf for each in notes.progress)
    assert all(shares == sorted(shares) for shares in notes.shares)
    assert notes.progress[-1].share > notes.shares[1][1] > 0


@pytest.mark.parametrize("left_out", ["read", "write"])
def test_only_what_was_asked_for_is_measured(directory: pathlib.Path, left_out: str) -> None:
    notes = Notes()
    result = tune(job(directory, **{left_out: False}), notes, save=False)
    assert {getattr(turn, left_out) for turn in notes.turns} == {None}
    assert left_out not in result.rates()
    assert len(result.rates()) == 1


def test_file_size_follows_the_drive_and_is_bounded(directory: pathlib.Path) -> None:
    single = Space(("threads",), (1 << 20,), (4,), (1,))
    result = tune(job(directory, space=single, nbytes=None), Notes(), save=False)
    assert 16 * MIB <= result.nbytes <= 4096 * MIB
    assert result.nbytes <= mounts.free_nbytes(directory) // 4


# Measurements


def test_reads_are_cold_and_writes_are_real(directory: pathlib.Path) -> None:
    with Drives([directory], 16 * MIB) as drives:
        assert drives.direct
        assert list(directory.iterdir()) == []  # the file has no name
        written = drives.measure(SETTINGS, True, 16 * MIB)
        descriptor, _ = drives._files[0]
        assert os.fstat(descriptor).st_blocks * 512 >= 16 * MIB
        os.pread(descriptor, MIB, 0)  # through the page cache, which then holds some of it
        read = drives.measure(SETTINGS, False, 16 * MIB)
        assert (written.nbytes, read.nbytes) == (16 * MIB, 16 * MIB)
        assert drives._schedulers[SETTINGS][0].stats()["direct_nbytes"] == 32 * MIB


def test_a_measurement_that_takes_too_long_is_stopped(directory: pathlib.Path) -> None:
    with Drives([directory], 256 * MIB) as drives:
        drives.measure(SETTINGS, True, 256 * MIB)
        slow = Settings(16 << 10, 1, engine="threads")
        seconds = 0.02
        while not (stopped := drives.measure(slow, False, 256 * MIB, seconds)).nbytes:
            seconds *= 2  # its threads had not begun
        assert stopped.stopped
        assert stopped.nbytes < 256 * MIB
        assert stopped.rate > 0
        whole = drives.measure(SETTINGS, False, 256 * MIB, 300.0)
        assert not whole.stopped


def test_measuring_leaves_no_threads_and_descriptors(directory: pathlib.Path) -> None:
    with Drives([directory, directory], 16 * MIB) as drives:
        drives.measure(SETTINGS, True, 16 * MIB)  # the thread that calls callbacks stays

    def ours() -> set[pathlib.Path]:
        return leaks.threads_named("tensorferry.*")

    before, opened = leaks.steady(ours), Counter(leaks.descriptors())
    with Drives([directory, directory], 16 * MIB) as drives:
        drives.measure(SETTINGS, True, 16 * MIB)
        assert leaks.settled(lambda: ours() - before != set())
    assert leaks.settled(lambda: ours() <= before and Counter(leaks.descriptors()) <= opened)


# Failures


@pytest.mark.root
def test_a_full_disk_is_an_error_that_leaves_the_space_free(tmp_path: pathlib.Path) -> None:
    with mounts.ext4(tmp_path, 64 << 20) as small:
        free = mounts.free_nbytes(small)
        with pytest.raises(OSError, match="No space left"):
            tune(job(small, nbytes=256 * MIB), Notes(), save=False)
        assert mounts.free_nbytes(small) == free


@pytest.mark.root
def test_a_small_drive_is_tuned_with_a_small_file(tmp_path: pathlib.Path) -> None:
    with mounts.ext4(tmp_path, 160 << 20) as small:
        result = tune(job(small, nbytes=None), Notes(), save=False)
        assert result.nbytes <= 32 * MIB
        assert any("rough" in warning for warning in result.warnings)


def test_an_interrupted_run_leaves_nothing(directory: pathlib.Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(job(directory), Notes(end_after=10), save=False)
    assert list(directory.iterdir()) == []


def test_a_killed_run_leaves_no_file(directory: pathlib.Path) -> None:
    code = f"""
import pathlib
from tests.tuning.test_tune import Notes, job
from tensorferry.tuning.tune import tune
class Loud(Notes):
    def turn(self, turn, progress):
        print("turn", flush=True)
tune(job(pathlib.Path({str(directory)!r})), Loud(), save=False)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"turn\n"
        process.send_signal(signal.SIGKILL)
    assert list(directory.iterdir()) == []


# Heat maps


def test_heat_maps_have_what_was_measured(directory: pathlib.Path) -> None:
    result = tune(job(directory), Notes(), save=False)
    found = heatmap.grids(result.found.turns)
    assert {(grid.engine, grid.action) for grid in found if grid.engine == "threads"} == {
        ("threads", "write"),
        ("threads", "read"),
    }
    grid = next(grid for grid in found if grid.engine == "threads")
    assert grid.block_sizes == [256 << 10, 1 << 20]
    assert grid.queue_depths == [2, 4]
    assert all(value > 0 for value in heatmap.known(grid))


def test_heat_maps_are_drawn(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    required.module("matplotlib")
    result = tune(job(directory), Notes(), save=False)
    picture = tmp_path / "map.png"
    heatmap.draw(heatmap.grids(result.found.turns), picture, "a drive")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tuning_in_a_thread_measures_its_own_transfers_and_disturbs_no_others(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    folder, path = directory / "tuned", directory / "others"
    folder.mkdir()
    data = random_bytes(3_000_017)
    with ThreadPoolExecutor(1) as pool:
        tuning = pool.submit(tune, job(folder), Notes(), save=False)
        while not tuning.done():
            tensorferry.write(path, data)
            assert_equal(tensorferry.read(path, np.zeros_like(data)), data)
        found = tuning.result().found
    for turn in found.turns:
        for measured in (turn.write, turn.read):
            assert measured.stopped or measured.nbytes == turn.nbytes
    assert list(folder.iterdir()) == []
