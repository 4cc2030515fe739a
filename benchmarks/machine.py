"""What a figure was measured on: the machine as ``tensorferry report`` knows it, and fio's version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import fio
from tensorferry.tuning import machine

if TYPE_CHECKING:
    from pathlib import Path

summary = machine.summary


def describe(directory: Path) -> dict[str, Any]:
    """The machine and the file system of a directory, ready for JSON."""
    return machine.describe(directory) | {"fio": fio.version()}
