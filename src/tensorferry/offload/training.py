"""A model whose parameters and gradients are on drives while it is trained.

Parameters are the user's own objects all the time; only what they hold comes and goes. Away from memory a parameter
holds one NaN in its shape, and its class refuses whatever asks for values. A *step* is a module that runs with its
parameters in memory: one of the user's blocks with all that is below it, or a module with parameters of its own.

Forward, a step's slabs are held while it runs. What autograd saves of a step that is not checkpointed is replaced by a
note of slab and place (``saved_tensors_hooks``), which is looked up again in the backward pass. A block that is
checkpointed runs again there, by torch's own function, and its slabs are held until its backward pass is over. That is
known from sequence numbers: autograd runs the nodes of a graph that were made last first, so once a node that is older
than a block's first runs, all nodes of the block have (torch/csrc/autograd/engine.h, ``ReadyQueue``).

Gradients are taken as soon as autograd has accumulated them, into slabs of their own.
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

from tensorferry.offload.absent import Forward, outside_of_graphs, question, recorded
from tensorferry.offload.lending import GradientElsewhere, trim_heap
from tensorferry.offload.matching import WHOLE, users
from tensorferry.offload.plan import PACKED_NBYTES, paged
from tensorferry.offload.slabs import slabs_of
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.offload.plan import Field
    from tensorferry.offload.slabs import Cycle, Slab

_REMEDY = (
    "the model is trained with its parameters on drives; optimizer.in_memory(module) has those of a module in memory "
    "for a while"
)


# So many bytes that have been freed may add up in the heap.
_TRIM_NBYTES = 32 << 20

# Early steps are for so many bytes of parameters, if not for an eighth of what slabs have: each has its costs.
_EARLY_NBYTES = 64 << 20

_SECOND_ORDER = "gradients of gradients (create_graph=True) cannot be had: they need parameters that have left memory"
_STEPPED = "the optimizer has stepped since the forward pass whose gradients are asked for"


class Step:
    """A module that runs with its parameters in memory."""

    def __init__(self, number: int, module: nn.Module, name: str, *, is_block: bool) -> None:
        self.number = number
        self.module = module
        self.name = name
        self.is_block = is_block
        self.slabs: list[Slab] = []
        self.stays = False


class _Saved(NamedTuple):
    """What autograd has in the place of a parameter, or of a view of one, that it has saved."""

    slab: Slab
    offset: int  # in the slab's bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int  # of the slab


class _Call:
    """One run of a checkpointed block, before which no node of a graph has a number from ``sequence`` on."""

    def __init__(self, step: Step, sequence: int) -> None:
        self.step = step
        self.sequence = sequence
        self.versions = [slab.version for slab in step.slabs]
        #: Buffers that it has changed, with what they were before.
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] | None = None


class Plan:
    """Which modules of a model want which slabs; nothing is moved here.

    Raises
    ------
    ValueError
        The model, or what is asked for it, cannot be trained so.
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
        #: The parameters' slabs, and where in them each is.
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
            # What has steps below it may hand its parameters on to these.
            for module in above:
                if module in of_module:
                    of_module[module].stays = True
        self.staying = {slab for step in self.steps if step.stays for slab in step.slabs}

    @property
    def nbytes(self) -> int:
        """Bytes of memory in which all slabs fit."""
        return sum(paged(slab.nbytes) for slab in self.slabs)

    def needed_nbytes(self, buckets: Sequence[Sequence[torch.Tensor]]) -> int:
        """Return how much memory slabs need at least; ``buckets`` are parameters that are stepped together."""

        def both(slab: Slab) -> int:
            return paged(slab.nbytes) * (2 if slab.gradients is not None else 1)

        wanted = [step.slabs for step in self.steps]
        wanted += [
            [self.place_of[param][0] for param in params if param in self.place_of]
            for params in buckets
        ]
        at_once = max(sum(map(both, set(slabs) - self.staying)) for slabs in wanted)
        # One is on its way in and one out; what is held must not leave gaps that are too small for the largest.
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
                    raise ValueError(
                        f"model: {prefix}.{name} shares memory with a parameter, which will be elsewhere"
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
                    f"blocks[{number}]: it is the model itself, which would be in memory whole"
                )
        found = set(blocks)
        for block in blocks:
            inner = next(
                (each for each in block.modules() if each is not block and each in found), None
            )
            if inner is not None:
                raise ValueError(
                    f"blocks: {names[inner]} is within {names[block]}; give one of both"
                )
        return found


class Training:
    """What brings parameters to modules, and takes gradients, while a model is trained.

    Parameters
    ----------
    plan : Plan
        What goes where.
    device : torch.device
        Where the model computes.
    checkpoint_activations : bool
        Whether blocks run again in the backward pass.
    """

    def __init__(self, plan: Plan, device: torch.device, *, checkpoint_activations: bool) -> None:
        self.plan = plan
        self.cycle: Cycle
        self._device = device
        self._checkpoints = checkpoint_activations
        self._hooks: list[Any] = []
        self.is_closed = False
        self._guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._forward: list[tuple[Step, Any]] = []  # steps that run, the innermost last
        self._runs = False  # a pass of the whole model
        self._open = False  # a step of the training has begun
        self._steps = 0
        self._backward: dict[Slab, float] = {}  # what the backward pass holds, and since which node
        self._in_backward = False
        self._graph = -1  # the engine's number of the backward pass
        self._thread: int | None = None  # the last one that has run the model
        self._inside = 0  # methods of the optimizer that run
        self._stepping: list[Slab] = []  # what the optimizer's step holds
        self._left: Counter[Slab] = Counter()  # buckets to be stepped that want a slab
        #: What stands for gradients, by parameter.
        self.gradients: dict[torch.Tensor, StoredGradient] = {}
        self._are_used = False  # they are those of a step that is over
        self._are_partial = False  # a backward pass has failed
        self._step_early: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._arrived: set[torch.Tensor] = set()  # gradients that are to be stepped early
        self._freed_nbytes = 0  # since the heap was trimmed
        #: Of the norms that are taken of gradients when they come.
        self._norm_type: float | None = None
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._loading: dict[nn.Module, Any] = {}
        self._away = _class_of_away(self)
        self._nans: dict[torch.dtype, torch.Tensor] = {}
        self._hollow = {
            param: without_memory(field.shape, field.stride, field.dtype)
            for param, (_, field) in plan.place_of.items()
        }

    # What parameters hold

    def move(self, values: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Put parameters into their slabs: ``values`` returns those of one, None where it has them itself."""
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
                for param in slab.fields:
                    self._put_away(param)
                if slab.source is None:
                    value = None
                    self.cycle.release(slab.index, dirty=False)
                    self._note_freed(slab.nbytes)
        except BaseException:
            self.give_back(moved[:-1])
            raise

    def give_back(self, slabs: Sequence[Slab]) -> None:
        """Have parameters in memory again, outside of slabs."""
        for slab in slabs:
            [memory] = self.cycle.hold([slab.index])
            for param, field in slab.fields.items():
                param.__class__ = nn.Parameter
                param.data = field.view(memory).clone()
            self.cycle.release(slab.index, dirty=False)

    def take_over(
        self,
        guard: Callable[[], contextlib.AbstractContextManager[Any]],
        step_early: Callable[[Sequence[torch.Tensor]], None] | None,
    ) -> None:
        """Have modules bring their parameters, which are away otherwise.

        Parameters
        ----------
        guard : callable
            Returns a context for what must not be left half done.
        step_early : callable, optional
            Steps parameters with which the backward pass is done.
        """
        self._guard, self._step_early = guard, step_early
        itself = weakref.ref(self)  # autograd keeps hooks where no collector of garbage looks

        def take_gradient(param: torch.Tensor) -> None:
            there = itself()
            if there is not None:
                there._take_gradient(param)

        take: Any = outside_of_graphs(take_gradient)
        param: Any
        for param, (slab, _) in self.plan.place_of.items():
            if slab.gradients is not None:
                learns = param.requires_grad
                param.requires_grad_()  # it may later: torch takes hooks for such alone
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
            return  # `_run` brings its parameters
        if step.is_block and self._checkpoints:
            run = functools.partial(self._run_block, step)
            self._hooks.append(Forward(step.module, self, run))
            return

        def enter(*_: Any) -> None:
            self._enter(step)

        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            self._leave(step, outputs)

        self._hooks += [
            step.module.register_forward_pre_hook(outside_of_graphs(enter), prepend=True),
            step.module.register_forward_hook(outside_of_graphs(leave), always_call=True),
        ]

    def give_up(self) -> None:
        """Take all hooks away; parameters stay away from memory."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, and with it the model."""
        raise RuntimeError(f"the model cannot be saved or copied as a whole: {_REMEDY}")

    def _put_away(self, param: torch.Tensor) -> None:
        """Have no values in a parameter."""
        param.__class__ = nn.Parameter
        if self._inside:  # its strides are asked for; nobody computes with it
            param.data = self._hollow[param]
            return
        if param.dtype not in self._nans:
            value = math.nan if param.is_floating_point() or param.is_complex() else 0
            nan = torch.full((), value, dtype=param.dtype, device=self._device)
            self._nans[param.dtype] = nan
        param.data = self._nans[param.dtype].expand(param.shape)
        param.__class__ = self._away

    def _hold(self, slabs: Sequence[Slab]) -> None:
        """Have slabs in memory, and parameters with their values."""
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
        if self._inside:
            pass
        elif self._computes_elsewhere():
            here = slab.on_device = torch.empty_like(here, device=self._device).copy_(
                here, non_blocking=True
            )
        else:  # with a count of its own, of those that have it
            here = slab.lent = torch.utils.dlpack.from_dlpack(here)
        for param, field in slab.fields.items():
            param.__class__ = nn.Parameter
            param.data = field.view(here)
        slab.versions = [param._version for param in slab.fields]

    def _computes_elsewhere(self) -> bool:
        """Return whether parameters are copied to the device of the model, which is not the host."""
        return self._device.type != "cpu"

    def _let_go(self, slab: Slab) -> torch.Tensor | None:
        """Hold a slab once less; return its memory, which others will get, if something else still has that."""
        slab.holds -= 1
        if slab.holds:
            return None
        if not slab.is_of_gradients:
            # A forward() may write into parameters: nn.Embedding with max_norm does.
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
        """Have slabs in memory for a while."""
        with self._guard():
            self._hold(slabs)
            for slab in slabs:
                slab.kept += 1
        try:
            yield
        finally:
            with self._guard():
                for slab in slabs:
                    slab.kept -= 1
                    if written:
                        slab.version += 1
                        self._take_data(slab)
                        self._keep_written(slab)
                    self._let_go(slab)

    def _take_data(self, slab: Slab) -> None:
        """Put into a slab what parameters have been given as ``.data``."""
        for param, field in slab.fields.items():
            data, view = param.data, field.view(slab.here)
            if data.data_ptr() == view.data_ptr():
                continue
            if (data.shape, data.dtype) != (view.shape, view.dtype):
                raise ValueError(
                    f"{self.plan.names[param]}: other data is {data.dtype} of shape {tuple(data.shape)}, and the "
                    f"parameter is {view.dtype} of shape {tuple(view.shape)}"
                )
            view.copy_(data)

    def _keep_written(self, slab: Slab) -> None:
        if slab.on_device is not None:
            assert slab.memory is not None
            slab.memory.copy_(slab.on_device)
        self.cycle.mark_dirty(slab.index)

    def slabs_below(self, module: nn.Module) -> list[Slab]:
        """Return the slabs of a module's parameters, and those of modules below it."""
        found = [
            self.plan.place_of[param][0]
            for param in module.parameters()
            if param in self.plan.place_of
        ]
        return list(dict.fromkeys(found))

    def _clean(self) -> None:
        """Let go of what was held by something that was interrupted."""
        self._end_backward(failed=True)
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
        """Have parameters as the optimizer's methods want them: plain, those away with strides and without memory."""
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
        for slab in self.plan.of_params:
            if slab.holds:
                self._give_values(slab)
            else:
                for param in slab.fields:
                    self._put_away(param)

    # Forward

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a forward pass of the model."""
        if self._runs:  # the model calls itself
            self._check_thread()
            return forward(*args, **kwargs)
        with self._guard():
            self._check_thread()
            self._clean()
            self._begin(learns=torch.is_grad_enabled())
            self._runs, self._thread = True, threading.get_ident()
        try:
            for step in self.plan.steps:
                if step.module is self.plan.model:
                    return self._computed(step, forward, args, kwargs, notes=True)
            return forward(*args, **kwargs)
        finally:
            self._runs = False

    def _check_thread(self) -> None:
        """Refuse a thread while another one runs the model."""
        runs = self._runs or self._forward or self._in_backward
        if runs and self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "another thread runs the model, or its backward pass there has failed: one at a time can; "
                "optimizer.zero_grad() ends a pass that has failed"
            )

    def _begin(self, *, learns: bool) -> None:
        """Begin a pass: of a step of the training, or of one of its micro-batches, or without gradients."""
        if not learns:
            self.cycle.expect("forward", [slab.index for slab in self.plan.of_params])
            return
        # The optimizer goes through buckets forwards and backwards in turns.
        kind = "even" if self._steps % 2 == 0 else "odd"
        self.cycle.expect(kind, self.cycle.default, begin=not self._open)
        self._open = True

    def _enter(self, step: Step, *, notes: bool = True) -> None:
        """Bring a module's parameters; ``notes`` has autograd note where they are, in the place of saving them."""
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
            return  # it was not entered
        with self._guard():
            _, hooks = self._forward.pop()
            if hooks is not None:
                hooks.__exit__(None, None, None)
            kept = [memory for slab in step.slabs if (memory := self._let_go(slab)) is not None]
        if outputs is not None and kept:  # it has not failed, which keeps its variables
            gc.collect()
            if any(_users(memory) > 1 for memory in kept):
                raise RuntimeError(
                    f"{step.name}: {type(step.module).__name__} returns or keeps one of its parameters, or a view of "
                    "it, and its memory is used for others when it has run; have it make a copy, or give the module "
                    "around it as a block"
                )

    def _slab_at(self, tensor: torch.Tensor) -> tuple[Slab, int] | None:
        """Return the slab whose memory a tensor lies in, and at which byte."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        at = tensor.data_ptr()
        for slab in self.plan.of_params:  # also of those that stay, when they are not held
            if slab.memory is not None and 0 <= at - slab.here.data_ptr() < slab.nbytes:
                return slab, at - slab.here.data_ptr()
        return None

    def _check_forward(self, step: Step) -> None:
        if recorded():
            raise RuntimeError(
                f"{step.name}: a model whose parameters are on drives cannot be traced or exported: what is recorded "
                "would use memory that others get"
            )
        if _node() is not None:
            raise RuntimeError(
                f"{step.name} runs in a backward pass: turn off the model's own activation checkpointing, and give its "
                "layers to offload_training() as blocks"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{step.name}: torch.func cannot transform a model whose parameters are on drives"
            )

    def _run_block(self, step: Step, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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
        """Run a block: first in the forward pass, then in each backward pass."""
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
                    f"{step.name}: forward() writes into its parameters, and would do so twice; what helps: "
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
                f"{step.name}: what autograd has saved is there in a backward pass only"
            )
        if call.versions != [slab.version for slab in step.slabs]:
            raise RuntimeError(f"{step.name}: {_STEPPED}")
        with self._guard():
            self._see_node()
            self._hold_in_backward(step.slabs, call.sequence)
        # Running statistics, and what else the block has changed, are as they were then, and change once.
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
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        found = self._slab_at(tensor)
        if found is None:
            return tensor, tensor._version  # autograd leaves that check to who saves
        slab, offset = found
        return _Saved(*(slab, offset, tensor.shape, tensor.stride(), tensor.dtype, slab.version))

    def _unpack(self, saved: Any) -> Any:
        _refuse_second_order()
        if not isinstance(saved, _Saved):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    "a tensor that is needed for gradients has been modified by an inplace operation: one of shape "
                    f"{tuple(tensor.shape)} is at version {tensor._version}, and was at {version}"
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
            if not is_asked_by_node:
                tensor = tensor.clone()
                self._let_go(slab)
            return tensor

    # Backward

    def _see_node(self) -> float:
        """Note which node of a graph runs, and let go of what nodes after it have used; return its number."""
        self._begin_backward()
        sequence: float = _node()._sequence_nr()
        for slab, since in list(self._backward.items()):
            if since > sequence:
                del self._backward[slab]
                self._let_go(slab)
        self._step_arrived()
        return sequence

    def _step_arrived(self) -> None:
        """Step parameters whose gradients are here, and with which the backward pass is done: some at a time."""
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
        """Return whether the backward pass will not ask for a slab again: all of its gradients are here."""
        return slab not in self._backward and all(
            param in self.gradients for param in slab.fields if param.requires_grad
        )

    def _hold_in_backward(self, slabs: Sequence[Slab], since: float) -> None:
        self._hold([slab for slab in slabs if slab not in self._backward])
        for slab in slabs:
            self._backward[slab] = min(self._backward.get(slab, math.inf), since)

    def _begin_backward(self) -> None:
        graph: Any = torch._C._current_graph_task_id()
        if self._in_backward:
            if graph != self._graph:
                self._are_partial = True
                raise RuntimeError(
                    "a backward pass has begun before the one before was over: one at a time can be; "
                    "optimizer.zero_grad() ends one that has failed"
                )
            return
        self._check_thread()
        if self._step_early is not None and self.gradients:
            raise RuntimeError(
                "step_in_backward=True: each backward() is followed by step() and zero_grad() of the optimizer"
            )
        if self._are_used:
            raise RuntimeError(
                "gradients of the step before are not kept: call optimizer.zero_grad() before backward()"
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
        """Put a gradient that autograd has accumulated to those before."""
        grad = _taken_gradient(param)
        if grad is None:
            return
        slab, field = self.plan.place_of[param]
        gradients = slab.gradients
        name = self.plan.names[param]
        if gradients is None:
            raise RuntimeError(f"{name} has a gradient, and the optimizer does not have it")
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name} has a sparse gradient; dense ones are needed (remedy: sparse=False in nn.Embedding)"
            )
        if grad.requires_grad:
            raise RuntimeError(f"{name}: {_SECOND_ORDER}")
        with self._guard():
            self._begin_backward()
            self._hold([gradients])
            try:
                self._settle(gradients)
                assert gradients.memory is not None
                view = field.view(gradients.memory)
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
        """Give the system back what has been freed: it lies between what is kept, and glibc takes more for the next."""
        self._freed_nbytes += nbytes
        if self._freed_nbytes >= _TRIM_NBYTES:
            self._freed_nbytes = 0
            trim_heap()

    def forget_gradients(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Have no gradients of parameters, or none at all."""
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
        """Whether a backward pass has not come to its end."""
        return self._are_partial or self._in_backward

    def check_gradients(self) -> None:
        """Refuse gradients that are not whole."""
        self._end_backward(failed=True)
        if self._are_partial:
            raise RuntimeError(
                "a backward pass has not come to its end, and gradients are not whole: call optimizer.zero_grad() and "
                "do it again"
            )
        if self._are_used:
            raise RuntimeError(
                "gradients of the step before are not kept: call optimizer.zero_grad(), and backward() before step()"
            )

    def _settle(self, gradients: Slab) -> None:
        """Do with gradients in memory what is still to be done with them."""
        if not gradients.pending:
            return
        views = list(self._views(gradients).values())
        for change in gradients.pending:
            change(views)
        gradients.pending.clear()
        self.cycle.mark_dirty(gradients.index)

    def _views(self, gradients: Slab) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients that are in a slab, which is held, by parameter."""
        assert gradients.memory is not None
        return {
            param: field.view(gradients.memory)
            for param, field in gradients.fields.items()
            if param in self.gradients
        }

    def _slabs_of_gradients(self, params: Iterable[torch.Tensor]) -> list[Slab]:
        """Return the slabs in which gradients of parameters are."""
        found = (self.plan.place_of[param][0].gradients for param in params)
        return list(dict.fromkeys(slab for slab in found if slab is not None))

    def _read(self, slabs: Iterable[Slab]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Have gradients in memory, slab by slab, with all that was still to be done with them."""
        for slab in slabs:
            with self.held([slab]):
                self._settle(slab)
                yield self._views(slab)

    def change_gradients(self, change: Callable[[list[torch.Tensor]], object]) -> None:
        """Have gradients changed when they are in memory next."""
        if self._step_early is not None:
            raise RuntimeError(
                "step_in_backward=True: parameters are stepped already; gradients cannot be clipped or unscaled"
            )
        for slab in self._slabs_of_gradients(self.gradients):
            slab.pending.append(change)
        self._norms.clear()

    @torch.no_grad()
    def norms(self, params: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor | None]:
        """Return norms of gradients: those that were taken when they came, and others by reading them.

        Of parameters without elements, which are in memory, there are none.
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
        """Do what ``torch._amp_foreach_non_finite_check_and_unscale_`` does, to gradients that are not here."""
        norms = self.norms(params, self._norm_type or 2.0)
        scale = inv_scale.detach().clone()

        def unscaled(views: list[torch.Tensor]) -> None:
            found = torch.zeros((), device=views[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(views, found, scale.to(found.device))

        # A norm is finite only where all elements are; one that is not may be too large for its dtype alone.
        if not all(norm is None or norm.isfinite().item() for norm in norms):
            for views in self._read(self._slabs_of_gradients(self.gradients)):
                if not all(view.isfinite().all() for view in views.values()):
                    found_inf.fill_(1.0)
        if scale.item() != 1.0:
            self.change_gradients(unscaled)

    # The optimizer's step

    def begin_step(
        self, buckets: Sequence[Sequence[torch.Tensor]], *, in_backward: bool = False
    ) -> None:
        """Begin to step buckets of parameters, all that are left; in the backward pass gradients are still to come."""
        if not in_backward:
            self._clean()
        self._left = Counter(
            slab for params in buckets for slab in self._wanted(params, expected=in_backward)
        )

    def _wanted(self, params: Iterable[torch.Tensor], *, expected: bool = False) -> list[Slab]:
        """Return the slabs of parameters, and those of gradients that are here, or expected."""
        wanted: dict[Slab, None] = {}
        for param in params:
            if param in self.plan.place_of:
                slab, _ = self.plan.place_of[param]
                wanted[slab] = None
                if slab.gradients is not None and (expected or param in self.gradients):
                    wanted[slab.gradients] = None
        return list(wanted)

    def bring(self, params: Iterable[torch.Tensor] | None) -> None:
        """Have a bucket's parameters and gradients in memory, and no others; None: the step ends, maybe by a fault."""
        wanted = [] if params is None else self._wanted(params)
        if params is not None:
            self._left.subtract(self._stepping)
        for slab in [slab for slab in self._stepping if slab not in wanted]:
            self._stepping.remove(slab)
            self._let_go(slab)
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
        """Be done with a step: its gradients are known until they are forgotten, and kept no longer."""
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
        """Return a parameter's values: large ones mapped from the store, as they are now, small ones in memory."""
        slab, field = self.plan.place_of[param]
        if slab.source is None and field.nbytes >= PACKED_NBYTES:
            with self._guard():
                self.cycle.flush()
            mapped = slab.store.map([(slab.name, field.offset, field.nbytes)])
            return torch.frombuffer(mapped, dtype=field.dtype).as_strided(field.shape, field.stride)
        with self.held([slab]):
            assert slab.memory is not None
            return field.view(slab.memory).clone()

    def _before_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        slabs = [
            self.plan.place_of[param][0]
            for name, param in module._parameters.items()
            if param in self.plan.place_of and prefix + name in state
        ]
        if slabs and (metadata or {}).get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict: assign=True would have parameters in memory; leave it out"
            )
        if any(slab.source is not None for slab in slabs):
            raise RuntimeError(
                f"load_state_dict: frozen parameters of {prefix or 'the model'} are those of the files, and cannot be "
                "loaded"
            )
        if slabs:
            loading = self.held(list(dict.fromkeys(slabs)), written=True)
            loading.__enter__()
            self._loading[module] = loading

    def _after_load(self, module: nn.Module, _: Any) -> None:
        loading = self._loading.pop(module, None)
        if loading is not None:
            loading.__exit__(None, None, None)


class StoredGradient(torch.Tensor):
    """What a parameter has as its gradient while that is on a drive: shape, dtype and device, and no values."""

    _training: weakref.ref[Training]
    _param: torch.Tensor

    @staticmethod
    def of(training: Training, param: torch.Tensor) -> StoredGradient:
        """Return what stands for a parameter's gradient; each time another one."""
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Any = make(StoredGradient, param.shape, dtype=param.dtype, device=training._device)
        found._training, found._param = weakref.ref(training), param
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values, let GradScaler unscale, and refuse the rest."""
        name, asked, is_attribute = question(func)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            gradients, found_inf, inv_scale = args
            training = gradients[0]._training()
            if training is not None:
                training.unscale([each._param for each in gradients], found_inf, inv_scale)
            return None
        if not asked or (is_attribute and (len(args) > 1 or name == "data")):
            raise RuntimeError(
                f"this gradient is on a drive, and {name} needs its values: use clip_grad_norm_(), clip_grad_value_() "
                "and zero_grad() of the optimizer that offload_training() has returned"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what has not come through Python."""
        raise RuntimeError(f"this gradient is on a drive, and {func} needs its values")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient on a drive: {list(self.shape)}, {self.dtype}>"


class StoredElsewhere(GradientElsewhere):
    """A gradient in a slab, for the optimizer that steps its parameter."""

    def __init__(self, training: Training, gradient: StoredGradient, param: torch.Tensor) -> None:
        super().__init__(gradient, None)
        slab, self._field = training.plan.place_of[param]
        assert slab.gradients is not None
        self._slab = slab.gradients

    def lent(self) -> torch.Tensor:
        """Return the gradient, whose slab is in memory."""
        assert self._slab.memory is not None
        return self._field.view(self._slab.memory)


# Methods and attributes of a parameter that is away that do what they do always.
_HARMLESS = {
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_"),
    *("retain_grad", "retains_grad"),
}


# Those that change nothing are done: `model.to(device)`, say.
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}


def _class_of_away(training: Training) -> type[nn.Parameter]:
    """Return the class that parameters have while their values are on a drive."""
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
                    return first  # for state_dict(), which puts the values there
                elif isinstance(first, Away) and name in _CONVERSIONS:
                    like = torch.empty(0, dtype=first.dtype, device=first.device)
                    then = getattr(like, name)(*args[1:], **(kwargs or {}))
                    if (then.dtype, then.device) == (like.dtype, like.device):
                        return first
                elif asked and (not is_attribute or len(args) == 1):
                    return func(*args, **(kwargs or {}))
            there = of_training()
            if there is None or there.is_closed:
                raise RuntimeError(
                    f"{name}: the training that had this parameter's values is closed"
                )
            names: dict[Any, str] = there.plan.names
            found = next(
                (each for each in _tensors_in((args, kwargs)) if isinstance(each, Away)), None
            )
            raise RuntimeError(
                f"the parameter {names.get(found, '')} is on a drive, and {name} needs its values: {_REMEDY}. A module "
                "whose forward() uses parameters of modules below it is to be one of blocks"
            )

        def __repr__(self) -> str:  # type: ignore[override]
            return f"<a parameter on a drive: {list(self.shape)}, {self.dtype}>"

    return Away


def _node() -> Any:
    """Return the node of autograd that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def _refuse_second_order(*_: Any) -> None:
    # The engine has gradients enabled while nodes run if there is to be a graph of them.
    if torch.is_grad_enabled() and _node() is not None:
        raise RuntimeError(_SECOND_ORDER)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors; those that share memory share that of the copies."""
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
    """Return how many tensors have a tensor's memory."""
    count: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return count - 1  # one is Python's of the storage


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == 0 or torch.equal(tensor_bytes(one), tensor_bytes(other))


def _taken_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd has accumulated, which the parameter has no longer."""
    own: Any = torch._C.TensorBase.grad  # a parameter that is away has another one
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = own.__get__(param)
        own.__set__(param, None)
    return grad


def without_memory(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that has no memory: computing with it ends the process."""
    made = torch.empty_strided(shape, stride, dtype=dtype)
    made.untyped_storage().resize_(0)
    return made


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    leaves = _pytree.tree_leaves(values)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
