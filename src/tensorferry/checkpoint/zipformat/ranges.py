"""Which bytes of a file hold a slice of a tensor: arithmetic only.

A stored tensor lies in a file in C order. A slice of it (offsets and lengths in each dimension) is cut into *slabs*:
boxes whose elements lie close together in the file, so that one read gets them, and which are small enough to go
through a buffer. Places in a tensor are counted in elements, those in a file in bytes.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Slab(NamedTuple):
    """A box of a slice.

    Attributes
    ----------
    begin : int
        Place of its first element in the stored tensor.
    span : int
        Elements from its first to its last, what lies between included.
    offsets : tuple of int
        Where in the slice it begins.
    lengths : tuple of int
        Its size.
    """

    begin: int
    span: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor in C order."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def is_inside(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a slice lies within a tensor."""
    return len(sizes) == len(offsets) == len(lengths) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for size, offset, length in zip(sizes, offsets, lengths, strict=True)
    )


def contiguous_run(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[int, int] | None:
    """Return (place of the first element, count) of a slice whose elements lie in one run; None if they do not."""
    count = math.prod(lengths)
    if count == 0:
        return 0, 0
    strides = strides_of(sizes)
    if _span(strides, lengths) != count:
        return None
    return _place(strides, offsets), count


class Rows(NamedTuple):
    """A slice as rows of elements that lie in one run each, in the file and in memory.

    Attributes
    ----------
    dims : int
        So many dimensions count rows; the others are within them.
    length : int
        Elements of a row.
    begin : int
        Place of the slice's first element in the stored tensor.
    strides : tuple of int
        What an index in each of these dimensions adds to that.
    """

    dims: int
    length: int
    begin: int
    strides: tuple[int, ...]

    def place(self, index: Sequence[int]) -> int:
        """Return the place of a row's first element in the stored tensor."""
        return self.begin + _place(self.strides, index)


def rows(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    memory_strides: Sequence[int],
) -> Rows | None:
    """Return the longest rows of a slice and a tensor of its size; None where elements share memory, or are none."""
    needed = 1
    for stride, length in sorted(zip(memory_strides, lengths, strict=True)):
        if length == 0 or (length > 1 and stride < needed):
            return None
        needed += (length - 1) * stride
    strides = strides_of(sizes)
    dims, count = len(sizes), 1
    while dims > 0:
        length = lengths[dims - 1]
        if length > 1 and not strides[dims - 1] == memory_strides[dims - 1] == count:
            break
        dims -= 1
        count *= length
    return Rows(dims, count, _place(strides, offsets), strides[:dims])


def slabs(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    max_span: int,
    max_gap: int,
) -> Iterator[Slab]:
    """Cut a slice into slabs, in the order in which they begin.

    Parameters
    ----------
    sizes, offsets, lengths : sequence of int
        The stored tensor, and the slice of it.
    max_span : int
        The longest span a slab may have, in elements, at least 1.
    max_gap : int
        Unwanted elements in a row beyond which two parts are no slab.
    """
    if math.prod(lengths) == 0:
        return
    strides = strides_of(sizes)
    count = len(sizes)
    # Dimensions before `grouped` are taken one index at a time: they have gaps, or more in one index than a slab holds.
    # Of `grouped` as many indices are taken as fit.
    grouped = 0
    for dim in range(count):
        inner = _span(strides[dim + 1 :], lengths[dim + 1 :])
        if inner > max_span or (lengths[dim] > 1 and strides[dim] - inner > max_gap):
            grouped = dim + 1
    if count == 0:
        yield Slab(0, 1, (), ())
        return
    inner_strides, inner_lengths = strides[grouped + 1 :], lengths[grouped + 1 :]
    inner = _span(inner_strides, inner_lengths)
    step = max(1, (max_span - inner) // strides[grouped] + 1)
    rest = (0,) * (count - grouped - 1)
    for index in itertools.product(*map(range, lengths[:grouped])):
        for first in range(0, lengths[grouped], step):
            box = (min(step, lengths[grouped] - first), *inner_lengths)
            place = (*index, first, *rest)
            yield Slab(
                _place(strides, _sum(offsets, place)),
                _span(strides[grouped:], box),
                place,
                (1,) * grouped + box,
            )


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a tensor is in C order; None if its elements do not fill one range."""
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1, dim))
    # Strides of dimensions of length 1 say nothing; those dimensions may stand anywhere.
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= sizes[dim]
    return tuple(order)


def _span(strides: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the elements from the first to the last of a box, both included."""
    return 1 + sum((length - 1) * stride for stride, length in zip(strides, lengths, strict=True))


def _place(strides: Sequence[int], index: Sequence[int]) -> int:
    return sum(stride * i for stride, i in zip(strides, index, strict=True))


def _sum(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
