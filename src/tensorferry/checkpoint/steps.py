"""Steps of a training: the folder names of their checkpoints, and which checkpoints may be removed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_NAME = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None if it is not such a name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def superfluous(
    steps: Iterable[int],
    step: int,
    keep_last: int,
    keep_every: int | None,
    damaged: Container[int] = (),
) -> list[int]:
    """Return the steps before ``step`` whose checkpoints may be removed once ``step`` has one.

    Damaged checkpoints do not count towards ``keep_last``.
    """
    older = sorted(each for each in steps if each < step)
    sound = [*(each for each in older if each not in damaged), step]
    oldest = sound[-keep_last:][0]
    return [each for each in older if each < oldest and not is_permanent(each, keep_every)]


def is_permanent(step: int, keep_every: int | None) -> bool:
    """Return whether a step's checkpoint is kept permanently."""
    return bool(keep_every and step % keep_every == 0)
