"""Races: between a close and a submit, a fork and a reservation, a caller and memory that it has released.

Calls are made slow, or fail, in child processes; see tests/support/slow_calls.py and meetings.py.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_equal, contents
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import settled
from tests.support.threads import JOIN_TIMEOUT_S, InThread
from tests.transfers import meetings

if TYPE_CHECKING:
    import pathlib

    from tests.transfers.conftest import Run


# A page cache that is emptied while it is read


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_what_is_evicted_while_it_is_read_has_its_checksum_all_the_same(
    run: Run, engine: str, directory: pathlib.Path, error: int
) -> None:
    refused = run(
        meetings.checksums_of_what_was_cached,
        directory=str(directory),
        nbytes=3_000_003,
        error=error,
    )
    assert (refused > 0) == (engine != "threads")  # which read from the cache as from the drive


# A close that meets a submit


@pytest.mark.parametrize("product", ["async_pwrite", "sync_pwrite", "file"])
def test_a_write_that_meets_a_close_is_done_completely_or_refused(
    run: Run, directory: pathlib.Path, product: str
) -> None:
    outcomes = run(meetings.close_during_submit, directory=directory, product=product, rounds=12)
    assert sum(outcomes.values()) == 12


def test_leaving_the_interpreter_while_threads_are_about_to_submit_ends_well(
    run: Run, directory: pathlib.Path
) -> None:
    run(meetings.leave_during_submit, directory=directory)


@pytest.mark.parametrize("started", [0, 1, 2])
def test_threads_that_cannot_be_started_are_told_and_nothing_else_breaks(
    run: Run, engine: str, directory: pathlib.Path, started: int
) -> None:
    found = run(meetings.no_thread_left, directory=directory, started=started)
    assert found["hits"] == 1
    assert "thread" in found["refusal"]
    assert "thread" in next(iter(found["refusals"].values()))


# Release of memory that is no longer needed


@pytest.mark.parametrize("nbytes", [4_096, 100_003, 1 << 20, (1 << 20) + 1, 8 << 20])
def test_memory_is_given_back_as_soon_as_the_caller_has_the_result(
    run: Run, directory: pathlib.Path, nbytes: int
) -> None:
    pytest.importorskip("torch")
    program = meetings.memory_is_given_back
    held = run(program, imports=["torch"], directory=directory, nbytes=nbytes)
    assert not held, f"still held after {'; '.join(held)}"


# A direct transfer that is refused


@pytest.mark.parametrize(
    "engine", ["libaio", "threads"], indirect=True
)  # their blocks go through libc; see test_devices.py
@pytest.mark.parametrize("write", [True, False], ids=["write", "read"])
def test_blocks_that_the_kernel_refuses_past_the_page_cache_go_through_it(
    run: Run, directory: pathlib.Path, write: bool
) -> None:
    program = meetings.refused_direct_transfers
    assert run(program, directory=directory, write=write, direct=False) is None
    assert run(program, directory=directory, write=write, direct=True) == errno.EINVAL


# A close(2) that fails


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_close_that_fails_is_a_failure_of_what_was_written(
    run: Run, directory: pathlib.Path, error: int
) -> None:
    path = directory / "victim"
    np.zeros(3_000_001, np.uint8).tofile(path)
    outcomes = run(meetings.failing_close, path=path, error=error, interposed=True)
    _assert_writes_failed(outcomes, path, error)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", ["victim", "cached-victim"])
def test_a_file_system_that_finds_out_at_close_is_heard(
    run: Run, faultfs: FaultFS, error: int, name: str
) -> None:
    path = faultfs.path / name
    np.zeros(3_000_001, np.uint8).tofile(faultfs.backing / name)
    faultfs.order(Fault("flush", error=error, name=name))
    outcomes = run(meetings.failing_close, path=path, error=error, interposed=False)
    _assert_writes_failed(outcomes, path, error)


def _assert_writes_failed(outcomes: dict[str, Any], path: pathlib.Path, error: int) -> None:
    silent = [name for name, outcome in outcomes.items() if outcome is None]
    assert sorted({name.split(", s")[0].split(", l")[0] for name in silent}) == [
        "handle.sync_pread",
        "read",
        "read_many",
    ], f"only reads may succeed: {silent}"
    for name, outcome in outcomes.items():
        if outcome is None:
            continue
        number, filename, message = outcome
        assert (number, filename) == (error, str(path)), name
        assert os.strerror(error) in message, name
        assert "close" in message, name


# Calls that must not run on a thread that drives a queue


def test_threads_that_drive_a_queue_make_no_call_that_may_block(
    run: Run, directory: pathlib.Path
) -> None:
    made = run(meetings.calls_that_may_block, directory=directory)
    assert meetings.WORKER not in made, f"called {', '.join(made[meetings.WORKER])}"
    assert {"close", "fallocate", "ftruncate", "open"} <= set().union(*made.values())


@pytest.mark.usefixtures("default_engine")
def test_a_write_that_hangs_in_the_page_cache_holds_up_no_other_transfer(
    faultfs: FaultFS, directory: pathlib.Path
) -> None:
    data = np.full(4 << 20, 7, np.uint8)
    faultfs.order(Fault("write", hold=True))
    with tensorferry.open(faultfs.path / "stuck", "w") as file:
        stuck = file.write_from(data[:5_003])
        faultfs.await_held()
        other = InThread(lambda: tensorferry.write(directory / "other", data))
        other.thread.join(JOIN_TIMEOUT_S)
        beside = not other.is_alive() and faultfs.held() and not stuck.done()
        faultfs.release()
    assert beside
    assert_equal(contents(directory / "other"), data)


def test_threads_that_drive_a_queue_do_not_sleep_when_the_kernel_says_try_again(
    run: Run, engine: str, directory: pathlib.Path, faultfs: FaultFS
) -> None:
    path = directory / "again"
    if engine != "threads":
        path = faultfs.path / "again"
        faultfs.order(Fault("write", error=errno.EAGAIN, times=40))
    found = run(meetings.sleeps_of_workers, path=path)
    assert found["sleeps"] == 0
    assert (found["hits"] if engine == "threads" else faultfs.hits()) == 40


# Forks


def test_a_child_forked_while_its_parent_reserves_space_writes_to_the_same_file(
    run: Run, directory: pathlib.Path
) -> None:
    run(meetings.fork_during_reservation, directory=directory)


def test_a_child_may_ask_futures_that_had_ended(run: Run, directory: pathlib.Path) -> None:
    run(meetings.ask_futures_that_ended_before_the_fork, path=directory / "file")


# A close that gives up


@pytest.mark.parametrize("product", ["handle", "file"])
def test_a_close_that_gives_up_leaves_the_memory_under_hung_writes_alone(
    run: Run, engine: str, directory: pathlib.Path, faultfs: FaultFS, product: str
) -> None:
    path = directory / "hung"
    if engine != "threads":
        path = faultfs.path / "hung"
        faultfs.order(Fault("write", hold=True))
    with faultfs.released_by(faultfs.path / "looked"):
        outcome = run(meetings.close_over_hung_writes, path=path, product=product, patience_s=0.3)
    assert outcome["alive"] == [True, True, True]
    assert any("progress" in text for text in outcome["warnings"]), outcome["warnings"]
    if (
        engine == "io_uring" and product == "handle"
    ):  # what no thread of the process makes comes to its end all the same
        for index, nbytes in enumerate((4_096, 100_003, 3_000_001)):
            hung, wanted = faultfs.backing / f"hung{index}", np.full(nbytes, 5, np.uint8)
            settled(lambda hung=hung, wanted=wanted: np.array_equal(contents(hung), wanted))
            assert_equal(contents(hung), wanted)


# Defects that reviewers found by trying to break the package


@pytest.mark.parametrize("engine", ["threads"], indirect=True)  # its I/O is held in libc
def test_a_write_that_comes_back_after_close_gave_up_ends_well(
    run: Run, directory: pathlib.Path
) -> None:
    assert run(meetings.come_back_after_giving_up, directory=directory) == "well"


def test_syncs_that_hang_hold_up_no_other_file(run: Run, directory: pathlib.Path) -> None:
    run(meetings.reads_beside_hung_syncs, directory=directory)


@pytest.mark.parametrize("new", [True, False])
def test_closing_a_file_waits_for_the_sync_of_another_threads_write(
    run: Run, directory: pathlib.Path, new: bool
) -> None:
    run(meetings.close_beside_a_slow_sync, directory=directory, new=new)


@pytest.mark.parametrize("pieces", [3, 300])
def test_a_file_is_not_cut_where_a_piece_was_refused(
    run: Run, directory: pathlib.Path, pieces: int
) -> None:
    assert run(meetings.refused_pieces, directory=directory, pieces=pieces) == 1_450_000


def test_a_file_is_not_cut_where_a_piece_by_another_name_was_refused(
    run: Run, directory: pathlib.Path
) -> None:
    assert run(meetings.piece_refused_by_another_name, directory=directory) == 1_450_000


# 250 syncs need 25 s on a drive with 0.1 s for each.
@pytest.mark.parametrize(("count", "sync"), [(200, False), (600, False), (250, True)])
def test_pieces_among_more_files_than_descriptors_are_all_there(
    run: Run, directory: pathlib.Path, count: int, sync: bool
) -> None:
    run(meetings.pieces_with_few_descriptors, directory=directory, count=count, sync=sync)


# Streams during the reservation of their space


def test_a_close_waits_for_the_space_of_a_stream_that_is_being_reserved(
    run: Run, directory: pathlib.Path
) -> None:
    """Otherwise another file could get the number of the descriptor during the reservation."""
    assert run(meetings.file_closed_while_its_stream_reserves, directory=directory) == 0


def test_dropping_a_stream_does_not_wait_for_a_drive_that_hangs(
    run: Run, directory: pathlib.Path
) -> None:
    assert run(meetings.stream_dropped_while_it_reserves, directory=directory) is True
