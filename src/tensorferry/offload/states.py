"""Conversion of optimizer state between torch's dicts and buckets.

A *bucket* contains the state of some *units*, which are parameters or pieces of large ones. Large tensors of a unit's
state are *fields* in the bucket's bytes, and all other values stay in memory, in the unit (``plan.py``). A *leaf* is a
value in the dicts and lists of a state. A *master* is a copy of the parameter in another dtype, which the optimizer
steps instead; it is a field, too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.calls import HOOKS, REPLACED_METHODS
from tensorferry.offload.plan import (
    MASTER,
    PACKED_NBYTES,
    by_param,
    check_storable,
    dense_stride,
    fields_of,
    flatten,
    is_swapped,
    local_of,
    master_field,
    names_in,
    placed,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensorferry.offload.plan import Bucket, Field, Unit
    from tensorferry.store import TensorStore


def state_in(unit: Unit, memory: torch.Tensor) -> dict[Any, Any]:
    """Return a unit's state, with views of its fields in a bucket's memory."""
    assert unit.leaves is not None
    return _with_fields(unit, unit.leaves, lambda each: each.view(memory))


def _with_fields(
    unit: Unit, leaves: Sequence[Any], value_of: Callable[[Field], Any]
) -> dict[Any, Any]:
    """Return a unit's state with these leaves, and with ``value_of(field)`` for those in fields."""
    leaves = list(leaves)
    for at, each in unit.swapped:
        leaves[at] = value_of(each)
    state: dict[Any, Any] = unflatten(leaves, unit.spec)
    return state


def put_states(
    bucket: Bucket,
    memory: torch.Tensor,
    states: Mapping[Unit, dict[Any, Any] | None],
    counters: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Put the states of some units into their bucket; an empty state, or None, deletes that of the unit.

    ``counters`` are tensors of single numbers that new states may use, such as for the number of their steps: these
    stay in memory, and if the step had allocated them between tensors that are freed, the heap would be fragmented.
    Return the bucket's memory: other memory if the states need other fields than the bucket has. The bucket's
    ``nbytes`` is then the size of the new memory, and the old memory is unchanged.

    Raises
    ------
    TypeError
        A tensor is of a class that cannot be stored. Nothing has changed.
    """
    for state in states.values():
        check_storable(state)
    flat = {unit: flatten(state) for unit, state in states.items() if state}
    if not all(_fields_for(unit, *each) is not None for unit, each in flat.items()):
        memory = _laid_out_again(bucket, memory, states)
    for unit in states:
        if unit in flat:
            _put(unit, *flat[unit], memory, counters if unit.leaves is None else None)
        else:
            unit.leaves, unit.spec, unit.swapped = None, None, []
    return memory


def _fields_for(unit: Unit, leaves: Sequence[Any], spec: Any) -> list[tuple[int, Field]] | None:
    """Return the indexes of the large tensors among leaves, with their fields; None if one of them has no field."""
    fields = {each.name: each for each in unit.fields if not each.is_master}
    shape = unit.shape
    found = []
    for at, (name, leaf) in enumerate(zip(names_in(spec), leaves, strict=True)):
        if isinstance(leaf, torch.Tensor) and is_swapped(leaf, shape):
            each = fields.get(name)
            if each is None or (each.dtype, each.shape, each.stride) != (
                leaf.dtype,
                leaf.shape,
                dense_stride(leaf),
            ):
                return None
            found.append((at, each))
    return found


def _laid_out_again(
    bucket: Bucket, memory: torch.Tensor, states: Mapping[Unit, dict[Any, Any] | None]
) -> torch.Tensor:
    """Give the units fields for these states; return new memory, with the masters and the states of other units."""
    kept = {
        unit: state_in(unit, memory)
        for unit in bucket.units
        if unit not in states and unit.leaves is not None
    }
    masters = {unit: unit.master.view(memory) for unit in bucket.units if unit.master is not None}
    bucket.nbytes = 0
    for unit in bucket.units:
        state = states.get(unit, kept.get(unit))
        if state:
            fields = fields_of(state, unit.shape)
            if unit in masters:
                fields.insert(0, master_field(unit))
        else:
            fields = unit.fields
        unit.fields = [placed(each, bucket, unit) for each in fields]
    memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=memory.device)
    for unit, state in kept.items():
        _put(unit, *flatten(state), memory)
    for unit, master in masters.items():
        assert unit.master is not None
        unit.master.view(memory).copy_(master)
    return memory


def _put(
    unit: Unit,
    leaves: list[Any],
    spec: Any,
    memory: torch.Tensor,
    counters: list[torch.Tensor] | None = None,
) -> None:
    """Store a unit's new state, for which it has fields: fields in the bucket's memory, small values in the unit."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()

    def is_inside(leaf: torch.Tensor) -> bool:
        return leaf.device == memory.device and begin <= leaf.data_ptr() < end

    swapped = _fields_for(unit, leaves, spec)
    assert swapped is not None
    sources: list[tuple[Field, torch.Tensor]] = []
    for at, each in swapped:
        leaf, leaves[at] = leaves[at], None
        is_there = leaf.data_ptr() == begin + each.offset and leaf.stride() == each.stride
        if leaf.numel() and not is_there:
            # If the optimizer has put a view of one field in the place of another, the loop below may overwrite the
            # view's elements before it copies them. So copy leaves in the bucket's memory first.
            sources.append((each, leaf.clone() if is_inside(leaf) else leaf))
    for each, leaf in sources:
        each.view(memory).copy_(leaf)
    # A small value may be a view of the bucket's memory, which will later hold another bucket. Copy it.
    unit.leaves = [
        leaf.clone() if isinstance(leaf, torch.Tensor) and is_inside(leaf) else leaf
        for leaf in leaves
    ]
    for at, leaf in enumerate(unit.leaves if counters else ()):
        if isinstance(leaf, torch.Tensor) and not leaf.dim() and counters:
            like = counters[-1]
            if (leaf.dtype, leaf.device) == (like.dtype, like.device):
                unit.leaves[at] = counters.pop().copy_(leaf)
    unit.spec, unit.swapped = spec, swapped


def share_of(unit: Unit, state: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Return a unit's share of its parameter's state, without the master, with copies of small values."""
    if not state:
        return None
    leaves, spec = flatten(
        {key: value for key, value in state.items() if key != MASTER or unit.master is None}
    )
    return unflatten([_share(unit, leaf) for leaf in leaves], spec)  # type: ignore[no-any-return]


def _share(unit: Unit, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    leaf = _elements(unit, leaf)
    return leaf if is_swapped(leaf, unit.shape) else leaf.clone()


def _elements(unit: Unit, value: torch.Tensor) -> torch.Tensor:
    """Return a piece's elements of a tensor with the parameter's shape, or all of any other tensor."""
    value = local_of(value).detach()
    if unit.stop is not None and value.shape == local_of(unit.param).shape:
        return value.reshape(-1)[unit.start : unit.stop]
    return value


def put_master(unit: Unit, state: dict[Any, Any] | None, memory: torch.Tensor) -> None:
    """Set a unit's master to that in its parameter's state, or to the parameter's values if the state has none."""
    if unit.master is not None:
        unit.has_master = state is not None
        if state is not None:
            unit.master.view(memory).copy_(_elements(unit, state.get(MASTER, unit.param)))


def state_of(
    pieces: Sequence[tuple[Bucket, Unit]],
    read: Callable[[Bucket], torch.Tensor],
    store: TensorStore | None = None,
) -> dict[Any, Any]:
    """Return a parameter's state as the optimizer would have it in memory, with the master as an additional entry.

    ``read`` returns a bucket's bytes. With ``store``, large fields are tensors that are mapped from it, as private
    copy-on-write mappings: later writes to the store do not change them. Small fields share pages with other fields and
    are copied instead: for each mapped tensor, ``torch.save`` would write the whole page, and it refuses tensors of
    different dtypes in one storage. The copies come from ``read`` and not from a mapping: if the drive fails, a read
    raises, while access to a mapping would end the process.
    """
    first = pieces[0][1]
    local = local_of(first.param)

    def value_of(each: Field) -> Any:
        is_cut = first.stop is not None and each.shape == (first.numel,)
        ranges = [
            (bucket, field.offset, field.nbytes)
            for bucket, unit in (pieces if is_cut else pieces[:1])
            for field in unit.fields
            if (field.name, field.is_master) == (each.name, each.is_master)
        ]
        nbytes = sum(nbytes for *_, nbytes in ranges)
        if store is not None and nbytes and (len(pieces) > 1 or nbytes >= PACKED_NBYTES):
            mapped = store.map([(bucket.name, begin, size) for bucket, begin, size in ranges])
            elements = torch.frombuffer(mapped, dtype=each.dtype)
        else:
            copied = [read(bucket)[begin : begin + size] for bucket, begin, size in ranges]
            elements = torch.cat(copied).view(each.dtype)
        whole = (
            elements.view(local.shape) if is_cut else elements.as_strided(each.shape, each.stride)
        )
        return like_param(whole, first.param, local)

    state: dict[Any, Any] = {}
    if first.leaves is not None:
        leaves = [
            leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
            for leaf in first.leaves
        ]
        leaves = [like_param(leaf, first.param, local) for leaf in leaves]
        state = _with_fields(first, leaves, value_of)
    if first.has_master and first.master is not None:
        state[MASTER] = value_of(first.master)
    return state


def names_of_states(buckets: Sequence[Bucket]) -> dict[torch.Tensor, list[Any]]:
    """Return the parameters that have state in buckets, with the names of its values."""
    found: dict[torch.Tensor, list[Any]] = {}
    for bucket in buckets:
        for unit in bucket.units:
            if unit.kept and not unit.start:
                names = [] if unit.leaves is None else list(unflatten(unit.leaves, unit.spec))
                found[unit.param] = [*names, *([MASTER] if unit.has_master else [])]
    return found


def mapped_states(
    buckets: Sequence[Bucket], read: Callable[[Bucket], torch.Tensor], store: TensorStore
) -> dict[torch.Tensor, dict[Any, Any]]:
    """Return the states of all parameters that have one, as :func:`state_of` returns them with a store."""
    last: list[Any] = [None, None]  # parameters share buckets: keep the bytes of the last one

    def read_once(bucket: Bucket) -> torch.Tensor:
        if last[0] is not bucket:
            last[:] = bucket, read(bucket)
        return last[1]  # type: ignore[no-any-return]

    return {
        param: state_of(pieces, read_once, store)
        for param, pieces in by_param(buckets).items()
        if any(unit.kept for _, unit in pieces)
    }


def owned(leaf: Any) -> Any:
    """Return a copy of a leaf of a state, in separate memory."""
    return (
        local_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
    )


def like_param(leaf: Any, param: torch.Tensor, local: torch.Tensor) -> Any:
    """Return a state leaf of a sharded parameter as a DTensor like the parameter; other leaves as they are."""
    if local is param or not isinstance(leaf, torch.Tensor) or leaf.shape != local.shape:
        return leaf
    if leaf.dim() == 0:
        return leaf
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    return DTensor.from_local(
        leaf,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer of the same class and attributes for loading: with these groups, no state and no hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(
        {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in vars(optimizer).items()
            if name not in REPLACED_METHODS
        }
    )
    for hooks in HOOKS:
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def cast_like_torch(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    param: torch.Tensor,
    state: Any,
    other_entries: Mapping[str, Any],
) -> Any:
    """Return a parameter's state as the optimizer's own ``load_state_dict`` converts it.

    ``other_entries`` contains the other entries of the state dict.
    """
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    twin = twin_of(optimizer, [{**values, "params": [param]}])
    groups = [{**values, "params": [0]}]
    twin.load_state_dict({**other_entries, "state": {0: state}, "param_groups": groups})
    return twin.state[twin.param_groups[0]["params"][0]]
