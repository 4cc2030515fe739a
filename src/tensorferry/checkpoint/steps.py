"""Steps of a training: what the folders of their checkpoints are called, and which of them may go."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

_NAME = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    """Return what the folder of a step's checkpoint is called."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose checkpoint has this name, None if it is no such name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def superfluous(
    steps: Iterable[int],
    step: int,
    keep_last: int,
    keep_every: int | None,
    damaged: Container[int] = (),
) -> list[int]:
    """Return which steps may go now that there is a checkpoint of one: none that is newer.

    Of the last ones those that are damaged do not count.
    """
    older = sorted(each for each in steps if each < step)
    sound = [*(each for each in older if each not in damaged), step]
    oldest = sound[-keep_last:][0]
    return [each for each in older if each < oldest and not stays(each, keep_every)]


def stays(step: int, keep_every: int | None) -> bool:
    """Return whether a step's checkpoint stays for good."""
    return bool(keep_every and step % keep_every == 0)
