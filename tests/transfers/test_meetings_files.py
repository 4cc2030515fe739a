"""Races between writes of one file: truncations, syncs, and concurrent failures."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_equal, contents
from tests.support.faultfs import Fault, FaultFS
from tests.transfers import meetings

if TYPE_CHECKING:
    from tests.support.data import RandomBytes
    from tests.transfers.conftest import Run


# truncate=True


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("nbytes", [1_003, 70_001, 3_000_001])
@pytest.mark.parametrize("old_nbytes", [0, 20 << 20])
def test_pieces_of_one_file_with_truncate_are_all_there_and_the_file_ends_behind_them(
    directory: pathlib.Path, random_bytes: RandomBytes, nbytes: int, old_nbytes: int
) -> None:
    wanted = random_bytes(3 * nbytes)
    pieces = [(wanted[at : at + nbytes], at) for at in range(0, wanted.size, nbytes)]
    for number, order in enumerate(itertools.permutations(pieces)):
        path = directory / f"file{number}"
        random_bytes(old_nbytes).tofile(path)
        tensorferry.write_many([(path, piece, at) for piece, at in order], truncate=True)
        assert_equal(contents(path), wanted)
        path.unlink()


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("others", [0, 300])
def test_a_file_that_goes_by_several_names_is_cut_behind_its_last_piece_and_later_ones_win(
    directory: pathlib.Path, random_bytes: RandomBytes, others: int
) -> None:
    path, linked = directory / "file", directory / "linked"
    linked.symlink_to(path)
    wanted, lost = random_bytes(2 << 20), random_bytes(70_001)
    half = wanted.size // 2
    small = [(directory / f"other{index}", lost[:10]) for index in range(others)]
    tensorferry.write_many(
        [
            (str(path), lost, 5),
            (linked, wanted[half:], half),
            *small,
            (directory / "." / "file", lost, half + 7),
            (path, wanted[:half], 0),
            (str(linked), wanted[half:], half),
        ],
        truncate=True,
    )
    assert_equal(contents(path), wanted)


@pytest.mark.usefixtures("default_engine")
def test_pieces_of_several_files_with_truncate_keep_what_lies_between_them(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    old = random_bytes(1 << 20)
    pieces = [random_bytes(100_003) for _ in range(3)]
    paths = [directory / name for name in ("first", "second")]
    for path in paths:
        old.tofile(path)
    items = [
        (path, piece, at)
        for at, piece in zip((700_001, 4_099, 300_007), pieces, strict=True)
        for path in paths
    ]
    tensorferry.write_many(items, truncate=True)
    wanted = old[: 700_001 + 100_003].copy()
    for _, piece, at in items:
        wanted[at : at + piece.size] = piece
    for path in paths:
        assert_equal(contents(path), wanted)


@pytest.mark.parametrize("method", ["write", "write_many"])
def test_a_truncation_cuts_off_nothing_that_was_written_after_it_began(
    run: Run, directory: pathlib.Path, method: str
) -> None:
    run(meetings.truncate_beside_a_later_write, directory=directory, method=method)


# sync=True


@pytest.mark.parametrize("how", ["mode", "open"])
def test_sync_is_not_weaker_where_the_directory_may_not_be_read(run: Run, how: str) -> None:
    if how == "mode" and os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    # A directory directly in /tmp, which other users can traverse.
    with tempfile.TemporaryDirectory(prefix="tensorferry-test-") as name:
        pathlib.Path(name).chmod(0o711)
        inner = pathlib.Path(name) / "unreadable"
        inner.mkdir()
        if how == "mode":
            os.chown(inner, 65534, 65534)
            inner.chmod(0o300)
        found = run(meetings.sync_in_unreadable_directory, directory=inner, how=how)
    if "skip" in found:
        pytest.skip(found["skip"])
    stronger = found["syncs"].get("syncfs", 0) + found["syncs"].get("fsync", 0)
    assert stronger or found["error"], found
    if found["error"]:
        assert found["error"][0] == errno.EACCES


def test_many_pieces_of_one_file_are_synced_once(run: Run, faultfs: FaultFS) -> None:
    # In a separate process: one that has made more than 4,096 names considers all of them new.
    faultfs.clear()
    run(meetings.write_pieces_twice, directory=faultfs.path, pieces=2_000)
    synced = [request.op for request in faultfs.requests("fsync", "fsyncdir")]
    assert 2 <= synced.count("fsync") <= 6
    assert synced.count("fsyncdir") == 1  # the second time the name is there already


@pytest.mark.usefixtures("default_engine")
def test_two_files_in_one_new_directory_sync_it_once(faultfs: FaultFS) -> None:
    folder = faultfs.path / "folder"
    folder.mkdir()
    data = np.ones(200_003, np.uint8)
    faultfs.clear()
    tensorferry.write_many([(folder / "first", data), (folder / "second", data)], sync=True)
    synced = [(request.op, request.name) for request in faultfs.requests("fsync", "fsyncdir")]
    assert synced.count(("fsyncdir", "folder")) == 1
    assert {name for op, name in synced if op == "fsync"} == {"first", "second"}


@pytest.mark.parametrize("engine", ["libaio", "threads"], indirect=True)  # syncs go through libc
def test_2000_pieces_of_one_file_make_at_most_4_syncs(run: Run, directory: pathlib.Path) -> None:
    counts = run(meetings.count_syncs, directory=directory, pieces=2_000)
    assert 2 <= sum(counts["new file"].values()) <= 4
    assert counts["new file"].get("fsync", 0) == 1  # the directory
    assert counts["old file"].get("fsync", 0) == 0
    assert sum(counts["old file"].values()) <= 3
    assert counts["two new files"].get("fsync", 0) == 1


# Several failures


def _short(directory: pathlib.Path, name: str) -> pathlib.Path:
    path = directory / name
    path.write_bytes(bytes(100))
    return path


@pytest.mark.usefixtures("default_engine")
def test_reads_that_fail_are_all_in_the_error_in_their_order(faultfs: FaultFS) -> None:
    good, bad = faultfs.path / "good", faultfs.path / "bad"
    for path in (good, bad):
        np.ones(70_001, np.uint8).tofile(path)
    faultfs.order(Fault("read", error=errno.EIO, name="bad"))
    failing: list[tuple[pathlib.Path, int | None]] = [
        (faultfs.path / "missing", errno.ENOENT),
        (_short(faultfs.backing, "short"), None),
        (bad, errno.EIO),
        (faultfs.path / "missing too", errno.ENOENT),
    ]
    for order in itertools.permutations(failing):
        paths = [good, *(path for path, _ in order), good]
        items = [(path, np.zeros(70_001, np.uint8)) for path in paths]
        with pytest.raises(tensorferry.StorageError) as caught:
            tensorferry.read_many(items)
        _assert_reported(caught.value, order)


@pytest.mark.usefixtures("default_engine")
def test_writes_that_fail_are_all_in_the_error_in_their_order(faultfs: FaultFS) -> None:
    (faultfs.backing / "folder").mkdir()
    faultfs.order(
        Fault("write", error=errno.EIO, name="broken"),
        Fault("write", error=errno.ENOSPC, name="full"),
    )
    failing: list[tuple[pathlib.Path, int | None]] = [
        (faultfs.path / "broken", errno.EIO),
        (faultfs.path / "folder", errno.EISDIR),
        (faultfs.path / "full", errno.ENOSPC),
        (faultfs.path / "nowhere" / "file", errno.ENOENT),
    ]
    for order in itertools.permutations(failing):
        paths = [faultfs.path / "good", *(path for path, _ in order), faultfs.path / "good too"]
        with pytest.raises(tensorferry.StorageError) as caught:
            tensorferry.write_many([(path, np.ones(70_001, np.uint8)) for path in paths])
        _assert_reported(caught.value, order)


@pytest.mark.usefixtures("default_engine")
def test_failures_of_thousands_of_items_are_all_in_the_error(directory: pathlib.Path) -> None:
    paths = [_short(directory, f"short{index}") for index in range(40)]
    items = [(paths[index % 40], np.zeros(101, np.uint8)) for index in range(3_000)]
    with pytest.raises(tensorferry.ShortReadError) as caught:
        tensorferry.read_many(items)
    _assert_reported(caught.value, [(path, None) for path, _ in items])


@pytest.mark.usefixtures("default_engine")
def test_a_single_failure_has_no_others(directory: pathlib.Path) -> None:
    with pytest.raises(tensorferry.ShortReadError) as caught:
        tensorferry.read_many([(_short(directory, "short"), np.zeros(101, np.uint8))])
    assert list(caught.value.others) == []
    assert "more" not in str(caught.value)


def _assert_reported(error: Any, failed: Any) -> None:
    assert [os.fsdecode(e.filename) for e in (error, *error.others)] == [str(p) for p, _ in failed]
    assert [e.errno for e in (error, *error.others)] == [number for _, number in failed]
    assert f"{len(failed) - 1} more" in str(error)
    assert all(isinstance(other, tensorferry.StorageError) for other in error.others)


# System calls that a signal interrupts


def test_ctrl_c_ends_a_small_call_at_the_first_system_call_that_it_interrupts(
    run: Run, directory: pathlib.Path
) -> None:
    found = run(meetings.interrupted_calls, directory=directory)
    for name, (times, outcome) in found.items():
        assert outcome == "KeyboardInterrupt()", name
        assert times <= 1024, name


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fdatasync"])
def test_a_signal_handler_may_write_the_file_whose_write_it_interrupts(
    run: Run, directory: pathlib.Path, call: str
) -> None:
    run(meetings.handler_that_writes_the_same_file, directory=directory, call=call)


def test_a_system_call_that_is_interrupted_is_made_again_but_not_for_ever(
    run: Run, directory: pathlib.Path
) -> None:
    found = run(meetings.interrupted_without_end, directory=directory, times=3)
    assert all(outcome == [3, None] for outcome in found.values()), found
    found = run(meetings.interrupted_without_end, directory=directory, times=-1)
    for name, (times, number) in found.items():
        assert number == errno.EINTR, name
        assert 256 <= times <= 1024, name


def test_a_signal_handler_that_forks_within_a_small_call_leaves_it_to_the_parent(
    run: Run, directory: pathlib.Path
) -> None:
    run(meetings.interrupted_by_a_fork, directory=directory)


# Files in memory


@pytest.mark.parametrize("engine", ["libaio", "threads"], indirect=True)  # blocks go through libc
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_the_caller_helps_to_copy_what_lies_in_memory(
    run: Run, tmpfs_directory: pathlib.Path, write: bool
) -> None:
    run(meetings.copied_by_the_caller, directory=tmpfs_directory, write=write)
