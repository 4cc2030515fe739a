"""The dtypes of the format, and their names in torch and NumPy. Each library is imported only when it is needed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.safetensors.errors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import torch


class Dtype(NamedTuple):
    """A dtype of the format.

    Attributes
    ----------
    name : str
        The name in headers.
    bits : int
        The size of one element, where elements are counted as in the header's shape.
    numpy, torch : str or None
        The dtype's name in the library, or None if the library does not have the dtype. One element of
        torch's ``float4_e2m1fn_x2`` packs two F4 elements, so the last dimension in torch is half that in the header.
    """

    name: str
    bits: int
    numpy: str | None
    torch: str | None


# The order of the Dtype enumeration in safetensors' Rust code. Its writer sorts tensors by this order, descending.
DTYPES: dict[str, Dtype] = {
    each.name: each
    for each in (
        Dtype("BOOL", 8, "bool", "bool"),
        Dtype("F4", 4, None, "float4_e2m1fn_x2"),
        Dtype("F6_E2M3", 6, None, None),
        Dtype("F6_E3M2", 6, None, None),
        Dtype("U8", 8, "uint8", "uint8"),
        Dtype("I8", 8, "int8", "int8"),
        Dtype("F8_E5M2", 8, None, "float8_e5m2"),
        Dtype("F8_E4M3", 8, None, "float8_e4m3fn"),
        Dtype("F8_E8M0", 8, None, "float8_e8m0fnu"),
        Dtype("F8_E4M3FNUZ", 8, None, "float8_e4m3fnuz"),
        Dtype("F8_E5M2FNUZ", 8, None, "float8_e5m2fnuz"),
        Dtype("I16", 16, "int16", "int16"),
        Dtype("U16", 16, "uint16", "uint16"),
        Dtype("F16", 16, "float16", "float16"),
        Dtype("BF16", 16, None, "bfloat16"),
        Dtype("I32", 32, "int32", "int32"),
        Dtype("U32", 32, "uint32", "uint32"),
        Dtype("F32", 32, "float32", "float32"),
        Dtype("C64", 64, "complex64", "complex64"),
        Dtype("F64", 64, "float64", "float64"),
        Dtype("I64", 64, "int64", "int64"),
        Dtype("U64", 64, "uint64", "uint64"),
    )
}

NAMES = {
    attribute: each.name
    for each in DTYPES.values()
    for attribute in (each.torch, each.numpy)
    if attribute
}
"""The format's dtypes by their names in torch and NumPy. This also finds NumPy dtypes of ml_dtypes, such as bfloat16:
they have the same names as torch's."""


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a dtype of the format.

    Raises
    ------
    SafetensorError
        The format has no dtype of this name, or the installed torch has no equivalent.
    """
    import torch

    attribute = _known(name).torch
    dtype: Any = getattr(torch, attribute, None) if attribute else None
    if dtype is None:
        raise SafetensorError(f"torch {torch.__version__} has no dtype for {name}")
    return dtype  # type: ignore[no-any-return]


def torch_shape(dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:
    """Return the shape in torch for a shape in the header. They differ for F4, where torch packs two elements in one.

    Raises
    ------
    SafetensorError
        The last dimension of an F4 tensor is odd.
    """
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise SafetensorError(
            f"torch packs two elements of F4 in one, so the last dimension of {list(shape)} must be even",
            path,
            name=name,
        )
    return (*shape[:-1], shape[-1] // 2)


def header_shape(shape: Iterable[int], dtype: str, name: str | None = None) -> tuple[int, ...]:
    """Return the shape in the header for a shape in torch. They differ for F4, where torch packs two elements in one.

    Raises
    ------
    SafetensorError
        The tensor is a scalar, and its dtype packs several elements.
    """
    sizes, bits = tuple(map(int, shape)), DTYPES[dtype].bits
    if bits >= 8:
        return sizes
    if not sizes:
        raise SafetensorError(f"a tensor of {dtype} must have at least one dimension", name=name)
    return (*sizes[:-1], sizes[-1] * 8 // bits)


def name_of(dtype: Any) -> str:
    """Return the name of a torch or NumPy dtype in its library."""
    return str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")


def of_library(dtype: Any) -> str:
    """Return the format's name for a torch dtype, or for a NumPy dtype of either byte order.

    Raises
    ------
    SafetensorError
        The format does not have the dtype.
    """
    name = NAMES.get(name_of(dtype))
    if name is None:
        raise SafetensorError(f"the format has no dtype for {dtype}")
    return name


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's little-endian dtype for a dtype of the format.

    Raises
    ------
    SafetensorError
        The format has no dtype of this name, or NumPy has no equivalent.
    """
    import numpy as np

    attribute = _known(name).numpy
    if attribute is None:
        raise SafetensorError(f"NumPy has no dtype for {name}")
    dtype: np.dtype[Any] = np.dtype(attribute).newbyteorder("<")
    return dtype


def _known(name: str) -> Dtype:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise SafetensorError(f"{name!r} is not a dtype of the format")
    return dtype
