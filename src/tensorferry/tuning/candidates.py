"""The settings that a sweep tries: about a dozen, or those in a JSON file in ds_nvme_tune's format.

A sweep measures a drive with each of these settings, to find the fastest ones.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import parse_nbytes
from tensorferry.transfer.runtime import engines
from tensorferry.transfer.settings import (
    MAX_BLOCK_NBYTES,
    MAX_PARALLELISM,
    MAX_QUEUE_DEPTH,
    Settings,
)

if TYPE_CHECKING:
    from pathlib import Path

_KIB, _MIB = 1 << 10, 1 << 20
_MAX_COMBINATIONS = 256
# Block sizes and queue depths for one engine: blocks of other sizes than the default's 1 MiB, with enough of them in
# flight to keep a drive busy; and blocks of 1 MiB with lower depths.
_BLOCKS_AND_DEPTHS = (
    *((256 * _KIB, 64), (512 * _KIB, 32), (2 * _MIB, 16), (4 * _MIB, 8), (8 * _MIB, 4)),
    *((_MIB, 8), (_MIB, 32)),
)
_SWITCHES = ("single_submit", "sequential_requests")


def default_settings() -> Settings:
    """Return the default settings, with the name of the engine.

    ``overlap_events`` is True, because tensorferry always works as if it were.
    """
    return Settings(overlap_events=True, engine=available_engines()[0])


def available_engines() -> tuple[str, ...]:
    """Return the engines that work on this machine, the preferred one first."""
    return tuple(name for name, refusal in engines().items() if refusal is None)


def candidates(default: Settings) -> list[Settings]:
    """Return the settings that `tensorferry tune` compares with the default. Each differs from it in one respect."""
    found = [
        default._replace(block_size=block, queue_depth=depth) for block, depth in _BLOCKS_AND_DEPTHS
    ]
    workers = [2, 4] if len(os.sched_getaffinity(0)) > 1 else [2]
    found += [default._replace(intra_op_parallelism=count) for count in workers]
    engines_here = available_engines()
    if default.engine in engines_here:  # not for cuFile, which cannot be replaced by another engine
        found += [default._replace(engine=each) for each in engines_here if each != default.engine]
    return found


def candidates_of_json(path: Path, default: Settings) -> list[Settings]:
    """Return all combinations of the values in a JSON file. Other settings have the default's values.

    The keys are those of ds_nvme_tune (block_size, queue_depth, single_submit, sequential_requests, io_parallel), and
    intra_op_parallelism and io_engine. Each has a list of values.

    Raises
    ------
    ValueError
        The file cannot be read, or its content is invalid. The message has the reason.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not an object with a list of values for each setting")
    axes: dict[str, list[Any]] = {}
    for key, values in content.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: {key}: {values!r} is not a list of values")
        try:
            parsed = [_parse(key, value) for value in values]
        except (ValueError, TypeError) as problem:
            raise ValueError(f"{path}: {key}: {problem}") from None
        names = {"io_parallel": "intra_op_parallelism", "io_engine": "engine"}
        axes[str(names.get(key, key))] = list(dict.fromkeys(parsed))
    axes.pop("sequential_requests", None)  # it has no effect: queues are always refilled
    combinations = math.prod(map(len, axes.values()))
    if combinations > _MAX_COMBINATIONS:
        raise ValueError(f"{path}: {combinations} combinations are more than {_MAX_COMBINATIONS}")
    return [
        default._replace(**dict(zip(axes, v, strict=True)))
        for v in itertools.product(*axes.values())
    ]


def _parse(key: str, value: Any) -> Any:
    """Validate and return a setting's value. Raise ValueError if it is invalid."""
    if key in _SWITCHES:
        if type(value) is not bool:
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    if key == "io_engine":
        refusal = engines().get(str(value), "no engine of that name")
        if refusal is not None:
            raise ValueError(f"{value!r}: {refusal}")
        return str(value)
    limits = {
        "block_size": (512, MAX_BLOCK_NBYTES),
        "queue_depth": (1, MAX_QUEUE_DEPTH),
        **dict.fromkeys(("io_parallel", "intra_op_parallelism"), (1, MAX_PARALLELISM)),
    }
    if key not in limits:
        known = ", ".join([*limits, *_SWITCHES, "io_engine"])
        raise ValueError(f"not a setting of a sweep (valid: {known})")
    number = parse_nbytes(value) if isinstance(value, str) else value
    low, high = limits[key]
    if type(number) is not int or not low <= number <= high:
        raise ValueError(f"{value!r} is not a number from {low} to {high}")
    return number


def common(
    default: Settings, speedups: list[dict[Settings, float]], chosen: list[Settings]
) -> Settings:
    """Return settings for programs that use the same settings for all directions and drives.

    ``speedups`` has, for each direction of each drive, the speed of all settings relative to the default. ``chosen``
    has the settings that were chosen for each direction of each drive. The result is proven to be faster for at least
    one of these, and was not slower than the default for any of the others. If no settings fulfil that, it is the
    default.
    """
    best = [
        (math.prod(each.get(settings, 0.0) for each in speedups), at, settings)
        for at, settings in enumerate(dict.fromkeys(chosen))
        if settings != default and all(each.get(settings, 0.0) >= 1 for each in speedups)
    ]
    return max(best)[2] if best else default
