"""The module that DeepSpeed's op builders load after ``install()``, in place of compiled ops.

It implements the ops `async_io`, `gds`, `pin_memory` and `utils` with the signatures of DeepSpeed's C++ bindings. Where
DeepSpeed's own ops ignore an error or abort the process, these functions raise an exception.

A locked tensor is one of new_cpu_locked_tensor(). DeepSpeed copies tensors for which is_pinned() is False, and asserts
in several places that it is True. Here it is True for every buffer that needs no copy. These are also the locked
tensors that RLIMIT_MEMLOCK forbids to page-lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry import _core
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer import memory
from tensorferry.transfer.arrays import memory_of, tensor_bytes

if TYPE_CHECKING:
    from tensorferry.base.checks import Path

# The remedy refers to the "aio" section of DeepSpeed's configuration.
_WITHOUT_GDS = "to run without it, remove use_gds from the aio section, or set it to false"


def gds_refusal() -> str | None:
    """Return the reason why gds_handle does not work here, or None if a CUDA driver and cuFile are found.

    This function neither creates a CUDA context nor loads cuFile, because DeepSpeed calls it even in programs that
    never use GPUDirect Storage.
    """
    from tensorferry.base.libraries import cufile_refusal

    refusal = _core.cuda_refusal() or cufile_refusal()
    return None if refusal is None else f"{refusal}; {_WITHOUT_GDS}"


class aio_handle(tensorferry.aio_handle):  # noqa: N801  DeepNVMe's name
    """:class:`tensorferry.aio_handle`; for is_pinned() all locked tensors are pinned, as the module says."""

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer needs no copy: page-locked by torch, or returned by new_cpu_locked_tensor."""
        return _needs_no_copy(buffer)


class gds_handle(tensorferry.gds_handle):  # noqa: N801  DeepNVMe's name
    """:class:`tensorferry.gds_handle`; for is_pinned() all locked tensors are pinned, as the module says."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        try:
            super().__init__(*arguments, **keywords)
        except EngineUnavailableError as error:
            raise EngineUnavailableError(f"{error}; {_WITHOUT_GDS}") from None

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer needs no copy."""
        return super().is_pinned(buffer) or memory.is_in_locked_tensor(buffer)


class pin_handle:  # noqa: N801  DeepNVMe's name
    """Locked memory without a handle for I/O. It accepts the tensors of all handles, and handles accept its tensors."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Return a locked tensor; see :meth:`tensorferry.aio_handle.new_cpu_locked_tensor`."""
        return memory.locked_tensor(*memory.elements_like(num_elem, example_tensor))[0]

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """Unlock a tensor; see :meth:`tensorferry.aio_handle.free_cpu_locked_tensor`."""
        return memory.free_locked_tensor(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unlock the tensor at an address; return False if there is none, or if it was unlocked before."""
        return memory.free_locked_memory(address)

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer needs no copy; see :meth:`aio_handle.is_pinned`."""
        return _needs_no_copy(buffer)


def aio_read(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill a buffer from the start of a file and return 0; exceptions as for :meth:`tensorferry.aio_handle.read`."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write a buffer to the start of a file and return 0; exceptions as for :meth:`tensorferry.aio_handle.write`."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: Any, src: Any) -> int:
    """Copy a tensor's bytes to another tensor with the same number of bytes, and return 0.

    Raises
    ------
    TypeError
        An argument is not a torch tensor.
    ValueError
        The sizes differ, or an argument is not contiguous host memory.
    """
    _, nbytes, _, _ = memory_of(dest, writable=True, name="dest", host=True)
    _, src_nbytes, _, _ = memory_of(src, writable=False, name="src", host=True)
    import torch

    for name, tensor in (("dest", dest), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if nbytes != src_nbytes:
        raise ValueError(f"src: expected {nbytes} bytes, the size of dest, got {src_nbytes}")
    cast_to_byte_tensor(dest).copy_(
        cast_to_byte_tensor(src.resolve_conj().resolve_neg().contiguous())
    )
    return 0


def cast_to_byte_tensor(src_tensor: Any) -> Any:
    """Return a one-dimensional uint8 tensor that shares a contiguous tensor's memory.

    For a list of tensors, return a list of such tensors.
    """
    if isinstance(src_tensor, (list, tuple)):
        return [cast_to_byte_tensor(tensor) for tensor in src_tensor]
    if not src_tensor.is_contiguous():
        raise ValueError(
            f"src_tensor: not contiguous (got strides {src_tensor.stride()}), so its bytes are not a single range"
        )
    return tensor_bytes(src_tensor)


def _needs_no_copy(buffer: Any) -> bool:
    return memory.is_pinned(buffer) or memory.is_in_locked_tensor(buffer)
