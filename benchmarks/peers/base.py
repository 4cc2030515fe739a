"""What transferring peers share: memory of each kind, the clock around a transfer, the check."""

from __future__ import annotations

import random
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
    """Writes and reads one tensor. Subclasses fill ``self.tensor`` and give the transfers."""

    tensor: torch.Tensor

    def _write(
        self, path: str, seed: int, check: bool, transfer: Callable[[], object], offset: int = 0
    ) -> dict[str, Any]:
        """Time a write of the pattern, and compare the file with it if ``check``."""
        pattern.fill(byte_view(self.tensor), seed)
        with Stopwatch() as watch:
            transfer()
        if check and not files.file_matches(Path(path), self.tensor.nbytes, seed, offset):
            raise MeasurementError("wrote other bytes than it was given")
        return watch.result(self.tensor.nbytes)

    def _read(self, seed: int, transfer: Callable[[], object], offset: int = 0) -> dict[str, Any]:
        """Time a read of the pattern from ``offset`` on, and compare the memory with it."""
        self.tensor.zero_()
        with Stopwatch() as watch:
            transfer()
        if not pattern.matches(byte_view(self.tensor), seed, offset):
            raise MeasurementError("read other bytes than the file holds")
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

    def write(
        self, path: str, seed: int, check: bool, offset: int = 0, **options: Any
    ) -> dict[str, Any]:
        call = self._handle(options).sync_pwrite
        return self._write(
            path, seed, check, lambda: succeed(call(self.tensor, path, offset)), offset
        )

    def read(self, path: str, seed: int, offset: int = 0, **options: Any) -> dict[str, Any]:
        call = self._handle(options).sync_pread
        return self._read(seed, lambda: succeed(call(self.tensor, path, offset)), offset)

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
    """Answer with the microseconds of each of so many calls of ``read``, at random offsets."""
    generator = random.Random(seed)
    microseconds = []
    for _ in range(count):
        offset = generator.randrange(file_nbytes // block_nbytes) * block_nbytes
        start = time.perf_counter_ns()
        read(offset)
        microseconds.append((time.perf_counter_ns() - start) / 1000)
    return {"microseconds": microseconds}
