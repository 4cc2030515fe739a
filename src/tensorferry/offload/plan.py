"""Which parameter's state lies where: units, cut and packed into buckets of one slot's size.

A unit is a parameter, or a piece of one where the optimizer is element-wise. Its state has fields, tensors that are
swapped, and what is small and stays in memory. A bucket is what one slot holds, and one tensor in the store: fields of
several units, one after the other. This is arithmetic; nothing is allocated or moved here.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.offload.errors import MemoryBudgetError, NotSeparableError
from tensorferry.offload.probe import GRANULE, local_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.offload.probe import Behaviour, Probe

PAGE_NBYTES = 4096
# Smaller ones need not begin at a page.
_PACKED_NBYTES = 16 << 10
_PACKED_ALIGNMENT = 64

# What a bucket has at least left over for a piece of a parameter, rather than beginning with the next one.
_MIN_PIECE_NBYTES = 256 << 10

_MAX_SLOT_NBYTES = 32 << 20
_MIN_SLOT_NBYTES = 1 << 20
MIN_SLOTS = 3
# A slot in which everything has room.
UNCUT_NBYTES = 1 << 62


class Field(NamedTuple):
    """A tensor of a unit's state that is swapped."""

    leaf: (
        int | None
    )  # which leaf of the state; None: of the unit itself (its master, its parameter)
    name: str
    offset: int  # in the bucket
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return it in a bucket's bytes."""
        elements = bucket[self.offset : self.offset + self.nbytes].view(self.dtype)
        return elements.as_strided(self.shape, self.stride)


@dataclass(eq=False)
class Unit:
    """A parameter, or elements [start, stop) of one, and what is known of its state beside the fields.

    ``leaves`` has the state's leaves, with None where a field has the value; it and ``spec`` are None before the first
    step of it.
    """

    index: int  # of the parameter, in the order of the groups
    group: int
    param: torch.Tensor = field(repr=False)
    start: int = 0
    stop: int | None = None  # None: all of it, as it is
    fields: list[Field] = field(default_factory=list)
    expected: Any = None  # the spec that the fields are for
    cuttable: bool = False
    numel: int = 0  # of the parameter, this rank's part
    dtype: torch.dtype | None = None  # of what is stepped for it
    layout: tuple[
        int, ...
    ] = ()  # its strides when this was planned, which the order of elements is
    own: bool = False  # its master, or its parameter as last stepped, is in the fields
    noted: bool = False  # its parameter, never stepped, is
    leaves: list[Any] | None = None
    spec: Any = None
    stray: bool = False  # its state did not fit the fields, and is in `leaves`
    _views: tuple[torch.Tensor, list[torch.Tensor]] | None = field(default=None, repr=False)

    @property
    def born(self) -> bool:
        """Whether the optimizer has made state for it."""
        return self.leaves is not None

    @property
    def kept(self) -> bool:
        """Whether there is anything of it that a state dict has."""
        return self.born or (self.own and self.fields[0].name == "master")

    def views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Return the fields in a bucket's bytes; made once as long as these stay where they are."""
        if self._views is None or self._views[0] is not bucket:
            self._views = bucket, [each.view(bucket) for each in self.fields]
        return self._views[1]

    def forget_views(self) -> None:
        """Keep no memory of a bucket's."""
        self._views = None


@dataclass(eq=False)
class Bucket:
    """Units whose fields one slot holds together."""

    index: int
    nbytes: int = 0
    units: list[Unit] = field(default_factory=list)
    lent: Any = field(default=None, repr=False)  # as the optimizer last had it; see stepping

    def forget_views(self) -> None:
        """Keep nothing of the memory that it was in."""
        self.lent = None
        for unit in self.units:
            unit.forget_views()

    @property
    def name(self) -> str:
        """What the store calls it."""
        return f"bucket-{self.index:06d}"


@dataclass(frozen=True)
class Slots:
    """Memory for buckets; a ``count`` of 0 is as many as there are buckets, each of its bucket's size."""

    count: int
    nbytes: int  # of each


def flatten(state: Any) -> tuple[list[Any], Any]:
    """Return a state's leaves, and what makes a state of leaves again."""
    if type(state) is dict and not any(
        isinstance(value, (dict, list, tuple)) for value in state.values()
    ):
        return list(state.values()), tuple(state)
    return _pytree.tree_flatten(state)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Return the state of leaves."""
    if isinstance(spec, tuple):
        return dict(zip(spec, leaves, strict=True))
    return _pytree.tree_unflatten(leaves, spec)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def check_params(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse parameters that cannot be stepped by themselves, whatever the optimizer.

    Raises
    ------
    ValueError
        One is there twice, or shares memory with another.
    """
    ranges: list[tuple[int, int, int, torch.Tensor]] = []
    seen: set[torch.Tensor] = set()
    for number, group in enumerate(groups):
        for param in group["params"]:
            if param in seen:
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(param.shape)} twice"
                )
            seen.add(param)
            local = local_of(param)
            if local.numel():
                last = sum(
                    (length - 1) * step
                    for length, step in zip(local.shape, local.stride(), strict=True)
                )
                begin = local.data_ptr()
                ranges.append((begin, begin + (last + 1) * local.itemsize, number, local))
    ranges.sort(key=lambda each: each[0])
    reach, one = 0, torch.empty(0)  # the end of what reaches furthest, so far
    for begin, end, number, other in ranges:
        if begin < reach and _share_elements(one, other):
            raise ValueError(
                f"optimizer: param_groups[{number}] has a parameter of shape {tuple(other.shape)} that shares memory "
                f"with another one, of shape {tuple(one.shape)}: what they become depends on the order of their steps"
            )
        if end > reach:
            reach, one = end, other


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors whose ranges of memory meet have an element in common."""
    if (
        one.dtype != other.dtype
        or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    ):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    count = one.untyped_storage().nbytes() // one.itemsize - first
    marks = torch.zeros(count, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


class Planner:
    """Cuts and packs parameters, in their order, into buckets.

    Parameters
    ----------
    probe : Probe
        Knows how the optimizer's parameters may be stepped.
    master_dtype : torch.dtype, optional
        Units whose parameters have another dtype step a copy of this one, which is a field.
    with_params : bool
        Parameters are fields, too, so that what is stored is all that a restart needs.
    """

    def __init__(
        self, probe: Probe, *, master_dtype: torch.dtype | None = None, with_params: bool = False
    ) -> None:
        self._probe = probe
        self._master_dtype = master_dtype
        self._with_params = with_params

    @property
    def steps_all(self) -> bool:
        """Whether the optimizer steps parameters without gradients, too."""
        return self._probe.steps_all

    def check_together(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse optimizers whose step of a group depends on other groups; see Probe."""
        self._probe.check_together(groups)

    def step_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype of what the optimizer steps for a parameter."""
        return self._master_dtype or param.dtype

    def measure(self, groups: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Return the bytes of all state, padding included, and those of the largest piece that cannot be cut."""
        buckets = self.pack(groups, UNCUT_NBYTES)
        if not buckets:
            return 0, 0
        return buckets[0].nbytes, max(map(_least_nbytes_of, buckets[0].units))

    def pack(self, groups: Sequence[dict[str, Any]], slot_nbytes: int) -> list[Bucket]:
        """Return the buckets of all groups' parameters."""
        buckets: list[Bucket] = []
        self.extend(buckets, list(enumerate(groups)), 0, slot_nbytes)
        return buckets

    def extend(
        self,
        buckets: list[Bucket],
        groups: Sequence[tuple[int, dict[str, Any]]],
        index: int,
        slot_nbytes: int,
    ) -> None:
        """Add the buckets of further groups, whose parameters are counted from ``index`` on."""
        buckets.append(Bucket(len(buckets)))
        for number, group in groups:
            behaviours: dict[torch.dtype, Behaviour] = {}
            for param in group["params"]:
                dtype = self.step_dtype(param)
                if dtype not in behaviours:
                    behaviours[dtype] = self._behaviour(group, dtype)
                for unit in self._units(
                    index, number, group, param, behaviours[dtype], buckets[-1].nbytes, slot_nbytes
                ):
                    if buckets[-1].nbytes + _nbytes_of(unit) > slot_nbytes:
                        buckets.append(Bucket(len(buckets)))
                    _place(unit, buckets[-1])
                index += 1
        if not buckets[-1].units:
            buckets.pop()

    def agrees(self, group: dict[str, Any], units: Sequence[Unit]) -> tuple[bool, bool]:
        """Return whether units, planned when their group had other values, can be stepped, and are planned well."""
        well = True
        behaviours: dict[torch.dtype, Behaviour] = {}
        for unit in units:
            dtype = self.step_dtype(unit.param)
            if dtype not in behaviours:
                behaviours[dtype] = self._behaviour(group, dtype)
            now = next(
                self._units(
                    unit.index, unit.group, group, unit.param, behaviours[dtype], 0, sys.maxsize
                )
            )
            whole = unit.stop is None
            if not whole and not now.cuttable:
                return False, False
            if now.expected != unit.expected or [
                (at.leaf, at.name, at.dtype, at.shape if whole else ()) for at in now.fields
            ] != [(at.leaf, at.name, at.dtype, at.shape if whole else ()) for at in unit.fields]:
                well = False
        return True, well

    def _behaviour(
        self, group: dict[str, Any], dtype: torch.dtype, of: torch.dtype | None = None
    ) -> Behaviour:
        """Return how a group's parameters of one dtype, or such of another one, may be stepped."""
        wanted = of or dtype
        alike = [local_of(param) for param in group["params"] if self.step_dtype(param) == wanted]
        return self._probe.behaviour(group, alike, dtype)

    def _units(
        self,
        index: int,
        number: int,
        group: dict[str, Any],
        param: torch.Tensor,
        behaviour: Behaviour,
        used_nbytes: int,
        slot_nbytes: int,
    ) -> Iterator[Unit]:
        """Yield a parameter's units; the first may go on where a bucket has been filled so far."""
        local = local_of(param)
        dtype = self.step_dtype(param)
        state = behaviour.element_state
        if state is None or not self._probe.has_elements(group, local, dtype, state):
            # What is not element-wise but for rounding, as float32 shows, would want all of a sharded parameter.
            if local.shape != param.shape and (
                self._behaviour(group, torch.float32, dtype).element_state is None
            ):
                raise NotSeparableError(
                    f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} is sharded, and the "
                    "optimizer's step depends on all of it; what would help: an element-wise optimizer, such as AdamW"
                )
            yield self._whole(index, number, group, param, dtype)
            return
        whole = Unit(
            index, number, param, numel=local.numel(), dtype=dtype, layout=tuple(local.stride())
        )
        stride = _dense_stride(local)
        whole.expected = tuple(state)
        for name, leaf, leaf_dtype in self._element_fields(state, param, dtype):
            whole.fields.append(Field(leaf, name, 0, leaf_dtype, tuple(local.shape), stride))
        count = local.numel()
        element_nbytes = sum(each.dtype.itemsize for each in whole.fields)
        room = slot_nbytes - used_nbytes
        fits = _nbytes_of(whole) <= (room if room >= _MIN_PIECE_NBYTES else slot_nbytes)
        whole.cuttable = is_dense(local) and element_nbytes > 0
        if fits or not whole.cuttable:
            yield whole
            return
        start = 0
        while start < count:
            if room < _MIN_PIECE_NBYTES:
                room = slot_nbytes
            elements = min(_elements_in(room, element_nbytes, len(whole.fields)), count - start)
            piece = Unit(index, number, param, start, start + elements, numel=count, dtype=dtype)
            piece.expected, piece.cuttable, piece.layout = whole.expected, True, whole.layout
            piece.fields = [each._replace(shape=(elements,), stride=(1,)) for each in whole.fields]
            yield piece
            start += elements
            room = slot_nbytes if start < count else room

    def _element_fields(
        self, state: dict[str, torch.dtype | None], param: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[str, int | None, torch.dtype]]:
        if self._has_master(param):
            yield "master", None, dtype
        elif self._with_params:
            yield "param", None, param.dtype
        for leaf, (key, leaf_dtype) in enumerate(state.items()):
            if leaf_dtype is not None:
                yield key, leaf, leaf_dtype

    def _has_master(self, param: torch.Tensor) -> bool:
        return self._master_dtype is not None and param.dtype != self._master_dtype

    def _whole(
        self,
        index: int,
        number: int,
        group: dict[str, Any],
        param: torch.Tensor,
        dtype: torch.dtype,
    ) -> Unit:
        """Return the unit of a parameter that cannot be cut."""
        local = local_of(param)
        unit = Unit(
            index, number, param, numel=local.numel(), dtype=dtype, layout=tuple(local.stride())
        )
        leaves, unit.expected = flatten(self._probe.state_of(group, local, dtype))
        for name, leaf, leaf_dtype in self._element_fields({}, param, dtype):
            unit.fields.append(
                Field(leaf, name, 0, leaf_dtype, tuple(local.shape), _dense_stride(local))
            )
        for leaf, value in enumerate(leaves):
            if isinstance(value, torch.Tensor) and value.numel() * value.dtype.itemsize >= 1024:
                unit.fields.append(
                    Field(leaf, str(leaf), 0, value.dtype, tuple(value.shape), _dense_stride(value))
                )
        return unit


def choose_slots(budget_nbytes: int, total_nbytes: int, whole_nbytes: int) -> Slots:
    """Return how many slots of which size a budget gives: as many as all state needs, or as pipelining wants.

    Raises
    ------
    MemoryBudgetError
        Three slots are needed, each as large as what cannot be cut, and the budget does not have them.
    """
    smallest = max(_MIN_SLOT_NBYTES, _paged(whole_nbytes))
    # Sixteen are enough for reads, arithmetic and writes to overlap; larger ones than 32 MiB gain nothing.
    wanted = min(
        max(budget_nbytes // 16, 8 << 20 if budget_nbytes >= 64 << 20 else 0), _MAX_SLOT_NBYTES
    )
    nbytes = max(wanted // PAGE_NBYTES * PAGE_NBYTES, smallest)
    if total_nbytes <= budget_nbytes:
        return Slots(0, nbytes)  # one each: see Residency
    if nbytes * MIN_SLOTS > budget_nbytes:
        needed = min(smallest * MIN_SLOTS, total_nbytes)
        if budget_nbytes < needed:
            raise MemoryBudgetError(
                f"memory_budget: {budget_nbytes} bytes are too few; {needed} are needed at least: "
                + (
                    f"the largest piece that must stay whole has {whole_nbytes} bytes of state, and three such "
                    "are in memory at a time"
                    if whole_nbytes > _MIN_SLOT_NBYTES
                    else "three slots of 1 MiB"
                ),
                needed,
            )
        nbytes = smallest
    return Slots(budget_nbytes // nbytes, nbytes)


def _place(unit: Unit, bucket: Bucket) -> None:
    placed = []
    for each in unit.fields:
        alignment = _alignment(unit, each)
        offset = -(-bucket.nbytes // alignment) * alignment
        placed.append(each._replace(offset=offset))
        bucket.nbytes = offset + each.nbytes
    unit.fields = placed
    bucket.units.append(unit)


def _alignment(unit: Unit, each: Field) -> int:
    # Pieces of one tensor are mapped one after the other.
    paged = unit.stop is not None or each.nbytes >= _PACKED_NBYTES
    return PAGE_NBYTES if paged else _PACKED_ALIGNMENT


def _nbytes_of(unit: Unit) -> int:
    """Return the bytes that a unit takes at most in a bucket, padding included."""
    return sum(each.nbytes + _alignment(unit, each) - 1 for each in unit.fields)


def _least_nbytes_of(unit: Unit) -> int:
    """Return the bytes that a unit's smallest piece takes at most."""
    if not unit.cuttable:
        return _nbytes_of(unit)
    of_granule = sum(GRANULE * each.dtype.itemsize + PAGE_NBYTES for each in unit.fields)
    return min(_nbytes_of(unit), of_granule)


def _elements_in(nbytes: int, element_nbytes: int, field_count: int) -> int:
    # Each field may need a page of padding.
    usable = nbytes - field_count * PAGE_NBYTES
    return max(usable // element_nbytes // GRANULE, 1) * GRANULE


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, or where it has gaps those that torch gives what is made like it."""
    return tuple(torch.empty_like(tensor, device="meta").stride())
