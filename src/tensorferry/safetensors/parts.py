"""Parts of tensors: which bytes of a file an index needs, how they are read, and the array that the caller receives.

Terms of this module:

part
    A tensor that the caller receives: a complete tensor of a file, or the elements that an index selects. Each part
    has separate memory, so a caller that keeps one part does not keep the memory of others alive.
window
    A range of the file that is read as a whole (:mod:`tensorferry.base.ranges`). Either all its bytes are selected, and
    it is read into the part's memory, or the selected elements are picked out of it afterwards.
read
    What a pipeline begins and waits for: several small contiguous parts next to each other, or one other part, or some
    of the windows of a part out of which elements are picked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.ranges import WINDOW_NBYTES, read_plan, runs, strides_of
from tensorferry.errors import StorageError
from tensorferry.safetensors.frameworks import itemsize_of
from tensorferry.safetensors.slicing import select
from tensorferry.transfer.arrays import collect_runs
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorferry.base.ranges import ReadPlan, Window
    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.frameworks import Framework
    from tensorferry.safetensors.ranks import Share, Sharers
    from tensorferry.safetensors.sources import Stored
    from tensorferry.transfer.files import File
    from tensorferry.transfer.futures import Future

PAGE_NBYTES = 4096
# Contiguous parts from this size on are read alone, from the beginning of a page on. So direct I/O needs no copy.
LARGE_NBYTES = 1 << 20
# The limits for the small parts of a read, and for a transfer with gaps.
GROUP_NBYTES = 8 << 20
_GROUP_PARTS = 1024
# Gaps up to this size are read and discarded, which is cheaper than another transfer.
_GAP_NBYTES = 64 << 10
# Runs from this size on are read alone: reading whole pages at both ends adds less than a tenth.
_SHORT_NBYTES = 10 * 2 * PAGE_NBYTES


class Part:
    """All elements of a tensor that is stored in C order, or those at some positions of each dimension.

    Parameters
    ----------
    begin : int
        The tensor's offset in the file.
    shape : tuple of int
        The tensor's shape.
    itemsize : int
        The size of an element in bytes.
    framework : Framework
        The library and the device of the memory.
    positions : tuple of sequences of int, optional
        The selected positions of each dimension, in ascending order.
    is_shared : bool
        Whether other processes of this machine may need the bytes between the selected ones.

    Attributes
    ----------
    shape : tuple of int
        The shape of the selected elements.
    nbytes : int
        The size of the selected elements.
    is_contiguous : bool
        Whether they are one range of the file, which then begins at ``begin``.
    memory : bytes of the framework, or None
        The memory of the elements, while a read has it.
    is_given : bool
        Whether the caller has received them.
    """

    memory: Any = None
    is_given = False
    _picked: Any = None  # the elements, if they are a view of mapped memory

    def __init__(
        self,
        begin: int,
        shape: tuple[int, ...],
        itemsize: int,
        framework: Framework,
        positions: tuple[Sequence[int], ...] | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.begin, self.itemsize, self.framework = begin, itemsize, framework
        self.whole_shape = self.shape = shape
        self.positions = positions
        self.is_contiguous = True
        # Wider windows: each is a separate copy to a GPU, and shared ones are read into the page cache once for all.
        self._limits: dict[str, int] = {}
        if is_shared or not framework.on_host:
            self._limits = {"gap_nbytes": _GAP_NBYTES, "tiny_nbytes": _SHORT_NBYTES}
        if positions is not None:
            self.shape = tuple(map(len, positions))
        self.nbytes = math.prod(self.shape) * itemsize
        if positions is not None and self.nbytes:
            found = runs(positions, shape, itemsize)
            self.is_contiguous = found.dims == 0
            self.begin += found.begin if self.is_contiguous else 0

    def plan(self) -> ReadPlan:
        """Return the windows of a part that is not contiguous."""
        assert self.positions is not None
        return read_plan(self.positions, self.whole_shape, self.itemsize, **self._limits)

    @property
    def extent(self) -> tuple[int, int]:
        """The range of the file from the first to the last element."""
        if self.is_contiguous:
            return self.begin, self.begin + self.nbytes
        assert self.positions is not None
        strides = strides_of(self.whole_shape, self.itemsize)
        first, last = (
            sum(each[at] * stride for each, stride in zip(self.positions, strides, strict=True))
            for at in (0, -1)
        )
        return self.begin + first, self.begin + last + self.itemsize

    @property
    def cost_nbytes(self) -> int:
        """The memory that loading the part takes at least."""
        if self.is_contiguous:
            return self.begin - self._read_begin + self.nbytes
        plan = self.plan()
        return self.nbytes + (0 if plan.exact else plan.window_nbytes)

    @property
    def _read_begin(self) -> int:
        aligned = self.framework.on_host and self.begin % self.itemsize == 0
        is_extended = aligned and self.nbytes >= LARGE_NBYTES
        return self.begin // PAGE_NBYTES * PAGE_NBYTES if is_extended else self.begin

    def allocate(self) -> tuple[int, Any]:
        """Allocate the memory of a contiguous part; return the offset to read from, and the memory to read into."""
        begin = self._read_begin
        if begin == self.begin:
            self.memory = self.framework.empty(self.nbytes)
            return begin, self.memory
        nbytes = self.begin - begin + self.nbytes
        mapping = _core.map_pieces([None], [0], [nbytes])
        # A slice of the whole would share the storage of the first page. This is a tensor whose storage has its own
        # bytes only.
        self.memory = self.framework.wrap(mapping.bytes(self.begin - begin, self.nbytes))
        return begin, self.framework.wrap(mapping.bytes(0, nbytes))

    def pick(self, elements: Any, chosen: Sequence[Sequence[int]], at: int = 0) -> Any:
        """Return the array of some positions of the last dimensions, as a view where possible.

        ``elements`` contains, from index ``at`` on, all elements between the first and the last of the positions.
        """
        shape: list[int] = []
        steps: list[int] = []
        lists: list[Any] = []
        strides = strides_of(self.whole_shape)[len(self.whole_shape) - len(chosen) :]
        for positions, stride in zip(chosen, strides, strict=True):
            if isinstance(positions, range):
                shape.append(len(positions))
                steps.append(stride * positions.step)
                lists.append(None)
            else:
                shape.append(positions[-1] - positions[0] + 1)
                steps.append(stride)
                lists.append([each - positions[0] for each in positions])
        array = self.framework.strided(elements, tuple(shape), tuple(steps), at)
        for dimension, wanted in enumerate(lists):
            # One dimension at a time: lists in one index would be paired, but all combinations are selected.
            if wanted is not None:
                array = self.framework.index_by_lists(array, (slice(None),) * dimension + (wanted,))
        return array

    def use(self, mapped: Any) -> None:
        """Use mapped bytes, from the first to the last element, as the memory."""
        if self.is_contiguous:
            self.memory = mapped
        else:
            assert self.positions is not None
            elements = self.framework.as_integers(mapped, self.itemsize, (-1,))
            self._picked = self.pick(elements, self.positions)

    def elements(self) -> Any:
        """Return the elements as integers of their size: the other dtypes do not support all kinds of indexing."""
        if self._picked is not None:
            return self._picked
        data = self.memory if self.nbytes else self.framework.empty(0)
        return self.framework.as_integers(data, self.itemsize, self.shape)


class TensorPart(Part):
    """A tensor of a safetensors file, or what an index selects from it.

    Raises
    ------
    SafetensorError
        The framework lacks the dtype, or the index is out of range.
    TypeError
        The index has a type that cannot be an index.
    """

    def __init__(
        self, stored: Stored, index: Any, framework: Framework, *, is_shared: bool = False
    ) -> None:
        tensor = stored.tensor
        shape = framework.shape(tensor, stored.path)
        self.stored, self.name, self.index = stored, tensor.name, index
        self.names = (tensor.name,)
        # None for the complete tensor, and for masks and tensors, by which the framework indexes the complete tensor.
        self.selection = None
        if index is not None:
            self.selection = select(index, shape, stored.path, tensor.name)
        positions = self.selection and self.selection.positions
        itemsize = itemsize_of(tensor.dtype)
        super().__init__(tensor.begin, shape, itemsize, framework, positions, is_shared=is_shared)

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor is loaded."""
        return self.shape == self.whole_shape

    def array(self) -> Any:
        """Return the array that the caller receives, once the memory has been filled."""
        framework, dtype = self.framework, self.stored.tensor.dtype
        if self.selection is None:
            data = self.memory if self.nbytes else framework.empty(0)
            array = framework.as_array(data, dtype, self.shape)
            return array if self.index is None else array[self.index]
        array = self.elements()[self.selection.basic]
        if self.selection.lists:
            array = framework.index_by_lists(array, self.selection.lists)
        return framework.as_dtype(array, dtype)


class Files:
    """Where parts are read from; a subclass opens the files.

    Attributes
    ----------
    is_mapped : bool
        Whether the parts are views of mapped memory, of which :meth:`map` returns ranges.
    """

    is_mapped = False

    def open(self, part: Any, *, cached: bool) -> File:
        """Return the open file of a part; ``cached`` says whether it should be read through the page cache."""
        raise NotImplementedError

    def map(self, part: Any) -> Any:
        """Return the mapped bytes from the first to the last element of a part."""
        raise NotImplementedError

    def sums(self, part: Any) -> FileChecksums | None:  # noqa: ARG002
        """Return the checksums with which the reads of a part are compared, if there are any."""
        return None


class PartsRead(Read):
    """A read of a pipeline: of several contiguous parts, of another part, or of some windows of one.

    Parameters
    ----------
    parts : list of Part
        The parts.
    files : Files
        Where they are read from.
    windows : list of Window, optional
        The windows to read, out of which elements are picked.
    is_last : bool
        Whether the parts are complete after this read.
    sharers : Sharers, optional
        The ranks that share this read.
    """

    def __init__(
        self,
        parts: list[Any],
        files: Files,
        windows: list[Window] | None = None,
        *,
        is_last: bool = True,
        sharers: Sharers | None = None,
    ) -> None:
        self.part = parts[0]
        self.parts = parts if is_last else []
        # If ranks share the read: its memory, with the offsets in the file; what each rank reads of it; and whether
        # they have exchanged their shares.
        self.pieces: list[tuple[int, Any]] = []
        self.shares: list[Share] = []
        self.is_handed_on = False
        self._given_count = 0
        self._windows, self._files, self._sharers = windows, files, sharers
        self._sums = files.sums(self.part)
        self._scratch: Any = None
        if windows is None:
            costs = [part.cost_nbytes for part in parts]
            self.nbytes = sum(costs)
        else:
            self.nbytes = sum(window.nbytes for window in windows)
            # Each of the reads claims the memory of the part, because the others may have been released.
            costs = [self.nbytes + self.part.nbytes]
        self._before_nbytes = list(itertools.accumulate(costs, initial=0))

    @property
    def memory_nbytes(self) -> int:
        """The memory of the read, in bytes."""
        nbytes: int = self._before_nbytes[-1]
        return nbytes

    @property
    def given_count(self) -> int:
        """How many parts, counted from the first, belong to the caller."""
        while self._given_count < len(self.parts) and self.parts[self._given_count].is_given:
            self._given_count += 1
        return self._given_count

    @property
    def released_nbytes(self) -> int:
        """The memory of these parts, in bytes."""
        nbytes: int = self._before_nbytes[self.given_count] if self._windows is None else 0
        return nbytes

    def begin(self) -> None:
        """Begin to read."""
        part, sharers = self.part, self._sharers
        if self._files.is_mapped:
            return
        file = self._files.open(part, cached=self._windows is not None)
        if part.is_contiguous:
            pieces = [each.allocate() for each in self.parts if each.nbytes]
        else:
            if part.memory is None:
                part.memory = part.framework.empty(part.nbytes)
            windows, memory = self._windows, part.memory
            if windows is None:
                windows = list(part.plan().windows)
            else:
                memory = self._scratch = part.framework.empty(self.nbytes)
            sizes = {window.nbytes for window in windows}
            if part.framework.on_host and len(sizes) == 1 and not (self._sums or sharers):
                end = math.prod(part.whole_shape) * part.itemsize
                begins = (window.begin for window in windows)
                segments, first = collect_runs(begins, sizes.pop(), end, memory)
                self.futures = (file.read_into(segments, part.begin + first),)
                return
            places = itertools.accumulate((window.nbytes for window in windows), initial=0)
            pieces = [
                (part.begin + window.begin, memory[at : at + window.nbytes])
                for window, at in zip(windows, places, strict=False)
            ]
        if sharers is not None:
            # Verifying needs whole chunks, so ranks should divide the read at the boundaries of chunks.
            alignment = PAGE_NBYTES if self._sums is None else self._sums.chunk_nbytes
            self.pieces, self.shares = pieces, sharers.divide(pieces, alignment)
            pieces = sharers.pieces_to_read(self.shares, pieces)
        self.nbytes = sum(len(memory) for _, memory in pieces)
        self.futures = list(self._transfers(file, pieces))

    def wait(self) -> None:
        """Wait for the transfers; the parts that are complete then have their data, unless ranks share the read."""
        if not self.futures:
            return
        super().wait()
        self.futures = ()  # each would keep the memory of its parts
        if self._sharers is None:
            self.finish()

    def give(self, part: Part) -> bool:
        """Note that a part's memory belongs to the caller. Return whether that is so for all parts."""
        part.is_given = True
        part.memory = part._picked = None
        return self.given_count == len(self.parts)

    def finish(self) -> None:
        """Pick the selected elements out of the windows, after they have been read."""
        if self._windows is not None and self._scratch is not None:
            part = self.part
            plan = part.plan()
            assert part.positions is not None
            elements = part.framework.as_integers(self._scratch, part.itemsize, (-1,))
            rows = part.elements().reshape(-1, *part.shape[plan.split :])
            at = 0
            for window in self._windows:
                chosen = part.positions[plan.split][window.first : window.stop]
                picked = part.pick(elements, (chosen, *part.positions[plan.split + 1 :]), at)
                rows[window.row, window.first : window.stop] = picked
                at += window.nbytes // part.itemsize
        self._scratch = None
        self.pieces = []

    def _transfers(self, file: File, pieces: list[tuple[int, Any]]) -> Iterator[Future[Any]]:
        """Begin the transfers. Without checksums it is one, in which the core passes over large gaps."""
        at = 0
        while at < len(pieces):
            begin = reached = pieces[at][0]
            segments: list[Any] = []
            for offset, memory in pieces[at:]:
                is_far = offset > reached + _GAP_NBYTES or reached - begin > GROUP_NBYTES
                if segments and self._sums is not None and is_far:
                    break
                segments += [*_gap(offset - reached), memory]
                reached = offset + len(memory)
                at += 1
            if self._sums is None:
                yield file.read_into(segments, begin)
                continue
            first, last, expected = self._sums.covering(begin, reached)
            segments = [*_gap(begin - first), *segments, *_gap(last - reached)]
            self.nbytes += last - first - (reached - begin)
            sums = Checksums(self._sums.chunk_nbytes, expected=expected)
            yield file.read_into(segments, first, checksums=sums)


def reads_of(
    parts: Iterable[Any],
    files: Files,
    *,
    limit_nbytes: int = GROUP_NBYTES,
    sharers: Sharers | None = None,
) -> Iterator[PartsRead]:
    """Yield the reads of parts, given in the order of the files: consecutive small ones of a file share a read."""
    read = functools.partial(PartsRead, files=files, sharers=sharers)
    pending: list[Any] = []
    nbytes = 0
    for part in parts:
        is_small = part.is_contiguous and part.nbytes < LARGE_NBYTES
        if pending and (
            not is_small
            or part.stored.path != pending[0].stored.path
            or nbytes + part.nbytes > limit_nbytes
            or len(pending) == _GROUP_PARTS
        ):
            yield read(pending)
            pending, nbytes = [], 0
        if is_small:
            pending.append(part)
            nbytes += part.nbytes
            continue
        if part.is_contiguous or files.is_mapped or (plan := part.plan()).exact:
            yield read([part])
            continue
        batches = list(_batches(plan.windows))
        for batch in batches:
            yield read([part], windows=batch, is_last=batch is batches[-1])
    if pending:
        yield read(pending)


class PartLoader(Iterator[tuple[str, Any]]):
    """Parts that are read in order within a budget, and given to the caller, each once: the next, or one by its name.

    It is thread-safe. An interrupted call can be repeated.

    Parameters
    ----------
    parts : sequence of TensorPart
        The parts, in the order of the files.
    files : Files
        Where they are read from.
    budget_nbytes : int
        The memory for parts that the caller has not received.
    sharers : Sharers, optional
        The ranks that share the reads.
    **options
        As for :class:`tensorferry.transfer.pipeline.Pipeline`.

    Attributes
    ----------
    pipeline : Pipeline
        The reads.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        files: Files,
        budget_nbytes: int,
        *,
        sharers: Sharers | None = None,
        **options: bool,
    ) -> None:
        limit_nbytes = min(budget_nbytes, GROUP_NBYTES)
        reads = list(reads_of(parts, files, limit_nbytes=limit_nbytes, sharers=sharers))
        self.pipeline: Pipeline[PartsRead] = Pipeline(reads, memory_nbytes=budget_nbytes, **options)
        if sharers is not None:
            sharers.steps = len(reads)
        self._files = files
        self._parts: dict[str, tuple[Any, list[PartsRead]]] = {}
        for read in reads:
            for part in read.parts or [read.part]:
                for name in part.names:
                    self._parts.setdefault(name, (part, []))[1].append(read)
        self._ready: tuple[PartsRead, TensorPart, Any] | None = None

    def __next__(self) -> tuple[str, Any]:
        pipeline = self.pipeline
        pipeline._check_process()
        with pipeline.lock:
            self._check_open()
            # Ctrl-C may interrupt between any two statements. Each is idempotent, so the next call can repeat it.
            while self._ready is None:
                oldest = self._oldest()
                if oldest is None:
                    raise StopIteration
                # A signal handler may have called next() and received the last part of this read.
                if oldest.given_count < len(oldest.parts):
                    part = oldest.parts[oldest.given_count]
                    self._ready = oldest, part, self._array_of(part)
                else:
                    pipeline.release(oldest)
            read, part, array = self._ready
            self._give(read, part)
            self._ready = None
            return part.name, array

    def take(self, name: str) -> Any:
        """Wait for a part, and return its array."""
        with self.pipeline.lock:
            part, read = self._wait_for(name)
            array = self._array_of(part)
            self._give(read, part)
        return array

    def take_memory(self, name: str) -> tuple[Any, Any]:
        """Wait for a part, and return it with its memory. No other call gets that memory."""
        with self.pipeline.lock:
            part, read = self._wait_for(name)
            memory = part.memory
            self._give(read, part)
        return part, memory

    def _wait_for(self, name: str) -> tuple[Any, PartsRead]:
        """Wait for a part, and return it with its last read."""
        self.pipeline._check_process()
        self._check_open()
        part, reads = self._parts[name]
        try:
            for read in reads:
                if not read.begun:
                    self.pipeline.begin(read)
                read.wait()
        except StorageError:
            # The error may be that of a neighbour in the same read, or of a moment that is over.
            self._check_open()
            load(part, self._files)
        self._check_open()
        return part, reads[-1]

    def _array_of(self, part: TensorPart) -> Any:
        if self._files.is_mapped and part.nbytes:
            part.use(self._files.map(part))
        return part.array()

    def _oldest(self) -> PartsRead | None:
        """Wait for the oldest read, and return it, or None if no read is left."""
        oldest = self.pipeline.first()
        if oldest is not None:
            oldest.wait()
        return oldest

    def _give(self, read: PartsRead, part: TensorPart) -> None:
        """Note that a part belongs to the caller, and begin further reads that fit into the budget."""
        if not read.give(part):
            return
        self.pipeline.release(read)
        # The array to return is complete, so an error of a later read must not replace it. The next call raises that
        # error again.
        with contextlib.suppress(Exception):
            self.pipeline.advance()

    def _check_open(self) -> None:
        """Raise an exception if the loader is closed."""
        if self.pipeline.closed:
            raise StopIteration

    def has(self, name: str) -> bool:
        """Return whether this loader has a part that was not given to the caller."""
        return name in self._parts and not self._parts[name][0].is_given

    def has_begun(self, name: str) -> bool:
        """Return whether this loader has begun to read such a part."""
        return self.has(name) and self._parts[name][1][-1].begun

    def close(self, *, wait: bool = True) -> None:
        """Cancel the reads in progress; with ``wait``, return when they have ended."""
        self.pipeline.close(wait=wait)
        self._parts, self._ready = {}, None


def load(part: Part, files: Files) -> None:
    """Read a part into its memory."""
    # Each read claims the memory of the part.
    memory_nbytes = 2 * (part.nbytes + WINDOW_NBYTES)
    with Pipeline(reads_of([part], files), memory_nbytes=memory_nbytes) as pipeline:
        for _ in pipeline:
            pass


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


def _gap(nbytes: int) -> list[int]:
    """Return the segments of a transfer for a gap, which may be empty."""
    return [nbytes] if nbytes else []
