"""Tuning real folders: what is measured, what is stored, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import profiles
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import storing
from tensorferry.tuning import tune as tuning
from tensorferry.tuning.drive import Drive
from tensorferry.tuning.tune import Job, Progress, tune
from tests.support import leaks, mounts

MIB = 1 << 20
GOOD = (
    Settings(MIB, 4, engine="threads", overlap_events=True),
    Settings(MIB, 8, engine="threads", overlap_events=True),
)
# So bad that any other is surely better on a real drive, too.
BAD = Settings(32 << 10, 1, engine="threads", overlap_events=True)


def job(*folders: Path, **options: Any) -> Job:
    given = {"candidates": GOOD, "nbytes": 16 * MIB, "seconds": 2.0}
    return Job(folders, **given | options)


def ignore(_: Progress) -> None:
    pass


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("config") / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
    return path


@pytest.fixture
def bad_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "default_settings", lambda: BAD)


@pytest.mark.usefixtures("bad_default")
def test_what_is_proven_is_stored_for_its_direction_and_used(directory: Path, store: Path) -> None:
    result = tune(job(directory, directions=("write",), seconds=300.0), ignore)
    (found,) = result.found
    assert found.decision.chosen in GOOD
    assert found.decision.low > 1
    assert result.stored_for == [f"{found.file_system.mount_point}: write host"]
    assert list(directory.iterdir()) == []
    (profile,) = profiles.load(store)
    assert (profile.use, profile.settings) == (("write", "host"), found.decision.chosen)
    assert profile.found["gain"]["low"] > 1
    assert profile.found["rates"]["low"] <= profile.found["rates"]["high"]
    with tensorferry.aio_handle() as handle:
        handle.sync_pwrite(np.arange(1000), directory / "file")
        (used,) = handle.stats()["profiles"].values()
        assert used == {"write host": dataclasses.asdict(found.decision.chosen)}


def test_what_is_not_proven_any_more_is_dropped_for_what_was_measured(
    directory: Path, store: Path
) -> None:
    system = profiles.file_system_of(directory)
    for use in (("read", "host"), ("write", "host"), ("read", "gpu0")):
        storing.store(store, system, {use: profiles.Profile(system, BAD, *use)})
    # Nothing else is tried: on a busy machine others may truly be better than the default.
    result = tune(job(directory, candidates=(BAD,), directions=("read",)), ignore)
    assert result.found[0].decision.chosen == result.default
    assert result.dropped_for == [f"{system.mount_point}: read host"]
    assert [p.use for p in profiles.load(store)] == [("write", "host"), ("read", "gpu0")]


@pytest.mark.usefixtures("bad_default")
def test_nothing_is_ever_stored_for_files_in_memory_nor_where_it_is_not_wanted(
    directory: Path, tmpfs_directory: Path, store: Path
) -> None:
    result = tune(job(tmpfs_directory), ignore)
    assert any("in memory" in warning for warning in result.warnings)
    assert result.stored_for == []
    tune(job(directory, directions=("read",)), ignore, save=False)
    assert not store.exists()


@pytest.mark.usefixtures("bad_default")
def test_each_folder_is_decided_on_by_itself_and_each_file_system_once(
    directory: Path, tmpfs_directory: Path, store: Path
) -> None:
    (directory / "below").mkdir()
    folders = (directory, tmpfs_directory, directory / "below")
    result = tune(job(*folders, directions=("read",), seconds=300.0), ignore)
    assert [each.folder for each in result.found] == [directory, tmpfs_directory]
    assert any("named before" in warning for warning in result.warnings)
    assert result.rates()["read"]["median"] == sum(e.rates["median"] for e in result.found)
    (profile,) = profiles.load(store)
    assert profile.file_system == result.found[0].file_system


def test_a_file_of_profiles_that_cannot_be_written_is_told_before_anything_is_measured(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuning, "Drive", None)
    for path in (tmp_path / "file" / "profiles.json", tmp_path):
        monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
        with pytest.raises(OSError, match=r"Not a directory|no regular file|File exists"):
            tune(job(directory), ignore)


def test_result_is_json_with_every_measurement_and_real_booleans(directory: Path) -> None:
    told: list[tuple[str, float, float]] = []

    def watch(progress: Progress) -> None:
        told.append((progress.what, progress.share, progress.seconds_left))

    result = tune(job(directory), watch, save=False)
    content = json.loads(json.dumps(result.as_json()))
    assert content["deepspeed"]["aio"]["single_submit"] is False
    assert content["deepspeed"]["aio"]["overlap_events"] is True
    assert content["rates"]["read"]["low"] <= content["rates"]["read"]["high"]
    count = sum(len(each["seconds"]) for each in content["measurements"])
    assert count >= 2 * 3 * 3
    assert [each["direction"] for each in content["found"]] == ["write", "read"]
    assert told[0][:2] == ("preparing", 0.0)
    assert {what.rpartition(": ")[2] for what, _, _ in told} == {"preparing", "write", "read"}
    assert all(0 <= share <= 1 and seconds >= 0 for _, share, seconds in told)


def test_file_size_follows_the_drive_and_is_bounded(directory: Path) -> None:
    sized = job(directory, nbytes=None)
    nbytes = tuning._suitable_nbytes(directory, None, sized, GOOD[0])
    assert 16 * MIB <= nbytes <= 1024 * MIB
    assert nbytes <= mounts.free_nbytes(directory) // 4


def test_reads_are_cold_and_writes_are_real(directory: Path) -> None:
    with Drive(directory, 16 * MIB) as drive:
        assert drive.direct
        assert list(directory.iterdir()) == []  # the file has no name
        assert drive.measure(GOOD[0], "write") > 0
        assert os.fstat(drive._descriptor).st_blocks * 512 >= 16 * MIB
        os.pread(drive._descriptor, MIB, 0)  # through the page cache, which then holds some of it
        assert drive.measure(GOOD[0], "read") > 0
        assert drive._schedulers[GOOD[0]].stats()["direct_nbytes"] == 32 * MIB
        assert drive.rates(GOOD[1], "read") is None


def test_measuring_leaves_no_threads_and_descriptors(directory: Path) -> None:
    def ours() -> set[Path]:
        return leaks.threads_named("tensorferry.*")

    with Drive(directory, 16 * MIB) as drive:
        drive.measure(GOOD[0], "write")  # what lasts is made once
    before, opened = leaks.steady(ours), Counter(leaks.descriptors())
    with Drive(directory, 16 * MIB) as drive:
        for depth in range(1, 20):  # more settings than are kept
            drive.measure(dataclasses.replace(GOOD[0], queue_depth=depth), "write")
        assert leaks.settled(lambda: ours() - before != set())
    assert leaks.settled(lambda: ours() <= before and Counter(leaks.descriptors()) <= opened)


@pytest.mark.root
def test_a_full_disk_is_an_error_that_leaves_the_space_free(tmp_path: Path) -> None:
    with mounts.ext4(tmp_path, 64 << 20) as small:
        free = mounts.free_nbytes(small)
        with pytest.raises(OSError, match=f"No space left on device: '{small}'"):
            tune(job(small, nbytes=128 * MIB), ignore, save=False)
        assert mounts.free_nbytes(small) == free


def test_an_interrupted_run_leaves_nothing(directory: Path, store: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.share > 0:
            raise KeyboardInterrupt

    opened = Counter(leaks.descriptors())
    with pytest.raises(KeyboardInterrupt):
        tune(job(directory), interrupt)
    assert list(directory.iterdir()) == []
    assert not store.exists()
    assert leaks.settled(lambda: Counter(leaks.descriptors()) <= opened)


def test_time_left_is_known_from_the_beginning() -> None:
    seen: list[Progress] = []
    progress = Progress(Job((Path("/a"), Path("/b")), seconds=10.0), seen.append)
    assert progress.seconds_left == pytest.approx(20)
    progress.part("first")(0.5)
    assert progress.share == pytest.approx(1 / 8)
    progress.part_ends()
    assert progress.share == pytest.approx(1 / 4)
    assert 0 < progress.seconds_left <= 20 + time.monotonic()
