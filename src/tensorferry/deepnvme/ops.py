"""What DeepSpeed's builders load while tensorferry serves them: its ops under their names, nothing compiled.

One module stands for `async_io`, `gds`, `pin_memory` and `utils`. Signatures are those of DeepSpeed's C++ bindings;
what they lose silently or die of is raised here, as everywhere in tensorferry.
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

_WITHOUT_GDS = "without it leave use_gds out of the aio section, or set it to false"  # in DeepSpeed's configuration


def gds_refusal() -> str | None:
    """Return why there can be no gds_handle here; None where a CUDA driver and cuFile are found.

    Nobody's context is made for that, and cuFile is not loaded: DeepSpeed asks in trainings that never use it.
    """
    from tensorferry.base.libraries import cufile_refusal

    refusal = _core.cuda_refusal() or cufile_refusal()
    return None if refusal is None else f"{refusal}; {_WITHOUT_GDS}"


class aio_handle(tensorferry.aio_handle):  # noqa: N801  DeepNVMe's name
    """:class:`tensorferry.aio_handle`, whose buffers count as pinned where RLIMIT_MEMLOCK lets none be locked."""

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer moves without a copy: page-locked by torch, or made by new_cpu_locked_tensor."""
        return _is_usable(buffer)


class gds_handle(tensorferry.gds_handle):  # noqa: N801  DeepNVMe's name
    """:class:`tensorferry.gds_handle`; what counts as pinned is as for :class:`aio_handle`, and pinned GPU memory."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        try:
            super().__init__(*arguments, **keywords)
        except EngineUnavailableError as error:
            raise EngineUnavailableError(f"{error}; {_WITHOUT_GDS}") from None

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer moves without a copy."""
        return super().is_pinned(buffer) or memory.is_lent(buffer)


class pin_handle:  # noqa: N801  DeepNVMe's name
    """Locked memory without a handle for I/O. It knows the tensors that handles made, and the reverse."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """As :meth:`tensorferry.aio_handle.new_cpu_locked_tensor`."""
        return memory.locked_tensor(*memory.elements_like(num_elem, example_tensor))[0]

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """As :meth:`tensorferry.aio_handle.free_cpu_locked_tensor`."""
        return memory.free_locked_tensor(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Unlock the tensor that begins at an address; False if none does, or it was freed before."""
        return memory.free_locked_memory(address)

    def is_pinned(self, buffer: Any) -> bool:
        """As :meth:`aio_handle.is_pinned`."""
        return _is_usable(buffer)


def aio_read(
    buffer: Any,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill a buffer from the start of a file and return 0; exceptions as of :meth:`tensorferry.aio_handle.read`."""
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
    """Write a buffer to the start of a file and return 0; exceptions as of :meth:`tensorferry.aio_handle.write`."""
    with aio_handle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: Any, src: Any) -> int:
    """Copy a tensor's bytes to another tensor of as many bytes, and return 0.

    Raises
    ------
    TypeError
        One of them is no tensor.
    ValueError
        The sizes differ, or one of them is no contiguous host memory.
    """
    _, nbytes, _, _ = memory_of(dest, writable=True, name="dest", host=True)
    _, src_nbytes, _, _ = memory_of(src, writable=False, name="src", host=True)
    import torch

    for name, tensor in (("dest", dest), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} is no torch tensor")
    if nbytes != src_nbytes:
        raise ValueError(f"src: {src_nbytes} bytes do not fill dest's {nbytes}")
    cast_to_byte_tensor(dest).copy_(
        cast_to_byte_tensor(src.resolve_conj().resolve_neg().contiguous())
    )
    return 0


def cast_to_byte_tensor(src_tensor: Any) -> Any:
    """Return a one-dimensional uint8 tensor that shares a contiguous tensor's memory; or a list for a list of them."""
    if isinstance(src_tensor, (list, tuple)):
        return [cast_to_byte_tensor(tensor) for tensor in src_tensor]
    if not src_tensor.is_contiguous():
        raise ValueError(
            f"src_tensor: not contiguous (strides {src_tensor.stride()}), so its bytes are not one piece of memory"
        )
    return tensor_bytes(src_tensor)


def _is_usable(buffer: Any) -> bool:
    return memory.is_pinned(buffer) or memory.is_lent(buffer)
