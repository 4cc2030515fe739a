"""The settings of a handle: a benchmark runs with them, a sweep varies them, a profile stores them.

Every handle has them, so this module imports no dataclasses, which would add a fifth to the time of
`import tensorferry`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH


class Settings(NamedTuple):
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
        return {name: value for name, value in self._asdict().items() if name != "engine"}
