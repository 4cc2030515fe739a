"""Tuning real folders: what is measured, that nothing stays behind, and that a run that was killed goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tensorferry.tuning import heatmap
from tensorferry.tuning.drive import Drives
from tensorferry.tuning.journal import Journal
from tensorferry.tuning.settings import Settings
from tensorferry.tuning.space import Space
from tensorferry.tuning.tune import Job, tune
from tests.support import leaks, mounts
from tests.support.expect import assert_equal

if TYPE_CHECKING:
    from tensorferry.tuning.race import Step, Turn
    from tests.support.data import RandomBytes

MIB = 1 << 20
SPACE = Space(("threads",), (256 << 10, 1 << 20), (2, 4), (1, 2))
SETTINGS = Settings(256 << 10, 4, engine="threads", overlap_events=True)


class Notes:
    """What a watcher was told; may end the run by an exception."""

    def __init__(self, end_after: int | None = None) -> None:
        self.stages: list[str] = []
        self.turns: list[Turn] = []
        self._end_after = end_after

    def stage(self, name: str, points: int, rounds: int) -> None:
        self.stages.append(name)

    def turn(self, step: Step, turn: Turn) -> None:
        self.turns.append(turn)
        if len(self.turns) == self._end_after:
            raise KeyboardInterrupt


def job(*folders: pathlib.Path, **options: object) -> Job:
    return Job(folders, **({"space": SPACE, "nbytes": 16 * MIB} | options))  # type: ignore[arg-type]


@pytest.fixture
def journal(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "journal.jsonl"


def test_tuning_stores_a_profile_that_handles_use(
    directory: pathlib.Path,
    journal: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path_factory.mktemp("config") / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(store))
    result = tune(job(directory), Notes(), journal_path=journal)
    assert result.saved == store
    assert result.found.chosen.engine == "threads"
    assert not journal.exists()
    assert list(directory.iterdir()) == []
    with tensorferry.aio_handle() as handle:
        handle.sync_pwrite(np.arange(1000), directory / "file")
        (used,) = handle.stats()["profiles"].values()
        assert used == dataclasses.asdict(result.found.chosen)


def test_result_is_json_with_every_measurement_and_real_booleans(
    directory: pathlib.Path, journal: pathlib.Path
) -> None:
    notes = Notes()
    result = tune(job(directory), notes, journal_path=journal, save=False)
    content = json.loads(json.dumps(result.as_json()))
    assert content["deepspeed"]["aio"]["single_submit"] is False
    assert content["deepspeed"]["aio"]["overlap_events"] is True
    assert len(content["turns"]) == len(notes.turns)
    assert content["rates"]["read"]["low"] <= content["rates"]["read"]["high"]
    assert content["direct"] is True
    assert notes.stages[-1] == "final"
    assert result.saved is None


@pytest.mark.parametrize("left_out", ["read", "write"])
def test_only_what_was_asked_for_is_measured(
    directory: pathlib.Path, journal: pathlib.Path, left_out: str
) -> None:
    notes = Notes()
    result = tune(job(directory, **{left_out: False}), notes, journal_path=journal, save=False)
    assert {getattr(turn, left_out) for turn in notes.turns} == {None}
    assert left_out not in result.rates()
    assert len(result.rates()) == 1


def test_several_folders_are_measured_together_and_all_get_the_profile(
    directory: pathlib.Path,
    tmpfs_directory: pathlib.Path,
    journal: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path_factory.mktemp("config") / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(store))
    notes = Notes()
    result = tune(job(directory, tmpfs_directory), notes, journal_path=journal)
    first = notes.turns[0]
    assert first.read is not None
    assert first.read.nbytes == 2 * first.nbytes
    assert len(json.loads(store.read_text())["profiles"]) == 2
    assert any("in memory" in warning for warning in result.warnings)


def test_file_size_follows_the_drive_and_is_bounded(
    directory: pathlib.Path, journal: pathlib.Path
) -> None:
    single = Space(("threads",), (1 << 20,), (4,), (1,))
    result = tune(
        job(directory, space=single, nbytes=None), Notes(), journal_path=journal, save=False
    )
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
        assert drives._schedulers[0].stats()["direct_nbytes"] == 32 * MIB


def test_a_measurement_that_takes_too_long_is_stopped(directory: pathlib.Path) -> None:
    with Drives([directory], 256 * MIB) as drives:
        drives.measure(SETTINGS, True, 256 * MIB)
        slow = Settings(16 << 10, 1, engine="threads")
        stopped = drives.measure(slow, False, 256 * MIB, 0.02)
        assert stopped.stopped
        assert stopped.nbytes < 256 * MIB
        assert stopped.rate > 0
        whole = drives.measure(SETTINGS, False, 256 * MIB, 60.0)
        assert not whole.stopped


def test_measuring_leaves_no_threads_and_descriptors(directory: pathlib.Path) -> None:
    with Drives([directory], 16 * MIB):
        pass

    def ours() -> int:
        return sum(name.startswith("tensorferry") for name in leaks.thread_names())

    before = leaks.steady(ours), leaks.descriptors()
    with Drives([directory, directory], 16 * MIB) as drives:
        drives.measure(SETTINGS, True, 16 * MIB)
        assert leaks.settled(lambda: ours() > before[0])
    assert leaks.settled(lambda: (ours(), leaks.descriptors()) == before)


# Failures


@pytest.mark.root
def test_a_full_disk_is_an_error_that_leaves_the_space_free(
    tmp_path: pathlib.Path, journal: pathlib.Path
) -> None:
    with mounts.ext4(tmp_path, 64 << 20) as small:
        free = mounts.free_nbytes(small)
        with pytest.raises(OSError, match="No space left"):
            tune(job(small, nbytes=256 * MIB), Notes(), journal_path=journal, save=False)
        assert mounts.free_nbytes(small) == free


@pytest.mark.root
def test_a_small_drive_is_tuned_with_a_small_file(
    tmp_path: pathlib.Path, journal: pathlib.Path
) -> None:
    with mounts.ext4(tmp_path, 160 << 20) as small:
        result = tune(job(small, nbytes=None), Notes(), journal_path=journal, save=False)
        assert result.nbytes <= 32 * MIB
        assert any("rough" in warning for warning in result.warnings)


def test_an_interrupted_run_leaves_only_its_journal_and_goes_on(
    directory: pathlib.Path, journal: pathlib.Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(job(directory), Notes(end_after=10), journal_path=journal, save=False)
    assert list(directory.iterdir()) == ([journal] if journal.parent == directory else [])
    notes = Notes()
    result = tune(job(directory), notes, journal_path=journal, save=False)
    assert result.resumed == 20  # writing and reading, ten times
    assert not journal.exists()


def test_a_killed_run_leaves_no_file_and_goes_on(
    directory: pathlib.Path, journal: pathlib.Path
) -> None:
    code = f"""
import pathlib, time
from tests.tuning.test_tune import Notes, job
from tensorferry.tuning.tune import tune
class Slow(Notes):
    def turn(self, step, turn):
        print("turn", flush=True)
        time.sleep(0.05)
tune(job(pathlib.Path({str(directory)!r})), Slow(), journal_path=pathlib.Path({str(journal)!r}), save=False)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        for _ in range(6):
            assert process.stdout.readline() == b"turn\n"
        process.send_signal(signal.SIGKILL)
    assert [path for path in directory.iterdir() if path != journal] == []
    with journal.open("ab") as file:
        file.write(b'{"key": "final/0/thr')  # as if it had been cut off in the middle of a line
    result = tune(job(directory), Notes(), journal_path=journal, save=False)
    assert result.resumed >= 12


# The journal


def test_a_journal_of_another_job_or_a_finished_one_is_begun_anew(journal: pathlib.Path) -> None:
    def fact_after(contents: dict[str, int], **options: bool) -> object:
        with Journal(journal, contents, **options) as opened:
            return opened.facts.get("nbytes")

    with Journal(journal, {"job": 1}) as opened:
        opened.keep_fact("nbytes", 42)
    assert fact_after({"job": 1}) == 42
    assert fact_after({"job": 1}, resume=False) is None
    with Journal(journal, {"job": 1}) as opened:
        opened.keep_fact("nbytes", 42)
    assert fact_after({"job": 2}) is None
    with Journal(journal, {"job": 2}) as opened:
        opened.keep_fact("nbytes", 42)
        opened.finish(keep=True)
    assert fact_after({"job": 2}) is None


@pytest.mark.parametrize("text", ["", "x", "{}\n", "[]\n", "\0\n", '{"tensorferry_tune": 1}\n'])
def test_a_spoilt_journal_is_begun_anew(journal: pathlib.Path, text: str) -> None:
    journal.write_text(text)
    with Journal(journal, {"job": 1}) as opened:
        assert opened.replayed == 0
        opened.keep_fact("nbytes", 1)
    assert len(journal.read_text().splitlines()) == 2


def test_an_old_journal_is_begun_anew(
    journal: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(journal, {}) as opened:
        opened.keep_fact("nbytes", 42)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 24 * 3600)
    with Journal(journal, {}) as opened:
        assert opened.facts == {}


def test_two_runs_of_the_same_job_do_not_disturb_each_other(journal: pathlib.Path) -> None:
    with Journal(journal, {}), pytest.raises(BlockingIOError, match="another process"):
        Journal(journal, {})


# Heat maps


def test_heat_maps_have_what_was_measured(directory: pathlib.Path, journal: pathlib.Path) -> None:
    result = tune(job(directory), Notes(), journal_path=journal, save=False)
    found = heatmap.grids(result.found.turns)
    assert {(grid.engine, grid.action) for grid in found if grid.engine == "threads"} == {
        ("threads", "write"),
        ("threads", "read"),
    }
    grid = next(grid for grid in found if grid.engine == "threads")
    assert grid.block_sizes[:2] == [256 << 10, 1 << 20]
    assert grid.queue_depths[:2] == [2, 4]
    assert all(value > 0 for value in heatmap.known(grid))


def test_heat_maps_are_drawn(
    directory: pathlib.Path, journal: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    result = tune(job(directory), Notes(), journal_path=journal, save=False)
    picture = tmp_path / "map.png"
    heatmap.draw(heatmap.grids(result.found.turns), picture, "a drive")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tuning_in_a_thread_measures_its_own_transfers_and_disturbs_no_others(
    directory: pathlib.Path, journal: pathlib.Path, random_bytes: RandomBytes
) -> None:
    folder, path = directory / "tuned", directory / "others"
    folder.mkdir()
    data = random_bytes(3_000_017)
    with ThreadPoolExecutor(1) as pool:
        tuning = pool.submit(tune, job(folder), Notes(), journal_path=journal, save=False)
        while not tuning.done():
            tensorferry.write(path, data)
            assert_equal(tensorferry.read(path, np.zeros_like(data)), data)
        found = tuning.result().found
    for turn in found.turns:
        for measured in (turn.write, turn.read):
            assert measured.stopped or measured.nbytes == turn.nbytes
    assert found.chosen.engine == "threads"
    assert list(folder.iterdir()) == []
