"""The settings of a handle as a dataclass: a benchmark runs with them, a sweep varies them, a profile stores them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH


@dataclass(frozen=True)
class Settings:
    """A handle's settings under DeepNVMe's names.

    ``block_size`` is in bytes. With ``engine=None`` the first engine that works is used.
    """

    block_size: int = DEFAULT_BLOCK_NBYTES
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1
    engine: str | None = None

    def as_deepspeed(self) -> dict[str, Any]:
        """Return the settings as the ``aio`` section of DeepSpeed's configuration, which has no engine.

        The flags are JSON booleans, because DeepSpeed treats the string "false" as true.
        """
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "engine"}
