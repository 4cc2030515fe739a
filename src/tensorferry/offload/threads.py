"""How many threads step a bucket: no more than the drive lets work.

After each parallel region OpenMP's threads spin for some milliseconds before they sleep. With hundreds of buckets a
step they never sleep: they take the processors from the threads that move the buckets, and from everybody else. Where
steps wait for the drive, fewer threads step as soon; one needs no other at all.

The number is the calling thread's own (``omp_set_num_threads``, OpenMP 5.2, 18.2.1), unlike what
``torch.set_num_threads`` sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shares of a step's time that are spent waiting for drives: above, half of the threads do; below, they do not.
_IDLE_SHARE, _BUSY_SHARE = 0.25, 0.05
# For so many steps fewer threads are not tried again where they have been too few.
_PATIENCE_STEPS = 100


class StepThreads:
    """Chooses how many of torch's threads step, by what the steps before have waited for."""

    def __init__(self) -> None:
        self._count: int | None = None  # none: as many as torch has
        self._patience_steps = 0

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Have the calling thread step with so many at most."""
        before = torch.get_num_threads()
        count = before if self._count is None else min(self._count, before)
        if count == before or not _set(count):
            yield
            return
        try:
            yield
        finally:
            _set(before)

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Choose anew, after a step that took so long and spent so much of it waiting for drives."""
        most = torch.get_num_threads()
        count = most if self._count is None else min(self._count, most)
        self._patience_steps = max(self._patience_steps - 1, 0)
        if waited_seconds > _IDLE_SHARE * seconds and not self._patience_steps:
            self._count = max(count // 2, 1)
        elif waited_seconds < _BUSY_SHARE * seconds and count < most:
            self._count, self._patience_steps = 2 * count, _PATIENCE_STEPS


def _set(count: int) -> bool:
    """Set the calling thread's number of threads, or return False: torch's are not OpenMP's."""
    call = _omp_set_num_threads()
    if call is None:
        return False
    before = torch.get_num_threads()
    call(count)
    if torch.get_num_threads() == count:
        return True
    call(before)
    return False


@functools.cache
def _omp_set_num_threads() -> Any:
    # torch loads its OpenMP for everybody to see, with its global dependencies.
    call = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if call is not None:
        call.argtypes, call.restype = [ctypes.c_int], None
    return call
