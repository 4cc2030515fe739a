"""Placement of optimizer state: cuts parameters into units and packs units into buckets.

A unit is a parameter, or a piece of a large parameter if the optimizer treats each element independently. Its state
consists of fields, which are tensors on drives, and of small values, which stay in memory. Both are *leaves* of the
state, that is, values in its dicts and lists. If the optimizer steps a copy of the parameter in another dtype
(``master_dtype``), this copy, the *master*, is a field, too. A bucket is one tensor in the store: the fields of one
large unit, or of several units that fit together.

Units and buckets depend on the parameters and the optimizer and never on the memory budget, so state that was stored
with one budget can be used with any other. The fields planned here are those of the state that the optimizer is known
to create. If a step creates other state, the bucket gets another layout (``states.py``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.offload.absent import Absent
from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.calls import class_step, state_after_a_step
from tensorferry.offload.errors import MemoryBudgetError, NotSeparableError
from tensorferry.offload.holder import StoredItem
from tensorferry.offload.kernels import pieces_agree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tensorferry.offload.holder import Item
    from tensorferry.offload.kinds import Known

PAGE_NBYTES = 4096
# Fields with fewer bytes need not begin at a page: state_dict() copies them, and does not map them into memory.
PACKED_NBYTES = 16 << 10
_PACKED_ALIGNMENT = 64

# Pieces begin at multiples of this many elements: whole pages for each dtype, and whole vectors for kernels.
GRANULE = 4096

# State is divided into about 256 buckets, so even a small budget holds several. Buckets above 8 MiB would gain nothing:
# reads and writes of this size already reach a drive's full speed.
_BUCKETS = 256
_MIN_BUCKET_NBYTES, _MAX_BUCKET_NBYTES = 64 << 10, 8 << 20

# One bucket is read, one is stepped and one is written at the same time.
MIN_BUCKETS = 3

# Tensors smaller than this stay in memory, unless they have the parameter's shape.
SMALL_NBYTES = 1024

MASTER = "master"

# Tensor classes without data beyond their elements.
_PLAIN_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter)


class Field(NamedTuple):
    """A tensor in a bucket: a tensor of a unit's state, or the unit's master.

    With parameters on drives, it may also be a parameter, or its gradient, in a slab (``slabs.py``).
    """

    name: str  # its key or path in the state; "" in a slab
    offset: int  # in the bucket
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_master: bool = False

    @property
    def nbytes(self) -> int:
        """The field's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return a view of the field in a bucket's bytes."""
        elements = bucket[self.offset : self.offset + self.nbytes].view(self.dtype)
        return elements.as_strided(self.shape, self.stride)


@dataclass(eq=False)
class Unit:
    """A parameter, or elements [start, stop) of one, with its fields and the rest of its state.

    ``leaves`` has the values of the state in the order of ``spec``, with None for values that are in fields. ``leaves``
    is None until the optimizer has created state.
    """

    index: int  # of the parameter, in the order of the groups
    param: torch.Tensor = field(repr=False)
    start: int = 0
    stop: int | None = None  # None: the whole parameter
    fields: list[Field] = field(default_factory=list)
    dtype: torch.dtype | None = None  # of the tensor that the optimizer steps for the parameter
    has_master: bool = False  # whether the bucket already contains the unit's master
    leaves: list[Any] | None = None
    spec: Any = None
    #: The indexes in ``leaves`` of values that are in fields, with the fields.
    swapped: list[tuple[int, Field]] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the unit has anything that belongs into a state dict."""
        return self.leaves is not None or self.has_master

    @property
    def numel(self) -> int:
        """The number of the unit's elements."""
        return local_of(self.param).numel() if self.stop is None else self.stop - self.start

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the tensor that the optimizer steps for the unit."""
        return local_of(self.param).shape if self.stop is None else (self.stop - self.start,)

    @property
    def master(self) -> Field | None:
        """The field of the master, or None."""
        first = self.fields[0] if self.fields else None
        return first if first is not None and first.is_master else None

    def forget(self) -> None:
        """Forget the unit's state."""
        self.leaves, self.spec, self.swapped, self.has_master = None, None, [], False


class Bucket(StoredItem):
    """Units with their fields in one tensor of the store.

    ``is_held`` says that the optimizer steps the bucket now.
    """

    def __init__(self, number: int, nbytes: int = 0) -> None:
        super().__init__(nbytes)
        self.name = f"bucket-{number:06d}"
        self.units: list[Unit] = []
        self.is_held = False

    @property
    def is_used(self) -> bool:
        """Whether the bucket is held; other tensors that share its memory are not used any more."""
        return self.is_held

    def has_contents(self) -> bool:
        """Return whether the bucket has any bytes."""
        return self.nbytes > 0


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def params_in(groups: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer's groups."""
    return (param for group in groups for param in group["params"])


def by_param(buckets: Iterable[Bucket]) -> dict[torch.Tensor, list[tuple[Bucket, Unit]]]:
    """Return the buckets and units of each parameter."""
    found: dict[torch.Tensor, list[tuple[Bucket, Unit]]] = {}
    for bucket in buckets:
        for unit in bucket.units:
            found.setdefault(unit.param, []).append((bucket, unit))
    return found


def flatten(state: Any) -> tuple[list[Any], Any]:
    """Return a state's leaves, and the structure from which :func:`unflatten` rebuilds the state."""
    if type(state) is dict and not any(
        isinstance(value, (dict, list, tuple, deque)) for value in state.values()
    ):
        return list(state.values()), tuple(state)
    return _pytree.tree_flatten(state)


def names_in(spec: Any) -> list[str]:
    """Return the names of a state's leaves: their keys, or paths where containers are nested."""
    if isinstance(spec, tuple):
        return [str(key) for key in spec]
    paths, _ = _pytree.tree_flatten_with_path(unflatten(range(spec.num_leaves), spec))
    return [_pytree.keystr(path) for path, _ in paths]


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Return the state with these leaves."""
    if isinstance(spec, tuple):
        return dict(zip(spec, leaves, strict=True))
    return _pytree.tree_unflatten(leaves, spec)


def check_storable(state: Any) -> None:
    """Raise if a state has a tensor of a class with more than its elements.

    Raises
    ------
    TypeError
        The message names the class.
    """
    for leaf in flatten(state or {})[0]:
        if isinstance(leaf, torch.Tensor) and type(local_of(leaf)) not in _PLAIN_TENSOR_CLASSES:
            raise TypeError(
                f"state: a {type(leaf).__name__} cannot be stored, only plain tensors can"
            )


def is_swapped(leaf: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor in the state of a parameter of this shape gets a field; other tensors stay in memory."""
    return leaf.nbytes >= SMALL_NBYTES or bool(leaf.dim() and leaf.shape == shape)


def check_params(groups: Sequence[dict[str, Any]]) -> None:
    """Raise if no optimizer could step the parameters independently of each other.

    Raises
    ------
    ValueError
        A parameter occurs twice, or shares memory with another.
    NotSeparableError
        A parameter is not a dense tensor in memory.
    """
    ranges: list[tuple[int, int, int, torch.Tensor]] = []
    seen: set[torch.Tensor] = set()
    for number, group in enumerate(groups):
        if group.get("differentiable"):
            raise NotSeparableError(
                f"param_groups[{number}]: differentiable=True keeps all state for autograd; it cannot be offloaded"
            )
        for param in group["params"]:
            if param in seen:
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(param.shape)} twice"
                )
            seen.add(param)
            if param.layout != torch.strided:
                raise NotSeparableError(
                    f"param_groups[{number}]: a parameter of shape {tuple(param.shape)} has the layout {param.layout}; "
                    "only dense parameters (torch.strided) can be offloaded"
                )
            if isinstance(param, Absent):
                continue  # its values are on a drive, in a place of its own
            local = local_of(param)
            if local.numel() and local.untyped_storage().nbytes():
                last = sum(
                    (length - 1) * step
                    for length, step in zip(local.shape, local.stride(), strict=True)
                )
                begin = local.data_ptr()
                ranges.append((begin, begin + (last + 1) * local.itemsize, number, local))
    ranges.sort(key=lambda each: each[0])
    # The ranges are sorted by their first byte. So a range that ends before the present one begins cannot overlap any
    # later range either, and is removed from `earlier`.
    earlier: list[tuple[int, torch.Tensor]] = []
    for begin, end, number, other in ranges:
        earlier = [each for each in earlier if each[0] > begin]
        for _, one in earlier:
            if _share_elements(one, other):
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(other.shape)} that shares "
                    f"memory with another one of shape {tuple(one.shape)}: the result would depend on the order of "
                    "their steps"
                )
        earlier.append((end, other))


def check_master(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Raise if the masters of an optimizer's parameters cannot have this dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"master_dtype: {dtype!r} is not a torch.dtype")
    if not dtype.is_floating_point:
        raise ValueError(f"master_dtype: {dtype} is not floating-point")
    for number, group in enumerate(optimizer.param_groups):
        if any(param.is_complex() for param in group["params"]):
            raise ValueError(
                f"master_dtype: param_groups[{number}] has a complex parameter, and {dtype} is real"
            )


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping ranges of memory have an element in common."""
    if (
        one.dtype != other.dtype
        or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    ):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    count = one.untyped_storage().nbytes() // one.itemsize - first
    marks = torch.zeros(count, dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


class Planner:
    """Cuts parameters into units and packs these, in their order, into buckets.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer that steps.
    known : Known
        What is known about its class.
    step_dtype : callable
        Returns the dtype in which a parameter is stepped. If it is another one, a field is the parameter's master.
    params_nbytes : float
        The largest number of bytes of parameters in a bucket, unless it has a single unit.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        known: Known,
        step_dtype: Callable[[torch.Tensor], torch.dtype],
        *,
        params_nbytes: float,
    ) -> None:
        self._optimizer = optimizer
        self._known = known
        self._step_dtype = step_dtype
        self._params_nbytes = params_nbytes

    def pack(
        self,
        groups: Sequence[dict[str, Any]],
        states: Callable[[torch.Tensor], Any],
        first_param: int = 0,
        first_bucket: int = 0,
    ) -> list[Bucket]:
        """Return the buckets for the parameters of groups.

        Parameters
        ----------
        groups : sequence of dict
            The groups.
        states : callable
            Returns the state that a parameter already has, or None.
        first_param, first_bucket : int
            The numbers of the first parameter and of the first bucket.

        Raises
        ------
        NotSeparableError
            A parameter cannot be stepped, or its state cannot be stored.
        """
        units = [
            (self._uncut_unit(index, group, param, states(param)), group)
            for index, (group, param) in enumerate(
                ((group, param) for group in groups for param in group["params"]), first_param
            )
        ]
        # The size of buckets is computed from uncut units, because the cuts depend on this size.
        size = bucket_nbytes(sum(_nbytes_of(unit) for unit, _ in units))
        # With parameters on drives, all parameters of a bucket are in memory when it is stepped. The size of buckets
        # counts state only: without this limit, an optimizer without state, such as plain SGD, would have one bucket
        # for a whole small model.
        max_params_nbytes = self._params_nbytes
        if max_params_nbytes < math.inf:
            all_nbytes = sum(local_of(unit.param).nbytes for unit, _ in units)
            max_params_nbytes = min(max_params_nbytes, bucket_nbytes(all_nbytes))
        buckets = [Bucket(first_bucket)]
        params_nbytes = 0  # of the last bucket
        for unit, group in units:
            for piece in self._pieces(unit, group, size):
                own_nbytes = local_of(piece.param).nbytes
                full = (
                    buckets[-1].nbytes + _nbytes_of(piece) > size
                    or params_nbytes + own_nbytes > max_params_nbytes
                )
                if buckets[-1].units and (piece.start or full):
                    buckets.append(Bucket(first_bucket + len(buckets)))
                    params_nbytes = 0
                params_nbytes += own_nbytes
                piece.fields = [placed(each, buckets[-1], piece) for each in piece.fields]
                buckets[-1].units.append(piece)
        return buckets if buckets[-1].units else []

    def may_cut(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        """Return whether a parameter may be stepped in pieces.

        The update must be element-wise, and torch's kernels must round each element in the same way wherever it lies.
        They process elements in vectors. Some kernels for bfloat16 round the last elements of a thread's range, which
        do not fill a vector, in another way, unless they are fused.
        """
        local, dtype = local_of(param), self._step_dtype(param)
        fused = bool(group.get("fused"))
        return (
            self._known.kind == "elementwise"
            and local.is_contiguous()
            and (fused or dtype in (torch.float32, torch.float64))
            and pieces_agree(dtype, local.device, fused=fused)
        )

    def _uncut_unit(
        self, index: int, group: dict[str, Any], param: torch.Tensor, state: Any
    ) -> Unit:
        """Return a parameter's uncut unit; its fields do not have offsets yet."""
        local, dtype = local_of(param), self._step_dtype(param)
        if local.shape != param.shape and self._known.kind != "elementwise":
            raise NotSeparableError(
                f"optimizer: a parameter of shape {tuple(param.shape)} is sharded, and the step depends on all of it; "
                "remedy: an element-wise optimizer, such as AdamW"
            )
        unit = Unit(index, param, dtype=dtype)
        if param.dtype != dtype:
            unit.fields.append(master_field(unit))
        check_storable(state)
        made = {**self._state(group, local, dtype, state), **_cast(state or {}, dtype, unit)}
        unit.fields += fields_of(made, local.shape)
        return unit

    def shapes(self, group: dict[str, Any], param: torch.Tensor) -> Mapping[str, Sequence[int]]:
        """Return the shapes of the tensors that a parameter's state is known to have, by name."""
        return {} if self._known.state is None else self._known.state(group, param.shape)

    def names(self, groups: Sequence[dict[str, Any]]) -> list[list[str]]:
        """Return the names of the tensors that a matrix in each group is known to have, which may depend on options."""
        known = self._known.state
        return [] if known is None else [list(known(group, (2, 2))) for group in groups]

    def _state(
        self, group: dict[str, Any], local: torch.Tensor, dtype: torch.dtype, state: Any
    ) -> Any:
        """Return the state that steps create for a parameter that has ``state``, of tensors without values."""
        if self._known.state is None:
            return {} if state else self._tried_state(group, local, dtype)
        return {
            name: torch.empty_like(local, dtype=dtype, device="meta")
            if tuple(shape) == local.shape
            else torch.empty(shape, dtype=dtype, device="meta")
            for name, shape in self._known.state(group, local.shape).items()
        }

    def _tried_state(self, group: dict[str, Any], local: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return the state that a step of zeros creates: for a class with the user's word, its sizes are not known."""
        zeros = torch.zeros_like(local, dtype=dtype)
        if (
            self._known.kind == "elementwise"
        ):  # a small parameter has the same state, with its own shape
            zeros = zeros.new_zeros([min(length, 3) for length in local.shape])
        state = state_after_a_step(self._optimizer, class_step(self._optimizer), group, zeros)
        check_storable(state)
        leaves, spec = flatten(state)
        return unflatten(
            [
                torch.empty_like(local, dtype=leaf.dtype, device="meta")
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape == zeros.shape
                else leaf
                for leaf in leaves
            ],
            spec,
        )

    def _pieces(self, unit: Unit, group: dict[str, Any], size: int) -> Iterator[Unit]:
        """Yield the unit itself, or pieces of it that fit a bucket."""
        local = local_of(unit.param)
        is_cut = (
            _nbytes_of(unit) > size
            and all(each.shape == tuple(local.shape) for each in unit.fields)
            and self.may_cut(group, unit.param)
        )
        if not is_cut:
            yield unit
            return
        element_nbytes = sum(each.dtype.itemsize for each in unit.fields)
        # No padding is needed between the fields of a piece: each field of this many elements is whole pages.
        count = max(size // element_nbytes // GRANULE, 1) * GRANULE
        for start in range(0, local.numel(), count):
            stop = min(start + count, local.numel())
            piece = Unit(unit.index, unit.param, start, stop, dtype=unit.dtype)
            piece.fields = [
                each._replace(shape=(stop - start,), stride=(1,)) for each in unit.fields
            ]
            yield piece


def _cast(state: dict[Any, Any], dtype: torch.dtype, unit: Unit) -> dict[Any, Any]:
    """Return a parameter's state without values and without its master, with the dtypes that a load gives it."""
    leaves, spec = flatten(
        {key: value for key, value in state.items() if key != MASTER or unit.master is None}
    )
    return unflatten(  # type: ignore[no-any-return]
        [
            torch.empty_like(
                local_of(leaf), dtype=dtype if leaf.is_floating_point() else None, device="meta"
            )
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ],
        spec,
    )


def fields_of(state: Any, shape: Sequence[int]) -> list[Field]:
    """Return fields for the large tensors in the state of a parameter or piece of this shape, without offsets."""
    leaves, spec = flatten(state)
    return [
        Field(name, 0, leaf.dtype, tuple(leaf.shape), dense_stride(leaf))
        for name, leaf in zip(names_in(spec), leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and is_swapped(leaf, shape)
    ]


def master_field(unit: Unit) -> Field:
    """Return the field of a unit's master, without an offset."""
    assert unit.dtype is not None
    local = local_of(unit.param)
    shape, stride = (
        (tuple(local.shape), dense_stride(local)) if unit.stop is None else ((unit.numel,), (1,))
    )
    return Field(MASTER, 0, unit.dtype, shape, stride, True)


def bucket_nbytes(total_nbytes: int) -> int:
    """Return the size of buckets for this many bytes of state."""
    size = min(max(total_nbytes // _BUCKETS, _MIN_BUCKET_NBYTES), _MAX_BUCKET_NBYTES)
    return round_to_pages(size)


def needed_nbytes(buckets: Sequence[Bucket], at_once: int = 1) -> int:
    """Return the memory that is needed to step buckets one after the other.

    It must hold the ``at_once`` largest buckets, and also three buckets of the usual size: one is read, one is stepped
    and one is written. It need not be larger than all buckets together.
    """
    sizes = sorted((round_to_pages(bucket.nbytes) for bucket in buckets), reverse=True)
    usual = bucket_nbytes(sum(sizes))
    return min(max(sum(sizes[:at_once]), MIN_BUCKETS * usual), sum(sizes))


def check_budget(
    budget_nbytes: int, buckets: Sequence[Bucket], at_once: int = 1, *, usual: bool = True
) -> None:
    """Raise if a budget cannot hold the ``at_once`` largest buckets or, with ``usual``, three of the usual size.

    Raises
    ------
    MemoryBudgetError
        ``needed_nbytes`` is the smallest sufficient budget.
    """
    sizes = sorted((round_to_pages(bucket.nbytes) for bucket in buckets), reverse=True)
    needed = needed_nbytes(buckets, at_once) if usual else sum(sizes[:at_once])
    if budget_nbytes >= needed:
        return
    largest = max(bucket.nbytes for bucket in buckets)
    raise MemoryBudgetError(
        f"memory_budget: {budget_nbytes} bytes are not enough, {needed} are needed for the buckets of state that are "
        f"in memory at the same time; the largest bucket has {largest} bytes",
        needed,
    )


def placed(each: Field, bucket: Item, unit: Unit | None = None) -> Field:
    """Return a copy of a field of a unit, with an offset behind all other fields of a bucket; enlarge the bucket."""
    alignment = _alignment(each, unit is not None and unit.stop is not None)
    offset = -(-bucket.nbytes // alignment) * alignment
    bucket.nbytes = offset + each.nbytes
    return each._replace(offset=offset)


def _alignment(each: Field, is_piece: bool) -> int:
    # Large fields, and the fields of pieces, begin at a page, because the store maps them into memory.
    return PAGE_NBYTES if is_piece or each.nbytes >= PACKED_NBYTES else _PACKED_ALIGNMENT


def _nbytes_of(unit: Unit) -> int:
    """Return the most bytes that a unit can need in a bucket, padding included."""
    is_piece = unit.stop is not None
    return sum(each.nbytes + _alignment(each, is_piece) - 1 for each in unit.fields)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides; for a tensor with gaps, the strides that ``torch.empty_like`` gives it."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())
