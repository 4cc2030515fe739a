"""Models larger than memory: the forward pass reads weights ahead of their use from safetensors files.

A *pass* is a forward pass of the whole model. It is a sequence of *steps*: runs of modules that have weights
(``streaming.py``). A user may also call a module of the model outside of a pass: a *part* of the model.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.base.checks import checked_nbytes
from tensorferry.base.processes import Interrupts, Owned
from tensorferry.offload.absent import recorded, tensors_in
from tensorferry.offload.arena import ALIGN_NBYTES
from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.holder import Counters, Holder, allocate
from tensorferry.offload.matching import WHOLE, match, matched, told
from tensorferry.offload.scan import Order
from tensorferry.offload.slabs import Files, FileSlab, Plan
from tensorferry.offload.swapper import AbsentParameter, Swapper
from tensorferry.safetensors.sources import stored_tensors
from tensorferry.transfer.pipeline import read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.offload.matching import Matched, Matches
    from tensorferry.offload.slabs import Slab
    from tensorferry.safetensors.sources import Source


# Tensors are compared in pieces of this size.
_PIECE_NBYTES = 4 << 20


def stream_weights(
    model: nn.Module,
    files: Source,
    *,
    memory_budget: int | str,
    device: torch.device | str | int = "cpu",
    blocks: Sequence[type[nn.Module]] = (),
) -> WeightStream:
    """Stream a model's weights: read each from its files ahead of the module that uses it, and drop it afterwards.

    Weights for which the budget has room stay in memory, the same ones in each pass. The others are read once per
    forward pass, in the order of the last pass, as far ahead as the budget allows. The model may be on the meta device:
    its weights never take more memory than the budget. Streaming is for inference: call
    ``model.requires_grad_(False)`` first.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with parameters on any device; their memory is released. While a parameter's module does not run, a
        stand-in has its shape, dtype and ``device``, and raises in every operation. Persistent buffers are read
        immediately. Other buffers must already be on the device.
    files : path or sequence of paths
        Safetensors files, a sharded model's index, or a directory with either. Tensors have the names of
        ``state_dict()``, or for a transformers model (version 5 or later) the names with which it is saved. One name of
        a tied parameter is enough; of several, the last one counts.
    memory_budget : int or str
        Bytes of memory for weights: ``8 << 30``, or ``"8GiB"``. The minimum is the size of the largest module; with a
        few times that, reading and computing overlap.
    device : torch.device, str or int
        Where the weights are when they are used: the CPU, or a GPU. They are read directly into its memory.
    blocks : sequence of classes
        Module classes with a ``forward`` that uses parameters of modules below them without calling these. While such a
        module runs, all of its parameters are in memory. Torch's attention and transformer layers are included by
        default.

    Returns
    -------
    WeightStream
        A context manager. Closing it restores the model, with its parameters on the meta device.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid: a parameter is missing in the files, has another shape there, or requires gradients; or
        a tensor that streaming does not replace has no values. No weight has been read.
    MemoryBudgetError
        The budget is too small for one module; ``needed_nbytes`` is the smallest one that works.
    SafetensorError, StorageError
        A file is invalid, or cannot be read.

    Notes
    -----
    Parameters have the dtype of the files. A warning lists names in the files that the model does not have, and names
    of one tied parameter with different values.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {where} is neither a CPU nor a CUDA device")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    whole = tuple(blocks)
    for one in whole:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"blocks: {one!r} is not a module class")
    budget_nbytes = checked_nbytes(memory_budget, "memory_budget")
    return WeightStream(model, files, budget_nbytes, where, (*WHOLE, *whole))


class WeightStream(Owned, Swapper):
    """A model with streamed weights, made by :func:`stream_weights`. A context manager.

    Forward passes of several threads run one after the other. After an exception or Ctrl-C in a pass, the next pass
    starts normally.
    """

    absent = AbsentParameter
    refusal = (
        "is not in memory, and {} needs its values: the model is streamed from files, for inference, and a weight is "
        "in memory only while its module runs. If a module's forward() uses parameters of modules below it, pass the "
        "module's class to stream_weights() in blocks=; to change or save weights, close() the stream first"
    )
    refused_copy = (
        "a streamed model cannot be saved or copied: its weights are in the files that it is streamed from; close() "
        "the stream first"
    )

    def __init__(
        self,
        model: nn.Module,
        files: Source,
        budget_nbytes: int,
        device: torch.device,
        whole: tuple[type[nn.Module], ...],
    ) -> None:
        matches = match(model, stored_tensors(files))
        found = matches.found
        _warn_of_names(model, matches)
        # Buffers, and parameters without elements, are read now and stay in memory: they are not streamed.
        self._fixed = [one for one in found if one.buffer or not one.nbytes]
        # The streamed parameters are new objects: those on the meta device cannot get values.
        zero = torch.zeros((), device="cpu")
        self._weights = {
            nn.Parameter(zero.expand(one.shape), requires_grad=False): one
            for one in found
            if one not in self._fixed
        }
        for param, one in self._weights.items():
            put(one, param)
        try:
            self._begin(model, budget_nbytes, device, whole)
        except BaseException:
            self._restore()
            raise

    def _begin(
        self,
        model: nn.Module,
        budget_nbytes: int,
        device: torch.device,
        whole: tuple[type[nn.Module], ...],
    ) -> None:
        plan = Plan(model, lambda module: isinstance(module, whole))
        self._files = Files()
        plan.place(FileSlab(one, param, self._files) for param, one in self._weights.items())
        super().__init__(plan, device)
        fixed_nbytes = sum(one.nbytes for one in self._fixed)
        sizes = [sum(slab.nbytes for slab in slabs) for slabs in plan.together()]
        needed = fixed_nbytes + max(sizes, default=0)
        if needed > budget_nbytes:
            name = type(plan.uses[sizes.index(max(sizes))].module).__name__
            raise MemoryBudgetError(
                f"memory_budget: {budget_nbytes} bytes are not enough: {name} needs {needed} at the same time",
                needed,
            )
        self._set_owner()
        self._interrupts = Interrupts()
        self._passes, self._seconds, self._began = 0, 0.0, 0.0
        self._is_closed = False
        self._order = Order(range(len(plan.slabs)))
        total = sum(slab.nbytes for slab in plan.slabs)
        self._nbytes = min((budget_nbytes - fixed_nbytes) // ALIGN_NBYTES * ALIGN_NBYTES, total)
        self._counters = Counters()
        cuda: Any = torch.cuda
        self._files.stream = cuda.Stream(device) if device.type == "cuda" else None
        for one in self._fixed:
            tensor = read_matched(one, device)
            put(one, tensor if one.buffer else nn.Parameter(tensor, requires_grad=False))
        self._open()
        for param in plan.place_of:
            self.put_away(param)
        for (
            one
        ) in self._weights.values():  # release its memory: the weight must not be in memory twice
            assert one.original is not None
            if not one.original.is_meta:
                one.original = nn.Parameter(torch.empty_like(one.original, device="meta"), False)
        self.install()

    def _open(self) -> None:
        """Make the memory for weights."""
        if self.device.type == "cpu":
            memory = allocate(self._nbytes, self.device)
        else:
            memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
            # torch's caching allocator may have reused memory that kernels on the current stream still use, so the
            # first reads into it wait for these kernels.
            self._files.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.holder = Holder(
            *(self.plan.slabs, memory, self._order, self.plan.together()),
            guard=self._interrupts.deferred,
            ahead_nbytes=read_ahead_nbytes(),
        )
        self.holder.counters = self._counters
        self.holder.choose()

    def stats(self) -> dict[str, float]:
        """Return statistics.

        Returns
        -------
        dict of str to int or float
            ``passes`` and the ``seconds`` they took; ``read_nbytes``, the number of ``waits`` for a read and the
            ``wait_seconds``; ``unexpected_steps``, the uses of weights in another order than in the pass before; the
            bytes of all weights (``weights_nbytes``), of those that stay in memory (``kept_nbytes``), and of the memory
            in which weights are kept or read (``memory_nbytes``).
        """
        return {
            "passes": self._passes,
            "seconds": self._seconds,
            "read_nbytes": self._counters.read_nbytes,
            "waits": self._counters.waits,
            "wait_seconds": self._counters.wait_seconds,
            "unexpected_steps": self._counters.unexpected,
            "weights_nbytes": sum(one.nbytes for one in (*self._fixed, *self._weights.values())),
            "kept_nbytes": sum(slab.nbytes for slab in self.plan.slabs if slab.stays),
            "memory_nbytes": self._nbytes,
        }

    def close(self) -> None:
        """Wait for reads in flight, and restore the model. Do not call this while the model runs."""
        with self.turn():
            if self._is_in_pass or self._running:
                raise RuntimeError(
                    "close(): the model is running in this thread; call close() after the forward pass"
                )
            if self._is_closed:
                return
            self._is_closed = True
            self.uninstall()
            self._forget()
            self._restore()

    def _restore(self) -> None:
        """Give the model the tensors that it had, unless other code has replaced ours."""
        for param, one in self._weights.items():
            put(one, one.original, unless_other_than=param)
        for one in self._fixed:
            put(one, one.original)

    def _forget(self) -> None:
        """Take the memory from all weights; in a forked child, it is the parent process's."""
        if not self.is_parents and hasattr(self, "holder"):
            self.holder.settle()
        self._files.close()
        for slab in self.plan.slabs:
            slab.place, slab.moving, slab.is_given, slab.lent = None, (), False, None
            for param in slab.fields:
                self.put_away(param)

    def __enter__(self) -> WeightStream:
        if self._is_closed:
            raise ValueError("this stream of weights is closed")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A pass

    @contextlib.contextmanager
    def access(self, *, defers: bool = False) -> Iterator[None]:
        """Return a context manager for work with weights."""
        with self._interrupts.deferred() if defers else contextlib.nullcontext():
            yield

    def taken(self, slab: Slab, memory: torch.Tensor, *, has_changed: bool) -> None:
        """Refuse changes, and note the kernels that use the memory."""
        super().taken(slab, memory, has_changed=has_changed)
        if self._files.stream is not None and isinstance(slab, FileSlab):
            slab.event = torch.cuda.current_stream(self.device).record_event()

    def begin_pass(self) -> None:
        """Begin a pass, which is expected to repeat the previous one."""
        self.clean()
        self._began = time.perf_counter()
        self.holder.expect(self._order, begin=True)
        if self._order.changed:
            self.holder.choose()

    def end_pass(self, *, complete: bool) -> None:
        """End a pass; one that is not ``complete`` does not become the expected order."""
        self._passes += complete
        self._seconds += time.perf_counter() - self._began
        if not complete:
            self._order.abandon_pass()

    def check_run(self, name: str, args: Any, kwargs: Any) -> None:
        """Raise if a module cannot run now, or for inputs that would give wrong results."""
        if recorded():
            raise RuntimeError(
                f"{name}: a streamed model cannot be traced or exported: the recording would use its memory, which "
                "later contains other weights"
            )
        learns = torch.is_grad_enabled() and name != self.plan.uses[0].name
        for value in tensors_in((args, kwargs)):
            if value.is_meta:
                raise RuntimeError(
                    "an input is on the meta device: it has no values, and torch would compute with it without an error"
                )
            if value.requires_grad and learns:
                raise RuntimeError(
                    "streamed weights are for inference: an input requires gradients; run the model under "
                    "torch.no_grad() or torch.inference_mode()"
                )

    def check_process(self) -> None:
        """In a forked child, replace the locks, which threads of the parent process may hold, and the memory."""
        if self.is_parents:
            self._make_locks()
            self._running.clear()
            self._forget()
            self._set_owner()
            self._open()


class WeightsMap(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each read on access.

    For libraries that accept a mapping of weights, such as accelerate's
    ``attach_align_device_hook(weights_map=...)``. Each access reads the tensor again. Prefer :func:`stream_weights`,
    which reads ahead and keeps weights in memory.

    Parameters
    ----------
    files : path or sequence of paths
        As for :func:`stream_weights`.
    device : torch.device, str or int
        The device of the tensors.
    """

    def __init__(self, files: Source, *, device: torch.device | str | int = "cpu") -> None:
        self._stored = stored_tensors(files)
        self._device = torch.device(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_matched(matched(name, self._stored[name]), self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # without reading it


def put(
    one: Matched, tensor: torch.Tensor | None, unless_other_than: torch.Tensor | None = None
) -> None:
    """Set a tensor of the files, or None, in its places in the model; leave those that have another tensor."""
    for module, name in one.places:
        if unless_other_than is not None and getattr(module, name) is not unless_other_than:
            continue
        if one.buffer:
            module._buffers[name] = tensor
        elif isinstance(module, nn.RNNBase):  # its __setattr__ also updates `_flat_weights`
            setattr(module, name, tensor)
        else:
            module._parameters[name] = tensor  # type: ignore[assignment]


def read_matched(one: Matched, device: torch.device) -> torch.Tensor:
    """Read a tensor of the files."""
    tensor = torch.empty(one.shape, dtype=one.dtype, device=device)
    if tensor.numel():
        flat = tensor.reshape(-1).view(torch.uint8)
        for part in one.parts:
            with part.stored.open() as file:
                file.read(flat[part.at : part.at + part.end - part.begin], part.begin)
    return tensor


def _differ(one: Matched, other: Matched) -> bool:
    """Return whether two tensors of the same shape have different bytes in the files."""
    if one.dtype != other.dtype or one.nbytes != other.nbytes:
        return True
    return any(
        not torch.equal(left, right) for left, right in zip(_bytes(one), _bytes(other), strict=True)
    )


def _bytes(one: Matched) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in pieces. All of them use the same memory: read each before taking the next."""
    piece = torch.empty(min(one.nbytes, _PIECE_NBYTES), dtype=torch.uint8, device="cpu")
    filled = 0
    for part in one.parts:
        with part.stored.open() as file:
            begin = part.begin
            while begin < part.end:
                nbytes = min(part.end - begin, len(piece) - filled)
                file.read(piece[filled : filled + nbytes], begin)
                begin, filled = begin + nbytes, filled + nbytes
                if filled == len(piece):
                    yield piece
                    filled = 0
    yield piece[:filled]


def _warn_of_names(model: nn.Module, matches: Matches) -> None:
    """Warn of tensors in the files that are not used."""
    # Tensors that modules such as TableEmbedding read from the files themselves: no warning about these.
    left = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in getattr(module, "stays_in_files", ())
    }
    if unexpected := [name for name in matches.unexpected if name not in left]:
        warnings.warn(
            f"files: the model has no parameters or buffers with the names {told(unexpected)}; they are ignored",
            stacklevel=4,
        )
    # A tied parameter has the values of its last name in the files, and `found` has the tensor of that name.
    used = {id(one.original): one for one in matches.found}
    if differing := [
        f"{other.name} and {one.name} ({one.name} is used)"
        for _, other in matches.duplicates
        if _differ(other, one := used[id(other.original)])
    ]:
        warnings.warn(
            f"files: names of one (tied) parameter of the model have different values in the files: "
            f"{told(differing)}. Give the model a parameter for each, or leave one out",
            stacklevel=4,
        )
