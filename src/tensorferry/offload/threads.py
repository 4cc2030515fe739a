"""How many threads step a bucket: no more than the drive lets work.

With hundreds of buckets a step OpenMP's threads spin between them, and never sleep. Where steps wait for the drive,
fewer threads step as soon; one needs no other at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tensorferry.base import openmp

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# Shares of a step's time that are spent waiting for drives: above, half of the threads do; below, they do not.
_IDLE_SHARE, _BUSY_SHARE = 0.25, 0.05
# For so many steps fewer threads are not tried again where they have been too few.
_PATIENCE_STEPS = 100


class StepThreads:
    """Chooses how many of torch's threads step, by what the steps before have waited for."""

    def __init__(self) -> None:
        self._count: int | None = None  # none: as many as torch has
        self._patience_steps = 0

    def limited(self) -> AbstractContextManager[None]:
        """Have the calling thread step with so many at most."""
        return openmp.limited(self._count)

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Choose anew, after a step that took so long and spent so much of it waiting for drives."""
        most = torch.get_num_threads()
        count = most if self._count is None else min(self._count, most)
        self._patience_steps = max(self._patience_steps - 1, 0)
        if waited_seconds > _IDLE_SHARE * seconds and not self._patience_steps:
            self._count = max(count // 2, 1)
        elif waited_seconds < _BUSY_SHARE * seconds and count < most:
            self._count, self._patience_steps = 2 * count, _PATIENCE_STEPS
