"""Allocator of ranges within one block of memory. It only computes offsets.

Temporary ranges are taken from the low end of the block and lasting ranges from the high end. Lasting ranges that lay
between temporary ones would divide the free space, and a large temporary range might not fit.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

ALIGN_NBYTES = 4096


class Arena:
    """Ranges of a memory block of ``nbytes`` bytes. Each has an owner: the hashable object for which it was taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # begin, end
        self._taken: dict[Any, tuple[int, int]] = {}

    def take(self, owner: Hashable, nbytes: int, *, stays: bool = False) -> int | None:
        """Take a free range for ``owner``, and return its offset, or None if no free range is long enough.

        The range has ``nbytes`` rounded up to whole pages. With ``stays``, it is a lasting range.
        """
        nbytes = round_to_pages(nbytes)
        if not nbytes:
            return 0
        order = range(len(self._free) - 1, -1, -1) if stays else range(len(self._free))
        for index in order:
            begin, end = self._free[index]
            if end - begin < nbytes:
                continue
            at = end - nbytes if stays else begin
            left = (begin, at) if stays else (at + nbytes, end)
            self._free[index : index + 1] = [left] if left[1] > left[0] else []
            self._taken[owner] = (at, at + nbytes)
            return at
        return None

    def give_back(self, owner: Hashable) -> None:
        """Free the range of an owner, if it has one."""
        begin, end = self._taken.pop(owner, (0, 0))
        if begin == end:
            return
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


def round_to_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
