"""The operations that loading needs from torch and from NumPy: to allocate bytes, and to view bytes as arrays.

Each library is imported only when one of its arrays is requested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.safetensors.dtypes import DTYPES, numpy_dtype, torch_dtype, torch_shape
from tensorferry.safetensors.errors import SafetensorError

if TYPE_CHECKING:
    from tensorferry.safetensors.header import Tensor

# Allocations from this size on (one huge page of x86-64) are backed by huge pages.
_HUGE_NBYTES = 2 << 20

_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")
# The frameworks that safetensors supports and tensorferry does not.
OTHERS = ("tf", "tensorflow", "jax", "flax", "mlx", "paddle", "paddlepaddle")


class Framework:
    """The arrays of one library, on one device. ``data`` is always a one-dimensional array of bytes of this library.

    Attributes
    ----------
    name : "pt" or "np"
        The library.
    device : torch.device or "cpu"
        The device.
    on_host : bool
        Whether its arrays can be views of host memory.
    """

    name: str
    device: Any = "cpu"
    on_host = True
    _integers: dict[int, Any]  # an integer dtype for each size in bytes; see as_integers()

    def empty(self, nbytes: int) -> Any:
        """Return an uninitialized array of bytes in the memory that files are read into (of the host or of CUDA)."""
        if self.on_host and nbytes >= _HUGE_NBYTES:
            return self.wrap(_core.map_pieces([None], [0], [nbytes]).bytes(0, nbytes))
        return self._empty(nbytes)

    def _empty(self, nbytes: int) -> Any:
        raise NotImplementedError

    def wrap(self, memory: Any) -> Any:
        """Return non-empty host memory as bytes of the library, without a copy. They keep the memory alive."""
        raise NotImplementedError

    def copy(self, array: Any) -> Any:
        """Return a contiguous copy of an array."""
        raise NotImplementedError

    def to_device(self, array: Any) -> Any:
        """Return an array on the requested device. It is copied if the file was read into other memory."""
        return array

    def dtype(self, name: str) -> Any:
        """Return the library's dtype for a dtype of the format. Raise SafetensorError if it lacks the dtype."""
        raise NotImplementedError

    def shape(self, tensor: Tensor, path: str) -> tuple[int, ...]:  # noqa: ARG002
        """Return the library's shape for a tensor. Raise SafetensorError if it lacks the dtype."""
        self.dtype(tensor.dtype)
        return tensor.shape

    def as_array(self, data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return bytes as an array of this dtype and shape, on the requested device. The sizes must match."""
        array = self.to_device(data).view(self.dtype(dtype))
        return array if len(shape) == 1 else array.reshape(shape)

    def as_integers(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        """Return bytes as integers of ``itemsize`` bytes, for indexing: some other dtypes do not support all of it."""
        return data.view(self._integers[itemsize]).reshape(shape)

    def owner_of(self, array: Any) -> Any:
        """Return the object that exists as long as the memory of an array does, and supports weak references."""
        raise NotImplementedError

    def memory_of(self, owner: Any) -> Any:
        """Return the memory of an object of :meth:`owner_of` as bytes, or None for None."""
        raise NotImplementedError

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        """Return a strided view of a one-dimensional array from element ``first`` on. Strides are in elements."""
        raise NotImplementedError

    def index_by_lists(self, array: Any, lists: tuple[Any, ...]) -> Any:
        """Index an array by a tuple of full slices and lists of positions."""
        return array[tuple(self._index(one) if isinstance(one, list) else one for one in lists)]

    def _index(self, positions: list[int]) -> Any:
        raise NotImplementedError

    def as_dtype(self, array: Any, dtype: str) -> Any:
        """Return an array of integers from :meth:`as_integers` as the dtype of the format, on the requested device."""
        return self.to_device(array.view(self.dtype(dtype)))


class _Torch(Framework):
    """torch's tensors on one device."""

    name = "pt"

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self.device = device
        # Files are read into the memory of the CPU or of CUDA. Tensors for any other device are copied from the CPU.
        self._read_on = device if device.type == "cuda" else torch.device("cpu")
        self.on_host = self._read_on.type == "cpu"
        self._integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def _empty(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._read_on)

    def wrap(self, memory: Any) -> Any:
        return self._torch.utils.dlpack.from_dlpack(memory.__dlpack__())

    def copy(self, array: Any) -> Any:
        return array.clone(memory_format=self._torch.contiguous_format)

    def to_device(self, array: Any) -> Any:
        return array if array.device == self.device else array.to(self.device)

    def dtype(self, name: str) -> Any:
        return torch_dtype(name)

    def shape(self, tensor: Tensor, path: str) -> tuple[int, ...]:
        return torch_shape(tensor.dtype, super().shape(tensor, path), path, tensor.name)

    def owner_of(self, array: Any) -> Any:
        return array.untyped_storage()

    def memory_of(self, owner: Any) -> Any:
        if owner is None:
            return None
        return self._torch.empty(0, dtype=self._torch.uint8, device=owner.device).set_(owner)

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return data.as_strided(shape, strides, data.storage_offset() + first)

    def _index(self, positions: list[int]) -> Any:
        return self._torch.tensor(positions, dtype=self._torch.int64, device=self._read_on)


class _NumPy(Framework):
    """NumPy's arrays."""

    name = "np"
    _integers = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}  # noqa: RUF012

    def __init__(self) -> None:
        import numpy as np

        self._numpy = np

    def _empty(self, nbytes: int) -> Any:
        return self._numpy.empty(nbytes, self._numpy.uint8)

    def wrap(self, memory: Any) -> Any:
        return self._numpy.frombuffer(memory, self._numpy.uint8)

    def copy(self, array: Any) -> Any:
        return array.copy()

    def dtype(self, name: str) -> Any:
        return numpy_dtype(name)

    def as_integers(self, data: Any, itemsize: int, shape: tuple[int, ...]) -> Any:
        return data.view(self._integers.get(itemsize, f"V{itemsize}")).reshape(shape)

    def owner_of(self, array: Any) -> Any:
        return array.base  # the bytes of which it is a view

    def memory_of(self, owner: Any) -> Any:
        return owner

    def strided(
        self, data: Any, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> Any:
        return self._numpy.lib.stride_tricks.as_strided(
            data[first:], shape, [stride * data.itemsize for stride in strides]
        )

    def _index(self, positions: list[int]) -> Any:
        return self._numpy.array(positions, self._numpy.intp)


def framework_of(name: Any, device: Any) -> Framework:
    """Return the framework with one of safetensors' names, for a device.

    Raises
    ------
    SafetensorError
        The framework is unknown or unsupported, or does not have the device.
    """
    if name in _NUMPY:
        if device is not None and str(device) != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework {name}")
        return _NumPy()
    if name not in _TORCH:
        known = ", ".join((*_TORCH, *_NUMPY))
        if name in OTHERS:
            raise SafetensorError(
                f"framework {name!r} is not supported by tensorferry, which supports {known} (remedy: use safetensors, "
                "or convert NumPy's arrays)"
            )
        raise SafetensorError(f"framework {name!r} is invalid (expected one of: {known})")
    return _Torch(_torch_device(device))


def _torch_device(device: Any) -> Any:
    """Return torch's device for a name, a device, or a number, which is the index of an accelerator.

    Raises
    ------
    SafetensorError
        The argument does not name a device.
    """
    import torch

    if device is None:
        device = "cpu"
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise SafetensorError(f"device {device!r} is invalid")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise SafetensorError(f"device {device!r} is invalid: {error}") from None
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


def itemsize_of(dtype: str) -> int:
    """Return the size in bytes of an element of the library's array, which for F4 in torch is a pair."""
    return max(1, DTYPES[dtype].bits // 8)
