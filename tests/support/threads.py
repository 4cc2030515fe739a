"""Calls in threads: what they return or raise, and joins that do not last for ever."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

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
        """Return what the call returns, or raise what it raises."""
        self.thread.join(JOIN_TIMEOUT_S)
        assert not self.is_alive(), f"{what} did not return in {JOIN_TIMEOUT_S} s"
        if self._error:
            raise self._error
        return self._result


def threads_in(function: Any) -> int:
    """Return how many threads are in a function written in Python."""

    def is_in(frame: FrameType | None) -> bool:
        return frame is not None and (frame.f_code is function.__code__ or is_in(frame.f_back))

    return sum(map(is_in, sys._current_frames().values()))


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0), work(1), ... in threads that begin together; fail on exceptions and on threads that hang."""
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    threads = [InThread(lambda index=index: run(index)) for index in range(count)]  # type: ignore[misc]
    for thread in threads:
        thread.result()
