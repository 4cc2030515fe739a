"""An index, by torch's rules, as the bytes it needs; arithmetic only.

``select`` says which positions of each dimension an index chooses, and what is left to do with an array of just these.
``read_plan`` says which bytes of the tensor have them:

- runs that are large, or lie far apart, are read as they are, one behind the other: into the result;
- runs that are tiny and dense (a few columns of a matrix) are read with what lies between them, a bounded window at a
  time, and picked out of it. No drive reads less than that any faster.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.safetensors.errors import SafetensorError, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Runs of fewer bytes, with fewer bytes between them than the core passes over, are read together.
TINY_NBYTES = 16 << 10
GAP_NBYTES = 64 << 10
# Of bytes that are read to pick some out of them, at a time.
WINDOW_NBYTES = 8 << 20


class SliceError(SafetensorError, IndexError, ValueError):
    """An index that the tensor's shape does not allow; of torch's kinds as well as of the format's.

    Its text is safetensors', which programs compare; a note says of which file and tensor.
    """

    def __str__(self) -> str:
        return self.reason


class Selection(NamedTuple):
    """What an index chooses of a tensor.

    Attributes
    ----------
    positions : tuple of range or list of int
        Of each dimension, ascending, each once: what has to be read.
    basic : tuple
        An index for an array of just these: integers, whole slices and None.
    lists : tuple
        And one for what that gives: whole slices, and lists of positions; empty where there are none.
    """

    positions: tuple[Sequence[int], ...]
    basic: tuple[Any, ...]
    lists: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array of just the positions."""
        return tuple(len(each) for each in self.positions)


def select(index: Any, shape: tuple[int, ...], path: str = "", name: str = "") -> Selection | None:
    """Return what an index chooses of a tensor; None where only the whole tensor can tell (masks, tensors).

    Raises
    ------
    SliceError
        A position is out of range, a step is not positive, there are too many indices.
    TypeError
        Something is no index.
    """

    def refuse(reason: str) -> SliceError:
        error = SliceError(reason, path, name=name)
        if hasattr(error, "add_note"):  # Python 3.11 and later
            error.add_note(f"{path!r}: tensor {name!r} of the shape {shortened(list(shape))}")
        return error

    parts = index if isinstance(index, tuple) else (index,)
    if not all(_is_plain(part) for part in parts):
        return None
    used = sum(part is not None and part is not Ellipsis for part in parts)
    ellipses = sum(part is Ellipsis for part in parts)
    if used > len(shape):
        raise refuse(f"{used} dimensions are indexed, and there are {len(shape)}")
    if ellipses == 0:
        parts = (*parts, Ellipsis)
    if ellipses > 1:
        raise refuse("there is more than one ellipsis")
    positions: list[Sequence[int]] = []
    basic: list[Any] = []
    lists: list[Any] = []
    for part in parts:
        dimension = len(positions)
        if part is None:
            basic.append(None)
            lists.append(slice(None))
        elif part is Ellipsis:
            covered = shape[dimension : dimension + len(shape) - used]
            positions += [range(length) for length in covered]
            basic += [slice(None)] * len(covered)
            lists += [slice(None)] * len(covered)
        elif isinstance(part, slice):
            positions.append(_range_of(part, shape[dimension], refuse))
            basic.append(slice(None))
            lists.append(slice(None))
        elif isinstance(part, list):
            wanted = [_position(each, shape, dimension, refuse) for each in part]
            chosen = sorted(set(wanted))
            place = {position: at for at, position in enumerate(chosen)}
            positions.append(chosen)
            basic.append(slice(None))
            lists.append([place[position] for position in wanted])
        else:
            at = _position(part, shape, dimension, refuse)
            positions.append(range(at, at + 1))
            basic.append(0)
    lengths = {len(each) for each in lists if isinstance(each, list)} - {1}
    if len(lengths) > 1:
        raise refuse(f"its lists have {' and '.join(map(str, sorted(lengths)))} positions")
    if not any(isinstance(each, list) for each in lists):
        lists = []
    # NumPy gives an array, and no scalar, where the index has an ellipsis.
    return Selection(tuple(positions), (*basic, Ellipsis), tuple(lists))


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
    positions: tuple[Sequence[int], ...], shape: tuple[int, ...], itemsize: int
) -> ReadPlan:
    """Return which bytes of a tensor have the positions, of which every dimension must have some."""
    strides = strides_of(shape, itemsize)
    leading, unit, begin, exact, split = len(shape), itemsize, 0, True, len(shape)
    while leading > 0:
        chosen, stride = positions[leading - 1], strides[leading - 1]
        count, span = len(chosen), chosen[-1] - chosen[0]
        if count > 1:
            gap = span * stride // (count - 1) - unit
            if not (exact and span == count - 1 and unit == stride):
                if unit >= TINY_NBYTES or gap >= GAP_NBYTES:
                    break
                exact = False
            unit += span * stride
            split = leading - 1
        begin += chosen[0] * stride
        leading -= 1
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


def strides_of(shape: tuple[int, ...], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in bytes or elements."""
    strides = [itemsize] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * shape[at + 1]
    return tuple(strides)


def is_contiguous(positions: tuple[Sequence[int], ...], shape: tuple[int, ...]) -> bool:
    """Return whether the positions are one run of elements."""
    split = next((at for at, each in enumerate(positions) if len(each) != 1), len(shape))
    rest = positions[split + 1 :]
    if split < len(shape):
        chosen = positions[split]
        if chosen[-1] - chosen[0] != len(chosen) - 1:
            return False
    return all(len(each) == length for each, length in zip(rest, shape[split + 1 :], strict=True))


def count_of(positions: tuple[Sequence[int], ...]) -> int:
    """Return how many elements are chosen."""
    return math.prod(len(each) for each in positions)


def _is_plain(part: Any) -> bool:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return True
    if isinstance(part, list):
        return all(_is_integer(each) for each in part)
    if _is_integer(part):
        return True
    if isinstance(part, (str, bytes, float, complex, dict, set)):
        raise TypeError(
            f"{part!r} is no index: integers, slices, None, ... and lists of integers are"
        )
    return False


def _is_integer(part: Any) -> bool:
    """Return whether this is an integer; a tensor or array with one element is left to its library."""
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        return False
    return getattr(part, "dtype", None) is None or (
        getattr(part, "ndim", 0) == 0 and not str(part.dtype).endswith("bool")
    )


def _position(part: Any, shape: tuple[int, ...], dimension: int, refuse: Any) -> int:
    at, length = part.__index__(), shape[dimension]
    if not -length <= at < length:
        raise refuse(f"Invalid index {at} for dimension {dimension} of size {length}")
    return int(at % length)


def _range_of(part: slice, length: int, refuse: Any) -> range:
    if part.step is not None and part.step.__index__() <= 0:
        raise refuse(f"a step of {part.step} is not positive")
    return range(*part.indices(length))
