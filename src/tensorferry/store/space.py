"""Which bytes of a directory's segments are free: arithmetic only, no file is touched here.

A range is given to the smallest gap that has room for it, and joined with its neighbours when it comes back. So ranges
of few sizes, which is what training writes, find gaps that fit exactly.
"""

from __future__ import annotations

import bisect


class Space:
    """The free ranges of segments, which are known by numbers."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # bytes, segment, begin: sorted
        self._end_of: dict[tuple[int, int], int] = {}  # (segment, begin) -> end
        self._begin_of: dict[tuple[int, int], int] = {}  # (segment, end) -> begin
        self.free_nbytes = 0

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Return segment and offset of so many bytes, which are no longer free; None where no gap is as large."""
        at = bisect.bisect_left(self._by_size, (nbytes, -1, -1))
        if at == len(self._by_size):
            return None
        size, segment, begin = self._by_size[at]
        self._remove(segment, begin, begin + size)
        if size > nbytes:
            self._add(segment, begin + nbytes, begin + size)
        return segment, begin

    def give(self, segment: int, begin: int, nbytes: int) -> None:
        """Free a range; it must not be free already."""
        end = begin + nbytes
        before = self._begin_of.get((segment, begin))
        if before is not None:
            self._remove(segment, before, begin)
            begin = before
        behind = self._end_of.get((segment, end))
        if behind is not None:
            self._remove(segment, end, behind)
            end = behind
        self._add(segment, begin, end)

    @property
    def largest_nbytes(self) -> int:
        """The largest gap's size."""
        return self._by_size[-1][0] if self._by_size else 0

    def drop(self, segment: int) -> list[tuple[int, int]]:
        """Forget the free ranges of a segment to which nothing more is written; return them: offset, bytes."""
        ranges = [(begin, nbytes) for nbytes, number, begin in self._by_size if number == segment]
        for begin, nbytes in ranges:
            self._remove(segment, begin, begin + nbytes)
        return ranges

    def _add(self, segment: int, begin: int, end: int) -> None:
        self._end_of[segment, begin] = end
        self._begin_of[segment, end] = begin
        bisect.insort(self._by_size, (end - begin, segment, begin))
        self.free_nbytes += end - begin

    def _remove(self, segment: int, begin: int, end: int) -> None:
        del self._end_of[segment, begin]
        del self._begin_of[segment, end]
        del self._by_size[bisect.bisect_left(self._by_size, (end - begin, segment, begin))]
        self.free_nbytes -= end - begin
