"""What can go wrong with offloaded optimizers, by name."""

from __future__ import annotations


class NotSeparableError(ValueError):
    """The optimizer cannot be stepped piece by piece with the result it has as a whole; the message says why."""


class MemoryBudgetError(MemoryError):
    """The memory budget is too small.

    Attributes
    ----------
    needed_nbytes : int
        The smallest budget that will do.
    """

    def __init__(self, message: str, needed_nbytes: int) -> None:
        super().__init__(message)
        self.needed_nbytes = needed_nbytes


class OffloadError(RuntimeError):
    """A step or another call met a failing drive; the cause (``__cause__``) says where.

    Nothing is lost: what could not be written is still in memory, and ``retry()`` goes on where it stopped.

    Attributes
    ----------
    step : int
        The number of steps that are whole.
    finished : bool
        Whether parameters and state are those after ``step`` steps. If not, a step is half done: some parameters have
        had it and others have not. Gradients must stay as they are until ``retry()`` has succeeded.
    """

    def __init__(self, message: str, *, step: int, finished: bool) -> None:
        super().__init__(message)
        self.step = step
        self.finished = finished
