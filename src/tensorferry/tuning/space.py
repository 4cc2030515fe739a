"""The settings that a sweep tries: its axes, as values or as JSON of ds_nvme_tune's form, and the points they span."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.deepnvme.handles import MAX_PARALLELISM
from tensorferry.transfer.files import MAX_QUEUE_DEPTH
from tensorferry.transfer.runtime import engines
from tensorferry.transfer.settings import DEFAULT_BLOCK_NBYTES, Settings
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.options import count, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_KIB, _MIB = 1 << 10, 1 << 20
_MAX_POINTS = 10_000
_MAX_PARALLELISM = 8
# For each worker: of an engine of threads, see csrc/engine/README.md; with default blocks, csrc/transfer/scheduler.h.
_THREADS_IN_FLIGHT = 32
_DEFAULT_IN_FLIGHT_NBYTES = 32 * _MIB
_QUEUES_IN_FILE = 16


@dataclass(frozen=True)
class Space:
    """One value or more for each setting; ``block_size`` in bytes.

    ``deep`` has queues that are deeper than any drive needs tried as well, the shallowest of them each.
    """

    engine: tuple[str, ...]
    block_size: tuple[int, ...]
    queue_depth: tuple[int, ...]
    intra_op_parallelism: tuple[int, ...]
    single_submit: tuple[bool, ...] = (False,)
    deep: bool = True

    def points(self, nbytes: int, default: Settings | None = None) -> list[Settings]:
        """Return all combinations, less those that for a file of `nbytes` do the same as another.

        The file is what the drive moves in some tenths of a second: queues that hold more than a sixteenth of it keep
        no drive busier. Of such, the shallowest stays, if any. `default` is one of them in any case.
        """
        points: dict[tuple[Any, ...], Settings] = {}
        for engine, block, workers, single, depth in itertools.product(
            self.engine,
            self.block_size,
            self.intra_op_parallelism,
            self.single_submit,
            sorted(self.queue_depth),
        ):
            settings = Settings(block, depth, single, True, workers, engine)
            in_flight = min(in_flight_nbytes(settings), nbytes // _QUEUES_IN_FILE + 1)
            if in_flight > nbytes // _QUEUES_IN_FILE and not self.deep:
                continue
            key = engine, block, workers, single, in_flight
            if key not in points or settings == default:
                points[key] = settings
        return list(dict.fromkeys([*points.values(), *([default] if default else [])]))


def in_flight_nbytes(settings: Settings) -> int:
    """Return how many bytes the queues of all workers hold."""
    depth = settings.queue_depth
    if settings.engine in ("threads", CUFILE):
        depth = min(depth, _THREADS_IN_FLIGHT)
    nbytes = depth * settings.block_size
    if settings.block_size == DEFAULT_BLOCK_NBYTES:  # large blocks take their place, and fewer do
        nbytes = min(nbytes, _DEFAULT_IN_FLIGHT_NBYTES)
    return nbytes * settings.intra_op_parallelism


def default_settings() -> Settings:
    """Return the settings of a handle that was given none, with the engine spelt out."""
    return dataclasses.replace(Settings(), overlap_events=True, engine=available_engines()[0])


def available_engines() -> tuple[str, ...]:
    """Return the engines that work here, the preferred one first."""
    return tuple(name for name, refusal in engines().items() if refusal is None)


def default_space() -> Space:
    """Return what `tensorferry tune` sweeps. Submitting one by one is left out: it only ever costs time."""
    processors = len(os.sched_getaffinity(0))
    workers = [count for count in (1, 2, 4, 8) if count <= min(2 * processors, _MAX_PARALLELISM)]
    return Space(
        engine=available_engines(),
        block_size=(256 * _KIB, 512 * _KIB, _MIB, 2 * _MIB, 4 * _MIB, 8 * _MIB),
        queue_depth=(4, 16, 32, 128),
        intra_op_parallelism=tuple(workers),
        deep=False,
    )


def quick_space() -> Space:
    """Return what `tensorferry tune --quick` sweeps."""
    space = default_space()
    return dataclasses.replace(
        space,
        engine=space.engine[:1],
        block_size=(512 * _KIB, _MIB, 4 * _MIB),
        queue_depth=(8, 32, 128),
        intra_op_parallelism=space.intra_op_parallelism[:2],
    )


def deepspeed_space() -> Space:
    """Return what DeepSpeed's ds_nvme_tune sweeps."""
    return Space(
        engine=available_engines()[:1],
        block_size=(_MIB, 8 * _MIB),
        queue_depth=(32, 128),
        intra_op_parallelism=(1, 2, 4, 8),
        single_submit=(False, True),
    )


def space_from_json(path: Path, default: Space) -> Space:
    """Return the space that a JSON file names; what it does not name is as in `default`.

    Its keys are ds_nvme_tune's (block_size, queue_depth, single_submit, sequential_requests, io_parallel), and
    intra_op_parallelism and io_engine; each has a list of values.

    Raises
    ------
    ValueError
        It cannot be read or used; the message lists all problems.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no object with a list of values for each setting")
    problems: list[str] = []
    chosen: dict[str, tuple[Any, ...]] = {}
    for key, values in content.items():
        if key not in _READERS:
            problems.append(f"{key}: no setting of a sweep; they are {', '.join(_READERS)}")
        elif not isinstance(values, list) or not values:
            problems.append(f"{key}: {values!r} is no list of values")
        else:
            name, read = _READERS[key]
            try:
                chosen[name] = tuple(dict.fromkeys(read(value) for value in values))
            except ValueError as problem:
                problems.append(f"{key}: {problem}")
    chosen.pop("sequential_requests", None)  # both do the same: queues are always refilled
    space = dataclasses.replace(default, **chosen, deep=True)
    axes = dataclasses.astuple(space)[:-1]
    combinations = math.prod(map(len, axes))
    if combinations > _MAX_POINTS:
        problems.append(f"{combinations} combinations are more than {_MAX_POINTS}")
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return space


def _number(read: Callable[[str], int]) -> Callable[[Any], int]:
    """Return what reads numbers of JSON as an option's text is read."""

    def read_value(value: Any) -> int:
        if type(value) not in (int, str):
            raise ValueError(f"{value!r} is no number")
        return read(str(value))

    return read_value


def _switch(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _engine(value: Any) -> str:
    refusal = engines().get(str(value), "no engine of that name")
    if refusal is not None:
        raise ValueError(f"{value!r}: {refusal}")
    return str(value)


_workers = _number(count(1, MAX_PARALLELISM))
_READERS: dict[str, tuple[str, Any]] = {
    "block_size": ("block_size", _number(nbytes(512, (1 << 31) - 1))),
    "queue_depth": ("queue_depth", _number(count(1, MAX_QUEUE_DEPTH))),
    "single_submit": ("single_submit", _switch),
    "sequential_requests": ("sequential_requests", _switch),
    "io_parallel": ("intra_op_parallelism", _workers),
    "intra_op_parallelism": ("intra_op_parallelism", _workers),
    "io_engine": ("engine", _engine),
}
