"""Functions that the tests of the report run in separate processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensorferry.tuning.report import report


def look(path: str) -> dict[str, Any]:
    """Report on a path."""
    return report(Path(path))


def look_as_nobody(path: str) -> dict[str, Any]:
    """Report on a path as an ordinary user."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    return report(Path(path))
