"""Arrays of any library as (address, bytes), checked before any I/O.

torch and NumPy are looked at where they have been imported already; everything else comes through the buffer
protocol or DLPack.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

from tensorferry import _core

# DLPack device types whose memory the CPU can address: kDLCPU, kDLCUDAHost, kDLROCMHost (dlpack.h).
_HOST_DEVICES = (1, 3, 11)


# Contiguous host memory: address, bytes, and an owner as long as which it is valid. A plain tuple: read_many makes
# thousands.
Memory: TypeAlias = "tuple[int, int, object]"


def memory_of(array: Any, *, writable: bool, name: str = "array") -> Memory:
    """Return the memory of a contiguous array.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, buffer or DLPack object
        Any dtype, any shape.
    writable : bool
        True for the destination of a read. A source that is not contiguous is copied; a destination may not be.
    name : str
        What the argument is called in messages.

    Raises
    ------
    TypeError
        It is no array.
    ValueError
        It is not contiguous, not writable, not in host memory, or has no memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if type(array) is torch.Tensor and array.is_cpu and array.is_contiguous():
            # The common case, in few calls: read_many has thousands.
            strided = array.layout is torch.strided and not array.is_quantized
            if strided and not array.is_neg() and not array.is_conj():
                address = array.data_ptr()
                if address:
                    return address, array.nbytes, array
        return _of_tensor(torch, array, writable, name)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _of_ndarray(array, writable, name)
    try:
        view = memoryview(array)
    except (TypeError, ValueError, BufferError):
        pass
    else:
        return _of_buffer(view, writable, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array, writable, name)
    raise TypeError(
        f"{name}: {type(array).__name__} is neither a torch tensor nor a NumPy array, and offers neither the "
        "buffer protocol nor DLPack"
    )


def _of_tensor(torch: Any, tensor: Any, writable: bool, name: str) -> Memory:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: a tensor on device {tensor.device} has no host memory to move")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: a tensor of layout {tensor.layout} is not contiguous memory")
    if tensor.is_quantized:
        raise ValueError(
            f"{name}: a quantized tensor carries more than its memory; pass .int_repr()"
        )
    if tensor.is_conj() or tensor.is_neg():
        if writable:
            raise ValueError(f"{name}: a lazily conjugated or negated tensor cannot be read into")
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        if writable:
            raise ValueError(
                f"{name}: cannot read into a tensor that is not contiguous (strides {tensor.stride()})"
            )
        tensor = tensor.detach().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    # Wrapper subclasses (FakeTensor, DTensor) pretend to a device that their storage is not on.
    wrapper = (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter) and _storage_device(tensor) != "cpu"
    )
    address = 0 if wrapper else tensor.data_ptr()
    if wrapper or (address == 0 and nbytes > 0):
        raise ValueError(
            f"{name}: {type(tensor).__name__} has no memory of its own (for a DTensor pass .to_local(); an FSDP "
            "parameter may be resharded)"
        )
    return address, nbytes, tensor


def _storage_device(tensor: Any) -> str | None:
    try:
        return str(tensor.untyped_storage().device.type)
    except (NotImplementedError, RuntimeError):
        return None


def _of_ndarray(array: Any, writable: bool, name: str) -> Memory:
    if array.dtype.hasobject:
        raise ValueError(
            f"{name}: an array of Python objects (dtype {array.dtype}) has no bytes to move"
        )
    memory = _core.buffer_memory(array, writable)
    if memory is not None:
        return memory[0], memory[1], array
    if not array.flags.c_contiguous:
        if writable:
            raise ValueError(
                f"{name}: cannot read into an array that is not C-contiguous (strides {array.strides})"
            )
        array = array.copy(order="C")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: cannot read into a read-only array")
    # The buffer protocol has no word for some dtypes (datetime64, ml_dtypes' bfloat16).
    return array.__array_interface__["data"][0], array.nbytes, array


def _of_buffer(view: memoryview, writable: bool, name: str) -> Memory:
    if writable and view.readonly:
        raise ValueError(f"{name}: cannot read into a read-only buffer")
    if "O" in view.format:
        raise ValueError(f"{name}: a buffer of Python objects has no bytes to move")
    if not view.c_contiguous:
        if writable:
            raise ValueError(
                f"{name}: cannot read into a buffer that is not C-contiguous (strides {view.strides})"
            )
        view = memoryview(view.tobytes())
    memory = _core.buffer_memory(view, writable)
    if memory is None:
        raise ValueError(f"{name}: the buffer cannot be exported")
    return memory[0], memory[1], view


def _of_dlpack(array: Any, writable: bool, name: str) -> Memory:
    device, index = array.__dlpack_device__()
    if device not in _HOST_DEVICES:
        raise ValueError(
            f"{name}: an array on DLPack device ({int(device)}, {index}) has no host memory to move"
        )
    address, nbytes, is_writable, contiguous = _core.dlpack_memory(array)
    # JAX arrays are immutable, which DLPack before 1.0 cannot say.
    if writable and (
        not is_writable or type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
    ):
        raise ValueError(f"{name}: cannot read into a read-only {type(array).__name__}")
    if not contiguous:
        raise ValueError(f"{name}: an array that is not C-contiguous cannot be moved as it is")
    return address, nbytes, array
