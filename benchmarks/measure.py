"""One operation's cost inside a process, as a worker sends it to the benchmark."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tensorferry.tuning import stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLACK_NBYTES = 512 << 20
_HOST_TAKES_MEMORY = Path("/sys/module/page_reporting").exists()


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


def drive_nbytes(*ways: str) -> int:
    """Bytes that this process has "read" from drives, or ("write") had written to them, as the kernel counts."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return sum(int(fields[f"{way}_bytes"]) for way in ways)


def touch_memory(nbytes: int) -> None:
    """Have the host of a virtual machine give its memory to it: its page faults are nobody's time.

    On huge pages: ordinary ones come from what is left between these, and would leave them to be paid for.
    """
    with _touched(nbytes):
        pass


def touch_free_memory() -> None:
    """Have the host give all memory that is free, but for some that is left, if it may have taken it."""
    if _HOST_TAKES_MEMORY:
        touch_memory(psutil.virtual_memory().free - _SLACK_NBYTES)


@contextlib.contextmanager
def little_free_memory(nbytes: int) -> Iterator[None]:
    """Hold memory until no more is free than so many bytes, where what is free may be the host's again.

    Else whoever needs fresh memory pays for the host's work, about a second for each GB, and whoever gets what the
    cache has just freed does not: a matter of chance, not of either.
    """
    held = psutil.virtual_memory().free - nbytes
    with _touched(held if _HOST_TAKES_MEMORY else 0):
        yield


@contextlib.contextmanager
def _touched(nbytes: int) -> Iterator[None]:
    with mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        _touch(memory)
        yield


def _touch(memory: mmap.mmap) -> None:
    import numpy

    def touch(begin: int) -> None:
        part = numpy.frombuffer(memory, numpy.uint8)[begin : begin + each : 4096]
        try:
            part.fill(1)
        finally:
            del part  # a traceback that keeps it would keep the memory

    count = os.cpu_count() or 1
    each = -(-len(memory) // count // 4096) * 4096
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(touch, range(0, len(memory), each)))
