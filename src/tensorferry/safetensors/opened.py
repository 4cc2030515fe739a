"""``safe_open``: a handle to one file. The header is read at once; tensors and slices are read on request."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.safetensors.dtypes import torch_shape
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.loading import SourceFile, checked_direct, load_all, path_of
from tensorferry.safetensors.parts import PartLoader, TensorPart
from tensorferry.safetensors.read_ahead import FileTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorferry.base.checks import Readable


# The memory for tensors of a prefetch that have been read and not taken.
_PREFETCH_NBYTES = 1 << 30


@dataclass(eq=False)
class TensorMeta:
    """A tensor's entry in the header.

    Attributes
    ----------
    dtype : str
        The format's name of the dtype.
    shape : list of int
        The shape in the header, in elements.
    data_offsets : tuple of int
        The offset of the first byte and the offset of the end, both relative to the end of the header.
    """

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class safe_open:  # noqa: N801
    """An open safetensors file. It is a context manager.

    The handle is thread-safe, and usable in a forked child. Tensors and slices that were taken from it stay usable
    after it is closed.

    Parameters
    ----------
    filename : str, bytes or PathLike, or pair of store and key
        The file, or an object in a bucket as for :func:`tensorferry.open`. Objects in buckets are always read, never
        mapped.
    framework : str
        "pt", "torch" or "pytorch"; "np" or "numpy".
    device : str, int or torch.device
        The device of torch's tensors. An integer is the index of an accelerator.
    backend : "mmap" or "pread"
        safetensors' own option. "pread" is the same as ``direct="always"``.
    direct : "auto", "always" or "never"
        "auto" maps a file, copy-on-write, if the page cache holds at least half of it, and otherwise reads it with
        direct I/O into memory on huge pages. (:meth:`get_tensors` decides for each part of the file.) "always" maps
        nothing. "never" maps everything.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    SafetensorError
        The file breaks a rule of the format, or the framework, device or backend is invalid.
    StorageError
        The file cannot be read.
    """

    _held: FileTensors | None = None  # None before the handle is opened, and once it is closed

    def __init__(
        self,
        filename: Readable,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        direct: str = "auto",
    ) -> None:
        mode = checked_direct(direct, backend)
        path = path_of(filename)
        library = framework_of(framework, device)
        self._held = FileTensors(SourceFile(path, mode), library)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._tensors().source.header.tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their offsets."""
        return list(self._tensors().source.header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata that the file's writer added, or None."""
        metadata = self._tensors().source.header.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's entry in the header."""
        source = self._tensors().source
        tensor = source.stored(name).tensor
        first = source.header.nbytes
        return TensorMeta(
            tensor.dtype, list(tensor.shape), (tensor.begin - first, tensor.end - first)
        )

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.

        As long as it exists, further calls return the same memory. If the caller requests tensors in the order of
        :meth:`offset_keys`, up to 64 MiB of the following tensors are read ahead.

        Raises
        ------
        SafetensorError
            The file has no tensor of this name, or has been changed; the framework lacks its dtype; or the handle is
            closed.
        StorageError
            The tensor cannot be read.
        """
        return self._tensors().get(name)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their offsets. One pipelined transfer reads them."""
        tensors = self._tensors()
        source, framework = tensors.source, tensors.framework
        if framework.on_host:
            return load_all(source, framework)
        parts = [TensorPart(source.stored(name), None, framework) for name in source.header.tensors]
        return dict(PartLoader(parts, tensors, source.header.file_nbytes))

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor for indexing. Indexing it reads only the bytes that the index needs."""
        return PySafeSlice(self._tensors(), name)

    def prefetch(
        self,
        plan: Mapping[str, Any] | None = None,
        *,
        device: Any = None,
        threads: int = 8,
    ) -> PrefetchLoader:
        """Begin to load tensors in the background.

        Parameters
        ----------
        plan : mapping of str to slice or None, optional
            The names of the tensors to load, each with None for the complete tensor, or with an index that selects a
            part of it. By default all tensors are loaded completely.
        device : str, int or torch.device, optional
            The device of the tensors; by default that of the handle.
        threads : int
            Accepted for the sake of callers that pass it, and otherwise unused: the core's worker threads read.

        Raises
        ------
        SafetensorError
            The plan is empty or names an unknown tensor, or the framework lacks a dtype.
        """
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: {threads!r} is not a positive integer")
        tensors = self._tensors()
        framework = tensors.framework
        if device is not None:
            framework = framework_of(framework.name, device)
        # The loader has a map of its own: its tensors do not share the memory of those of the handle.
        return PrefetchLoader(FileTensors(tensors.source, framework), plan)

    def __enter__(self) -> safe_open:
        self._tensors()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(wait=True)

    def __del__(self) -> None:
        self._close(wait=False)

    def _close(self, *, wait: bool) -> None:
        # The file is closed with the last reference to the source. Slices, loaders and other threads may still hold a
        # reference. If none of them does, `held` has the last one, and the file is closed once the read-ahead has
        # ended.
        held, self._held = self._held, None
        if held is not None and not held.is_parents:
            held.close(wait=wait)

    def __repr__(self) -> str:
        held = self._held
        return f"<safe_open {held.source.path!r}>" if held else "<closed safe_open>"

    def _tensors(self) -> FileTensors:
        held = self._held
        if held is None:
            raise SafetensorError("File is closed")
        if held.is_parents:  # in a forked child the parent's transfers never complete
            self._held = held = FileTensors(held.source, held.framework)
        return held


class PySafeSlice:
    """A tensor of a file that is read when it is indexed, by torch's rules. Only the bytes for the index are read."""

    def __init__(self, tensors: FileTensors, name: str) -> None:
        self._tensors = tensors
        self._tensor = tensors.source.stored(name).tensor

    def get_shape(self) -> list[int]:
        """Return the shape to which an index applies.

        It is the shape in the header, except that the last dimension of F4 counts pairs of elements, as torch does.
        """
        tensor = self._tensor
        return list(torch_shape(tensor.dtype, tensor.shape, self._tensors.source.path, tensor.name))

    def get_dtype(self) -> str:
        """Return the format's name of the tensor's dtype."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return the part of the tensor that an index selects.

        If the index has lists for several dimensions, the result has one position for each pair of list entries, as in
        torch, but all combinations of the lists' positions are read.

        Raises
        ------
        SliceError
            The index is out of range or has too many dimensions. This is an IndexError and a SafetensorError.
        SafetensorError
            The framework lacks the dtype, or the file has been changed.
        StorageError
            The file cannot be read.
        """
        tensors = self._tensors
        if tensors.is_parents:
            self._tensors = tensors = FileTensors(tensors.source, tensors.framework)
        # In a plan None stands for the complete tensor, and here for a new dimension.
        return tensors.get_part(self._tensor.name, (None,) if index is None else index)

    def __repr__(self) -> str:
        tensor = self._tensor
        return f"<slice of {tensor.name!r}: {tensor.dtype} {list(tensor.shape)}>"


class PrefetchLoader(PartLoader):
    """A background load of a file's tensors, created by :meth:`safe_open.prefetch`. It is thread-safe.

    Each tensor is handed out once, by :meth:`take` or by iteration, which yields the names and the tensors that have
    not been taken, in the order of their offsets. At most 64 MiB, or two tensors if these are larger, are being read at
    a time (the environment variable TENSORFERRY_READ_AHEAD changes the limit). Up to 1 GiB of tensors that have been
    read stay in memory until they are taken or the loader is closed.
    """

    def __init__(self, tensors: FileTensors, plan: Mapping[str, Any] | None) -> None:
        source = tensors.source
        if plan is None:
            plan = dict.fromkeys(source.header.tensors)
        for name in plan:
            if not isinstance(name, str):
                raise SafetensorError(f"the plan's key {name!r} is not a tensor's name")
        if not plan:
            raise SafetensorError("the plan of a prefetch has no tensors", source.path)
        wanted = (TensorPart(source.stored(name), plan[name], tensors.framework) for name in plan)
        parts = sorted(wanted, key=lambda part: (part.stored.tensor.begin, part.stored.tensor.end))
        self._path, self._names = source.path, [part.name for part in parts]
        super().__init__(parts, tensors, _PREFETCH_NBYTES, automatic=True)
        with contextlib.suppress(Exception):  # raised again for the tensor that it concerns
            self.pipeline.advance()

    def names(self) -> list[str]:
        """Return the names of all tensors of the plan, in the order of their offsets."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """Wait for a tensor, and return it.

        Raises
        ------
        SafetensorError
            The tensor is not in the plan or was handed out before, the file has been changed, or the loader is closed.
        StorageError
            The tensor cannot be read.
        """
        self.pipeline._check_process()
        with self.pipeline.lock:
            self._check_open()
            if name not in self._parts:
                raise SafetensorError(f"{name!r} is not in the prefetch plan", self._path)
            if not self.has(name):
                raise SafetensorError(
                    "tensor already delivered (prefetch hands each tensor out once, via take or iteration)",
                    self._path,
                    name=name,
                )
            return super().take(name)

    def close(self, *, wait: bool = False) -> None:
        """Stop loading, and free the tensors that were not taken. Taken tensors stay usable."""
        super().close(wait=wait)

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.pipeline.closed:
            raise SafetensorError("prefetch loader closed", self._path)
