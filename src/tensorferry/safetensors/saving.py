"""Saving, with safetensors' functions and byte-identical files. A file is replaced atomically.

The arguments are validated by the rules of safetensors' own functions before any file is touched. The header is built
in memory. A stream of the core (:mod:`tensorferry.transfer.new_file`) writes the tensors directly from their memory, on
the host or on an NVIDIA GPU, to a new file, which replaces the old one once it is complete
(:mod:`tensorferry.transfer.replacement`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import operator
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.base.checks import checked_path
from tensorferry.base.ranges import memory_order
from tensorferry.safetensors.dtypes import DTYPES, NAMES, header_shape, name_of
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.header import build
from tensorferry.transfer.arrays import memory_of
from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import torch

    from tensorferry.base.checks import Path
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.new_file import NewFile


class TensorToSave(NamedTuple):
    """A tensor to save.

    Attributes
    ----------
    name, dtype : str
        The name and the dtype in the header.
    shape : tuple of int
        The shape in the header, which counts single elements of F4, not pairs.
    array : object
        The tensor's data: an object that the core's stream accepts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].bits // 8


def save_file(
    tensors: Mapping[str, Any],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> None:
    """Save tensors to a file, as ``safetensors.torch.save_file`` and ``safetensors.numpy.save_file`` do.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor or numpy.ndarray
        The tensors. They must be contiguous and dense, and torch's tensors must not share memory. Tensors on the CPU or
        an NVIDIA GPU are written directly from their memory. Tensors on other devices are copied to the CPU, one at a
        time.
    filename : str, bytes or PathLike
        The path of the file. An existing file is replaced atomically once the new one is complete: if the process ends
        earlier, for any reason, the old file remains. A symbolic link is followed, and permissions are kept.
    metadata : dict of str to str, optional
        Metadata for the header.
    sync : bool
        Whether the file survives a power cut once this returns.

    Raises
    ------
    ValueError
        The argument is not a dict of tensors, or a tensor is sparse or not contiguous.
    RuntimeError
        Some of torch's tensors share memory.
    SafetensorError
        The format lacks a dtype, or the header cannot be built.
    TypeError
        A name, or a key or value of the metadata, is not a string.
    IsADirectoryError
        The path is a directory.
    StorageError, OSError
        The file cannot be written, for example because the drive is full. The old file remains.

    Notes
    -----
    The file is byte-identical to one that safetensors writes for the same tensors and metadata, except that the
    metadata are sorted by their keys: safetensors' own order changes from run to run. If another thread modifies a
    tensor during the call, the file has a mixture of that tensor's old and new values. The other tensors are not
    affected.
    """
    write_file(entries_of(tensors), filename, metadata, sync=sync)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file with these tensors. The rules and the errors are those of :func:`save_file`."""
    return _serialize(entries_of(tensors), metadata)


def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    sync: bool = False,
) -> None:
    """Save a torch model, with tensors that may share memory, as ``safetensors.torch.save_model`` does.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Of several tensors in the same memory one is saved, and the metadata map the others' names to it.
    filename, metadata, sync
        As for :func:`save_file`.
    force_contiguous : bool
        Whether to save tensors that are not contiguous, by way of a contiguous copy of one tensor at a time.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them covers all of it.
    ValueError, SafetensorError, StorageError, OSError
        As for :func:`save_file`.
    """
    state, metadata = without_duplicates(model.state_dict(), metadata)
    try:
        entries = entries_of(state, contiguous=not force_contiguous)
    except ValueError as error:
        hint = "Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        raise ValueError(f"{error} {hint}") from None
    write_file(entries, filename, metadata, sync=sync)


class TensorSpec:
    """A description of a tensor in memory, for :func:`serialize`.

    Parameters
    ----------
    dtype : str
        The name of the dtype in torch or NumPy, such as "float32".
    shape : sequence of int
        The shape in torch or NumPy. For float4_e2m1fn_x2, torch counts pairs of elements, and the attribute ``shape``
        counts single elements: its last dimension is twice as large as the argument's.
    data_ptr : int
        The address of the data, which must stay valid until the tensor has been saved.
    data_len : int
        The size of the data in bytes.

    Raises
    ------
    SafetensorError
        The format lacks the dtype.
    """

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        self.dtype = _dtype_of(dtype)
        self.shape = list(header_shape(shape, self.dtype))
        self.data_ptr = operator.index(data_ptr)
        self.data_len = operator.index(data_len)

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self.shape}, data_ptr={self.data_ptr}, "
            f"data_len={self.data_len})"
        )


def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a file with the tensors that :class:`TensorSpec` objects describe.

    Raises
    ------
    SafetensorError
        ``data_len`` does not match a shape, or the header cannot be built.
    """
    return _serialize(_entries_of_specs(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> None:
    """Save the tensors that :class:`TensorSpec` objects describe to a file.

    The errors are those of :func:`serialize`, and those that :func:`save_file` raises for a file that cannot be
    written. ``sync`` is as for :func:`save_file`.
    """
    write_file(_entries_of_specs(tensor_dict), filename, metadata, sync=sync)


def entries_of(tensors: Mapping[str, Any], *, contiguous: bool = True) -> list[TensorToSave]:
    """Validate tensors by safetensors' rules, and return an entry for each.

    If ``contiguous`` is false, tensors that are not contiguous are accepted, too.
    """
    # A library that is not imported cannot have made any of the tensors, so there is no need to import it here.
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    # Tensors and NumPy arrays are both accepted, but programs compare safetensors' error texts, which name only one of
    # the two.
    expected = "numpy.ndarray" if torch is None else "torch.Tensor"
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, {expected}] but received {type(tensors)}")
    entries, of_torch, sparse = [], {}, []
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors: a tensor's name must be a string (got {name!r})")
        if torch is not None and isinstance(value, torch.Tensor):
            of_torch[name] = value
            if value.is_meta:
                raise NotImplementedError(
                    f"Cannot copy out of meta tensor; no data! (tensor {name!r})"
                )
            if value.layout is not torch.strided:
                sparse.append(name)
        elif numpy is None or not isinstance(value, numpy.ndarray):
            raise ValueError(
                f"Key `{name}` is invalid, expected {expected} but received {type(value)}"
            )
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You can make it "
            "a dense tensor before saving with `.to_dense()` but be aware this might make a much larger file than "
            "needed."
        )
    overlapping = [set(names) for names in group_by_memory(of_torch) if len(names) > 1]
    if overlapping:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when "
            f"loading them again: {overlapping}. A potential way to correctly save your model is to use `save_model`. "
            "More information at https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )
    for name, value in tensors.items():
        ours = of_torch.get(name)
        is_contiguous = value.flags.c_contiguous if ours is None else ours.is_contiguous()
        if contiguous and not is_contiguous:
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you "
                "are trying to save tensors which are reference of each other in which case it's recommended to save "
                "only the full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to "
                "pack it before saving."
            )
        dtype = _dtype_of(name_of(value.dtype), name)
        shape = header_shape(value.shape, dtype, name)
        entries.append(TensorToSave(name, dtype, shape, value))
    return entries


def without_duplicates(
    state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, *, equal: bool = False
) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    """Keep one of each set of tensors in the same memory, and remove the others.

    Return the state without the removed tensors, and metadata that map the name of each removed tensor to the name of
    the tensor that was kept for it. A program that loads the file gets the kept tensor's values for the removed name.
    With ``equal``, therefore, both tensors must have the same values.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them covers all of it; or ``equal`` is true, and their values differ.
    """
    state = dict(state)
    for name, kept in aliases(state).items():
        if equal and _view_of(state[name]) != _view_of(state[kept]):
            raise RuntimeError(
                f"{name!r} and {kept!r} are different views of the same memory, of which only one would be saved "
                f"(remedy: pass a copy, {name!r}: tensor.clone())"
            )
        metadata = {name: kept, **(metadata or {})}  # metadata from the caller take precedence
        del state[name]
    return state, metadata


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties by which two tensors that begin at the same address have the same values."""
    strides = [
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    return tensor.dtype, tensor.shape, strides, tensor.is_conj(), tensor.is_neg()


def write_file(
    entries: Sequence[TensorToSave], path: Path, metadata: Mapping[str, str] | None, *, sync: bool
) -> None:
    """Write a new file, and replace the old one with it."""
    header, ordered, nbytes = lay_out(entries, metadata)
    refuse_directory(path)
    with replacing(path, sync=sync, nbytes=nbytes) as new, new.naming_target():
        write_entries(new.file, header, ordered)


def replacing(path: Path, *, sync: bool, nbytes: int, sums: Checksums | None = None) -> Replacement:
    """Return a :class:`Replacement` for a file of this size. It also removes the checksums of the old file."""
    return Replacement(
        path,
        sync=sync,
        reserve_nbytes=nbytes,
        checksums=sums,
        has_sidecar=True,
    )


def lay_out(
    entries: Iterable[TensorToSave], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[TensorToSave], int]:
    """Return the header of a file, its tensors in the order of their offsets, and the size of the file."""
    by_name = {entry.name: entry for entry in entries}
    header, names = build(
        ((entry.name, entry.dtype, entry.shape) for entry in by_name.values()),
        checked_metadata(metadata),
    )
    ordered = [by_name[name] for name in names]
    return header, ordered, len(header) + sum(entry.nbytes for entry in ordered)


def write_entries(file: NewFile, header: bytes, entries: Iterable[TensorToSave]) -> None:
    """Write the header and the tensors of a file."""
    file.write_bytes(header)
    kept: list[Any] = []
    for entry in entries:
        if entry.nbytes == 0:
            continue
        array, is_copy = _bytes_of(entry)
        if not is_copy:
            kept.append(array)
            continue
        # Without kept=True, write() returns once it no longer needs the copy, so only one copy exists at a time. The
        # stream is sequential, so the tensors before this one, which `kept` has collected, are written first.
        file.write(kept, kept=True)
        kept = []
        file.write(array)
    file.write(kept, kept=True)


def refuse_directory(path: Path) -> None:
    """Raise IsADirectoryError if the path is a directory, as open() does."""
    text = checked_path(path)
    if os.path.isdir(text):  # noqa: PTH112 (it may be bytes)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(text))


def checked_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return metadata. Raise TypeError if a key or value is not a string."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: {type(metadata).__name__} is not a dict of str to str")
    for key, value in metadata.items():
        for one in (key, value):
            if not isinstance(one, str):
                raise TypeError(f"metadata: {one!r} ({type(one).__name__}) is not a string")
    return metadata


def _bytes_of(entry: TensorToSave) -> tuple[Any, bool]:
    """Return an object with the tensor's bytes that the core's stream accepts, and whether saving it needs a copy."""
    array = entry.array
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach()
        if array.device.type not in ("cpu", "cuda") and array.device.type != "meta":
            return array.cpu(), True
        # The stream makes a copy of a view that is not contiguous, or is lazily conjugated or negated.
        return array, not array.is_contiguous() or array.is_conj() or array.is_neg()
    if numpy is not None and isinstance(array, numpy.ndarray):
        if array.dtype.newbyteorder("<") != array.dtype:
            return array.astype(array.dtype.newbyteorder("<")), True
        return array, not array.flags.c_contiguous
    return array, False


def _serialize(entries: list[TensorToSave], metadata: Mapping[str, str] | None) -> bytes:
    header, ordered, _ = lay_out(entries, metadata)
    owners = []  # keep the arrays alive while join() reads their memory

    def views() -> Iterator[Any]:
        yield header
        for entry in ordered:
            if entry.nbytes == 0:
                continue
            array, _ = _bytes_of(entry)
            if getattr(array, "is_cuda", False):
                array = array.cpu()
            address, nbytes, owner, _ = memory_of(array, writable=False, host=True, name=entry.name)
            owners.append((array, owner))
            yield (ctypes.c_ubyte * nbytes).from_address(address)

    return b"".join(views())


def _entries_of_specs(specs: Mapping[str, Any]) -> list[TensorToSave]:
    entries = []
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise TypeError(f"tensor_dict: a tensor's name must be a string (got {name!r})")
        try:
            dtype, shape = spec.dtype, tuple(spec.shape)
            address, nbytes = spec.data_ptr, spec.data_len
        except AttributeError:
            raise TypeError(f"tensor_dict: {type(spec).__name__} is not a TensorSpec") from None
        entry = TensorToSave(name, dtype, shape, None)
        if entry.nbytes != nbytes:
            raise SafetensorError(
                f"shape {list(shape)} of {dtype} has {entry.nbytes} bytes, and data_len is {nbytes}",
                name=name,
            )
        entries.append(entry._replace(array=(ctypes.c_ubyte * nbytes).from_address(address)))
    return entries


def _dtype_of(known_as: str, name: str | None = None) -> str:
    dtype = NAMES.get(known_as)
    if dtype is None:
        supported = ", ".join(NAMES)
        raise SafetensorError(
            f'Unknown dtype "{known_as}". Supported dtypes: {supported}', name=name
        )
    return dtype


def aliases(state: Mapping[str, torch.Tensor], preferred: Collection[str] = ()) -> dict[str, str]:
    """Return a map from the name of each tensor that shares its memory with a kept tensor to the kept tensor's name.

    One of the tensors in the same memory is kept: if possible, one with a name in ``preferred``.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them covers all of it.
    """
    found: dict[str, str] = {}
    for names in group_by_memory(state):
        if len(names) < 2:
            continue
        complete = {name for name in names if _covers_storage(state[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep for "
                f"saving amongst: {set(names)}. None is covering the entire storage. Refusing to save/load the model "
                "since you could be storing much more memory than needed. Please refer to "
                "https://huggingface.co/docs/safetensors/torch_shared_tensors for more information."
            )
        kept = min(complete & set(preferred) or complete)
        found |= {name: kept for name in sorted(names) if name != kept}
    return found


def _covers_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its storage: each byte belongs to exactly one element.

    An expanded tensor does not, even if it has the size of its storage: several of its elements are the same bytes, and
    other bytes belong to no element.
    """
    storage = tensor.untyped_storage()
    if storage.data_ptr() != tensor.data_ptr() or storage.nbytes() != tensor.nbytes:
        return False
    return memory_order(tensor.shape, tensor.stride()) is not None


def group_by_memory(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Group the names of tensors with overlapping memory. A tensor that shares no memory is a group of one."""
    by_storage: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}
    for name, tensor in state.items():
        # untyped_storage() raises for tensors without storage, such as sparse ones and those of some subclasses. These
        # cannot share memory.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
            if address and nbytes and tensor.device.type != "meta":
                key = (tensor.device, address, nbytes)
                by_storage.setdefault(key, []).append((*_span(tensor), name))
    groups: list[list[str]] = []
    for areas in by_storage.values():
        last = -1
        for begin, end, name in sorted(areas):
            if begin < last:
                groups[-1].append(name)
            else:
                groups.append([name])
            last = max(last, end)
    return groups


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element and the end address of its last element."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return begin, begin + (int(steps) + 1) * tensor.element_size()
