"""Exceptions of offloaded optimizers and streamed weights."""

from __future__ import annotations


class NotSeparableError(ValueError):
    """The optimizer cannot be stepped piece by piece with the same result; the message gives the reason."""


class MemoryBudgetError(MemoryError):
    """The memory budget is too small.

    Attributes
    ----------
    needed_nbytes : int
        The smallest budget that works.
    """

    def __init__(self, message: str, needed_nbytes: int) -> None:
        super().__init__(message)
        self.needed_nbytes = needed_nbytes


class OffloadError(RuntimeError):
    """A step or another call failed because a drive failed; the cause (``__cause__``) is the original error.

    No data is lost: data that could not be written is still in memory, and ``retry()`` continues the interrupted work.

    Attributes
    ----------
    step : int
        The number of complete steps.
    finished : bool
        Whether parameters and state are those after ``step`` steps. If False, a step is half done: it has updated some
        parameters and not others. Leave the gradients unchanged until ``retry()`` has succeeded.
    """

    def __init__(self, message: str, *, step: int, finished: bool) -> None:
        super().__init__(message)
        self.step = step
        self.finished = finished
