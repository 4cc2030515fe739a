"""Tensors of many files, one after the other, in a given number of bytes: whole ones, or the slices that a plan wants.

The words of this room:

row
    Bytes of a slice that lie together in the file. A slice of the first dimension is one row; one of columns has many.
part
    A tensor to be given, and its memory: its own, so that whoever keeps it keeps nothing else alive.
group
    Parts that are read together: a large one alone, small neighbours by one transfer.

Groups are begun in the order of the files as far as the budget allows, and moved by the core: nothing runs here but the
thread that asks for the next tensor.
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
from tensorferry.safetensors.dtypes import numpy_dtype, torch_dtype, torch_shape
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.frameworks import torch_device
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
# Parts from here on are read straight into their memory, which has the whole pages that they lie in.
_LARGE_NBYTES = 1 << 20
# Of small parts in a group, and of a transfer with gaps.
_GROUP_NBYTES = 8 << 20
_GROUP_PARTS = 1024
# Unwanted bytes in a row that are read rather than begin another transfer.
_GAP_NBYTES = 64 << 10
# Rows from here on are read one by one: their first and last pages are less than a tenth more.
_LONG_ROW_NBYTES = 10 * 2 * _PAGE_NBYTES

_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")


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
    """Return an iterator over tensors of safetensors files, in the order in which they lie there.

    Each is given as soon as it is there, and the next ones are read meanwhile, as many as the budget has room for. Only
    what a plan wants is read.

    Parameters
    ----------
    files : path or sequence of paths
        Files, a sharded model's index, or a directory with either. Also in a bucket: see :func:`tensorferry.open`.
    plan : mapping of str to index, optional
        The tensors wanted, and of each what of it: None for all, or a slice, an integer, an Ellipsis, None, or a tuple
        of these, by torch's rules. Without a plan all tensors are given whole.
    device : torch.device, str or int
        Where they go.
    memory_budget : int or str
        Bytes of memory for tensors that have not been given yet: ``8 << 30``, or ``"8GiB"``. Those that have been are
        the caller's.
    framework : "pt" or "np"
        Tensors of torch, or arrays of NumPy.
    verify : bool
        Compare what is read with the checksums kept beside the files, before a tensor is given. Whole chunks are read
        for that, 256 KiB by default.
    broadcast : False, True or "auto"
        Whether ranks that load the same read it together: each rank of a node reads a part, and the process group hands
        it on. "auto": where tensors go to GPUs and the group moves their memory (NCCL), or the files are on no local
        drive. All ranks of the group call this, want the same tensors, and take as many of them.
    process_group : ProcessGroup, optional
        Of torch.distributed; by default that of all ranks.

    Returns
    -------
    Tensors
        An iterator over pairs of name and tensor, contiguous and with memory of its own; a context manager.

    Raises
    ------
    SafetensorError
        A header is wrong; a name of the plan is in no file; an index does not fit a tensor, or a dtype the framework.
    ValueError, TypeError
        An argument is not usable, or a tensor is larger than the budget: the message says what it needs. Or ranks that
        are to share differ in what they want.
    StorageError
        A file cannot be read.
    ChecksumError
        By the iterator: what was read is not what its checksums are of. Also SafetensorError by it: a file was replaced
        or changed meanwhile.
    FileNotFoundError
        There are no checksums to verify by.

    With ``broadcast``, what fails on one rank is raised on all; RuntimeError where another rank takes fewer tensors.

    Examples
    --------
    >>> for name, tensor in load_files("model/", memory_budget="2GiB"):  # doctest: +SKIP
    ...     model.get_parameter(name).data.copy_(tensor)
    """

    def prepare() -> Loading:
        return _prepared(files, plan, device, memory_budget, framework, verify=verify)

    sharers: Sharers | None = None
    if broadcast is False:
        loading = prepare()
    else:
        from tensorferry.safetensors.ranks import meet

        loading, sharers = meet(prepare, broadcast, process_group)
    return Tensors(loading, sharers)


class Loading(NamedTuple):
    """What is to be loaded, checked.

    Attributes
    ----------
    parts : list of Wanted
        The tensors, in their order.
    options : dict of str to Any
        The arguments in which ranks that load together may not differ.
    where : torch.device or str
        Where tensors go.
    budget_nbytes : int
        Of memory.
    files : _OpenFiles
        Those that are read.
    """

    parts: list[Wanted]
    options: dict[str, Any]
    where: Any
    budget_nbytes: int
    files: _OpenFiles


def _prepared(
    files: Source,
    plan: Mapping[str, Any] | None,
    device: Any,
    memory_budget: int | str,
    framework: str,
    *,
    verify: bool,
) -> Loading:
    """Check arguments and headers."""
    if framework not in _TORCH + _NUMPY:
        raise SafetensorError(f"framework: {framework!r} is neither 'pt' nor 'np'")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(f"plan: {shortened(plan)} is no mapping of names to indices")
    budget_nbytes = checked_nbytes(memory_budget, "memory_budget")
    where = _device(device, framework)
    stored = stored_tensors(files)
    for name in plan or ():
        if name not in stored:
            raise SafetensorError("no file has it", name=name)
    parts = [
        _part(one, None if plan is None else plan[name], where, framework)
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
        "framework": "np" if framework in _NUMPY else "pt",
        "device": str(where).partition(":")[0],
        "memory_budget": budget_nbytes,
        "verify": bool(verify),
    }
    return Loading(parts, options, where, budget_nbytes, _OpenFiles(kept))


def tensor_parallel_plan(
    files: Source,
    rules: Mapping[str, int | None],
    rank: int | None = None,
    world: int | None = None,
) -> dict[str, Any]:
    """Return the plan of one rank of a tensor-parallel model, for :func:`load_files`.

    Parameters
    ----------
    files : path or sequence of paths
        As for :func:`load_files`.
    rules : mapping of str to int or None
        For names, or patterns of names (``"*.o_proj.weight"``), the dimension that ranks divide among them; None for
        tensors that all ranks have whole, as those have that no rule is for. The first pattern that fits counts.
    rank, world : int, optional
        This rank and how many there are; by default those of ``torch.distributed``.

    Raises
    ------
    SafetensorError
        A tensor lacks the dimension, or cannot be divided evenly.
    ValueError
        The rank is none of these.
    """
    if rank is None or world is None:
        import torch.distributed

        if not torch.distributed.is_initialized():
            raise ValueError("rank, world: torch.distributed is not initialised")
        rank = torch.distributed.get_rank() if rank is None else rank
        world = torch.distributed.get_world_size() if world is None else world
    if not 0 <= rank < world:
        raise ValueError(f"rank: {rank} is none of {world}")
    plan: dict[str, Any] = {}
    for name, one in stored_tensors(files).items():
        shape = one.tensor.shape
        dim = next((rules[rule] for rule in rules if fnmatchcase(name, rule)), None)
        if dim is None:
            plan[name] = None
            continue
        if not -len(shape) <= dim < len(shape):
            raise SafetensorError(
                f"its shape {list(shape)} has no dimension {dim}", one.path, name=name
            )
        length, left = divmod(shape[dim], world)
        if left:
            raise SafetensorError(
                f"dimension {dim} of {list(shape)} cannot be divided among {world} ranks",
                one.path,
                name=name,
            )
        mine = slice(rank * length, (rank + 1) * length)
        plan[name] = (*[slice(None)] * (dim % len(shape)), mine)
    return plan


class Tensors(Iterator[tuple[str, Any]]):
    """The tensors of :func:`load_files`. Close it, or use it in a ``with`` block, where it is not read to its end."""

    def __init__(self, loading: Loading, sharers: Sharers | None = None) -> None:
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
        """How much this rank has asked of the files so far."""
        return self._pipeline.nbytes_read

    def __iter__(self) -> Tensors:
        return self

    def __next__(self) -> tuple[str, Any]:
        pipeline = self._pipeline
        pipeline._check_process()
        with pipeline.lock:
            if pipeline.closed:
                raise StopIteration
            # Ctrl-C may come between any two of these: what is done twice then has the same result.
            try:
                while self._ready is None:
                    step = self._sharers and self._sharers.step
                    oldest = step(self._oldest) if step else self._oldest()
                    if oldest is None:
                        self.close()
                        raise StopIteration
                    if oldest.given < len(oldest.parts):  # no signal handler has taken the last
                        self._ready = oldest.taken()
            except Exception:
                self.close()
                raise
            group, index, name, tensor = self._ready
            group.parts[index].memory = None
            group.given = index + 1
            with contextlib.suppress(Exception):  # the next call meets it again
                self._go_on()
            self._ready = None
            return name, tensor

    def _oldest(self) -> Group | None:
        """Return the oldest group, when this process has read it; None if there are no more."""
        self._go_on()
        oldest = self._pipeline.first()
        if oldest is not None:
            oldest.wait()
        return oldest

    def _go_on(self) -> None:
        """Release what has been given, and begin what there is room for."""
        pipeline = self._pipeline
        before = pipeline.oldest
        while (group := pipeline.oldest) is not None and group.given == len(group.parts):
            pipeline.release(group)
        pipeline.advance()
        if pipeline.oldest is not before:
            self._files.close_all_but(group.path for group in pipeline.held)

    def close(self) -> None:
        """End what is on its way, wait for it, and close the files.

        Ranks that read together and are not at the same place get an error for their next tensor.
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
    """Files that groups read, open as long as one of them does, and their checksums."""

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
            wanted = set(paths)
            for key in [key for key in self.opened if key[0] not in wanted]:
                self.opened.pop(key).close()


@dataclass(eq=False)
class Wanted:
    """A tensor to be given.

    Its rows are ``count`` ones of ``row_nbytes``, which begin at ``offsets()`` of the file.
    """

    stored: Stored
    where: Any
    framework: str
    dtype: Any
    shape: tuple[int, ...]  # of what is chosen
    begin: int  # of the first row
    row_nbytes: int
    outer: list[list[int]]  # of each outer dimension of rows, where these begin
    basic: tuple[Any, ...] = (...,)  # what is left to do with what is chosen
    picks: Any = None  # elements that are wanted of each row, where these are not all
    memory: Any = None

    def __post_init__(self) -> None:
        self.count = math.prod(map(len, self.outer))
        self.nbytes = self.count * self.row_nbytes
        self.straight = (
            self.count == 1
            and self.nbytes >= _LARGE_NBYTES
            and str(self.where) == "cpu"
            and self.begin % self.dtype.itemsize == 0
        )
        self.read_begin, self.read_end = self.begin, self.begin + self.nbytes
        if self.straight:
            self.read_begin = self.begin // _PAGE_NBYTES * _PAGE_NBYTES
            self.read_end = -(-self.read_end // _PAGE_NBYTES) * _PAGE_NBYTES
            self.read_end = min(self.read_end, self.stored.file_nbytes)
        self.cost_nbytes = self.read_nbytes = self.nbytes
        if self.straight:
            self.cost_nbytes = self.read_nbytes = self.read_end - self.read_begin
        if self.picks is not None:
            self.cost_nbytes += math.prod(self.shape) * int(self.dtype.itemsize)  # the copy
        long = self.count > 1 and self.row_nbytes >= _LONG_ROW_NBYTES
        self.gap_nbytes = _PAGE_NBYTES if long else _GAP_NBYTES
        if self.count > 1:
            inner = self.outer[-1]
            span = inner[-1] - inner[0] + self.row_nbytes
            if span <= len(inner) * (self.row_nbytes + self.gap_nbytes):  # about: read with gaps
                self.read_nbytes = self.count // len(inner) * span

    def offsets(self) -> Iterator[int]:
        """Yield where rows begin in the file."""
        for places in itertools.product(*self.outer):
            yield self.begin + sum(places)

    def allocate(self) -> list[Any]:
        """Have memory; return that of the rows."""
        if self.straight:
            self.memory, _ = _core.allocate(self.read_end - self.read_begin, False)
            return [memoryview(self.memory)]
        if self.framework in _NUMPY:
            import numpy as np

            self.memory = np.empty(self.nbytes, np.uint8)
            return [self.memory] if self.count == 1 else list(self.memory.reshape(self.count, -1))
        import torch

        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.where)
        return [self.memory] if self.count == 1 else list(self.memory.view(self.count, -1).unbind())

    def finished(self) -> Any:
        """Return the tensor."""
        at = self.begin - self.read_begin
        if self.framework in _NUMPY:
            import numpy as np

            raw = np.empty(0, np.uint8) if self.memory is None else self.memory
            if self.straight:
                raw = np.frombuffer(raw, np.uint8, self.nbytes, at)
            if self.picks is None:
                return raw.view(self.dtype).reshape(self.shape)[self.basic]
            rows = raw.view(self.dtype).reshape(self.count, -1)[:, self.picks]
            return np.ascontiguousarray(rows).reshape(self.shape)[self.basic]
        import torch

        raw = self.memory
        if raw is None:
            raw = torch.empty(0, dtype=torch.uint8, device=self.where)
        if self.straight:
            raw = torch.frombuffer(raw, dtype=torch.uint8, count=self.nbytes, offset=at)
        if self.picks is None:
            return raw.view(self.dtype).view(self.shape)[self.basic]
        rows = raw.view(self.dtype).view(self.count, -1)[:, self.picks]
        return rows.contiguous().view(self.shape)[self.basic]


class Group(Read):
    """Parts that are read together."""

    def __init__(self, parts: list[Wanted], files: _OpenFiles, sharers: Sharers | None) -> None:
        self.parts = parts
        self.given = 0  # how many of them
        self.shares: list[Share] = []  # of the ranks that read it together
        self.is_handed_on = False
        self._files = files
        self._sharers = sharers
        first = parts[0]
        self.path = first.stored.path
        costs = (part.cost_nbytes for part in parts)
        self._before_nbytes = list(itertools.accumulate(costs, initial=0))
        self.nbytes = sum(part.read_nbytes for part in parts)
        # Short rows cannot be read without what is between them, which other ranks of a node want: they share it.
        self._cached = first.count > 1 and self.nbytes > 1.1 * first.nbytes

    @property
    def memory_nbytes(self) -> int:
        """The memory of all its tensors."""
        return self._before_nbytes[-1]

    @property
    def given_nbytes(self) -> int:
        """That of those that have been given."""
        return self._before_nbytes[self.given]

    def taken(self) -> tuple[Group, int, str, Any]:
        """Return the next tensor, all having come: the group, its number in it, its name, and itself."""
        part = self.parts[self.given]
        return self, self.given, part.stored.tensor.name, part.finished()

    def begin(self) -> None:
        """Begin to read, and to verify where there are checksums."""
        file = self._files.file(self.parts[0].stored, cached=self._cached)
        kept = self._files.sums.get(self.path)
        pieces: list[tuple[int, Any]] = []
        for part in self.parts:
            if not part.nbytes:
                continue
            rows = part.allocate()
            begins = [part.read_begin] if part.straight else part.offsets()
            pieces += zip(begins, rows, strict=True)
        if self._sharers is not None:
            # What is verified is read by the chunk.
            alignment = _PAGE_NBYTES if kept is None else kept.chunk_nbytes
            self.shares = self._sharers.shares(pieces, alignment)
            pieces = self._sharers.own(self.shares, pieces)
            self.nbytes = sum(end - begin for begin, end in self._ranges(pieces))
        futures = []
        at = 0
        for begin, end in self._ranges(pieces):
            segments: list[Any] = []
            place = begin
            while at < len(pieces) and pieces[at][0] < end:
                offset, memory = pieces[at]
                if offset > place:
                    segments.append(offset - place)
                segments.append(memory)
                place = offset + len(memory)
                at += 1
            if kept is None:
                futures.append(file.read_into(segments, begin))
                continue
            first, last, expected = kept.covering(begin, end)
            segments = [*_gap(begin - first), *segments, *_gap(last - place)]
            sums = Checksums(kept.chunk_nbytes, expected=expected)
            futures.append(file.read_into(segments, first, checksums=sums))
        self.futures = futures

    def _ranges(self, pieces: list[tuple[int, Any]]) -> Iterator[tuple[int, int]]:
        """Yield what transfers read."""
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


def _gap(nbytes: int) -> list[int]:
    return [nbytes] if nbytes else []


def _groups(
    parts: list[Wanted], limit_nbytes: int, files: _OpenFiles, sharers: Sharers | None
) -> list[Group]:
    """Return parts in groups: small neighbours, none of which keeps another one's memory alive, together."""
    groups: list[Group] = []
    together: list[Wanted] = []
    nbytes = 0
    for part in parts:
        small = part.count == 1 and part.nbytes < _LARGE_NBYTES and part.picks is None
        if together and (
            not small
            or part.stored.path != together[0].stored.path
            or nbytes + part.cost_nbytes > limit_nbytes
            or len(together) == _GROUP_PARTS
        ):
            groups.append(Group(together, files, sharers))
            together, nbytes = [], 0
        if small:
            together.append(part)
            nbytes += part.cost_nbytes
        else:
            groups.append(Group([part], files, sharers))
    if together:
        groups.append(Group(together, files, sharers))
    return groups


def _part(stored: Stored, index: Any, where: Any, framework: str) -> Wanted:
    """Return what an index, or None for all, wants of a tensor."""
    tensor = stored.tensor
    shape = tuple(tensor.shape)
    dtype = numpy_dtype(tensor.dtype) if framework in _NUMPY else torch_dtype(tensor.dtype)
    shape = torch_shape(tensor.dtype, shape, stored.path, tensor.name)
    if index is None:
        return Wanted(stored, where, framework, dtype, shape, tensor.begin, tensor.nbytes, [])
    try:
        chosen = select(index, shape, stored.path, tensor.name)
    except TypeError as error:
        raise SafetensorError(str(error), stored.path, name=tensor.name) from None
    if chosen is None or chosen.lists:
        reason = f"{shortened(index)} is no index for a plan: integers, slices, None and ... are"
        raise SafetensorError(reason, stored.path, name=tensor.name)
    positions, strides = chosen.positions, strides_of(shape, dtype.itemsize)
    dims = begin = row = 0
    if math.prod(chosen.shape):
        dims, begin, row = runs(positions, shape, dtype.itemsize)
    begin += tensor.begin
    picks = None
    if dims and dims == len(shape):  # scattered elements: all that lies between them is read
        dims, last = dims - 1, positions[-1]
        row *= last[-1] - last[0] + 1
        picks = slice(None, None, last[1] - last[0])
    outer = [
        [(place - each[0]) * stride for place in each]
        for each, stride in zip(positions[:dims], strides[:dims], strict=True)
    ]
    return Wanted(
        stored, where, framework, dtype, chosen.shape, begin, row, outer, chosen.basic, picks
    )


def _device(device: Any, framework: str) -> Any:
    if framework in _NUMPY:
        if str(device) != "cpu":
            raise SafetensorError(f"device: NumPy's arrays are on the CPU, not on {device!r}")
        return "cpu"
    import torch

    where = torch_device(device)
    if where.type not in ("cpu", "cuda"):
        raise SafetensorError(
            f"device: {device!r} cannot be read to (remedy: the CPU, and move what comes)"
        )
    return where if where.type == "cuda" else torch.device("cpu")
