"""Warnings that name a line of the caller's: the one that called, or that began what went wrong."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, TypeAlias

# A file's name and a line's number.
Line: TypeAlias = "tuple[str, int]"

# Of the whole package; pathlib would take milliseconds.
_PACKAGE = os.path.abspath(f"{__file__}/../..") + os.sep  # noqa: PTH100

# What has been warned of, by file: for filters that let a warning pass once for each line.
_seen: dict[str, dict[Any, Any]] = {}


def line_of_caller() -> Line | None:
    """Return the line outside of this package that called, None where there is none: at the interpreter's exit."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def warn(message: str, line: Line | None = None) -> None:
    """Warn (RuntimeWarning) of something at a line, by default the caller's."""
    name, number = line or line_of_caller() or ("tensorferry", 0)
    warnings.warn_explicit(
        message, RuntimeWarning, name, number, registry=_seen.setdefault(name, {})
    )
