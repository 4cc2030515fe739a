"""Arithmetic that finds the bytes of a file which hold a part of a tensor. It does no I/O.

A tensor is stored in a file in C order. A selection from it is a slice (offsets and lengths in each dimension), or a
list of positions in each dimension. Positions in a tensor are counted in elements, offsets in a file in bytes.

run
    Consecutive bytes that are all selected: :func:`runs`.
slab
    A part of a slice that is itself a slice (a box) and that one read gets: its elements are close together in the
    file, and the read fits into a buffer: :func:`slabs`.
row
    Elements that are contiguous both in the file and in memory: :func:`rows`.
window
    Bytes that are read in one piece: :func:`read_plan`. A run that is large, or far from the next run, is a window of
    its own, which is read directly into the result. Runs that are tiny and close together (a few columns of a matrix)
    are read together with the bytes between them, in windows of bounded size, and then copied from the window to the
    result. Skipping the bytes between such runs would not be faster on any drive.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Runs with fewer than TINY_NBYTES bytes, and on average fewer than GAP_NBYTES between them, are read together in one
# window, if the caller does not set other limits. A drive transfers about GAP_NBYTES in the time that one more read
# takes.
TINY_NBYTES = 16 << 10
GAP_NBYTES = 8 << 10
# The maximum size of a window that also has bytes which are not selected.
WINDOW_NBYTES = 8 << 20


class Slab(NamedTuple):
    """A box of a slice that one read gets.

    Attributes
    ----------
    begin : int
        The position of the box's first element in the stored tensor.
    span : int
        The number of elements of the stored tensor from the box's first to its last, including those between them that
        are not selected.
    offsets : tuple of int
        The start of the box in each dimension, counted from the start of the slice.
    lengths : tuple of int
        The length of the box in each dimension.
    """

    begin: int
    span: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def strides_of(sizes: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a tensor in C order: in elements, or in bytes if ``itemsize`` is an element's size."""
    strides = [itemsize] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def is_inside(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether a slice is inside a tensor."""
    return len(sizes) == len(offsets) == len(lengths) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for size, offset, length in zip(sizes, offsets, lengths, strict=True)
    )


class Runs(NamedTuple):
    """The runs of a selection: one run for each combination of positions in the first ``dims`` dimensions.

    Attributes
    ----------
    dims : int
        The number of leading dimensions that select a run; the other dimensions are inside the runs.
    begin : int
        The start of the first run in the stored tensor, in the unit in which :func:`runs` counts.
    length : int
        The length of a run, in the same unit.
    """

    dims: int
    begin: int
    length: int


def runs(positions: Sequence[Sequence[int]], sizes: Sequence[int], itemsize: int = 1) -> Runs:
    """Return the longest runs of a selection: in bytes, or in elements if ``itemsize`` is 1.

    ``positions`` has the selected positions of each dimension: at least one, in ascending order.
    """
    strides = strides_of(sizes, itemsize)
    dims, length = len(sizes), itemsize
    while dims > 0:
        chosen = positions[dims - 1]
        count = len(chosen)
        if count > 1 and not (strides[dims - 1] == length and chosen[-1] - chosen[0] == count - 1):
            break
        dims, length = dims - 1, length * count
    return Runs(dims, _flat_index(strides, [chosen[0] for chosen in positions]), length)


def contiguous_run(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[int, int] | None:
    """Return (position of the first element, count) of a slice that is a single run, else None."""
    if math.prod(lengths) == 0:
        return 0, 0
    ranges = [range(at, at + count) for at, count in zip(offsets, lengths, strict=True)]
    found = runs(ranges, sizes)
    return None if found.dims else (found.begin, found.length)


class Rows(NamedTuple):
    """A slice as rows of elements, each contiguous in the file and in memory.

    Attributes
    ----------
    dims : int
        The number of leading dimensions that select a row; the other dimensions are inside the rows.
    length : int
        The number of elements in a row.
    begin : int
        The position of the slice's first element in the stored tensor.
    strides : tuple of int
        The strides of the leading dimensions in the stored tensor.
    """

    dims: int
    length: int
    begin: int
    strides: tuple[int, ...]

    def place(self, index: Sequence[int]) -> int:
        """Return the position of a row's first element in the stored tensor."""
        return self.begin + _flat_index(self.strides, index)


def rows(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    memory_strides: Sequence[int],
) -> Rows | None:
    """Return the longest rows of a slice that are contiguous in the file and in the tensor in memory.

    The tensor in memory has the shape ``lengths`` and the strides ``memory_strides``. Return None if its elements
    overlap, or if the slice is empty.
    """
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
    return Rows(dims, count, _flat_index(strides, offsets), strides[:dims])


def slabs(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    max_span: int,
    max_gap: int,
) -> Iterator[Slab]:
    """Divide a slice into slabs and yield them in the order of their positions.

    Parameters
    ----------
    sizes, offsets, lengths : sequence of int
        The sizes of the stored tensor, and the slice.
    max_span : int
        The longest allowed span of a slab in elements, at least 1.
    max_gap : int
        The largest number of consecutive elements inside a slab that are not selected.
    """
    if math.prod(lengths) == 0:
        return
    strides = strides_of(sizes)
    count = len(sizes)
    # A slab has a single index of each dimension before `grouped`, as many consecutive indices of the dimension
    # `grouped` as fit, and all selected indices of the later dimensions. The dimension before `grouped` is the last one
    # that cannot have several indices in a slab: the gap between them exceeds max_gap, or one index exceeds max_span.
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
                _flat_index(strides, _add(offsets, place)),
                _span(strides[grouped:], box),
                place,
                (1,) * grouped + box,
            )


class Window(NamedTuple):
    """Bytes of a tensor that are read in one piece.

    Attributes
    ----------
    begin, nbytes : int
        The range, counted from the tensor's first byte.
    row : int
        The number of the combination of positions in the dimensions before ``split``. The result has one row for each
        combination (which is not a row of :func:`rows`).
    first, stop : int
        The window has the selected positions number ``first`` to ``stop`` (exclusive) of the dimension ``split``.
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
        The first dimension of which a window has several selected positions; the number of dimensions if a window has
        only one position of each.
    exact : bool
        Whether only selected bytes are read: the bytes of the windows, one after the other, are then the result.
    window_nbytes : int
        The size of each window if they are exact, and otherwise of the largest one.
    windows : iterable of Window
        The windows in ascending order; they do not overlap.
    """

    split: int
    exact: bool
    window_nbytes: int
    windows: Iterator[Window]


def read_plan(
    positions: tuple[Sequence[int], ...],
    shape: tuple[int, ...],
    itemsize: int,
    *,
    gap_nbytes: int = GAP_NBYTES,
    tiny_nbytes: int = TINY_NBYTES,
) -> ReadPlan:
    """Return which bytes of a tensor a selection needs; every dimension must have at least one position.

    Runs with fewer than ``tiny_nbytes`` bytes, and fewer than ``gap_nbytes`` between them on average, are read at once.
    """
    strides = strides_of(shape, itemsize)
    leading, begin, unit = runs(positions, shape, itemsize)
    merged = (dim for dim in range(leading, len(shape)) if len(positions[dim]) > 1)
    split, exact = next(merged, len(shape)), True
    while leading > 0:
        chosen, stride = positions[leading - 1], strides[leading - 1]
        count, span = len(chosen), chosen[-1] - chosen[0]
        if count > 1:
            if unit >= tiny_nbytes or span * stride // (count - 1) - unit >= gap_nbytes:
                break
            exact = False
            unit += span * stride
            split = leading - 1
        leading -= 1
    begin -= sum(
        each[0] * stride for each, stride in zip(positions[:leading], strides, strict=False)
    )
    windows = _windows(positions, strides, leading, split, begin, unit, exact)
    return ReadPlan(split, exact, unit if exact else min(unit, WINDOW_NBYTES), windows)


def _windows(
    positions: tuple[Sequence[int], ...],
    strides: tuple[int, ...],
    leading: int,
    split: int,
    begin: int,
    unit: int,
    exact: bool,
) -> Iterator[Window]:
    """Yield the window of each combination of leading positions.

    A window that has bytes which are not selected is divided into several if it would exceed WINDOW_NBYTES.
    """
    pieces = [(0, 0, len(positions[split]) if split < len(positions) else 1, unit)]
    if not exact and unit > WINDOW_NBYTES:
        pieces = list(_split(positions[split], strides[split], unit))
    rows = itertools.product(*positions[:leading])
    for row, places in enumerate(rows):
        at = begin + sum(map(int.__mul__, places, strides))
        for offset, first, stop, nbytes in pieces:
            yield Window(at + offset, nbytes, row, first, stop)


def _split(chosen: Sequence[int], stride: int, unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide a window between positions of the dimension ``split``.

    Yield (offset in the window, number of the first position, number after the last position, bytes) for each part.
    """
    # The bytes of one position, fewer than TINY_NBYTES.
    inner = unit - (chosen[-1] - chosen[0]) * stride
    first = 0
    for at in range(1, len(chosen) + 1):
        if at == len(chosen) or (chosen[at] - chosen[first]) * stride + inner > WINDOW_NBYTES:
            span = chosen[at - 1] - chosen[first]
            yield (chosen[first] - chosen[0]) * stride, first, at, span * stride + inner
            first = at


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the order of dimensions for which the permuted tensor is in C order in memory.

    Return None if there is no such order, because the elements are not contiguous.
    """
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1, dim))
    # The strides of dimensions of length 1 are arbitrary, so these dimensions are ignored.
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= sizes[dim]
    return tuple(order)


def _span(strides: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the number of elements from the first to the last element of a box, both included."""
    return 1 + sum((length - 1) * stride for stride, length in zip(strides, lengths, strict=True))


def _flat_index(strides: Sequence[int], index: Sequence[int]) -> int:
    return sum(stride * i for stride, i in zip(strides, index, strict=True))


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
