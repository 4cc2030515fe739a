"""Tensors of a model's files as one table: what ``tensorferry.Table.from_safetensors`` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.safetensors.dtypes import numpy_dtype, torch_dtype
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.sources import Source, Stored, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


class Found(NamedTuple):
    """Tensors whose rows follow each other, with their shapes, and the dtype of all."""

    tensors: list[tuple[Stored, tuple[int, ...]]]
    dtype: Any


def find(source: Source, names: Sequence[str], framework: str) -> Found:
    """Return the tensors of a table.

    Raises
    ------
    SafetensorError
        A header or the index is wrong, or there is no such tensor, or the framework has no such dtype.
    ValueError
        They are not rows of one table.
    StorageError
        A file cannot be read.
    """
    if not names:
        raise ValueError("name: a table needs one tensor at least, and this is an empty list")
    library = framework_of(framework, "cpu")
    known = stored_tensors(source)
    tensors = []
    for name in names:
        if name not in known:
            raise SafetensorError("there is no tensor of this name", str(source), name=name)
        stored = known[name]
        tensor = stored.tensor
        shape = library.shape(tensor.dtype, tensor.shape, stored.path, name)
        if not shape:
            raise ValueError(f"name: {name!r} is a scalar, and has no rows")
        tensors.append((stored, shape))
    (first, first_shape), *others = tensors
    for stored, shape in others:
        if (stored.tensor.dtype, shape[1:]) != (first.tensor.dtype, first_shape[1:]):
            raise ValueError(
                f"name: {stored.tensor.name!r} has rows of {stored.tensor.dtype} {list(shape[1:])}, and "
                f"{first.tensor.name!r} of {first.tensor.dtype} {list(first_shape[1:])}"
            )
    is_torch = hasattr(library, "device")
    return Found(tensors, (torch_dtype if is_torch else numpy_dtype)(first.tensor.dtype))
