"""DeepSpeed's aio_handle in the benchmark, where DeepSpeed is installed (README.md says how)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import MeasurementError, UnavailableError
from benchmarks.peers.base import TransferPeer, ordinary_tensor


class Handle(TransferPeer):
    """The same calls as on our handle."""

    def __init__(self, nbytes: int, locked: bool) -> None:
        self.module = async_io()
        self.handles: dict[str, Any] = {}
        if locked:
            example = torch.empty(0, dtype=torch.uint8)
            self.owner = self._handle({})
            self.tensor = self.owner.new_cpu_locked_tensor(nbytes, example).fill_(1)
        else:
            self.tensor = ordinary_tensor(nbytes)

    def write(
        self, path: str, seed: int, check: bool, offset: int = 0, **options: Any
    ) -> dict[str, Any]:
        handle = self._handle(options)
        return self._write(
            path,
            seed,
            check,
            lambda: _succeed(handle.sync_pwrite(self.tensor, path, offset)),
            offset,
        )

    def read(self, path: str, seed: int, offset: int = 0, **options: Any) -> dict[str, Any]:
        handle = self._handle(options)
        return self._read(
            seed, lambda: _succeed(handle.sync_pread(self.tensor, path, offset)), offset
        )

    def _handle(self, options: dict[str, Any]) -> Any:
        key = repr(sorted(options.items()))
        if key not in self.handles:
            self.handles[key] = self.module.aio_handle(**options)
        return self.handles[key]


def async_io() -> Any:
    """DeepSpeed's op, which is compiled at first use, with the ninja of this environment."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    try:
        return AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        raise UnavailableError(f"DeepSpeed's async_io does not build: {error}") from error


def _succeed(code: int) -> None:
    if code != 1:
        raise MeasurementError(f"returned {code}")
