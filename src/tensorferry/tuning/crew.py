"""Processes that do the same work at the same time, and are gone afterwards, whatever happens.

Each member is a spawned process with an object of its own; :meth:`Crew.call` calls one method of all of them and
returns when all have answered, which is the barrier between the steps of a benchmark. A member that dies is noticed
at once. Members do not hear Ctrl-C and SIGTERM, which go to a whole terminal: ending them is the crew's part. Where
the crew's own process is killed they notice that too, clean up and leave.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from types import TracebackType

# What people and shells end a program with.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LEAVE_SECONDS = 5.0


class CrewError(Exception):
    """A member failed or died; the message says why."""


class Member(Protocol):
    """What runs in a member's process."""

    def orphaned(self) -> None:
        """Clean up: nobody else is left to."""


class Crew:
    """Context manager: processes that each call ``make(*arguments)`` and then do what :meth:`call` says.

    Parameters
    ----------
    make : callable
        Makes a member's object in its process. It and the arguments must be picklable.
    arguments : sequence of tuple
        The arguments for each member.

    Raises
    ------
    CrewError
        A member could not be made.
    """

    def __init__(self, make: Callable[..., Member], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._make = make
        self._arguments = arguments
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Crew:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # else the first start() does it, and unblocks signals
        try:
            with ending_signals_blocked():  # which members inherit
                for arguments in self._arguments:
                    here, there = context.Pipe()
                    process = context.Process(
                        target=_serve, args=(there, self._make, arguments), daemon=True
                    )
                    process.start()
                    there.close()
                    self._members.append((process, here))
            self._answers()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(kill=kind is not None)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every member, and return their results when all are done.

        Raises
        ------
        CrewError
            A member raised, or its process died.
        """
        for _, connection in self._members:
            with contextlib.suppress(BrokenPipeError):  # its end is noticed below
                connection.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        numbers = {id(connection): n for n, (_, connection) in enumerate(self._members)}
        while len(answers) + len(failures) < len(self._members):
            awaited = [
                connection
                for n, (_, connection) in enumerate(self._members)
                if n not in answers and n not in failures
            ]
            for connection in wait(awaited):
                number = numbers[id(connection)]
                value: Any
                try:
                    succeeded, value = self._members[number][1].recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, self._how_it_died(number)
                (answers if succeeded else failures)[number] = value
            if failures:
                break
        if failures:
            number = min(failures)
            raise CrewError(f"process {number}: {failures[number]}")
        return [answers[number] for number in range(len(self._members))]

    def _how_it_died(self, number: int) -> str:
        process = self._members[number][0]
        process.join(_LEAVE_SECONDS)
        code = process.exitcode
        if code is None or code >= 0:
            return f"it left with exit status {code}"
        name = signal.Signals(-code).name
        likely = "; likely cause: out of memory" if name == "SIGKILL" else ""
        return f"it was killed by {name}{likely}"

    def _end(self, kill: bool) -> None:
        with ending_signals_blocked():  # a second Ctrl-C must not leave half of them behind
            for process, connection in self._members:
                if kill:
                    process.kill()
                else:
                    with contextlib.suppress(BrokenPipeError):
                        connection.send(None)
            for process, connection in self._members:
                process.join(_LEAVE_SECONDS)
                if process.exitcode is None:
                    process.kill()
                    process.join()
                connection.close()
                process.close()
            self._members = []


@contextlib.contextmanager
def ending_signals_blocked() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until the block is done, also those that come as it is entered.

    Processes that are started meanwhile inherit the mask. Other threads of this one do not know it: what the kernel
    gives to one of them only sets a note here, and is raised again at the end.
    """
    late: list[int] = []
    handlers = _handlers()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        takes: list[Callable[[], Any]] = [
            partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING_SIGNALS),
            *(partial(signal.signal, each, lambda n, _: late.append(n)) for each in handlers),
        ]
        for take in takes:
            try:
                take()
            except KeyboardInterrupt:  # it had come before: it was the first, and can wait as well
                late.append(signal.SIGINT)
                take()
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in dict.fromkeys(late):
            signal.raise_signal(number)


def _handlers() -> dict[int, Any]:
    """Return the handlers that may be put aside: Python's run in the main thread, and only it may change them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    known = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    return {n: found for n, found in known.items() if found not in (signal.SIG_IGN, None)}


def _serve(connection: Connection, make: Callable[..., Member], arguments: tuple[Any, ...]) -> None:
    """Run a member: make its object, then do one call after the other until told to leave."""
    try:
        member = make(*arguments)
    except Exception as error:
        connection.send((False, _in_words(error)))
        return
    answer: tuple[bool, Any] = True, None
    try:
        while True:
            connection.send(answer)
            message = connection.recv()
            if message is None:
                return
            method, values = message
            try:
                answer = True, getattr(member, method)(*values)
            except Exception as error:
                answer = False, _in_words(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        member.orphaned()


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
