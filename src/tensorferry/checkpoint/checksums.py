"""CRC-32 at memory speed, by the core, and the chunks of a file that each have one.

``crc32(buffer, crc=0)`` continues from ``crc``, and lets go of the GIL where the buffer is large;
``crc32_combine(crc, next_crc, nbytes)`` is that of two byte strings in a row, of which the second has
``nbytes`` bytes.
"""

from __future__ import annotations

from tensorferry._core import crc32, crc32_combine

__all__ = ["CHUNK_NBYTES", "chunk_count", "crc32", "crc32_combine"]

# Chunk k of a data file is bytes [k * CHUNK_NBYTES, (k + 1) * CHUNK_NBYTES), up to the end of the file. Readers verify
# whole chunks, so that this is what a partial read may read too much, at each end.
CHUNK_NBYTES = 256 * 1024


def chunk_count(nbytes: int) -> int:
    """Return how many chunks a file of ``nbytes`` bytes has."""
    return -(-nbytes // CHUNK_NBYTES)
