"""Steps of the optimizer on one bucket at a time, with the user's own parameters.

A *unit* is a parameter, or a piece of a large one, with its state. A *bucket* is the state of some units, which are
stepped together. A *master* is a copy of a parameter in another dtype, which the optimizer steps instead (``plan.py``).

Each call of the optimizer must find the groups as they are in memory: the same parameters in the same order, with the
same attributes. So the :class:`Lender` lends it the user's parameters for one bucket. Parameters of other buckets have
no gradient during the call, and the optimizer skips them. For a piece of a parameter, data and gradient of the
parameter are replaced by those of the piece. An optimizer that also handles parameters without gradients gets groups
that contain only the bucket's parameters.

A *stand-in* is a parameter that is lent where the user's own cannot be: for a master, which has another dtype
(assigning data of another dtype drops the hooks that DistributedDataParallel has put on the parameter's gradient); for
a copy in host memory; and for this rank's part of a DTensor. The *target* of a parameter is the tensor that the
optimizer gets for it: the parameter itself, or its stand-in.

Before the first step, trials with small data have shown that the optimizer may be called in this way (``probe.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.offload.dryrun import NotPointwiseError, PieceGuard
from tensorferry.offload.errors import NotSeparableError
from tensorferry.offload.optimizer_snapshot import RngSnapshot, Snapshot, differing, frozen, same
from tensorferry.offload.plan import GRANULE, local_of, params_in
from tensorferry.offload.states import UnplannedError, elements_of, keep_state, state_in

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from tensorferry.offload.plan import Unit


def class_method(optimizer: torch.optim.Optimizer, name: str = "step") -> Callable[[], Any]:
    """Return a method of an optimizer's class, without torch's profiler wrapper and the hooks around step()."""
    method: Any = getattr(type(optimizer), name)
    if getattr(method, "hooked", False):
        method = method.__wrapped__
    return lambda: method(optimizer)


class Lender:
    """Lends the optimizer the parameters of one bucket at a time.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer that steps. Its groups are those of the offloaded optimizer.
    step_dtype : callable
        Returns the dtype in which a parameter is stepped.
    on_host : bool
        Step parameters of other devices as copies in host memory.
    alone : bool
        Whether groups contain only the lent parameters during a call, with or without gradients. Some optimizers need
        this, because they also handle parameters without gradients.
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
        self.step_dtype = step_dtype
        self._on_host = on_host
        self.alone = alone
        #: Returns a parameter's gradient, or a :class:`GradientElsewhere` if the gradient is not in memory.
        self.gradient_of: Callable[[torch.Tensor], Any] = operator.attrgetter("grad")
        self._stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._grads: dict[torch.Tensor, Any] = {}
        self._originals: tuple[Any, list[list[torch.Tensor]]] | None = None
        # The values of groups and attributes at the beginning of the current step, and after its first call.
        self._snapshot: Snapshot | None = None
        self._values_after: Any = None
        #: The return value of the optimizer's last call.
        self.returned: Any = None
        #: Parameters with a master in memory.
        self.masters: set[torch.Tensor] = set()

    def is_direct(self, param: torch.Tensor) -> bool:
        """Return whether the optimizer gets the parameter itself, and not a stand-in."""
        return (
            local_of(param) is param
            and self.step_dtype(param) == param.dtype
            and not (self._on_host and param.device.type != "cpu")
        )

    def target_of(self, param: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the optimizer gets for a parameter: the parameter itself or its stand-in."""
        if self.is_direct(param):
            return param
        target = self._stand_ins.get(param)
        if target is None:
            local = local_of(param).detach()
            device = torch.device("cpu") if self._on_host else local.device
            target = torch.nn.Parameter(
                torch.zeros((), dtype=self.step_dtype(param), device=device).expand(local.shape),
                requires_grad=param.requires_grad and local.is_floating_point(),
            )
            self._stand_ins[param] = target
        target.__dict__.update(param.__dict__)
        return target

    def begin(self, snapshot: Snapshot | None = None) -> Snapshot:
        """Take all gradients from the parameters, put stand-ins into the groups, and return the step's snapshot.

        The snapshot has the values that the step begins with. To continue a step, pass the snapshot of its first part.
        """
        optimizer = self._optimizer
        self._snapshot = snapshot or Snapshot(optimizer)
        self._values_after = None
        self._originals = optimizer.state, [group["params"] for group in optimizer.param_groups]
        for param in params_in(optimizer.param_groups):
            self._grads[param] = _redistribute(param, self.gradient_of(param))
        for group in optimizer.param_groups:
            targets = [self.target_of(param) for param in group["params"]]
            for param in group["params"]:
                param.grad = None
            if any(each is not own for each, own in zip(targets, group["params"], strict=True)):
                group["params"] = targets
        return self._snapshot

    def end(self, *, undone: bool) -> None:
        """Return all gradients to the parameters; with ``undone`` also restore the values that the step began with."""
        if self._originals is None:
            return
        state, params = self._originals
        optimizer = self._optimizer
        optimizer.state = state
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        for param, grad in self._grads.items():
            param.grad = grad.kept if isinstance(grad, GradientElsewhere) else grad
        if undone and self._snapshot is not None:
            self._snapshot.restore()
        self._grads, self._originals, self._snapshot, self._values_after = {}, None, None, None

    def has_work(self, unit: Unit) -> bool:
        """Return whether the step involves a unit."""
        return self.alone or self._grads.get(unit.param) is not None

    def gradients(
        self, units: Sequence[Unit] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield parameters with their gradients: those of ``units``, or all."""
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
        """Call a method of the optimizer for some units, with their bucket in ``memory``.

        Parameters
        ----------
        units : sequence of Unit
            Units without a gradient are skipped, unless the optimizer handles parameters without one (``alone``).
        memory : torch.Tensor
            The bucket's bytes.
        function : callable
            The method.
        check : bool
            Also step copies of one unit in a different way, and compare the results.

        Raises
        ------
        NotSeparableError
            The call left other values in groups or attributes than calls for other buckets did, or created state that
            was not planned; or the two ways of stepping gave different results.
        """
        assert self._snapshot is not None
        optimizer = self._optimizer
        units = [unit for unit in units if self.has_work(unit)]
        checked = _unit_to_check(units) if check else None
        expected = self._step_copy(checked, memory, function) if checked is not None else None
        # Counters in groups and attributes must advance once per step, and not once per call. So each call but the
        # first starts from the values that the step began with.
        if self._values_after is not None or expected is not None:
            self._snapshot.restore()
        makes_state = any(unit.leaves is None for unit in units)
        lent: list[tuple[Unit, torch.Tensor, torch.Tensor]] = []
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        optimizer.state = state
        try:
            for unit in units:
                lent.append(self._lend_unit(unit, memory))
                if unit.leaves is not None:
                    state[lent[-1][1]] = state_in(unit, memory)
            ids = {id(target) for _, target, _ in lent} if self.alone else None
            with only_params(optimizer, ids):
                self._run(function, units)
            self._check_values()
            for unit, target, _ in lent:
                try:
                    keep_state(unit, optimizer.state.get(target, {}), memory)
                except UnplannedError as error:
                    raise self._error(
                        f"its state of a parameter of shape {tuple(unit.param.shape)} has {error}, which it did not "
                        "have in the test steps when it was offloaded"
                    ) from None
        finally:
            optimizer.state = defaultdict(dict)
            for unit, target, own in lent:
                self._take_back(unit, target, own, memory)
        # The optimizer has created state for these units, in heap memory outside of the budget, and keep_state() has
        # copied it into the bucket. Free the heap memory now, before the optimizer creates state for the next bucket.
        if makes_state:
            del state
            trim_heap()

        if checked is not None and expected is not None:
            found = _values_of(checked, memory)
            if not same(found, expected):
                raise self._error(
                    "a check of this step failed: a copy of a parameter of shape "
                    f"{tuple(checked.param.shape)} that was stepped "
                    f"{'alone' if checked.stop is None else 'in smaller pieces'} has other values than the parameter"
                )

    def _step_copy(
        self, unit: Unit, memory: torch.Tensor, function: Callable[[], Any]
    ) -> list[Any]:
        """Return a unit's values after a step of copies: of the unit alone, or of a piece in two halves."""
        assert self._snapshot is not None
        piece = _piece(unit, local_of(unit.param).detach())
        numel = piece.numel()
        half = numel // 2 // GRANULE * GRANULE
        parts = [slice(0, half), slice(half, numel)] if unit.stop is not None else [slice(None)]
        before = state_in(unit, memory) if unit.leaves is not None else {}
        made = []
        for part in parts:
            target, own, lent, grad = self._prepare(unit, memory)
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
                with only_params(self._optimizer, {id(target)} if self.alone else None):
                    function()
                made.append((target.data, dict(state.get(target, {}))))
            finally:
                target.grad = None
                target.data = own
                self._optimizer.state = defaultdict(dict)
        return _join_parts(unit, made)

    def _run(self, function: Callable[[], Any], units: Sequence[Unit]) -> None:
        # Guard the first piece of each parameter only: the other pieces go through the same operations.
        lengths = {unit.stop for unit in units if unit.stop is not None and not unit.start}
        rng = RngSnapshot() if self._values_after is None else None
        try:
            with PieceGuard(lengths) if lengths else contextlib.nullcontext():
                self.returned = function()
            if rng is not None and rng.has_changed():
                rng.restore()
                raise self._error(
                    "its step now draws random numbers, which it did not in the test steps when it was offloaded"
                )
        except NotPointwiseError as error:
            raise self._error(
                f"its step now calls {error}, which does not treat each element independently and was not called in "
                "the test steps when it was offloaded, and some parameters are stepped in pieces"
            ) from None

    def _error(self, what: str) -> NotSeparableError:
        return NotSeparableError(
            f"{type(self._optimizer).__name__} cannot be offloaded exactly: {what}. The step is partly done"
        )

    def _check_values(self) -> None:
        assert self._snapshot is not None
        after = {**self._snapshot.frozen(), "the return value of step()": frozen(self.returned)}
        if self._values_after is None:
            self._values_after = after
            return
        name = differing(self._values_after, after)
        if name is not None:
            raise self._error(
                f"{name} depends on the gradients of several parameters at once, which it did not in the test steps "
                "when it was offloaded"
            )

    def _lend_unit(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[Unit, torch.Tensor, torch.Tensor]:
        """Give the optimizer a unit; return the unit, its target (parameter or stand-in), and the target's own data."""
        target, own, lent, grad = self._prepare(unit, memory)
        if target is not unit.param or unit.stop is not None:
            target.data = lent
        target.grad = grad
        return unit, target, own

    def _prepare(
        self, unit: Unit, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a unit's target, the target's own data, and the data and gradient that are lent for the step."""
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
        """End a unit's loan: restore its target's own data, and copy the stepped values into parameter and master."""
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

    # If the whole state fits in memory, the optimizer keeps it in its own `state`, without buckets, and one call steps
    # all parameters.

    def call_in_memory(self, function: Callable[[], Any]) -> None:
        """Call a method of the optimizer for all parameters, with the state that the optimizer holds itself."""
        lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for param in params_in(self._optimizer.param_groups):
                if self.is_direct(param):
                    continue
                target = self.target_of(param)
                local, grad = local_of(param).detach(), _redistribute(param, param.grad)
                grad = grad.lent() if isinstance(grad, GradientElsewhere) else grad
                if target.dtype != local.dtype:
                    self.set_master(param, None)
                else:
                    target.data = local.to(target.device)
                lent.append((param, target))  # from here on the target has the parameter's values
                if grad is not None:
                    target.grad = local_of(grad).to(target.device, target.dtype)
            with params_replaced(self._optimizer, lambda params: list(map(self.target_of, params))):
                self.returned = function()
        finally:
            for param, target in lent:
                local = local_of(param).detach()
                target.grad = None
                if target.data_ptr() != local.data_ptr():
                    local.copy_(target.data)

    def set_master(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """Create or update the master of a parameter in memory, from ``value`` or from the parameter."""
        target, local = self.target_of(param), local_of(param).detach()
        known = param in self.masters
        if not known:
            target.data = torch.empty_like(local, dtype=target.dtype, device=target.device)
        if value is not None:
            target.data.copy_(local_of(value))
        else:
            renew_master(target.data, local, known=known)
        self.masters.add(param)


@contextlib.contextmanager
def params_replaced(
    optimizer: torch.optim.Optimizer,
    other_params: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Iterator[None]:
    """Replace the parameters of each group by ``other_params(params)`` for the duration of a ``with`` block."""
    kept = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = other_params(params)
        yield
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params


def only_params(
    optimizer: torch.optim.Optimizer, ids: Container[int] | None
) -> contextlib.AbstractContextManager[None]:
    """Reduce the groups to the parameters with these ids for a ``with`` block; None leaves the groups unchanged."""
    if ids is None:
        return contextlib.nullcontext()
    return params_replaced(optimizer, lambda params: [each for each in params if id(each) in ids])


class GradientElsewhere(NamedTuple):
    """A gradient for which the optimizer gets another tensor than the parameter's ``grad``."""

    # The gradient before the step; its identity and version show whether a user has changed it since.
    given: torch.Tensor
    kept: torch.Tensor | None  # the parameter's ``grad`` after the step
    lent: Callable[[], torch.Tensor]  # returns the gradient for the optimizer


def _redistribute(param: torch.Tensor, grad: Any) -> Any:
    """Return a DTensor gradient redistributed to its parameter's placements, which sums partial gradients over ranks.

    This is a collective operation. So it runs at the beginning of each step for all parameters, in the same order on
    all ranks, and not when a bucket is stepped.
    """
    placements = getattr(param, "placements", None)
    if (
        grad is None
        or placements is None
        or getattr(grad, "placements", None) in (None, placements)
    ):
        return grad
    placed = grad.redistribute(placements=placements)
    return GradientElsewhere(grad, grad, lambda: placed)


def renew_master(master: torch.Tensor, value: torch.Tensor, *, known: bool) -> None:
    """Copy those elements of a parameter into its master that have been written since the master's last step.

    Without such a write, an element of the parameter is equal to that of the master, rounded to the parameter's dtype.
    If ``known`` is false, the master has no values yet, and gets all elements.
    """
    value = value.to(master.device)
    if not known:
        master.copy_(value)
        return
    written = master.to(value.dtype) != value
    if bool(written.any()):
        master.copy_(torch.where(written, value.to(master.dtype), master))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides: a kernel may sum elements in memory order, which determines rounding."""
    if 0 in tensor.stride():
        return tensor.clone()
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor)


def trim_heap() -> None:
    """Return freed heap memory to the system: glibc keeps it, and the process would exceed its memory budget."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _unit_to_check(units: Sequence[Unit]) -> Unit | None:
    """Return a unit that can be stepped in a second way: a piece in halves, or one of several units alone."""
    if not units:
        return None
    last = units[-1]
    if last.stop is not None:
        return last if last.stop - last.start >= 2 * GRANULE else None
    return last if len(units) > 1 else None


def _values_of(unit: Unit, memory: torch.Tensor) -> list[Any]:
    """Return a unit's current values: the elements of its parameter or master, and its state."""
    piece = _piece(unit, local_of(unit.param).detach())
    if unit.master is not None and unit.has_master:
        piece = unit.master.view(memory)
    state = state_in(unit, memory) if unit.leaves is not None else {}
    return [piece.to(memory.device), *_pytree.tree_leaves(state)]


def _join_parts(unit: Unit, parts: Sequence[tuple[torch.Tensor, Any]]) -> list[Any]:
    """Combine the results of a unit's parts into the values that the unit itself would have."""
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
    """Return a unit's elements of its parameter's local tensor."""
    if unit.stop is None:
        return local
    return elements_of(local, like=local, start=unit.start, stop=unit.stop)
