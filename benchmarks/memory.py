"""Bytes that differ at every position of a file, memory that was touched, and the clock around a transfer."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from tensorferry.tuning import stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_WORDS = 1 << 18  # 2 MiB: the words made stay in the processor's cache
_BLOCK_NBYTES = 64 * MIB
_SLACK_NBYTES = 512 * MIB
_HOST_TAKES_MEMORY = Path("/sys/module/page_reporting").exists()


class Stopwatch(stopwatch.Stopwatch):
    """The stopwatch of ``tensorferry bench``; garbage of earlier samples is collected before it starts."""

    def __enter__(self) -> Stopwatch:
        gc.collect()
        super().__enter__()
        return self

    def result(self, nbytes: int, **details: Any) -> dict[str, Any]:
        """The measurement as a worker sends it to the benchmark."""
        names = ("seconds", "cpu_seconds", "peak_growth_nbytes")
        return {name: getattr(self, name) for name in names} | {"nbytes": nbytes} | details

    def as_value(self, value: float, nbytes: int = 0, **details: Any) -> dict[str, Any]:
        """The same, where what counts is no throughput."""
        return self.result(nbytes) | {"value": value, "details": details}


# Word i of a pattern is (seed + i) * an odd constant in 64-bit arithmetic: a block in the wrong place, a stale block or
# a lost tail all show.


def fill(buffer: Any, seed: int, start: int = 0) -> None:
    """Fill a byte buffer with the pattern's bytes from ``start`` on."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    for position, expected in _chunks(len(array), seed, start):
        array[position : position + len(expected)] = expected


def matches(buffer: Any, seed: int, start: int = 0) -> bool:
    """Whether a byte buffer holds the pattern's bytes from ``start`` on."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    return all(
        np.array_equal(array[position : position + len(expected)], expected)
        for position, expected in _chunks(len(array), seed, start)
    )


def _chunks(nbytes: int, seed: int, start: int) -> Iterator[tuple[int, np.ndarray]]:
    for position in range(0, nbytes, _CHUNK_WORDS * 8):
        length = min(_CHUNK_WORDS * 8, nbytes - position)
        first, skipped = divmod(start + position, 8)
        words = np.arange(seed + first, seed + first + length // 8 + 2, dtype=np.uint64)
        yield position, (words * _MULTIPLIER).view(np.uint8)[skipped : skipped + length]


def write_pattern(path: Path, nbytes: int, seed: int) -> None:
    """Make a file of the pattern, and sync it."""
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, _BLOCK_NBYTES):
            block = bytearray(min(_BLOCK_NBYTES, nbytes - start))
            fill(block, seed, start)
            part = memoryview(block)
            while part:
                part = part[file.write(part) :]
        os.fsync(file.fileno())


def file_matches(path: Path, nbytes: int, seed: int, offset: int = 0) -> bool:
    """Whether a file holds exactly the pattern behind an offset, read through the page cache."""
    if path.stat().st_size != offset + nbytes:
        return False
    with open(path, "rb") as file:
        file.seek(offset)
        return all(
            matches(file.read(min(_BLOCK_NBYTES, nbytes - start)), seed, start)
            for start in range(0, nbytes, _BLOCK_NBYTES)
        )


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
    def touch(begin: int) -> None:
        part = np.frombuffer(memory, np.uint8)[begin : begin + each : 4096]
        try:
            part.fill(1)
        finally:
            del part  # a traceback that keeps it would keep the memory

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, max(1, nbytes), flags=flags) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        count = os.cpu_count() or 1
        each = -(-len(memory) // count // 4096) * 4096
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(touch, range(0, len(memory), each)))
        yield
