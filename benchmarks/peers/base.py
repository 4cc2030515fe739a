"""What transferring peers share: memory of each kind, the clock around a transfer, the check."""

from __future__ import annotations

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
