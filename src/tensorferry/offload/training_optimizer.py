"""Training with parameters, gradients and optimizer state on drives: the public interface.

Parameters and gradients are in slabs (``slabs.py``), and optimizer state is in buckets (``plan.py``). Both are tensors
in stores. A slab has the parameters of some modules, or their gradients; a bucket has the state of some parameters that
the optimizer steps together.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.offload.errors import MemoryBudgetError
from tensorferry.offload.holder import Holder, allocate, reserve
from tensorferry.offload.initial_values import InitialValues
from tensorferry.offload.matching import told
from tensorferry.offload.optimizer import (
    OffloadedOptimizer,
    checked_options,
    opened_store,
    ranks,
)
from tensorferry.offload.plan import PAGE_NBYTES, needed_nbytes
from tensorferry.offload.scan import Order
from tensorferry.offload.slabs import MAX_SLAB_NBYTES, GradientSlab, StoreSlab, TrainingPlan
from tensorferry.offload.training import TrainingSwapper
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensorferry.base.checks import Path as Directory
    from tensorferry.offload.kinds import Kind
    from tensorferry.offload.optimizer import Commit
    from tensorferry.offload.plan import Bucket
    from tensorferry.offload.saved import Saved
    from tensorferry.offload.sweep import Sweep
    from tensorferry.safetensors.sources import Source

# If not everything fits, optimizer state gets at least one part in this many of the budget (an eighth), unless the
# parameters and gradients that must be in memory at the same time need more than the rest.
_STATE_SHARE = 8

# The tensor of the store with the model's buffers and the places of its frozen parameters.
_MODEL = "model"


class TrainingOptimizer(OffloadedOptimizer):
    """The optimizer of a model with its parameters on drives; made by :func:`offload_training`."""

    _refusal = "this training was set up before fork() and belongs to the parent process: its model cannot be used here"
    _stores_params = True
    _params_nbytes = MAX_SLAB_NBYTES

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: TensorStore,
        memory_budget_nbytes: int,
        swapper: TrainingSwapper,
        values: InitialValues,
        **options: Any,
    ) -> None:
        self._swapper = swapper
        self._values: InitialValues | None = values
        self._all_nbytes = memory_budget_nbytes  # for state and slabs
        self._is_planned = False  # whether the budget has been divided between state and slabs
        self._model_bytes = b""  # what the store's tensor _MODEL has
        super().__init__(optimizer, store, memory_budget_nbytes, **options)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, or set them to zero, as in memory."""
        super().zero_grad(set_to_none)
        with self._locked():
            self._swapper.end_backward()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Call ``torch.nn.utils.clip_grad_norm_`` for all parameters of the model."""
        params = self._swapper.plan.names
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Call ``torch.nn.utils.clip_grad_value_`` for all parameters of the model."""
        nn.utils.clip_grad_value_(self._swapper.plan.names, clip_value)

    # Steps

    def _begun_step(self) -> Sweep | None:
        self._check_not_lent()
        if self._sweep is None:
            self._swapper.check_gradients()
        return super()._begun_step()

    def _go_on(self, sweep: Sweep) -> None:
        self._check_not_lent()
        self._swapper.begin_step(
            [unit.param for unit in bucket.units] for bucket in sweep.order[sweep.done :]
        )
        super()._go_on(sweep)
        if sweep.is_step:
            self._swapper.end_step()

    def _bring(self, bucket: Bucket | None) -> None:
        self._swapper.bring(None if bucket is None else [unit.param for unit in bucket.units])
        if bucket is None and self._sweep is not None:
            # Parameters of which only some pieces are stepped have their stand-ins for gradients again.
            self._sweep.note_gradients(self._sweep.group_of)

    @contextlib.contextmanager
    def in_memory(self, module: nn.Module) -> Iterator[None]:
        """Give the parameters of a module and of the modules below it their values, for reading and writing.

        Within the block the parameters, and their ``grad``, are copies, in memory in addition to the budget. What has
        changed is written when the block ends. The copies belong to the caller: views of them stay valid, and no longer
        have any effect on the parameters. The model cannot run within the block.

        Raises
        ------
        MemoryBudgetError
            The copies are larger than the memory budget; nothing has changed.
        RuntimeError
            The model is running.
        """
        swapper = self._swapper
        with self._accessing(True):
            if swapper.is_running:
                raise RuntimeError(
                    "in_memory(): the model is running; a module's hooks can use its parameters directly"
                )
            params = (swapper.plan.place_of.keys() & set(module.parameters())) - swapper.lent.keys()
            needed = 2 * sum(param.nbytes for param in {*params, *swapper.lent})
            if needed > self._all_nbytes:
                raise MemoryBudgetError(
                    f"memory_budget: copies of the parameters and gradients of this {type(module).__name__} need "
                    f"{needed} bytes, more than the budget of {self._all_nbytes} bytes; use in_memory() for its parts, "
                    "one at a time",
                    needed,
                )
        try:
            with self._accessing(True):
                swapper.lend(params)
            yield
        finally:
            with self._accessing(True):
                swapper.take_back(params & swapper.lent.keys())

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
            holder = self._swapper.holder
            found["params_nbytes"] = sum(slab.nbytes for slab in self._swapper.plan.everything)
            found["memory_nbytes"] += holder.nbytes
            for name in ("read_nbytes", "written_nbytes", "wait_seconds"):
                found[name] += getattr(holder.counters, name)
            if self._endurance_nbytes:
                found["endurance_share"] = found["written_nbytes"] / self._endurance_nbytes
            return found

    def drain(self) -> None:
        """Wait until all write-behind is done. The errors are those of :meth:`OffloadedOptimizer.drain`."""
        super().drain()
        with self._guarded(), self._storing():
            self._swapper.holder.drain()

    # Checkpoints and commits, which include the model

    def _store_state(self) -> None:
        self._check_not_lent()
        super()._store_state()
        with self._guarded(), self._storing():
            written = io.BytesIO()
            torch.save(
                {
                    "forms": self._forms(),
                    "frozen": {
                        name: (slab.name, at) for name, (slab, at) in self._frozen().items()
                    },
                    "buffers": dict(self._swapper.plan.model.named_buffers()),
                },
                written,
            )
            if written.getvalue() != self._model_bytes:
                self._model_bytes = written.getvalue()
                memory = torch.frombuffer(bytearray(self._model_bytes), dtype=torch.uint8)
                self._store.write(_MODEL, memory).result()

    def _flush(self) -> None:
        super()._flush()
        self._swapper.holder.flush()

    def _frozen(self) -> dict[str, tuple[StoreSlab, int]]:
        """Return the places of parameters that the optimizer does not have, and that are not in the user's files."""
        plan = self._swapper.plan
        return {
            plan.names[param]: (slab, field.offset)
            for param, (slab, field) in plan.place_of.items()
            if slab.gradients is None and isinstance(slab, StoreSlab)
        }

    def _forms(self) -> dict[str, Any]:
        """Return the shapes and dtypes of frozen parameters and buffers."""
        model = self._swapper.plan.model
        frozen = self._frozen()
        params = model.named_parameters()
        tensors: dict[str, torch.Tensor] = {name: each for name, each in params if name in frozen}
        tensors |= dict(model.named_buffers())
        return {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}

    def _store_params(self) -> None:
        """Do nothing: parameters are in the store at all times."""

    def _slabs_of_params(self) -> list[tuple[str, int]] | None:
        place_of = self._swapper.plan.place_of
        places: list[Any] = [place_of.get(param) for param in self._shapes]
        return [("", 0) if place is None else (place[0].name, place[1].offset) for place in places]

    def _load(self, saved: Saved, *, with_params: bool) -> int:
        saved.check_places(in_slabs=True)
        written = io.BytesIO(saved.tensor(_MODEL).numpy().tobytes())
        record: dict[str, Any] = torch.load(written, weights_only=True)
        there, here = record["forms"], self._forms()
        if there != here:
            names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
            raise ValueError(
                f"model: {told(names)}: a frozen parameter or buffer is not the same in the commit and here: it is "
                "missing, has another shape or dtype, or is read from files="
            )
        steps = super()._load(saved, with_params=with_params)
        plan = self._swapper.plan
        with self._guarded(), torch.no_grad():
            for name, buffer in plan.model.named_buffers():
                buffer.copy_(record["buffers"][name])
            param_of = {name: param for param, name in plan.names.items()}
            self._fill_params(
                saved, {param_of[name]: place for name, place in record["frozen"].items()}
            )
        return steps

    def _load_params(self, saved: Saved, params: Sequence[torch.Tensor]) -> None:
        place_of = self._swapper.plan.place_of
        places = zip(params, saved.slabs, strict=True)
        self._fill_params(saved, {param: place for param, place in places if param in place_of})
        super().zero_grad()

    def _fill_params(self, saved: Saved, places: dict[torch.Tensor, tuple[str, int]]) -> None:
        """Read parameters from the slabs of a commit, each at an offset."""
        swapper = self._swapper
        for param, (name, at) in places.items():
            slab, field = swapper.plan.place_of[param]
            [memory] = swapper.holder.hold([slab], change=True)
            saved.read_slab(name, at, memory[field.offset : field.offset + field.nbytes])
            swapper.note_written(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the placement of parameters is fixed when the training is offloaded."""
        if self._held is not None:
            raise RuntimeError(
                "add_param_group: parameters cannot be added to a training with parameters on drives"
            )
        super().add_param_group(param_group)

    def close(self) -> None:
        """Release the memory and the space on drives. Save the model first: it is unusable afterwards."""
        if self.is_parents or self._held is None:
            return
        with self._locked():
            self._swapper.close()
        super().close()

    # Memory and locking

    def _take_params(self) -> None:
        """Move the parameters into slabs, and install the hooks that bring them to modules."""
        swapper, plan = self._swapper, self._swapper.plan
        values, self._values = self._values, None
        assert values is not None
        nbytes = (
            min(self._all_nbytes - self._usable().nbytes, plan.nbytes) // PAGE_NBYTES * PAGE_NBYTES
        )
        in_stores = [slab for slab in plan.everything if isinstance(slab, StoreSlab)]
        for store in {slab.store for slab in in_stores}:
            slabs = [slab for slab in in_stores if slab.store is store]
            reserve(store, slabs, nbytes, all_in_flight=self._commit != "none")
        swapper.holder = Holder(
            *(plan.everything, allocate(nbytes, swapper.device)),
            *(Order(plan.expected()), plan.together()),
            guard=self._interrupts.deferred,
        )
        swapper.holder.choose()
        swapper.holder.interrupted = self._interrupts.was_repeated
        swapper.accessing = self._accessing
        try:
            swapper.move(values.of)
        except BaseException:
            swapper.give_back()
            raise

    def _check_budget(self, buckets: Sequence[Bucket]) -> None:
        if self._is_planned:
            super()._check_budget(buckets)
            return
        # The first call divides the budget between state and slabs. Beyond the minimum of each, the division matters
        # little: a byte of memory saves about as much I/O for state as for parameters and gradients.
        plan, nbytes = self._swapper.plan, self._budget_nbytes
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
    def _accessing(self, defers: bool) -> Iterator[None]:
        """Hold the lock while slabs are used, and with ``defers`` defer signals; raise if the training is closed."""
        with self._locked():
            self._usable(loading=True)
            with self._interrupts.deferred() if defers else contextlib.nullcontext():
                yield

    def _check_not_lent(self) -> None:
        if self._swapper.lent:
            raise RuntimeError(
                "this is impossible within a block of in_memory(), where parameters are copies: end the block first"
            )


def offload_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directories: Directory | Sequence[Directory],
    *,
    memory_budget: int | str,
    blocks: Iterable[nn.Module] = (),
    checkpoint_activations: bool = True,
    files: Source | None = None,
    kind: Kind | None = None,
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
    files : path or sequence of paths, optional
        Safetensors files with the model's parameters, as for :func:`stream_weights`, or a directory with a checkpoint
        of ``torch.distributed.checkpoint``. The model may then be on the meta device. Frozen parameters that
        safetensors files contain in the model's dtype are not copied to ``directories``: each pass reads them from
        these files.
    kind, master_dtype, commit, weights, endurance
        As for :func:`offload_optimizer`. A commit also contains the model's parameters and buffers.
    device : torch.device, str or int
        Where the model computes. The optimizer's step always runs in host memory.

    Returns
    -------
    tuple of torch.nn.Module and TrainingOptimizer
        The same model, and the optimizer to step. It works with schedulers, ``torch.amp.GradScaler`` and
        ``torch.nn.utils.clip_grad_norm_``.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid, or several ranks train together; nothing has changed.
    NotSeparableError
        The optimizer cannot be stepped in parts with the same result.
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
    nbytes, options = checked_options(
        optimizer, memory_budget, kind, master_dtype, commit, endurance
    )
    where = torch.device(device)
    if not hasattr(blocks, "__iter__"):
        raise TypeError(f"blocks: expected an iterable of modules, got {type(blocks).__name__}")
    plan = TrainingPlan(model, optimizer, list(blocks))
    values = InitialValues(plan, files)
    swapper = TrainingSwapper(plan, where, checkpoint_activations=bool(checkpoint_activations))
    with contextlib.ExitStack() as undo:
        undo.callback(values.files.close)
        store, earlier = opened_store(directories, weights, commit, undo)
        of_gradients = TensorStore(directories, weights=weights)
        undo.callback(of_gradients.close)
        for slab in plan.everything:
            if isinstance(slab, StoreSlab):
                slab.store = of_gradients if isinstance(slab, GradientSlab) else store
        values.read_buffers()
        # Parameters on the meta device cannot get values. Exchange their contents; the objects stay the same.
        exchange: Any = torch.utils.swap_tensors
        for param in plan.names:
            if param.is_meta:
                empty = torch.empty(0, dtype=param.dtype, device="cpu")
                other = nn.Parameter(empty, requires_grad=param.requires_grad)
                vars(other).update(vars(param))
                exchange(param, other)
                undo.callback(exchange, param, other)
                swapper.put_away(param)
        offloaded = TrainingOptimizer(
            *(optimizer, store, nbytes, swapper, values),
            earlier=earlier,
            step_device="cpu",
            **options,
        )
        undo.pop_all()
    return model, offloaded
