"""Optimizer state as torch's dicts have it, out of buckets and into them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.counted import ATOMS, HOOKS, REPLACED, reaches_tensor
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

# Classes of tensors whose elements are all there is of them.
CLASSES = (torch.Tensor, torch.nn.Parameter)


class UnplannedError(ValueError):
    """A state has a tensor for which no place was planned."""


def state_in(unit: Unit, memory: torch.Tensor) -> dict[Any, Any]:
    """Return a unit's state, with views of a bucket's memory in it."""
    assert unit.leaves is not None
    leaves = list(unit.leaves)
    for at, each in unit.swapped:
        leaves[at] = unit.view(each, memory)
    state: dict[Any, Any] = unflatten(leaves, unit.spec)
    return state


def shape_of_state(unit: Unit, shape: Sequence[int] | None = None) -> dict[Any, Any] | None:
    """Return a state of which what is in a bucket has no values; a piece's has the shape of its parameter."""
    if unit.leaves is None:
        return None
    leaves = list(unit.leaves)
    whole = local_of(unit.param).shape if shape is None else shape
    for at, each in unit.swapped:
        leaves[at] = torch.empty(
            each.shape if unit.stop is None else whole, dtype=each.dtype, device="meta"
        )
    state: dict[Any, Any] = unflatten(leaves, unit.spec)
    return state


def keep_state(unit: Unit, state: dict[Any, Any], memory: torch.Tensor) -> None:
    """Keep a unit's state: what has a field in its bucket's memory, what is small beside it.

    Raises
    ------
    UnplannedError
        It has a tensor that has no field and is not small; nothing has changed.
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
            elif type(leaf) not in CLASSES or leaf.nbytes >= SMALL_NBYTES:
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
        # It may lie where another field belongs, which is filled before it is read.
        inside = begin <= leaf.data_ptr() < end
        sources.append((each, leaf.clone() if inside else leaf))
        moved = True
    if moved:
        unit.forget_views()  # the optimizer may have given them other memory (`.data =`)
    for each, leaf in sources:
        each.view(memory).copy_(leaf)
    # What is small must not lie in the memory of a bucket, which others will use.
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
    return type(leaf) in CLASSES and leaf.dtype == each.dtype and tuple(leaf.shape) == each.shape


class MappedFields:
    """Fields of buckets as tensors mapped from the store: private copies that the system makes page by page.

    They stay as they are, whatever is stored later. Small ones share pages, and are copied: `torch.save` would write
    the page with each, and refuses tensors of several dtypes in one. Copies are read, not mapped: a drive that fails
    to read raises then, and would end the process as soon as a mapping is touched.
    """

    def __init__(self, store: TensorStore, small: Copied) -> None:
        self._store = store
        self._small = small

    def joined(
        self, pieces: Sequence[tuple[Bucket, Unit]], fields: Sequence[Field]
    ) -> torch.Tensor:
        """Return the elements of a field, those of all its pieces one after the other."""
        ranges = [
            (bucket.name, each.offset, each.nbytes)
            for (bucket, _), each in zip(pieces, fields, strict=True)
        ]
        if sum(nbytes for *_, nbytes in ranges) == 0:
            return torch.empty(0, dtype=fields[0].dtype, device="cpu")
        if len(pieces) > 1 or fields[0].nbytes >= PACKED_NBYTES:
            return torch.frombuffer(self._store.map(ranges), dtype=fields[0].dtype)
        return self._small.joined(pieces, fields)


class Copied:
    """Fields of one parameter's buckets as copies in memory."""

    def __init__(self, read: Callable[[Bucket], torch.Tensor]) -> None:
        self._read = read

    def joined(
        self, pieces: Sequence[tuple[Bucket, Unit]], fields: Sequence[Field]
    ) -> torch.Tensor:
        """Return the elements of a field, those of all its pieces one after the other."""
        return torch.cat(
            [
                self._read(bucket)[each.offset : each.offset + each.nbytes].view(each.dtype)
                for (bucket, _), each in zip(pieces, fields, strict=True)
            ]
        )


def state_of(
    pieces: Sequence[tuple[Bucket, Unit]], source: MappedFields | Copied
) -> dict[Any, Any]:
    """Return a parameter's state as the optimizer has it in memory; its master is an entry, too."""
    first = pieces[0][1]
    local = local_of(first.param)

    def value_of(each: Field) -> Any:
        at = first.fields.index(each)
        elements = source.joined(pieces, [unit.fields[at] for _, unit in pieces])
        if first.stop is None:
            return like_param(elements.as_strided(each.shape, each.stride), first.param, local)
        return like_param(elements.as_strided(local.shape, first.layout), first.param, local)

    state: dict[Any, Any] = {}
    if first.leaves is not None:
        leaves = [
            leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
            for leaf in first.leaves
        ]
        leaves = [like_param(leaf, first.param, local) for leaf in leaves]
        for at, each in first.swapped:
            leaves[at] = value_of(each)
        state = unflatten(leaves, first.spec)
    if first.has_master and first.master is not None:
        state[MASTER] = value_of(first.master)
    return state


def like_param(leaf: Any, param: torch.Tensor, local: torch.Tensor) -> Any:
    """Return a leaf as one of a sharded parameter's state, where that is sharded."""
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
    """Put a parameter's state, or a unit's share of it, into its bucket.

    Raises
    ------
    UnplannedError
        It has a tensor that has no place there.
    """
    state = dict(state)
    master = state.pop(MASTER, None) if unit.master is not None else None
    leaves, spec = flatten(state)
    leaves = [_share(unit, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    keep_state(unit, unflatten(leaves, spec), memory)
    if unit.leaves is not None:  # small values are the caller's
        unit.leaves = [
            leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in unit.leaves
        ]
    if unit.master is not None:
        value = unit.param.detach() if master is None else master
        unit.master.view(memory).copy_(_share(unit, value))
        unit.has_master = True


def _share(unit: Unit, value: torch.Tensor) -> torch.Tensor:
    """Return a unit's elements of a tensor that has as many as its parameter; of another one, all."""
    value, local = local_of(value), local_of(unit.param)
    if unit.stop is None or value.shape != local.shape:
        return value
    return elements_of(value, like=local, start=unit.start, stop=unit.stop)


def elements_of(tensor: torch.Tensor, *, like: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of a tensor in the order in which a dense one of its shape has them in memory.

    Where it is laid out as that one they are a view, else a copy of these alone.
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
    """Return whether a parameter's state has only tensors that were planned.

    Raises
    ------
    ValueError
        One has another shape than was planned.
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
                f"state_dict: {name!r} of parameter {index} has the shape {tuple(leaf.shape)}, and not {shape}"
            )
    return known


def twin_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Return an optimizer that loads as another does, with groups of its own, no state and no hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(
        {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in vars(optimizer).items()
            if name not in REPLACED
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
    beside: Mapping[str, Any],
) -> Any:
    """Return a parameter's state as the optimizer's own ``load_state_dict`` makes it of a saved one.

    ``beside`` is what else the state dict has.
    """
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    twin = twin_of(optimizer, [{**values, "params": [param]}])
    groups = [{**values, "params": [0]}]
    twin.load_state_dict({**beside, "state": {0: state}, "param_groups": groups})
    return twin.state[twin.param_groups[0]["params"][0]]
