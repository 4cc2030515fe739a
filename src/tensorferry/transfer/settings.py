"""The settings of a handle as data: what a benchmark runs with, a sweep varies and a profile keeps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH


@dataclass(frozen=True)
class Settings:
    """A handle's settings under DeepNVMe's names: ``block_size`` in bytes, ``engine`` None for the first that works."""

    block_size: int = DEFAULT_BLOCK_NBYTES
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1
    engine: str | None = None

    def as_deepspeed(self) -> dict[str, Any]:
        """Return DeepSpeed's ``aio`` section. Its booleans are real ones: DeepSpeed takes the text "false" for true."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "engine"}
