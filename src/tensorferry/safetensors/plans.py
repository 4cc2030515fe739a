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
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry import _core
from tensorferry.checks import checked_nbytes
from tensorferry.checksums import Checksums
from tensorferry.safetensors import checksums
from tensorferry.safetensors.dtypes import numpy_dtype, torch_dtype, torch_shape
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.frameworks import torch_device
from tensorferry.safetensors.slicing import select, strides_of
from tensorferry.safetensors.sources import stored_tensors

if TYPE_CHECKING:
    from types import TracebackType

    from tensorferry.files import File
    from tensorferry.futures import Future
    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.sources import Source, Stored

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
# So much is asked of the drive ahead, where the budget allows: requests take turns, and what is first should come so.
_AHEAD_NBYTES = 128 << 20

_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")


def load_files(
    files: Source,
    plan: Mapping[str, Any] | None = None,
    *,
    device: Any = "cpu",
    memory_budget: int | str = "1GiB",
    framework: str = "pt",
    verify: bool = False,
) -> Tensors:
    """Return an iterator over tensors of safetensors files, in the order in which they lie there.

    Each is given as soon as it is there, and the next ones are read meanwhile, as many as the budget has room for. Only
    what a plan wants is read.

    Parameters
    ----------
    files : path or sequence of paths
        Files, a sharded model's index, or a directory with either.
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

    Returns
    -------
    Tensors
        An iterator over pairs of name and tensor, contiguous and with memory of its own; a context manager.

    Raises
    ------
    SafetensorError
        A header is wrong; a name of the plan is in no file; an index does not fit a tensor, or a dtype the framework.
    ValueError, TypeError
        An argument is not usable, or a tensor is larger than the budget: the message says what it needs.
    StorageError
        A file cannot be read.
    ChecksumError
        By the iterator: what was read is not what its checksums are of. Also SafetensorError by it: a file was replaced
        or changed meanwhile.
    FileNotFoundError
        There are no checksums to verify by.

    Examples
    --------
    >>> for name, tensor in load_files("model/", memory_budget="2GiB"):  # doctest: +SKIP
    ...     model.get_parameter(name).data.copy_(tensor)
    """
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
    return Tensors(_groups(parts, min(budget_nbytes, _GROUP_NBYTES)), budget_nbytes, kept)


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
    """The tensors of :func:`load_files`. Close it, or use it in a ``with`` block, where it is not read to its end.

    Attributes
    ----------
    nbytes_read : int
        How much has been asked of the files so far.
    """

    def __init__(
        self,
        groups: list[_Group],
        budget_nbytes: int,
        sums: Mapping[str, FileChecksums],
    ) -> None:
        self.nbytes_read = 0
        self._sums = sums
        self._groups = groups
        self._budget_nbytes = budget_nbytes
        self._first = 0  # group that has something to give
        self._next = 0  # group to begin
        self._flying = 0  # group that may not be there yet; all before are
        # Of each group, what all before it take.
        costs = (group.cost_nbytes for group in groups)
        self._before_nbytes = list(itertools.accumulate(costs, initial=0))
        self._ready: tuple[_Group, int, str, Any] | None = None
        self._files: dict[tuple[str, bool], File] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._generation = _core.fork_generation()

    def __iter__(self) -> Tensors:
        return self

    def __next__(self) -> tuple[str, Any]:
        if self._generation != _core.fork_generation():
            raise RuntimeError(
                "these tensors were begun before fork(): they are read by the parent process"
            )
        with self._lock:
            if self._closed:
                raise StopIteration
            # Ctrl-C may come between any two of these: what is done twice then has the same result.
            try:
                if self._ready is None:
                    self._pass_over_given()
                    self._begin_groups()
                    if self._first == len(self._groups):
                        self.close()
                        raise StopIteration
                    self._ready = self._taken()
            except Exception:
                self.close()
                raise
            group, index, name, tensor = self._ready
            group.parts[index].memory = None
            group.given = index + 1
            with contextlib.suppress(Exception):  # the next call meets it again
                self._pass_over_given()
                self._begin_groups()
            self._ready = None
            return name, tensor

    def close(self) -> None:
        """End what is on its way, wait for it, and close the files."""
        if self._generation != _core.fork_generation():
            return
        with self._lock:
            self._closed = True
            self._cancel()
            for file in self._files.values():
                file.close()
            for group in self._groups:
                for future in group.futures:
                    with contextlib.suppress(Exception):
                        future.exception()
            self._files.clear()
            self._groups = []
            self._ready = None

    def __enter__(self) -> Tensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_groups", None) and self._generation == _core.fork_generation():
            self._cancel()  # the core keeps memory and files until it has done

    def _cancel(self) -> None:
        for group in self._groups[self._first : self._next]:
            for future in group.futures:
                future.cancel()

    def _taken(self) -> tuple[_Group, int, str, Any]:
        group = self._groups[self._first]
        for future in group.futures:
            future.result()
        part = group.parts[group.given]
        return group, group.given, part.stored.tensor.name, part.finished()

    def _pass_over_given(self) -> None:
        while self._first < self._next:
            group = self._groups[self._first]
            if group.given < len(group.parts):
                return
            group.futures = []
            self._first += 1
            if self._first == len(self._groups) or self._groups[self._first].path != group.path:
                self._close_files()

    def _begin_groups(self) -> None:
        """Begin to read what there is room for; always the first one, which has room when all before has been given."""
        while self._next < len(self._groups):
            group = self._groups[self._next]
            if self._first < self._next:
                first = self._groups[self._first]
                given_nbytes = self._before_nbytes[self._first] + first.given_nbytes
                needed_nbytes = self._before_nbytes[self._next + 1] - given_nbytes
                if needed_nbytes > self._budget_nbytes or self._in_flight_nbytes() >= _AHEAD_NBYTES:
                    return
            group.begin(self._file(group), self._sums.get(group.path))
            self._next += 1
            self.nbytes_read += group.read_nbytes

    def _in_flight_nbytes(self) -> int:
        while self._flying < self._next and self._groups[self._flying].done():
            self._flying += 1
        flying = self._groups[self._flying : self._next]
        return sum(group.read_nbytes for group in flying if not group.done())

    def _file(self, group: _Group) -> File:
        file = self._files.get((group.path, group.cached))
        if file is None:
            file = tensorferry.open(group.path, direct=False if group.cached else "auto")
            self._files[group.path, group.cached] = file
            group.parts[0].stored.check(file)
        return file

    def _close_files(self) -> None:
        begun = {group.path for group in self._groups[self._first : self._next + 1]}
        for path, cached in list(self._files):
            if path not in begun:
                self._files.pop((path, cached)).close()


@dataclass(eq=False)
class _Part:
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
            return [self.memory]
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


@dataclass(eq=False)
class _Group:
    """Parts that are read together."""

    parts: list[_Part]
    futures: list[Future[Any]] = field(default_factory=list)
    given: int = 0

    def __post_init__(self) -> None:
        first = self.parts[0]
        self.path = first.stored.path
        costs = (part.cost_nbytes for part in self.parts)
        self._before_nbytes = list(itertools.accumulate(costs, initial=0))
        self.cost_nbytes = self._before_nbytes[-1]
        self.read_nbytes = sum(part.read_nbytes for part in self.parts)
        # Short rows cannot be read without what is between them, which other ranks of a node want: they share it.
        self.cached = first.count > 1 and self.read_nbytes > 1.1 * first.nbytes

    @property
    def given_nbytes(self) -> int:
        """Memory of what has been given."""
        return self._before_nbytes[self.given]

    def done(self) -> bool:
        """Return whether all has come, or failed."""
        return all(future.done() for future in self.futures)

    def begin(self, file: File, kept: FileChecksums | None) -> None:
        """Begin to read, and to verify where there are checksums."""
        pieces: list[tuple[int, Any]] = []
        for part in self.parts:
            if not part.nbytes:
                continue
            rows = part.allocate()
            begins = [part.read_begin] if part.straight else part.offsets()
            pieces += zip(begins, rows, strict=True)
        futures = []
        at = 0
        for begin, end in self._ranges():
            segments: list[Any] = []
            place = begin
            while at < len(pieces) and pieces[at][0] < end:
                offset, memory = pieces[at]
                if offset > place:
                    segments.append(offset - place)
                segments.append(memory)
                place = offset + (len(memory) if not self.parts[0].straight else end - begin)
                at += 1
            if kept is None:
                futures.append(file.read_into(segments, begin))
                continue
            first, last, expected = kept.covering(begin, end)
            segments = [*_gap(begin - first), *segments, *_gap(last - place)]
            sums = Checksums(kept.chunk_nbytes, expected=expected)
            futures.append(file.read_into(segments, first, checksums=sums))
        self.futures = futures

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield what transfers read."""
        first = self.parts[0]
        if first.straight:
            yield first.read_begin, first.read_end
            return
        begin = end = -1
        for part in self.parts:
            if not part.nbytes:
                continue
            for offset in part.offsets():
                stop = offset + part.row_nbytes
                if (
                    begin >= 0
                    and offset <= end + first.gap_nbytes
                    and stop - begin <= _GROUP_NBYTES
                ):
                    end = stop
                    continue
                if begin >= 0:
                    yield begin, end
                begin, end = offset, stop
        if begin >= 0:
            yield begin, end


def _gap(nbytes: int) -> list[int]:
    return [nbytes] if nbytes else []


def _groups(parts: list[_Part], limit_nbytes: int) -> list[_Group]:
    """Return parts in groups: small neighbours, none of which keeps another one's memory alive, together."""
    groups: list[_Group] = []
    together: list[_Part] = []
    nbytes = 0
    for part in parts:
        small = part.count == 1 and part.nbytes < _LARGE_NBYTES and part.picks is None
        if together and (
            not small
            or part.stored.path != together[0].stored.path
            or nbytes + part.cost_nbytes > limit_nbytes
            or len(together) == _GROUP_PARTS
        ):
            groups.append(_Group(together))
            together, nbytes = [], 0
        if small:
            together.append(part)
            nbytes += part.cost_nbytes
        else:
            groups.append(_Group([part]))
    if together:
        groups.append(_Group(together))
    return groups


def _part(stored: Stored, index: Any, where: Any, framework: str) -> _Part:
    """Return what an index, or None for all, wants of a tensor."""
    tensor = stored.tensor
    shape = tuple(tensor.shape)
    dtype = numpy_dtype(tensor.dtype) if framework in _NUMPY else torch_dtype(tensor.dtype)
    shape = torch_shape(tensor.dtype, shape, stored.path, tensor.name)
    if index is None:
        return _Part(stored, where, framework, dtype, shape, tensor.begin, tensor.nbytes, [])
    try:
        chosen = select(index, shape, stored.path, tensor.name)
    except TypeError as error:
        raise SafetensorError(str(error), stored.path, name=tensor.name) from None
    if chosen is None or chosen.lists:
        reason = f"{shortened(index)} is no index for a plan: integers, slices, None and ... are"
        raise SafetensorError(reason, stored.path, name=tensor.name)
    positions, strides = chosen.positions, strides_of(shape, dtype.itemsize)
    if not math.prod(chosen.shape):
        begin, row, dims = tensor.begin, 0, 0
    else:
        begin = tensor.begin + sum(
            each[0] * stride for each, stride in zip(positions, strides, strict=True)
        )
        row, dims = dtype.itemsize, len(shape)
    while dims:
        each, stride = positions[dims - 1], strides[dims - 1]
        if len(each) > 1 and not (stride == row and each[-1] - each[0] == len(each) - 1):
            break
        row, dims = row * len(each), dims - 1
    picks = None
    if dims and dims == len(shape):  # scattered elements: all that lies between them is read
        dims, last = dims - 1, positions[-1]
        row *= last[-1] - last[0] + 1
        picks = slice(None, None, last[1] - last[0])
    outer = [
        [(place - each[0]) * stride for place in each]
        for each, stride in zip(positions[:dims], strides[:dims], strict=True)
    ]
    return _Part(
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
