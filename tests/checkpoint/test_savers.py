"""Concurrent saves to one directory: none removes a file of another, and the last to succeed is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemWriter
from tensorferry.checkpoint import load as load_object
from tensorferry.checkpoint import save as save_object
from tensorferry.checkpoint.storage import commit, savers
from tensorferry.checkpoint.storage.savers import LOCK_NAME, Saver
from tensorferry.errors import StorageError
from tests.checkpoint.states import load, metadata_of, save, steps_in, telling
from tests.support import ranks
from tests.support.data import SEED
from tests.support.forks import passes_in_child
from tests.support.leaks import settled
from tests.support.ranks import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from tests.support.faultfs import FaultFS

# Of two savers and one that is killed; the figure of the acceptance is 300.
ROUNDS = int(os.environ.get("TENSORFERRY_TEST_SAVER_ROUNDS", "10"))
WAIT_SECONDS = 300.0


def step_in(checkpoint: pathlib.Path) -> int:
    """Load everything by torch's reader, and return the one step that it has."""
    (step,) = steps_in(load(checkpoint, telling(-1)))
    for name, (nbytes, _) in metadata_of(checkpoint).tensorferry["files"].items():
        assert (checkpoint / name).stat().st_size == nbytes
    return int(step)


def test_a_folder_that_may_not_be_written_is_told_as_such() -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = pathlib.Path(root) / "checkpoint"
        save(telling(1), folder)
        for path in (pathlib.Path(root), folder):
            path.chmod(0o555)

        def attempt() -> None:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            for way in (lambda: Saver(folder, None), lambda: Saver(folder, 1)):
                with pytest.raises(StorageError, match=LOCK_NAME) as raised:
                    way()
                assert (raised.value.errno, raised.value.filename) == (errno.EACCES, str(folder))

        passes_in_child(attempt)
        for path in (pathlib.Path(root), folder):
            path.chmod(0o755)


def in_threads(*actions: Callable[[], Any]) -> None:
    """Run actions concurrently, and raise the exception of one of them."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> None:
        try:
            barrier.wait(WAIT_SECONDS)
            action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_of_two_threads_that_save_into_one_directory_one_is_there_whole(
    directory: pathlib.Path,
) -> None:
    for number in range(10):
        checkpoint = directory / str(number % 2)
        first, second = 2 * number, 2 * number + 1
        in_threads(
            lambda c=checkpoint, s=first: save(telling(s), c, thread_count=2),  # type: ignore[misc]
            lambda c=checkpoint, s=second: save(telling(s), c),  # type: ignore[misc]
        )
        assert step_in(checkpoint) in (first, second)
    save(telling(99), directory / "0")
    assert len(files_of(directory / "0")) == 2
    assert step_in(directory / "0") == 99


class Meeting(dcp.DefaultSavePlanner):
    """Calls a function in the middle of writing."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "1":
            self._function()
        return super().resolve_data(write_item)


def save_meeting(step: int, checkpoint: pathlib.Path, function: Callable[[], Any]) -> None:
    """Save, and call a function in the middle, in a separate thread."""
    dcp.save(
        telling(step),
        storage_writer=FileSystemWriter(checkpoint, thread_count=2),
        planner=Meeting(lambda: in_threads(function)),
        no_dist=True,
    )


@pytest.mark.parametrize("over", [True, False], ids=["over an old one", "in a new directory"])
def test_a_save_that_begins_and_ends_within_another_loses_nothing_of_it(
    directory: pathlib.Path, over: bool
) -> None:
    checkpoint = directory / "checkpoint"
    if over:
        save(telling(0), checkpoint)
    found = []

    def within() -> None:
        save(telling(2), checkpoint)
        found.append(step_in(checkpoint))

    save_meeting(1, checkpoint, within)
    assert found == [2]
    assert step_in(checkpoint) == 1
    assert len(files_of(checkpoint)) == 3  # .metadata and two data files, none of the other save


def test_a_save_that_finds_a_file_of_its_own_missing_fails_and_leaves_the_one_before(
    directory: pathlib.Path,
) -> None:
    checkpoint = directory / "checkpoint"
    save(telling(1), checkpoint)

    class Robbed(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            (checkpoint / results[0][0].storage_data.relative_path).unlink()
            super().finish(metadata, results)

    with pytest.raises(dcp.api.CheckpointException, match="missing"):
        dcp.save(telling(2), storage_writer=Robbed(checkpoint), no_dist=True)
    assert step_in(checkpoint) == 1


def test_a_save_that_finds_a_file_of_its_own_cut_fails(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    save(telling(1), checkpoint)

    class Robbed(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            path = checkpoint / results[0][0].storage_data.relative_path
            os.truncate(path, path.stat().st_size - 1)
            super().finish(metadata, results)

    with pytest.raises(dcp.api.CheckpointException, match="bytes"):
        dcp.save(telling(2), storage_writer=Robbed(checkpoint), no_dist=True)
    assert step_in(checkpoint) == 1


def test_of_two_saves_that_may_not_overwrite_the_second_fails(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    writer = FileSystemWriter(checkpoint, overwrite=False)
    planner = Meeting(lambda: in_threads(lambda: save(telling(2), checkpoint)))
    with pytest.raises(dcp.api.CheckpointException, match="overwrite"):
        dcp.save(telling(1), storage_writer=writer, planner=planner, no_dist=True)
    assert step_in(checkpoint) == 2


def test_a_save_beside_one_that_cannot_lock_removes_nothing_but_what_it_replaces(
    directory: pathlib.Path,
) -> None:
    checkpoint = directory / "checkpoint"
    save(telling(1), checkpoint)
    replaced = files_of(checkpoint) - {".metadata"}
    (checkpoint / LOCK_NAME).mkdir()  # a directory in place of the lock file cannot be locked
    somebodys = checkpoint / "__0_0123456789abcdef_0.distcp"
    somebodys.write_bytes(b"half")
    save_meeting(2, checkpoint, lambda: save(telling(3), checkpoint))
    assert step_in(checkpoint) == 2
    assert somebodys.exists()
    assert not files_of(checkpoint) & replaced


def test_where_locks_may_not_reach_others_leftovers_stay(faultfs: FaultFS) -> None:
    checkpoint = faultfs.path / "checkpoint"
    save(telling(1), checkpoint)
    somebodys = checkpoint / "__0_0123456789abcdef_0.distcp"
    somebodys.write_bytes(b"half")
    save(telling(2), checkpoint)
    assert step_in(checkpoint) == 2
    assert somebodys.exists()
    assert len(files_of(checkpoint)) == 3


def test_the_last_of_those_who_leave_at_once_removes_the_file_of_the_locks(
    directory: pathlib.Path,
) -> None:
    for _ in range(200):
        savers = [Saver(directory, rank) for rank in (None, None, 0, 1)]
        with savers[0].exclusive() as alone:
            assert not alone
        in_threads(*(saver.leave for saver in savers))
        assert not files_of(directory)
    with Saver(directory, None).exclusive() as alone:
        assert alone


def test_a_rank_that_saves_alone_meets_saves_of_all_and_no_other_ranks(
    directory: pathlib.Path,
) -> None:
    here, other = Saver(directory, 0), Saver(directory, 1)
    with here.exclusive() as alone, other.exclusive() as other_alone:
        assert alone
        assert other_alone
    whole = Saver(directory, None)
    for saver in (here, other, whole):
        with saver.exclusive() as alone:
            assert not alone
    here.leave()
    other.leave()
    with whole.exclusive() as alone:
        assert alone


def fork_and_wait(directory: str) -> None:
    """Save, and fork in the middle; the child stays."""

    def fork() -> None:
        if os.fork() == 0:  # which has let go then what it must not keep
            (pathlib.Path(directory) / "writing").write_text(str(os.getpid()))
            (pathlib.Path(directory) / "writing").rename(pathlib.Path(directory) / "child")
            time.sleep(WAIT_SECONDS)
            os._exit(0)
        time.sleep(WAIT_SECONDS)

    dcp.save(
        telling(2),
        storage_writer=FileSystemWriter(pathlib.Path(directory) / "checkpoint"),
        planner=Meeting(fork),
        no_dist=True,
    )


def test_a_child_that_was_forked_in_a_save_does_not_keep_its_leftovers(
    directory: pathlib.Path,
) -> None:
    save(telling(1), directory / "checkpoint")
    process = ranks.context.Process(target=fork_and_wait, args=(str(directory),))
    process.start()
    try:
        assert settled((directory / "child").exists)
        process.kill()
        process.join()
        assert len(files_of(directory / "checkpoint")) > 2
        save(telling(3), directory / "checkpoint")
        assert len(files_of(directory / "checkpoint")) == 2
    finally:
        os.kill(int((directory / "child").read_text()), signal.SIGKILL)


def test_two_threads_that_save_an_object_to_one_path_leave_one_of_them_whole(
    directory: pathlib.Path,
) -> None:
    for number in range(10):
        in_threads(
            *(lambda k=k: save_object(telling(k), directory / "state.pt") for k in range(2))  # type: ignore[misc]
        )
        assert len(steps_in(load_object(directory / "state.pt"))) == 1, number
        assert files_of(directory) == {"state.pt"}


@dataclasses.dataclass
class Saved:
    """One save, and when it ran."""

    step: int
    begin: float
    end: float


def save_on_demand(demands: Connection) -> None:
    """Save for each request: the folder, the step, a delay, and the options."""
    torch.set_num_threads(1)
    while (demand := demands.recv()) is not None:
        directory, step, delay_seconds, options = demand
        time.sleep(delay_seconds)
        begin = time.monotonic()
        try:
            save(telling(step), directory, **options)
            demands.send(Saved(step, begin, time.monotonic()))
        except BaseException as error:
            demands.send(repr(error))


def save_until_killed(directory: str, step: int) -> None:
    """Save again and again."""
    torch.set_num_threads(1)
    while True:
        save(telling(step), directory)  # type: ignore[arg-type]


@contextlib.contextmanager
def processes_that_save(count: int) -> Iterator[list[Connection]]:
    """Start processes that save on demand."""
    processes, pipes = [], []
    try:
        for _ in range(count):
            here, there = ranks.context.Pipe()
            process = ranks.context.Process(target=save_on_demand, args=(there,), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        yield pipes
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


@pytest.mark.timeout(600 + 10 * ROUNDS)
def test_two_savers_and_one_that_is_killed_lose_nothing(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    found = set()
    with processes_that_save(2) as pipes:
        for number in range(ROUNDS):
            choices = random.Random(f"{SEED} savers {number}")
            steps = [10 * number + 1, 10 * number + 2]
            killed = 10 * number + 3
            victim = ranks.context.Process(target=save_until_killed, args=(checkpoint, killed))
            victim.start()
            for pipe, step in zip(pipes, steps, strict=True):
                options = {
                    "thread_count": choices.choice([1, 3]),
                    "sync_files": choices.random() < 0.5,
                }
                pipe.send((checkpoint, step, choices.uniform(0, 0.15), options))
            time.sleep(choices.uniform(0, 0.3))
            victim.kill()
            victim.join()
            answers = []
            for pipe in pipes:
                assert pipe.poll(WAIT_SECONDS), f"round {number}: a saver hangs"
                answers.append(pipe.recv())
            assert all(isinstance(answer, Saved) for answer in answers), (number, answers)
            first, second = answers
            allowed = {killed}
            if not second.begin > first.end:
                allowed.add(first.step)
            if not first.begin > second.end:
                allowed.add(second.step)
            try:
                step = step_in(checkpoint)
            except Exception as error:
                raise AssertionError(f"round {number}: {files_of(checkpoint)}") from error
            assert step in allowed, (number, answers)
            found.add(step % 10)
            if number % 5 == 4:
                save(telling(0), checkpoint)
                assert len(files_of(checkpoint)) == 2  # leftovers of killed saves are removed
    assert len(found) > 1


def test_a_save_does_not_go_on_beside_one_that_would_not_see_it(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that continues without the lock after a timeout must not lose its files to the other save."""
    monkeypatch.setattr(savers, "_MAX_WAIT_SECONDS", 0.2)
    checkpoint = directory / "checkpoint"
    save(telling(1), checkpoint)
    other = Saver(checkpoint, None)
    with other.exclusive() as alone:
        assert alone
        with pytest.raises(dcp.api.CheckpointException, match="exclusive access"):
            save(telling(2), checkpoint)
    other.leave()
    assert step_in(checkpoint) == 1


def test_a_save_that_alone_cannot_lock_does_not_go_on(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: pathlib.Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    checkpoint = directory / "checkpoint"
    save(telling(1), checkpoint)
    monkeypatch.setattr(savers, "open_lock_file", refuse)
    with pytest.raises(dcp.api.CheckpointException, match="Permission denied"):
        save(telling(2), checkpoint)
    assert step_in(checkpoint) == 1


def test_nobody_is_alone_by_a_file_that_is_no_more(directory: pathlib.Path) -> None:
    first = Saver(directory, None)
    (directory / LOCK_NAME).unlink()
    second = Saver(directory, None)
    with first.exclusive() as alone:
        assert not alone
    with second.exclusive() as alone:
        assert alone
    first.leave()
    second.leave()
    assert not files_of(directory)


def test_one_of_two_that_may_not_overwrite_fails_also_without_locks(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / LOCK_NAME).mkdir()
    both, write, failed = threading.Barrier(2), commit.write_metadata, []

    def write_together(*arguments: Any, **options: Any) -> None:
        both.wait(WAIT_SECONDS)
        write(*arguments, **options)

    def save_once(step: int) -> None:
        writer = FileSystemWriter(checkpoint, overwrite=False)
        try:
            dcp.save(telling(step), storage_writer=writer, no_dist=True)
        except dcp.api.CheckpointException:
            failed.append(step)

    monkeypatch.setattr(commit, "write_metadata", write_together)
    in_threads(lambda: save_once(1), lambda: save_once(2))
    assert len(failed) == 1
    assert step_in(checkpoint) == 3 - failed[0]
