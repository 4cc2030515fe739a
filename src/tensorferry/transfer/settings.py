"""The settings of a handle or file. A benchmark measures settings, a sweep tries several, and a profile stores them.

A handle is DeepNVMe's object for I/O. `import tensorferry` imports this module. Therefore Settings is not a dataclass:
importing dataclasses would add a fifth to the time of that import.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH


class Settings(NamedTuple):
    """A handle's settings under DeepNVMe's names.

    ``block_size`` is in bytes. ``engine`` is how blocks reach the kernel: "io_uring", "libaio" or "threads". With None
    it is the value of TENSORFERRY_ENGINE, or the first engine that works.
    """

    block_size: int = DEFAULT_BLOCK_NBYTES
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1
    engine: str | None = None

    def as_deepspeed(self) -> dict[str, Any]:
        """Return the settings as the ``aio`` section of DeepSpeed's configuration, which has no key for the engine.

        ``single_submit`` and ``overlap_events`` stay booleans: DeepSpeed would take the string "false" for true.
        """
        return {name: value for name, value in self._asdict().items() if name != "engine"}
