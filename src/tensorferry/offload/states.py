"""Optimizer state as torch's dicts have it, out of buckets and into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload import probe as probing
from tensorferry.offload.plan import PAGE_NBYTES, flatten, unflatten
from tensorferry.offload.probe import local_of
from tensorferry.offload.stepping import elements_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.plan import Bucket, Field, Unit
    from tensorferry.store import TensorStore

MASTER = "master"


class StateView(Mapping[torch.Tensor, Any]):
    """The state of parameters, by parameter. What it gives are copies: changing them changes nothing.

    One parameter's is read when asked for; ``items()`` and ``values()`` give tensors that are mapped from the store.
    """

    def __init__(
        self,
        params: Callable[[], list[torch.Tensor]],
        one: Callable[[torch.Tensor], dict[str, Any]],
        every: Callable[[], dict[torch.Tensor, Any]],
    ) -> None:
        self._params, self._one, self._every = params, one, every

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        return self._one(param)

    def __contains__(self, param: object) -> bool:
        return any(param is each for each in self._params())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._params())

    def __len__(self) -> int:
        return len(self._params())

    def items(self) -> Any:
        """Return all parameters with their states, mapped."""
        return self._every().items()

    def values(self) -> Any:
        """Return the states of all parameters, mapped."""
        return self._every().values()

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters, on drives>"


class Located:
    """Where the units of each parameter are, by the parameter's index."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.units: dict[int, list[tuple[Bucket, Unit]]] = {}
        for bucket in buckets:
            for unit in bucket.units:
                self.units.setdefault(unit.index, []).append((bucket, unit))


class Mapped:
    """Fields of buckets as tensors mapped from the store: private copies that the system makes page by page.

    They stay as they are, whatever is stored later.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._buckets: dict[int, torch.Tensor] = {}

    def whole(self, bucket: Bucket, field: Field) -> torch.Tensor:
        """Return a field of a unit that is not cut."""
        if bucket.index not in self._buckets:
            self._buckets[bucket.index] = self._map([(bucket.name, 0, bucket.nbytes)])
        return field.view(self._buckets[bucket.index])

    def joined(self, pieces: Sequence[tuple[Bucket, Unit]], at: int) -> torch.Tensor:
        """Return the elements of a field whose parameter is cut, one after the other."""
        fields = [unit.fields[at] for _, unit in pieces]
        ranges = [
            (bucket.name, field.offset, field.nbytes)
            for (bucket, _), field in zip(pieces, fields, strict=True)
        ]
        assert all(nbytes % PAGE_NBYTES == 0 for _, _, nbytes in ranges[:-1])
        return self._map(ranges).view(fields[0].dtype)

    def _map(self, ranges: list[tuple[str, int, int]]) -> torch.Tensor:
        if sum(nbytes for _, _, nbytes in ranges) == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._store.map(ranges), dtype=torch.uint8)


class Copied:
    """Fields of one parameter's buckets as copies in memory."""

    def __init__(self, read: Callable[[Bucket], torch.Tensor]) -> None:
        self._read = read

    def whole(self, bucket: Bucket, field: Field) -> torch.Tensor:
        """Return a field of a unit that is not cut."""
        return field.view(self._read(bucket)).clone()

    def joined(self, pieces: Sequence[tuple[Bucket, Unit]], at: int) -> torch.Tensor:
        """Return the elements of a field whose parameter is cut, one after the other."""
        return torch.cat([unit.fields[at].view(self._read(bucket)) for bucket, unit in pieces])


def state_of(pieces: Sequence[tuple[Bucket, Unit]], source: Mapped | Copied) -> dict[str, Any]:
    """Return a parameter's state, of its units, as the optimizer has it in memory; its master is an entry, too."""
    bucket, first = pieces[0]
    local = local_of(first.param)
    leaves = [
        leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in first.leaves or ()
    ]
    own: dict[str, Any] = {}

    def shaped(elements: torch.Tensor) -> torch.Tensor:
        return elements.as_strided(local.shape, first.layout)

    for at, field in enumerate(first.fields):
        in_bucket = first.own if field.leaf is None else first.born and not first.stray
        if not in_bucket or field.name == "param":
            continue  # the parameter itself is the model's
        value = (
            source.whole(bucket, field) if first.stop is None else shaped(source.joined(pieces, at))
        )
        if field.leaf is None:
            own[field.name] = value
        else:
            leaves[field.leaf] = value
    if first.stray and first.stop is not None:
        leaves = [
            shaped(torch.cat(parts)) if _per_element(parts, pieces) else parts[0]
            for parts in zip(*(unit.leaves or [] for _, unit in pieces), strict=True)
        ]
    leaves = [_like_param(leaf, first.param, local) for leaf in leaves]
    state = unflatten(leaves, first.spec) if first.born else {}
    own = {name: _like_param(value, first.param, local) for name, value in own.items()}
    return {**state, **own} if own else dict(state)


def _per_element(parts: Sequence[Any], pieces: Sequence[tuple[Bucket, Unit]]) -> bool:
    return all(
        isinstance(part, torch.Tensor)
        and part.dim() == 1
        and part.numel() == (unit.stop or 0) - unit.start
        for part, (_, unit) in zip(parts, pieces, strict=True)
    )


def _like_param(leaf: Any, param: torch.Tensor, local: torch.Tensor) -> Any:
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


def put_state(unit: Unit, state: Any, memory: torch.Tensor) -> None:
    """Put a parameter's state, or a unit's share of it, into its bucket.

    What does not have the tensors that are expected is kept in memory.
    """
    state = dict(state) if isinstance(state, dict) else state
    master = state.pop(MASTER, None) if isinstance(state, dict) else None
    for field in unit.fields:
        if field.leaf is None:
            value = unit.param.detach() if master is None else master
            field.view(memory).copy_(_share(unit, local_of(value)))
            unit.own = True
    leaves, spec = flatten(state)
    if (
        isinstance(spec, tuple)
        and isinstance(unit.expected, tuple)
        and set(spec) == set(unit.expected)
    ):
        spec = unit.expected  # the same in another order
        leaves = [state[key] for key in spec]
    unit.spec = spec
    leaves = [local_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    numel = local_of(unit.param).numel()
    shares = [
        _share(unit, leaf)
        if isinstance(leaf, torch.Tensor) and leaf.numel() == numel and leaf.dim() > 0
        else leaf
        for leaf in leaves
    ]
    unit.stray = spec != unit.expected or not all(
        field.leaf is None
        or (
            isinstance(shares[field.leaf], torch.Tensor)
            and shares[field.leaf].dtype == field.dtype
            and tuple(shares[field.leaf].shape) == field.shape
        )
        for field in unit.fields
    )
    in_bucket = {} if unit.stray else {field.leaf: field for field in unit.fields}
    unit.leaves = []
    for at, share in enumerate(shares):
        if at in in_bucket:
            in_bucket[at].view(memory).copy_(share)
            unit.leaves.append(None)
        else:
            unit.leaves.append(share.clone() if isinstance(share, torch.Tensor) else share)


def _share(unit: Unit, value: torch.Tensor) -> torch.Tensor:
    """Return a unit's elements of a tensor that has as many as its parameter."""
    if unit.stop is None:
        return value
    local = local_of(unit.param)
    if value.shape == local.shape and value.stride() != local.stride():
        value = torch.empty_strided(local.shape, local.stride(), dtype=value.dtype).copy_(value)
    return elements_of(value)[unit.start : unit.stop]


def checked_state(
    index: int, param: torch.Tensor, pieces: Sequence[tuple[Bucket, Unit]], state: Any
) -> None:
    """Refuse a state that is no parameter's; ``pieces`` name what has an element for each of the parameter's.

    Raises
    ------
    ValueError
        It has as a whole parameter's tensor one of another shape.
    """
    if not isinstance(state, dict):
        raise ValueError(
            f"state_dict: the state of parameter {index} is no dict but {type(state).__name__}"
        )
    for key in {field.name for _, unit in pieces for field in unit.fields}:
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.shape != param.shape:
            raise ValueError(
                f"state_dict: {key!r} of parameter {index} has the shape {tuple(value.shape)}, and the parameter "
                f"{tuple(param.shape)}"
            )


def cast_like_torch(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor, state: Any
) -> Any:
    """Return a parameter's state as the optimizer's own ``load_state_dict`` makes it of a saved one."""
    group = {**probing.values_of(group), "params": [param]}
    twin = probing.twin_of(optimizer, [group])
    saved = {**probing.values_of(group), "params": [0]}
    twin.load_state_dict({"state": {0: state}, "param_groups": [saved]})
    return twin.state[twin.param_groups[0]["params"][0]]
