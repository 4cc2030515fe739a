"""Workers: processes that work together, fail with clear messages, and always end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tensorferry.tuning.workers import UnavailableError, Worker, WorkerError, call_all, closing
from tests.support.leaks import descriptors, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = "tests.tuning.test_workers"


class Adder:
    """The class that workers serve in these tests."""

    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"{number} is negative")
        if number > 100:
            raise UnavailableError(f"{number} cannot be had")
        self.number = number
        self.path: Path | None = None

    def add(self, summand: int) -> int:
        print("this does not get between the answers")
        return self.number + summand

    def fail_if(self, number: int) -> None:
        if self.number == number:
            raise OSError(28, "No space left on device", "/some/file")
        signal.pause()  # forever, so waiting for this worker would hang

    def fail_or_wait(self, number: int, path: Path) -> str:
        if self.number == number:
            raise OSError(28, "No space left on device", "/some/file")
        while not path.exists():
            time.sleep(0.01)
        return "late"

    def die_if(self, number: int) -> None:
        if self.number == number:
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def leave(self) -> None:
        os._exit(3)

    def heard(self) -> list[bool]:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for each in signals:
            os.kill(os.getpid(), each)
        return [signal.getsignal(each) is signal.SIG_IGN for each in signals]

    def keep(self, path: Path) -> None:
        self.path = path

    def on_orphaned(self) -> None:
        if self.path is not None:
            self.path.unlink()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with closing([Worker(f"{HERE}:Adder", number) for number in (0, 1)]) as made:
        yield made
        for worker in made:
            worker.close(kill=True)


def test_every_worker_answers_in_order(workers: list[Worker]) -> None:
    assert call_all(workers, "add", 10) == [10, 11]
    assert workers[1].call("add", summand=20) == 21


def test_a_failure_is_raised_at_once_with_its_words(workers: list[Worker]) -> None:
    with pytest.raises(WorkerError, match=r"process 1: .*No space left on device.*/some/file"):
        call_all(workers, "fail_if", 1)


def test_an_answer_after_a_failure_is_not_taken_for_that_of_the_next_call(
    workers: list[Worker], tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match="process 1: "):
        call_all(workers, "fail_or_wait", 1, tmp_path / "file")
    (tmp_path / "file").touch()
    assert call_all(workers, "add", 10) == [10, 11]


def test_an_answer_is_not_taken_for_the_next_one_if_another_worker_cannot_be_made(
    workers: list[Worker],
) -> None:
    unable = Worker(f"{HERE}:Adder", -5)
    with closing([unable]), pytest.raises(WorkerError, match=r"process 1: .* -5 is negative"):
        call_all([workers[0], unable], "add", 10)
    assert workers[0].call("add", 20) == 20


def test_an_answer_is_not_taken_for_the_next_one_after_an_interruption(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tensorferry.tuning.workers.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call_all(workers, "add", 10)
    assert call_all(workers, "add", 20) == [20, 21]


def test_a_killed_worker_is_noticed_at_once_with_its_last_words(workers: list[Worker]) -> None:
    words = r"process 0: it was killed by SIGKILL; likely cause: out of memory \(last words\)"
    with pytest.raises(WorkerError, match=words):
        call_all(workers, "die_if", 0)


def test_a_call_that_takes_too_long_is_not_said_to_lack_memory(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workers[0].call("add", 1) == 1
    monkeypatch.setattr("tensorferry.tuning.workers._CALL_SECONDS_MAX", 0.01)
    with pytest.raises(
        WorkerError, match=r"^it was killed, because a call took longer than 0.01 s$"
    ):
        workers[0].call("die_if", 7)


def test_a_worker_that_leaves_is_noticed_and_another_takes_its_place() -> None:
    with closing([Worker(f"{HERE}:Adder", 1)]) as (worker,):
        with pytest.raises(WorkerError, match="exited with status 3"):
            worker.call("leave")
        assert worker.call("add", 1) == 2


@pytest.mark.parametrize(
    ("target", "number", "error", "words"),
    [
        (f"{HERE}:Adder", -5, WorkerError, "ValueError: -5 is negative"),
        (f"{HERE}:Adder", 101, UnavailableError, "101 cannot be had"),
        ("no_such_module:Adder", 1, UnavailableError, "no_such_module"),
    ],
)
def test_what_cannot_be_made_is_told(
    target: str, number: int, error: type[Exception], words: str
) -> None:
    with closing([Worker(target, number)]) as (worker,):
        for _ in range(2):
            with pytest.raises(error, match=words):
                worker.call("add", 1)


def test_workers_do_not_hear_what_a_terminal_sends(workers: list[Worker]) -> None:
    assert workers[0].call("heard") == [True, True, True]


def killed_with_a_worker(path: Path) -> None:
    Worker(f"{HERE}:Adder", 1).call("keep", path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_whose_parent_is_killed_clean_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    process = multiprocessing.get_context("spawn").Process(
        target=killed_with_a_worker, args=(path,)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert settled(lambda: not path.exists())


def test_workers_leave_no_descriptors_and_end_with_an_exception() -> None:
    before = Counter(descriptors())
    processes = []

    def interrupted() -> None:
        with closing([Worker(f"{HERE}:Adder", 1)]) as (worker,):
            worker.call("add", 1)
            processes.append(worker._process)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert processes[0] is not None
    assert processes[0].returncode == -signal.SIGKILL
    assert settled(lambda: Counter(descriptors()) <= before)
