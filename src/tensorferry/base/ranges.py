"""Which bytes of a file hold a part of a tensor: arithmetic only.

A stored tensor lies in a file in C order. What is wanted of it is a slice (offsets and lengths in each dimension), or
positions of each dimension. Places in a tensor are counted in elements, those in a file in bytes.

run
    Bytes that lie together and are all wanted: :func:`runs`.
slab
    A box of a slice whose elements lie close together, so that one read gets them, and which is small enough to go
    through a buffer: :func:`slabs`.
row
    Elements that lie in one run in the file and in memory: :func:`rows`.
window
    Bytes to be read in one piece (:func:`read_plan`): runs that are large, or lie far apart, as they are, one behind
    the other: into the result. Runs that are tiny and dense (a few columns of a matrix) with what lies between them, a
    bounded window at a time, to be picked out of it. No drive reads less than that any faster.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Runs of fewer bytes, with fewer bytes between them on average, are read together: about what a drive reads in the time
# that another read takes.
TINY_NBYTES = 16 << 10
GAP_NBYTES = 8 << 10
# The same for memory of a GPU, to which each run would be a copy of its own.
GPU_GAP_NBYTES = 64 << 10
# Of bytes that are read to pick some out of them, at a time.
WINDOW_NBYTES = 8 << 20


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


def strides_of(sizes: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a tensor in C order, in elements or bytes."""
    strides = [itemsize] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def is_inside(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a slice lies within a tensor."""
    return len(sizes) == len(offsets) == len(lengths) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for size, offset, length in zip(sizes, offsets, lengths, strict=True)
    )


class Runs(NamedTuple):
    """Where chosen positions lie: one run for each combination of those of the first ``dims`` dimensions.

    Attributes
    ----------
    dims : int
        So many dimensions choose among runs; the others are within them.
    begin : int
        Place of the first run, by the first position of every dimension.
    length : int
        Of a run. Both are in units of ``itemsize``.
    """

    dims: int
    begin: int
    length: int


def runs(positions: Sequence[Sequence[int]], sizes: Sequence[int], itemsize: int = 1) -> Runs:
    """Return the longest runs of positions, ascending in each dimension, of which each has some."""
    strides = strides_of(sizes, itemsize)
    dims, length = len(sizes), itemsize
    while dims > 0:
        chosen = positions[dims - 1]
        count = len(chosen)
        if count > 1 and not (strides[dims - 1] == length and chosen[-1] - chosen[0] == count - 1):
            break
        dims, length = dims - 1, length * count
    return Runs(dims, _place(strides, [chosen[0] for chosen in positions]), length)


def contiguous_run(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[int, int] | None:
    """Return (place of the first element, count) of a slice whose elements lie in one run; None if they do not."""
    if math.prod(lengths) == 0:
        return 0, 0
    ranges = [range(at, at + count) for at, count in zip(offsets, lengths, strict=True)]
    found = runs(ranges, sizes)
    return None if found.dims else (found.begin, found.length)


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


class Window(NamedTuple):
    """Bytes of a tensor to be read in one piece.

    Attributes
    ----------
    begin, nbytes : int
        Where they are, from the tensor's first byte.
    row : int
        Which of the result's rows they are for: of all combinations of positions of the dimensions before ``split``.
    first, stop : int
        And which positions of that dimension.
    """

    begin: int
    nbytes: int
    row: int
    first: int
    stop: int


class ReadPlan(NamedTuple):
    """The bytes that a selection needs.

    Attributes
    ----------
    split : int
        The dimension of which a window has several positions; there may be none.
    exact : bool
        Whether nothing is read that is not wanted: the windows, one behind the other, are the result.
    windows : iterable of Window
        In the order of the bytes, none of which is in two of them.
    """

    split: int
    exact: bool
    windows: Iterator[Window]


def read_plan(
    positions: tuple[Sequence[int], ...],
    shape: tuple[int, ...],
    itemsize: int,
    *,
    on_host: bool = True,
) -> ReadPlan:
    """Return which bytes of a tensor have the positions, of which every dimension must have some."""
    strides = strides_of(shape, itemsize)
    leading, begin, unit = runs(positions, shape, itemsize)
    gap_nbytes = GAP_NBYTES if on_host else GPU_GAP_NBYTES
    merged = (dim for dim in range(leading, len(shape)) if len(positions[dim]) > 1)
    split, exact = next(merged, len(shape)), True
    while leading > 0:
        chosen, stride = positions[leading - 1], strides[leading - 1]
        count, span = len(chosen), chosen[-1] - chosen[0]
        if count > 1:
            if unit >= TINY_NBYTES or span * stride // (count - 1) - unit >= gap_nbytes:
                break
            exact = False
            unit += span * stride
            split = leading - 1
        leading -= 1
    begin -= sum(
        each[0] * stride for each, stride in zip(positions[:leading], strides, strict=False)
    )
    windows = _windows(positions, strides, leading, split, begin, unit, exact)
    return ReadPlan(split, exact, windows)


def _windows(
    positions: tuple[Sequence[int], ...],
    strides: tuple[int, ...],
    leading: int,
    split: int,
    begin: int,
    unit: int,
    exact: bool,
) -> Iterator[Window]:
    """Return what each combination of leading positions needs; where it is picked from, perhaps in several pieces."""
    pieces = [(0, 0, len(positions[split]) if split < len(positions) else 1, unit)]
    if not exact and unit > WINDOW_NBYTES:
        pieces = list(_split(positions[split], strides[split], unit))
    rows = itertools.product(*positions[:leading])
    for row, places in enumerate(rows):
        at = begin + sum(map(int.__mul__, places, strides))
        for offset, first, stop, nbytes in pieces:
            yield Window(at + offset, nbytes, row, first, stop)


def _split(chosen: Sequence[int], stride: int, unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut what is read for a dimension's positions: offset, first and last position, bytes."""
    inner = unit - (chosen[-1] - chosen[0]) * stride  # for each of them, less than TINY_NBYTES
    first = 0
    for at in range(1, len(chosen) + 1):
        if at == len(chosen) or (chosen[at] - chosen[first]) * stride + inner > WINDOW_NBYTES:
            span = chosen[at - 1] - chosen[first]
            yield (chosen[first] - chosen[0]) * stride, first, at, span * stride + inner
            first = at


def segments_of(windows: Sequence[Window], data: Any) -> tuple[list[Any], int]:
    """Return what a transfer of windows is given: parts of ``data``, which has room for all, and gaps between them.

    Also where it begins, from the tensor's first byte.
    """
    begin = at = windows[0].begin
    segments: list[Any] = []
    filled = 0
    for window in windows:
        if window.begin > at:
            segments.append(window.begin - at)
        segments.append(data[filled : filled + window.nbytes])
        filled += window.nbytes
        at = window.begin + window.nbytes
    return segments, begin


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
