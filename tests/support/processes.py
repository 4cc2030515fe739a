"""Lists processes from /proc."""

from __future__ import annotations

import contextlib
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def with_variable(variable: str) -> list[int]:
    """Return the processes that started with NAME=value in their environment."""
    return [number for number, text in _read("environ") if variable in text.split("\0")]


def of_session(session: int) -> list[int]:
    """Return those of a session that have not ended."""
    fields = {number: text.rpartition(")")[2].split() for number, text in _read("stat")}
    return [number for number, each in fields.items() if int(each[3]) == session and each[0] != "Z"]


def _read(name: str) -> Iterator[tuple[int, str]]:
    for path in pathlib.Path("/proc").glob(f"[0-9]*/{name}"):
        with contextlib.suppress(OSError):  # it has ended
            yield int(path.parent.name), path.read_text(errors="replace")
