"""The description of a stored tensor: its library, dtype and shape, and their representation in JSON."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from tensorferry.base.checks import MAX_FILE_NBYTES, integer

MAX_DIMENSIONS = 64


class TensorInfo(NamedTuple):
    """The description of a stored tensor.

    Attributes
    ----------
    dtype : torch.dtype, numpy.dtype or None
        The dtype of the array that was written. None for untyped data: buffers, lists of arrays, and arrays of other
        libraries.
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
        # checked_info() refuses more dimensions, so a commit with this tensor could not be opened. NumPy's arrays have
        # at most 64.
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
    """Return an uninitialized array: a torch tensor, a NumPy array, or a bytearray for untyped data."""
    if info.dtype is None:
        return bytearray(info.nbytes)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(info.dtype, torch.dtype):
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    import numpy

    return numpy.empty(info.shape, info.dtype)


def text_of(dtype: Any) -> Any:
    """Return a representation of a dtype for JSON, which :func:`dtype_of` parses."""
    torch = sys.modules.get("torch")
    if dtype is None:
        return None
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype)
    import numpy

    for text in (dtype.str, dtype.name):  # ml_dtypes' dtypes can be identified by their name only
        try:
            if numpy.dtype(text) == dtype:
                return f"numpy.{text}"
        except TypeError:
            continue
    return numpy.lib.format.dtype_to_descr(dtype)


def dtype_of(text: Any) -> Any:
    """Return the dtype for a representation. Raise ValueError if it is unknown, or has Python objects."""
    if text is None:
        return None
    if isinstance(text, str) and text.startswith("torch."):
        import torch

        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {text!r} does not exist in torch")
        return dtype
    import numpy

    try:
        if isinstance(text, str) and text.startswith("numpy."):
            dtype = numpy.dtype(text.removeprefix("numpy."))
        elif isinstance(text, list):
            dtype = numpy.lib.format.descr_to_dtype(_fields(text))
        else:
            raise TypeError
    except (TypeError, ValueError, SyntaxError, KeyError, OverflowError, MemoryError):
        raise ValueError(f"dtype {text!r} is unknown") from None
    if dtype.hasobject:
        raise ValueError(f"dtype {text!r} has Python objects")
    return dtype


def checked_info(dtype: Any, shape: Any, nbytes: Any) -> TensorInfo:
    """Return the description of a tensor from a manifest. Raise ValueError or TypeError if it is invalid."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {shape!r} is not a list of at most {MAX_DIMENSIONS} lengths")
    for length in shape:
        integer(length, "a length of its shape", 0, MAX_FILE_NBYTES)
    known = dtype_of(dtype)
    itemsize = 1 if known is None else known.itemsize
    integer(nbytes, "its size", 0, MAX_FILE_NBYTES)
    if math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"{nbytes!r} bytes do not match shape {shape!r} and dtype {dtype!r}")
    return TensorInfo(known, tuple(shape), nbytes)


def _fields(text: list[Any]) -> list[Any]:
    """Return the fields of a structured dtype, where JSON's lists become the tuples that NumPy requires."""
    return [
        tuple(
            _fields(part) if at == 1 and isinstance(part, list) else _tuple(part)
            for at, part in enumerate(field)
        )
        for field in text
    ]


def _tuple(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
