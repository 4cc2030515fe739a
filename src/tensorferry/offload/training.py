"""A model in training with its parameters and gradients on drives.

A *slab* is one tensor in a store that contains the values of several parameters, or their gradients (``slabs.py``). To
*hold* a slab is to keep it in memory until the hold ends. The parameters are always the user's own objects, and only
their data and class change. While a parameter is not in memory, its data is a single NaN expanded to its shape, and its
class raises in every operation that needs values.

A :class:`Step` is a module that runs with its parameters in memory: one of the user's blocks with all modules below it,
or a module with its own parameters. A *step of the training* consists of forward and backward passes followed by the
optimizer's ``step()``.

In the forward pass, the slabs of a :class:`Step` are held while its module runs. If the module is not checkpointed,
``saved_tensors_hooks`` replace each parameter that autograd saves by a reference to slab and offset, from which the
backward pass gets the values again. A checkpointed block runs again in the backward pass (``torch.utils.checkpoint``),
and its slabs are held until its backward pass is complete. The sequence numbers of autograd's nodes, which grow in the
order of their creation, show when that is the case: autograd runs the most recently created nodes of a graph first
(torch/csrc/autograd/engine.h, ``ReadyQueue``). So when a node runs that is older than the first node of a block, all
nodes of the block have run.

As soon as autograd has accumulated a gradient in a parameter, the gradient is moved into a slab of gradients. A change
of gradients, such as clipping, is *pending* until their slab is in memory the next time. To *settle* a slab of
gradients is to make its pending changes.

Methods of the optimizer step *buckets*: lists of parameters that the optimizer steps together (``optimizer.py``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils import _pytree, checkpoint

from tensorferry import _core
from tensorferry.errors import StorageError
from tensorferry.offload.absent import Forward, outside_of_graphs, question, recorded
from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.lending import GradientElsewhere, trim_heap
from tensorferry.offload.matching import WHOLE, told, users
from tensorferry.offload.plan import PACKED_NBYTES
from tensorferry.offload.slabs import slabs_of
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.offload.plan import Field
    from tensorferry.offload.slabs import Cycle, Slab

_REMEDY = (
    "the parameters of this model are on drives; to read or write those of a module, use `with "
    "optimizer.in_memory(module):`"
)


# The heap is trimmed each time this many bytes have been freed since it was last trimmed.
_TRIM_NBYTES = 32 << 20

# With step_in_backward=True, parameters with gradients are collected until they have this many bytes, or an eighth of
# the slabs' memory if that is less, and are then stepped together: each call of the optimizer has a fixed cost.
_EARLY_NBYTES = 64 << 20

_SECOND_ORDER = "gradients of gradients (create_graph=True) are impossible: they need parameters that have left memory"
_STEPPED = (
    "backward() belongs to a forward pass after which the parameters have changed, by a step of the optimizer or by a "
    "write; run the forward pass again"
)


class Step:
    """A module that runs with its parameters in memory.

    Attributes
    ----------
    number : int
        The index in :attr:`Plan.steps`.
    module : torch.nn.Module
        The module.
    name : str
        The module's name in the model, for messages.
    is_block : bool
        Whether the module is one of the user's blocks; then the modules below it belong to this step.
    slabs : list of Slab
        The slabs with the parameters that the module needs.
    stays : bool
        Whether these slabs are in memory during the whole training.
    """

    def __init__(self, number: int, module: nn.Module, name: str, *, is_block: bool) -> None:
        self.number = number
        self.module = module
        self.name = name
        self.is_block = is_block
        self.slabs: list[Slab] = []
        self.stays = False


class _Saved(NamedTuple):
    """A reference that autograd saves in place of a parameter or a view of it."""

    slab: Slab
    offset: int  # of the view's first element, in the slab's bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int  # of the slab when autograd saved the parameter


class _Call:
    """A call of a checkpointed block in the forward pass; the backward pass runs the block again.

    All autograd nodes that exist before the call have sequence numbers below ``sequence``.
    """

    def __init__(self, step: Step, sequence: int) -> None:
        self.step = step
        self.sequence = sequence
        self.versions = [slab.version for slab in step.slabs]
        #: None until the run in the forward pass is complete. Then the block's buffers with their values before that
        #: run, if it has changed any of them, else an empty list.
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] | None = None


class Plan:
    """The assignment of slabs to the modules of a model; it moves no data.

    Raises
    ------
    ValueError
        The model cannot be trained with these arguments.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]
    ) -> None:
        self.model = model
        self.names: dict[torch.Tensor, str] = {
            param: name for name, param in model.named_parameters()
        }
        names = {module: name for name, module in model.named_modules()}
        groups = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._check(groups)
        of_blocks = self._check_blocks(blocks, names)
        self.steps: list[Step] = []
        used: dict[torch.Tensor, list[int]] = {}
        holding: list[tuple[Step, list[nn.Module]]] = []
        for module, own, above in users(
            model, lambda each: each in of_blocks or isinstance(each, WHOLE)
        ):
            params: list[torch.Tensor] = [
                param for each in own for param in each._parameters.values() if param is not None
            ]
            if not params and module not in of_blocks:
                continue
            step = Step(
                len(self.steps), module, names[module] or "model", is_block=module in of_blocks
            )
            self.steps.append(step)
            holding.append((step, above))
            for param in dict.fromkeys(params):
                used.setdefault(param, []).append(step.number)
        keys = {
            param: (tuple(numbers), groups.get(param))
            for param, numbers in used.items()
            if param.numel()
        }
        self.slabs = slabs_of(keys, lambda param: param not in groups)
        self.of_params = [slab for slab in self.slabs if not slab.is_of_gradients]
        #: The slab of each parameter, and its field there.
        self.place_of: dict[torch.Tensor, tuple[Slab, Field]] = {}
        for slab in self.of_params:
            for param, field in slab.fields.items():
                self.place_of[param] = slab, field
        of_module = {step.module: step for step in self.steps}
        for step, above in holding:
            for param, numbers in used.items():
                if step.number in numbers and param in self.place_of:
                    slab, _ = self.place_of[param]
                    if slab not in step.slabs:
                        step.slabs.append(slab)
            # The modules in `above` contain this step's module. If such a module is itself a step, its forward() may
            # pass its own parameters to this step's module as arguments. So its slabs stay in memory.
            for module in above:
                if module in of_module:
                    of_module[module].stays = True
        self.staying = {slab for step in self.steps if step.stays for slab in step.slabs}

    @property
    def nbytes(self) -> int:
        """The memory for all slabs."""
        return sum(round_to_pages(slab.nbytes) for slab in self.slabs)

    def needed_nbytes(self, buckets: Sequence[Sequence[torch.Tensor]]) -> int:
        """Return the smallest sufficient memory for slabs.

        Each of ``buckets`` is a list of parameters that the optimizer steps together. The memory must hold the slabs
        that always stay, and those of the largest step or bucket, with gradients.
        """

        def both(slab: Slab) -> int:
            return round_to_pages(slab.nbytes) * (2 if slab.gradients is not None else 1)

        wanted = [step.slabs for step in self.steps]
        wanted += [
            [self.place_of[param][0] for param in params if param in self.place_of]
            for params in buckets
        ]
        at_once = max(sum(map(both, set(slabs) - self.staying)) for slabs in wanted)
        # Memory for two more of the largest slabs: one may be read and another one written at the same time. It also
        # lets the largest slab fit although the slabs that are held leave gaps between them.
        largest = max(both(slab) for slab in self.of_params)
        return min(sum(map(both, self.staying)) + at_once + 2 * largest, self.nbytes)

    def _check(self, groups: dict[torch.Tensor, int]) -> None:
        for param, name in self.names.items():
            if type(param) is not nn.Parameter:
                raise ValueError(
                    f"model: the parameter {name} is a {type(param).__name__}; only torch.nn.Parameter can be on drives"
                )
            if param.layout != torch.strided or param.is_quantized:
                raise ValueError(f"model: the parameter {name} is not a dense tensor")
            if param.requires_grad and param not in groups:
                raise ValueError(
                    f"model: the parameter {name} requires gradients, and the optimizer does not have it; give it to "
                    "the optimizer, or call requires_grad_(False)"
                )
        storages = {
            param.untyped_storage().data_ptr()
            for param in self.names
            if not param.is_meta and param.numel()
        }
        for prefix, module in self.model.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
                if plain and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    full_name = f"{prefix}.{name}" if prefix else name
                    raise ValueError(
                        f"model: the tensor {full_name} shares memory with a parameter; it would not follow the "
                        "parameter, which moves to a drive (remedy: clone it, or remove it)"
                    )
        for param, number in groups.items():
            if param not in self.names:
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(param.shape)} that is not the "
                    "model's"
                )

    def _check_blocks(
        self, blocks: Sequence[nn.Module], names: dict[nn.Module, str]
    ) -> set[nn.Module]:
        for number, block in enumerate(blocks):
            if not isinstance(block, nn.Module):
                raise TypeError(
                    f"blocks[{number}]: {type(block).__name__} is not a torch.nn.Module"
                )
            if block not in names:
                raise ValueError(
                    f"blocks[{number}]: this {type(block).__name__} is not in the model"
                )
            if block is self.model:
                raise ValueError(
                    f"blocks[{number}]: this is the whole model; pass its layers, because a block is entirely in "
                    "memory while it runs"
                )
        found = set(blocks)
        for block in blocks:
            inner = next(
                (each for each in block.modules() if each is not block and each in found), None
            )
            if inner is not None:
                raise ValueError(
                    f"blocks: {names[inner]} is within {names[block]}; pass only one of them"
                )
        return found


class Training:
    """Brings parameters into memory for the modules that run, and moves gradients into slabs, during a training.

    Parameters
    ----------
    plan : Plan
        The slabs of the model's steps.
    device : torch.device
        Where the model computes.
    checkpoint_activations : bool
        Whether blocks run again in the backward pass.
    """

    def __init__(self, plan: Plan, device: torch.device, *, checkpoint_activations: bool) -> None:
        self.plan = plan
        self.cycle: Cycle
        self.device = device
        self._checkpoints = checkpoint_activations
        self._hooks: list[Any] = []
        self.is_closed = False
        self._guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        # Steps that are running, the innermost last, each with its saved_tensors_hooks or None.
        self._forward: list[tuple[Step, Any]] = []
        self._runs = False  # whether a forward pass of the whole model is running
        self._open = False  # whether a step of the training has begun
        self._steps = 0  # complete steps of the training
        # Slabs that the backward pass holds, with sequence numbers: each slab until a node with a lower number runs.
        self._backward: dict[Slab, float] = {}
        self._in_backward = False
        self._graph = -1  # autograd's id of the backward pass
        self._thread: int | None = None  # the thread that ran the model last
        self._inside = 0  # how many methods of the optimizer are running, nested; see inside()
        self._stepping: list[Slab] = []  # slabs that the optimizer's step holds
        # For each slab, the number of buckets that still need it in the optimizer's current step.
        self._left: Counter[Slab] = Counter()
        #: Stand-ins for gradients, by parameter.
        self.gradients: dict[torch.Tensor, StoredGradient] = {}
        self._are_used = False  # whether the gradients belong to a step that is complete
        self._are_partial = False  # whether a backward pass has failed, and gradients are missing
        # Steps parameters in the backward pass; None if only the optimizer's step() steps them.
        self._step_early: Callable[[Sequence[torch.Tensor]], None] | None = None
        # Parameters that have got a gradient in this backward pass and were not stepped since (see `_step_arrived`).
        self._arrived: set[torch.Tensor] = set()
        self._freed_nbytes = 0  # bytes freed since the heap was trimmed
        #: The order p of the p-norms that are computed when gradients arrive (`_norms`), or None to compute none.
        self._norm_type: float | None = None
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        # The open held() context of each module into which load_state_dict() is loading.
        self._loading: dict[nn.Module, Any] = {}
        self._away = _class_of_away(self)  # the class of parameters that are not in memory
        # The data of parameters that are not in memory, by dtype: one NaN, which is expanded to their shapes.
        self._nans: dict[torch.dtype, torch.Tensor] = {}
        # The data of these parameters while a method of the optimizer runs (see inside()): tensors that have the
        # parameter's strides and no memory.
        self._hollow = {
            param: without_memory(field.shape, field.stride, field.dtype)
            for param, (_, field) in plan.place_of.items()
        }

    # Data of parameters

    def move(
        self,
        values: Callable[[torch.Tensor], torch.Tensor | None],
        guard: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Move all parameters into slabs.

        ``values`` returns the values of a parameter, or None if the parameter itself has them; ``guard`` is that of
        :meth:`take_over`.
        """
        moved: list[Slab] = []
        try:
            for slab in self.plan.of_params:
                moved.append(slab)
                if slab.source is None:
                    [memory] = self.cycle.hold([slab.index])
                    for param, field in slab.fields.items():
                        value = values(param)
                        field.view(memory).copy_(param.detach() if value is None else value)
                    self.cycle.mark_dirty(slab.index)
                with guard():
                    for param in slab.fields:
                        self._put_away(param)
                if slab.source is None:
                    value = None
                    self.cycle.release(slab.index, dirty=False)
                    self._note_freed(slab.nbytes)
        except BaseException:
            self.give_back(moved)
            raise

    def give_back(self, slabs: Sequence[Slab]) -> None:
        """Restore parameters of slabs to ordinary memory."""
        for slab in slabs:
            away = {param: each for param, each in slab.fields.items() if type(param) is self._away}
            if not away:
                continue
            [memory] = self.cycle.hold([slab.index])
            for param, field in away.items():
                param.__class__ = nn.Parameter
                param.data = field.view(memory).clone()
            self.cycle.release(slab.index, dirty=False)

    def take_over(
        self,
        guard: Callable[[], contextlib.AbstractContextManager[Any]],
        step_early: Callable[[Sequence[torch.Tensor]], None] | None,
    ) -> None:
        """Install the hooks that bring parameters to modules.

        Parameters
        ----------
        guard : callable
            Returns a context manager for changes that must not be interrupted.
        step_early : callable, optional
            Steps parameters that the backward pass no longer needs.
        """
        self._guard, self._step_early = guard, step_early
        # The hooks refer to this object weakly. A strong reference from a parameter's hook would close a reference
        # cycle that the garbage collector cannot see, and the model would never be freed.
        itself = weakref.ref(self)

        def take_gradient(param: torch.Tensor) -> None:
            there = itself()
            if there is not None:
                there._take_gradient(param)

        take: Any = outside_of_graphs(take_gradient)
        param: Any
        for param, (slab, _) in self.plan.place_of.items():
            if slab.gradients is not None:
                learns = param.requires_grad
                param.requires_grad_()  # needed to register the hook; the parameter may require gradients later
                self._hooks.append(param.register_post_accumulate_grad_hook(take))
                param.requires_grad_(learns)
        staying = list(self.plan.staying)
        memories = self.cycle.hold([slab.index for slab in staying])
        for slab, memory in zip(staying, memories, strict=True):
            slab.memory, slab.stays = memory, True
        for step in self.plan.steps:
            self._take_over_step(step)
        self._hooks.append(Forward(self.plan.model, self, self._run))
        for module in self.plan.model.modules():
            of_module: Any = module
            self._hooks += [
                of_module.register_state_dict_post_hook(functools.partial(self._fill_state_dict)),
                of_module.register_load_state_dict_pre_hook(self._before_load),
                of_module.register_load_state_dict_post_hook(self._after_load),
            ]

    def _take_over_step(self, step: Step) -> None:
        if step.module is self.plan.model:
            return  # `_run` brings the model's own parameters
        if step.is_block and self._checkpoints:
            run = functools.partial(self._run_block, step)
            self._hooks.append(Forward(step.module, self, run))
            return

        enter: Any = outside_of_graphs(lambda *_: self._enter(step))
        leave: Any = outside_of_graphs(lambda _, __, outputs: self._leave(step, outputs))
        self._hooks += [
            step.module.register_forward_pre_hook(enter, prepend=True),
            step.module.register_forward_hook(leave, always_call=True),
        ]

    def give_up(self) -> None:
        """Remove all hooks; parameters stay without data."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> NoReturn:
        """Raise: pickling or copying the model reaches this object through the model's hooks, and is impossible."""
        raise RuntimeError(f"the model cannot be saved or copied as a whole: {_REMEDY}")

    def _put_away(self, param: torch.Tensor) -> None:
        """Replace a parameter's data by a stand-in without values."""
        param.__class__ = nn.Parameter
        if self._inside:  # the optimizer's methods need the parameter's strides, but not its values
            param.data = self._hollow[param]
            return
        # Take dtype and shape from the plan: a user may have assigned data with others.
        _, field = self.plan.place_of[param]
        if field.dtype not in self._nans:
            value = math.nan if field.dtype.is_floating_point or field.dtype.is_complex else 0
            self._nans[field.dtype] = torch.full((), value, dtype=field.dtype, device=self.device)
        param.data = self._nans[field.dtype].expand(field.shape)
        param.__class__ = self._away

    def _hold(self, slabs: Sequence[Slab]) -> None:
        """Begin a hold of each slab. Bring slabs that were not held into memory, and give parameters their values."""
        new = [slab for slab in dict.fromkeys(slabs) if not slab.holds]
        come = [slab for slab in new if not slab.stays]
        for slab, memory in zip(come, self.cycle.hold([slab.index for slab in come]), strict=True):
            slab.memory = memory
        for slab in slabs:
            slab.holds += 1
        for slab in new:
            if not slab.is_of_gradients:
                self._give_values(slab)

    def _give_values(self, slab: Slab) -> None:
        here = slab.memory
        assert here is not None
        if self._inside:  # the optimizer's methods compute in host memory, on the slab itself
            pass
        elif self._computes_elsewhere():
            here = slab.on_device = torch.empty_like(here, device=self.device).copy_(
                here, non_blocking=True
            )
        else:  # a separate storage for the same bytes: its reference count shows whether other tensors use them
            here = slab.lent = torch.utils.dlpack.from_dlpack(here)
        for param, field in slab.fields.items():
            param.__class__ = nn.Parameter
            param.data = field.view(here)
        slab.versions = [param._version for param in slab.fields]

    def _computes_elsewhere(self) -> bool:
        """Return whether parameters are copied to a device other than the host."""
        return self.device.type != "cpu"

    def _let_go(self, slab: Slab) -> torch.Tensor | None:
        """End one hold of a slab. After the last one, its parameters have no values, and the slab may be evicted.

        If tensors other than the parameters still use the memory then, return it as a tensor, else None.
        """
        slab.holds -= 1
        if slab.holds:
            return None
        if not slab.is_of_gradients:
            # A forward() may write into parameters: nn.Embedding with max_norm does. The parameters' version counters
            # have changed then, and the new values are kept.
            if slab.versions != [param._version for param in slab.fields]:
                slab.written += 1
                self._keep_written(slab)
            for param in slab.fields:
                self._put_away(param)
        lent, slab.lent, slab.on_device = slab.lent, None, None
        if slab.stays:
            return None
        slab.memory = None
        self.cycle.release(slab.index, dirty=False)
        return lent if lent is not None and _users(lent) > 1 else None

    @contextlib.contextmanager
    def held(self, slabs: Sequence[Slab], *, written: bool = False) -> Iterator[None]:
        """Hold slabs in memory for the duration of a ``with`` block.

        With ``written``, the block may change their parameters, and the new values are kept.
        """
        is_held = has_begun = False
        in_files: dict[Slab, int] = {}
        try:
            with self._guard():  # a signal takes effect when this ends
                self._hold(slabs)
                for slab in slabs:
                    slab.kept += 1
                is_held = True
                if written:
                    in_files = {slab: _checksum(slab) for slab in slabs if slab.source is not None}
            has_begun = True
            yield
        finally:
            if is_held:
                with self._guard():
                    self._end_hold(slabs, in_files, written=written and has_begun)

    def _end_hold(self, slabs: Sequence[Slab], in_files: dict[Slab, int], *, written: bool) -> None:
        """End what :meth:`held` has begun; ``in_files`` has the checksums of slabs that are read from files."""
        # `refused` is raised at the end: even if one slab's change is refused, all slabs must be released, and the
        # changes of the others kept.
        refused: Exception | None = self._take_data(slabs) if written else None
        for slab in slabs:
            slab.kept -= 1
            if slab in in_files and _checksum(slab) != in_files[slab]:
                refused = refused or self._in_files(slab)
                assert slab.source is not None
                assert slab.memory is not None
                try:
                    slab.source(slab.memory).result()
                except StorageError as error:
                    refused = error
            elif written and slab.source is None:
                slab.version += 1
                self._keep_written(slab)
            self._let_go(slab)
        if refused is not None:
            raise refused

    def _take_data(self, slabs: Sequence[Slab]) -> Exception | None:
        """Copy tensors that a user has assigned to ``.data`` of parameters into the slabs.

        Return an exception if some of them cannot be copied, else None.
        """
        refused: Exception | None = None
        copies = []
        for slab in slabs:
            for param, field in slab.fields.items():
                data, view = param.data, field.view(slab.here)
                if (data.shape, data.dtype) != (view.shape, view.dtype):
                    refused = refused or ValueError(
                        f"{self.plan.names[param]}: its data must be {view.dtype} of shape {tuple(view.shape)} (got "
                        f"{data.dtype} of shape {tuple(data.shape)})"
                    )
                elif any(
                    getattr(data, name)() != getattr(view, name)()
                    for name in ("data_ptr", "stride", "is_conj", "is_neg")
                ):
                    if slab.source is not None:
                        refused = refused or self._in_files(slab)
                        continue
                    # The data may lie in a slab, for example that of another parameter, which one of these copies may
                    # overwrite. Clone such data before the first copy.
                    copies.append((view, data if self._slab_at(data) is None else data.clone()))
        for view, data in copies:
            view.copy_(data)
        return refused

    def _in_files(self, slab: Slab) -> RuntimeError:
        names = [self.plan.names[param] for param in slab.fields]
        return RuntimeError(
            f"{told(names)}: frozen parameters that are read from files= in each pass cannot be changed"
        )

    def _keep_changes(self) -> None:
        """Take changes that the callers of :meth:`held` have made so far into the slabs; their blocks continue."""
        slabs = [slab for slab in self.plan.of_params if slab.kept and slab.source is None]
        refused = self._take_data(slabs)
        if refused is not None:
            raise refused
        for slab in slabs:
            self._keep_written(slab)

    def _keep_written(self, slab: Slab) -> None:
        """Mark a held slab as modified; copy its bytes back from the device first if the model computes there."""
        if slab.source is not None:
            return  # these parameters are never written: each pass reads them from the user's files
        if slab.on_device is not None:
            assert slab.memory is not None
            slab.memory.copy_(slab.on_device)
        self.cycle.mark_dirty(slab.index)

    def slabs_below(self, module: nn.Module) -> list[Slab]:
        """Return the slabs of the parameters of a module and of the modules below it."""
        found = [
            self.plan.place_of[param][0]
            for param in module.parameters()
            if param in self.plan.place_of
        ]
        return list(dict.fromkeys(found))

    def _clean(self) -> None:
        """End an interrupted pass: release all slabs except those that held() still holds."""
        self._end_backward(failed=True)
        self._end_loading()
        for _, hooks in reversed(self._forward):
            if hooks is not None:
                hooks.__exit__(None, None, None)
        self._forward.clear()
        self._stepping.clear()
        for slab in self.plan.slabs:
            while slab.holds > slab.kept:
                self._let_go(slab)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Prepare parameters for methods of the optimizer, for the duration of a ``with`` block.

        They are plain ``nn.Parameter`` objects then; those that are not in memory have their shape and strides, and no
        values.
        """
        if not self._inside:
            # _renew() sets the data of all parameters again, and a tensor that a user has assigned would be lost.
            self._keep_changes()
        self._inside += 1
        if self._inside == 1:
            self._renew()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._renew()

    def _renew(self) -> None:
        """Set the data and class of all parameters again after ``_inside`` has changed."""
        for slab in self.plan.of_params:
            if slab.holds:
                self._give_values(slab)
            else:
                for param in slab.fields:
                    self._put_away(param)

    # Forward

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward pass of the model."""
        if self._runs:  # the model calls itself
            self._check_thread()
            return forward(*args, **kwargs)
        with contextlib.ExitStack() as undo:
            with self._guard():  # a signal takes effect when this ends
                self._check_thread()
                self._clean()
                self._begin(learns=torch.is_grad_enabled())
                undo.callback(self._end_run)
                self._runs, self._thread = True, threading.get_ident()
            for step in self.plan.steps:
                if step.module is self.plan.model:
                    return self._computed(step, forward, args, kwargs, notes=True)
            return forward(*args, **kwargs)

    def _end_run(self) -> None:
        self._runs = False
        # torch calls no hook of a module that Ctrl-C has interrupted.
        if self._forward and not self.is_closed:
            with self._guard():
                self._clean()

    def _check_thread(self) -> None:
        """Raise if another thread is running the model."""
        runs = self._runs or self._forward or self._in_backward
        if runs and self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "the model is in use in another thread, or a backward pass failed in that thread; only one thread at a "
                "time can run the model (remedy after a failure: optimizer.zero_grad())"
            )

    def _begin(self, *, learns: bool) -> None:
        """Begin a forward pass: set the order in which it is expected to use slabs.

        With ``learns`` gradients are enabled, and the pass belongs to a step of the training: it begins one, or is
        another micro-batch of it.
        """
        if not learns:
            self.cycle.expect("forward", [slab.index for slab in self.plan.of_params])
            return
        # The optimizer steps the buckets in alternating direction. So slabs are used in one order in even steps, and in
        # another one in odd steps.
        kind = "even" if self._steps % 2 == 0 else "odd"
        self.cycle.expect(kind, self.cycle.default, begin=not self._open)
        self._open = True

    def _enter(self, step: Step, *, notes: bool = True) -> None:
        """Bring a module's parameters into memory; with ``notes`` autograd saves references to them, not their data."""
        self._check_forward(step)
        with self._guard():
            self._check_thread()
            self._thread = threading.get_ident()
            self._hold(step.slabs)
            hooks: Any = None
            if notes and torch.is_grad_enabled():
                hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                hooks.__enter__()
            self._forward.append((step, hooks))

    def _leave(self, step: Step, outputs: Any) -> None:
        if not self._forward or self._forward[-1][0] is not step:
            return  # _enter() has raised or did not run, and has brought nothing into memory
        with self._guard():
            _, hooks = self._forward.pop()
            if hooks is not None:
                hooks.__exit__(None, None, None)
            kept = [memory for slab in step.slabs if (memory := self._let_go(slab)) is not None]
        # After an exception (outputs is None), the traceback keeps the module's local variables, which may be
        # parameters. That is no fault of the module, so do not check then.
        if outputs is not None and kept:
            gc.collect()
            if any(_users(memory) > 1 for memory in kept):
                raise RuntimeError(
                    f"{step.name}: {type(step.module).__name__} returns or keeps one of its parameters, or a view of "
                    "it, and that memory is reused after the module has run; make it copy the parameter, or pass the "
                    "module around it as a block"
                )

    def _slab_at(self, tensor: torch.Tensor) -> tuple[Slab, int] | None:
        """Return the slab that contains a tensor's memory, and the offset in it; None if no slab contains it."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        at = tensor.data_ptr()
        for slab in self.plan.of_params:  # slabs that stay have memory even when they are not held
            if slab.memory is not None and 0 <= at - slab.here.data_ptr() < slab.nbytes:
                return slab, at - slab.here.data_ptr()
        return None

    def _check_forward(self, step: Step) -> None:
        if recorded():
            raise RuntimeError(
                f"{step.name}: a model with parameters on drives cannot be traced or exported: the recording would "
                "use memory that is later reused"
            )
        if _node() is not None:
            raise RuntimeError(
                f"{step.name} runs in a backward pass: turn off the model's own activation checkpointing, and pass its "
                "layers to offload_training() as blocks"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{step.name}: torch.func cannot transform a model with parameters on drives"
            )

    def _run_block(self, step: Step, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, under torch's activation checkpointing if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self._computed(step, forward, args, kwargs, notes=False)
        self._check_forward(step)
        sequence: Any = torch._C._autograd._get_sequence_nr()
        call = _Call(step, sequence)
        outputs = checkpoint.checkpoint(
            functools.partial(self._run_in_block, call, forward, kwargs), *args, use_reentrant=False
        )
        for tensor in _tensors_in(outputs):
            if tensor.requires_grad:
                hooked: Any = tensor
                hooked.register_hook(_refuse_second_order)
        return outputs

    def _computed(
        self, step: Step, forward: Callable[..., Any], args: Any, kwargs: Any, *, notes: bool
    ) -> Any:
        """Run ``forward`` with the step's parameters in memory; ``notes`` is that of :meth:`_enter`."""
        self._enter(step, notes=notes)
        outputs: Any = None
        try:
            outputs = forward(*args, **kwargs)
            return outputs
        finally:
            self._leave(step, outputs)

    def _run_in_block(
        self, call: _Call, forward: Callable[..., Any], kwargs: Any, *args: Any
    ) -> Any:
        """Run a block: the first time in the forward pass, and then in each backward pass."""
        step = call.step
        if call.buffers is None:
            buffers = [
                (module, name, buffer)
                for module in step.module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.layout == torch.strided
            ]
            before = _copies([buffer for *_, buffer in buffers])
            versions = [slab.written for slab in step.slabs]
            outputs = self._computed(step, forward, args, kwargs, notes=False)
            if versions != [slab.written for slab in step.slabs]:
                raise RuntimeError(
                    f"{step.name}: forward() writes into its parameters, and would do so twice; remedy: "
                    "checkpoint_activations=False"
                )
            changed = any(
                module._buffers[name] is not buffer or not _equal(buffer, value)
                for (module, name, buffer), value in zip(buffers, before, strict=True)
            )
            call.buffers = [
                (module, name, value)
                for (module, name, _), value in zip(buffers, before, strict=True)
                if changed
            ]
            return outputs
        if _node() is None:
            raise RuntimeError(
                f"{step.name}: a saved tensor of this block (such as grad_fn._saved_self) was accessed outside of "
                "backward(); the activations of this block are checkpointed and exist only in backward()"
            )
        if call.versions != [slab.version for slab in step.slabs]:
            raise RuntimeError(f"{step.name}: {_STEPPED}")
        with self._guard():
            self._see_node()
            self._hold_in_backward(step.slabs, call.sequence)
        # Give the block the buffer values (such as running statistics) with which its first run began, and discard the
        # changes that this run makes: the first run has already made them.
        now = [(module, name, module._buffers[name]) for module, name, _ in call.buffers]
        try:
            values = _copies([value for *_, value in call.buffers])
            for (module, name, _), value in zip(call.buffers, values, strict=True):
                module._buffers[name] = value
            return forward(*args, **kwargs)
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves for a tensor: a reference if the tensor is in a slab."""
        # A lazy conjugate or negative has the slab's memory but other values than those there. Compute the values, and
        # save them in place of a reference.
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        found = self._slab_at(tensor)
        if found is None:
            # Autograd does not check the version of a tensor that hooks have packed, so _unpack() compares it.
            return tensor, tensor._version
        slab, offset = found
        return _Saved(*(slab, offset, tensor.shape, tensor.stride(), tensor.dtype, slab.version))

    def _unpack(self, saved: Any) -> Any:
        """Return the tensor for the object that :meth:`_pack` returned."""
        _refuse_second_order()
        if not isinstance(saved, _Saved):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "a tensor that is needed for gradients has been modified by an inplace operation: a tensor of "
                    f"shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor
        slab = saved.slab
        if saved.version != slab.version:
            raise RuntimeError(_STEPPED)
        with self._guard():
            is_asked_by_node = _node() is not None
            if is_asked_by_node:
                self._hold_in_backward([slab], self._see_node())
            else:
                self._hold([slab])
            elements = slab.here[saved.offset :]
            elements = elements[: len(elements) // saved.dtype.itemsize * saved.dtype.itemsize]
            tensor = elements.view(saved.dtype).as_strided(saved.shape, saved.stride)
            # If a user reads grad_fn._saved_self, no backward pass is running, and no node will end the hold. So return
            # a copy, and end the hold now.
            if not is_asked_by_node:
                tensor = tensor.clone()
                self._let_go(slab)
            return tensor

    # Backward

    def _see_node(self) -> float:
        """Release slabs that the backward pass no longer needs; return the sequence number of the node that runs.

        A slab in ``_backward`` is needed by nodes with its sequence number or higher ones. The nodes that still have to
        run have lower numbers than the running one, because autograd runs the newest nodes first.
        """
        self._begin_backward()
        sequence: float = _node()._sequence_nr()
        for slab, since in list(self._backward.items()):
            if since > sequence:
                del self._backward[slab]
                self._let_go(slab)
        self._step_arrived()
        return sequence

    def _step_arrived(self) -> None:
        """Step parameters that have their gradients and that the backward pass no longer needs, many at a time."""
        if self._step_early is None:
            return
        nbytes = sum(param.nbytes for param in self._arrived)
        if self._in_backward and nbytes < min(_EARLY_NBYTES, self.cycle.nbytes // 8):
            return
        done = [
            param for param in self._arrived if self._is_done_with(self.plan.place_of[param][0])
        ]
        if done:
            self._arrived.difference_update(done)
            self._step_early(done)

    def _is_done_with(self, slab: Slab) -> bool:
        """Return whether the backward pass neither holds a slab nor will still compute gradients for it."""
        return slab not in self._backward and all(
            param in self.gradients for param in slab.fields if param.requires_grad
        )

    def _hold_in_backward(self, slabs: Sequence[Slab], since: float) -> None:
        """Hold slabs until a node with a sequence number below ``since`` runs."""
        self._hold([slab for slab in slabs if slab not in self._backward])
        for slab in slabs:
            self._backward[slab] = min(self._backward.get(slab, math.inf), since)

    def _begin_backward(self) -> None:
        """Begin a backward pass unless it has begun already; raise if another one is incomplete."""
        graph: Any = torch._C._current_graph_task_id()
        if self._in_backward:
            if graph != self._graph:
                self._are_partial = True
                raise RuntimeError(
                    "a backward pass has begun before the previous one was complete: only one at a time is possible; "
                    "optimizer.zero_grad() ends a failed one"
                )
            return
        self._check_thread()
        if self._step_early is not None and self.gradients:
            raise RuntimeError(
                "step_in_backward=True: call step() and zero_grad() of the optimizer after each backward()"
            )
        if self._are_used:
            raise RuntimeError(
                "gradients of the previous step have been released: call optimizer.zero_grad() before backward()"
            )
        self._in_backward, self._graph = True, graph
        self._thread = threading.get_ident()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._ended, weakref.ref(self)))

    @staticmethod
    def _ended(training: weakref.ref[Training]) -> None:
        there = training()
        if there is not None:
            with there._guard():
                there._end_backward(failed=False)

    def _end_backward(self, *, failed: bool) -> None:
        """End the backward pass, if one has begun, and release its slabs."""
        if not self._in_backward:
            return
        self._in_backward = False
        self._are_partial |= failed
        held, self._backward = self._backward, {}
        for slab in held:
            self._let_go(slab)
        if not failed:
            self._step_arrived()
        self._arrived.clear()

    @torch.no_grad()
    def _take_gradient(self, param: torch.Tensor) -> None:
        """Move the gradient that autograd has accumulated in a parameter into its slab, or add it to the one there."""
        grad = _taken_gradient(param)
        if grad is None:
            return
        slab, field = self.plan.place_of[param]
        gradients = slab.gradients
        name = self.plan.names[param]
        if gradients is None:
            raise RuntimeError(
                f"{name} has a gradient, but the optimizer does not have the parameter"
            )
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name} has a sparse gradient; only dense ones are supported (remedy: sparse=False in nn.Embedding)"
            )
        if grad.requires_grad:
            raise RuntimeError(f"{name}: {_SECOND_ORDER}")
        with self._guard():
            self._begin_backward()
            self._hold([gradients])
            try:
                self._settle(gradients)
                view = field.view(gradients.here)
                if param in self.gradients:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
                self.cycle.mark_dirty(gradients.index)
                self._norms.pop(param, None)
                if self._norm_type is not None:
                    self._norms[param] = torch.linalg.vector_norm(view, self._norm_type)
                self.gradients[param] = StoredGradient.of(self, param)
                self._arrived.add(param)
            finally:
                self._let_go(gradients)
            nbytes = grad.nbytes
            del grad
            self._note_freed(nbytes)

    def _note_freed(self, nbytes: int) -> None:
        """Count freed bytes, and trim the heap after each :data:`_TRIM_NBYTES` of them.

        glibc does not return freed blocks that are between used ones to the system until the heap is trimmed.
        """
        self._freed_nbytes += nbytes
        if self._freed_nbytes >= _TRIM_NBYTES:
            self._freed_nbytes = 0
            trim_heap()

    def forget_gradients(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Discard the gradients of parameters, or all gradients."""
        self._end_backward(failed=True)
        forgotten = list(self.gradients) if params is None else list(params)
        for param in forgotten:
            self.gradients.pop(param, None)
            self._norms.pop(param, None)
        for slab in dict.fromkeys(self.plan.place_of[param][0] for param in forgotten):
            if slab.gradients is not None and not self.gradients.keys() & slab.fields.keys():
                slab.gradients.pending.clear()
                self.cycle.drop(slab.gradients.index)
        if not self.gradients:
            self._are_used = self._are_partial = False

    @property
    def are_partial(self) -> bool:
        """Whether a backward pass is incomplete."""
        return self._are_partial or self._in_backward

    def check_gradients(self) -> None:
        """Raise if gradients are incomplete, or belong to a step that is already complete."""
        self._end_backward(failed=True)
        if self._are_partial:
            raise RuntimeError(
                "a backward pass failed, and gradients are incomplete: call optimizer.zero_grad() and repeat the passes"
            )
        if self._are_used:
            raise RuntimeError(
                "gradients of the previous step have been released: call optimizer.zero_grad() and backward() before "
                "step()"
            )

    def _settle(self, gradients: Slab) -> None:
        """Apply the pending changes of a slab of gradients, which is held."""
        if not gradients.pending:
            return
        self.cycle.mark_dirty(gradients.index)
        views = self._views(gradients)
        while gradients.pending:
            change, params = gradients.pending[0]
            if chosen := [view for param, view in views.items() if param in params]:
                change(chosen)
            # Delete the change now: if a later one raises, a retry must not make this one again.
            del gradients.pending[0]

    def _views(self, gradients: Slab) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients in a held slab, by parameter."""
        return {
            param: field.view(gradients.here)
            for param, field in gradients.fields.items()
            if param in self.gradients
        }

    def _slabs_of_gradients(self, params: Iterable[torch.Tensor]) -> list[Slab]:
        """Return the slabs that contain the gradients of parameters."""
        found = (self.plan.place_of[param][0].gradients for param in params)
        return list(dict.fromkeys(slab for slab in found if slab is not None))

    def _read(self, slabs: Iterable[Slab]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Bring gradients into memory, slab by slab, with pending changes applied."""
        for slab in slabs:
            with self.held([slab]):
                self._settle(slab)
                yield self._views(slab)

    def change_gradients(
        self,
        change: Callable[[list[torch.Tensor]], object],
        params: Iterable[torch.Tensor] | None = None,
    ) -> None:
        """Schedule a change of the gradients of ``params``, or of all, for the next time when they are in memory."""
        if self._step_early is not None:
            raise RuntimeError(
                "step_in_backward=True: parameters are already stepped, and gradients cannot be clipped or unscaled"
            )
        changed = set(self.gradients if params is None else params)
        for slab in self._slabs_of_gradients(changed):
            slab.pending.append((change, changed))
        self._norms.clear()

    @torch.no_grad()
    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Return norms of gradients. Those that were not computed when the gradients arrived need reads of these.

        The norm is None for parameters without elements: they are in no slab.
        """
        if self._norm_type != norm_type:
            self._norm_type = norm_type
            self._norms.clear()
        lacking = [param for param in self.gradients if param not in self._norms]
        for views in self._read(self._slabs_of_gradients(lacking)):
            for param, view in views.items():
                if param not in self._norms:
                    self._norms[param] = torch.linalg.vector_norm(view, norm_type)
        return [self._norms.get(param) for param in params]

    @torch.no_grad()
    def unscale(
        self, params: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Do what ``torch._amp_foreach_non_finite_check_and_unscale_`` does, for gradients on drives."""
        # The norms are computed to find infinite elements. Norms of an order that is not positive may be finite in
        # spite of infinite elements, so use the 2-norm instead of these.
        kind = self._norm_type or 0.0
        norms = self.norms(params, kind if kind > 0 else 2.0)
        scale = inv_scale.detach().clone()

        def unscaled(views: list[torch.Tensor]) -> None:
            found = torch.zeros((), device=views[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(views, found, scale.to(found.device))

        # If all norms are finite, all elements are, too. If one is not, its elements may still be finite, because the
        # norm may exceed the range of its dtype. Then read the gradients to find out.
        if not all(norm is None or norm.isfinite().item() for norm in norms):
            for views in self._read(self._slabs_of_gradients(params)):
                if not all(view.isfinite().all() for view in views.values()):
                    found_inf.fill_(1.0)
        if scale.item() != 1.0:
            # Not all gradients, only these: GradScaler calls this method once for each dtype.
            self.change_gradients(unscaled, params)

    # The optimizer's step

    def lent_gradient(self, param: torch.Tensor) -> GradientElsewhere:
        """Return the object through which the lender gets a gradient.

        When the lender gets it, the slab with the gradient must be in memory: the gradient is a view of it.
        """
        slab, field = self.plan.place_of[param]
        gradients = slab.gradients
        assert gradients is not None
        return GradientElsewhere(self.gradients[param], None, lambda: field.view(gradients.here))

    def begin_step(
        self, buckets: Sequence[Sequence[torch.Tensor]], *, in_backward: bool = False
    ) -> None:
        """Prepare the optimizer's step; ``buckets`` are the parameters of all buckets that it has not stepped yet.

        With ``in_backward``, the step begins during the backward pass, and gradients will still arrive.
        """
        if not in_backward:
            self._clean()
        self._left = Counter(
            slab for params in buckets for slab in self._wanted(params, expected=in_backward)
        )

    def _wanted(self, params: Iterable[torch.Tensor], *, expected: bool = False) -> list[Slab]:
        """Return the slabs of parameters, and of those gradients that exist or are expected."""
        wanted: dict[Slab, None] = {}
        for param in params:
            if param in self.plan.place_of:
                slab, _ = self.plan.place_of[param]
                wanted[slab] = None
                if slab.gradients is not None and (expected or param in self.gradients):
                    wanted[slab.gradients] = None
        return list(wanted)

    def bring(self, params: Iterable[torch.Tensor] | None) -> None:
        """Bring a bucket's parameters and gradients into memory, and release those of the bucket before.

        With None, release the parameters and gradients of all buckets: the optimizer's step is over, or has failed, or
        (with ``step_in_backward``) continues when the backward pass has computed more gradients.
        """
        wanted = [] if params is None else self._wanted(params)
        if params is not None:
            self._left.subtract(self._stepping)
        for slab in [slab for slab in self._stepping if slab not in wanted]:
            self._stepping.remove(slab)
            self._let_go(slab)
            # Gradients that no remaining bucket needs are dropped without a write. With params=None they are kept:
            # after a failure, retry() needs them, and otherwise end_step() drops them.
            if slab.is_of_gradients and not self._left[slab] and params is not None:
                self.cycle.drop(slab.index)
        new = [slab for slab in wanted if slab not in self._stepping]
        self._hold(new)
        self._stepping += new
        for slab in wanted:
            if slab.is_of_gradients:
                self._settle(slab)
            else:
                slab.version += 1
                self.cycle.mark_dirty(slab.index)

    def end_step(self) -> None:
        """End a step and drop its gradients; their stand-ins stay until zero_grad()."""
        self._are_used = bool(self.gradients)
        for slab in self.plan.slabs:
            if slab.is_of_gradients:
                slab.pending.clear()
                self.cycle.drop(slab.index)
        self._norms.clear()
        self._steps += 1
        self._open = False

    # State dicts

    def _fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        for name, param in module._parameters.items():
            if param is None or state.get(prefix + name) is None or param not in self.plan.place_of:
                continue
            state[prefix + name] = self.values_of(param)

    @torch.no_grad()
    def values_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values: large ones mapped from the store as a snapshot, small ones as a copy."""
        slab, field = self.plan.place_of[param]
        with self._guard():
            self._keep_changes()
        if slab.source is None and field.nbytes >= PACKED_NBYTES:
            with self._guard():
                self.cycle.flush()
            mapped = slab.store.map([(slab.name, field.offset, field.nbytes)])
            return torch.frombuffer(mapped, dtype=field.dtype).as_strided(field.shape, field.stride)
        with self.held([slab]):
            assert slab.memory is not None
            return field.view(slab.memory).clone()

    # load_state_dict() assigns to the parameters of one module at a time, between these two hooks.

    def _before_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        # Check the parameters of the modules below, too. torch loads these modules between the two hooks of this one.
        # If a hook of a module below raised, the parameters of this module would stay held.
        slab_of = {
            name: self.plan.place_of[param][0]
            for name, param in module.named_parameters(remove_duplicate=False)
            if param in self.plan.place_of and prefix + name in state
        }
        if slab_of and (metadata or {}).get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict: assign=True would put the parameters into memory; leave it out"
            )
        for name, slab in slab_of.items():
            if slab.source is not None:
                owner = (prefix + name).rpartition(".")[0] or "the model"
                raise RuntimeError(
                    f"load_state_dict: the frozen parameters of {owner} are read from files= in each pass and cannot "
                    "be replaced"
                )
        slabs = [slab_of[name] for name in module._parameters if name in slab_of]
        if module in self._loading:
            self._end_loading()
        if slabs:
            loading = self.held(list(dict.fromkeys(slabs)), written=True)
            loading.__enter__()
            self._loading[module] = loading

    def _end_loading(self) -> None:
        """Release the parameters of modules into which a load_state_dict() that has raised was loading."""
        while self._loading:
            _, loading = self._loading.popitem()
            loading.__exit__(None, None, None)

    def _after_load(self, module: nn.Module, _: Any) -> None:
        loading = self._loading.pop(module, None)
        if loading is not None:
            loading.__exit__(None, None, None)


class StoredGradient(torch.Tensor):
    """A stand-in for a gradient on a drive: it has shape, dtype and device, and no values."""

    _training: weakref.ref[Training]
    _param: torch.Tensor

    @staticmethod
    def of(training: Training, param: torch.Tensor) -> StoredGradient:
        """Return a new stand-in for a parameter's gradient."""
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Any = make(StoredGradient, param.shape, dtype=param.dtype, device=training.device)
        found._training, found._param = weakref.ref(training), param
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Perform operations that need only metadata, let GradScaler unscale, and raise for all others."""
        name, asked, is_attribute = question(func)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            gradients, found_inf, inv_scale = args
            # Gradients without elements are in no slab.
            stored = [each for each in gradients if isinstance(each, StoredGradient)]
            training = stored[0]._training()
            if training is not None:
                training.unscale([each._param for each in stored], found_inf, inv_scale)
            return None
        if not asked or (is_attribute and (len(args) > 1 or name == "data")):
            raise RuntimeError(
                f"this gradient is on a drive, and {name} needs its values: use clip_grad_norm_(), clip_grad_value_() "
                "and zero_grad() of the optimizer that offload_training() returned"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise for operations that do not go through ``__torch_function__``."""
        raise RuntimeError(f"this gradient is on a drive, and {func} needs its values")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient on a drive: {list(self.shape)}, {self.dtype}>"


# Methods and attributes that work as usual without a parameter's values.
_HARMLESS = {
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_"),
    *("retain_grad", "retains_grad"),
}


# Conversions that are allowed if they change neither dtype nor device, such as `model.to(device)` for the same device.
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}


def _class_of_away(training: Training) -> type[nn.Parameter]:
    """Return the class of parameters while their values are on a drive."""
    of_training = weakref.ref(training)

    class Away(nn.Parameter):
        @property
        def grad(self) -> Any:
            there = of_training()
            return None if there is None else there.gradients.get(self)

        @grad.setter
        def grad(self, value: Any) -> None:
            there = of_training()
            if value is not None:
                raise RuntimeError(f"a gradient on a drive cannot be set: {_REMEDY}")
            if there is not None:
                with there._guard():
                    there.forget_gradients([self])

        def stride(self, dim: int | None = None) -> Any:
            there = of_training()
            strides = (
                there.plan.place_of[self][1].stride if there is not None else (0,) * self.dim()
            )
            return strides if dim is None else strides[dim]

        def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
            like = torch.empty_strided(self.shape, self.stride(), device="meta")
            return like.is_contiguous(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> NoReturn:
            raise RuntimeError(
                f"a parameter that is on a drive cannot be saved or copied: {_REMEDY}"
            )

        def __deepcopy__(self, memo: Any) -> NoReturn:
            self.__reduce_ex__(None)

        @classmethod
        def __torch_function__(
            cls,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            name, asked, is_attribute = question(func)
            first = args[0] if args else None
            with torch._C.DisableTorchFunctionSubclass():
                if isinstance(first, Away) and name in _HARMLESS:
                    return func(*args, **(kwargs or {}))
                if isinstance(first, Away) and is_attribute and name == "data":
                    if len(args) == 1 or args[1] is first:
                        return first
                elif isinstance(first, Away) and name == "detach":
                    return first  # state_dict() detaches parameters; _fill_state_dict() then puts the values there
                elif isinstance(first, Away) and name in _CONVERSIONS:
                    like = torch.empty(0, dtype=first.dtype, device=first.device)
                    then = getattr(like, name)(*args[1:], **(kwargs or {}))
                    if (then.dtype, then.device) == (like.dtype, like.device):
                        return first
                elif asked and (not is_attribute or len(args) == 1):
                    return func(*args, **(kwargs or {}))
            there = of_training()
            if there is None or there.is_closed:
                raise RuntimeError(f"{name}: the training with this parameter's values is closed")
            names: dict[Any, str] = there.plan.names
            found = next(
                (each for each in _tensors_in((args, kwargs)) if isinstance(each, Away)), None
            )
            raise RuntimeError(
                f"the parameter {names.get(found, '')} is on a drive, and {name} needs its values: {_REMEDY}. If a "
                "module's forward() uses parameters of modules below it, pass that module to offload_training() in "
                "blocks="
            )

        def __repr__(self) -> str:  # type: ignore[override]
            return f"<a parameter on a drive: {list(self.shape)}, {self.dtype}>"

    return Away


def _node() -> Any:
    """Return the autograd node that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def _refuse_second_order(*_: Any) -> None:
    # While autograd runs the nodes of a backward pass, gradients are enabled only with create_graph=True, which records
    # the operations of these nodes for a second backward pass.
    if torch.is_grad_enabled() and _node() is not None:
        raise RuntimeError(_SECOND_ORDER)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors. Copies of tensors that share a storage share one, too."""
    storages: dict[int, torch.UntypedStorage] = {}
    made = []
    for tensor in tensors:
        plain, storage = tensor.detach(), tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            copying: Any = storage
            storages[storage.data_ptr()] = copying.clone()
        copied: Any = torch.empty(0, dtype=plain.dtype, device=plain.device)
        place = plain.storage_offset(), plain.shape, plain.stride()
        made.append(copied.set_(storages[storage.data_ptr()], *place))
    return made


def _users(memory: torch.Tensor) -> int:
    """Return the number of tensors that use a tensor's storage."""
    count: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return count - 1  # the Python object of the storage has one reference


def _checksum(slab: Slab) -> int:
    return _core.crc32(slab.here.cpu().numpy())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == 0 or torch.equal(tensor_bytes(one), tensor_bytes(other))


def _taken_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Remove the gradient that autograd has accumulated in a parameter, and return it."""
    # Use the property of torch's base class, because the class of a parameter on a drive overrides `grad`.
    own: Any = torch._C.TensorBase.grad
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = own.__get__(param)
        own.__set__(param, None)
    return grad


def without_memory(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory; an access to its elements ends the process."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    leaves = _pytree.tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
