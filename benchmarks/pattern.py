"""Bytes that differ at every position of a file, made and checked at memory speed.

Word *i* of a pattern is ``(seed + i) * an odd constant`` in 64-bit arithmetic: a block in the wrong
place, a stale block or a lost tail all show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_WORDS = 1 << 18  # 2 MiB: the words made stay in the processor's cache


def fill(buffer: Any, seed: int, start: int = 0) -> None:
    """Fill a byte buffer with the pattern's bytes from ``start`` on."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    for position, expected in _chunks(len(array), seed, start):
        array[position : position + len(expected)] = expected


def matches(buffer: Any, seed: int, start: int = 0) -> bool:
    """Whether a byte buffer holds the pattern's bytes from ``start`` on."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    return all(
        np.array_equal(array[position : position + len(expected)], expected)
        for position, expected in _chunks(len(array), seed, start)
    )


def _chunks(nbytes: int, seed: int, start: int) -> Iterator[tuple[int, np.ndarray]]:
    for position in range(0, nbytes, _CHUNK_WORDS * 8):
        length = min(_CHUNK_WORDS * 8, nbytes - position)
        first, skipped = divmod(start + position, 8)
        words = np.arange(seed + first, seed + first + length // 8 + 2, dtype=np.uint64)
        yield position, (words * _MULTIPLIER).view(np.uint8)[skipped : skipped + length]
