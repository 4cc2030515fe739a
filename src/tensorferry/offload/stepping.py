"""One bucket's share of a step: its units are handed to the optimizer as if they were all there is.

The optimizer is the user's own object. For the time of a bucket its groups have the bucket's units for parameters, and
its state has views of the slot. Group values, and numbers that the optimizer keeps as attributes, are those of before
the step for each bucket; afterwards all buckets must have arrived at the same ones, which then hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload import probe as probing
from tensorferry.offload.errors import NotSeparableError
from tensorferry.offload.plan import flatten, unflatten
from tensorferry.offload.probe import local_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensorferry.offload.plan import Bucket, Field, Unit

# What GradScaler leaves for optimizers that unscale by themselves.
_SCALING = ("grad_scale", "found_inf")


class Step:
    """A step on its way, bucket after bucket.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        What steps.
    groups : sequence of dict
        The parameters' groups, as they are before the step.
    scaling : dict
        ``grad_scale`` and ``found_inf``, where GradScaler has set them.
    on_host : bool
        Parameters that are elsewhere are stepped as copies in host memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dict[str, Any]],
        scaling: dict[str, Any],
        *,
        on_host: bool = False,
    ) -> None:
        self._on_host = on_host
        self._optimizer = optimizer
        self._groups = groups
        self._values = [probing.values_of(group) for group in groups]
        self._attributes = probing.scalars_of(optimizer)
        self._scaling = scaling
        self._new_values: dict[int, dict[str, Any]] = {}
        self._new_attributes: dict[str, Any] | None = None
        self._aligned_grads: tuple[int, torch.Tensor] | None = None

    def run(self, parts: Sequence[tuple[Bucket, torch.Tensor]], *, lasting: bool = False) -> None:
        """Step the units of buckets, each with its memory, that have gradients; in one call of the optimizer.

        ``lasting`` says that the next step will probably have them in the same memory.

        Raises
        ------
        NotSeparableError
            It changed its group's values otherwise than other buckets did.
        """
        first = parts[0][0]
        lent: Lent | None = first.lent
        first.lent = None
        born = False
        if lent is None or not lent.renew(parts):
            lent = self._lend(parts)
        optimizer = self._optimizer
        with self._lent(lent.by_group, lent.state):
            probing.bare_step(optimizer)
            self._compare(sorted(lent.by_group))
            if not lent.is_settled(optimizer.state):
                born = any(not each.unit.born for each in lent.units)
                for each in lent.units:
                    keep_state(each.unit, optimizer.state.get(each.target, {}), each.memory)
                if lasting:
                    lent.settle(optimizer.state)
        for each in lent.given_back:
            self._give_back(each.unit, each.target, each.memory)
        if lent.lasts:
            lent.let_go_of_gradients()
            first.lent = lent
        if born:
            del lent
            _trim_heap()

    def _lend(self, parts: Sequence[tuple[Bucket, torch.Tensor]]) -> Lent:
        """Return the units that have gradients, as the optimizer is to have them."""
        lent = Lent(parts)
        for bucket, memory in parts:
            for unit in bucket.units:
                if unit.param.grad is None:
                    continue
                target = self._target(unit, memory)
                lent.add(LentUnit(unit, target, memory))
        return lent

    def run_rest(self) -> None:
        """Step the groups that no bucket has stepped: they have no gradients, but may count their steps.

        Raises
        ------
        NotSeparableError
            As with :meth:`run`.
        """
        by_group = {
            number: list(group["params"])
            for number, group in enumerate(self._groups)
            if number not in self._new_values
        }
        if by_group:
            with self._lent(by_group, defaultdict(dict)):
                probing.bare_step(self._optimizer)
                self._compare(list(by_group))

    @contextlib.contextmanager
    def _lent(
        self, by_group: dict[int, list[torch.Tensor]], state: defaultdict[torch.Tensor, Any]
    ) -> Iterator[None]:
        """Let the optimizer have these parameters, in groups as before the step, and this state."""
        optimizer = self._optimizer
        kept = optimizer.param_groups, optimizer.state
        vars(optimizer).update(self._attributes)
        vars(optimizer).update(self._scaling)
        optimizer.param_groups = [
            {**probing.values_of(self._values[number]), "params": list(by_group[number])}
            for number in sorted(by_group)
        ]
        optimizer.state = state
        try:
            yield
        finally:
            optimizer.param_groups, optimizer.state = kept
            for name in self._scaling:
                vars(optimizer).pop(name, None)

    def finish(self) -> None:
        """Let the groups, and the optimizer, have the values that a step leaves."""
        for number, values in self._new_values.items():
            group = self._groups[number]
            for key, value in values.items():
                before = self._values[number].get(key)
                if key in group and probing.same(before, value):
                    continue
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a scheduler may hold it
                else:
                    group[key] = value
        if self._new_attributes is not None:
            vars(self._optimizer).update(self._new_attributes)

    def _compare(self, groups: list[int]) -> None:
        optimizer = self._optimizer
        attributes = probing.scalars_of(optimizer)
        for name in self._scaling:
            attributes.pop(name, None)
        if self._new_attributes is None:
            self._new_attributes = attributes
        differing = next(
            (
                f"its attribute {name!r}"
                for name, value in attributes.items()
                if not probing.same(value, self._new_attributes.get(name))
            ),
            None,
        )
        for number, group in zip(groups, optimizer.param_groups, strict=True):
            values = {key: value for key, value in group.items() if key != "params"}
            known = self._new_values.setdefault(number, values)
            for key, value in values.items():
                if not probing.same(value, known.get(key)):
                    differing = f"its group's {key!r}"
        if differing is not None:
            raise NotSeparableError(
                f"{type(optimizer).__name__} cannot be offloaded exactly: {differing} depends on the gradients of "
                "several parameters at once, which small ones did not show. Parameters are partly stepped now"
            )

    def _target(self, unit: Unit, memory: torch.Tensor) -> torch.Tensor:
        """Return what the optimizer steps for a unit, with its gradient."""
        local, grad = local_of(unit.param), local_of(unit.param.grad)  # type: ignore[arg-type]
        master = field_of(unit, "master")
        elsewhere = self._on_host and local.device.type != "cpu"
        if master is None and unit.stop is None and local is unit.param and not elsewhere:
            return local
        if unit.stop is None:
            piece, piece_grad = local.detach(), grad
        else:
            if grad.stride() != local.stride():
                grad = self._aligned(unit, local, grad)
            piece, piece_grad = _elements(local, unit), _elements(grad, unit)
        if master is not None:
            source, piece = piece, master.view(memory)
            if not unit.own:
                piece.copy_(source)
            piece_grad = piece_grad.to(piece.dtype)
        if elsewhere:
            piece, piece_grad = piece.to("cpu"), piece_grad.to("cpu")
        target = torch.nn.Parameter(piece, requires_grad=unit.param.requires_grad)
        target.__dict__.update(getattr(unit.param, "__dict__", {}))
        target.grad = piece_grad
        return target

    def _aligned(self, unit: Unit, local: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient laid out as its parameter is: once for all pieces."""
        if self._aligned_grads is None or self._aligned_grads[0] != unit.index:
            laid_out = torch.empty_strided(
                local.shape, local.stride(), dtype=grad.dtype, device=grad.device
            )
            self._aligned_grads = unit.index, laid_out.copy_(grad)
        return self._aligned_grads[1]

    def _give_back(self, unit: Unit, target: torch.Tensor, memory: torch.Tensor) -> None:
        local = local_of(unit.param).detach()
        elsewhere = target.device != local.device
        if not elsewhere and (not unit.fields or unit.fields[0].leaf is not None):
            return
        piece = _piece(unit)
        if elsewhere or field_of(unit, "master") is not None:
            piece.copy_(target.detach())
        stored = field_of(unit, "param")
        if stored is not None:
            stored.view(memory).copy_(piece)
        unit.own = True


def _trim_heap() -> None:
    """Give the system back what glibc keeps for later: new state, which is in slots now, would add up to a budget's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class LentUnit:
    """A unit, and what the optimizer steps for it."""

    def __init__(self, unit: Unit, target: torch.Tensor, memory: torch.Tensor) -> None:
        self.unit = unit
        self.target = target
        self.memory = memory
        self.leaves: list[Any] | None = None
        self.is_direct = target is unit.param
        self._address = 0 if self.is_direct else unit.param.data_ptr()

    def renew(self) -> bool:
        """Have the parameter's new gradient; False where it, or the state, is another than before."""
        unit = self.unit
        param, grad = unit.param, unit.param.grad
        if grad is None or unit.leaves is not self.leaves:
            return False
        if self.is_direct:
            return True
        target = self.target
        if (
            param.data_ptr() != self._address
            or target.requires_grad != param.requires_grad
            or (unit.stop is not None and grad.stride() != param.stride())
        ):
            return False
        piece = grad if unit.stop is None else _elements(grad, unit)
        target.__dict__.update(param.__dict__)
        target.grad = piece if piece.dtype == target.dtype else piece.to(target.dtype)
        return True


class Lent:
    """Units of buckets as the optimizer has them for a step; and for the next one, if nothing else has changed."""

    def __init__(self, parts: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        self.units: list[LentUnit] = []
        self.given_back: list[LentUnit] = []
        self.by_group: dict[int, list[torch.Tensor]] = {}
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self.lasts = False
        self._parts = parts
        self._states: list[dict[Any, Any]] = []
        self._values: list[Any] = []
        self._views: list[torch.Tensor] = []
        self._places: list[tuple[Any, ...]] = []

    def add(self, each: LentUnit) -> None:
        """Add a unit."""
        unit = each.unit
        self.units.append(each)
        self.by_group.setdefault(unit.group, []).append(each.target)
        if unit.born:
            self.state[each.target] = state_in(unit, each.memory)
        own_field = bool(unit.fields) and unit.fields[0].leaf is None
        if own_field or each.target.device != unit.param.device:
            self.given_back.append(each)

    def renew(self, parts: Sequence[tuple[Bucket, torch.Tensor]]) -> bool:
        """Have new gradients; False where this is of other buckets, or memory, or something else has changed."""
        return (
            len(parts) == len(self._parts)
            and all(
                bucket is before and memory is memory_before
                for (bucket, memory), (before, memory_before) in zip(
                    parts, self._parts, strict=True
                )
            )
            and all(each.renew() for each in self.units)
        )

    def let_go_of_gradients(self) -> None:
        """Keep none that its parameter does not."""
        for each in self.units:
            if not each.is_direct:
                each.target.grad = None

    def settle(self, state: Any) -> None:
        """Know the state that has been kept: where the next step leaves the same tensors, nothing need be kept."""
        self.lasts = False
        if state is not self.state or len(self.units) != sum(
            len(bucket.units) for bucket, _ in self._parts
        ):
            return
        self._states, self._values, self._views = [], [], []
        for each in self.units:
            unit = each.unit
            at_home = type(state.get(each.target)) is dict and unit.born and not unit.stray
            stays = each.is_direct or (
                local_of(unit.param) is unit.param and each.target.device == unit.param.device
            )
            if not at_home or not stays:
                return
            values = list(state[each.target].values())
            kept = state_in(unit, each.memory)
            if list(kept) != list(state[each.target]) or not _are(kept.values(), values):
                return
            each.leaves = unit.leaves
            self._states.append(state[each.target])
            self._values += values
            self._views += unit.views(each.memory)
        self._places = list(map(_place_of, self._views))
        self.lasts = True

    def is_settled(self, state: Any) -> bool:
        """Return whether the state is what it was: the same tensors, in their places."""
        return (
            self.lasts
            and state is self.state
            and len(state) == len(self._states)
            and _are(map(state.get, (each.target for each in self.units)), self._states)
            and sum(map(len, self._states)) == len(self._values)
            and _are(
                itertools.chain.from_iterable(map(dict.values, self._states)),
                self._values,
            )
            and list(map(_place_of, self._views)) == self._places
        )


def _are(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _place_of(view: torch.Tensor) -> tuple[Any, ...]:
    return view.data_ptr(), view.stride(), view.shape


def note_param(unit: Unit, memory: torch.Tensor) -> None:
    """Put a parameter that has not been stepped yet into its bucket."""
    unit.fields[0].view(memory).copy_(_piece(unit))


def set_param(unit: Unit, memory: torch.Tensor) -> None:
    """Give a unit's parameter the values that its bucket has."""
    field = field_of(unit, "master") or field_of(unit, "param")
    if field is not None:
        _piece(unit).copy_(field.view(memory))


def field_of(unit: Unit, name: str) -> Field | None:
    """Return a field of the unit itself, by name."""
    first = unit.fields[0] if unit.fields else None
    return first if first is not None and first.leaf is None and first.name == name else None


def state_in(unit: Unit, memory: torch.Tensor) -> Any:
    """Return a unit's state, with views of a slot in it."""
    assert unit.leaves is not None
    leaves = list(unit.leaves)
    if not unit.stray:
        for field, view in zip(unit.fields, unit.views(memory), strict=True):
            if field.leaf is not None:
                leaves[field.leaf] = view
    return unflatten(leaves, unit.spec)


def keep_state(unit: Unit, state: Any, memory: torch.Tensor) -> None:
    """Keep a unit's state: in its slot, where the optimizer made new tensors; what is small, in memory."""
    if not state and field_of(unit, "master") is None:
        unit.leaves = None  # as torch's: it has none
        return
    leaves, spec = flatten(state)
    unit.spec = spec
    places = unit.views(memory)
    if not all(map(_is_at, places, unit.fields, [memory.data_ptr()] * len(places))):
        unit.forget_views()  # the optimizer has given them other memory (`.data =`)
        places = unit.views(memory)
    unit.stray = spec != unit.expected or not all(
        field.leaf is None or leaves[field.leaf] is place or _fits(leaves[field.leaf], field)
        for field, place in zip(unit.fields, places, strict=True)
    )
    if unit.stray:
        # A copy, since some may lie in the slot, which others will use.
        unit.leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return
    at_home = {
        field.leaf: place
        for field, place in zip(unit.fields, places, strict=True)
        if field.leaf is not None
    }
    # Some may lie in the slot, which others will use, or where the optimizer has exchanged two, in another's place.
    leaves = [
        leaf.clone()
        if isinstance(leaf, torch.Tensor) and leaf is not at_home.get(at) and _lies_in(leaf, memory)
        else leaf
        for at, leaf in enumerate(leaves)
    ]
    for leaf_at, place in at_home.items():
        if leaves[leaf_at] is not place:
            place.copy_(leaves[leaf_at])
        leaves[leaf_at] = None
    unit.leaves = leaves


def _lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def _is_at(place: torch.Tensor, field: Field, bucket: int) -> bool:
    return (
        place.data_ptr() == bucket + field.offset
        and place.stride() == field.stride
        and place.shape == field.shape
    )


def _fits(leaf: Any, field: Field) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.dtype == field.dtype
        and tuple(leaf.shape) == field.shape
    )


def _piece(unit: Unit) -> torch.Tensor:
    """Return a unit's elements of its parameter."""
    local = local_of(unit.param).detach()
    return local if unit.stop is None else _elements(local, unit)


def _elements(tensor: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return a unit's elements of a dense tensor, in the order in which they lie in memory."""
    return elements_of(tensor)[unit.start : unit.stop]


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
