"""Models larger than memory: their weights are read from their safetensors files ahead of the forward pass."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tensorferry.base.checks import checked_nbytes
from tensorferry.offload import scan
from tensorferry.offload.absent import Forward, outside_of_graphs, recorded
from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.matching import WHOLE, match, matched, told, users
from tensorferry.offload.streaming import Streaming, Weight
from tensorferry.safetensors.sources import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.matching import Matched
    from tensorferry.safetensors.sources import Source


# So much of tensors that should be the same is compared at a time.
_PIECE_NBYTES = 4 << 20

_ONE_THREAD = "another thread runs the model: parts of it can be called by one thread at a time"


def stream_weights(
    model: nn.Module,
    files: Source,
    *,
    memory_budget: int | str,
    device: torch.device | str | int = "cpu",
    blocks: Sequence[type[nn.Module]] = (),
) -> WeightStream:
    """Have a model run whose weights stay in their files: each is read ahead of the module that uses it.

    What the budget can keep stays in memory, always the same part of the weights; the others are read once in each
    forward pass, in the order of the last one, as far ahead as the budget allows. The model may be on the meta device:
    there is never more of it in memory than the budget. For inference: call ``model.requires_grad_(False)`` before.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters, on whatever device, are given up. Unless their module runs, something stands for them that has
        their shape, their dtype and ``device``, and that no operation takes. Persistent buffers are read at once. Other
        buffers must be on the device already.
    files : path or sequence of paths
        Safetensors files, a sharded model's index, or a directory with either. Names are those of ``state_dict()``, or
        for a model of transformers (5 or later) those that it is saved with; parameters that are tied need one of
        theirs, and where there are several the last one counts.
    memory_budget : int or str
        Bytes of memory for weights: ``8 << 30``, or ``"8GiB"``. What one module needs is the least; with a few times
        that, reading and computing overlap.
    device : torch.device, str or int
        Where the weights are when they are used: the CPU, or a GPU, into whose memory they are read.
    blocks : sequence of classes
        Modules whose ``forward`` uses parameters of modules below them without calling these: all of theirs are there
        while one runs. Torch's attention and transformer layers are known.

    Returns
    -------
    WeightStream
        A context manager; closing it gives the model back as it was, with its parameters on the meta device.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable: a parameter is missing in the files or has another shape there, or requires
        gradients; or a tensor that streaming would leave as it is has no values. No weight has been read.
    MemoryBudgetError
        The budget is too small for one module; ``needed_nbytes`` would do.
    SafetensorError, StorageError
        A file is wrong, or cannot be read.

    Notes
    -----
    Parameters have the dtype that they have in the files. A warning tells names in the files that the model has no
    place for, and names of one tied parameter that have other values there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is no torch.nn.Module")
    ours = vars(model).get("forward")
    if isinstance(ours, Forward) and isinstance(ours.owner, WeightStream):
        raise ValueError("model: its weights are streamed already")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {where} is neither a CPU nor a CUDA device")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    whole = tuple(blocks)
    for one in whole:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"blocks: {one!r} is no class of modules")
    budget_nbytes = checked_nbytes(memory_budget, "memory_budget")
    return WeightStream(model, files, budget_nbytes, where, (*WHOLE, *whole))


class WeightStream:
    """A model whose weights are streamed, made by :func:`stream_weights`. A context manager.

    Forward passes of several threads are done one after the other. After an exception in one, or Ctrl-C, the next one
    begins anew.
    """

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
        fixed = [one for one in found if one.buffer or not one.nbytes]
        self._weights = [
            Weight(number, one, device)
            for number, one in enumerate(one for one in found if not one.buffer and one.nbytes)
        ]
        modules, steps = self._steps(model, whole)
        fixed_nbytes = sum(one.nbytes for one in fixed)
        nbytes = {weight.number: weight.nbytes for weight in self._weights}
        needed = fixed_nbytes + scan.needed_nbytes(steps, nbytes)
        if needed > budget_nbytes:
            _, name = max(
                (scan.needed_nbytes([step], nbytes), str(type(module).__name__))
                for module, step in zip(modules, steps, strict=True)
            )
            raise MemoryBudgetError(
                f"memory_budget: {budget_nbytes} bytes are not enough: {name} needs {needed} at the same time",
                needed,
            )
        left = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in getattr(module, "stays_in_files", ())
        }
        if unexpected := [name for name in matches.unexpected if name not in left]:
            warnings.warn(f"files: the model has no place for {told(unexpected)}", stacklevel=3)
        if differing := [
            f"{one.name} and {other.name}" for one, other in matches.rivals if _differ(one, other)
        ]:
            warnings.warn(
                f"files: {told(differing)} are one parameter in the model, and have other values in the files: the "
                "first is used. Give the model a parameter for each, or leave out one",
                stacklevel=3,
            )
        self._model = model
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._parts_lock = threading.Lock()
        self._parts_owner: int | None = None  # who has called a part of the model last
        self._passes = 0
        self._seconds = 0.0
        self._closed = False
        self._hooks: list[Any] = []
        self._root_step: int | None = None
        self._fixed = fixed
        self._streaming = Streaming(self._weights, steps, budget_nbytes - fixed_nbytes, device)
        self._total_nbytes = sum(one.nbytes for one in found)
        try:
            for one in fixed:
                tensor = read_matched(one, device)
                put_fixed(one, tensor if one.buffer else nn.Parameter(tensor, requires_grad=False))
            self._take_over(modules)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, float]:
        """Return what has been done so far.

        Returns
        -------
        dict of str to int or float
            ``passes`` and the ``seconds`` they took; ``read_nbytes``, how often it was waited for a read (``waits``)
            and how long (``wait_seconds``); ``unexpected_steps``, which came out of order; and of the weights' bytes
            (``weights_nbytes``) those that stay in memory (``kept_nbytes``), and how much memory there is for
            all (``memory_nbytes``).
        """
        counters = self._streaming.counters
        return {
            "passes": self._passes,
            "seconds": self._seconds,
            "read_nbytes": counters.read_nbytes,
            "waits": counters.waits,
            "wait_seconds": counters.wait_seconds,
            "unexpected_steps": counters.unexpected_steps,
            "weights_nbytes": self._total_nbytes,
            "kept_nbytes": self._streaming.kept_nbytes,
            "memory_nbytes": self._streaming.memory_nbytes,
        }

    def close(self) -> None:
        """Wait for what is on its way, and give the model back. Not while it runs."""
        if self._owner == threading.get_ident():
            raise RuntimeError("the model runs: its weights cannot be taken from it now")
        self._after_fork()
        with self._lock:
            self._check_parts()
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._streaming.reset(reopen=False)
            for weight in self._weights:
                assert weight.matched.original is not None
                weight.put(weight.matched.original)
            for one in self._fixed:
                put_fixed(one, one.original)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, and with it the model."""
        raise RuntimeError(
            "a streamed model cannot be saved or copied: its weights are in the files that it is streamed from; "
            "close() the stream first"
        )

    def __enter__(self) -> WeightStream:
        if self._closed:
            raise ValueError("this stream of weights is closed")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(
        self, model: nn.Module, whole: tuple[type[nn.Module], ...]
    ) -> tuple[list[nn.Module], list[list[int]]]:
        """Return the modules that want weights, and which."""
        of_module: dict[int, list[Weight]] = {}
        for weight in self._weights:
            for module, _ in weight.matched.places:
                of_module.setdefault(id(module), []).append(weight)
        modules: list[nn.Module] = []
        steps: list[list[int]] = []
        for module, own, above in users(model, lambda each: isinstance(each, whole)):
            wanted = [weight for one in own for weight in of_module.get(id(one), ())]
            if not wanted:
                continue
            for weight in dict.fromkeys(wanted):
                weight.steps.append(len(modules))
            meanwhile = [weight for one in above for weight in of_module.get(id(one), ())]
            modules.append(module)
            steps.append([weight.number for weight in dict.fromkeys([*wanted, *meanwhile])])
        return modules, steps

    def _take_over(self, modules: list[nn.Module]) -> None:
        of_module: dict[nn.Module, list[str]] = {}
        for weight in self._weights:
            original = weight.matched.original
            assert original is not None
            weight.put(weight.away)
            if not original.is_meta:  # emptied: it is not to be in memory twice
                original = nn.Parameter(torch.empty_like(original, device="meta"), False)
            weight.matched.original = original
            for module, name in weight.matched.places:
                of_module.setdefault(module, []).append(name)
        for module, names in of_module.items():
            on_load: Any = module.register_load_state_dict_pre_hook
            self._hooks.append(on_load(functools.partial(_refuse_to_load, names)))
        for step, module in enumerate(modules):
            if module is self._model:
                self._root_step = step
                continue
            use = _Use(self, step)
            self._hooks += [
                module.register_forward_pre_hook(use.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(use.leave, always_call=True),
            ]
        self._hooks.append(Forward(self._model, self, self._run))

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a forward pass."""
        if self._owner == threading.get_ident():  # the model calls itself
            return forward(*args, **kwargs)
        self._after_fork()
        with self._lock:
            if self._closed:
                raise ValueError("this stream of weights is closed")
            with self._parts_lock:
                self._check_parts()
                self._owner = threading.get_ident()
            whole = False
            began = time.perf_counter()
            try:
                self._streaming.begin_pass()
                _check_inputs(args, kwargs, gradients=self._root_step is None)
                if self._root_step is not None:
                    self._streaming.acquire(self._root_step)
                result = forward(*args, **kwargs)
                whole = True
            finally:
                self._owner = None
                self._streaming.end_pass(whole=whole)
                self._passes += whole
                self._seconds += time.perf_counter() - began
            return result

    def _enter(self, step: int, args: Any, kwargs: Any) -> None:
        _check_inputs(args, kwargs)
        if self._owner == threading.get_ident():
            self._streaming.acquire(step)
            return
        self._after_fork()
        with self._parts_lock:  # until the weights are held: then others are refused
            if self._owner is not None:
                raise RuntimeError(_ONE_THREAD)
            self._check_parts()
            self._parts_owner = threading.get_ident()
            self._streaming.acquire(step)

    def _leave(self, step: int) -> None:
        running = self._parts_owner if self._owner is None else self._owner
        if running == threading.get_ident():
            self._streaming.release(step)

    def _check_parts(self) -> None:
        """Refuse to take weights from a part of the model that another thread runs."""
        if self._parts_owner in (None, threading.get_ident()) or not self._streaming.in_use:
            return
        if any(thread.ident == self._parts_owner for thread in threading.enumerate()):
            raise RuntimeError(_ONE_THREAD)

    def _after_fork(self) -> None:
        if self._streaming.is_parents:
            self._lock, self._owner = threading.RLock(), None
            self._parts_lock, self._parts_owner = threading.Lock(), None


class _Use:
    """The hooks of a module that wants weights, outside of the graphs of ``torch.compile``."""

    def __init__(self, stream: WeightStream, step: int) -> None:
        self.stream = stream

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            stream._enter(step, args, kwargs)

        def leave(*_: Any) -> None:
            stream._leave(step)

        self._enter, self._leave = outside_of_graphs(enter), outside_of_graphs(leave)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter(module, args, kwargs)

    def leave(self, *_: Any) -> None:
        self._leave()

    def __reduce__(self) -> NoReturn:
        self.stream.__reduce__()


class WeightsMap(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each read when it is asked for.

    For libraries that take a mapping of weights, such as accelerate's ``attach_align_device_hook(weights_map=...)``.
    Each look-up reads the tensor; none is kept here. Prefer :func:`stream_weights`, which reads ahead and keeps what it
    can.

    Parameters
    ----------
    files : path or sequence of paths
        As for :func:`stream_weights`.
    device : torch.device, str or int
        Where tensors go.
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


def put_fixed(one: Matched, tensor: torch.Tensor | None) -> None:
    """Have a tensor where the model has one of the files'."""
    for module, name in one.places:
        if one.buffer:
            module._buffers[name] = tensor
        else:
            module._parameters[name] = tensor  # type: ignore[assignment]


def read_matched(one: Matched, device: torch.device) -> torch.Tensor:
    """Return a tensor of files."""
    tensor = torch.empty(one.shape, dtype=one.dtype, device=device)
    if tensor.numel():
        flat = tensor.reshape(-1).view(torch.uint8)
        for part in one.parts:
            with part.stored.open() as file:
                file.read(flat[part.at : part.at + part.end - part.begin], part.begin)
    return tensor


def _differ(one: Matched, other: Matched) -> bool:
    """Return whether two tensors of one shape have other bytes in the files."""
    if one.dtype != other.dtype or one.nbytes != other.nbytes:
        return True
    return any(
        not torch.equal(left, right) for left, right in zip(_bytes(one), _bytes(other), strict=True)
    )


def _bytes(one: Matched) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor, a piece at a time."""
    piece = torch.empty(min(one.nbytes, _PIECE_NBYTES), dtype=torch.uint8)
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


def _refuse_to_load(names: list[str], _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    given = [prefix + name for name in names if prefix + name in state]
    if given:
        raise RuntimeError(
            f"load_state_dict: {told(given)} cannot be loaded: the model is streamed, and its weights are those of the "
            "files; close() the stream first"
        )


def _check_inputs(args: Any, kwargs: Any, *, gradients: bool = False) -> None:
    """Refuse inputs with which torch would compute in vain; those with ``gradients`` may be allowed."""
    if recorded():
        raise RuntimeError(
            "a streamed model cannot be traced or exported: what is recorded would use its memory, and find other "
            "weights there"
        )
    gradients = gradients or not torch.is_grad_enabled()
    for value in _tensors_in((*args, *kwargs.values())):
        if value.is_meta:
            raise RuntimeError(
                "an input is on the meta device: it has no values, and torch would compute with it without an error"
            )
        if value.requires_grad and not gradients:
            raise RuntimeError(
                "streamed weights are for inference: an input requires gradients; run the model under "
                "torch.no_grad() or torch.inference_mode()"
            )


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
