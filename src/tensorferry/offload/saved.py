"""The record of an offloaded optimizer, stored with its buckets: the layout of the state and its small values.

A *bucket* is one tensor in the store, with the state of some *units*: parameters, or pieces of large ones
(``plan.py``). A record and its buckets are a checkpoint, which the user has requested, or the commit of a step. With
parameters on drives, the parameters are in *slabs*, other tensors of the same store (``slabs.py``).

The record is a plain dict, written by ``torch.save`` and read with ``weights_only``, so reading it runs no code. The
small values of a unit's state, such as its step count, are in the record and not in a bucket. Many units have equal
small values; these are stored once, and the layout of the buckets is JSON. Both make reading and writing a matter of
milliseconds.

In messages, *there* means in the checkpoint or commit, and *here* in the optimizer that loads it.
"""

from __future__ import annotations

import errno
import io
import json
import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.errors import StorageError
from tensorferry.offload.plan import (
    Bucket,
    Field,
    Unit,
    flatten,
    local_of,
    names_in,
    unflatten,
)
from tensorferry.offload.states import owned
from tensorferry.store import TensorStore
from tensorferry.store.manifest import names_in as manifests_in
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.transfer.futures import Future

_FORMAT = 3
# Tensors up to this size are compared by value to find units with equal small values.
_SMALL_NBYTES = 64
# Parameters of a commit are packed into tensors of about this size.
_PARAMS_NBYTES = 8 << 20


def to_record(
    steps: int,
    name: str,
    groups: list[dict[str, Any]],
    params: Sequence[torch.Tensor],
    buckets: Sequence[Bucket],
    *,
    slabs: list[tuple[str, int]] | None = None,
) -> bytes:
    """Return the record of an optimizer.

    ``slabs`` has for each parameter the name of its slab and the offset in it, or is None if parameters are not in
    slabs.

    Raises
    ------
    ValueError
        A group, or a state, has a value that cannot be read without running code.
    """
    states = _StateTable()
    layout = [
        {"nbytes": bucket.nbytes, "units": [_describe_unit(unit, states) for unit in bucket.units]}
        for bucket in buckets
    ]
    record = {
        "format": _FORMAT,
        "steps": steps,
        "optimizer": name,
        "groups": groups,
        "params": [_geometry_of(param) for param in params],
        "buckets": json.dumps(layout),
        "states": states.all,
        **({} if slabs is None else {"slabs": slabs}),
    }
    written = io.BytesIO()
    try:
        torch.save(record, written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"param_groups: a value, or a small value of the state, cannot be saved: {error}"
        ) from None
    return written.getvalue()


def _geometry_of(param: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    local = local_of(param)
    return tuple(local.shape), tuple(local.stride()), _name_of(param.dtype)


class _StateTable:
    """The small values of units' states, without the values in buckets; each distinct set of values occurs once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}
        # These references keep the leaves alive, so no new object gets an id() that is already in a key.
        self._kept: list[Any] = []

    def number_of(self, unit: Unit) -> int:
        """Return the index in ``all`` of a unit's small values, which are added if they are new."""
        assert unit.leaves is not None
        self._kept.append(unit.leaves)
        key = unit.spec, tuple(map(_identity, unit.leaves))
        try:
            number = self._numbers.setdefault(key, len(self.all))
        except TypeError:  # an unhashable structure
            number = len(self.all)
        if number == len(self.all):
            self.all.append(unflatten(unit.leaves, unit.spec))
        return number


def _identity(leaf: Any) -> Any:
    """Return a key that is equal only for equal leaves; a leaf that is not compared by value equals no other."""
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


def _describe_unit(unit: Unit, states: _StateTable) -> dict[str, Any]:
    return {
        "param": unit.index,
        "start": unit.start,
        "stop": unit.stop,
        "dtype": None if unit.dtype is None else _name_of(unit.dtype),
        "fields": [
            (each.name, each.offset, _name_of(each.dtype), each.shape, each.stride, each.is_master)
            for each in unit.fields
        ],
        "swapped": [(at, unit.fields.index(each)) for at, each in unit.swapped],
        "state": None if unit.leaves is None else states.number_of(unit),
        "master": unit.has_master,
    }


class Saved:
    """The buckets and the record of an optimizer in a store that is open for reading.

    Raises
    ------
    StorageError
        The record was not written by an offloaded optimizer.
    """

    def __init__(self, store: TensorStore, path: str) -> None:
        self._store = store
        self._path = path
        # The name and the bytes of the slab that was read last.
        self._slab: tuple[str, torch.Tensor] | None = None
        try:
            record = torch.load(io.BytesIO(store.record), weights_only=True)
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']!r}")
            self.steps = int(record["steps"])
            self.optimizer = str(record["optimizer"])
            self.groups: list[dict[str, Any]] = [dict(group) for group in record["groups"]]
            self.params = [
                (tuple(shape), tuple(stride), str(dtype))
                for shape, stride, dtype in record["params"]
            ]
            self.buckets = self._read_buckets(json.loads(record["buckets"]), list(record["states"]))
            self.slabs = [(str(name), int(at)) for name, at in record.get("slabs", ())]
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                None,
                "this is not the state of an offloaded optimizer, or a release of tensorferry with another format "
                f"wrote it: {error}",
                path,
            ) from None

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the record is of another class of optimizers, or the groups have other numbers of parameters.

        Raises
        ------
        ValueError
            The record is of another optimizer.
        """
        name = type(optimizer).__name__
        if self.optimizer != name:
            raise ValueError(
                f"{self._path!r} is the state of another optimizer: {self.optimizer}, not {name}"
            )
        counts = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in self.groups]
        if counts != theirs:
            raise ValueError(
                f"the groups of this optimizer have {counts} parameters, those in {self._path!r} have {theirs}"
            )

    def check_values(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if groups that an optimizer has just loaded lack a value for which the optimizer has a default.

        Additional values are allowed: schedulers store values in the groups, and may be made before or after loading.

        Raises
        ------
        ValueError
            The record is of another optimizer.
        """
        # load_state_dict() of torch adds "differentiable" to the defaults of every optimizer.
        for name in sorted(optimizer.defaults.keys() - {"differentiable"}):
            if any(name not in group for group in optimizer.param_groups):
                raise ValueError(
                    f"{self._path!r} was saved by {self.optimizer}: a group there has no value {name!r}, which "
                    f"{type(optimizer).__name__} needs"
                )

    def check_places(self, *, in_slabs: bool) -> None:
        """Raise if a commit has its parameters in slabs and this optimizer does not, or the other way round.

        Raises
        ------
        ValueError
            ``offload_training()`` made one of them, and ``offload_optimizer()`` the other.
        """
        if self.slabs and not in_slabs:
            raise ValueError(
                f"{self._path!r} was committed by offload_training(), with parameters on drives; continue it "
                "with offload_training(), not with offload_optimizer()"
            )
        if in_slabs and not self.slabs:
            raise ValueError(
                f"{self._path!r} was committed by offload_optimizer(), with parameters in memory; continue it "
                "with offload_optimizer(), not with offload_training()"
            )

    def layout(
        self, params: Sequence[torch.Tensor], may_cut: Callable[[torch.Tensor], bool]
    ) -> list[Bucket]:
        """Return the saved buckets, with units that refer to these parameters.

        Raises
        ------
        ValueError
            A parameter was stepped in pieces, and ``may_cut`` returns False for it.
        """
        for unit in (unit for bucket in self.buckets for unit in bucket.units):
            unit.param = params[unit.index]
            # Units with equal small values have the same objects, which steps would change for all of them.
            unit.leaves = unit.leaves and list(map(owned, unit.leaves))
            if unit.stop is not None and not may_cut(unit.param):
                raise ValueError(
                    f"{self._path!r}: parameter {unit.index} was stepped in pieces there, and here it cannot be "
                    "stepped in pieces with the same result; remedy: the same options (such as fused=True) and dtypes"
                )
        return self.buckets

    def check_params(
        self, params: Sequence[torch.Tensor], step_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Raise if the record is of other parameters, or of parameters that were stepped in another dtype.

        Raises
        ------
        ValueError
            The message names the first parameter that differs.
        """
        for unit in (unit for bucket in self.buckets for unit in bucket.units):
            here = step_dtypes[unit.index]
            if unit.dtype != here and self.params[unit.index][2] == _name_of(
                params[unit.index].dtype
            ):
                raise ValueError(
                    f"{self._path!r}: parameter {unit.index} was stepped as {unit.dtype} there, and is as {here} here; "
                    "remedy: the same master_dtype"
                )
        for index, (param, (shape, stride, dtype)) in enumerate(
            zip(params, self.params, strict=True)
        ):
            mine_shape, mine_stride, mine_dtype = _geometry_of(param)
            if (mine_shape, mine_dtype) != (shape, dtype):
                raise ValueError(
                    f"{self._path!r}: parameter {index} is {dtype} of shape {shape} there, and {mine_dtype} of "
                    f"shape {mine_shape} here (each rank saves the state of its shards: to load it on another "
                    "number of ranks use torch.distributed.checkpoint)"
                )
            moved = [
                length > 1 and there != here
                for length, there, here in zip(shape, stride, mine_stride, strict=True)
            ]
            if any(moved):
                raise ValueError(
                    f"{self._path!r}: parameter {index} has strides of {stride} there, and of {mine_stride} here; "
                    "remedy: load into a model with the same memory format"
                )

    def read(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """Read a bucket's bytes into memory, and verify them.

        Raises
        ------
        StorageError
            The bytes are unreadable or damaged.
        """
        if bucket.nbytes and bucket.name in self._store:
            self._store.read(bucket.name, memory).result()

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's bytes; errors as for :meth:`read`."""
        memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cpu")
        self.read(bucket, memory)
        return memory

    def set_params(self, params: Sequence[torch.Tensor]) -> None:
        """Set parameters to their values at the time of the commit.

        Raises
        ------
        StorageError
            As for :meth:`read`.
        """
        for name, members in packed_params(params):
            locals_ = [local_of(param).detach() for param in members]
            read = [_plain(each).cpu() for each in locals_]
            self._store.read(name, [tensor_bytes(each) for each in read]).result()
            for local, value in zip(locals_, read, strict=True):
                if value is not local:
                    local.copy_(value)

    def read_slab(self, name: str, at: int, memory: torch.Tensor) -> None:
        """Read bytes of a slab of the commit, from an offset on.

        Raises
        ------
        StorageError
            As for :meth:`read`.
        """
        if self._slab is None or self._slab[0] != name:
            self._slab = None
            self._slab = name, self.tensor(name)
        memory.copy_(self._slab[1][at : at + memory.numel()])

    def tensor(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor of the commit; errors as for :meth:`read`."""
        return self._store.read(name).result()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the store."""
        self._slab = None
        self._store.close()

    def _read_buckets(self, layout: list[dict[str, Any]], states: list[Any]) -> list[Bucket]:
        buckets = []
        for number, entry in enumerate(layout):
            bucket = Bucket(number, int(entry["nbytes"]))
            bucket.units = [self._read_unit(each, bucket, states) for each in entry["units"]]
            used = any(unit.swapped or unit.has_master for unit in bucket.units)
            there = self._store.info(bucket.name).nbytes if bucket.name in self._store else 0
            if used and there != bucket.nbytes:
                raise ValueError(f"tensor {bucket.name!r} has {there} bytes, not {bucket.nbytes}")
            buckets.append(bucket)
        return buckets

    def _read_unit(self, entry: dict[str, Any], bucket: Bucket, states: list[Any]) -> Unit:
        index, start, stop = int(entry["param"]), int(entry["start"]), entry["stop"]
        count = math.prod(self.params[index][0])
        if not 0 <= start <= (count if stop is None else int(stop)) <= count:
            raise ValueError(
                f"parameter {index} has a piece of elements {start} to {stop}, which is not within its {count} elements"
            )
        unit = Unit(index, torch.empty(0, device="cpu"), start, None if stop is None else int(stop))
        unit.dtype = _dtype_of(entry["dtype"]) if entry["dtype"] else None
        for name, offset, dtype, shape, stride, is_master in entry["fields"]:
            each = Field(
                *(str(name), int(offset), _dtype_of(dtype), tuple(shape), tuple(stride)),
                is_master=bool(is_master),
            )
            outside = each.offset + each.nbytes > bucket.nbytes
            if min(each.offset, *each.shape, *each.stride, 0) < 0 or outside:
                raise ValueError(f"{name!r} of parameter {index} lies outside its bucket")
            reach = sum(
                (size - 1) * step for size, step in zip(each.shape, each.stride, strict=True)
            )
            if each.nbytes and (reach + 1) * each.dtype.itemsize > each.nbytes:
                raise ValueError(f"{name!r} of parameter {index} has strides that reach too far")
            unit.fields.append(each)
        unit.has_master = bool(entry["master"]) and unit.master is not None
        if entry["state"] is not None:
            unit.leaves, unit.spec = flatten(states[entry["state"]])
            names = names_in(unit.spec)
            for at, number in entry["swapped"]:
                if names[int(at)] != unit.fields[int(number)].name:
                    raise ValueError(
                        f"{names[int(at)]!r} of parameter {index} refers to the field of another state tensor"
                    )
                unit.swapped.append((int(at), unit.fields[int(number)]))
        return unit


def open_commits(paths: list[str]) -> list[Saved]:
    """Open the commits of an earlier run in directories: the last one, and the one before it if it was kept."""
    found: list[Saved] = []
    try:
        for previous in (False, True):
            store = TensorStore.open(paths, previous=previous)
            try:
                found.append(Saved(store, paths[0]))
            except BaseException:
                store.close()
                raise
    except StorageError as error:
        # If the last commit was opened, the error is about the one before it, which is not needed. Otherwise ENOENT may
        # mean that there is no commit, which is fine. If the first directory has a manifest, a commit exists and its
        # files are missing, for example because a drive is not mounted: then raise.
        if not found and (error.errno != errno.ENOENT or manifests_in(paths[0])):
            raise
    except BaseException:
        for each in found:
            each.close()
        raise
    return found


def packed_params(
    params: Sequence[torch.Tensor],
) -> list[tuple[str, list[torch.Tensor]]]:
    """Return how a commit stores parameters: the names of tensors in the store, each with the parameters in it."""
    packs: list[list[torch.Tensor]] = []
    room = 0
    for param in params:
        nbytes = local_of(param).nbytes
        if not nbytes:
            continue
        if nbytes > room:
            packs.append([])
            room = _PARAMS_NBYTES
        packs[-1].append(param)
        room -= nbytes
    return [(f"params-{number:06d}", members) for number, members in enumerate(packs)]


def finish_writes(begun: Iterable[Future[Any]]) -> None:
    """Wait for the writes that an iterable begins, with at most two in flight, because each has memory of its own.

    The first error is raised. The outcomes of the others are asked for as well: the store raises errors of which nobody
    knows in its next commit, which would then fail although all has been written again.
    """
    writing: deque[Future[Any]] = deque()
    try:
        for each in begun:
            writing.append(each)
            if len(writing) > 1:
                writing.popleft().result()
        while writing:
            writing.popleft().result()
    except StorageError:
        for each in writing:
            each.exception()
        raise


def pack(members: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of parameters one after the other; a single contiguous parameter is not copied."""
    return (
        torch.cat([tensor_bytes(_plain(local_of(param).detach())) for param in members])
        if (len(members) > 1)
        else tensor_bytes(_plain(local_of(members[0]).detach()))
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its elements in order, and with the values that a lazy conjugate or negative stands for."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
