"""The lookup of the tensors that form one table, for ``tensorferry.Table.from_safetensors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.sources import Source, Stored, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


class TableTensors(NamedTuple):
    """The tensors of a table, with their shapes, in the order of the table's rows; and their common dtype."""

    tensors: list[tuple[Stored, tuple[int, ...]]]
    dtype: Any


def find(source: Source, names: Sequence[str], framework: str) -> TableTensors:
    """Find the tensors of a table.

    Raises
    ------
    SafetensorError
        A header or the index is invalid, a tensor does not exist, or the framework lacks its dtype.
    ValueError
        The tensors cannot form one table: a tensor is a scalar, or dtypes or shapes of rows differ.
    StorageError
        A file cannot be read.
    """
    if not names:
        raise ValueError("name: a table needs at least one tensor, and the list is empty")
    library = framework_of(framework, "cpu")
    known = stored_tensors(source)
    tensors = []
    for name in names:
        if name not in known:
            raise SafetensorError("no file has a tensor of this name", str(source), name=name)
        stored = known[name]
        tensor = stored.tensor
        shape = library.shape(tensor, stored.path)
        if not shape:
            raise ValueError(f"name: {name!r} is a scalar, which has no rows")
        tensors.append((stored, shape))
    (first, first_shape), *others = tensors
    for stored, shape in others:
        if (stored.tensor.dtype, shape[1:]) != (first.tensor.dtype, first_shape[1:]):
            raise ValueError(
                f"name: {stored.tensor.name!r} has rows of {stored.tensor.dtype} {list(shape[1:])}, and "
                f"{first.tensor.name!r} of {first.tensor.dtype} {list(first_shape[1:])}"
            )
    return TableTensors(tensors, library.dtype(first.tensor.dtype))
