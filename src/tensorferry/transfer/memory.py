"""Memory that the device can use as it is: page-aligned, on huge pages, page-locked where the system allows."""

from __future__ import annotations

import math
import operator
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensorferry import _core
from tensorferry.base.checks import integer
from tensorferry.base.warned import warn
from tensorferry.transfer import arrays
from tensorferry.transfer.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy
    import torch
    from numpy.typing import NDArray

    _Scalar = TypeVar("_Scalar", bound=numpy.generic)

_MAX_ADDRESS = (1 << 64) - 1

_warned = False


@overload
def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor: ...
@overload
def empty(
    shape: int | Sequence[int], dtype: numpy.dtype[_Scalar] | type[_Scalar]
) -> NDArray[_Scalar]: ...
@overload
def empty(shape: int | Sequence[int], dtype: str | type[Any]) -> NDArray[Any]: ...
def empty(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """Return an array in memory that needs no copy on its way to or from a file.

    It is page-aligned, on huge pages from 2 MiB on, and page-locked as far as RLIMIT_MEMLOCK lets it (beyond, it is
    ordinary memory, with one warning). The memory goes with the last array that shares it.

    Where this process uses CUDA already (torch has initialised it, or GPU memory was moved by tensorferry), it is
    registered with CUDA, too: copies between it and GPUs are asynchronous, and RLIMIT_MEMLOCK is no limit. CUDA is
    never initialised for that alone: that would take memory of the GPU, and forbid ``fork()``.

    Parameters
    ----------
    shape : int or sequence of int
        The array's shape.
    dtype : torch.dtype, numpy.dtype or what numpy.dtype() takes, optional
        A torch dtype, or None for torch's default, gives a torch tensor; anything else a NumPy array.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        C-contiguous; the values are zeros.

    Raises
    ------
    ValueError
        A length is negative.
    TypeError
        A length is no integer, or the dtype is none.
    ModuleNotFoundError
        The library that the dtype is of is not installed.
    MemoryError
        The system has no such memory.
    """
    lengths = _lengths(shape)
    if dtype is None:
        try:
            import torch
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "dtype: none is given, which asks for torch's default one, and torch is not installed; give NumPy's, "
                'as in empty(10, "float32")',
                name="torch",
            ) from None
        dtype = torch.get_default_dtype()
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(dtype, torch_module.dtype):
        return locked_tensor(math.prod(lengths), dtype)[0].view(lengths)
    try:
        import numpy
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"dtype: {dtype!r} is NumPy's, and NumPy is not installed", name="numpy"
        ) from None
    try:
        element = numpy.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype: {dtype!r} is neither torch's nor NumPy's: {error}") from None
    if element.hasobject:
        raise ValueError(f"dtype: {element} holds Python objects")
    count = math.prod(lengths)
    if count * element.itemsize == 0:
        return numpy.empty(lengths, element)
    memory, _ = locked_memory(count * element.itemsize)
    return numpy.frombuffer(memory, numpy.uint8).view(element).reshape(lengths)


def _lengths(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = (
            (operator.index(shape),)
            if hasattr(shape, "__index__")
            else tuple(map(operator.index, shape))
        )
    except TypeError:
        raise TypeError(f"shape: {shape!r} is neither an integer nor several") from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape: {shape!r} has a negative length")
    return lengths


def locked_tensor(count: int, dtype: Any) -> tuple[Any, bool]:
    """Return a one-dimensional torch tensor of ``count`` zeros, and whether its memory is page-locked."""
    import torch
    import torch.utils.dlpack

    nbytes = count * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu"), False
    memory, locked = locked_memory(nbytes)
    storage = torch.utils.dlpack.from_dlpack(memory).untyped_storage()
    # A tensor that is no view: callers who watch for its end would never see that of a view's hidden base.
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (count,), (1,)), locked


def elements_like(num_elem: int, example: Any) -> tuple[int, Any]:
    """Return a number of elements and the dtype of an example, checked, for :func:`locked_tensor`."""
    if example is None:
        raise TypeError("example_tensor: an example is needed for the dtype")
    num_elem = integer(num_elem, "num_elem", 0)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(example, torch.dtype):
        raise TypeError(
            f"example_tensor: {example} is a dtype; give a tensor of it, such as torch.empty(0, dtype={example})"
        )
    if torch is None or not isinstance(example, torch.Tensor):
        raise TypeError(f"example_tensor: {type(example).__name__} is no torch tensor")
    return num_elem, example.dtype


def free_locked_tensor(tensor: Any) -> bool:
    """Unlock a tensor made by :func:`locked_tensor`; False if it is none, or was freed before."""
    address, nbytes, _, location = memory_of(tensor, writable=False, name="tensor")
    return location is None and nbytes > 0 and _core.give_back(address)


def free_locked_memory(address: int) -> bool:
    """Unlock the tensor made by :func:`locked_tensor` that begins at an address."""
    try:
        address = operator.index(address)
    except TypeError:
        raise TypeError(f"address: {type(address).__name__} is no integer") from None
    return 0 < address <= _MAX_ADDRESS and _core.give_back(address)


def is_pinned(buffer: Any) -> bool:
    """Return whether a buffer is page-locked: by torch, by tensorferry, or by CUDA for it. GPU memory is not."""
    if hasattr(buffer, "is_pinned") and buffer.is_pinned():
        return True
    address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
    return location is None and nbytes > 0 and _core.is_locked(address, nbytes)


def is_lent(buffer: Any) -> bool:
    """Return whether a buffer lies in a tensor made by :func:`locked_tensor`, locked or not, and not freed."""
    address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
    return location is None and nbytes > 0 and _core.is_lent(address, nbytes)


def bounce_pool_nbytes() -> int:
    """Return the size of a bounce pool, in bytes; each device in use has one."""
    return _core.bounce_pool_nbytes()


def set_bounce_pool_nbytes(nbytes: int) -> None:
    """Set the size of bounce pools: the only memory through which unaligned arrays are copied.

    The default is 32 MiB, or the environment variable TENSORFERRY_BOUNCE_POOL_NBYTES. Each device in use has a pool, 16
    devices at most; others share them. Buffers in use are not cut short; the new size holds for the blocks that follow.
    GPU memory passes through page-locked memory of twice that size, which is there from a device's first transfer on.

    Raises
    ------
    ValueError
        It is less than 1 MiB.
    """
    if nbytes < _core.MIN_BOUNCE_POOL_NBYTES:
        raise ValueError(f"nbytes: {nbytes} is less than {_core.MIN_BOUNCE_POOL_NBYTES}")
    _core.set_bounce_pool_nbytes(nbytes)


def locked_memory(nbytes: int) -> tuple[Any, bool]:
    """Return memory that offers the buffer protocol and DLPack, and whether it is page-locked; see :func:`empty`."""
    global _warned
    if nbytes > sys.maxsize:
        raise MemoryError(f"cannot allocate {nbytes} bytes")
    memory, locked = _core.allocate(nbytes, True, gpu_in_use())
    if not locked and not _warned:
        _warned = True
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        warn(
            f"cannot lock {nbytes} bytes of memory: RLIMIT_MEMLOCK is {limit} bytes; carrying on with unlocked "
            "memory (remedy: ulimit -l unlimited)"
        )
    return memory, locked


def gpu_in_use() -> int:
    """Return a GPU whose context is there already; -1 where there is none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return arrays.last_gpu


def _set_from_environment() -> None:
    value = os.environ.get("TENSORFERRY_BOUNCE_POOL_NBYTES")
    if not value:
        return
    try:
        set_bounce_pool_nbytes(int(value))
    except ValueError as error:
        raise ValueError(f"TENSORFERRY_BOUNCE_POOL_NBYTES={value!r}: {error}") from None


_set_from_environment()
