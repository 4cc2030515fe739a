"""DeepSpeed's aio_handle in the benchmark, where DeepSpeed is installed (README.md says how)."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import UnavailableError
from benchmarks.peers.base import HandlePeer


class Handle(HandlePeer):
    """The same calls as on our handle."""

    def __init__(self, nbytes: int, locked: bool) -> None:
        async_io()  # where it cannot be had, that is said now
        super().__init__(nbytes, locked)

    def make(self, **options: Any) -> Any:
        return async_io().aio_handle(**options)


@functools.cache
def async_io() -> Any:
    """DeepSpeed's op, which is compiled at first use, with the ninja of this environment."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    try:
        return AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        raise UnavailableError(f"DeepSpeed's async_io does not build: {error}") from error
