"""The free ranges of a directory's segments: bookkeeping only, without access to files.

A gap is a free range between two used ranges. Allocation is best-fit: a range is placed in the smallest gap that is
large enough. A freed range is merged with the adjacent gaps. Training writes tensors of few different sizes, so most
ranges find a gap of exactly their size.
"""

from __future__ import annotations

import bisect


class Space:
    """The free ranges of segments. Segments are identified by numbers."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # sorted tuples of nbytes, segment, begin
        self._end_of: dict[tuple[int, int], int] = {}  # (segment, begin) -> end
        self._begin_of: dict[tuple[int, int], int] = {}  # (segment, end) -> begin
        self.free_nbytes = 0

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """Allocate ``nbytes``, and return their segment and offset, or None if no gap is large enough."""
        at = bisect.bisect_left(self._by_size, (nbytes, -1, -1))
        if at == len(self._by_size):
            return None
        size, segment, begin = self._by_size[at]
        self._remove(segment, begin, begin + size)
        if size > nbytes:
            self._add(segment, begin + nbytes, begin + size)
        return segment, begin

    def free(self, segment: int, begin: int, nbytes: int) -> None:
        """Free a range, which must not be free already."""
        end = begin + nbytes
        before = self._begin_of.get((segment, begin))
        if before is not None:
            self._remove(segment, before, begin)
            begin = before
        after = self._end_of.get((segment, end))
        if after is not None:
            self._remove(segment, end, after)
            end = after
        self._add(segment, begin, end)

    @property
    def largest_nbytes(self) -> int:
        """The size of the largest gap."""
        return self._by_size[-1][0] if self._by_size else 0

    def drop(self, segment: int) -> list[tuple[int, int]]:
        """Remove the free ranges of a segment that becomes read-only. Return them as pairs of offset and nbytes."""
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
