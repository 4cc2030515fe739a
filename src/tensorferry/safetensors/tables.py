"""The lookup of the tensors that form one table, for ``tensorferry.Table.from_safetensors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.sources import Source, Stored, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


def find(
    source: Source, names: Sequence[str], framework: str
) -> tuple[list[tuple[Stored, int]], tuple[int, ...], Any]:
    """Return the tensors of a table with their numbers of rows, the shape of a row, and the library's dtype.

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
            raise known.missing(name)
        shape = library.shape(known[name].tensor, known[name].path)
        if not shape:
            raise ValueError(f"name: {name!r} is a scalar, which has no rows")
        tensors.append((known[name], shape))
    (first, (_, *row)), *others = tensors
    for stored, (_, *other_row) in others:
        if (stored.tensor.dtype, other_row) != (first.tensor.dtype, row):
            raise ValueError(
                f"name: {stored.tensor.name!r} has rows of {stored.tensor.dtype} {other_row}, and "
                f"{first.tensor.name!r} of {first.tensor.dtype} {row}"
            )
    rows = [(stored, shape[0]) for stored, shape in tensors]
    return rows, tuple(row), library.dtype(first.tensor.dtype)
