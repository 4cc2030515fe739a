"""Arrays of any library, in host memory or a GPU's, as (address, bytes), checked before any I/O.

torch and NumPy are looked at where they have been imported already; everything else comes through the buffer
protocol, ``__cuda_array_interface__`` or DLPack.
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
    """An array of any library that offers DLPack."""

    def __dlpack__(self) -> Any:
        """Return a capsule."""

    def __dlpack_device__(self) -> Any:
        """Return the kind of device, and its number."""


class SupportsCudaArray(Protocol):
    """An array in GPU memory that offers Numba's interface."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Return address, shape, type and stream."""


# For type checkers: whatever memory_of() takes. A str is a sequence of none of these.
Array: TypeAlias = "Buffer | SupportsDLPack | SupportsCudaArray"

# DLPack device types whose memory the CPU can address: kDLCPU, kDLCUDAHost, kDLROCMHost (dlpack.h).
_HOST_DEVICES = (1, 3, 11)
# And those that CUDA can.
_DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 2, 13

# CUDA's name of the stream that all work without a stream goes to, CU_STREAM_LEGACY (cuda.h).
LEGACY_STREAM = 1

# The GPU whose memory was seen last; -1: none. Page-locked memory is registered with CUDA by its context.
last_gpu = -1

# Kinds of elements whose typestr counts bytes, as in numpy.dtype.kind; not objects, not UTF-32.
_KINDS_OF_BYTES = "biufcmMSV"

# GPU memory: the GPU's number, and the CUDA stream after whose present work it may be used.
Location: TypeAlias = "tuple[int, int]"

# Contiguous memory: address, bytes, an owner as long as which it is valid, and where it is; None is host memory. A
# plain tuple: read_many makes thousands.
Memory: TypeAlias = "tuple[int, int, object, Location | None]"

# The same of what a transfer takes: one array, or segments in place of the address, which own what they need.
AnyMemory: TypeAlias = "Memory | tuple[_core.Segments, int, None, None]"


def memory_of(array: Any, *, writable: bool, name: str = "array", host: bool = False) -> Memory:
    """Return the memory of a contiguous array.

    Parameters
    ----------
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Any dtype, any shape.
    writable : bool
        True for the destination of a read. A source that is not contiguous is copied; a destination may not be.
    name : str
        What the argument is called in messages.
    host : bool
        Refuse GPU memory: for callers who look at the bytes themselves.

    Raises
    ------
    TypeError
        It is no array.
    ValueError
        It is not contiguous, not writable, on a device that bytes cannot be moved to and from, or has no memory.
    EngineUnavailableError
        It is in GPU memory, and the CUDA driver cannot be used; the message says why.
    """
    torch: Any = sys.modules.get("torch")
    if _is_of(torch, "Tensor", array):
        strided = type(array) is torch.Tensor and array.layout is torch.strided
        usual = strided and array.is_cpu and not array.is_nested and array.is_contiguous()
        # The common case, in few calls: read_many has thousands.
        if usual and not array.is_quantized and not array.is_neg() and not array.is_conj():
            memory = array.data_ptr(), array.nbytes, array.untyped_storage(), None
            if memory[0] and not moved(memory):
                return memory
        return _of_tensor(torch, array, writable, name, host)
    if _is_of(sys.modules.get("numpy"), "ndarray", array):
        return _of_ndarray(array, writable, name)
    try:
        view = memoryview(array)
    except (TypeError, ValueError, BufferError):
        pass
    else:
        return _of_buffer(view, writable, name)
    # Before DLPack: it knows the stream.
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_cuda_array(array, interface, writable, name, host)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array, writable, name, host)
    raise TypeError(
        f"{name}: {type(array).__name__} is neither a torch tensor nor a NumPy array, and offers neither the "
        "buffer protocol nor __cuda_array_interface__ nor DLPack"
    )


def memory_or_segments(array: Any, *, writable: bool) -> tuple[Any, AnyMemory]:
    """Return the memory of an array, or of several that follow each other in a file; first of all what was given.

    Several are any iterable of arrays in an order, but no array of another kind. Those to be read into may have
    integers among them: so many bytes of the file are passed over. What can be gone through only once is returned as a
    list.

    Raises
    ------
    TypeError, ValueError, EngineUnavailableError
        As for :func:`memory_of`, which is told of the arrays as ``array[0]`` and so on.
    """
    if not isinstance(array, (list, tuple)):
        try:
            return array, memory_of(array, writable=writable)
        except TypeError:
            if isinstance(array, _core.Segments):  # rows of a table
                return array, (array, array.nbytes, None, None)
            if not is_several(array):
                raise
        array = list(array)
    segments = collect_segments(array, writable=writable)
    return array, (segments, segments.nbytes, None, None)


def collect_segments(arrays: Sequence[Any], *, writable: bool) -> _core.Segments:
    """Return the memory of several arrays, as :func:`memory_or_segments` does."""

    def check(index: int, one: Any) -> Memory:
        if writable and isinstance(one, int) and not isinstance(one, bool):
            raise ValueError(f"array[{index}]: {one} bytes cannot be passed over")
        return memory_of(one, writable=writable, name=f"array[{index}]")

    return _core.collect_segments(arrays, writable, check)


def collect_runs(
    begins: Iterable[int], nbytes: int, end: int, data: Any
) -> tuple[_core.Segments, int]:
    """Return what a read of runs of ``nbytes`` each is given to fill host memory, and where the first one begins.

    They begin at ``begins``, before ``end``. Of what lies between them only their own pages are read.
    """
    numbers = memory_of(array_of("q", begins), writable=False)
    memory = memory_of(data, writable=True, host=True)
    [(_, first, segments)] = _core.rows_of_table(
        *(numbers[0], numbers[1] // 8, False, [end], nbytes, 1, memory[0], memory[2], False)
    )
    return segments, first


def is_several(array: Any) -> bool:
    """Return whether this is an iterable of arrays, rather than an array that cannot be used as it is."""
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


def moved(memory: AnyMemory) -> bool:
    """Return whether an array has given up the memory that a transfer was to use, before its end was seen.

    A torch tensor may get other storage meanwhile (``set_()``, ``.data = ``) or go away: the transfer's is kept. What
    keeps nothing is a storage that gives its memory back (``resize_()``, ``share_memory_()``), and a NumPy array
    resized with ``refcheck=False``. That is told here, unless the same memory has been given to it again.
    """
    address, nbytes, owner, _ = memory
    if isinstance(address, int):
        return _core.first_moved([address], [nbytes], [owner]) is not None
    return address.moved()


def _is_of(library: Any, type_name: str, array: Any) -> bool:
    # Where another thread is just importing the library, nobody can have one of its arrays.
    known = getattr(library, type_name, None)
    return isinstance(known, type) and isinstance(array, known)


def _of_tensor(torch: Any, tensor: Any, writable: bool, name: str, host: bool) -> Memory:
    device = tensor.device
    if device.type != "cpu" and host:
        raise ValueError(f"{name}: a tensor on device {device} has no host memory to move")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name}: a tensor on device {device} is neither in host memory nor on an NVIDIA GPU"
        )
    if device.type == "cuda" and torch.version.hip is not None:
        raise ValueError(
            f"{name}: a tensor on an AMD GPU ({device}) cannot be moved: only NVIDIA's driver is known here "
            "(remedy: pass .cpu())"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: a tensor of layout {tensor.layout} is not contiguous memory")
    if tensor.is_nested:
        raise ValueError(
            f"{name}: a nested tensor is more than its memory (remedy: pass .values())"
        )
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
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and _storage_device(tensor) != device.type
    )
    address = 0 if wrapper else tensor.data_ptr()
    if wrapper or (address == 0 and nbytes > 0):
        raise ValueError(
            f"{name}: {type(tensor).__name__} has no memory of its own (for a DTensor pass .to_local(); an FSDP "
            "parameter may be resharded)"
        )
    # The storage owns the memory: the tensor may get another one meanwhile.
    storage = tensor.untyped_storage()
    check_storage(tensor, name)
    if device.type == "cpu":
        return address, nbytes, storage, None
    stream = torch.cuda.current_stream(device).cuda_stream
    return _gpu_memory(address, nbytes, storage, device.index, stream, name)


def is_plain(tensor: Any) -> bool:
    """Return whether a torch tensor is its elements in memory, and nothing else."""
    torch = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def check_storage(tensor: Any, name: str) -> None:
    """Refuse a strided tensor whose storage was made smaller than its shape: it has bytes of others, or none."""
    storage_nbytes = tensor.untyped_storage().nbytes()
    places = zip(tensor.size(), tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in places)
    if tensor.numel() and (last + 1) * tensor.element_size() > storage_nbytes:
        raise ValueError(
            f"{name}: the tensor's storage has {storage_nbytes} bytes, less than its shape says (it was resized)"
        )


def tensor_bytes(tensor: Any) -> Any:
    """Return a contiguous torch tensor's memory as a one-dimensional tensor of uint8.

    By strides: those of a single element may be any, view(-1) keeps them, and then its bytes cannot be viewed.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(sys.modules["torch"].uint8)


def _gpu_memory(
    address: int, nbytes: int, owner: object, device: int, stream: int, name: str
) -> Memory:
    global last_gpu
    if nbytes == 0:  # nothing to wait for
        return address, nbytes, owner, None
    _check_driver()
    if _core.is_capturing(device, stream):
        raise ValueError(
            f"{name}: the stream in use is being captured into a CUDA graph, which files cannot be part of"
        )
    last_gpu = device
    return address, nbytes, owner, (device, stream)


def _check_driver() -> None:
    refusal = _core.cuda_refusal()
    if refusal is not None:
        raise EngineUnavailableError(f"GPU memory cannot be moved: {refusal}")


def _storage_device(tensor: Any) -> str | None:
    try:
        return str(tensor.untyped_storage().device.type)
    except (NotImplementedError, RuntimeError):
        return None


def _masked_type() -> tuple[type, ...]:
    """Return the type of masked arrays; none before that module has been imported.

    Not `numpy.ma`, which would import it in the first transfer: a child forked beside that by another thread would wait
    for the import for ever.
    """
    masked = getattr(sys.modules.get("numpy.ma.core"), "MaskedArray", None)
    return () if masked is None else (masked,)


def _of_ndarray(array: Any, writable: bool, name: str) -> Memory:
    if isinstance(array, _masked_type()):
        raise ValueError(
            f"{name}: a masked array is more than its bytes (remedy: pass .data or .filled())"
        )
    if array.dtype.hasobject:
        raise ValueError(
            f"{name}: an array of Python objects (dtype {array.dtype}) has no bytes to move"
        )
    memory = _core.buffer_memory(array, writable)
    if memory is not None:
        return memory[0], memory[1], array, None
    if not array.flags.c_contiguous:
        if writable:
            raise ValueError(
                f"{name}: cannot read into an array that is not C-contiguous (strides {array.strides})"
            )
        array = array.copy(order="C")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: cannot read into a read-only array")
    # The buffer protocol has no word for some dtypes (datetime64, ml_dtypes' bfloat16).
    return array.__array_interface__["data"][0], array.nbytes, array, None


def _of_buffer(view: memoryview, writable: bool, name: str) -> Memory:
    if writable and view.readonly:
        raise ValueError(f"{name}: cannot read into a read-only buffer")
    if "O" in re.sub(":[^:]*:", "", view.format):  # fields have their names between colons
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
    return memory[0], memory[1], view, None


def _of_cuda_array(
    array: Any, interface: dict[str, Any], writable: bool, name: str, host: bool
) -> Memory:
    # numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, versions 2 and 3
    kind = type(array).__name__
    if host:
        raise ValueError(f"{name}: a {kind} in GPU memory has no host memory to move")
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    if typestr[1] not in _KINDS_OF_BYTES:
        raise ValueError(f"{name}: a {kind} of type {typestr!r} has no plain bytes to move")
    if interface.get("mask") is not None:
        raise ValueError(f"{name}: a {kind} with a mask is more than its bytes")
    itemsize = int(typestr[2:])
    if not _is_c_contiguous(shape, interface.get("strides"), itemsize):
        raise ValueError(f"{name}: an array that is not C-contiguous cannot be moved as it is")
    address, read_only = interface["data"]
    if writable and (read_only or _is_immutable(array)):
        raise ValueError(f"{name}: cannot read into a read-only {kind}")
    stream = interface.get("stream")
    if stream == 0:  # CUDA takes it for one of two streams, and the protocol forbids it
        raise ValueError(f"{name}: the stream of a {kind} is 0, which says nothing")
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return 0, 0, array, None
    device = _device_of(address, f"{name}: a {kind}")
    stream = LEGACY_STREAM if stream is None else stream
    return _gpu_memory(address, nbytes, array, device, stream, name)


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
        raise ValueError(f"{what}: no GPU has memory at the address {address:#x}") from None


def _of_dlpack(array: Any, writable: bool, name: str, host: bool) -> Memory:
    device, index = array.__dlpack_device__()
    on_gpu = device in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED) and not host
    if device not in _HOST_DEVICES and not on_gpu:
        raise ValueError(
            f"{name}: an array on DLPack device ({int(device)}, {index}) has no "
            f"{'host memory' if host else 'memory'} to move"
        )
    # It names no stream: the array's library lets the legacy one wait for its own.
    address, nbytes, is_writable, contiguous, view = _core.dlpack_memory(array)
    if writable and (not is_writable or _is_immutable(array)):
        raise ValueError(f"{name}: cannot read into a read-only {type(array).__name__}")
    if not contiguous:
        raise ValueError(f"{name}: an array that is not C-contiguous cannot be moved as it is")
    # What was exported is valid as long as the view is, whatever becomes of the array.
    if not on_gpu or nbytes == 0:
        return address, nbytes, view, None
    if device == _DLPACK_CUDA:  # managed memory may be anywhere
        index = _device_of(address, f"{name}: a {type(array).__name__}")
    return _gpu_memory(address, nbytes, view, index, LEGACY_STREAM, name)


def _is_immutable(array: object) -> bool:
    """Return whether this is a JAX array, which neither DLPack before 1.0 nor CUDA's interface can say."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
