"""What transferring peers share: memory of each kind, the clock around a transfer, the check."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import files, pattern
from benchmarks.harness import MeasurementError
from benchmarks.measure import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def ordinary_tensor(nbytes: int, misalignment: int | None = None) -> torch.Tensor:
    """Plain torch memory, touched; with ``misalignment``, this many bytes past a 4 KiB boundary."""
    if misalignment is None:
        return torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    base = torch.empty(nbytes + 8192, dtype=torch.uint8)
    start = -base.data_ptr() % 4096 + misalignment
    return base[start : start + nbytes].fill_(1)


class TransferPeer:
    """Writes and reads one tensor. Subclasses make ``tensor``, and say how in ``save`` and ``load``."""

    tensor: torch.Tensor
    save: Callable[..., None]
    load: Callable[..., None]

    def prepare(self, *arguments: Any, **options: Any) -> None:
        """Do what is not to be timed, before a write to or else a read from a path, with options."""

    def write(self, path: Any, seed: int, check: bool, **options: Any) -> dict[str, Any]:
        """Time a write of the pattern, and compare the file with it if ``check``."""
        self.fill(seed)
        self.prepare(path, True, **options)
        with self.clock() as watch:
            self.save(path, **options)
        if check and not self.written(path, seed, **options):
            raise MeasurementError("wrote other bytes than it was given")
        return self.result(watch)

    def read(self, path: Any, seed: int, **options: Any) -> dict[str, Any]:
        """Time a read of the pattern, and compare the memory with it."""
        self.prepare(path, False, **options)
        self.clear()
        with self.clock() as watch:
            self.load(path, **options)
        if not self.matches(seed, options.get("offset", 0)):
            raise MeasurementError("read other bytes than the file holds")
        return self.result(watch)

    def fill(self, seed: int) -> None:
        pattern.fill(byte_view(self.tensor), seed)

    def matches(self, seed: int, offset: int) -> bool:
        """Whether memory holds the pattern from ``offset`` on."""
        return pattern.matches(byte_view(self.tensor), seed, offset)

    def written(self, path: Any, seed: int, offset: int = 0, **options: Any) -> bool:
        """Whether the file holds the pattern."""
        return files.file_matches(Path(path), self.tensor.nbytes, seed, offset)

    def clear(self) -> None:
        self.tensor.zero_()

    def clock(self) -> Stopwatch:
        return Stopwatch()

    def result(self, watch: Stopwatch) -> dict[str, Any]:
        return watch.result(self.tensor.nbytes)


class HandlePeer(TransferPeer):
    """Blocking calls on handles, one for each choice of options; subclasses make them."""

    def __init__(self, nbytes: int, locked: bool, options: dict[str, Any] | None = None) -> None:
        self.options = options or {}
        self.handles: dict[str, Any] = {}
        if locked:
            example = torch.empty(0, dtype=torch.uint8)
            self.owner = self.make()
            self.tensor = self.owner.new_cpu_locked_tensor(nbytes, example).fill_(1)
        else:
            self.tensor = ordinary_tensor(nbytes)

    def make(self, **options: Any) -> Any:
        raise NotImplementedError

    def prepare(self, path: Any, write: bool, offset: int = 0, **options: Any) -> None:
        self._handle(options)

    def save(self, path: str, offset: int = 0, **options: Any) -> None:
        succeed(self._handle(options).sync_pwrite(self.tensor, path, offset))

    def load(self, path: str, offset: int = 0, **options: Any) -> None:
        succeed(self._handle(options).sync_pread(self.tensor, path, offset))

    def _handle(self, options: dict[str, Any]) -> Any:
        options = self.options | options
        key = repr(sorted(options.items()))
        if key not in self.handles:
            self.handles[key] = self.make(**options)
        return self.handles[key]


def succeed(code: int) -> None:
    """Raise for what DeepNVMe's calls return where something went wrong; ours raise by themselves."""
    if code != 1:
        raise MeasurementError(f"returned {code}")


def timed_reads(
    read: Callable[[int], object], file_nbytes: int, block_nbytes: int, count: int, seed: int
) -> dict[str, Any]:
    """Answer with the median of the microseconds of so many calls of ``read``, at random offsets."""
    generator = random.Random(seed)
    microseconds = []
    for _ in range(count):
        offset = generator.randrange(file_nbytes // block_nbytes) * block_nbytes
        start = time.perf_counter_ns()
        read(offset)
        microseconds.append((time.perf_counter_ns() - start) / 1000)
    return {
        "value": statistics.median(microseconds),
        "seconds": sum(microseconds) / 1e6,
        "details": {"mean_microseconds": statistics.fmean(microseconds)},
    }
