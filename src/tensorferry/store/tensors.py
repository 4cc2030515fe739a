"""The description of a stored tensor, and the text of its dtype in a manifest.

A manifest may name a dtype that this process does not know, because the package that defines it was not imported. The
bytes of such a tensor can be read into an array of the caller, and an error is raised only where its dtype is needed.
"""

from __future__ import annotations

import ast
import functools
import math
import sys
from typing import Any, NamedTuple

MAX_DIMENSIONS = 64
# The size of the chunks, each of which has a CRC-32.
CHUNK_NBYTES = 256 << 10


class TensorInfo(NamedTuple):
    """The description of a stored tensor.

    Attributes
    ----------
    dtype : torch.dtype, numpy.dtype or None
        The dtype of the array that was written. None for untyped data: buffers, lists of arrays, and arrays of other
        libraries. A str, its name, if the package that defines the dtype was not imported.
    shape : tuple of int
        The shape of the array. For untyped data, a tuple of the number of bytes.
    nbytes : int
        The size in bytes.
    """

    dtype: Any
    shape: tuple[int, ...]
    nbytes: int


def info_of(array: Any, nbytes: int) -> TensorInfo:
    """Return the description of an array with ``nbytes`` bytes."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        # A manifest with more dimensions is refused. NumPy's arrays have at most 64.
        if array.dim() > MAX_DIMENSIONS:
            raise ValueError(
                f"array: a tensor of {array.dim()} dimensions cannot be stored (the maximum is {MAX_DIMENSIONS})"
            )
        return TensorInfo(array.dtype, tuple(array.shape), nbytes)
    if numpy is not None and isinstance(array, numpy.ndarray):
        try:
            text_of(array.dtype)
        except ValueError:
            raise ValueError(
                f"array: a dtype with fields that overlap or are out of order cannot be stored (got {array.dtype}; "
                "remedy: numpy.lib.recfunctions.repack_fields)"
            ) from None
        return TensorInfo(array.dtype, tuple(array.shape), nbytes)
    return TensorInfo(None, (nbytes,), nbytes)


def new_array(info: TensorInfo) -> Any:
    """Return an uninitialized array: a torch tensor, a NumPy array, or a bytearray for untyped data.

    Raises
    ------
    ValueError
        The dtype is unknown.
    """
    if info.dtype is None:
        return bytearray(info.nbytes)
    if isinstance(info.dtype, str):
        raise ValueError(
            f"dtype {info.dtype!r} is unknown here (remedy: import the package that defines it, for example ml_dtypes, "
            "or read the bytes into an array with out=)"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(info.dtype, torch.dtype):
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    import numpy

    return numpy.empty(info.shape, info.dtype)


@functools.lru_cache(256)
def text_of(dtype: Any) -> str | None:
    """Return the text of a dtype, which :func:`resolved` understands. Raise ValueError if NumPy cannot describe it."""
    torch = sys.modules.get("torch")
    if dtype is None or isinstance(dtype, str):
        return dtype
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype)
    import numpy

    for text in (dtype.str, dtype.name):  # ml_dtypes' dtypes can be identified by their name only
        try:
            if numpy.dtype(text) == dtype:
                return f"numpy.{text}"
        except TypeError:
            continue
    return f"numpy.{numpy.lib.format.dtype_to_descr(dtype)}"


def resolved(info: TensorInfo) -> TensorInfo:
    """Return a description of a manifest with the dtype in place of its text, if the dtype is known and fits."""
    if not isinstance(info.dtype, str):
        return info
    library, _, name = info.dtype.partition(".")
    try:
        if library == "torch":
            import torch

            found: Any = getattr(torch, name)
            assert isinstance(found, torch.dtype)
        else:
            import numpy

            fields: Any = ast.literal_eval(name) if name.startswith("[") else name
            found = numpy.lib.format.descr_to_dtype(fields)
        if (
            getattr(found, "hasobject", False)
            or found.itemsize * math.prod(info.shape) != info.nbytes
        ):
            return info
        return info._replace(dtype=found)
    except Exception:  # NumPy raises exceptions of many types for damaged texts
        return info
