"""Warnings that refer to a line of the caller's code: the line that called this package.

For an operation in the background, it is the line that started the operation, and not the line that runs when the
operation fails.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, TypeAlias

from tensorferry import _core

# A file's name and a line's number.
Line: TypeAlias = "tuple[str, int]"

# The package's folder. To find the caller's line, the native core (_core) skips the stack frames of files in this
# folder. os.path is used, because importing pathlib would take milliseconds.
PACKAGE = os.path.abspath(f"{__file__}/../..") + os.sep  # noqa: PTH100

# One registry for each of the callers' files. warnings.warn_explicit() records in it which warnings it has shown, which
# lets a filter show a warning once for each line.
_seen: dict[str, dict[Any, Any]] = {}


def warn(message: str, line: Line | None = None) -> None:
    """Emit a RuntimeWarning that refers to ``line``, by default the line that called this package."""
    name, number = line or _core.line_of_caller() or ("tensorferry", 0)
    warnings.warn_explicit(
        message, RuntimeWarning, name, number, registry=_seen.setdefault(name, {})
    )
