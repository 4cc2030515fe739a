"""One operation's cost inside a process, as a worker sends it to the benchmark."""

from __future__ import annotations

import gc
from typing import Any

from tensorferry.tuning import stopwatch


class Stopwatch(stopwatch.Stopwatch):
    """The stopwatch of ``tensorferry bench``; garbage of earlier samples is collected before it starts."""

    def __enter__(self) -> Stopwatch:
        gc.collect()
        super().__enter__()
        return self

    def result(self, nbytes: int, **details: Any) -> dict[str, Any]:
        """The measurement as a worker sends it to the benchmark."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_growth_nbytes": self.peak_growth_nbytes,
            "nbytes": nbytes,
            **details,
        }


def touch_memory(nbytes: int) -> None:
    """Have the host of a virtual machine give its memory to it: its page faults are nobody's time."""
    import torch

    torch.empty(nbytes, dtype=torch.uint8)[::4096] = 1
