"""Warnings that name a line of the caller's: the one that called, or that began what went wrong."""

from __future__ import annotations

import os
import warnings
from typing import Any, TypeAlias

from tensorferry import _core

# A file's name and a line's number.
Line: TypeAlias = "tuple[str, int]"

# Of the whole package, for the core, which finds the caller; pathlib would take milliseconds.
PACKAGE = os.path.abspath(f"{__file__}/../..") + os.sep  # noqa: PTH100

# What has been warned of, by file: for filters that let a warning pass once for each line.
_seen: dict[str, dict[Any, Any]] = {}


def warn(message: str, line: Line | None = None) -> None:
    """Warn (RuntimeWarning) of something at a line, by default the caller's."""
    name, number = line or _core.line_of_caller() or ("tensorferry", 0)
    warnings.warn_explicit(
        message, RuntimeWarning, name, number, registry=_seen.setdefault(name, {})
    )
