"""Byte patterns that differ at every position of a file, touched memory, and the stopwatch around a transfer."""

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
_CHUNK_WORDS = 1 << 18  # 2 MiB: a chunk of the pattern fits in the processor's cache
_BLOCK_NBYTES = 64 * MIB  # files are written and compared in blocks of this size
_SLACK_NBYTES = 512 * MIB  # free memory that touch_free_memory() leaves untouched
# With free page reporting (Documentation/mm/free_page_reporting.rst of Linux) a virtual machine returns free memory to
# its host, and pays for page faults of the host when it uses that memory again.
_HOST_TAKES_MEMORY = Path("/sys/module/page_reporting").exists()


class Stopwatch(stopwatch.Stopwatch):
    """The stopwatch of ``tensorferry bench``, which collects the garbage of earlier samples before it starts."""

    def __enter__(self) -> Stopwatch:
        gc.collect()
        super().__enter__()
        return self

    def result(self, nbytes: int, **details: Any) -> dict[str, Any]:
        """Return the measurement in the form that a worker sends to the benchmark."""
        names = ("seconds", "cpu_seconds", "peak_growth_nbytes")
        return {name: getattr(self, name) for name in names} | {"nbytes": nbytes} | details

    def as_value(self, value: float, nbytes: int = 0, **details: Any) -> dict[str, Any]:
        """Return the measurement with ``value`` as its figure, instead of the throughput."""
        return self.result(nbytes) | {"value": value, "details": details}


# Word i of a pattern is (seed + i) times an odd constant in 64-bit arithmetic. A block at the wrong offset, a stale
# block and a missing tail all differ from it.


def fill(buffer: Any, seed: int, start: int = 0) -> None:
    """Fill a byte buffer with the pattern's bytes from ``start`` on."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    for position, expected in _chunks(len(array), seed, start):
        array[position : position + len(expected)] = expected


def matches(buffer: Any, seed: int, start: int = 0) -> bool:
    """Return whether a byte buffer holds the pattern's bytes from ``start`` on."""
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
    """Write the pattern to a file, and sync it."""
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, _BLOCK_NBYTES):
            block = bytearray(min(_BLOCK_NBYTES, nbytes - start))
            fill(block, seed, start)
            part = memoryview(block)
            while part:
                part = part[file.write(part) :]
        os.fsync(file.fileno())


def file_matches(path: Path, nbytes: int, seed: int, offset: int = 0) -> bool:
    """Return whether a file holds the pattern from an offset to its end; it is read through the page cache."""
    if path.stat().st_size != offset + nbytes:
        return False
    with open(path, "rb") as file:
        file.seek(offset)
        return all(
            matches(file.read(min(_BLOCK_NBYTES, nbytes - start)), seed, start)
            for start in range(0, nbytes, _BLOCK_NBYTES)
        )


def drive_nbytes(*ways: str) -> int:
    """Return the bytes that this process has moved from drives ("read"), to drives ("write"), or both (proc(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return sum(int(fields[f"{way}_bytes"]) for way in ways)


def touch_memory(nbytes: int) -> None:
    """Touch ``nbytes`` bytes of memory, which makes the host of a virtual machine back them before a measurement.

    The memory is in huge pages. Ordinary pages would be taken from the fragments between free huge pages, and the
    host's page faults for the huge pages would then still fall into the measurement.
    """
    with _touched(nbytes):
        pass


def touch_free_memory() -> None:
    """Touch nearly all free memory, if the host may have reclaimed it."""
    if _HOST_TAKES_MEMORY:
        touch_memory(psutil.virtual_memory().free - _SLACK_NBYTES)


@contextlib.contextmanager
def little_free_memory(nbytes: int) -> Iterator[None]:
    """Leave only ``nbytes`` bytes of memory free inside the context, if the host may have reclaimed free memory.

    Otherwise the result would depend on chance: a contender that receives fresh memory waits for the host's page
    faults, about a second for each GB, and a contender that receives pages that the page cache has freed does not.
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
            # A traceback would otherwise keep the array, and closing the map fails while an array refers to it.
            del part

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, max(1, nbytes), flags=flags) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        count = os.cpu_count() or 1
        each = -(-len(memory) // count // 4096) * 4096
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(touch, range(0, len(memory), each)))
        yield
