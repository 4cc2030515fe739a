"""Models larger than memory: the forward pass reads weights ahead of their use from safetensors files.

A *pass* is a forward pass of the whole model. It is a sequence of *steps*: runs of modules that have weights
(``streaming.py``). A user may also call a module of the model outside of a pass: a *part* of the model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tensorferry.base.checks import checked_nbytes
from tensorferry.offload.absent import Around, recorded, tensors_in
from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.matching import WHOLE, match, matched, told, users
from tensorferry.offload.streaming import Streaming, Weight
from tensorferry.safetensors.sources import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.matching import Matched
    from tensorferry.safetensors.sources import Source


# Tensors are compared in pieces of this size.
_PIECE_NBYTES = 4 << 20

_ONE_THREAD = "another thread runs the model: only one thread at a time can call parts of it"
_REFUSED_COPY = (
    "a streamed model cannot be saved or copied: its weights are in the files that it is streamed from; close() the "
    "stream first"
)


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


class WeightStream:
    """A model with streamed weights, made by :func:`stream_weights`. A context manager.

    Forward passes of several threads run one after the other. After an exception or Ctrl-C in a pass, the next pass
    starts normally.
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
        # Buffers, and parameters without elements, are read now and stay in memory: they are not streamed.
        fixed = [one for one in found if one.buffer or not one.nbytes]
        self._weights = [
            Weight(number, one, device)
            for number, one in enumerate(one for one in found if not one.buffer and one.nbytes)
        ]
        modules, steps, together = self._steps(model, whole)
        fixed_nbytes = sum(one.nbytes for one in fixed)
        sizes = [sum(weight.nbytes for weight in step) for step in together]
        needed = fixed_nbytes + max(sizes, default=0)
        if needed > budget_nbytes:
            name = type(modules[sizes.index(max(sizes))]).__name__
            raise MemoryBudgetError(
                f"memory_budget: {budget_nbytes} bytes are not enough: {name} needs {needed} at the same time",
                needed,
            )
        # Tensors that modules such as TableEmbedding read from the files themselves: no warning about these.
        left = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in getattr(module, "stays_in_files", ())
        }
        if unexpected := [name for name in matches.unexpected if name not in left]:
            warnings.warn(
                f"files: the model has no parameters or buffers with the names {told(unexpected)}; they are ignored",
                stacklevel=3,
            )
        # A tied parameter has the values of its last name in the files, and `found` has the tensor of that name.
        used = {id(one.original): one for one in found}
        tied = [(other, used[id(other.original)]) for _, other in matches.duplicates]
        if differing := [
            f"{other.name} and {one.name} ({one.name} is used)"
            for other, one in tied
            if _differ(other, one)
        ]:
            warnings.warn(
                f"files: names of one (tied) parameter of the model have different values in the files: "
                f"{told(differing)}. Give the model a parameter for each, or leave one out",
                stacklevel=3,
            )
        self._model = model
        # Passes take turns. The other lock is held by the thread that runs the model or a part of it.
        self._pass_lock, self._lock = threading.RLock(), threading.RLock()
        self._is_in_pass = self._closed = False
        self._passes, self._seconds = 0, 0.0
        self._hooks: list[Any] = []
        self._root_step: int | None = None  # the step of the model itself, if it has weights
        self._fixed = fixed
        self._streaming = Streaming(
            self._weights, steps, together, budget_nbytes - fixed_nbytes, device
        )
        self._total_nbytes = sum(one.nbytes for one in found)
        try:
            for one in fixed:
                tensor = read_matched(one, device)
                put_fixed(one, tensor if one.buffer else nn.Parameter(tensor, requires_grad=False))
            self._install_hooks(modules)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, float]:
        """Return statistics.

        Returns
        -------
        dict of str to int or float
            ``passes`` and the ``seconds`` they took; ``read_nbytes``, the number of ``waits`` for a read and the
            ``wait_seconds``; ``unexpected_steps``, the runs of modules in another order than in the pass before; the
            bytes of all weights (``weights_nbytes``), of those that stay in memory (``kept_nbytes``), and of the memory
            in which weights are kept or read (``memory_nbytes``).
        """
        counters = self._streaming.counters
        return {
            "passes": self._passes,
            "seconds": self._seconds,
            "read_nbytes": counters.read_nbytes,
            "waits": counters.waits,
            "wait_seconds": counters.wait_seconds,
            "unexpected_steps": counters.unexpected,
            "weights_nbytes": self._total_nbytes,
            "kept_nbytes": self._streaming.kept_nbytes,
            "memory_nbytes": self._streaming.nbytes,
        }

    def close(self) -> None:
        """Wait for reads in flight, and restore the model. Do not call this while the model runs."""
        self._after_fork()
        with self._turn():
            if self._streaming.in_use:
                raise RuntimeError(
                    "close(): the model is running in this thread; call close() after the forward pass"
                )
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
        """Raise: a streamed model cannot be pickled or copied."""
        raise RuntimeError(_REFUSED_COPY)

    def __enter__(self) -> WeightStream:
        if self._closed:
            raise ValueError("this stream of weights is closed")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps(
        self, model: nn.Module, whole: tuple[type[nn.Module], ...]
    ) -> tuple[list[nn.Module], list[list[Weight]], list[list[Weight]]]:
        """Return the modules that need weights, and for each module its weights, without and with enclosing modules'.

        The forward() of the enclosing modules is running meanwhile.
        """
        of_module: dict[int, list[Weight]] = {}
        for weight in self._weights:
            for module, _ in weight.matched.places:
                of_module.setdefault(id(module), []).append(weight)
        modules: list[nn.Module] = []
        steps: list[list[Weight]] = []
        together: list[list[Weight]] = []
        for module, own, above in users(model, lambda each: isinstance(each, whole)):
            wanted = [weight for one in own for weight in of_module.get(id(one), ())]
            if wanted:
                meanwhile = [weight for one in above for weight in of_module.get(id(one), ())]
                modules.append(module)
                steps.append(list(dict.fromkeys(wanted)))
                together.append(list(dict.fromkeys([*wanted, *meanwhile])))
        return modules, steps, together

    def _install_hooks(self, modules: list[nn.Module]) -> None:
        for weight in self._weights:
            original = weight.matched.original
            assert original is not None
            weight.put(weight.stand_in)
            if not original.is_meta:  # release its memory: the weight must not be in memory twice
                original = nn.Parameter(torch.empty_like(original, device="meta"), False)
            weight.matched.original = original
        for step, module in enumerate(modules):
            if module is self._model:
                self._root_step = step
            else:
                self._around(module, "_call_impl", functools.partial(self._run_part, step))
        self._around(self._model, "forward", self._run)

    def _around(self, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._hooks.append(Around(module, name, run, _REFUSED_COPY))

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward pass."""
        self._after_fork()
        with self._pass_lock, self._turn():
            if self._is_in_pass:  # the model calls itself
                return forward(*args, **kwargs)
            if self._closed:
                raise ValueError("this stream of weights is closed")
            complete = False
            began = time.perf_counter()
            self._is_in_pass = True
            try:
                self._streaming.begin_pass()
                if self._root_step is None:
                    _check_inputs(args, kwargs, gradients=True)
                    result = forward(*args, **kwargs)
                else:
                    result = self._run_part(self._root_step, forward, args, kwargs)
                complete = True
            finally:
                self._is_in_pass = False
                self._streaming.end_pass(complete=complete)
                self._passes += complete
                self._seconds += time.perf_counter() - began
            return result

    def _run_part(self, step: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module with its weights, in a forward pass or outside of one."""
        self._after_fork()
        _check_inputs(args, kwargs)
        with self._turn():
            self._streaming.acquire(step)
            try:
                return call(*args, **kwargs)
            finally:
                self._streaming.release(step)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Be the only thread that uses the model; raise RuntimeError if another one does."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(_ONE_THREAD)
        try:
            yield
        finally:
            self._lock.release()

    def _after_fork(self) -> None:
        """In a forked child, replace the locks, which threads of the parent process may hold."""
        if self._streaming.is_parents:
            self._pass_lock, self._lock = threading.RLock(), threading.RLock()
            self._is_in_pass = False
            self._streaming.reset()


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


def put_fixed(one: Matched, tensor: torch.Tensor | None) -> None:
    """Set a tensor of the files, or None, in all of its places in the model."""
    for module, name in one.places:
        if one.buffer:
            module._buffers[name] = tensor
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


def _check_inputs(args: Any, kwargs: Any, *, gradients: bool = False) -> None:
    """Raise for inputs that would give wrong results, and unless ``gradients``, for inputs that require gradients."""
    if recorded():
        raise RuntimeError(
            "a streamed model cannot be traced or exported: the recording would use its memory, which later contains "
            "other weights"
        )
    gradients = gradients or not torch.is_grad_enabled()
    for value in tensors_in((args, kwargs)):
        if value.is_meta:
            raise RuntimeError(
                "an input is on the meta device: it has no values, and torch would compute with it without an error"
            )
        if value.requires_grad and not gradients:
            raise RuntimeError(
                "streamed weights are for inference: an input requires gradients; run the model under "
                "torch.no_grad() or torch.inference_mode()"
            )
