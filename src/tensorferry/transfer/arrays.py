"""The memory of arrays of any library, on the host or a GPU, as address and size, checked before any I/O.

This module never imports torch or NumPy; it recognizes their arrays if the program has imported them. All other
arrays are accessed through the buffer protocol, ``__cuda_array_interface__`` or DLPack.
"""

from __future__ import annotations

import math
import re
import sys
from array import array as array_of
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tensorferry import _core
from tensorferry.errors import EngineUnavailableError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SupportsDLPack(Protocol):
    """An array of any library that implements DLPack."""

    def __dlpack__(self) -> Any:
        """Return a DLPack capsule."""

    def __dlpack_device__(self) -> Any:
        """Return the device type and the device number."""


class SupportsCudaArray(Protocol):
    """An array in GPU memory that implements Numba's CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Return a dict with address, shape, type and stream."""


# For type checkers: an array that memory_of() accepts. They reject a str where a sequence of arrays is expected,
# because the elements of a str are not arrays.
Array: TypeAlias = "Buffer | SupportsDLPack | SupportsCudaArray"

# DLPack device types with memory that the CPU can address: kDLCPU, kDLCUDAHost, kDLROCMHost (dlpack.h).
_HOST_DEVICES = (1, 3, 11)
# DLPack device types with memory that CUDA can address: kDLCUDA, kDLCUDAManaged.
_DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 2, 13

# CU_STREAM_LEGACY (cuda.h): the stream on which CUDA queues work for which the program names no stream.
LEGACY_STREAM = 1

# The GPU that was used last, or -1. Pinned memory is registered with CUDA through this GPU's context.
last_gpu = -1

# The letters of numpy.dtype.kind for which a typestr has an element's size in bytes. Not O, because objects cannot be
# transferred as bytes, and not U, for which a typestr has the number of UTF-32 characters.
_KINDS_OF_BYTES = "biufcmMSV"

# The remedy in messages about a destination that is not contiguous.
_REMEDY = "remedy: read into a contiguous array and copy it"

# The location of GPU memory: the GPU's number, and a CUDA stream. The work queued on that stream must finish before the
# memory is used.
Location: TypeAlias = "tuple[int, int]"

# Contiguous memory: address, size in bytes, the object that owns the memory, and its location (None: host memory). It
# is a plain tuple for speed, because read_many makes thousands of them.
Memory: TypeAlias = "tuple[int, int, object, Location | None]"

# The memory of one transfer: that of one array, or (segments, size in bytes, None, None) for several arrays. Segments
# are pieces of memory, and gaps (numbers of bytes to skip), that are consecutive in the file. They have references to
# the owners of their memory.
AnyMemory: TypeAlias = "Memory | tuple[_core.Segments, int, None, None]"


def memory_of(array: Any, *, writable: bool, name: str = "array", host: bool = False) -> Memory:
    """Return the memory of a contiguous array.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        An array of any dtype and shape.
    writable : bool
        True for the destination of a read, which must be contiguous. With False, a torch tensor, a NumPy array or a
        buffer that is not contiguous is copied, and the memory of the copy is returned.
    name : str
        The argument's name in error messages.
    host : bool
        Reject GPU memory, for callers that access the bytes on the CPU.

    Raises
    ------
    TypeError
        The argument is not an array.
    ValueError
        The array is not contiguous, not writable, on an unsupported device, or has no memory.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used; the message has the reason.
    """
    torch: Any = sys.modules.get("torch")
    is_tensor = _is_instance(torch, "Tensor", array)
    if is_tensor:
        strided = type(array) is torch.Tensor and array.layout is torch.strided
        usual = strided and array.is_cpu and not array.is_nested and array.is_contiguous()
        # The common case takes as few calls as possible, because read_many has thousands of tensors.
        if usual and not array.is_quantized and not array.is_neg() and not array.is_conj():
            memory = array.data_ptr(), array.nbytes, array.untyped_storage(), None
            if memory[0] and not has_moved(memory):
                return memory
    try:
        if is_tensor:
            return _of_tensor(torch, array, writable, name, host)
        return _of_array(array, writable, name, host)
    except _RefusedError as error:
        raise ValueError(f"{name}: {error}") from None


def memory_or_segments(array: Any, *, writable: bool) -> tuple[Any, AnyMemory]:
    """Return ``array`` and the memory of that array, or of several arrays that are consecutive in a file.

    Several arrays are an ordered iterable of arrays that is not an array itself. For a read it may also have integers,
    each a number of bytes of the file to skip. An iterable that is not a list or tuple is returned as a list.

    Raises
    ------
    TypeError, ValueError, EngineUnavailableError
        As for :func:`memory_of`; messages name the arrays ``array[0]`` and so on.
    """
    if not isinstance(array, (list, tuple)):
        try:
            return array, memory_of(array, writable=writable)
        except TypeError:
            if isinstance(array, _core.Segments):  # the rows of a call of tensorferry.Table
                return array, (array, array.nbytes, None, None)
            if not is_iterable_of_arrays(array):
                raise
        array = list(array)
    segments = collect_segments(array, writable=writable)
    return array, (segments, segments.nbytes, None, None)


def collect_segments(arrays: Sequence[Any], *, writable: bool) -> _core.Segments:
    """Return the memory of several arrays; see :func:`memory_or_segments`."""

    def check(index: int, one: Any) -> Memory:
        if writable and isinstance(one, int) and not isinstance(one, bool):
            raise ValueError(f"array[{index}]: invalid number of bytes to skip (got {one})")
        return memory_of(one, writable=writable, name=f"array[{index}]")

    return _core.collect_segments(arrays, writable, check)


def collect_runs(
    begins: Iterable[int], nbytes: int, end: int, data: Any
) -> tuple[_core.Segments, int]:
    """Return the segments that a read of equally long ranges of a file (runs) fills, and the offset of the first run.

    Each run has ``nbytes`` bytes and begins at one of the offsets in ``begins``, all before ``end``; the runs are
    stored one after the other in ``data``, which is host memory. Of the bytes between two runs the read transfers only
    those that are in the same pages as the runs.
    """
    numbers = memory_of(array_of("q", begins), writable=False)
    memory = memory_of(data, writable=True, host=True)
    [(_, first, segments)] = _core.rows_of_table(
        *(numbers[0], numbers[1] // 8, False, [end], nbytes, 1, memory[0], memory[2], False)
    )
    return segments, first


def is_iterable_of_arrays(array: Any) -> bool:
    """Return whether ``array`` is an iterable of arrays, and not itself an array that memory_of() has rejected."""
    if not isinstance(array, Iterable) or isinstance(array, (str, Mapping, Set)):
        return False
    ways = (
        "__array__",
        "__array_interface__",
        "__cuda_array_interface__",
        "__dlpack__",
        "data_ptr",
    )
    return not any(hasattr(array, way) for way in ways)


def has_moved(memory: AnyMemory) -> bool:
    """Return whether an array's memory has been released or replaced since it was passed to a transfer.

    Callers ask when the transfer has ended: if the memory has moved, the transferred bytes are not valid. A transfer
    holds a reference to the tensor's storage, so deleting the tensor or giving it another storage (``set_()``,
    ``.data = ``) is safe. The reference does not protect against a storage that releases its memory (``resize_()``,
    ``share_memory_()``) or a NumPy array that is resized with ``refcheck=False``. This function detects these cases,
    except when the allocator has returned the same memory to the array again.
    """
    address, nbytes, owner, _ = memory
    if isinstance(address, int):
        return _core.first_moved([address], [nbytes], [owner]) is not None
    return address.moved()


class _RefusedError(ValueError):
    """An array cannot be transferred; :func:`memory_of` adds the argument's name to the message."""


def _is_instance(library: Any, type_name: str, array: Any) -> bool:
    # While another thread is importing the library the type may be missing; then no array of it can exist yet.
    known = getattr(library, type_name, None)
    return isinstance(known, type) and isinstance(array, known)


def _of_array(array: Any, writable: bool, name: str, host: bool) -> Memory:
    """Return the memory of an array that is not a torch tensor."""
    if _is_instance(sys.modules.get("numpy"), "ndarray", array):
        return _of_ndarray(array, writable)
    try:
        view = memoryview(array)
    except (TypeError, ValueError, BufferError):
        pass
    else:
        return _of_buffer(view, writable)
    # Try this interface before DLPack, because it includes the stream that fills the array.
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_cuda_array(array, interface, writable, host)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array, writable, host)
    remedy = ""
    if isinstance(array, Mapping) and not writable:
        remedy = " (remedy: save a dict with tensorferry.checkpoint.save, or its tensors with tensorferry.safetensors)"
    raise TypeError(
        f"{name}: expected a torch tensor, a NumPy array or an object with the buffer protocol, "
        f"__cuda_array_interface__ or DLPack, got {type(array).__name__}{remedy}"
    )


def _of_tensor(torch: Any, tensor: Any, writable: bool, name: str, host: bool) -> Memory:
    device = tensor.device
    if device.type != "cpu" and host:
        raise _RefusedError(f"expected a tensor in host memory (got device {device})")
    if device.type not in ("cpu", "cuda"):
        raise _RefusedError(
            f"expected a tensor in host memory or on an NVIDIA GPU (got device {device})"
        )
    if device.type == "cuda" and torch.version.hip is not None:
        raise _RefusedError(
            f"a tensor on an AMD GPU ({device}) is not supported, only NVIDIA GPUs are "
            "(remedy: pass .cpu())"
        )
    if tensor.layout is not torch.strided:
        raise _RefusedError(f"expected a strided tensor (got layout {tensor.layout})")
    if tensor.is_nested:
        raise _RefusedError(
            "a nested tensor is not a single block of memory (remedy: pass .values())"
        )
    if tensor.is_quantized:
        raise _RefusedError(
            "a quantized tensor has parameters outside of its memory (remedy: pass .int_repr())"
        )
    if tensor.is_conj() or tensor.is_neg():
        if writable:
            raise _RefusedError("cannot read into a lazily conjugated or negated tensor")
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        if writable:
            raise _RefusedError(
                f"cannot read into a tensor that is not contiguous (strides {tensor.stride()}; {_REMEDY})"
            )
        tensor = tensor.detach().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    # Wrapper subclasses (FakeTensor, DTensor) report a device that their storage is not on.
    wrapper = (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and _storage_device(tensor) != device.type
    )
    address = 0 if wrapper else tensor.data_ptr()
    if wrapper or (address == 0 and nbytes > 0):
        raise _RefusedError(
            f"{type(tensor).__name__} has no memory of its own (remedy: for a DTensor pass .to_local(); a "
            "parameter of FSDP has no memory while it is resharded)"
        )
    # The storage owns the memory. A reference to the tensor is not enough, because its storage may be replaced.
    storage = tensor.untyped_storage()
    check_storage(tensor, name)
    if device.type == "cpu":
        return address, nbytes, storage, None
    stream = torch.cuda.current_stream(device).cuda_stream
    return _gpu_memory(address, nbytes, storage, device.index, stream)


def is_dense(tensor: Any) -> bool:
    """Return whether a torch tensor consists only of elements in memory: dense, not quantized, not a subclass."""
    torch = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def check_storage(tensor: Any, name: str) -> None:
    """Raise ValueError if a strided tensor's storage is smaller than its shape needs.

    The memory of its last elements then does not belong to the tensor.
    """
    storage_nbytes = tensor.untyped_storage().nbytes()
    places = zip(tensor.size(), tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in places)
    if tensor.numel() and (last + 1) * tensor.element_size() > storage_nbytes:
        raise ValueError(
            f"{name}: the tensor's storage has {storage_nbytes} bytes, fewer than its shape needs (it was resized)"
        )


def tensor_bytes(tensor: Any) -> Any:
    """Return a contiguous torch tensor's memory as a one-dimensional tensor of uint8.

    as_strided() sets the stride to 1. A tensor with a single element may have any stride; view(-1) would keep it, and
    view(torch.uint8) would then fail.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


def _gpu_memory(address: int, nbytes: int, owner: object, device: int, stream: int) -> Memory:
    global last_gpu
    if nbytes == 0:  # no bytes, so a transfer need not wait for the stream
        return address, nbytes, owner, None
    _check_driver()
    if _core.is_capturing(device, stream):
        raise _RefusedError(
            "the current stream is being captured into a CUDA graph, which cannot contain file I/O"
        )
    last_gpu = device
    return address, nbytes, owner, (device, stream)


def _check_driver() -> None:
    refusal = _core.cuda_refusal()
    if refusal is not None:
        raise EngineUnavailableError(f"GPU memory cannot be transferred: {refusal}")


def _storage_device(tensor: Any) -> str | None:
    try:
        return str(tensor.untyped_storage().device.type)
    except (NotImplementedError, RuntimeError):
        return None


def masked_type() -> tuple[type, ...]:
    """Return the type of masked arrays in a tuple, which is empty if numpy.ma has not been imported.

    The attribute `numpy.ma` would import that module during the first transfer. If another thread forked meanwhile,
    the child would wait for the import lock for ever.
    """
    masked = getattr(sys.modules.get("numpy.ma.core"), "MaskedArray", None)
    return () if masked is None else (masked,)


def _of_ndarray(array: Any, writable: bool) -> Memory:
    if isinstance(array, masked_type()):
        raise _RefusedError(
            "a masked array has a mask outside of its bytes (remedy: pass .data or .filled())"
        )
    if array.dtype.hasobject:
        raise _RefusedError(
            f"an array of Python objects (dtype {array.dtype}) cannot be transferred as bytes"
        )
    memory = _core.buffer_memory(array, writable)
    if memory is not None:
        return memory[0], memory[1], array, None
    if not array.flags.c_contiguous:
        if writable:
            raise _RefusedError(
                f"cannot read into an array that is not C-contiguous (strides {array.strides}; {_REMEDY})"
            )
        array = array.copy(order="C")
    if writable and not array.flags.writeable:
        raise _RefusedError("cannot read into a read-only array")
    # The buffer protocol has no format for some dtypes (datetime64, ml_dtypes' bfloat16). NumPy's interface has the
    # address of any array.
    return array.__array_interface__["data"][0], array.nbytes, array, None


def _of_buffer(view: memoryview, writable: bool) -> Memory:
    if writable and view.readonly:
        raise _RefusedError("cannot read into a read-only buffer")
    # Field names, which are between colons, may have an O.
    if "O" in re.sub(":[^:]*:", "", view.format):
        raise _RefusedError("a buffer of Python objects cannot be transferred as bytes")
    if not view.c_contiguous:
        if writable:
            raise _RefusedError(
                f"cannot read into a buffer that is not C-contiguous (strides {view.strides}; {_REMEDY})"
            )
        view = memoryview(view.tobytes())
    memory = _core.buffer_memory(view, writable)
    if memory is None:
        raise _RefusedError("the object refuses access to its memory through the buffer protocol")
    return memory[0], memory[1], view, None


def _of_cuda_array(array: Any, interface: dict[str, Any], writable: bool, host: bool) -> Memory:
    # numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, versions 2 and 3
    kind = type(array).__name__
    if host:
        raise _RefusedError(f"expected an array in host memory (got a {kind} in GPU memory)")
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    if typestr[1] not in _KINDS_OF_BYTES:
        raise _RefusedError(f"a {kind} of type {typestr!r} cannot be transferred as bytes")
    if interface.get("mask") is not None:
        raise _RefusedError(f"a {kind} with a mask cannot be transferred as bytes")
    itemsize = int(typestr[2:])
    if not _is_c_contiguous(shape, interface.get("strides"), itemsize):
        raise _RefusedError("expected a C-contiguous array in GPU memory (remedy: copy it first)")
    address, read_only = interface["data"]
    if writable and (read_only or _is_immutable(array)):
        raise _RefusedError(f"cannot read into a read-only {kind}")
    stream = interface.get("stream")
    # Forbidden by the protocol: 0 could mean the legacy or the per-thread default stream.
    if stream == 0:
        raise _RefusedError(f"the stream of a {kind} is 0, which the CUDA array interface forbids")
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return 0, 0, array, None
    device = _device_of(address, f"a {kind}")
    stream = LEGACY_STREAM if stream is None else stream
    return _gpu_memory(address, nbytes, array, device, stream)


def _is_c_contiguous(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _device_of(address: int, what: str) -> int:
    _check_driver()
    try:
        return _core.device_of(address)
    except ValueError:
        raise _RefusedError(f"{what}: address {address:#x} is not in the memory of a GPU") from None


def _of_dlpack(array: Any, writable: bool, host: bool) -> Memory:
    device, index = array.__dlpack_device__()
    on_gpu = device in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED) and not host
    if device not in _HOST_DEVICES and not on_gpu:
        raise _RefusedError(
            f"expected an array in host memory{'' if host else ' or on an NVIDIA GPU'} "
            f"(got DLPack device ({int(device)}, {index}))"
        )
    # The core calls __dlpack__() without a stream argument. The array's library then makes the legacy stream wait for
    # the work on the array that the library has queued.
    address, nbytes, is_writable, contiguous, view = _core.dlpack_memory(array)
    if writable and (not is_writable or _is_immutable(array)):
        raise _RefusedError(f"cannot read into a read-only {type(array).__name__}")
    if not contiguous:
        raise _RefusedError("expected a C-contiguous array (remedy: copy it first)")
    # The view owns the exported memory, even if the array is deleted.
    if not on_gpu or nbytes == 0:
        return address, nbytes, view, None
    if device == _DLPACK_CUDA:  # managed memory has no fixed device, so the exported index is used
        index = _device_of(address, f"a {type(array).__name__}")
    return _gpu_memory(address, nbytes, view, index, LEGACY_STREAM)


def _is_immutable(array: object) -> bool:
    """Return whether an array is a JAX array, which is immutable.

    The array's type decides, because DLPack before 1.0 has no flag for read-only memory.
    """
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
