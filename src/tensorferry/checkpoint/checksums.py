"""CRC-32 at memory speed, and the chunks of a file that each have one.

ISA-L's (the package `isal`) where it is installed, else zlib's, which is a few times slower. Both release the GIL.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _find_isal() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    return isal_zlib


_isal = _find_isal()

# Chunk k of a data file is bytes [k * CHUNK_NBYTES, (k + 1) * CHUNK_NBYTES), up to the end of the file. Readers verify
# whole chunks, so that this is what a partial read may read too much, at each end.
CHUNK_NBYTES = 256 * 1024

# The polynomial of CRC-32 (zip, Ethernet), lowest power in the highest bit.
_POLYNOMIAL = 0xEDB88320

crc32: Callable[..., int] = zlib.crc32 if _isal is None else _isal.crc32
"""crc32(buffer, value=0): CRC-32 of the buffer's bytes, continuing from ``value``."""


def crc32_combine(crc1: int, crc2: int, nbytes2: int) -> int:
    """Return the CRC-32 of two byte strings in a row, of which the second has ``nbytes2`` bytes."""
    if nbytes2 < 0:
        raise ValueError(f"nbytes2: {nbytes2} is negative")
    return _combine(crc1, crc2, nbytes2)


def chunk_count(nbytes: int) -> int:
    """Return how many chunks a file of ``nbytes`` bytes has."""
    return -(-nbytes // CHUNK_NBYTES)


def _combine_by_polynomials(crc1: int, crc2: int, nbytes2: int) -> int:
    # Bytes behind the first string multiply its remainder by a power of x; remainders of a sum add.
    return _multiply(_power_of_x(8 * nbytes2), crc1) ^ crc2


@functools.lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


# isal has had it since 1.8.
_combine: Callable[[int, int, int], int] = getattr(_isal, "crc32_combine", _combine_by_polynomials)
