"""One operation's cost inside a process, as a worker sends it to the benchmark."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
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
    """Have the host of a virtual machine give its memory to it: its page faults are nobody's time.

    On huge pages: ordinary ones come from what is left between these, and would leave them to be paid for.
    """
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    import numpy

    pages = numpy.frombuffer(memory, numpy.uint8)[::4096]
    count = os.cpu_count() or 1
    with ThreadPoolExecutor(count) as pool:
        list(
            pool.map(
                lambda at: pages[at : at + -(-len(pages) // count)].fill(1),
                range(0, len(pages), -(-len(pages) // count)),
            )
        )
