"""Streaming of tensors from many files within a memory budget: complete tensors, or the slices that a plan selects.

Reads (:mod:`tensorferry.safetensors.parts`) begin in the order of the files, as far as the budget allows. The core's
worker threads transfer the data. Python code runs only in the thread that requests the next tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import checked_nbytes, is_url
from tensorferry.base.reprs import first_of
from tensorferry.safetensors import checksums
from tensorferry.safetensors.dtypes import torch_shape
from tensorferry.safetensors.errors import SafetensorError, shortened
from tensorferry.safetensors.frameworks import Framework, framework_of
from tensorferry.safetensors.parts import Files, PartLoader, TensorPart
from tensorferry.safetensors.sources import look, stored_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from tensorferry.base.ranks import Broadcast
    from tensorferry.safetensors.checksums import FileChecksums
    from tensorferry.safetensors.header import Header
    from tensorferry.safetensors.parts import PartsRead
    from tensorferry.safetensors.ranks import Sharers
    from tensorferry.safetensors.sources import Source, Stored
    from tensorferry.transfer.files import File
    from tensorferry.transfer.remote import Version


_MAX_NAMES = 8  # in messages


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
        Whether to compare the headers and the data with the checksums stored next to the files, before a tensor is
        returned. This reads whole chunks, of 256 KiB by default.
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
        A file cannot be read; ChecksumError if ``verify`` is true, and a header does not match its checksum.
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
    parts : list of TensorPart
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

    parts: list[TensorPart]
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
    sums: dict[str, FileChecksums] = {}

    def verified(path: str) -> tuple[Header, Version]:
        sums[path] = checksums.read(path)
        return look(path, sums[path].check_header)

    stored = stored_tensors(files, look=verified if verify else look)
    for name in plan or ():
        if name not in stored:
            raise stored.missing(name)
    parts = [
        _planned(one, None if plan is None else plan[name], library)
        for name, one in stored.items()
        if plan is None or name in plan
    ]
    for part in parts:
        if part.cost_nbytes > budget_nbytes:
            raise ValueError(
                f"memory_budget: {budget_nbytes} bytes are not enough: tensor {part.name!r} of {part.stored.path!r} "
                f"needs {part.cost_nbytes}"
            )
    options = {
        "framework": library.name,
        "device": str(library.device).partition(":")[0],
        "memory_budget": budget_nbytes,
        "verify": bool(verify),
    }
    return LoadPlan(parts, options, library, budget_nbytes, _OpenFiles(sums))


def _planned(stored: Stored, index: Any, framework: Framework) -> TensorPart:
    try:
        part = TensorPart(stored, index, framework, is_shared=True)
    except TypeError as error:
        raise SafetensorError(str(error), stored.path, name=stored.tensor.name) from None
    if index is not None and (part.selection is None or part.selection.lists):
        reason = (
            f"{shortened(index)} is not an index for a plan (valid: integers, slices, None and ...)"
        )
        raise SafetensorError(reason, stored.path, name=part.name)
    return part


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
        among the ranks, or None for tensors that every rank loads completely. A key that is a tensor's name applies,
        and otherwise the first matching pattern. A tensor without a matching pattern is loaded completely. A warning
        names the keys that match no tensor.
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
    stored = stored_tensors(files)
    unused = [
        rule
        for rule in rules
        if not any(rule == name or fnmatchcase(name, rule) for name in stored)
    ]
    if unused:
        hints = first_of([repr(rule) + stored.hint(rule) for rule in unused], _MAX_NAMES)
        warn(f"rules: no tensor has a name that matches {hints}")
    for name, one in stored.items():
        shape = torch_shape(one.tensor.dtype, one.tensor.shape, one.path, name)
        matching = (rule for rule in rules if fnmatchcase(name, rule))
        rule = name if name in rules else next(matching, None)
        dim = None if rule is None else rules[rule]
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


class Tensors(PartLoader):
    """The iterator that :func:`load_files` returns. Close it, or use it in a ``with`` block, if it may end early."""

    def __init__(self, loading: LoadPlan, sharers: Sharers | None = None) -> None:
        parts, _, _, budget_nbytes, files = loading
        far = bool(parts) and is_url(parts[0].stored.path)
        super().__init__(parts, files, budget_nbytes, sharers=sharers, far=far)
        self.pipeline.files = files.opened
        self._opened = files
        self._sharers = sharers

    @property
    def nbytes_read(self) -> int:
        """The bytes that this rank has requested from the files so far."""
        return self.pipeline.nbytes_read

    def __next__(self) -> tuple[str, Any]:
        try:
            return super().__next__()
        except Exception:
            self.close()
            raise

    def _oldest(self) -> PartsRead | None:
        oldest = super()._oldest
        return oldest() if self._sharers is None else self._sharers.step(oldest)

    def _give(self, read: PartsRead, part: TensorPart) -> None:
        before = self.pipeline.oldest
        super()._give(read, part)
        if self.pipeline.oldest is not before:
            self._opened.close_all_but(read.part.stored.path for read in self.pipeline.held)

    def close(self, *, wait: bool = True) -> None:
        """Cancel the reads in progress, wait for them, and close the files.

        If ranks share the reads, and the others have not finished, they get an error for their next tensor.
        """
        if self._sharers is not None:
            self._sharers.leave()
        super().close(wait=wait)

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenFiles(Files):
    """The files that are being read, each open while a read needs it, and the files' stored checksums.

    A file that is read through the page cache is opened separately from one for direct I/O. Elements are picked out of
    ranges that are usually the rows of other ranks on this node, so the drive reads such ranges once for all ranks.
    """

    def __init__(self, checksums: Mapping[str, FileChecksums]) -> None:
        self._checksums = checksums
        self.opened: dict[Any, File] = {}

    def open(self, part: TensorPart, *, cached: bool) -> File:
        key = part.stored.path, cached
        file = self.opened.get(key)
        if file is None:
            file = self.opened[key] = part.stored.open(direct=False if cached else "auto")
        return file

    def sums(self, part: TensorPart) -> FileChecksums | None:
        return self._checksums.get(part.stored.path)

    def close_all_but(self, paths: Iterable[str]) -> None:
        if len(self.opened) > 1:
            kept = set(paths)
            for key in [key for key in self.opened if key[0] not in kept]:
                self.opened.pop(key).close()
