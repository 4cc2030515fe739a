"""Training with parameters, gradients and optimizer state on drives: the public interface.

Parameters and gradients are in slabs (``slabs.py``), and optimizer state is in buckets (``plan.py``). Both are tensors
in stores. A slab has the parameters of some modules, or their gradients; a bucket has the state of some parameters that
the optimizer steps together. A *sweep* is a pass of the optimizer's step over its buckets (``optimizer.py``). To *hold*
a slab is to keep it in memory (``training.py``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _foreach_utils

from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.matching import match, told
from tensorferry.offload.optimizer import (
    OffloadedOptimizer,
    checked_options,
    opened_store,
    ranks,
)
from tensorferry.offload.plan import needed_nbytes
from tensorferry.offload.slabs import MAX_SLAB_NBYTES, Cycle
from tensorferry.offload.training import Plan, Training, without_memory
from tensorferry.offload.weights import put_fixed, read_matched
from tensorferry.safetensors.sources import stored_tensors
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensorferry.base.checks import Path as Directory
    from tensorferry.offload.matching import Matched
    from tensorferry.offload.optimizer import Commit, Sweep
    from tensorferry.offload.plan import Bucket, Field
    from tensorferry.offload.residency import Residency
    from tensorferry.offload.saved import Saved
    from tensorferry.offload.slabs import Slab
    from tensorferry.safetensors.sources import Source
    from tensorferry.transfer.files import File
    from tensorferry.transfer.futures import Future

# The file that marks a directory as a checkpoint of torch.distributed.checkpoint.
METADATA = ".metadata"

# If not everything fits, optimizer state gets at least one part in this many of the budget (an eighth), unless the
# parameters and gradients that must be in memory at the same time need more than the rest.
_STATE_SHARE = 8


class TrainingOptimizer(OffloadedOptimizer):
    """The optimizer of a model with its parameters on drives; made by :func:`offload_training`.

    With ``step_in_backward``, the pass over the optimizer's buckets (a
    :class:`~tensorferry.offload.optimizer.Sweep`) begins in the backward pass, and ``step()`` completes it.
    """

    _refusal = "this training was set up before fork() and belongs to the parent process: its model cannot be used here"
    _stores_params = True
    _params_nbytes = MAX_SLAB_NBYTES

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: TensorStore,
        memory_budget_nbytes: int,
        training: Training,
        given: _Given,
        *,
        step_in_backward: bool,
        **options: Any,
    ) -> None:
        self._training = training
        self._given: _Given | None = given
        self._steps_early = step_in_backward
        self._all_nbytes = memory_budget_nbytes  # for state and slabs
        self._last_order: list[int] = []  # order of the buckets in the last step
        # By bucket: parameters for which gradients must still arrive.
        self._waiting: dict[int, set[torch.Tensor]] = {}
        self._is_planned = False  # whether the budget has been divided between state and slabs
        super().__init__(optimizer, store, memory_budget_nbytes, **options)
        self._lender.gradient_of = self._lent_gradient

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients.

        Raises
        ------
        ValueError
            ``set_to_none`` is False: this would write zeros to the drive.
        """
        if not set_to_none:
            raise ValueError(
                "set_to_none: must be True: gradients on drives are discarded, not filled with zeros"
            )
        with self._locked():
            self._break_early()
            # Parameters without elements are in no slab, and have ordinary gradients.
            self._inner.zero_grad(set_to_none=True)
            self._training.forget_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters, bit for bit like ``torch.nn.utils.clip_grad_norm_``.

        After the first call, the norm of each gradient is computed when the gradient arrives. So only the first call,
        and a call after ``unscale_``, read gradients.

        Returns
        -------
        torch.Tensor
            The norm of all gradients as one vector, before clipping.
        """
        limit, kind = float(max_norm), float(norm_type)
        with self._locked():
            training = self._training
            training.check_gradients()
            params: list[torch.Tensor] = [
                param for param in training.plan.names if self._gradient_of(param) is not None
            ]
            if not params:
                return torch.tensor(0.0)
            total = self._total_norm(params, kind)
            if error_if_nonfinite and bool(torch.logical_or(total.isnan(), total.isinf())):
                raise RuntimeError(
                    f"The total norm of order {kind} for gradients from `parameters` is non-finite, so it cannot be "
                    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                    "`error_if_nonfinite=False`"
                )
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)
            training.change_gradients(lambda views: torch._foreach_mul_(views, factor))
            return total

    def _total_norm(self, params: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients' norms, in torch's order of summation.

        That is dtype by dtype, and for each dtype in the order of the model's parameters.
        """
        alike: list[Any] = [torch.empty(0, dtype=param.dtype) for param in params]
        grouped: Any = _foreach_utils._group_tensors_by_device_and_dtype([alike], with_indices=True)
        norms = [
            each if each is not None else torch.linalg.vector_norm(empty, norm_type)
            for each, empty in zip(self._training.norms(params, norm_type), alike, strict=True)
        ]
        ordered = [norms[at] for _, indices in grouped.values() for at in indices]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
        return total

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip the gradients of all parameters like ``torch.nn.utils.clip_grad_value_``."""
        limit = float(clip_value)
        with self._locked():
            self._training.check_gradients()
            for dtype in {param.dtype for param in self._training.gradients}:
                torch.empty(0, dtype=dtype).clamp_(min=-limit, max=limit)  # raises for complex ones
            self._training.change_gradients(
                lambda views: [view.clamp_(min=-limit, max=limit) for view in views]
            )

    def _gradient_of(self, param: torch.Tensor) -> Any:
        if param in self._training.plan.place_of:
            return self._training.gradients.get(param)
        return param.grad

    def _lent_gradient(self, param: torch.Tensor) -> Any:
        """Return what the lender takes as a parameter's gradient: for one in a slab, a ``GradientElsewhere``."""
        found = self._gradient_of(param)
        if found is None or param not in self._training.plan.place_of:
            return found
        return self._training.lent_gradient(param)

    # Steps

    def _break_early(self) -> None:
        """Mark a step that began in the backward pass as broken if that pass failed.

        The step cannot be finished then, because some gradients will never arrive.
        """
        sweep = self._sweep
        if sweep is not None and not sweep.ends and self._training.are_partial:
            sweep.broken = True

    def retry(self) -> None:
        """Continue after a failure; see :meth:`OffloadedOptimizer.retry`."""
        with self._locked():
            self._break_early()
            super().retry()

    def _begun_step(self) -> Sweep | None:
        self._break_early()
        sweep = self._sweep
        if sweep is None or not sweep.broken:
            self._training.check_gradients()
        if sweep is None or sweep.ends or sweep.broken:
            return super()._begun_step()
        # The backward pass has begun this step: continue it with the buckets that are not stepped yet.
        sweep.ends = True
        sweep.order += sorted(set(self._order(self._is_stepped)) - set(sweep.order))
        return sweep

    def _go_on(self, residency: Residency, sweep: Sweep) -> None:
        if sweep.ends:
            left = [self._buckets[index] for index in sweep.order[sweep.done :]]
            with self._interrupts.deferred():
                self._training.begin_step([self._params_of(bucket) for bucket in left])
        super()._go_on(residency, sweep)
        if sweep.ends and sweep.is_step:
            self._last_order = sweep.order
            self._training.end_step()

    def _step_early(self, params: Iterable[torch.Tensor]) -> None:
        """Step buckets in the backward pass, each as soon as all of its parameters have been passed to this method.

        ``params`` are parameters that have their gradients and that the backward pass no longer needs.
        """
        with self._locked():
            sweep = self._sweep
            if sweep is None:
                # Call the base class's method: that of this class would raise, because not all gradients have arrived.
                sweep = super()._begun_step()
                assert sweep is not None
                if sweep.scaling:
                    raise RuntimeError(
                        "step_in_backward=True: cannot be used with GradScaler, which needs all gradients before the "
                        "first parameter is stepped"
                    )
                sweep.order, sweep.ends = [], False
                residency = self._usable()
                order = self._last_order or [bucket.index for bucket in reversed(self._buckets)]
                residency.begin(order)
                self._waiting = {
                    bucket.index: {unit.param for unit in bucket.units} for bucket in self._buckets
                }
                self._training.begin_step(
                    [list(params) for params in self._waiting.values()], in_backward=True
                )
            if sweep.broken or sweep.done < len(sweep.order):
                raise self._half_done("a part of it failed in the backward pass")
            found = []
            for param in params:
                for bucket, _ in self._pieces[param]:
                    waiting = self._waiting[bucket.index]
                    waiting.discard(param)
                    if not waiting:
                        found.append(bucket.index)
            if found:
                sweep.order += sorted(found)
                self._go_on(self._usable(), sweep)

    def _bring(self, bucket: Bucket | None) -> None:
        self._training.bring(None if bucket is None else self._params_of(bucket))

    def _params_of(self, bucket: Bucket) -> list[torch.Tensor]:
        return [unit.param for unit in bucket.units if self._is_stepped(unit.param)]

    @contextlib.contextmanager
    def in_memory(self, module: nn.Module) -> Iterator[None]:
        """Hold the parameters of a module and of the modules below it in memory, for reading and writing.

        Together they must fit the budget. The new values of changed parameters are kept.
        """
        with self._locked():
            slabs = self._training.slabs_below(module)
        with self._training.held(slabs, written=True):
            yield

    def stats(self) -> dict[str, Any]:
        """Return what steps have cost so far: as :meth:`OffloadedOptimizer.stats`, including parameters and gradients.

        Returns
        -------
        dict
            Additionally ``params_nbytes``, the bytes of parameters and gradients on drives. ``read_nbytes``,
            ``written_nbytes``, ``endurance_share``, ``wait_seconds`` and ``memory_nbytes`` cover all passes;
            ``step_seconds`` and ``drive_share`` cover the optimizer's steps only.
        """
        with self._locked():
            found = super().stats()
            cycle = self._training.cycle
            found["params_nbytes"] = sum(slab.nbytes for slab in self._training.plan.slabs)
            found["memory_nbytes"] += cycle.nbytes
            for name, value in vars(cycle.counters).items():
                found[name] += value
            if self._endurance_nbytes:
                found["endurance_share"] = found["written_nbytes"] / self._endurance_nbytes
            return found

    def drain(self) -> None:
        """Wait until all write-behind is done. The errors are those of :meth:`OffloadedOptimizer.drain`."""
        super().drain()
        with self._locked(), self._storing():
            self._training.cycle.drain()

    # Checkpoints and commits, which include parameters

    def _settle_and_store(self, residency: Residency) -> None:
        super()._settle_and_store(residency)
        with self._storing():
            self._training.cycle.flush()

    def _store_params(self) -> None:
        self._training.cycle.flush()

    def _slabs_of_params(self) -> list[tuple[str, int]] | None:
        place_of = self._training.plan.place_of
        places = [place_of.get(param) for param in self._shapes]
        return [("", 0) if place is None else (place[0].name, place[1].offset) for place in places]

    def _load_params(self, saved: Saved, params: Sequence[torch.Tensor]) -> None:
        training = self._training
        index_of = {param: index for index, param in enumerate(params)}
        for slab in training.plan.of_params:
            if slab.gradients is None:
                continue
            with training.held([slab], written=True):
                assert slab.memory is not None
                for param, field in slab.fields.items():
                    memory = slab.memory[field.offset : field.offset + field.nbytes]
                    saved.read_param(index_of[param], memory)
        training.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the placement of parameters is fixed when the training is offloaded."""
        if self._residency is not None:
            raise RuntimeError(
                "add_param_group: parameters cannot be added to a training with parameters on drives"
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Release the memory and the space on drives. Save the model first: it is unusable afterwards."""
        if self.is_parents or self._residency is None:
            return
        with self._locked():
            self._training.give_up()
        super().close()
        self._training.cycle.close()

    # Memory and locking

    def _take_params(self) -> None:
        """Move the parameters into slabs, and install the hooks that bring them to modules."""
        training, device = self._training, self._training.device
        given, self._given = self._given, None
        assert given is not None
        left = self._all_nbytes - self._usable().nbytes
        training.cycle = Cycle(
            *(min(left, training.plan.nbytes), training.plan.slabs),
            all_in_flight=self._commit != "none",
            gpu=device.index or 0 if device.type == "cuda" else -1,
        )
        training.move(given.values_of, self._guarded)
        try:
            training.take_over(self._guarded, self._step_early if self._steps_early else None)
        except BaseException:
            training.give_up()
            training.give_back(training.plan.of_params)
            raise

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        if self._is_planned:
            super()._check_budget(buckets)
            return
        # The first call divides the budget between state and slabs. Beyond the minimum of each, the division matters
        # little: a byte of memory saves about as much I/O for state as for parameters and gradients.
        plan, nbytes = self._training.plan, self._budget_nbytes
        of_slabs = plan.needed_nbytes([[unit.param for unit in each.units] for each in buckets])
        of_state = needed_nbytes(buckets, self._at_once())
        if nbytes < of_slabs + of_state:
            raise MemoryBudgetError(
                f"memory_budget: {nbytes} bytes are too few, {of_slabs + of_state} are needed: {of_slabs} for "
                f"parameters and gradients that are in memory at the same time, and {of_state} for state in flight",
                of_slabs + of_state,
            )
        share = max(of_state, nbytes - plan.nbytes, nbytes // _STATE_SHARE)
        self._budget_nbytes = min(share, nbytes - of_slabs)
        self._is_planned = True

    def _fits_at_home(self, _: Sequence[Bucket]) -> bool:
        """Return False: with all state in memory, one call would step all parameters, which are on drives."""
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with super()._locked(), self._training.inside():
            yield

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock and defer signals, for changes that are made while the model runs."""
        with super()._locked():
            if self._residency is None:
                raise ValueError("the training is closed: its parameters no longer exist")
            with self._interrupts.deferred():
                yield


def offload_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directories: Directory | Sequence[Directory],
    *,
    memory_budget: int | str,
    blocks: Iterable[nn.Module] = (),
    checkpoint_activations: bool = True,
    step_in_backward: bool = False,
    files: Source | None = None,
    master_dtype: torch.dtype | None = None,
    commit: Commit = "none",
    weights: Sequence[float] | None = None,
    endurance: int | str | None = None,
    device: torch.device | str | int = "cpu",
) -> tuple[nn.Module, TrainingOptimizer]:
    """Prepare a model for training with parameters, gradients and optimizer state on drives.

    Losses and parameters are bit for bit those of the same training in memory. Parameters are read before their module
    runs, in the forward pass and again in the backward pass; gradients are written when they are computed; and the
    optimizer's step passes over all of them once. Data that fits the budget stays in memory.

    Parameters
    ----------
    model : torch.nn.Module
        The model. The optimizer must have all of its parameters that require gradients. The parameters stay the same
        objects, but have values only while their module runs.
    optimizer : torch.optim.Optimizer
        As for :func:`offload_optimizer`. From now on, use only the returned optimizer.
    directories : path, or a list of paths
        As for :func:`offload_optimizer`.
    memory_budget : int or str
        Bytes of memory for parameters, gradients and state. Activations, and the gradients that autograd has just
        computed for one module, need additional memory.
    blocks : iterable of torch.nn.Module
        The layers: modules that are entirely in memory while they run. Outside of blocks, each module with its own
        parameters is brought into memory separately.
    checkpoint_activations : bool
        Whether blocks are computed again in the backward pass (``torch.utils.checkpoint``). Then their activations need
        no memory between the passes.
    step_in_backward : bool
        Whether to step parameters as soon as the backward pass no longer needs them. Then their gradients are never
        written. Each ``backward()`` must be followed by ``step()``, and neither clipping nor GradScaler is possible,
        because both need all gradients before the step.
    files : path or sequence of paths, optional
        Safetensors files with the model's parameters, as for :func:`stream_weights`, or a directory with a checkpoint
        of ``torch.distributed.checkpoint``. The model may then be on the meta device. Frozen parameters that
        safetensors files contain in the model's dtype are not copied to ``directories``: each pass reads them from
        these files.
    master_dtype, commit, weights, endurance
        As for :func:`offload_optimizer`. A commit also contains the parameters, but not the model's buffers.
    device : torch.device, str or int
        Where the model computes. The optimizer's step always runs in host memory.

    Returns
    -------
    tuple of torch.nn.Module and TrainingOptimizer
        The same model, and the optimizer to step. Clip gradients with its ``clip_grad_norm_`` and
        ``clip_grad_value_``; it works with schedulers and ``torch.amp.GradScaler``.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid, or several ranks train together; nothing has changed.
    NotSeparableError
        The optimizer cannot be stepped piece by piece with the same result.
    MemoryBudgetError
        The budget is too small; ``needed_nbytes`` is the smallest one that works.
    StorageError
        The directories lack space, or a file cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not a torch.nn.Module")
    if ranks() > 1:
        raise ValueError(
            "model: several ranks cannot train one model on drives together; offload_optimizer() supports sharding"
        )
    nbytes, options = checked_options(optimizer, memory_budget, master_dtype, commit, endurance)
    where = torch.device(device)
    if not hasattr(blocks, "__iter__"):
        raise TypeError(f"blocks: expected an iterable of modules, got {type(blocks).__name__}")
    plan = Plan(model, optimizer, list(blocks))
    given = _Given(plan, files)
    training = Training(plan, where, checkpoint_activations=bool(checkpoint_activations))
    with contextlib.ExitStack() as undo:
        undo.callback(given.close)
        store, earlier = opened_store(directories, weights, commit, undo)
        of_gradients = TensorStore(directories, weights=weights)
        undo.callback(of_gradients.close)
        for slab in plan.slabs:
            slab.store = of_gradients if slab.is_of_gradients else store
        given.read_buffers()
        given.take_from_meta(undo)
        offloaded = TrainingOptimizer(
            *(optimizer, store, nbytes, training, given),
            step_in_backward=bool(step_in_backward),
            earlier=earlier,
            step_device="cpu",
            **options,
        )
        undo.pop_all()
    return model, offloaded


class _Given:
    """The values with which a model's training begins: those that its parameters have, or those in ``files``."""

    def __init__(self, plan: Plan, files: Source | None) -> None:
        self._plan = plan
        self._found: dict[torch.Tensor, Matched] = {}
        self._buffers: list[Matched] = []
        self._files: dict[str, File] = {}
        self._checkpoint: _Checkpoint | None = None
        folder = os.fsdecode(files) if isinstance(files, (str, bytes, os.PathLike)) else None
        if folder is not None and Path(folder, METADATA).exists():
            self._checkpoint = _Checkpoint(folder, plan)
        elif files is not None:
            for one in match(plan.model, stored_tensors(files), in_training=True).found:
                if one.buffer:
                    self._buffers.append(one)
                else:
                    assert isinstance(one.original, torch.Tensor)
                    self._found[one.original] = one
            for slab in plan.of_params:
                if slab.gradients is None and all(
                    itertools.starmap(self._lies_alike, slab.fields.items())
                ):
                    slab.source = functools.partial(self._read, slab)
        missing = [
            name
            for param, name in plan.names.items()
            if param.is_meta and param not in self._found and self._checkpoint is None
        ]
        if missing:
            raise ValueError(
                f"model: {told(missing)}: on the meta device, and not in files=, so these have no values"
            )

    def _lies_alike(self, param: torch.Tensor, field: Field) -> bool:
        """Return whether a parameter's bytes in the files can be read into its slab as they are.

        For this, the files must have the parameter with the same dtype, and its layout in the slab must be contiguous.
        """
        one = self._found.get(param)
        contiguous = torch.empty(field.shape, device="meta").stride()
        return one is not None and one.dtype == field.dtype and contiguous == field.stride

    def _read(self, slab: Slab, memory: torch.Tensor) -> Any:
        """Begin to read frozen parameters from their files."""
        futures = []
        for param, field in slab.fields.items():
            for part in self._found[param].parts:
                path = part.stored.path
                if path not in self._files:
                    self._files[path] = part.stored.open()
                begin = field.offset + part.at
                place = memory[begin : begin + part.end - part.begin]
                futures.append(self._files[path].read_into(place, part.begin))
        return _Together(futures)

    def take_from_meta(self, undo: contextlib.ExitStack) -> None:
        """Replace parameters on the meta device by parameters on the CPU that have no memory.

        ``undo`` swaps them back if the model cannot be offloaded: a user's access to the elements of a parameter
        without memory would end the process.
        """
        swap: Any = torch.utils.swap_tensors
        for param in self._plan.names:
            if param.is_meta:
                empty = without_memory(param.shape, param.stride(), param.dtype)
                other = nn.Parameter(empty, requires_grad=param.requires_grad)
                swap(param, other)
                undo.callback(swap, param, other)

    def values_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's values from the files, or None if the files do not have them."""
        if self._checkpoint is not None:
            return self._checkpoint.values_of(param)
        one = self._found.get(param)
        return None if one is None else read_matched(one, torch.device("cpu"))

    def read_buffers(self) -> None:
        """Set the model's buffers to the values of the files."""
        for one in self._buffers:
            assert one.original is not None
            is_meta = one.original.is_meta
            value = read_matched(one, torch.device("cpu") if is_meta else one.original.device)
            if is_meta:
                put_fixed(one, value)
            else:
                one.original.copy_(value)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class _Together:
    """Several reads with the interface of a single future."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Return whether all reads have ended."""
        return all(each.done() for each in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the first failure, as a future does."""
        failures = [each.exception(timeout) for each in self._futures]
        return next((failure for failure in failures if failure is not None), None)

    def result(self, timeout: float | None = None) -> None:
        """Raise the first failure, as a future does."""
        for each in self._futures:
            each.result(timeout)


class _Checkpoint:
    """A checkpoint of torch.distributed.checkpoint that contains a model, at its top level or below one key."""

    def __init__(self, path: str, plan: Plan) -> None:
        self._load: Any = importlib.import_module("torch.distributed.checkpoint").load
        # Imported lazily, because only checkpoints need it.
        self._reader = importlib.import_module("tensorferry.checkpoint").FileSystemReader(path)
        there = self._reader.read_metadata().state_dict_metadata
        names = list(plan.names.values())
        prefixes = {name.removesuffix(names[0]) for name in there if name.endswith(names[0])}
        complete = [each for each in prefixes if all(f"{each}{name}" in there for name in names)]
        if len(complete) != 1:
            raise ValueError(
                f"files: the checkpoint {path!r} has {'several models' if complete else 'no model'} with the "
                f"parameters {told(names)}"
            )
        self._names = {param: f"{complete[0]}{name}" for param, name in plan.names.items()}
        for param, name in self._names.items():
            if tuple(getattr(there[name], "size", ())) != tuple(param.shape):
                raise ValueError(f"files: {name} does not have the shape {list(param.shape)} there")

    def values_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values."""
        values = torch.empty(param.shape, dtype=param.dtype, device="cpu")
        state: dict[str, Any] = {self._names[param]: values}
        self._load(state, storage_reader=self._reader, no_dist=True)
        return values
