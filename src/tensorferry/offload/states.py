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

from tensorferry.offload.optimizer_snapshot import ATOMS, HOOKS, REPLACED_METHODS, reaches_tensor
from tensorferry.offload.plan import (
    MASTER,
    PACKED_NBYTES,
    SMALL_NBYTES,
    flatten,
    is_swapped,
    local_of,
    names_in,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensorferry.offload.plan import Bucket, Field, Unit
    from tensorferry.store import TensorStore

# Tensor classes without data beyond their elements.
PLAIN_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter)


class UnplannedError(ValueError):
    """A state has a tensor for which no field was planned, and which cannot stay in memory as a small value."""


def state_in(unit: Unit, memory: torch.Tensor) -> dict[Any, Any]:
    """Return a unit's state, with views of its fields in a bucket's memory."""
    assert unit.leaves is not None
    return _with_fields(unit, unit.leaves, lambda each: unit.view(each, memory))


def _with_fields(
    unit: Unit, leaves: Sequence[Any], value_of: Callable[[Field], Any]
) -> dict[Any, Any]:
    """Return a unit's state with these leaves, and with ``value_of(field)`` for those in fields."""
    leaves = list(leaves)
    for at, each in unit.swapped:
        leaves[at] = value_of(each)
    state: dict[Any, Any] = unflatten(leaves, unit.spec)
    return state


def shape_of_state(unit: Unit, shape: Sequence[int] | None = None) -> dict[Any, Any] | None:
    """Return a unit's state with meta tensors in place of its fields.

    The meta tensors of a piece get the shape of the whole parameter: ``shape``, or that of ``unit.param``.
    """
    if unit.leaves is None:
        return None
    whole = local_of(unit.param).shape if shape is None else shape

    def shaped(each: Field) -> torch.Tensor:
        size = each.shape if unit.stop is None else whole
        return torch.empty(size, dtype=each.dtype, device="meta")

    return _with_fields(unit, unit.leaves, shaped)


def keep_state(unit: Unit, state: dict[Any, Any], memory: torch.Tensor) -> None:
    """Store a unit's new state: fields in the bucket's memory, small values in the unit.

    Raises
    ------
    UnplannedError
        A tensor has no field and is not small; nothing has changed.
    """
    if not state:
        unit.leaves, unit.spec, unit.swapped = None, None, []
        return
    leaves, spec = flatten(state)
    fields = {each.name: each for each in unit.fields if not each.is_master}
    swapped: list[tuple[int, Field]] = []
    for at, (name, leaf) in enumerate(zip(names_in(spec), leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            if name in fields and _fits(leaf, fields[name]):
                swapped.append((at, fields[name]))
            elif type(leaf) not in PLAIN_TENSOR_CLASSES or leaf.nbytes >= SMALL_NBYTES:
                raise UnplannedError(
                    f"{name!r}, a {type(leaf).__name__} of {leaf.dtype} and shape {tuple(leaf.shape)}"
                )
        elif not isinstance(leaf, ATOMS) and reaches_tensor(leaf):
            raise UnplannedError(f"{name!r}, a {type(leaf).__name__} that holds tensors")
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    moved = False
    sources: list[tuple[Field, torch.Tensor]] = []
    for at, each in swapped:
        leaf, place = leaves[at], begin + each.offset
        leaves[at] = None
        is_there = leaf.data_ptr() == place and leaf.stride() == each.stride
        if is_there or not leaf.numel():
            continue
        # If the optimizer has put a view of one field in the place of another, the loop below may overwrite the view's
        # elements before it copies them. So copy leaves in the bucket's memory first.
        inside = begin <= leaf.data_ptr() < end
        sources.append((each, leaf.clone() if inside else leaf))
        moved = True
    if moved:
        unit.forget_views()  # the optimizer may have given these tensors other memory (`.data =`)
    for each, leaf in sources:
        each.view(memory).copy_(leaf)
    # A small value may be a view of the bucket's memory, which will later hold another bucket. Copy it.
    unit.leaves = [
        leaf.clone()
        if isinstance(leaf, torch.Tensor)
        and leaf.device == memory.device
        and begin <= leaf.data_ptr() < end
        else leaf
        for leaf in leaves
    ]
    unit.spec, unit.swapped = spec, swapped


def _fits(leaf: torch.Tensor, each: Field) -> bool:
    return (
        type(leaf) in PLAIN_TENSOR_CLASSES
        and leaf.dtype == each.dtype
        and tuple(leaf.shape) == each.shape
    )


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
        at = first.fields.index(each)
        ranges = [
            (bucket, unit.fields[at].offset, unit.fields[at].nbytes) for bucket, unit in pieces
        ]
        nbytes = sum(nbytes for *_, nbytes in ranges)
        if store is not None and nbytes and (len(pieces) > 1 or nbytes >= PACKED_NBYTES):
            mapped = store.map([(bucket.name, begin, size) for bucket, begin, size in ranges])
            elements = torch.frombuffer(mapped, dtype=each.dtype)
        else:
            copied = [read(bucket)[begin : begin + size] for bucket, begin, size in ranges]
            elements = torch.cat(copied).view(each.dtype)
        whole = (each.shape, each.stride) if first.stop is None else (local.shape, first.layout)
        return like_param(elements.as_strided(*whole), first.param, local)

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


def put_state(unit: Unit, state: dict[Any, Any], memory: torch.Tensor) -> None:
    """Put a parameter's state, or a piece's share of it, into its bucket.

    Raises
    ------
    UnplannedError
        A tensor has no field, and is not small.
    """
    state = dict(state)
    master = state.pop(MASTER, None) if unit.master is not None else None
    leaves, spec = flatten(state)
    leaves = [_share(unit, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    keep_state(unit, unflatten(leaves, spec), memory)
    if unit.leaves is not None:  # copy small values, which the caller may change
        unit.leaves = [
            leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in unit.leaves
        ]
    if unit.master is not None:
        value = unit.param.detach() if master is None else master
        unit.master.view(memory).copy_(_share(unit, value))
        unit.has_master = True


def _share(unit: Unit, value: torch.Tensor) -> torch.Tensor:
    """Return a piece's elements of a tensor with the parameter's shape, or all of any other tensor."""
    value, local = local_of(value), local_of(unit.param)
    if unit.stop is None or value.shape != local.shape:
        return value
    return elements_of(value, like=local, start=unit.start, stop=unit.stop)


def elements_of(tensor: torch.Tensor, *, like: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of a tensor, in the memory order of a dense tensor ``like`` of the same shape.

    The result is a view if both have the same strides, and otherwise a copy of these elements.
    """
    tensor = tensor.detach()
    if tensor.stride() == like.stride():
        return tensor.as_strided((tensor.numel(),), (1,))[start:stop]
    strides: Any = like.stride()
    order = sorted(range(like.dim()), key=lambda at: (-strides[at], -like.shape[at]))
    return _range_of(tensor.permute(order), start, stop)


def _range_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    if tensor.is_contiguous() or tensor.dim() < 2:
        return tensor.reshape(-1)[start:stop]
    inner = tensor.numel() // tensor.shape[0]
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _range_of(tensor[first], start - first * inner, stop - first * inner)
    head = _range_of(tensor[first], start - first * inner, inner)
    tail = _range_of(tensor[last], 0, stop - last * inner)
    return torch.cat((head, tensor[first + 1 : last].reshape(-1), tail))


def is_planned(index: int, pieces: Sequence[tuple[Bucket, Unit]], state: Any) -> bool:
    """Return whether each tensor of a parameter's state has a planned field, or is small enough to need none.

    Raises
    ------
    ValueError
        A tensor has another shape than planned.
    """
    first = pieces[0][1]
    local = local_of(first.param)
    leaves, spec = flatten(state)
    known = True
    for name, leaf in zip(names_in(spec), leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        planned = next((each for each in first.fields if each.name == name), None)
        if planned is None:
            known = known and not is_swapped(local_of(leaf), local.shape)
            continue
        shape = tuple(local.shape) if first.stop is not None else planned.shape
        if tuple(local_of(leaf).shape) != shape:
            raise ValueError(
                f"state_dict: {name!r} of parameter {index} has the shape {tuple(leaf.shape)}, not {shape}"
            )
    return known


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
