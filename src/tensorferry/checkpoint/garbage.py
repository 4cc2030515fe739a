"""Python's collector of garbage, while many objects are made that are all kept.

It looks through all of them again each time their number has grown by a quarter: longer than it takes to make them.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Have nothing collected meanwhile: for what only computes, and ends soon."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
