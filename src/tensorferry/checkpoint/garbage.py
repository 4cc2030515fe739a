"""Suspension of Python's garbage collector while many objects are created that are all kept.

The collector would traverse all of them each time their number has grown by a quarter, which takes longer than to
create them.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disable garbage collection in a block; only for code that computes and ends soon."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
