"""Tuning real folders: the measurements, and no files left."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.transfer.settings import Settings
from tensorferry.tuning import tune as tuning
from tensorferry.tuning.drive import Drive
from tensorferry.tuning.tune import Job, tune
from tests.support import leaks, mounts

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.fixture
def bad_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "default_settings", lambda: BAD)


def test_files_in_memory_are_told(tmpfs_directory: Path) -> None:
    result = tune(job(tmpfs_directory, directions=("read",)))
    assert any("in memory" in warning for warning in result.warnings)
    assert result.found[0].file_system == "tmpfs"


@pytest.mark.usefixtures("bad_default")
def test_each_folder_is_decided_on_by_itself_and_each_file_system_once(
    directory: Path, tmpfs_directory: Path
) -> None:
    (directory / "below").mkdir()
    folders = (directory, tmpfs_directory, directory / "below")
    shares: list[float] = []
    telling = lambda _, done, total: shares.append(done / total)  # noqa: E731
    result = tune(job(*folders, directions=("read",), seconds=300.0), telling)
    assert shares[-1] >= 0.5, "the third folder has no share"
    assert [each.folder for each in result.found] == [directory, tmpfs_directory]
    assert any("tuned already" in warning for warning in result.warnings)
    assert result.rates()["read"]["median"] == sum(e.rates["median"] for e in result.found)


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
        drive.measure(GOOD[0], "write")  # the first measurement makes lasting objects
    before, opened = leaks.steady(ours), Counter(leaks.descriptors())
    with Drive(directory, 16 * MIB) as drive:
        for depth in range(1, 20):  # more settings than are kept
            drive.measure(GOOD[0]._replace(queue_depth=depth), "write")
        assert leaks.settled(lambda: ours() - before != set())
    assert leaks.settled(lambda: ours() <= before and Counter(leaks.descriptors()) <= opened)
