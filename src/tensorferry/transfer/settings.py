"""The settings with which files and DeepNVMe's handles move bytes, their default values and their limits.

A block is what one submission to the kernel carries; the queue depth is the number of blocks in flight.

`import tensorferry` imports this module. Therefore Settings is not a dataclass: importing dataclasses would add a fifth
to the time of that import.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from tensorferry.base.checks import parse_nbytes, positive

# A test checks that the core's defaults and the documentation agree with these.
DEFAULT_BLOCK_NBYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 128

# Above these limits a larger queue or block uses more memory without adding useful I/O.
MAX_QUEUE_DEPTH = 32768
MAX_BLOCK_NBYTES = 1 << 30

# The maximum number of worker threads of one handle.
MAX_PARALLELISM = 256


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

    @classmethod
    def of(
        cls,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int | None = None,
        engine: str | None = None,
    ) -> Settings:
        """Return checked settings; one that is None is taken from its environment variable, or is the default.

        Raises
        ------
        ValueError, TypeError
            A setting is not an integer, or out of range.
        """
        return cls(
            _checked("block_size", block_size, DEFAULT_BLOCK_NBYTES, MAX_BLOCK_NBYTES),
            _checked("queue_depth", queue_depth, DEFAULT_QUEUE_DEPTH, MAX_QUEUE_DEPTH),
            bool(single_submit),
            bool(overlap_events),
            _checked("intra_op_parallelism", intra_op_parallelism, 1, MAX_PARALLELISM),
            engine,
        )

    def as_deepspeed(self) -> dict[str, Any]:
        """Return the settings as the ``aio`` section of DeepSpeed's configuration, which has no key for the engine.

        ``single_submit`` and ``overlap_events`` stay booleans: DeepSpeed would take the string "false" for true.
        """
        return {name: value for name, value in self._asdict().items() if name != "engine"}

    def as_environment(self) -> dict[str, str]:
        """Return the settings as environment variables; ``single_submit`` and ``overlap_events`` have none."""
        names = ("engine", "block_size", "queue_depth", "intra_op_parallelism")
        return {_variable(name): str(getattr(self, name)) for name in names}


def _variable(name: str) -> str:
    return f"TENSORFERRY_{name.upper()}"


def _checked(name: str, value: int | None, default: int, maximum: int) -> int:
    if value is not None:
        return positive(value, name, maximum)
    text = os.environ.get(_variable(name))
    if not text:
        return default
    try:
        number = parse_nbytes(text)
    except ValueError:
        raise ValueError(f"{_variable(name)}: {text!r} is not a number such as {default}") from None
    return positive(number, _variable(name), maximum)
