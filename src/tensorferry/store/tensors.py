"""What a stored tensor is besides its bytes: whose array, dtype and shape."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

MAX_DIMENSIONS = 64
_MAX_NBYTES = (1 << 63) - 1


class TensorInfo(NamedTuple):
    """What a tensor is, without its bytes.

    Attributes
    ----------
    dtype : torch.dtype, numpy.dtype or None
        As it was written; None for what has only bytes: buffers, lists of arrays, arrays of other libraries.
    shape : tuple of int
        Of its elements; for what has only bytes, their number.
    nbytes : int
        Bytes.
    """

    dtype: Any
    shape: tuple[int, ...]
    nbytes: int


def info_of(array: Any, nbytes: int) -> TensorInfo:
    """Return what an array of so many bytes is."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return TensorInfo(array.dtype, tuple(array.shape), nbytes)
    if numpy is not None and isinstance(array, numpy.ndarray):
        try:
            text_of(array.dtype)
        except ValueError:
            raise ValueError(
                "array: a dtype whose fields overlap, or are not in their order, cannot be kept (remedy: "
                f"numpy.lib.recfunctions.repack_fields): {array.dtype}"
            ) from None
        return TensorInfo(array.dtype, tuple(array.shape), nbytes)
    return TensorInfo(None, (nbytes,), nbytes)


def new_array(info: TensorInfo) -> Any:
    """Return an array to be filled: a torch tensor, a NumPy array, or a bytearray for what has only bytes."""
    if info.dtype is None:
        return bytearray(info.nbytes)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(info.dtype, torch.dtype):
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    import numpy

    return numpy.empty(info.shape, info.dtype)


def text_of(dtype: Any) -> Any:
    """Return what JSON can keep of a dtype, for :func:`dtype_of`."""
    torch = sys.modules.get("torch")
    if dtype is None:
        return None
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype)
    import numpy

    for text in (dtype.str, dtype.name):  # the second for those of ml_dtypes
        try:
            if numpy.dtype(text) == dtype:
                return f"numpy.{text}"
        except TypeError:
            continue
    return numpy.lib.format.dtype_to_descr(dtype)


def dtype_of(text: Any) -> Any:
    """Return a dtype from its text; ValueError where it is none that has plain bytes."""
    if text is None:
        return None
    if isinstance(text, str) and text.startswith("torch."):
        import torch

        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {text!r} is none of torch's")
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
        raise ValueError(f"dtype {text!r} is not known here") from None
    if dtype.hasobject:
        raise ValueError(f"dtype {text!r} has Python objects")
    return dtype


def checked_info(dtype: Any, shape: Any, nbytes: Any) -> TensorInfo:
    """Return what a manifest says of a tensor; ValueError where that cannot be."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {shape!r} is no list of at most {MAX_DIMENSIONS} lengths")
    for length in shape:
        if type(length) is not int or not 0 <= length <= _MAX_NBYTES:
            raise ValueError(f"shape {shape!r} has a length that no tensor has")
    known = dtype_of(dtype)
    itemsize = 1 if known is None else known.itemsize
    if type(nbytes) is not int or math.prod(shape) * itemsize != nbytes or nbytes > _MAX_NBYTES:
        raise ValueError(f"{nbytes!r} bytes are not those of shape {shape!r} and dtype {dtype!r}")
    return TensorInfo(known, tuple(shape), nbytes)


def _fields(text: list[Any]) -> list[Any]:
    """Return the fields of a structured dtype: JSON has lists where NumPy wants tuples."""
    return [
        tuple(
            _fields(part) if at == 1 and isinstance(part, list) else _tuple(part)
            for at, part in enumerate(field)
        )
        for field in text
    ]


def _tuple(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
