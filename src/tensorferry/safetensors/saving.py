"""Saving: safetensors' functions and files, to the byte; at the drive's speed, and the old file or the new one.

What is not to be saved is refused before anything is touched, by the rules of safetensors' own functions. The header is
made in memory; tensors go through a stream of the core (:mod:`tensorferry.transfer.new_file`) straight from where they
are, host memory or an NVIDIA GPU's, into a file that takes its place when it is whole
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
from tensorferry.safetensors import checksums
from tensorferry.safetensors.dtypes import DTYPES, header_shape
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

# What torch and NumPy (with ml_dtypes as well) call the format's dtypes.
_NAMES = {
    attribute.rstrip("_"): dtype
    for dtype in DTYPES.values()
    for attribute in (dtype.torch, dtype.numpy)
    if attribute is not None
}


class TensorToSave(NamedTuple):
    """A tensor that is to be saved.

    Attributes
    ----------
    name, dtype : str
        As the header has them.
    shape : tuple of int
        As the header has it: of F4, elements, not pairs.
    array : object
        Its bytes: what a stream takes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
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
        Contiguous and dense, and no two of torch's in the same memory. On the CPU or an NVIDIA GPU they go to the file
        from where they are; those on other devices are copied to the CPU, one at a time.
    filename : str, bytes or PathLike
        The file. What is there stays until the new one is complete, and is then replaced at one stroke, whatever ends
        the process. A symbolic link is followed, and permissions are kept.
    metadata : dict of str to str, optional
        Written to the header.
    sync : bool
        Whether the file has survived a power cut once this returns.

    Raises
    ------
    ValueError
        No dict of tensors, or a tensor is sparse or not contiguous.
    RuntimeError
        Some of torch's tensors share memory.
    SafetensorError
        The format has no such dtype, or the header cannot be written.
    TypeError
        A name or metadata is no string.
    IsADirectoryError
        There is a directory.
    StorageError, OSError
        The file could not be written: there is no space for it, for example. What was there has stayed.

    Notes
    -----
    The bytes are those of safetensors for the same tensors and metadata; of several metadata, in the order of their
    names. A tensor that changes meanwhile is saved as a mixture of before and after; the rest is as it should be.
    """
    write_file(entries_of(tensors), filename, metadata, sync=sync)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file with these tensors; see :func:`save_file` for what may be saved and what is raised."""
    return _joined(entries_of(tensors), metadata)


def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    sync: bool = False,
) -> None:
    """Save a model of torch's, in which tensors may share memory, as ``safetensors.torch.save_model`` does.

    Parameters
    ----------
    model : torch.nn.Module
        Of tensors that are the same memory one is saved; metadata tell the others' names.
    filename, metadata, sync
        As for :func:`save_file`.
    force_contiguous : bool
        Write tensors that are not contiguous as if they were; they are copied for that, one at a time.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them has all of it.
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
    """A tensor for :func:`serialize`: where its bytes are, and what.

    Parameters
    ----------
    dtype : str
        As torch and NumPy call it: "float32".
    shape : sequence of int
        Of float4_e2m1fn_x2 as torch has it; the attribute then counts elements, not pairs.
    data_ptr, data_len : int
        The address of its bytes, which must stay there until it has been saved, and how many they are.

    Raises
    ------
    SafetensorError
        The format has no such dtype.
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
    """Return the bytes of a file with these tensors.

    Raises
    ------
    SafetensorError
        A shape does not have as many bytes as there are, or as for :func:`save_file`.
    """
    return _joined(_of_specs(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> None:
    """Save these tensors to a file; see :func:`serialize` and :func:`save_file`."""
    write_file(_of_specs(tensor_dict), filename, metadata, sync=sync)


def entries_of(tensors: Mapping[str, Any], *, contiguous: bool = True) -> list[TensorToSave]:
    """Return what is to be saved, checked as safetensors does; without ``contiguous`` it need not be."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    # Arrays of both kinds may be there; programs compare safetensors' texts, which name one.
    expected = "numpy.ndarray" if torch is None else "torch.Tensor"
    if not isinstance(tensors, Mapping):
        raise ValueError(f"Expected a dict of [str, {expected}] but received {type(tensors)}")
    entries, of_torch, sparse = [], {}, []
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors: {name!r} is no string, and cannot be a tensor's name")
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
    together = [set(names) for names in shared(of_torch) if len(names) > 1]
    if together:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when "
            f"loading them again: {together}. A potential way to correctly save your model is to use `save_model`. "
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
        dtype = _dtype_of(
            str(value.dtype).removeprefix("torch.") if ours is not None else value.dtype.name, name
        )
        shape = header_shape(value.shape, dtype, name)
        entries.append(TensorToSave(name, dtype, shape, value))
    return entries


def without_duplicates(
    state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    """Return a state with one of all tensors that are the same memory, and metadata with the names of the others.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them has all of it.
    """
    state = dict(state)
    for name, kept in aliases(state).items():
        metadata = {name: kept, **(metadata or {})}  # what the caller says of it stays
        del state[name]
    return state, metadata


def write_file(
    entries: Sequence[TensorToSave], path: Path, metadata: Mapping[str, str] | None, *, sync: bool
) -> None:
    """Write a file in the place of another."""
    header, ordered, nbytes = laid_out(entries, metadata)
    refuse_directory(path)
    with replacing(path, sync=sync, nbytes=nbytes) as new, new.named():
        write_entries(new.file, header, ordered)


def replacing(path: Path, *, sync: bool, nbytes: int, sums: Checksums | None = None) -> Replacement:
    """Return what a new file of so many bytes is written to; kept checksums go with the old file."""
    return Replacement(
        path,
        sync=sync,
        reserve_nbytes=nbytes,
        checksums=sums,
        beside_suffix=checksums.SUFFIX,
    )


def laid_out(
    entries: Iterable[TensorToSave], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[TensorToSave], int]:
    """Return a file's header, its tensors in their order, and how many bytes it has."""
    by_name = {entry.name: entry for entry in entries}
    header, names = build(
        ((entry.name, entry.dtype, entry.shape) for entry in by_name.values()),
        checked_metadata(metadata),
    )
    ordered = [by_name[name] for name in names]
    return header, ordered, len(header) + sum(entry.nbytes for entry in ordered)


def write_entries(file: NewFile, header: bytes, entries: Iterable[TensorToSave]) -> None:
    """Write a file's header and tensors."""
    file.write_bytes(header)
    kept: list[Any] = []
    for entry in entries:
        if entry.nbytes == 0:
            continue
        array, is_copy = _bytes_of(entry)
        if not is_copy:
            kept.append(array)
            continue
        # It goes as soon as it has been copied; all before it must go first.
        file.write(kept, kept=True)
        kept = []
        file.write(array)
    file.write(kept, kept=True)


def refuse_directory(path: Path) -> None:
    """Refuse a directory in the place of a file, as open() does."""
    text = checked_path(path)
    if os.path.isdir(text):  # noqa: PTH112 (it may be bytes)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(text))


def checked_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return metadata, or raise TypeError if they are not strings."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: {type(metadata).__name__} is no dict of str to str")
    for key, value in metadata.items():
        for one in (key, value):
            if not isinstance(one, str):
                raise TypeError(f"metadata: {one!r} ({type(one).__name__}) is no string")
    return metadata


def _bytes_of(entry: TensorToSave) -> tuple[Any, bool]:
    """Return what a stream takes for a tensor, and whether it is a copy."""
    array = entry.array
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach()
        if array.device.type not in ("cpu", "cuda") and array.device.type != "meta":
            return array.cpu(), True
        return array, not array.is_contiguous() or array.is_conj() or array.is_neg()
    if numpy is not None and isinstance(array, numpy.ndarray):
        if array.dtype.newbyteorder("<") != array.dtype:
            return array.astype(array.dtype.newbyteorder("<")), True
        return array, not array.flags.c_contiguous
    return array, False


def _joined(entries: list[TensorToSave], metadata: Mapping[str, str] | None) -> bytes:
    header, ordered, _ = laid_out(entries, metadata)
    owners = []  # as long as their bytes are looked at

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


def _of_specs(specs: Mapping[str, Any]) -> list[TensorToSave]:
    entries = []
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise TypeError(f"tensor_dict: {name!r} is no string, and cannot be a tensor's name")
        try:
            dtype, shape = spec.dtype, tuple(spec.shape)
            address, nbytes = spec.data_ptr, spec.data_len
        except AttributeError:
            raise TypeError(f"tensor_dict: {type(spec).__name__} is no TensorSpec") from None
        entry = TensorToSave(name, dtype, shape, None)
        if entry.nbytes != nbytes:
            raise SafetensorError(
                f"shape {list(shape)} of {dtype} has {entry.nbytes} bytes, and data_len is {nbytes}",
                name=name,
            )
        entries.append(entry._replace(array=(ctypes.c_ubyte * nbytes).from_address(address)))
    return entries


def _dtype_of(known_as: str, name: str | None = None) -> str:
    dtype = _NAMES.get(known_as)
    if dtype is None:
        supported = ", ".join(_NAMES)
        raise SafetensorError(
            f'Unknown dtype "{known_as}". Supported dtypes: {supported}', name=name
        )
    return dtype.name


def aliases(state: Mapping[str, torch.Tensor], preferred: Collection[str] = ()) -> dict[str, str]:
    """Return the names of tensors that are another one's memory, and which one is kept: preferably one of some names.

    Raises
    ------
    RuntimeError
        Tensors share memory, and none of them has all of it.
    """
    found: dict[str, str] = {}
    for names in shared(state):
        if len(names) < 2:
            continue
        whole = {
            name
            for name in names
            if (storage := state[name].untyped_storage()).data_ptr() == state[name].data_ptr()
            and storage.nbytes() == state[name].nbytes
        }
        if not whole:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep for "
                f"saving amongst: {set(names)}. None is covering the entire storage. Refusing to save/load the model "
                "since you could be storing much more memory than needed. Please refer to "
                "https://huggingface.co/docs/safetensors/torch_shared_tensors for more information."
            )
        kept = min(whole & set(preferred) or whole)
        found |= {name: kept for name in sorted(names) if name != kept}
    return found


def shared(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return names of tensors by the memory that they share, those that share none by themselves."""
    by_storage: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}
    for name, tensor in state.items():
        # Those without memory of their own.
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
    """Return the addresses between which a tensor's elements lie."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return begin, begin + (int(steps) + 1) * tensor.element_size()
