"""``safe_open``: a handle to one file. The header is read at once; tensors and slices are read on request."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.base.ranges import (
    WINDOW_NBYTES,
    ReadPlan,
    Window,
    read_plan,
    runs,
    segments_of,
    strides_of,
)
from tensorferry.safetensors.dtypes import torch_shape
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import Framework, framework_of, itemsize_of
from tensorferry.safetensors.loading import (
    LoadRead,
    PendingLoad,
    SourceFile,
    aligned,
    begin_bytes,
    begin_load,
    checked_direct,
    path_of,
)
from tensorferry.safetensors.read_ahead import ReadAhead
from tensorferry.safetensors.slicing import Selection, select
from tensorferry.transfer.arrays import collect_runs
from tensorferry.transfer.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tensorferry.base.checks import Readable
    from tensorferry.safetensors.header import Tensor
    from tensorferry.transfer.futures import Future

# A prefetch reads consecutive tensors of up to this size together, and larger tensors alone.
_LOAD_NBYTES = 32 << 20


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
        "auto" maps the parts of the file that the page cache holds, copy-on-write, and reads the rest with direct I/O
        into memory on huge pages. "always" maps nothing. "never" maps everything.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    SafetensorError
        The file breaks a rule of the format, or the framework, device or backend is invalid.
    StorageError
        The file cannot be read.
    """

    _ahead: ReadAhead | None = None  # None before the handle is opened, and once it is closed

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
        self._framework: Framework = framework_of(framework, device)
        self._ahead = ReadAhead(SourceFile(path, mode), self._framework)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().header.tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their offsets."""
        return list(self._open().header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata that the file's writer added, or None."""
        metadata = self._open().header.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return a tensor's entry in the header."""
        source = self._open()
        tensor = source.tensor(name)
        first = source.header.nbytes
        return TensorMeta(
            tensor.dtype, list(tensor.shape), (tensor.begin - first, tensor.end - first)
        )

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.

        If the caller requests tensors in the order of :meth:`offset_keys`, up to 64 MiB of the following tensors are
        read ahead.

        Raises
        ------
        SafetensorError
            The file has no tensor of this name, the framework lacks its dtype, or the handle is closed.
        StorageError
            The tensor cannot be read.
        """
        ahead, framework = self._opened(), self._framework
        tensor = ahead.source.tensor(name)
        shape = framework.shape(tensor, ahead.source.path)
        if ahead.is_parents:
            # In a forked child, the parent's transfers never complete.
            self._ahead = ahead = ReadAhead(ahead.source, framework)
        data = ahead.bytes(tensor)
        return framework.as_array(data, tensor.dtype, shape)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their offsets. One pipelined transfer reads them."""
        source = self._open()
        tensors = source.header.tensors.values()
        arrays: dict[str, Any] = begin_load(source, tensors, self._framework).result()
        return arrays

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor for indexing. Indexing it reads only the bytes that the index needs."""
        source = self._open()
        return PySafeSlice(source, source.tensor(name), self._framework)

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
            Accepted for compatibility with safetensors, and otherwise unused: the core's worker threads read.

        Raises
        ------
        SafetensorError
            The plan is empty or names an unknown tensor, or the framework lacks a dtype.
        """
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: {threads!r} is not a positive integer")
        framework = self._framework
        if device is not None:
            framework = framework_of(framework.name, device)
        return PrefetchLoader(self._open(), plan, framework)

    def __enter__(self) -> safe_open:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close(wait=True)

    def __del__(self) -> None:
        self._close(wait=False)

    def _close(self, *, wait: bool) -> None:
        # The file is closed with the last reference to the source. Slices, loaders and other threads may still hold a
        # reference. If none of them does, `ahead` has the last one, and the file is closed once the read-ahead has
        # ended.
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.is_parents:
            ahead.close(wait=wait)

    def __repr__(self) -> str:
        ahead = self._ahead
        return f"<safe_open {ahead.source.path!r}>" if ahead else "<closed safe_open>"

    def _opened(self) -> ReadAhead:
        ahead = self._ahead
        if ahead is None:
            raise SafetensorError("File is closed")
        return ahead

    def _open(self) -> SourceFile:
        return self._opened().source


class PySafeSlice:
    """A tensor of a file that is read when it is indexed, by torch's rules. Only the bytes for the index are read."""

    def __init__(self, source: SourceFile, tensor: Tensor, framework: Framework) -> None:
        self._source = source
        self._tensor = tensor
        self._framework = framework

    def get_shape(self) -> list[int]:
        """Return the shape to which an index applies.

        It is the shape in the header, except that the last dimension of F4 counts pairs of elements, as torch does.
        """
        tensor = self._tensor
        return list(torch_shape(tensor.dtype, tensor.shape, self._source.path, tensor.name))

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
            The framework lacks the dtype.
        StorageError
            The file cannot be read.
        """
        return begin_slice(self._source, self._tensor, index, self._framework).result()

    def __repr__(self) -> str:
        tensor = self._tensor
        return f"<slice of {tensor.name!r}: {tensor.dtype} {list(tensor.shape)}>"


def begin_slice(
    source: SourceFile, tensor: Tensor, index: Any, framework: Framework
) -> PendingLoad:
    """Begin to read the part of a tensor that an index selects.

    If the selected elements must be picked out of larger ranges, the ranges are read only when the result is requested.
    """
    shape = framework.shape(tensor, source.path)
    selection = select(index, shape, source.path, tensor.name)
    if selection is None:  # masks and tensors: the framework indexes the complete tensor
        whole = begin_bytes(source, tensor, tensor.begin, tensor.end, framework)
        return PendingLoad(
            whole.future, lambda: framework.as_array(whole.finish(), tensor.dtype, shape)[index]
        )
    load = _begin_selected(source, tensor, shape, selection, framework)

    def finish() -> Any:
        array = load.finish()[selection.basic]
        if selection.lists:
            array = framework.index_by_lists(array, selection.lists)
        return framework.as_dtype(array, tensor.dtype)

    return PendingLoad(load.future, finish)


def _begin_selected(
    source: SourceFile,
    tensor: Tensor,
    shape: tuple[int, ...],
    selection: Selection,
    framework: Framework,
) -> PendingLoad:
    """Begin to load an array that contains only the selected positions, as integers of the dtype's size."""
    positions, selected_shape = selection.positions, selection.shape
    itemsize = itemsize_of(tensor.dtype)
    if math.prod(selected_shape) == 0:
        return PendingLoad(
            None, lambda: framework.as_integers(framework.empty(0), itemsize, selected_shape)
        )
    strides = strides_of(shape)
    first = sum(each[0] * stride for each, stride in zip(positions, strides, strict=True))
    last = sum(each[-1] * stride for each, stride in zip(positions, strides, strict=True))
    begin, end = tensor.begin + first * itemsize, tensor.begin + (last + 1) * itemsize
    if runs(positions, shape).dims == 0:
        load = begin_bytes(source, tensor, begin, end, framework)
        return PendingLoad(
            load.future, lambda: framework.as_integers(load.finish(), itemsize, selected_shape)
        )
    if framework.on_host and source.is_mapped(begin, end):
        data = aligned(framework.wrap(source.map(begin, end)), tensor, framework)
        elements = framework.as_integers(data, itemsize, (last - first + 1,))
        return PendingLoad(None, lambda: _pick(elements, positions, strides, 0, framework))
    plan = read_plan(positions, shape, itemsize, on_host=framework.on_host)
    if not plan.exact:
        return PendingLoad(
            None, lambda: _pick_from_file(source, tensor, shape, selection, plan, framework)
        )
    data = framework.empty(math.prod(selected_shape) * itemsize)
    future = _begin_windows(source, tensor, list(plan.windows), data, framework)
    return PendingLoad(future, lambda: framework.as_integers(data, itemsize, selected_shape))


def _pick_from_file(
    source: SourceFile,
    tensor: Tensor,
    shape: tuple[int, ...],
    selection: Selection,
    plan: ReadPlan,
    framework: Framework,
) -> Any:
    """Pick the selected elements out of one batch of windows while the next batch is read.

    A window is a range of the tensor that is read as a whole, although only some of its bytes may be selected.
    """
    positions, split = selection.positions, plan.split
    itemsize, strides = itemsize_of(tensor.dtype), strides_of(shape)
    data = framework.empty(math.prod(selection.shape) * itemsize)
    result = framework.as_integers(data, itemsize, selection.shape)
    rows = result.reshape(-1, *selection.shape[split:])

    def read_of(windows: list[Window]) -> LoadRead:
        nbytes = sum(window.nbytes for window in windows)

        def begin() -> PendingLoad:
            data = framework.empty(nbytes)
            future = _begin_windows(source, tensor, windows, data, framework)
            elements = framework.as_integers(data, itemsize, (nbytes // itemsize,))
            return PendingLoad(future, lambda: (windows, elements))

        return LoadRead(nbytes, begin)

    reads = map(read_of, _batches(plan.windows))
    with Pipeline(reads, memory_nbytes=2 * WINDOW_NBYTES) as pipeline:
        for read in pipeline:
            assert read.load is not None
            windows, elements = read.load.finish()
            at = 0
            for window in windows:
                selected = (positions[split][window.first : window.stop], *positions[split + 1 :])
                rows[window.row, window.first : window.stop] = _pick(
                    elements, selected, strides[split:], at, framework
                )
                at += window.nbytes // itemsize
    return result


def _begin_windows(
    source: SourceFile, tensor: Tensor, windows: list[Window], data: Any, framework: Framework
) -> Future:
    """Begin to read windows into ``data``, where they follow one another without gaps."""
    segments: Any
    sizes = {window.nbytes for window in windows}
    if framework.on_host and len(sizes) == 1:
        begins = (window.begin for window in windows)
        segments, begin = collect_runs(begins, sizes.pop(), tensor.nbytes, data)
    else:
        segments, begin = segments_of(windows, data)
    return source.file.read_into(segments, tensor.begin + begin)


def _batches(windows: Iterator[Window]) -> Iterator[list[Window]]:
    batch: list[Window] = []
    nbytes = 0
    for window in windows:
        if batch and nbytes + window.nbytes > WINDOW_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(window)
        nbytes += window.nbytes
    if batch:
        yield batch


def _pick(
    elements: Any,
    positions: tuple[Any, ...],
    strides: tuple[int, ...],
    first: int,
    framework: Framework,
) -> Any:
    """Return the array of the selected positions, as a view where possible.

    ``elements`` contains, from index ``first`` on, all elements between the first and the last selected one. Strides
    are in elements.
    """
    shape: list[int] = []
    steps: list[int] = []
    lists: list[Any] = []
    for chosen, stride in zip(positions, strides, strict=True):
        if isinstance(chosen, range):
            shape.append(len(chosen))
            steps.append(stride * chosen.step)
            lists.append(slice(None))
        else:
            shape.append(chosen[-1] - chosen[0] + 1)
            steps.append(stride)
            lists.append([each - chosen[0] for each in chosen])
    array = framework.strided(elements, tuple(shape), tuple(steps), first)
    for dimension, selected in enumerate(lists):
        # One dimension at a time: lists in one index would be paired, but all combinations are selected.
        if isinstance(selected, list):
            array = framework.index_by_lists(array, (slice(None),) * dimension + (selected,))
    return array


class PrefetchLoader:
    """A background load of a file's tensors, created by :meth:`safe_open.prefetch`. It is thread-safe.

    Each tensor is handed out once, by :meth:`take` or by iteration. At most 64 MiB, or two tensors if these are larger,
    are being read at a time (the environment variable TENSORFERRY_READ_AHEAD changes the limit). Tensors that have been
    read stay in memory until they are taken or the loader is closed.
    """

    def __init__(
        self, source: SourceFile, plan: Mapping[str, Any] | None, framework: Framework
    ) -> None:
        self._source = source
        tensors = source.header.tensors
        if plan is None:
            plan = dict.fromkeys(tensors)
        wanted = []
        for name in plan:
            if not isinstance(name, str):
                raise SafetensorError(f"the plan's key {name!r} is not a tensor's name")
            wanted.append(source.tensor(name))
        if not wanted:
            raise SafetensorError("the plan of a prefetch has no tensors", source.path)
        wanted.sort(key=lambda tensor: (tensor.begin, tensor.end))
        self._names = [tensor.name for tensor in wanted]
        self._remaining = set(self._names)  # the names that have not been handed out
        reads = [_PrefetchRead(source, group, plan, framework) for group in _groups(wanted, plan)]
        self._read_of = {name: read for read in reads for name in read.names}
        self._pipeline = Pipeline(reads, automatic=True)
        self._pipeline.advance()

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
            The tensor is not in the plan or was handed out before, or the loader is closed.
        StorageError
            The tensor cannot be read.
        """
        pipeline = self._pipeline
        pipeline._check_process()
        with pipeline.lock:
            self._check_open()
            read = self._read_of.get(name)
            if read is None:
                raise SafetensorError(f"{name!r} is not in the prefetch plan", self._source.path)
            if name not in self._remaining:
                raise SafetensorError(
                    "tensor already delivered (prefetch hands each tensor out once, via take or iteration)",
                    self._source.path,
                    name=name,
                )
            self._remaining.remove(name)
        try:
            with pipeline.lock:
                self._check_open()
                if not read.begun:
                    pipeline.begin(read)
            read.wait()
            self._check_open()
            return read.take(name)
        except BaseException:
            with pipeline.lock:
                if read.has(name):
                    self._remaining.add(name)  # an interrupted caller can take it later
                self._check_open()  # close() cancels transfers: report the closed loader, not the cancellation
            raise

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the tensor for all tensors that have not been taken, in the order of their offsets."""
        for name in self._names:
            self._pipeline._check_process()
            with self._pipeline.lock:
                self._check_open()
                if name not in self._remaining:
                    continue
            try:
                tensor = self.take(name)
            except SafetensorError:
                if name in self._remaining or self._pipeline.closed:
                    raise
                continue  # another thread took it after the check above
            yield name, tensor

    def close(self) -> None:
        """Stop loading, and free the tensors that were not taken. Taken tensors stay usable."""
        self._pipeline.close(wait=False)
        if self._pipeline.closed:
            self._read_of.clear()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._pipeline.closed:
            raise SafetensorError("prefetch loader closed", self._source.path)


class _PrefetchRead(LoadRead):
    """One read of a prefetch: several complete tensors next to each other, or a part of one tensor."""

    def __init__(
        self,
        source: SourceFile,
        tensors: list[Tensor],
        plan: Mapping[str, Any],
        framework: Framework,
    ) -> None:
        self.names = [tensor.name for tensor in tensors]
        self._error: BaseException | None = None
        # Reentrant, because a signal handler may take another tensor of this read.
        self._lock = threading.RLock()
        self._arrays: dict[str, Any] | None = None
        self._index = index = plan[self.names[0]]
        # Raise for an unknown dtype or an invalid index before any read begins.
        for tensor in tensors:
            shape = framework.shape(tensor, source.path)
            if index is not None:
                select(index, shape, source.path, tensor.name)
        begin = functools.partial(begin_load, source, tensors, framework)
        if index is not None:
            begin = functools.partial(begin_slice, source, tensors[0], index, framework)
        super().__init__(sum(tensor.nbytes for tensor in tensors), begin)

    def begin(self) -> None:
        """Begin to load. An error is stored, and :meth:`wait` raises it in the thread that takes the tensor."""
        try:
            super().begin()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error  # once only: for the next caller, take() begins the read again
        super().wait()  # several threads may do this at the same time, each for another tensor of this read

    def take(self, name: str) -> Any:
        """Return one of the tensors. Call this after :meth:`wait`."""
        with self._lock:
            if self._arrays is None:
                if self.load is None:
                    # Either the read could not begin, and wait() has raised the error for another caller. Or this
                    # method was interrupted after it cleared `load`: by Ctrl-C, and the arrays were lost with their
                    # memory, or by a signal handler, which now takes another tensor. In all cases, read again.
                    self.begin()
                    self.wait()
                load, self.load = self.load, None
                assert load is not None
                self.futures = ()  # the futures would keep the memory alive
                arrays = load.result()
                self._arrays = arrays if self._index is None else {name: arrays}
            return self._arrays.pop(name)

    def has(self, name: str) -> bool:
        """Return whether the tensor has not been taken. This includes a tensor that could not be read."""
        return self._arrays is None or name in self._arrays


def _groups(tensors: list[Tensor], plan: Mapping[str, Any]) -> list[list[Tensor]]:
    """Group consecutive tensors that are wanted completely, up to a limited size. All other tensors are alone."""
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        group = groups[-1] if groups else None
        if (
            group
            and tensor.begin == group[-1].end
            and tensor.end - group[0].begin <= _LOAD_NBYTES
            and plan[tensor.name] is None
            and plan[group[-1].name] is None
        ):
            group.append(tensor)
        else:
            groups.append([tensor])
    return groups
