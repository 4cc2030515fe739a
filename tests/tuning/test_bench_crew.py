"""Crews: processes that work together, fail clearly and are always gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tensorferry.tuning.crew import Crew, CrewError, ending_signals_blocked
from tests.support.leaks import descriptors, settled

if TYPE_CHECKING:
    from pathlib import Path


class Worker:
    """A member for these tests."""

    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"{number} is negative")
        self.number = number

    def add(self, summand: int) -> int:
        return self.number + summand

    def fail_if(self, number: int) -> None:
        if self.number == number:
            raise OSError(28, "No space left on device", "/some/file")
        signal.pause()  # for ever: whoever waits for this one hangs

    def die_if(self, number: int) -> None:
        if self.number == number:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # for ever: whoever waits for this one hangs

    def leave(self) -> None:
        sys.exit(3)

    def blocked(self) -> list[int]:
        return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    def orphaned(self) -> None:
        pass


def crew_of(*numbers: int) -> Crew:
    return Crew(Worker, [(number,) for number in numbers])


def test_every_member_answers_in_order() -> None:
    with crew_of(1, 2, 3) as crew:
        assert crew.call("add", 10) == [11, 12, 13]
        assert crew.call("add", 20) == [21, 22, 23]
    assert multiprocessing.active_children() == []


def test_a_failure_is_raised_at_once_with_its_words() -> None:
    with (
        pytest.raises(CrewError, match=r"process 1: .*No space left on device.*/some/file"),
        crew_of(0, 1) as crew,
    ):
        crew.call("fail_if", 1)
    assert multiprocessing.active_children() == []


def test_a_killed_member_is_noticed_at_once() -> None:
    with (
        pytest.raises(CrewError, match="process 0: it was killed by SIGKILL; likely cause"),
        crew_of(0, 1) as crew,
    ):
        crew.call("die_if", 0)
    assert multiprocessing.active_children() == []


def test_a_member_that_leaves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.tuning.crew._LEAVE_SECONDS", 300.0)  # else it is killed
    with pytest.raises(CrewError, match="left with exit status 3"), crew_of(0) as crew:
        crew.call("leave")


def test_a_member_that_cannot_be_made_is_told() -> None:
    with pytest.raises(CrewError, match="process 1: ValueError: -5 is negative"):
        crew_of(0, -5).__enter__()
    assert multiprocessing.active_children() == []


def test_members_are_ended_by_an_exception_of_the_caller() -> None:
    with pytest.raises(KeyboardInterrupt), crew_of(0, 1):
        raise KeyboardInterrupt
    assert multiprocessing.active_children() == []


def test_members_do_not_hear_what_a_terminal_sends() -> None:
    with crew_of(0) as crew:
        [blocked] = crew.call("blocked")
    assert blocked == [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_another_thread_gets_wait_as_well(number: signal.Signals) -> None:
    heard = []

    def hear(got: int, _frame: object) -> None:
        heard.append(got)

    ended = threading.Event()
    other = threading.Thread(target=ended.wait)  # such as one that draws a progress bar
    other.start()  # before, so that nothing is blocked in it
    before = signal.signal(number, hear)
    try:
        with ending_signals_blocked():
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                assert heard == []
        assert heard == [number]
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)
        ended.set()
        other.join()


def test_what_the_process_ignores_stays_ignored_while_signals_wait() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_signals_blocked():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Keeper:
    """A member that has a file to remove."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def orphaned(self) -> None:
        self.path.unlink()


def killed_with_a_crew(path: Path) -> None:
    with Crew(Keeper, [(path,)]):
        os.kill(os.getpid(), signal.SIGKILL)


def test_members_whose_crew_is_killed_clean_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    process = multiprocessing.get_context("spawn").Process(target=killed_with_a_crew, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert settled(lambda: not path.exists())


def test_crews_leave_no_descriptors() -> None:
    def work() -> None:
        with crew_of(0, 1) as crew:
            crew.call("add", 1)

    work()  # the resource tracker's stay
    before = Counter(descriptors())
    for _ in range(2):
        work()
    assert settled(lambda: Counter(descriptors()) <= before)
