"""Indexing by torch's rules: the positions that an index selects, and the indexing that remains once these are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.safetensors.errors import SafetensorError, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence


class SliceError(SafetensorError, IndexError, ValueError):
    """An index that the tensor's shape does not allow.

    It is also an IndexError and a ValueError, the types that torch raises. Its text is safetensors' own, which programs
    compare, so the file and the tensor are in a note of the exception instead (Python 3.11 and later).
    """

    def __str__(self) -> str:
        return self.reason


class Selection(NamedTuple):
    """The part of a tensor that an index selects.

    Attributes
    ----------
    positions : tuple of range or list of int
        The positions to read in each dimension, in ascending order without duplicates.
    basic : tuple
        An index to apply to the array of these positions: integers, full slices and None.
    lists : tuple
        An index to apply to the result of ``basic``: full slices and lists of positions. Empty if it is not needed.
    """

    positions: tuple[Sequence[int], ...]
    basic: tuple[Any, ...]
    lists: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that contains only the positions."""
        return tuple(len(each) for each in self.positions)


def select(index: Any, shape: tuple[int, ...], path: str = "", name: str = "") -> Selection | None:
    """Return the part of a tensor that an index selects. Return None for an index with masks or arrays.

    Only the framework can apply such an index, and only to the whole tensor.

    Raises
    ------
    SliceError
        A position is out of range, a step is not positive, or there are too many indices.
    TypeError
        A part of the index has a type that cannot be an index.
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
    if used > len(shape):
        raise refuse(f"{used} dimensions are indexed, and the tensor has {len(shape)}")
    parts = (*parts, Ellipsis)
    has_ellipsis = is_second = False
    positions: list[Sequence[int]] = []
    basic: list[Any] = []
    lists: list[Any] = []
    for part in parts:
        dimension = len(positions)
        if is_second and used < len(shape) and part is not Ellipsis:
            raise refuse("a second ellipsis can only be followed by further ones")
        if part is None:
            basic.append(None)
            lists.append(slice(None))
        elif part is Ellipsis:
            # As in torch, only the first ellipsis covers dimensions.
            is_second, has_ellipsis = has_ellipsis, True
            covered = () if is_second else shape[dimension : dimension + len(shape) - used]
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
        raise refuse(
            f"the lists in the index must have the same length (got {' and '.join(map(str, sorted(lengths)))} "
            "positions)"
        )
    if not any(isinstance(each, list) for each in lists):
        lists = []
    # With an ellipsis in the index, NumPy returns an array where it would otherwise return a scalar.
    return Selection(tuple(positions), (*basic, Ellipsis), tuple(lists))


def _is_plain(part: Any) -> bool:
    """Return False for masks, tensors and arrays, which only the framework can use as an index.

    Raise TypeError for a type that cannot be an index.
    """
    if part is None or part is Ellipsis or isinstance(part, slice):
        return True
    if isinstance(part, list):
        return all(_is_integer(each) for each in part)
    if _is_integer(part):
        return True
    if isinstance(part, (str, bytes, float, complex, dict, set)):
        raise TypeError(
            f"{part!r} is not an index (valid: integers, slices, None, ... and lists of integers)"
        )
    return False


def _is_integer(part: Any) -> bool:
    """Return whether a value is an integer index. Tensors and arrays count if they are integer scalars, not masks."""
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
