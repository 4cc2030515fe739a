"""``safe_open``: one file, its header at once, tensors and slices of it when they are asked for."""

from __future__ import annotations

import math
import threading
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
from tensorferry.safetensors.ahead import Ahead
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.frameworks import Framework, framework_of, itemsize_of, nbytes_of
from tensorferry.safetensors.loading import (
    Coming,
    Load,
    SourceFile,
    aligned,
    begin_bytes,
    checked_direct,
    load_tensor,
    path_of,
)
from tensorferry.safetensors.slicing import Selection, select
from tensorferry.transfer.arrays import collect_runs
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tensorferry.base.checks import Readable
    from tensorferry.safetensors.header import Tensor
    from tensorferry.transfer.futures import Future

# What a prefetch reads at a time: neighbours of so many bytes, or one tensor.
_LOAD_NBYTES = 32 << 20


class TensorMeta:
    """A tensor's entry in the header, as it was written.

    Attributes
    ----------
    dtype : str
        The format's name.
    shape : list of int
        Of elements.
    data_offsets : tuple of int
        First byte and end, from the end of the header.
    """

    def __init__(self, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data_offsets = data_offsets

    def __repr__(self) -> str:
        return f"TensorMeta(dtype={self.dtype!r}, shape={self.shape}, data_offsets={self.data_offsets})"


class safe_open:  # noqa: N801
    """A safetensors file, open to take tensors from; a context manager.

    Any number of threads may use it. What was taken from it, and slices, stay usable after its end. A forked child may
    go on with it.

    Parameters
    ----------
    filename : str, bytes or PathLike, or pair of store and key
        The file; also an object of a bucket, as :func:`tensorferry.open` has them: it is read, never mapped.
    framework : str
        "pt", "torch" or "pytorch"; "np" or "numpy".
    device : str, int or torch.device
        Where torch's tensors are to be; a number is one of the accelerator.
    backend : "mmap" or "pread"
        As safetensors has it; "pread" is ``direct="always"``.
    direct : "auto", "always" or "never"
        "auto" maps what the page cache holds, copy on write, and reads the rest past it, into memory on huge pages;
        "always" maps nothing; "never" maps everything.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    SafetensorError
        It breaks a rule of the format; an argument is none of those above.
    StorageError
        It cannot be read.
    """

    def __init__(
        self,
        filename: Readable,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        direct: str = "auto",
    ) -> None:
        how = checked_direct(direct, backend)
        path = path_of(filename)
        self._framework: Framework = framework_of(framework, device)
        source = SourceFile(path, how)
        self._source: SourceFile | None = source
        self._ahead: Ahead | None = Ahead(source, self._framework)
        self._is_torch = hasattr(self._framework, "device")

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().header.tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their bytes."""
        return list(self._open().header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return what the file's writer added, or None."""
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

        Where tensors are asked for in the order of :meth:`offset_keys`, up to 64 MiB of those that follow are read
        meanwhile.

        Raises
        ------
        SafetensorError
            The file has none of this name, or the framework no such dtype; or this is closed.
        StorageError
            It could not be read.
        """
        source, framework = self._open(), self._framework
        tensor = source.tensor(name)
        shape = framework.shape(tensor.dtype, tensor.shape, source.path, tensor.name)
        ahead = self._ahead
        if ahead is None:
            raise SafetensorError("File is closed")  # by another thread, just now
        if ahead.is_parents:
            # What a forked child's parent reads is not its own.
            self._ahead = ahead = Ahead(source, framework)
        data = ahead.bytes(tensor)
        return framework.typed(framework.from_host(data), tensor.dtype, shape)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their bytes; read by one pipelined transfer."""
        source = self._open()
        return Load(source, source.header.tensors.values(), self._framework).result()

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor to be indexed, of which only the bytes that an index needs are read."""
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
            Which tensors, and what of them: None is all of one; a slice, or any other index, is what that gives. By
            default all tensors.
        device : str, int or torch.device, optional
            Where to; by default the handle's device.
        threads : int
            For safetensors' sake; the core's workers read.

        Raises
        ------
        SafetensorError
            The plan names a tensor that is not there, or none at all; or the framework has no such dtype.
        """
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: {threads!r} is no number of threads")
        framework = self._framework
        if device is not None:
            framework = framework_of("pt" if self._is_torch else "np", device)
        return PrefetchLoader(self._open(), plan, framework)

    def __enter__(self) -> safe_open:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        # Other threads, slices and loaders that are at it have a reference of their own. The last one to go closes the
        # file: this is it, if what is read ahead has ended before.
        source, self._source = self._source, None
        try:
            self._end_ahead(wait=True)
        finally:
            del source

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):  # else it could not be opened
            self._end_ahead(wait=False)

    def _end_ahead(self, *, wait: bool) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.is_parents:
            ahead.close(wait=wait)

    def __repr__(self) -> str:
        source = self._source
        return f"<safe_open {source.path!r}>" if source else "<closed safe_open>"

    def _open(self) -> SourceFile:
        source = self._source
        if source is None:
            raise SafetensorError("File is closed")
        return source


class PySafeSlice:
    """A tensor of a file, not read yet; indexing it reads what the index needs. Indices are torch's."""

    def __init__(self, source: SourceFile, tensor: Tensor, framework: Framework) -> None:
        self._source = source
        self._tensor = tensor
        self._framework = framework

    def get_shape(self) -> list[int]:
        """Return the tensor's shape, as the header has it."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the format's name of its dtype."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return what an index chooses; lists for several dimensions read all combinations of their positions.

        Raises
        ------
        SliceError
            It is out of range, or has too many dimensions: an IndexError and a SafetensorError.
        SafetensorError
            The framework has no such dtype.
        StorageError
            The bytes could not be read.
        """
        return read_slice(self._source, self._tensor, index, self._framework)

    def __repr__(self) -> str:
        tensor = self._tensor
        return f"<slice of {tensor.name!r}: {tensor.dtype} {list(tensor.shape)}>"


def read_slice(source: SourceFile, tensor: Tensor, index: Any, framework: Framework) -> Any:
    """Return what an index chooses of a tensor; only the bytes that it needs are read."""
    return begin_slice(source, tensor, index, framework).result()


def begin_slice(source: SourceFile, tensor: Tensor, index: Any, framework: Framework) -> Coming:
    """Begin to read what an index chooses of a tensor.

    What has to be picked out of more bytes than it has is read when it is asked for.
    """
    shape = framework.shape(tensor.dtype, tensor.shape, source.path, tensor.name)
    selection = select(index, shape, source.path, tensor.name)
    if selection is None:  # masks and tensors: the library itself
        return Coming(None, lambda: load_tensor(source, tensor, framework)[index])
    coming = _begin_chosen(source, tensor, shape, selection, framework)

    def finish() -> Any:
        array = coming.finish()[selection.basic]
        if selection.lists:
            array = framework.chosen(array, selection.lists)
        return framework.retyped(array, tensor.dtype)

    return Coming(coming.future, finish)


def _begin_chosen(
    source: SourceFile,
    tensor: Tensor,
    shape: tuple[int, ...],
    selection: Selection,
    framework: Framework,
) -> Coming:
    """Begin to have an array of just the chosen positions, as integers."""
    positions, chosen_shape = selection.positions, selection.shape
    itemsize = itemsize_of(tensor.dtype)
    if math.prod(chosen_shape) == 0:
        return Coming(None, lambda: framework.plain(framework.empty(0), itemsize, chosen_shape))
    strides = strides_of(shape)
    first = sum(each[0] * stride for each, stride in zip(positions, strides, strict=True))
    last = sum(each[-1] * stride for each, stride in zip(positions, strides, strict=True))
    begin, end = tensor.begin + first * itemsize, tensor.begin + (last + 1) * itemsize
    if runs(positions, shape).dims == 0:
        coming = begin_bytes(source, tensor, begin, end, framework)
        return Coming(
            coming.future, lambda: framework.plain(coming.finish(), itemsize, chosen_shape)
        )
    if framework.on_host and source.is_mapped(begin, end):
        data = aligned(framework.over(source.map(begin, end)), tensor)
        elements = framework.plain(data, itemsize, (last - first + 1,))
        return Coming(None, lambda: _picked(elements, positions, strides, 0, framework))
    plan = read_plan(positions, shape, itemsize, on_host=framework.on_host)
    if not plan.exact:
        return Coming(
            None, lambda: _picked_from_file(source, tensor, shape, selection, plan, framework)
        )
    data = framework.empty(nbytes_of(chosen_shape, itemsize))
    future = _begin_windows(source, tensor, list(plan.windows), data, framework)
    return Coming(future, lambda: framework.plain(data, itemsize, chosen_shape))


def _picked_from_file(
    source: SourceFile,
    tensor: Tensor,
    shape: tuple[int, ...],
    selection: Selection,
    plan: ReadPlan,
    framework: Framework,
) -> Any:
    """Read windows, and pick what is wanted out of one batch of them while the next one is read."""
    positions, split = selection.positions, plan.split
    itemsize, strides = itemsize_of(tensor.dtype), strides_of(shape)
    data = framework.empty(nbytes_of(selection.shape, itemsize))
    result = framework.plain(data, itemsize, selection.shape)
    rows = result.reshape(-1, *selection.shape[split:])
    slabs = (_Slab(source, tensor, batch, framework) for batch in _batches(plan.windows))
    with Pipeline(slabs, memory_nbytes=2 * WINDOW_NBYTES) as pipeline:
        for slab in pipeline:
            elements = framework.plain(slab.data, itemsize, (slab.nbytes // itemsize,))
            at = 0
            for window in slab.windows:
                wanted = (positions[split][window.first : window.stop], *positions[split + 1 :])
                rows[window.row, window.first : window.stop] = _picked(
                    elements, wanted, strides[split:], at, framework
                )
                at += window.nbytes // itemsize
    return result


class _Slab(Read):
    """Windows that are read together."""

    def __init__(
        self, source: SourceFile, tensor: Tensor, windows: list[Window], framework: Framework
    ) -> None:
        self.windows = windows
        self.nbytes = sum(window.nbytes for window in windows)
        self.data: Any = None
        self._source = source
        self._tensor = tensor
        self._framework = framework

    def begin(self) -> None:
        self.data = self._framework.empty(self.nbytes)
        self.futures = (
            _begin_windows(self._source, self._tensor, self.windows, self.data, self._framework),
        )


def _begin_windows(
    source: SourceFile, tensor: Tensor, windows: list[Window], data: Any, framework: Framework
) -> Future:
    """Begin to read windows, one behind the other, into ``data``."""
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


def _picked(
    elements: Any,
    positions: tuple[Any, ...],
    strides: tuple[int, ...],
    first: int,
    framework: Framework,
) -> Any:
    """Return positions as an array, given the elements from the first to the last of them; a view where possible.

    Strides are in elements.
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
    array = framework.window(elements, tuple(shape), tuple(steps), first)
    for dimension, wanted in enumerate(lists):
        if isinstance(wanted, list):  # one after the other: together they would be pairs
            array = framework.chosen(array, (slice(None),) * dimension + (wanted,))
    return array


class PrefetchLoader:
    """Tensors of a file that are on their way; made by :meth:`safe_open.prefetch`. Any number of threads may use it.

    Each tensor is handed out once, by :meth:`take` or by iterating. At most 64 MiB, or two tensors if these are larger,
    are on their way at a time (the environment variable TENSORFERRY_READ_AHEAD); what has come stays here until it is
    taken, or this is closed.
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
                raise SafetensorError(f"a plan's keys are names of tensors, and {name!r} is none")
            wanted.append(source.tensor(name))
        if not wanted:
            raise SafetensorError("the plan of a prefetch has no tensors", source.path)
        wanted.sort(key=lambda tensor: (tensor.begin, tensor.end))
        self._names = [tensor.name for tensor in wanted]
        self._left = dict.fromkeys(self._names)  # an ordered set: what was not handed out
        jobs = [_PrefetchRead(source, group, plan, framework) for group in _groups(wanted, plan)]
        self._job_of = {name: job for job in jobs for name in job.names}
        self._pipeline = Pipeline(jobs, by_itself=True)
        self._pipeline.advance()

    def names(self) -> list[str]:
        """Return the names that are, or were, handed out, in the order of their bytes."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def take(self, name: str) -> Any:
        """Return a tensor, when it is there.

        Raises
        ------
        SafetensorError
            It is not in the plan, was handed out before, or this is closed.
        StorageError
            It could not be read.
        """
        pipeline = self._pipeline
        pipeline._check_process()
        with pipeline.lock:
            self._check_open()
            job = self._job_of.get(name)
            if job is None:
                raise SafetensorError(f"{name!r} is not in the prefetch plan", self._source.path)
            if name not in self._left:
                raise SafetensorError(
                    "tensor already delivered (prefetch hands each tensor out once, via take or iteration)",
                    self._source.path,
                    name=name,
                )
            del self._left[name]
        try:
            with pipeline.lock:
                self._check_open()
                if not job.begun:
                    pipeline.begin(job)
            job.wait()
            self._check_open()
            return job.take(name)
        except BaseException:
            with pipeline.lock:
                if job.has(name):
                    self._left[name] = None  # Ctrl-C: to be taken again
                self._check_open()  # what was cancelled by closing says so
            raise

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Return names and tensors that were not taken yet, in the order of their bytes."""
        for name in self._names:
            self._pipeline._check_process()
            with self._pipeline.lock:
                self._check_open()
                if name not in self._left:
                    continue
            try:
                tensor = self.take(name)
            except SafetensorError:
                if name in self._left or self._pipeline.closed:
                    raise
                continue  # another thread took it meanwhile
            yield name, tensor

    def close(self) -> None:
        """Stop loading, and let go of what was not taken. What was taken stays."""
        self._pipeline.close(wait=False)
        if self._pipeline.closed:
            self._job_of.clear()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._pipeline.closed:
            raise SafetensorError("prefetch loader closed", self._source.path)


class _PrefetchRead(Read):
    """A part of a prefetch: whole neighbours, or something of one tensor."""

    def __init__(
        self,
        source: SourceFile,
        tensors: list[Tensor],
        plan: Mapping[str, Any],
        framework: Framework,
    ) -> None:
        self.names = [tensor.name for tensor in tensors]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._source = source
        self._tensors = tensors
        self._framework = framework
        self._index = plan[self.names[0]]
        self._coming: Coming | None = None
        self._refusal: BaseException | None = None
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] | None = None
        for tensor in tensors:  # what cannot be is said before anything is read
            shape = framework.shape(tensor.dtype, tensor.shape, source.path, tensor.name)
            if self._index is not None:
                select(self._index, shape, source.path, tensor.name)

    def begin(self) -> None:
        """Begin to load; what goes wrong is told to who waits."""
        try:
            if self._index is None:
                load = Load(self._source, self._tensors, self._framework)
                coming = Coming(load.future, load.result)
            else:
                coming = begin_slice(self._source, self._tensors[0], self._index, self._framework)
            self._coming = coming
            self.futures = () if coming.future is None else (coming.future,)
        except Exception as error:
            self._refusal = error

    def wait(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        super().wait()  # others may wait for it as well

    def take(self, name: str) -> Any:
        """Return one of the tensors, when all have come."""
        with self._lock:
            if self._arrays is None:
                if self._coming is None:
                    # Ctrl-C came in the middle: arrays that nobody got have given back their memory.
                    self.begin()
                    self.wait()
                coming, self._coming = self._coming, None
                assert coming is not None
                self.futures = ()  # they keep the memory
                arrays = coming.result()
                self._arrays = arrays if self._index is None else {name: arrays}
            return self._arrays.pop(name)

    def has(self, name: str) -> bool:
        """Return whether the tensor has not been taken, whatever keeps it from coming."""
        return self._arrays is None or name in self._arrays


def _groups(tensors: list[Tensor], plan: Mapping[str, Any]) -> Iterator[list[Tensor]]:
    """Return neighbours of which all is wanted together, and others alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        whole = plan[tensor.name] is None
        if group and not (
            whole and tensor.begin == group[-1].end and tensor.end - group[0].begin <= _LOAD_NBYTES
        ):
            yield group
            group = []
        group.append(tensor)
        if not whole:
            yield group
            group = []
    if group:
        yield group
