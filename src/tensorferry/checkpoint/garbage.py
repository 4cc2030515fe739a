"""Suspension of Python's garbage collector while many objects are created that are all kept.

The collector would traverse all objects again each time their number has grown by a quarter. In total this takes longer
than the creation of the objects.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disable garbage collection while a block runs.

    This affects all threads of the process, so the block must be short and must not wait for anything.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
