"""The operations that loading needs from torch and from NumPy: to allocate bytes, and to view bytes as arrays.

Each library is imported only when one of its arrays is requested.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from tensorferry import _core
from tensorferry.safetensors.dtypes import DTYPES, numpy_dtype, torch_dtype, torch_shape
from tensorferry.safetensors.errors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Allocations from this size on (one huge page of x86-64) are backed by huge pages.
_HUGE_NBYTES = 2 << 20

_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")
_OTHERS = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle", "paddlepaddle")


class Framework(Protocol):
    """The arrays of one library, on one device. ``data`` is always a one-dimensional array of bytes of this library."""

    on_host: bool  # whether its arrays can be views of host memory

    def empty(self, nbytes: int) -> Any:
        """Return uninitialized bytes in the memory that files are read into."""

    def wrap(self, memory: Any) -> Any:
        """Return non-empty host memory as bytes of the library, without a copy. They keep the memory alive."""

    def to_device(self, data: Any) -> Any:
        """Return bytes that were read, on the requested device. Copy them if they are elsewhere."""

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:
        """Return the library's shape for the shape in a header. Raise SafetensorError if it lacks the dtype."""

    def as_array(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return bytes as an array of this dtype and shape, which must have the same size."""

    def as_integers(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        """Return bytes as integers of ``itemsize`` bytes, which unlike some other dtypes support every index."""

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        """Return a strided view of a one-dimensional array from element ``first`` on. Strides are in elements."""

    def index_by_lists(self, array: Any, lists: tuple[Any, ...]) -> Any:
        """Index an array by a tuple of full slices and lists of positions."""

    def as_dtype(self, array: Any, dtype: str) -> Any:
        """Return an array of integers from :meth:`as_integers` as the dtype of the format, on the requested device."""


class _Torch:
    """torch's tensors on one device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self.device = device
        # Files are read into the memory of the CPU or of CUDA. Tensors for any other device are copied from the CPU.
        self._read_on = device if device.type == "cuda" else torch.device("cpu")
        self.on_host = self._read_on.type == "cpu"
        self._integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def empty(self, nbytes: int) -> Any:
        if self.on_host and nbytes >= _HUGE_NBYTES:
            return self.wrap(_core.map_pieces([None], [0], [nbytes]).bytes(0, nbytes))
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._read_on)

    def wrap(self, memory: Any) -> Any:
        return self._torch.utils.dlpack.from_dlpack(memory)

    def to_device(self, data: Any) -> Any:
        return data if data.device == self.device else data.to(self.device)

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:
        torch_dtype(dtype)
        return torch_shape(dtype, shape, path, name)

    def as_array(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return data.view(torch_dtype(dtype)).view(shape)

    def as_integers(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        return data.view(self._integers[itemsize]).view(shape)

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return data.as_strided(shape, strides, data.storage_offset() + first)

    def index_by_lists(self, array: Any, lists: tuple[Any, ...]) -> Any:
        tensor = self._torch.tensor
        return array[
            tuple(
                tensor(each, dtype=self._torch.int64, device=array.device)
                if isinstance(each, list)
                else each
                for each in lists
            )
        ]

    def as_dtype(self, array: Any, dtype: str) -> Any:
        return self.to_device(array.view(torch_dtype(dtype)))


class _NumPy:
    """NumPy's arrays."""

    on_host = True

    def __init__(self) -> None:
        import numpy as np

        self._numpy = np

    def empty(self, nbytes: int) -> Any:
        if nbytes >= _HUGE_NBYTES:
            return self.wrap(_core.map_pieces([None], [0], [nbytes]).bytes(0, nbytes))
        return self._numpy.empty(nbytes, self._numpy.uint8)

    def wrap(self, memory: Any) -> Any:
        return self._numpy.frombuffer(memory, self._numpy.uint8)

    def to_device(self, data: Any) -> Any:
        return data

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:  # noqa: ARG002
        numpy_dtype(dtype)
        return shape

    def as_array(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return data.view(numpy_dtype(dtype)).reshape(shape)

    def as_integers(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        return data.view(f"u{itemsize}").reshape(shape)

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return self._numpy.lib.stride_tricks.as_strided(
            data[first:], shape, [stride * data.itemsize for stride in strides]
        )

    def index_by_lists(self, array: Any, lists: tuple[Any, ...]) -> Any:
        intp = self._numpy.intp
        return array[
            tuple(
                self._numpy.array(each, intp) if isinstance(each, list) else each for each in lists
            )
        ]

    def as_dtype(self, array: Any, dtype: str) -> Any:
        return array.view(numpy_dtype(dtype))


def is_supported(name: Any) -> bool:
    """Return False for a framework that safetensors supports and tensorferry does not."""
    return name not in _OTHERS


def framework_of(name: Any, device: Any) -> Framework:
    """Return the framework with one of safetensors' names, for a device.

    Raises
    ------
    SafetensorError
        The framework is unknown or unsupported, or does not have the device.
    """
    if name in _NUMPY:
        if device not in ("cpu", None):
            raise SafetensorError(f"Device {device} is not supported for framework {name}")
        return _NumPy()
    if name not in _TORCH:
        known = ", ".join((*_TORCH, *_NUMPY))
        if name in _OTHERS:
            raise SafetensorError(
                f"framework {name!r} is not supported by tensorferry, which supports {known} (remedy: use safetensors, "
                "or convert NumPy's arrays)"
            )
        raise SafetensorError(f"framework {name!r} is invalid (expected one of: {known})")
    return _Torch(torch_device(device))


def torch_device(device: Any) -> Any:
    """Return torch's device for a name, a device, or a number, which is the index of an accelerator.

    Raises
    ------
    SafetensorError
        The argument does not name a device.
    """
    import torch

    if isinstance(device, torch.device):
        return device if device.type != "cuda" or device.index is not None else _current(device)
    if device is None:
        device = "cpu"
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise SafetensorError(f"device {device!r} is invalid")
    try:
        return torch_device(torch.device(device))
    except RuntimeError as error:
        raise SafetensorError(f"device {device!r} is invalid: {error}") from None


def _current(device: Any) -> Any:
    """Return the "cuda" device with the index of the current device, if CUDA is available."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else device
    )


def itemsize_of(dtype: str) -> int:
    """Return the size in bytes of an element of the library's array."""
    return max(1, DTYPES[dtype].bits // 8)


def nbytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the size in bytes of an array."""
    return math.prod(shape) * itemsize
