"""What is written beside buckets, so that another optimizer can read them: which state lies where, and what is small.

It is a plain dict, serialized by ``torch.save`` and read with ``weights_only``: reading it runs no code. What many
units have is in it once (all count the same steps), and where state lies as JSON: both are milliseconds that way.
"""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.arrays import tensor_bytes
from tensorferry.errors import StorageError
from tensorferry.offload.plan import Bucket, Field, Unit, flatten, unflatten
from tensorferry.offload.probe import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.store import TensorStore

_FORMAT = 2
# Tensors of no more bytes are compared.
_SMALL_NBYTES = 64
_MAX_BUCKETS_READ = 2


def to_record(
    steps: int,
    name: str,
    groups: list[dict[str, Any]],
    params: Sequence[torch.Tensor],
    buckets: Sequence[Bucket],
) -> bytes:
    """Return the record of an optimizer.

    Raises
    ------
    ValueError
        A group has a value that cannot be read again without running code.
    """
    states = _States()
    layout = [
        {"nbytes": bucket.nbytes, "units": [_described(unit, states) for unit in bucket.units]}
        for bucket in buckets
    ]
    record = {
        "format": _FORMAT,
        "steps": steps,
        "optimizer": name,
        "groups": groups,
        "params": [(tuple(local_of(param).shape), _name_of(param.dtype)) for param in params],
        "strides": [tuple(local_of(param).stride()) for param in params],
        "buckets": json.dumps(layout),
        "states": states.all,
    }
    written = io.BytesIO()
    try:
        torch.save(record, written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"param_groups, or a state that is small, have a value that cannot be saved: {error}"
        ) from None
    return written.getvalue()


class _States:
    """The states of units, but for what lies in buckets; each different one once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # so that what is told apart by its address stays there

    def number_of(self, unit: Unit) -> int:
        """Return the place of a unit's state in ``all``."""
        assert unit.leaves is not None
        self._kept.append(unit.leaves)
        key = unit.spec, tuple(map(_identity, unit.leaves))
        try:
            number = self._numbers.setdefault(key, len(self.all))
        except TypeError:  # structures that cannot be hashed
            number = len(self.all)
        if number == len(self.all):
            self.all.append(unflatten(unit.leaves, unit.spec))
        return number


def _identity(leaf: Any) -> Any:
    """Return what equal leaves have in common, and different ones have not."""
    if type(leaf) in (int, bool, str, type(None)):
        return type(leaf), leaf
    if (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout == torch.strided
        and not leaf.dtype.is_complex
        and not leaf.is_quantized
        and leaf.nbytes <= _SMALL_NBYTES
    ):
        data = tuple(tensor_bytes(leaf.contiguous()).tolist())
        return leaf.dtype, leaf.shape, leaf.stride(), leaf.is_neg(), data
    return "is", id(leaf)


def _described(unit: Unit, states: _States) -> dict[str, Any]:
    return {
        "param": unit.index,
        "start": unit.start,
        "stop": unit.stop,
        "dtype": None if unit.dtype is None else _name_of(unit.dtype),
        "fields": [
            (each.leaf, each.name, each.offset, _name_of(each.dtype), each.shape, each.stride)
            for each in unit.fields
        ],
        "state": None if unit.leaves is None else states.number_of(unit),
        "stray": unit.stray,
        "own": unit.own or unit.noted,
        "noted": unit.noted and not unit.own,
    }


class Saved:
    """Buckets and record of an optimizer in a store that is open for reading.

    Raises
    ------
    StorageError
        The record is not what an optimizer writes.
    """

    def __init__(self, store: TensorStore, path: str) -> None:
        self._store = store
        self._path = path
        try:
            record = torch.load(io.BytesIO(store.record), weights_only=True)
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']!r}")
            self.steps = int(record["steps"])
            self.optimizer = str(record["optimizer"])
            self.groups: list[dict[str, Any]] = [dict(group) for group in record["groups"]]
            self.params = [(tuple(shape), str(dtype)) for shape, dtype in record["params"]]
            self._strides = [tuple(strides) for strides in record.get("strides", ())]
            if self._strides and list(map(len, self._strides)) != [
                len(of) for of, _ in self.params
            ]:
                raise ValueError("other numbers of strides than of dimensions")
            self._units = self._read_units(json.loads(record["buckets"]), list(record["states"]))
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                None, f"no optimizer's state, or one of a newer tensorferry: {error}", path
            ) from None
        self._held: dict[int, torch.Tensor] = {}

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse what does not have as many groups of as many parameters.

        Raises
        ------
        ValueError
            It is of another optimizer.
        """
        counts = [len(group["params"]) for group in groups]
        theirs = [len(group["params"]) for group in self.groups]
        if counts != theirs:
            raise ValueError(
                f"{self._path!r} has groups of {theirs} parameters, and this optimizer has {counts}"
            )

    def check_values(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse groups that lack a value which an optimizer has in each, now that it has loaded them.

        More of them do no harm: schedulers keep theirs there, too, and may be made before a state is loaded or after.

        Raises
        ------
        ValueError
            It is of another optimizer.
        """
        # torch adds "differentiable" to the defaults of any optimizer that has loaded.
        for name in sorted(optimizer.defaults.keys() - {"differentiable"}):
            if any(name not in group for group in optimizer.param_groups):
                raise ValueError(
                    f"{self._path!r} has groups of {self.optimizer} there, without the {name!r} of "
                    f"{type(optimizer).__name__}"
                )

    def check(self, params: Sequence[torch.Tensor], buckets: Sequence[Bucket]) -> None:
        """Refuse what is not the state of such parameters, planned so.

        Raises
        ------
        ValueError
            It is of others.
        """
        expected = [(tuple(local_of(param).shape), _name_of(param.dtype)) for param in params]
        for index, (mine, saved) in enumerate(zip(expected, self.params, strict=True)):
            if mine != saved:
                raise ValueError(
                    f"{self._path!r}: parameter {index} is {saved[1]} of shape {saved[0]} there, and {mine[1]} of "
                    f"shape {mine[0]} here (state of sharded parameters is each rank's own: to load it on another "
                    "number of ranks use torch.distributed.checkpoint)"
                )
        for bucket in buckets:
            for unit in bucket.units:
                for _, old in self._overlapping(unit):
                    self._check_unit(unit, old)

    def _check_unit(self, unit: Unit, old: Unit) -> None:
        """Refuse what this unit could not have whole; parameters may be cut there and not here, or otherwise."""
        whole = unit.stop is None and old.stop is None
        if not whole and not self._laid_out_alike(unit):
            raise ValueError(
                f"{self._path!r}: parameter {unit.index} has strides of {self._strides[unit.index]} there, and of "
                f"{unit.layout} here; what helps: load it in the memory format that it had"
            )
        if old.born and old.dtype not in (None, unit.dtype):
            raise ValueError(
                f"{self._path!r}: parameter {unit.index} was stepped as {old.dtype} there, and is as {unit.dtype} "
                "here; what helps: the master_dtype of then"
            )
        if _has_field(old, 0) and old.spec != unit.expected:
            raise ValueError(
                f"{self._path!r}: the state of parameter {unit.index} is {old.spec} there, and {unit.expected} here; "
                "it is of another optimizer"
            )
        missing = [
            field
            for field in unit.fields
            if _has_field(old, field.leaf) and not _is_there(unit, field, old)
        ]
        missing += [
            field
            for field in old.fields
            if _has_field(old, field.leaf)
            and field.name != "param"
            and _field_of(unit, field) is None
            and (field.leaf is None or not whole)
        ]
        for field in missing:
            raise ValueError(
                f"{self._path!r}: the state of parameter {unit.index} has no {field.name!r} of {field.dtype} there, "
                "or none here; it is of another optimizer, or was made with another master_dtype or commit"
            )

    def _laid_out_alike(self, unit: Unit) -> bool:
        if not self._strides:  # it is older than that these are written
            return True
        shape, _ = self.params[unit.index]
        strides = zip(shape, self._strides[unit.index], unit.layout, strict=True)
        return all(length == 1 or there == here for length, there, here in strides)

    def fill(self, unit: Unit, memory: torch.Tensor, device: torch.device) -> bool:
        """Give a unit the state that it has there, read and verified; return whether it has any.

        What is in a bucket there and in none here goes to ``device``, where the unit is stepped.

        Raises
        ------
        StorageError
            It cannot be read, or is damaged.
        """
        has_own = any(field.leaf is None for field in unit.fields)
        found = [
            (number, old)
            for number, old in self._overlapping(unit)
            if old.born or (has_own and old.own)
        ]
        if not found:
            unit.leaves, unit.own = None, False
            return False
        first_number, first = found[0]
        unit.spec, unit.stray = first.spec, first.stray
        unit.own = has_own and all(old.own and not old.noted for _, old in found)
        unit.leaves = first.leaves and [
            leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in first.leaves
        ]
        cut_alike = len(found) == 1 and (first.start, first.stop) == (unit.start, unit.stop)
        if first.stray and not cut_alike:
            raise StorageError(
                None,
                f"parameter {unit.index} has state that is laid out for another memory_budget; use the one it was "
                "saved with",
                self._path,
            )
        for field in unit.fields:
            if _has_field(first, field.leaf):
                self._fill_field(unit, field, memory, found)
        for field in first.fields:
            if field.leaf is None or not _has_field(first, 0) or _field_of(unit, field):
                continue
            assert unit.leaves is not None
            bucket = (
                self._bucket(first_number) if field.nbytes else torch.empty(0, dtype=torch.uint8)
            )
            unit.leaves[field.leaf] = field.view(bucket).to(device, copy=True)
        return True

    def _fill_field(
        self, unit: Unit, field: Field, memory: torch.Tensor, found: list[tuple[int, Unit]]
    ) -> None:
        if field.leaf is not None:
            assert unit.leaves is not None
            unit.leaves[field.leaf] = None
        begin, end = _extent(unit)
        elements = _elements(memory, field)
        for number, old in found:
            there = _field_of(old, field)
            if there is None:  # it was small
                assert old.leaves is not None
                assert field.leaf is not None
                field.view(memory).copy_(old.leaves[field.leaf])
            elif not field.nbytes:
                pass  # a bucket without bytes is not stored
            elif unit.stop is None and old.stop is None:
                elements.copy_(_elements(self._bucket(number), there))
            else:
                old_begin, old_end = _extent(old)
                low, high = max(begin, old_begin), min(end, old_end)
                elements[low - begin : high - begin].copy_(
                    _elements(self._bucket(number), there)[low - old_begin : high - old_begin]
                )

    def close(self) -> None:
        """Let go of the store."""
        self._held.clear()
        self._store.close()

    def _overlapping(self, unit: Unit) -> list[tuple[int, Unit]]:
        begin, end = _extent(unit)
        return [
            (number, old)
            for number, old in self._units.get(unit.index, ())
            if (_extent(old)[0] < end and begin < _extent(old)[1]) or begin == end
        ]

    def _bucket(self, number: int) -> torch.Tensor:
        name = Bucket(number).name
        if number not in self._held:
            while len(self._held) >= _MAX_BUCKETS_READ:
                del self._held[next(iter(self._held))]
            self._held[number] = self._store.read(name).result()
        return self._held[number]

    def _read_units(
        self, buckets: list[dict[str, Any]], states: list[Any]
    ) -> dict[int, list[tuple[int, Unit]]]:
        units: dict[int, list[tuple[int, Unit]]] = {}
        for number, bucket in enumerate(buckets):
            used = False
            for told in bucket["units"]:
                index, start, stop = int(told["param"]), int(told["start"]), told["stop"]
                shape, _ = self.params[index]
                count = math.prod(shape)
                if not 0 <= start <= (count if stop is None else int(stop)) <= count:
                    raise ValueError(f"a piece of parameter {index} from {start} to {stop}")
                unit = Unit(index, 0, torch.empty(0), start, None if stop is None else int(stop))
                unit.numel = count
                for leaf, name, offset, dtype, field_shape, stride in told["fields"]:
                    field = Field(
                        leaf,
                        str(name),
                        int(offset),
                        _dtype_of(dtype),
                        tuple(field_shape),
                        tuple(stride),
                    )
                    if min(field.offset, *field.shape, 0) < 0 or (
                        field.offset + field.nbytes > int(bucket["nbytes"])
                    ):
                        raise ValueError(f"{name!r} of parameter {index} lies outside its bucket")
                    unit.fields.append(field)
                unit.stray, unit.own = bool(told["stray"]), bool(told["own"])
                # Older ones do not tell.
                unit.noted = bool(told.get("noted"))
                unit.dtype = _dtype_of(told["dtype"]) if told.get("dtype") else None
                if told["state"] is not None:
                    unit.leaves, unit.spec = flatten(states[told["state"]])
                    for field in unit.fields:
                        if field.leaf not in (None, *range(len(unit.leaves))):
                            raise ValueError(
                                f"{field.name!r} of parameter {index} is no leaf of it"
                            )
                used |= any(_has_field(unit, field.leaf) for field in unit.fields)
                units.setdefault(index, []).append((number, unit))
            name = Bucket(number).name
            there = self._store.info(name).nbytes if name in self._store else 0
            if used and there != bucket["nbytes"]:
                raise ValueError(f"tensor {name!r} has {there} bytes, not {bucket['nbytes']}")
        return units


def _has_field(unit: Unit, leaf: int | None) -> bool:
    """Return whether a unit's bucket has a value for one of its fields."""
    return unit.own if leaf is None else unit.born and not unit.stray


def _field_of(unit: Unit, field: Field) -> Field | None:
    """Return a unit's field for what another unit's field has."""
    for own in unit.fields:
        if own.leaf == field.leaf and (own.leaf is not None or own.name == field.name):
            return own
    return None


def _is_there(unit: Unit, field: Field, old: Unit) -> bool:
    """Return whether an old unit has what a unit's field takes, as a field or as a small tensor beside its bucket."""
    there = _field_of(old, field)
    if unit.stop is not None or old.stop is not None:
        return (
            there is not None
            and there.dtype == field.dtype
            and [math.prod(each.shape) for each in (field, there)] == [_count(unit), _count(old)]
        )
    if there is not None:
        return there._replace(name="", offset=0) == field._replace(name="", offset=0)
    leaf = None if field.leaf is None or old.leaves is None else old.leaves[field.leaf]
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.dtype == field.dtype
        and tuple(leaf.shape) == field.shape
    )


def _count(unit: Unit) -> int:
    begin, end = _extent(unit)
    return end - begin


def _extent(unit: Unit) -> tuple[int, int]:
    return unit.start, unit.numel if unit.stop is None else unit.stop


def _elements(memory: torch.Tensor, field: Field) -> torch.Tensor:
    """Return a field's elements in the order in which they lie in memory."""
    return memory[field.offset : field.offset + field.nbytes].view(field.dtype)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
