"""Streaming of tensors from many files within a memory budget: complete tensors, or the slices that a plan selects.

Terms in this module:

row
    A contiguous range of bytes of a slice in the file. A slice of the first dimension is one row. A slice of columns
    consists of many rows.
part
    A tensor that the caller receives: a complete tensor of a file, or a slice of it. Each part has separate memory, so
    a caller that keeps one part does not keep the memory of other parts alive.
group
    Parts that are read together. A large part forms a group alone. Small neighbouring parts share a group, and within
    it a transfer.

Groups begin in the order of the files, as far as the budget allows. The core's worker threads transfer the data. Python
code runs only in the thread that requests the next tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import checked_nbytes, is_url
from tensorferry.base.ranges import runs, strides_of
from tensorferry.safetensors import checksums
from tensorferry.safetensors.dtypes import torch_shape
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.frameworks import Framework, framework_of, itemsize_of
from tensorferry.safetensors.loading import gap
from tensorferry.safetensors.slicing import select
from tensorferry.safetensors.sources import stored_tensors
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tensorferry.base.ranks import Broadcast
    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.ranks import Share, Sharers
    from tensorferry.safetensors.sources import Source, Stored
    from tensorferry.transfer.files import File

_PAGE_NBYTES = 4096
# Parts from this size on are extended to whole pages and read with direct I/O into their memory, without a bounce copy.
_LARGE_NBYTES = 1 << 20
# The limits for the small parts in a group, and for a transfer with gaps.
_GROUP_NBYTES = 8 << 20
_GROUP_PARTS = 1024
# Gaps up to this size are read and discarded, which is cheaper than another transfer.
_GAP_NBYTES = 64 << 10
# Rows from this size on are read separately: reading whole pages at both ends adds less than a tenth.
_LONG_ROW_NBYTES = 10 * 2 * _PAGE_NBYTES


def load_files(
    files: Source,
    plan: Mapping[str, Any] | None = None,
    *,
    device: Any = "cpu",
    memory_budget: int | str = "1GiB",
    framework: str = "pt",
    verify: bool = False,
    broadcast: Broadcast = False,
    process_group: ProcessGroup | None = None,
) -> Tensors:
    """Return an iterator over tensors of safetensors files, in the order in which the files store them.

    The iterator returns each tensor as soon as it has been read, and reads the next ones in the background as far as
    the memory budget allows. Only the data that the plan selects are read.

    Parameters
    ----------
    files : path or sequence of paths
        Files, the index of a sharded model, or a directory with either. They may be in a bucket; see
        :func:`tensorferry.open`.
    plan : mapping of str to index, optional
        The tensors to load, by name. The value is None for the complete tensor, or an index by torch's rules: a slice,
        an integer, an Ellipsis, None, or a tuple of these. Without a plan, all tensors are loaded completely.
    device : torch.device, str or int
        The device of the tensors.
    memory_budget : int or str
        The memory for tensors that the iterator has not returned yet, in bytes: ``8 << 30`` or ``"8GiB"``. Tensors that
        it has returned belong to the caller and do not count.
    framework : "pt" or "np"
        "pt" returns torch's tensors, "np" NumPy's arrays.
    verify : bool
        Whether to compare the data with the checksums stored next to the files, before a tensor is returned. This reads
        whole chunks, of 256 KiB by default.
    broadcast : False, True or "auto"
        Whether ranks that load the same tensors share the reads: each rank of a node reads a part, and the process
        group passes it on to the others. "auto" shares if the tensors are on GPUs and the group supports their memory
        (NCCL), or if the files are not on a local drive. All ranks of the group must call this function, request the
        same tensors, and take the same number of them.
    process_group : ProcessGroup, optional
        The process group of torch.distributed; by default that of all ranks.

    Returns
    -------
    Tensors
        An iterator over pairs of name and tensor, which is also a context manager. Each tensor is contiguous and has
        separate memory.

    Raises
    ------
    SafetensorError
        A header is invalid, no file has a tensor of the plan, an index does not fit a tensor, or the framework lacks a
        dtype.
    ValueError, TypeError
        An argument is invalid, or a tensor needs more memory than the budget (the message says how much), or the ranks
        that share the reads request different tensors.
    StorageError
        A file cannot be read.
    FileNotFoundError
        ``verify`` is true, and a file has no checksums.

    The iterator raises StorageError if a file cannot be read, ChecksumError if the data do not match their checksums,
    and SafetensorError if a file was replaced or changed after this call. With ``broadcast``, an error on one rank is
    raised on all ranks, and a rank raises RuntimeError if another rank takes fewer tensors.

    Examples
    --------
    >>> for name, tensor in load_files("model/", memory_budget="2GiB"):  # doctest: +SKIP
    ...     model.get_parameter(name).data.copy_(tensor)
    """

    def prepare() -> LoadPlan:
        return _prepare(files, plan, device, memory_budget, framework, verify=verify)

    sharers: Sharers | None = None
    if broadcast is False:
        loading = prepare()
    else:
        from tensorferry.safetensors.ranks import agree_on_load

        loading, sharers = agree_on_load(prepare, broadcast, process_group)
    return Tensors(loading, sharers)


class LoadPlan(NamedTuple):
    """The validated arguments of a load.

    Attributes
    ----------
    parts : list of PlannedTensor
        The tensors, in the order of the files.
    options : dict of str to Any
        The arguments that must be equal on all ranks that share the reads.
    framework : Framework
        The library and the device of the tensors.
    budget_nbytes : int
        The memory budget.
    files : _OpenFiles
        The files to read.
    """

    parts: list[PlannedTensor]
    options: dict[str, Any]
    framework: Framework
    budget_nbytes: int
    files: _OpenFiles


def _prepare(
    files: Source,
    plan: Mapping[str, Any] | None,
    device: Any,
    memory_budget: int | str,
    framework: str,
    *,
    verify: bool,
) -> LoadPlan:
    """Validate the arguments, and read and validate the headers."""
    library = framework_of(framework, device)
    if str(library.device).partition(":")[0] not in ("cpu", "cuda"):
        raise SafetensorError(
            f"device: {device!r} is not supported (remedy: load to the CPU, and move each tensor)"
        )
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(f"plan: {shortened(plan)} is not a mapping of names to indices")
    budget_nbytes = checked_nbytes(memory_budget, "memory_budget")
    stored = stored_tensors(files)
    for name in plan or ():
        if name not in stored:
            raise SafetensorError("no file has a tensor of this name", name=name)
    parts = [
        _plan_tensor(one, None if plan is None else plan[name], library)
        for name, one in stored.items()
        if plan is None or name in plan
    ]
    for part in parts:
        if part.cost_nbytes > budget_nbytes:
            raise ValueError(
                f"memory_budget: {budget_nbytes} bytes are not enough: tensor {part.stored.tensor.name!r} of "
                f"{part.stored.path!r} needs {part.cost_nbytes}"
            )
    paths = {part.stored.path: part.stored.file_nbytes for part in parts} if verify else {}
    kept = {path: checksums.read(path, file_nbytes) for path, file_nbytes in paths.items()}
    options = {
        "framework": library.name,
        "device": str(library.device).partition(":")[0],
        "memory_budget": budget_nbytes,
        "verify": bool(verify),
    }
    return LoadPlan(parts, options, library, budget_nbytes, _OpenFiles(kept))


def tensor_parallel_plan(
    files: Source,
    rules: Mapping[str, int | None],
    rank: int | None = None,
    world: int | None = None,
) -> dict[str, Any]:
    """Return the plan for one rank of a tensor-parallel model, for :func:`load_files`.

    Parameters
    ----------
    files : path or sequence of paths
        As for :func:`load_files`.
    rules : mapping of str to int or None
        The keys are names or patterns of names (``"*.o_proj.weight"``). The value is the dimension that is divided
        among the ranks, or None for tensors that every rank loads completely. The first matching pattern applies. A
        tensor without a matching pattern is loaded completely.
    rank, world : int, optional
        This rank and the number of ranks; by default those of ``torch.distributed``.

    Raises
    ------
    SafetensorError
        A tensor lacks the dimension, or cannot be divided evenly.
    ValueError
        The rank is out of range, or ``torch.distributed`` is not initialized.
    """
    if rank is None or world is None:
        import torch.distributed

        if not torch.distributed.is_initialized():
            raise ValueError("rank, world: torch.distributed is not initialized")
        rank = torch.distributed.get_rank() if rank is None else rank
        world = torch.distributed.get_world_size() if world is None else world
    if not 0 <= rank < world:
        raise ValueError(f"rank: {rank} is not one of the {world} ranks")
    plan: dict[str, Any] = {}
    for name, one in stored_tensors(files).items():
        shape = torch_shape(one.tensor.dtype, one.tensor.shape, one.path, name)
        dim = next((rules[rule] for rule in rules if fnmatchcase(name, rule)), None)
        if dim is None:
            plan[name] = None
            continue
        if not -len(shape) <= dim < len(shape):
            raise SafetensorError(
                f"its shape {list(shape)} has no dimension {dim}", one.path, name=name
            )
        length, remainder = divmod(shape[dim], world)
        if remainder:
            raise SafetensorError(
                f"dimension {dim} of {list(shape)} cannot be divided among {world} ranks",
                one.path,
                name=name,
            )
        own = slice(rank * length, (rank + 1) * length)
        plan[name] = (*[slice(None)] * (dim % len(shape)), own)
    return plan


class Tensors(Iterator[tuple[str, Any]]):
    """The iterator that :func:`load_files` returns. Close it, or use it in a ``with`` block, if it may end early."""

    def __init__(self, loading: LoadPlan, sharers: Sharers | None = None) -> None:
        parts, _, _, budget_nbytes, files = loading
        groups = _groups(parts, min(budget_nbytes, _GROUP_NBYTES), files, sharers)
        far = bool(parts) and is_url(parts[0].stored.path)
        self._pipeline = Pipeline(groups, memory_nbytes=budget_nbytes, far=far)
        self._pipeline.files = files.opened
        self._files = files
        self._sharers = sharers
        if sharers is not None:
            sharers.steps = len(groups)
        self._ready: tuple[Group, int, str, Any] | None = None

    @property
    def nbytes_read(self) -> int:
        """The bytes that this rank has requested from the files so far."""
        return self._pipeline.nbytes_read

    def __iter__(self) -> Tensors:
        return self

    def __next__(self) -> tuple[str, Any]:
        pipeline = self._pipeline
        pipeline._check_process()
        with pipeline.lock:
            if pipeline.closed:
                raise StopIteration
            # Ctrl-C may interrupt between any two statements. Each is idempotent, so the next call can repeat it.
            try:
                while self._ready is None:
                    step = self._sharers and self._sharers.step
                    oldest = step(self._wait_for_oldest) if step else self._wait_for_oldest()
                    if oldest is None:
                        self.close()
                        raise StopIteration
                    # A signal handler may have called next() and received the last tensor of this group.
                    if oldest.given_count < len(oldest.parts):
                        self._ready = oldest.next_tensor()
            except Exception:
                self.close()
                raise
            group, index, name, tensor = self._ready
            group.parts[index].memory = None
            group.given_count = index + 1
            # The tensor to return is complete, so an error of a later read must not replace it. The next call raises
            # that error again.
            with contextlib.suppress(Exception):
                self._advance()
            self._ready = None
            return name, tensor

    def _wait_for_oldest(self) -> Group | None:
        """Wait until this process has read the oldest group, and return it. Return None if no group is left."""
        self._advance()
        oldest = self._pipeline.first()
        if oldest is not None:
            oldest.wait()
        return oldest

    def _advance(self) -> None:
        """Release the groups whose parts the caller has all received. Begin further groups that fit into the budget."""
        pipeline = self._pipeline
        before = pipeline.oldest
        while (group := pipeline.oldest) is not None and group.given_count == len(group.parts):
            pipeline.release(group)
        pipeline.advance()
        if pipeline.oldest is not before:
            self._files.close_all_but(group.path for group in pipeline.held)

    def close(self) -> None:
        """Cancel the reads in progress, wait for them, and close the files.

        If ranks share the reads, and the others have not finished, they get an error for their next tensor.
        """
        if self._sharers is not None:
            self._sharers.leave()
        self._pipeline.close()
        self._ready = None

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenFiles:
    """The files that groups are reading, each open while a group needs it, and the files' stored checksums.

    A file that is read through the page cache (``cached``) is opened separately from one for direct I/O.
    """

    def __init__(self, sums: Mapping[str, FileChecksums]) -> None:
        self.sums = sums
        self.opened: dict[Any, File] = {}

    def file(self, stored: Stored, *, cached: bool) -> File:
        key = stored.path, cached
        file = self.opened.get(key)
        if file is None:
            file = self.opened[key] = stored.open(direct=False if cached else "auto")
        return file

    def close_all_but(self, paths: Iterable[str]) -> None:
        if len(self.opened) > 1:
            kept = set(paths)
            for key in [key for key in self.opened if key[0] not in kept]:
                self.opened.pop(key).close()


@dataclass(eq=False)
class PlannedTensor:
    """A part: a tensor to load, or a slice of it.

    It consists of ``count`` rows of ``row_nbytes`` each, at ``offsets()`` in the file. ``nbytes`` is the size of its
    rows, ``cost_nbytes`` the memory that loading it takes, and ``read_nbytes`` what is read from the file, with the
    gaps between rows that are read and discarded.
    """

    stored: Stored
    framework: Framework
    shape: tuple[int, ...]  # the shape of the selected positions
    begin: int  # the offset of the first row in the file
    row_nbytes: int
    # For each dimension outside of a row, the offsets of its positions relative to the first one, in bytes.
    outer_offsets: list[list[int]]
    basic: tuple[Any, ...] = (...,)  # an index to apply to the positions; see slicing.Selection
    row_slice: Any = None  # the elements to keep of each row; None for all
    memory: Any = None

    def __post_init__(self) -> None:
        self.count = math.prod(map(len, self.outer_offsets))
        self.nbytes = self.count * self.row_nbytes
        itemsize = itemsize_of(self.stored.tensor.dtype)
        self.is_page_aligned = (
            self.count == 1
            and self.nbytes >= _LARGE_NBYTES
            and self.framework.on_host
            and self.begin % itemsize == 0
        )
        self.read_begin, self.read_end = self.begin, self.begin + self.nbytes
        if self.is_page_aligned:
            self.read_begin = self.begin // _PAGE_NBYTES * _PAGE_NBYTES
            self.read_end = -(-self.read_end // _PAGE_NBYTES) * _PAGE_NBYTES
            self.read_end = min(self.read_end, self.stored.file_nbytes)
        self.cost_nbytes = self.read_nbytes = self.nbytes
        if self.is_page_aligned:
            self.cost_nbytes = self.read_nbytes = self.read_end - self.read_begin
        if self.row_slice is not None:
            self.cost_nbytes += math.prod(self.shape) * itemsize  # the copy
        long = self.count > 1 and self.row_nbytes >= _LONG_ROW_NBYTES
        self.gap_nbytes = _PAGE_NBYTES if long else _GAP_NBYTES
        if self.count > 1:
            inner = self.outer_offsets[-1]
            span = inner[-1] - inner[0] + self.row_nbytes
            # A span is the range from the first to the last row of the innermost dimension outside of a row. If the
            # gaps between these rows are small enough on average, whole spans are read.
            if span <= len(inner) * (self.row_nbytes + self.gap_nbytes):
                self.read_nbytes = self.count // len(inner) * span

    def offsets(self) -> Iterator[int]:
        """Yield the offsets of the rows in the file."""
        for offsets in itertools.product(*self.outer_offsets):
            yield self.begin + sum(offsets)

    def allocate(self) -> list[Any]:
        """Allocate the memory, and return it split into the rows."""
        if self.is_page_aligned:
            memory, _ = _core.allocate(self.read_end - self.read_begin, False)
            self.memory = self.framework.wrap(memory)
        else:
            self.memory = self.framework.empty(self.nbytes)
        return [self.memory] if self.count == 1 else list(self.memory.reshape(self.count, -1))

    def to_tensor(self) -> Any:
        """Return the memory as the tensor that the caller receives."""
        framework, dtype = self.framework, self.stored.tensor.dtype
        raw = framework.empty(0) if self.memory is None else self.memory
        if self.is_page_aligned:
            # A slice would share the storage of whole pages. wrap() makes a tensor whose storage has its bytes only.
            at = self.begin - self.read_begin
            raw = framework.wrap(raw[at : at + self.nbytes])
        if self.row_slice is None:
            return framework.as_array(raw, dtype, self.shape)[self.basic]
        rows = framework.as_array(raw, dtype, (self.count, -1))[:, self.row_slice]
        return framework.copy(rows).reshape(self.shape)[self.basic]


class Group(Read):
    """Parts that are read together."""

    def __init__(
        self, parts: list[PlannedTensor], files: _OpenFiles, sharers: Sharers | None
    ) -> None:
        self.parts = parts
        self.given_count = 0  # how many parts have been returned
        self.shares: list[Share] = []  # what each rank reads, if ranks share the reads
        self.is_handed_on = False  # whether the ranks have exchanged their shares
        self._files = files
        self._sharers = sharers
        first = parts[0]
        self.path = first.stored.path
        costs = (part.cost_nbytes for part in parts)
        self._before_nbytes = list(itertools.accumulate(costs, initial=0))
        self.nbytes = sum(part.read_nbytes for part in parts)
        # If rows are short, the bytes between them are read, too, and these are usually the rows of other ranks on this
        # node. Such a group is read through the page cache, so the drive reads the bytes once for all ranks.
        self._cached = first.count > 1 and self.nbytes > 1.1 * first.nbytes

    @property
    def memory_nbytes(self) -> int:
        """The memory of all parts, in bytes."""
        return self._before_nbytes[-1]

    @property
    def released_nbytes(self) -> int:
        """The memory of the parts that have been returned, in bytes."""
        return self._before_nbytes[self.given_count]

    def next_tensor(self) -> tuple[Group, int, str, Any]:
        """Return the next tensor, after the read: this group, the tensor's index in it, its name, and the tensor."""
        part = self.parts[self.given_count]
        return self, self.given_count, part.stored.tensor.name, part.to_tensor()

    def begin(self) -> None:
        """Begin to read. With ``verify=True``, the transfers also verify the checksums."""
        file = self._files.file(self.parts[0].stored, cached=self._cached)
        kept = self._files.sums.get(self.path)
        pieces: list[tuple[int, Any]] = []
        for part in self.parts:
            if not part.nbytes:
                continue
            rows = part.allocate()
            begins = [part.read_begin] if part.is_page_aligned else part.offsets()
            pieces += zip(begins, rows, strict=True)
        if self._sharers is not None:
            # Verifying needs whole chunks, so ranks should divide the group at the boundaries of chunks.
            alignment = _PAGE_NBYTES if kept is None else kept.chunk_nbytes
            self.shares = self._sharers.divide(pieces, alignment)
            pieces = self._sharers.pieces_to_read(self.shares, pieces)
            self.nbytes = sum(end - begin for begin, end in self._ranges(pieces))
        futures = []
        at = 0
        for begin, end in self._ranges(pieces):
            segments: list[Any] = []
            reached = begin
            while at < len(pieces) and pieces[at][0] < end:
                offset, memory = pieces[at]
                segments += [*gap(offset - reached), memory]
                reached = offset + len(memory)
                at += 1
            if kept is None:
                futures.append(file.read_into(segments, begin))
                continue
            first, last, expected = kept.covering(begin, end)
            segments = [*gap(begin - first), *segments, *gap(last - reached)]
            sums = Checksums(kept.chunk_nbytes, expected=expected)
            futures.append(file.read_into(segments, first, checksums=sums))
        self.futures = futures

    def _ranges(self, pieces: list[tuple[int, Any]]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the transfers. Pieces with small gaps between them share a transfer.

        A piece is the memory of a row, or of a slice of it, with its offset in the file.
        """
        gap_nbytes = self.parts[0].gap_nbytes
        begin = end = -1
        for offset, memory in pieces:
            stop = offset + len(memory)
            if begin >= 0 and offset <= end + gap_nbytes and stop - begin <= _GROUP_NBYTES:
                end = stop
                continue
            if begin >= 0:
                yield begin, end
            begin, end = offset, stop
        if begin >= 0:
            yield begin, end


def _groups(
    parts: list[PlannedTensor], limit_nbytes: int, files: _OpenFiles, sharers: Sharers | None
) -> list[Group]:
    """Divide parts into groups: consecutive small parts of a file together, and every other part alone."""
    groups: list[Group] = []
    pending: list[PlannedTensor] = []
    nbytes = 0
    for part in parts:
        is_small = part.count == 1 and part.nbytes < _LARGE_NBYTES and part.row_slice is None
        if pending and (
            not is_small
            or part.stored.path != pending[0].stored.path
            or nbytes + part.cost_nbytes > limit_nbytes
            or len(pending) == _GROUP_PARTS
        ):
            groups.append(Group(pending, files, sharers))
            pending, nbytes = [], 0
        if is_small:
            pending.append(part)
            nbytes += part.cost_nbytes
        else:
            groups.append(Group([part], files, sharers))
    if pending:
        groups.append(Group(pending, files, sharers))
    return groups


def _plan_tensor(stored: Stored, index: Any, framework: Framework) -> PlannedTensor:
    """Return the part of a tensor that an index selects; None selects all of it."""
    tensor = stored.tensor
    shape, itemsize = framework.shape(tensor, stored.path), itemsize_of(tensor.dtype)
    if index is None:
        return PlannedTensor(stored, framework, shape, tensor.begin, tensor.nbytes, [])
    try:
        selection = select(index, shape, stored.path, tensor.name)
    except TypeError as error:
        raise SafetensorError(str(error), stored.path, name=tensor.name) from None
    if selection is None or selection.lists:
        reason = (
            f"{shortened(index)} is not an index for a plan (valid: integers, slices, None and ...)"
        )
        raise SafetensorError(reason, stored.path, name=tensor.name)
    positions, strides = selection.positions, strides_of(shape, itemsize)
    dims = begin = row_nbytes = 0
    if math.prod(selection.shape):
        dims, begin, row_nbytes = runs(positions, shape, itemsize)
    begin += tensor.begin
    row_slice = None
    # A step in the last dimension scatters single elements. A row then covers the whole range from the first to the
    # last of them, and row_slice picks them out.
    if dims and dims == len(shape):
        dims, last = dims - 1, positions[-1]
        row_nbytes *= last[-1] - last[0] + 1
        row_slice = slice(None, None, last[1] - last[0])
    outer_offsets = [
        [(position - each[0]) * stride for position in each]
        for each, stride in zip(positions[:dims], strides[:dims], strict=True)
    ]
    return PlannedTensor(
        stored,
        framework,
        selection.shape,
        begin,
        row_nbytes,
        outer_offsets,
        selection.basic,
        row_slice,
    )
