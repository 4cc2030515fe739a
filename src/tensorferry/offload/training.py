"""A model in training with its parameters and gradients on drives.

Parameters have values while their modules run (``swapper.py``), while the optimizer steps them
(:meth:`TrainingSwapper.bring`), and, as private copies, in a block of ``in_memory()`` (:meth:`TrainingSwapper.lend`). A
*step of the training* consists of forward and backward passes followed by the optimizer's ``step()``.

In place of a parameter, autograd saves a reference to its slab, from which the backward pass gets the values again. A
block runs again in the backward pass (``recompute.py``). Gradients are accumulated by autograd itself: a hook gives it
the earlier gradient as the parameter's ``grad``, and another hook moves the new one to its slab.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tensorferry.offload.absent import recorded, tensors_in
from tensorferry.offload.equality import same_bits
from tensorferry.offload.gradients import StoredGradient, grad_of, set_grad, stored_gradients
from tensorferry.offload.holder import is_shared
from tensorferry.offload.plan import PACKED_NBYTES
from tensorferry.offload.recompute import STEPPED, BlockCall
from tensorferry.offload.scan import Order
from tensorferry.offload.slabs import FileSlab, StoreSlab, version_of
from tensorferry.offload.swapper import AbsentParameter, Swapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.offload.slabs import GradientSlab, ModuleUse, Slab, TrainingPlan

_REMEDY = (
    "the parameters of this model are on drives; to read or write those of a module, use `with "
    "optimizer.in_memory(module):`"
)
_SECOND_ORDER = "gradients of gradients (create_graph=True) are impossible: they need parameters that have left memory"
_INCOMPLETE = (
    "a backward pass has failed or is still running, and gradients are incomplete: call optimizer.zero_grad() and "
    "repeat the passes"
)
_USED = "gradients of the previous step have been released: call optimizer.zero_grad() before backward() or step()"

# Free memory of the heap is returned to the system each time this many bytes have been freed.
_TRIM_NBYTES = 32 << 20


class _Saved(NamedTuple):
    """A reference that autograd saves in place of a parameter or a view of it."""

    slab: Slab
    param: torch.Tensor
    offset: int  # of the view's first element, in the slab's bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int  # of the parameter when autograd saved it


class TrainingParameter(AbsentParameter):
    """A parameter of a training while it has no values: the user's own object, with this class."""

    harmless = frozenset(
        ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad")
    )
    settable = frozenset(("grad", "grad_dtype", "requires_grad"))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Set values, perform operations that do not need values, and raise for all others."""
        if func is torch.Tensor.copy_ and not torch.is_grad_enabled():
            param, values, *_ = args
            there: Any = cls.swapper()
            if isinstance(param, TrainingParameter) and there is not None:
                there.set_values(param, values)
                return param
        return super().__torch_function__(func, types, args, kwargs)


class TrainingSwapper(Swapper):
    """Brings parameters into memory where they are used, and moves gradients to drives, during a training.

    Parameters
    ----------
    plan : TrainingPlan
        The slabs of the model, and the modules that use them.
    device : torch.device
        Where the model computes.
    checkpoint_activations : bool
        Whether blocks run again in the backward pass.
    """

    absent = TrainingParameter
    refusal = (
        f"is on a drive, and {{}} needs its values: {_REMEDY}. If a module's forward() uses parameters of modules "
        "below it, pass that module to offload_training() in blocks="
    )
    refused_copy = f"the model cannot be saved or copied as a whole: {_REMEDY}"

    plan: TrainingPlan

    def __init__(
        self, plan: TrainingPlan, device: torch.device, *, checkpoint_activations: bool
    ) -> None:
        super().__init__(plan, device)
        #: Returns a context manager for work with slabs; with True, signals are deferred meanwhile.
        self.accessing: Callable[[bool], contextlib.AbstractContextManager[Any]]
        self._checkpoints = checkpoint_activations
        # A block that has its parameters after its second run.
        self._second_run: ModuleUse | None = None
        self._is_open = False  # whether a step of the training has begun
        self._steps = 0  # complete steps of the training
        self._graph: int | None = None  # autograd's id of the backward pass that is not complete
        # The accumulators of gradients: autograd has no other references to them, and they have our hooks.
        self._accumulators: dict[torch.Tensor, Any] = {}
        # Parameters whose `grad` is in memory now, with what it is otherwise.
        self._exposed: dict[torch.Tensor, StoredGradient | None] = {}
        # The slabs of the bucket that the optimizer steps now, and those of its gradients.
        self._stepped: tuple[set[Slab], set[GradientSlab]] = set(), set()
        # For each slab of gradients, the number of buckets that still need it in the optimizer's current step.
        self._left: Counter[GradientSlab] = Counter()
        #: Parameters that are private copies now, with their stand-ins for gradients.
        self.lent: dict[torch.Tensor, StoredGradient | None] = {}
        self._freed_nbytes = 0  # since free memory was returned to the system
        self._norm_type: float | None = None  # of the norms that are computed when gradients arrive
        # The orders in which slabs are used: in passes without gradients, and in even and odd steps, because the
        # optimizer steps the buckets in alternating direction.
        self._orders: dict[str, Order] = {}

    def access(self, *, defers: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for work with slabs; with ``defers``, signals are deferred meanwhile."""
        return self.accessing(defers)

    # Values of parameters

    def move(self, values: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Move all parameters into slabs, and install what brings them to modules.

        ``values`` returns the values of a parameter, or None if the parameter itself has them.
        """
        for slab in self.plan.slabs:
            if isinstance(slab, StoreSlab):
                [memory] = self.holder.hold([slab], change=True)
                for param, field in slab.fields.items():
                    value = values(param)
                    field.view(memory).copy_(param.detach() if value is None else value)
                del memory, value
                slab.dirty = True
                self._note_freed(slab.nbytes)
            with self.access(defers=True):
                for param in slab.fields:
                    self.put_away(param)
        for param, (slab, _) in self.plan.place_of.items():
            if slab.gradients is not None:
                self._watch(param)
        self.install()
        for module in self.plan.model.modules():
            fill: Any = functools.partial(self._fill_state_dict)
            of_module: Any = module
            self._hooks.append(of_module.register_state_dict_post_hook(fill))

    def install_around(self, use: ModuleUse) -> None:
        """Install what gives a module's parameters their values."""
        if use.is_block and self._checkpoints:
            self.around(use.module, "forward", functools.partial(self._run_block, use))
        else:
            super().install_around(use)

    def give_back(self) -> None:
        """Give all parameters ordinary memory with their values."""
        self.uninstall()
        for param, (slab, field) in self.plan.place_of.items():
            if isinstance(param, self.absent):
                [memory] = self.holder.hold([slab])
                given: torch.Tensor = param
                given.__class__ = nn.Parameter
                given.data = field.view(memory).clone()

    def close(self) -> None:
        """Release the memory, and the space of gradients on drives; parameters stay without values."""
        self.uninstall()
        self.holder.settle()
        for slab in self.plan.slabs:
            slab.place = None
            if slab.gradients is not None:
                slab.gradients.place = None
                slab.gradients.store.close()
        del self.holder

    def taken(self, slab: Slab, memory: torch.Tensor, *, has_changed: bool) -> None:
        """Keep the changes of parameters that had their values in ``memory``.

        The optimizer makes such changes, or forward(): nn.Embedding with max_norm writes into its parameter.
        """
        if has_changed and isinstance(slab, FileSlab):
            raise self.unchangeable(slab)
        slab.dirty |= has_changed
        in_backward = self._graph is not None  # then autograd has views
        if self._computes_elsewhere():
            if has_changed:
                [there] = self.holder.hold([slab], change=True)
                there.copy_(memory)
            # Unlike a view of the slab itself, a view of a copy would not follow the parameter.
            if is_shared(memory) and not in_backward:
                raise RuntimeError(
                    "a module keeps one of its parameters, or a view of it; on a device other than the CPU, make it "
                    "copy the parameter"
                )
        elif not in_backward and not isinstance(slab, FileSlab):
            # Through other tensors that are still there the parameter may change later.
            slab.dirty |= is_shared(memory, but=1)

    def on_device(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a slab's memory, or a copy on the device where the model computes."""
        if not self._computes_elsewhere():
            return memory
        return torch.empty_like(memory, device=self.device).copy_(memory, non_blocking=True)

    def _computes_elsewhere(self) -> bool:
        """Return whether parameters are copied to a device other than the host."""
        return self.device.type != "cpu"

    @contextlib.contextmanager
    def present_again(self, use: ModuleUse) -> Iterator[None]:
        """Give a block's parameters their values in its second run, and after it.

        What autograd has saved in this run may be the parameter itself. So the parameters keep their values until the
        backward pass comes to an earlier module. By then it is over with this block: autograd runs the most recently
        created nodes of a graph first (torch/csrc/autograd/engine.h, ``ReadyQueue``).
        """
        with self.turn():
            self._running.append(use)
            try:
                with self.access():
                    self._note_backward()
                    self._end_second_run()
                    self._check_not_lent(use.name)
                    self.give(use.slabs)
                yield
            finally:
                self._running.pop()
                self._second_run = use

    def _end_second_run(self) -> None:
        use, self._second_run = self._second_run, None
        if use is not None:
            self.release(use)

    def clean(self) -> None:
        """End what an interruption has left."""
        self._second_run = None
        super().clean()
        self._stepped = set(), set()
        self._hide_gradients(list(self._exposed))

    # Forward

    def begin_pass(self) -> None:
        """Begin a forward pass: set the order in which it is expected to use slabs.

        If gradients are enabled, the pass belongs to a step of the training: it begins one, or is another micro-batch
        of it.
        """
        with self.access(defers=True):
            self.clean()
            learns = torch.is_grad_enabled()
            kind = ("odd" if self._steps % 2 else "even") if learns else "forward"
            if kind not in self._orders:
                expected = self.plan.expected() if learns else range(len(self.plan.slabs))
                self._orders[kind] = Order(expected)
            order, begins = self._orders[kind], not (learns and self._is_open)
            self.holder.expect(order, begin=begins)
            if kind == "even" and begins and order.changed:
                self.holder.choose()
            self._is_open |= learns

    def run_module(self, use: ModuleUse, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module; autograd saves references to its parameters."""
        saving: Any = contextlib.nullcontext()
        if torch.is_grad_enabled():
            saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self.check_run(use.name, args, kwargs)
        with self.present(use), saving:
            return call(*args, **kwargs)

    def _run_block(
        self, use: ModuleUse, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block, under activation checkpointing if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.run_module(use, forward, args, kwargs)
        self.check_run(use.name, args, kwargs)
        outputs = BlockCall(self, use, forward, (args, kwargs)).run()
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                hooked: Any = tensor
                hooked.register_hook(_refuse_second_order)
        return outputs

    def check_run(self, name: str, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Raise if a module cannot run now."""
        why = ""
        if recorded():
            why = "it cannot be traced or exported: the recording would use memory that is later reused"
        elif _node() is not None:
            why = (
                "it runs in a backward pass: turn off the model's own activation checkpointing, and pass its layers to "
                "offload_training() as blocks"
            )
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            why = "torch.func cannot transform it"
        if why:
            raise RuntimeError(f"{name} has its parameters on drives: {why}")
        self._check_not_lent(name)

    def _check_not_lent(self, name: str) -> None:
        if self.lent:
            raise RuntimeError(
                f"{name} has its parameters on drives: it cannot run in a block of in_memory(), where parameters are "
                "copies; run it after that block"
            )

    def slab_at(self, tensor: torch.Tensor) -> Slab | None:
        """Return the slab that contains a tensor's memory, if its parameters have values now."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        return self._slab_at.get(tensor.untyped_storage().data_ptr())

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd saves for a tensor: a reference if the tensor is in a slab."""
        # A lazy conjugate or negative has the slab's memory but other values than those there. Compute the values, and
        # save them in place of a reference.
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        slab = self.slab_at(tensor)
        if slab is None:
            # Autograd does not check the version of a tensor that hooks have packed, so _unpack() compares it.
            return tensor, tensor._version
        offset = tensor.storage_offset() * tensor.itemsize
        # The parameter is the last one that begins at or before the offset.
        param = [param for param, field in slab.fields.items() if field.offset <= offset][-1]
        form = tensor.shape, tensor.stride(), tensor.dtype
        return _Saved(slab, param, int(offset), *form, version=param._version)

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
        if saved.version != version_of(saved.param):
            raise RuntimeError(STEPPED)
        with self.access():
            self._note_backward()
            self._end_second_run()
            [memory] = self.holder.hold([saved.slab])
            elements = self.on_device(memory)[saved.offset :]
            elements = elements[: len(elements) // saved.dtype.itemsize * saved.dtype.itemsize]
            return elements.view(saved.dtype).as_strided(saved.shape, saved.stride)

    # Backward

    def _note_backward(self) -> None:
        """Note that a backward pass is running; raise if another one is incomplete."""
        graph: Any = torch._C._current_graph_task_id()
        if graph in (-1, self._graph):  # -1: a user reads what autograd has saved
            return
        self.check_gradients()
        self._graph = graph
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(_backward_ended, weakref.ref(self)))

    def end_backward(self) -> None:
        """End a backward pass: it is complete, or its gradients are gone."""
        self._end_second_run()
        self._hide_gradients(list(self._exposed))
        self._graph = None

    def check_gradients(self) -> None:
        """Raise if gradients are incomplete, or belong to a step that is complete."""
        if self._graph is not None:
            raise RuntimeError(_INCOMPLETE)
        for param in self._accumulators:
            stored = StoredGradient.of(param)
            if stored is not None and stored.param is not param:
                mine, other = self.plan.names[param], self.plan.names[stored.param]
                raise RuntimeError(
                    f"{mine}: its grad is the gradient of {other}, which is on a drive"
                )
            if stored is not None and stored.is_released:
                raise RuntimeError(_USED)

    def revive(self, gradients: Iterable[StoredGradient]) -> None:
        """Give gradients that a step has released a place again: they are about to become zeros."""
        for each in gradients:
            slab = self.plan.place_of[each.param][0].gradients
            if slab is not None and slab.stand_ins[each.param] is each:
                each.is_released = False

    def _watch(self, param: Any) -> None:
        """Install the hooks of a parameter's gradient."""
        # The hooks refer to this object weakly. A strong reference would close a reference cycle that the garbage
        # collector cannot see, and the model would never be freed.
        itself = weakref.ref(self)

        def before(_: Any) -> None:
            there = itself()
            if there is not None:
                there._before_gradient(param)

        def after(*_: Any) -> None:
            there = itself()
            if there is not None:
                there._after_gradient(param)

        learns, param.__class__ = param.requires_grad, nn.Parameter
        param.requires_grad_()  # needed to make the accumulator; the parameter may require gradients later
        node: Any = torch.autograd.graph.get_gradient_edge(param).node
        param.requires_grad_(learns)
        param.__class__ = self.absent
        self._accumulators[param] = node
        self._hooks += [node.register_prehook(before), node.register_hook(after)]

    @torch.no_grad()
    def _before_gradient(self, param: torch.Tensor) -> None:
        """Give autograd the gradient to which it will add another one."""
        with self.access():
            self._note_backward()
            stored = StoredGradient.of(param)
            if stored is not None:
                # A copy: hooks may keep the gradient.
                self._expose(stored, copy=True)
            elif grad_of(param) is None:
                self._exposed[param] = None
            # Otherwise a user has set the gradient, and it stays in the user's memory.

    @torch.no_grad()
    def _after_gradient(self, param: torch.Tensor) -> None:
        """Move the gradient that autograd has accumulated to its slab."""
        grad = grad_of(param)
        if (
            param in self._exposed and grad is not None
        ):  # else it is the user's, or a user's hook has taken it
            with self.access():
                self._store(param, grad, self._exposed[param])
            nbytes = grad.nbytes
            del grad
            self._note_freed(nbytes)
        self._exposed.pop(param, None)

    def _note_freed(self, nbytes: int) -> None:
        """Count freed bytes, and return free memory of the heap to the system after each :data:`_TRIM_NBYTES`.

        glibc keeps free blocks between used ones, and does not reuse those of aligned tensors.
        """
        self._freed_nbytes += nbytes
        if self._freed_nbytes >= _TRIM_NBYTES:
            self._freed_nbytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3)
            if trim is not None:
                trim(ctypes.c_size_t(0))

    def _store(
        self, param: torch.Tensor, grad: torch.Tensor, stored: StoredGradient | None
    ) -> None:
        """Copy a gradient to its slab, unless it is there, and give the parameter a stand-in for it."""
        name = self.plan.names[param]
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name} has a sparse gradient; only dense ones are supported (remedy: sparse=False in nn.Embedding)"
            )
        if grad.requires_grad:
            raise RuntimeError(f"{name}: {_SECOND_ORDER}")
        slab, view = self._gradient_at(param)
        if grad.dtype != view.dtype:
            raise RuntimeError(
                f"{name} has a gradient of {grad.dtype}, and had room for one of {view.dtype} (remedy: set grad_dtype "
                "before offload_training())"
            )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        slab.dirty = True
        if stored is None:
            stored = StoredGradient.for_param(self, param)
            if param in slab.stand_ins:
                slab.stand_ins[param].is_released = True
            slab.stand_ins[param] = stored
        stored.note_norm(self._norm_type, view)
        set_grad(param, stored)

    def _gradient_at(self, param: torch.Tensor) -> tuple[GradientSlab, torch.Tensor]:
        """Return the slab with a parameter's gradient, and the gradient there."""
        slab = self.plan.place_of[param][0].gradients
        assert slab is not None
        [memory] = self.holder.hold([slab], change=True)
        return slab, slab.fields[param].view(memory)

    def _settled(self, stored: StoredGradient) -> torch.Tensor:
        """Return a gradient in its slab, after the changes that were recorded for it."""
        slab, view = self._gradient_at(stored.param)
        if stored.has_changes:
            with self.access(defers=True):
                slab.dirty = True
                stored.settle(view)
        return view

    def _expose(self, stored: StoredGradient, *, copy: bool = False) -> None:
        """Make a parameter's ``grad`` the gradient itself."""
        param = stored.param
        self._exposed[param] = stored
        set_grad(param, self._settled(stored).to(self.device, copy=copy))

    def _hide_gradients(self, params: Iterable[torch.Tensor]) -> None:
        """Make the ``grad`` of parameters their stand-ins again."""
        for param in params:
            set_grad(param, self._exposed.pop(param))

    @torch.no_grad()
    def norm(self, stored: StoredGradient, kind: float) -> torch.Tensor:
        """Return the norm of a gradient; from now on, norms of this order are computed when gradients arrive."""
        with self.access():
            self._norm_type = kind
            if stored.known_norm(kind) is None:
                # Read the slab once for all of its gradients.
                slab, _ = self.plan.place_of[stored.param]
                for each in {*stored_gradients(slab.fields), stored}:
                    each.note_norm(kind, self._settled(each))
            found = stored.known_norm(kind)
            assert found is not None
            return found.clone()

    @torch.no_grad()
    def unscale(
        self,
        stored: Sequence[StoredGradient],
        found_inf: torch.Tensor,
        inv_scale: torch.Tensor,
    ) -> None:
        """Do what ``torch._amp_foreach_non_finite_check_and_unscale_`` does."""
        # Norms of an order that is not positive may be finite in spite of infinite elements.
        kind = self._norm_type if self._norm_type and self._norm_type > 0 else 2.0
        for each in stored:
            # If a norm is finite, all elements are, too. If it is not, its elements may still be finite, because the
            # norm may exceed the range of its dtype. Then read the gradient to find out.
            if not self.norm(each, kind).isfinite().item():
                with self.access():
                    if not self._settled(each).isfinite().all():
                        found_inf.fill_(1.0)
            if inv_scale.item() != 1.0:
                each.change(_unscaled, (inv_scale.detach(),), {})

    # The optimizer's step

    def begin_step(self, buckets: Iterable[Sequence[torch.Tensor]]) -> None:
        """Prepare the optimizer's step; ``buckets`` are the parameters of the buckets that are not stepped yet."""
        self.clean()
        self._left = Counter(slab for params in buckets for slab in self._slabs_of(params)[1])

    def _slabs_of(self, params: Iterable[torch.Tensor]) -> tuple[set[Slab], set[GradientSlab]]:
        """Return the slabs of parameters, and those of their gradients."""
        slabs = {
            param: self.plan.place_of[param][0] for param in params if param in self.plan.place_of
        }
        gradients = {
            slab.gradients
            for param, slab in slabs.items()
            if param in self._exposed or StoredGradient.of(param) is not None
        }
        return set(slabs.values()), {slab for slab in gradients if slab is not None}

    @torch.no_grad()
    def bring(self, params: Sequence[torch.Tensor] | None) -> None:
        """Bring a bucket's parameters and gradients into memory, and put away those of the bucket before.

        With None, put away those of all buckets: the step is over or has failed.
        """
        before, of_gradients = self._stepped
        self._stepped = self._slabs_of(params or ())
        self._hide_gradients([param for param in self._exposed if param not in set(params or ())])
        for slab in before - self._stepped[0]:
            self.take(slab)
        if params is not None:
            # Gradients that no remaining bucket needs are dropped without a write. After the last bucket they are kept:
            # retry() needs them after a failure, and otherwise end_step() drops them.
            self._left.subtract(of_gradients)
            for gradients in of_gradients:
                if not self._left[gradients]:
                    self._release(gradients)
        self.give(self._stepped[0], change=True)
        for param in params or ():
            if param in self.plan.place_of:
                self.note_written(param)
                stored = StoredGradient.of(param)
                if stored is not None:
                    self._expose(stored)

    def note_written(self, param: torch.Tensor) -> None:
        """Note that a parameter has other values in its slab."""
        self.plan.place_of[param][0].dirty = True
        torch.autograd.graph.increment_version(param)

    def end_step(self) -> None:
        """End a step and drop its gradients; their stand-ins stay until zero_grad()."""
        for slab in self.plan.slabs:
            if slab.gradients is not None:
                self._release(slab.gradients)
        self._steps += 1
        self._is_open = False

    def _release(self, slab: GradientSlab) -> None:
        for stored in slab.stand_ins.values():
            stored.is_released = True
        self.holder.drop(slab)

    # Private copies

    @property
    def is_running(self) -> bool:
        """Whether the model is running, which uses its parameters where they are."""
        return bool(self._running) or _node() is not None

    def lend(self, params: Iterable[torch.Tensor]) -> None:
        """Make parameters and their gradients private copies, in the user's own memory."""
        if self._graph is not None:
            raise RuntimeError(_INCOMPLETE)
        for param in params:
            slab, field = self.plan.place_of[param]
            [memory] = self.holder.hold([slab])
            values = field.view(memory).to(self.device, copy=True)
            stored = StoredGradient.of(param)
            if stored is not None and not stored.is_released:
                set_grad(param, self._settled(stored).to(self.device, copy=True))
            self.lent[param] = stored
            param.__class__ = nn.Parameter
            param.data = values

    @torch.no_grad()
    def take_back(self, params: Iterable[torch.Tensor]) -> None:
        """End the loan of parameters; keep what the user has changed.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            A change cannot be kept; the others are.
        StorageError
            A slab cannot be read. Its parameters stay private copies, until the next call.
        """
        refused: list[Exception] = []
        for param in params:
            slab, field = self.plan.place_of[param]
            data, shape = param.data.resolve_conj().resolve_neg(), torch.Size(field.shape)
            [memory] = self.holder.hold([slab], change=True)
            view = field.view(memory)
            if (data.shape, data.dtype) != (shape, field.dtype):
                refused.append(
                    ValueError(
                        f"{self.plan.names[param]}: its data must be {field.dtype} of shape {tuple(shape)} (got "
                        f"{data.dtype} of shape {tuple(data.shape)})"
                    )
                )
            elif not same_bits(data.to(view.device), view):
                if isinstance(slab, StoreSlab):
                    view.copy_(data)
                    slab.dirty = True
                else:
                    refused.append(self.unchangeable(slab))
            stored, grad = self.lent[param], grad_of(param)
            if stored is not None and grad is not None and not stored.is_released:
                try:
                    # With the same values this only restores the stand-in.
                    self._store(param, grad, stored)
                except (TypeError, RuntimeError) as error:
                    set_grad(param, stored)
                    refused.append(error)
            del self.lent[param]
            self.put_away(param)
        if refused:
            raise refused[0]

    # State dicts

    def _fill_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        for name, param in module._parameters.items():
            if isinstance(param, self.absent) and state.get(prefix + name) is not None:
                state[prefix + name] = self.values_of(param)

    @torch.no_grad()
    def values_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values: large ones mapped from the store as a snapshot, small ones as a copy."""
        slab, field = self.plan.place_of[param]
        with self.access():
            if isinstance(slab, StoreSlab) and field.nbytes >= PACKED_NBYTES:
                self.holder.flush()
                mapped = slab.store.map([(slab.name, field.offset, field.nbytes)])
                values = torch.frombuffer(mapped, dtype=field.dtype)
                return values.as_strided(field.shape, field.stride)
            [memory] = self.holder.hold([slab])
            return field.view(memory).clone()

    def set_values(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Set the values of an absent parameter, as ``load_state_dict()`` does."""
        slab, field = self.plan.place_of[param]
        with self.access(defers=True):
            [memory] = self.holder.hold([slab], change=True)
            view = field.view(memory)
            if isinstance(slab, StoreSlab):
                view.copy_(values)
                self.note_written(param)
            elif not same_bits(torch.empty_like(view).copy_(values), view):
                raise self.unchangeable(slab)


def _node() -> Any:
    """Return the autograd node that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def _refuse_second_order(*_: Any) -> None:
    # While autograd runs the nodes of a backward pass, gradients are enabled only with create_graph=True, which records
    # the operations of these nodes for a second backward pass.
    if torch.is_grad_enabled() and _node() is not None:
        raise RuntimeError(_SECOND_ORDER)


def _backward_ended(swapper: weakref.ref[TrainingSwapper]) -> None:
    there = swapper()
    if there is not None:
        there.end_backward()


def _unscaled(values: torch.Tensor, scale: torch.Tensor) -> None:
    found = torch.zeros((), device=values.device)
    torch._amp_foreach_non_finite_check_and_unscale_([values], found, scale.to(found.device))
