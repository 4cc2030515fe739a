"""The number of threads that step a bucket: as few as do not slow down the steps.

A bucket is the state of some parameters that the optimizer steps together (``plan.py``). With hundreds of buckets per
step, OpenMP's threads wait for the next bucket in a loop (they spin) and never sleep, so they occupy processors that
the transfers need. If steps wait for the drive, a few threads finish a step as early as many would, and fewer threads
spin meanwhile.

Operations on few elements gain nothing from several threads. torch runs them in one thread, but MKL, which computes
square roots for torch, divides them. If other programs use all processors, such an operation must wait until the
kernel's scheduler has run each of its threads: steps of 512 small buckets took ten times as long with two threads as
with one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tensorferry.base import openmp

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# The most elements that torch gives to one thread (``at::internal::GRAIN_SIZE``).
_GRAIN_NUMEL = 32768

# Shares of a step's time that it spends waiting for drives. Above the first share, halve the number of threads; below
# the second one, double it.
_IDLE_SHARE, _BUSY_SHARE = 0.25, 0.05
# After doubling the threads, do not halve them again for this many steps.
_PATIENCE_STEPS = 100


class StepThreads:
    """Chooses the number of torch's threads for steps from the waiting time of the previous steps."""

    def __init__(self) -> None:
        self._count: int | None = None  # None: as many of torch's threads as the operations can use
        self._patience_steps = 0

    def limited(self, numel: int) -> AbstractContextManager[None]:
        """Limit the calling thread to the chosen number of threads for the duration of a ``with`` block.

        ``numel`` is the largest number of elements of a tensor in it.
        """
        useful = max(numel // _GRAIN_NUMEL, 1)
        return openmp.limit_threads(min(useful, self._count or useful))

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Choose the number of threads again, after a step of ``seconds`` of which ``waited_seconds`` were waiting."""
        most = torch.get_num_threads()
        count = most if self._count is None else min(self._count, most)
        self._patience_steps = max(self._patience_steps - 1, 0)
        if waited_seconds > _IDLE_SHARE * seconds and not self._patience_steps:
            self._count = max(count // 2, 1)
        elif waited_seconds < _BUSY_SHARE * seconds and count < most:
            self._count, self._patience_steps = 2 * count, _PATIENCE_STEPS
