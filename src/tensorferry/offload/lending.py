"""What the optimizer has during a step: the user's own parameters, with the values, gradients and state of one bucket.

A call of the optimizer finds in its groups what it finds there in memory: the same parameters, in the same order,
with the same attributes. Those of other buckets have no gradient while it is called, so that it leaves them alone. A
piece of a parameter is lent as the parameter itself, whose data and gradient are exchanged for those of the piece. An
optimizer that does something with parameters that have no gradient gets groups of the bucket's parameters alone.

A stand-in is lent where the user's own cannot be: as a master, whose dtype is another one (assigning data of another
dtype drops the hooks that DistributedDataParallel has put on the parameter's gradient); as a copy in host memory; and
as this rank's part of a DTensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from tensorferry.offload.counted import Draws, Snapshot, differing, frozen, same
from tensorferry.offload.dryrun import NotPointwiseError, Pieces
from tensorferry.offload.errors import NotSeparableError
from tensorferry.offload.plan import GRANULE, local_of
from tensorferry.offload.states import UnplannedError, elements_of, keep_state, state_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.offload.plan import Unit


def class_method(optimizer: torch.optim.Optimizer, name: str = "step") -> Callable[[], Any]:
    """Return a method of an optimizer's class, without the profiler's entry and the hooks around step()."""
    method: Any = getattr(type(optimizer), name)
    if getattr(method, "hooked", False):
        method = method.__wrapped__
    return lambda: method(optimizer)


class Lender:
    """Lends units to an optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        What steps. Its groups are those of the offloaded optimizer.
    step_dtype : callable
        Returns the dtype in which a parameter is stepped.
    on_host : bool
        Parameters that are elsewhere are stepped as copies in host memory.
    alone : bool
        Groups have the lent parameters alone, with or without gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step_dtype: Callable[[torch.Tensor], torch.dtype],
        *,
        on_host: bool = False,
        alone: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._step_dtype = step_dtype
        self._on_host = on_host
        self.alone = alone
        #: Returns a parameter's gradient; one that is not in memory is a :class:`GradientElsewhere`.
        self.gradient_of: Callable[[torch.Tensor], Any] = operator.attrgetter("grad")
        self._stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._grads: dict[torch.Tensor, Any] = {}
        self._kept: tuple[Any, list[list[torch.Tensor]]] | None = None
        self._snapshot: Snapshot | None = None
        self._after: Any = None
        #: What the last call of the optimizer has returned.
        self.returned: Any = None
        #: Parameters that have a master in memory.
        self.masters: set[torch.Tensor] = set()

    def is_direct(self, param: torch.Tensor) -> bool:
        """Return whether the optimizer is lent the parameter itself."""
        return (
            local_of(param) is param
            and self._step_dtype(param) == param.dtype
            and not (self._on_host and param.device.type != "cpu")
        )

    def target_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return what the optimizer has for a parameter."""
        if self.is_direct(param):
            return param
        target = self._stand_ins.get(param)
        if target is None:
            local = local_of(param).detach()
            device = torch.device("cpu") if self._on_host else local.device
            target = torch.nn.Parameter(
                torch.zeros((), dtype=self._step_dtype(param), device=device).expand(local.shape),
                requires_grad=param.requires_grad and local.is_floating_point(),
            )
            self._stand_ins[param] = target
        target.__dict__.update(param.__dict__)
        return target

    def begin(self, again: Snapshot | None = None) -> Snapshot:
        """Take all parameters' gradients, and let groups have what can be lent; return what the step begins with."""
        optimizer = self._optimizer
        self._snapshot = again or Snapshot(optimizer)
        self._after = None
        self._kept = optimizer.state, [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._grads[param] = _placed(param, self.gradient_of(param))
        for group in optimizer.param_groups:
            targets = [self.target_of(param) for param in group["params"]]
            for param in group["params"]:
                param.grad = None
            if any(each is not own for each, own in zip(targets, group["params"], strict=True)):
                group["params"] = targets
        return self._snapshot

    def end(self, *, undone: bool) -> None:
        """Give all gradients back; with ``undone`` groups and attributes have the values that the step began with."""
        if self._kept is None:
            return
        state, params = self._kept
        optimizer = self._optimizer
        optimizer.state = state
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        for param, grad in self._grads.items():
            param.grad = grad.kept if isinstance(grad, GradientElsewhere) else grad
        if undone and self._snapshot is not None:
            self._snapshot.restore()
        self._grads, self._kept, self._snapshot, self._after = {}, None, None, None

    def has_work(self, unit: Unit) -> bool:
        """Return whether a step has to do with a unit."""
        return self.alone or self._grads.get(unit.param) is not None

    def gradients(
        self, units: Sequence[Unit] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield parameters with their gradients: those of units, or all."""
        for param in self._grads if units is None else dict.fromkeys(unit.param for unit in units):
            grad = self._grads.get(param)
            yield param, grad.given if isinstance(grad, GradientElsewhere) else grad

    def call(
        self,
        units: Sequence[Unit],
        memory: torch.Tensor,
        function: Callable[[], Any],
        *,
        check: bool = False,
    ) -> None:
        """Call a method of the optimizer's for some units, whose bucket is in ``memory``.

        Parameters
        ----------
        units : sequence of Unit
            Those without a gradient are left alone, unless the optimizer steps these, too.
        memory : torch.Tensor
            The bucket's bytes.
        function : callable
            The method.
        check : bool
            Step copies of one unit in another way beside, and compare.

        Raises
        ------
        NotSeparableError
            It left other values in groups or attributes than it did for other buckets, or state that was not planned;
            or the two ways differ.
        """
        assert self._snapshot is not None
        optimizer = self._optimizer
        units = [unit for unit in units if self.has_work(unit)]
        checked = _unit_to_check(units) if check else None
        expected = self._rehearsed(checked, memory, function) if checked is not None else None
        if self._after is not None or expected is not None:
            self._snapshot.restore()
        born = any(unit.leaves is None for unit in units)
        lent: list[tuple[Unit, torch.Tensor, torch.Tensor]] = []
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        optimizer.state = state
        try:
            for unit in units:
                lent.append(self._lend(unit, memory))
                if unit.leaves is not None:
                    state[lent[-1][1]] = state_in(unit, memory)
            with _Alone(optimizer, [each[1] for each in lent] if self.alone else None):
                self._called(function, units)
            self._compare()
            for unit, target, *_ in lent:
                try:
                    keep_state(unit, optimizer.state.get(target, {}), memory)
                except UnplannedError as error:
                    raise self._error(
                        f"its state of a parameter of shape {tuple(unit.param.shape)} has {error}, which it did not "
                        "have when it was tried"
                    ) from None
        finally:
            optimizer.state = defaultdict(dict)
            for unit, target, own in lent:
                self._take_back(unit, target, own, memory)
        if born:
            del state
            trim_heap()

        if checked is not None and expected is not None:
            found = _values_of(checked, memory)
            if not same(found, expected):
                raise self._error(
                    f"a parameter of shape {tuple(checked.param.shape)}, stepped in another way beside "
                    f"({'by itself' if checked.stop is None else 'in smaller pieces'}), becomes another one"
                )

    def _rehearsed(
        self, unit: Unit, memory: torch.Tensor, function: Callable[[], Any]
    ) -> list[Any]:
        """Return what a unit would become if it were stepped by itself, a piece in two halves; nothing has changed."""
        assert self._snapshot is not None
        piece = _piece(unit, local_of(unit.param).detach())
        numel = piece.numel()
        half = numel // 2 // GRANULE * GRANULE
        parts = [slice(0, half), slice(half, numel)] if unit.stop is not None else [slice(None)]
        before = state_in(unit, memory) if unit.leaves is not None else {}
        made = []
        for part in parts:
            target, own, lent, grad = self._prepared(unit, memory)
            if unit.stop is not None:
                lent, grad = lent[part], None if grad is None else grad[part]
            lent, grad = _copy(lent), None if grad is None else _copy(grad)
            state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
            if unit.leaves is not None:
                state[target] = _pytree.tree_map(
                    lambda leaf, part=part: (
                        leaf
                        if not isinstance(leaf, torch.Tensor)
                        else _copy(leaf[part])
                        if unit.stop is not None and leaf.shape == (numel,)
                        else _copy(leaf)
                    ),
                    before,
                )
            self._optimizer.state = state
            self._snapshot.restore()
            try:
                target.data, target.grad = lent, grad
                with _Alone(self._optimizer, [target] if self.alone else None):
                    function()
                made.append((target.data, dict(state.get(target, {}))))
            finally:
                target.grad = None
                target.data = own
                self._optimizer.state = defaultdict(dict)
        return _joined(unit, made)

    def _called(self, function: Callable[[], Any], units: Sequence[Unit]) -> None:
        # One piece of each parameter: the others are stepped as it is.
        lengths = {unit.stop for unit in units if unit.stop is not None and not unit.start}
        draws = Draws() if self._after is None else None
        try:
            with Pieces(lengths) if lengths else contextlib.nullcontext():
                self.returned = function()
            if draws is not None and draws.were_made():
                draws.undo()
                raise self._error("its step draws random numbers now, which it did not when tried")
        except NotPointwiseError as error:
            raise self._error(
                f"its step does {error} now, which does not treat each element by itself, and some parameters are "
                "stepped in pieces, since it did not when it was tried"
            ) from None

    def _error(self, what: str) -> NotSeparableError:
        return NotSeparableError(
            f"{type(self._optimizer).__name__} cannot be offloaded exactly: {what}. Parameters are partly stepped now"
        )

    def _compare(self) -> None:
        assert self._snapshot is not None
        after = {**self._snapshot.frozen(), "what step() returns": frozen(self.returned)}
        if self._after is None:
            self._after = after
            return
        name = differing(self._after, after)
        if name is not None:
            raise self._error(
                f"{name} depends on the gradients of several parameters at once, which its trial did not show"
            )

    def _lend(self, unit: Unit, memory: torch.Tensor) -> tuple[Unit, torch.Tensor, torch.Tensor]:
        """Let the optimizer have a unit; return it with its target and the target's own data."""
        target, own, lent, grad = self._prepared(unit, memory)
        if target is not unit.param or unit.stop is not None:
            target.data = lent
        target.grad = grad
        return unit, target, own

    def _prepared(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a unit's target, that one's own data, and the data and the gradient that it is to have."""
        param, grad = unit.param, self._grads.get(unit.param)
        if isinstance(grad, GradientElsewhere):
            grad = grad.lent()
        target = self.target_of(param)
        own = target.data
        if target is param and unit.stop is None:
            return target, own, own, grad
        local = local_of(param).detach()
        piece = _piece(unit, local)
        if grad is not None:
            grad = local_of(grad)
            if unit.stop is not None:
                grad = elements_of(grad, like=local, start=unit.start, stop=unit.stop)
        lent = piece
        if unit.master is not None:
            lent = unit.view(unit.master, memory)
            renew_master(lent, piece, known=unit.has_master)
        lent = lent.to(target.device)
        if grad is not None:
            grad = grad.to(target.device, lent.dtype if unit.master is not None else grad.dtype)
        return target, own, lent, grad

    def _take_back(
        self,
        unit: Unit,
        target: torch.Tensor,
        own: torch.Tensor,
        memory: torch.Tensor,
    ) -> None:
        """Take a unit back: its parameter has its own data again, with what has become of those that were lent."""
        param = unit.param
        if target is param and unit.stop is None:
            if not isinstance(self._grads[param], GradientElsewhere):
                self._grads[param] = param.grad
            param.grad = None
            return
        stepped = target.data
        target.grad = None
        target.data = own
        piece = _piece(unit, local_of(param).detach())
        if unit.master is not None:
            master = unit.view(unit.master, memory)
            if stepped.data_ptr() != master.data_ptr():
                master.copy_(stepped)
            unit.has_master = True
        if stepped.data_ptr() != piece.data_ptr() or unit.master is not None:
            piece.copy_(stepped)

    # Where all state fits in memory it stays with the optimizer, and all parameters are stepped at once.

    def call_at_home(self, function: Callable[[], Any]) -> None:
        """Call a method of the optimizer's for all parameters, with the state that it has itself."""
        groups = self._optimizer.param_groups
        own = [group["params"] for group in groups]
        lent = [
            (param, self.target_of(param))
            for params in own
            for param in params
            if not self.is_direct(param)
        ]
        if not lent:
            self.returned = function()
            return
        try:
            for group, params in zip(groups, own, strict=True):
                group["params"] = [self.target_of(param) for param in params]
            for param, target in lent:
                local, grad = local_of(param).detach(), _placed(param, param.grad)
                grad = grad.lent() if isinstance(grad, GradientElsewhere) else grad
                if target.dtype != local.dtype:
                    self.set_master(param, None)
                else:
                    target.data = local.to(target.device)
                if grad is not None:
                    target.grad = local_of(grad).to(target.device, target.dtype)
            self.returned = function()
        finally:
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
            for param, target in lent:
                local = local_of(param).detach()
                target.grad = None
                if target.data_ptr() != local.data_ptr():
                    local.copy_(target.data)

    def set_master(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """Have a master of a parameter's in memory, with a value or that of the parameter."""
        target, local = self.target_of(param), local_of(param).detach()
        known = param in self.masters
        if not known:
            target.data = torch.empty_like(local, dtype=target.dtype, device=target.device)
            self.masters.add(param)
        if value is not None:
            target.data.copy_(local_of(value))
        else:
            renew_master(target.data, local, known=known)


class _Alone:
    """Has groups of some parameters alone for a while."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, targets: Sequence[torch.Tensor] | None
    ) -> None:
        self._groups = optimizer.param_groups if targets is not None else []
        self._targets = {id(target) for target in targets or ()}
        self._params: list[list[torch.Tensor]] = []

    def __enter__(self) -> None:
        self._params = [group["params"] for group in self._groups]
        for group in self._groups:
            group["params"] = [param for param in group["params"] if id(param) in self._targets]

    def __exit__(self, *_: object) -> None:
        for group, params in zip(self._groups, self._params, strict=True):
            group["params"] = params


class GradientElsewhere:
    """A gradient that is not lent as the parameter has it.

    Attributes
    ----------
    given : torch.Tensor
        What tells the gradient from another one.
    kept : torch.Tensor or None
        What the parameter has as its gradient when the step is over.
    """

    def __init__(self, given: torch.Tensor, kept: torch.Tensor | None) -> None:
        self.given, self.kept = given, kept

    def lent(self) -> torch.Tensor:
        """Return the gradient that the optimizer is given."""
        raise NotImplementedError


class _Redistributed(GradientElsewhere):
    """A gradient whose placements were not its parameter's."""

    def __init__(self, given: torch.Tensor, placed: torch.Tensor) -> None:
        super().__init__(given, given)
        self._placed = placed

    def lent(self) -> torch.Tensor:
        return self._placed


def _placed(param: torch.Tensor, grad: Any) -> Any:
    """Return a gradient as its parameter is placed: a sum over ranks that is still to be made is made here.

    It is done for all parameters before the first is stepped, in the same order on all ranks.
    """
    placements = getattr(param, "placements", None)
    if (
        grad is None
        or placements is None
        or getattr(grad, "placements", None) in (None, placements)
    ):
        return grad
    return _Redistributed(grad, grad.redistribute(placements=placements))


def renew_master(master: torch.Tensor, value: torch.Tensor, *, known: bool) -> None:
    """Give a master what has been written into its parameter since its last step: where the two differ."""
    value = value.to(master.device)
    if not known:
        master.copy_(value)
        return
    written = master.to(value.dtype) != value
    if bool(written.any()):
        master.copy_(torch.where(written, value.to(master.dtype), master))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in memory as the tensor does: what is added up in another order rounds otherwise."""
    if 0 in tensor.stride():
        return tensor.clone()
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor)


def trim_heap() -> None:
    """Give the system back what glibc keeps for later, where what is made and freed would add up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _unit_to_check(units: Sequence[Unit]) -> Unit | None:
    """Return a unit that can be stepped in another way: a piece in halves, one of several alone."""
    if not units:
        return None
    last = units[-1]
    if last.stop is not None:
        return last if last.stop - last.start >= 2 * GRANULE else None
    return last if len(units) > 1 else None


def _values_of(unit: Unit, memory: torch.Tensor) -> list[Any]:
    """Return what a unit has now: its parameter's elements, or those of its master, and its state."""
    piece = _piece(unit, local_of(unit.param).detach())
    if unit.master is not None and unit.has_master:
        piece = unit.master.view(memory)
    state = state_in(unit, memory) if unit.leaves is not None else {}
    return [piece.to(memory.device), *_pytree.tree_leaves(state)]


def _joined(unit: Unit, parts: Sequence[tuple[torch.Tensor, Any]]) -> list[Any]:
    """Return what the parts of a unit have become as the unit itself has it."""
    if unit.stop is None:
        [(data, state)] = parts
        return [data, *_pytree.tree_leaves(state)]
    (first, state), (second, other) = parts
    joined = [
        torch.cat((one, two)) if isinstance(one, torch.Tensor) and one.shape == first.shape else one
        for one, two in zip(_pytree.tree_leaves(state), _pytree.tree_leaves(other), strict=True)
    ]
    return [torch.cat((first, second)), *joined]


def _piece(unit: Unit, local: torch.Tensor) -> torch.Tensor:
    """Return a unit's elements of its parameter."""
    if unit.stop is None:
        return local
    return elements_of(local, like=local, start=unit.start, stop=unit.stop)
