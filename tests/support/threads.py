"""Calls in threads, with their results or exceptions, and joins with a timeout."""

from __future__ import annotations

import contextlib
import faulthandler
import re
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOIN_TIMEOUT_S = 120  # less than file systems hold requests: see HOLD_MAX_S in faultfs.py


class InThread:
    """A call in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._result: object = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = call()
            except BaseException as error:
                self._error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def is_alive(self) -> bool:
        """Return whether the call has not returned."""
        return self.thread.is_alive()

    def result(self, what: str = "the call") -> Any:
        """Return the result of the call, or raise its exception."""
        self.thread.join(JOIN_TIMEOUT_S)
        assert not self.is_alive(), f"{what} did not return in {JOIN_TIMEOUT_S} s"
        if self._error:
            raise self._error
        return self._result


def threads_in(function: Any) -> int:
    """Return the number of threads that are in a function written in Python.

    It uses faulthandler, which reads all stacks while no other thread runs. Reading f_back would make an object, which
    may start the garbage collector and let the other thread run until its frame is gone. CPython 3.11 then writes to
    freed memory.
    """
    code = function.__code__
    frame = re.compile(
        rf'File "{re.escape(code.co_filename)}", line (\d+) in {re.escape(code.co_name)}$',
        re.MULTILINE,
    )
    lines = {line for _, _, line in code.co_lines()}
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        threads = stacks.read().split("\n\n")
    return sum(any(int(line) in lines for line in frame.findall(stack)) for stack in threads)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0), work(1), ... in threads that begin together; fail on exceptions and on threads that hang."""
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    threads = [InThread(lambda index=index: run(index)) for index in range(count)]  # type: ignore[misc]
    for thread in threads:
        thread.result()


@contextlib.contextmanager
def no_new_threads() -> Iterator[None]:
    """Make every start of a Python thread fail in the block, with a stack size that cannot be allocated."""
    before = threading.stack_size(1 << 40)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=int).start()
        yield
    finally:
        threading.stack_size(before)
