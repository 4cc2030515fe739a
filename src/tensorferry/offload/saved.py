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
        "fields": [
            (each.leaf, each.name, each.offset, _name_of(each.dtype), each.shape, each.stride)
            for each in unit.fields
        ],
        "state": None if unit.leaves is None else states.number_of(unit),
        "stray": unit.stray,
        "own": unit.own or unit.noted,
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
            self._units = self._read_units(json.loads(record["buckets"]), list(record["states"]))
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                None, f"no optimizer's state, or one of a newer tensorferry: {error}", path
            ) from None
        self._held: dict[int, torch.Tensor] = {}

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse what does not have groups of the same kind.

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
        mine = [sorted(key for key in group if key != "param_names") for group in groups]
        if mine != [sorted(group) for group in self.groups]:
            raise ValueError(
                f"{self._path!r} has {len(self.groups)} groups of {self.optimizer} there, and these are {len(groups)} "
                "of another optimizer, or with other values"
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
                for at, field in enumerate(unit.fields):
                    for _, old in self._overlapping(unit):
                        if _has_field(old, field.leaf):
                            self._check_field(unit, field, old, at)

    def _check_field(self, unit: Unit, field: Field, old: Unit, at: int) -> None:
        there = old.fields[at] if at < len(old.fields) else None
        alike = there is not None and (there.name, there.dtype, there.leaf) == (
            field.name,
            field.dtype,
            field.leaf,
        )
        if alike and unit.stop is None and old.stop is None:
            assert there is not None
            alike = there.shape == field.shape and there.stride == field.stride
        if not alike:
            raise ValueError(
                f"{self._path!r}: the state of parameter {unit.index} has no {field.name!r} of {field.dtype} there; it "
                "is of another optimizer, or was made with another master_dtype or commit"
            )

    def fill(self, unit: Unit, memory: torch.Tensor) -> bool:
        """Give a unit the state that it has there, read and verified; return whether it has any.

        Raises
        ------
        StorageError
            It cannot be read, or is damaged.
        """
        found = [
            (number, old)
            for number, old in self._overlapping(unit)
            if old.leaves is not None or old.own
        ]
        if not found:
            unit.leaves, unit.own = None, False
            return False
        first = found[0][1]
        unit.spec, unit.stray, unit.own = first.spec, first.stray, all(old.own for _, old in found)
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
        begin, end = _extent(unit)
        for at, field in enumerate(unit.fields):
            if not _has_field(first, field.leaf) or not field.nbytes:
                continue  # a bucket without bytes is not stored
            elements = _elements(memory, field)
            for number, old in found:
                there = _elements(self._bucket(number), old.fields[at])
                if unit.stop is None and old.stop is None:
                    elements.copy_(there)
                    continue
                old_begin, old_end = _extent(old)
                low, high = max(begin, old_begin), min(end, old_end)
                elements[low - begin : high - begin].copy_(
                    there[low - old_begin : high - old_begin]
                )
        return True

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
                if told["state"] is not None:
                    unit.leaves, unit.spec = flatten(states[told["state"]])
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
