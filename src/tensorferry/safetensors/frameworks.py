"""What loading asks of torch and of NumPy: bytes in memory, and arrays made of them. Neither is imported before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from tensorferry import _core
from tensorferry.safetensors.dtypes import DTYPES, numpy_dtype, torch_dtype, torch_shape
from tensorferry.safetensors.errors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

# From here on memory is on huge pages.
_HUGE_NBYTES = 2 << 20

_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")
_OTHERS = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle", "paddlepaddle")


class Framework(Protocol):
    """A library's arrays. ``data`` is always bytes, as a one-dimensional array of it."""

    on_host: bool  # whether its arrays may be views of host memory

    def empty(self, nbytes: int) -> Any:
        """Return bytes to be filled, where the arrays are to be."""

    def over(self, memory: Any) -> Any:
        """Return host memory, which has some bytes, as bytes of the library; it is kept as long as they are."""

    def from_host(self, data: Any) -> Any:
        """Return an array of the library's on the host where arrays are to be."""

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:
        """Return the shape that the library gives a tensor of the header's; SafetensorError where it has no dtype."""

    def typed(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return bytes as an array; they have that many."""

    def plain(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        """Return bytes as an array of integers, or what else has so many bytes and can be indexed."""

    def window(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        """Return elements of a one-dimensional array, from one on, by strides in elements."""

    def chosen(self, array: Any, lists: tuple[Any, ...]) -> Any:
        """Return what an index of whole slices and lists of positions chooses."""

    def retyped(self, array: Any, dtype: str) -> Any:
        """Return what :meth:`plain` made with the dtype of the format."""


class _Torch:
    """Tensors of torch on a device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self.device = device
        # What files are read into; others get a copy.
        self._read_on = device if device.type == "cuda" else torch.device("cpu")
        self.on_host = self._read_on.type == "cpu"
        self._integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def empty(self, nbytes: int) -> Any:
        if self.on_host and nbytes >= _HUGE_NBYTES:
            return self.over(_core.map_pieces([None], [0], [nbytes]).bytes(0, nbytes))
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._read_on)

    def over(self, memory: Any) -> Any:
        return self._torch.utils.dlpack.from_dlpack(memory)

    def from_host(self, data: Any) -> Any:
        return data if data.device == self.device else data.to(self.device)

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:
        torch_dtype(dtype)
        return torch_shape(dtype, shape, path, name)

    def typed(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return data.view(torch_dtype(dtype)).view(shape)

    def plain(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        return data.view(self._integers[itemsize]).view(shape)

    def window(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return data.as_strided(shape, strides, data.storage_offset() + first)

    def chosen(self, array: Any, lists: tuple[Any, ...]) -> Any:
        tensor = self._torch.tensor
        return array[
            tuple(
                tensor(each, dtype=self._torch.int64, device=array.device)
                if isinstance(each, list)
                else each
                for each in lists
            )
        ]

    def retyped(self, array: Any, dtype: str) -> Any:
        return self.from_host(array.view(torch_dtype(dtype)))


class _NumPy:
    """Arrays of NumPy."""

    on_host = True

    def __init__(self) -> None:
        import numpy as np

        self._numpy = np

    def empty(self, nbytes: int) -> Any:
        if nbytes >= _HUGE_NBYTES:
            return self.over(_core.map_pieces([None], [0], [nbytes]).bytes(0, nbytes))
        return self._numpy.empty(nbytes, self._numpy.uint8)

    def over(self, memory: Any) -> Any:
        return self._numpy.frombuffer(memory, self._numpy.uint8)

    def from_host(self, data: Any) -> Any:
        return data

    def shape(self, dtype: str, shape: tuple[int, ...], path: str, name: str) -> tuple[int, ...]:  # noqa: ARG002
        numpy_dtype(dtype)
        return shape

    def typed(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return data.view(numpy_dtype(dtype)).reshape(shape)

    def plain(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        return data.view(f"u{itemsize}").reshape(shape)

    def window(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return self._numpy.lib.stride_tricks.as_strided(
            data[first:], shape, [stride * data.itemsize for stride in strides]
        )

    def chosen(self, array: Any, lists: tuple[Any, ...]) -> Any:
        intp = self._numpy.intp
        return array[
            tuple(
                self._numpy.array(each, intp) if isinstance(each, list) else each for each in lists
            )
        ]

    def retyped(self, array: Any, dtype: str) -> Any:
        return array.view(numpy_dtype(dtype))


def is_served(name: Any) -> bool:
    """Return whether this is a framework that is not safetensors' alone."""
    return name not in _OTHERS


def framework_of(name: Any, device: Any) -> Framework:
    """Return the framework of a name that safetensors has, for a device.

    Raises
    ------
    SafetensorError
        It is another one, or the device is none of its.
    """
    if name in _NUMPY:
        if device not in ("cpu", None):
            raise SafetensorError(f"Device {device} is not supported for framework {name}")
        return _NumPy()
    if name not in _TORCH:
        known = ", ".join((*_TORCH, *_NUMPY))
        if name in _OTHERS:
            raise SafetensorError(
                f"framework {name!r} is not served here: it has {known} (remedy: safetensors itself, or NumPy's arrays)"
            )
        raise SafetensorError(f"framework {name!r} is invalid (expected one of: {known})")
    return _Torch(torch_device(device))


def torch_device(device: Any) -> Any:
    """Return torch's device for a name, a number (of the accelerator) or a device.

    Raises
    ------
    SafetensorError
        It is none.
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
    """Return CUDA's device with the number it has now, where it can be used at all."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else device
    )


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a library's array."""
    return max(1, DTYPES[dtype].bits // 8)


def nbytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * itemsize
