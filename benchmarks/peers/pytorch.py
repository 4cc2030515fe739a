"""torch.save and torch.load in the benchmark."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.peers.base import TransferPeer, ordinary_tensor


class SaveLoad(TransferPeer):
    """One tensor in torch's own file format."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)

    def write(self, path: str, seed: int, check: bool, sync: bool = True) -> dict[str, Any]:
        del check  # the format has a header; the read is checked
        return self._write(path, seed, False, lambda: self._save(path, sync))

    def read(self, path: str, seed: int) -> dict[str, Any]:
        return self._read(seed, lambda: self._load(path))

    def _save(self, path: str, sync: bool) -> None:
        with open(path, "wb") as file:
            torch.save(self.tensor, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def _load(self, path: str) -> None:
        self.tensor = torch.load(path, weights_only=True)
