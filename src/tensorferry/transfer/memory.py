"""Memory for I/O without copies: page-aligned, on huge pages, and page-locked if the system allows it.

Arrays in other memory may be unaligned. They are copied through bounce buffers, which this module sizes.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensorferry import _core
from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import integer
from tensorferry.transfer import arrays
from tensorferry.transfer.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy
    import torch
    from numpy.typing import NDArray

    _Scalar = TypeVar("_Scalar", bound=numpy.generic)

_MAX_ADDRESS = (1 << 64) - 1

# Whether the warning that memory could not be locked has been emitted.
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
    """Return an array in memory that can be transferred to and from files without a copy.

    The memory is page-aligned, on huge pages if it has 2 MiB or more, and page-locked up to RLIMIT_MEMLOCK. Beyond that
    limit it is ordinary memory, and a warning is emitted once. The memory is freed with the last array that shares it.

    If this process already uses CUDA (torch has initialized it, or tensorferry has transferred GPU memory), the memory
    is also registered with CUDA: copies between it and GPUs are asynchronous, and RLIMIT_MEMLOCK does not apply. This
    function never initializes CUDA, because that would use GPU memory and rule out ``fork()``.

    Parameters
    ----------
    shape : int or sequence of int
        The array's shape.
    dtype : torch.dtype, numpy.dtype or an argument of numpy.dtype(), optional
        A torch dtype, or None for torch's default dtype, gives a torch tensor; any other dtype gives a NumPy array.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        A C-contiguous array of zeros.

    Raises
    ------
    ValueError
        A length is negative.
    TypeError
        A length is not an integer, or the dtype is invalid.
    ModuleNotFoundError
        The library that defines the dtype is not installed.
    MemoryError
        The system cannot allocate the memory.
    """
    lengths = _lengths(shape)
    if dtype is None:
        try:
            import torch
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "dtype: None means torch's default dtype, but torch is not installed (remedy: pass a NumPy dtype, as "
                'in empty(10, "float32"))',
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
            f"dtype: {dtype!r} requires NumPy, which is not installed", name="numpy"
        ) from None
    try:
        element = numpy.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"dtype: expected a dtype of torch or NumPy, got {dtype!r}: {error}"
        ) from None
    if element.hasobject:
        raise ValueError(f"dtype: a dtype of Python objects is not supported (got {element})")
    count = math.prod(lengths)
    if count * element.itemsize == 0:
        return numpy.empty(lengths, element)
    memory, _ = locked_memory(count * element.itemsize)
    return numpy.frombuffer(memory, numpy.uint8).view(element).reshape(lengths)


def _lengths(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(map(operator.index, [shape] if hasattr(shape, "__index__") else shape))
    except TypeError:
        raise TypeError(
            f"shape: expected an integer or a sequence of integers, got {shape!r}"
        ) from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape: negative length (got {shape!r})")
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
    # set_() makes a tensor that is not a view. A view keeps a hidden base alive, and a caller with a weak reference to
    # the tensor could not detect when the memory is freed.
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (count,), (1,)), locked


def elements_like(num_elem: int, example: Any) -> tuple[int, Any]:
    """Check a number of elements and an example tensor; return the number and the example's dtype."""
    if example is None:
        raise TypeError("example_tensor: expected a torch tensor with the dtype, got None")
    num_elem = integer(num_elem, "num_elem", 0)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(example, torch.dtype):
        raise TypeError(
            f"example_tensor: expected a tensor, got the dtype {example} (remedy: pass torch.empty(0, dtype={example}))"
        )
    if torch is None or not isinstance(example, torch.Tensor):
        raise TypeError(f"example_tensor: expected a torch tensor, got {type(example).__name__}")
    return num_elem, example.dtype


def free_locked_tensor(tensor: Any) -> bool:
    """Unlock a tensor of :func:`locked_tensor`; return False for any other tensor, or if it was unlocked before.

    The memory itself is freed with the last tensor that shares it.
    """
    address, nbytes, _, location = memory_of(tensor, writable=False, name="tensor")
    return location is None and nbytes > 0 and _core.give_back(address)


def free_locked_memory(address: int) -> bool:
    """Unlock the tensor of :func:`locked_tensor` that begins at an address; return False if there is none."""
    try:
        address = operator.index(address)
    except TypeError:
        raise TypeError(f"address: expected an integer, got {type(address).__name__}") from None
    return 0 < address <= _MAX_ADDRESS and _core.give_back(address)


def is_pinned(buffer: Any) -> bool:
    """Return whether a buffer is page-locked by torch, tensorferry or CUDA; False for GPU memory."""
    if hasattr(buffer, "is_pinned") and buffer.is_pinned():
        return True
    address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
    return location is None and nbytes > 0 and _core.is_locked(address, nbytes)


def is_in_locked_tensor(buffer: Any) -> bool:
    """Return whether a buffer is inside a tensor of :func:`locked_tensor` that has not been freed.

    The result is also True if the tensor's memory could not be locked (RLIMIT_MEMLOCK).
    """
    address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
    return location is None and nbytes > 0 and _core.is_lent(address, nbytes)


def bounce_pool_nbytes() -> int:
    """Return the size in bytes of each device's bounce pool: the buffers through which unaligned arrays are copied."""
    return _core.bounce_pool_nbytes()


def set_bounce_pool_nbytes(nbytes: int) -> None:
    """Set the size of each bounce pool: the buffers through which unaligned arrays are copied.

    The default is 32 MiB, or the value of the environment variable TENSORFERRY_BOUNCE_POOL_NBYTES. Each device in use
    has a pool, up to 16 devices; further devices share these pools. Bounce buffers in use keep their size, and the new
    size applies to later blocks. GPU memory is copied through another, pinned pool of twice that size, which is
    allocated for a device at its first transfer of GPU memory.

    Raises
    ------
    ValueError
        The size is less than 1 MiB.
    """
    if nbytes < _core.MIN_BOUNCE_POOL_NBYTES:
        raise ValueError(f"nbytes: less than {_core.MIN_BOUNCE_POOL_NBYTES} (got {nbytes})")
    _core.set_bounce_pool_nbytes(nbytes)


def locked_memory(nbytes: int) -> tuple[Any, bool]:
    """Return new memory (an object with the buffer protocol and DLPack) and whether it is locked; see :func:`empty`."""
    global _warned
    if nbytes > sys.maxsize:
        raise MemoryError(f"cannot allocate {nbytes} bytes")
    memory, locked = _core.allocate(nbytes, True, gpu_in_use())
    if not locked and not _warned:
        _warned = True
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        warn(
            f"cannot lock {nbytes} bytes of memory: RLIMIT_MEMLOCK is {limit} bytes; using unlocked memory instead "
            "(remedy: ulimit -l unlimited)"
        )
    return memory, locked


def gpu_in_use() -> int:
    """Return the number of a GPU that already has a CUDA context, or -1 if there is none."""
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
