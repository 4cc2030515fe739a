"""Limiting the number of OpenMP threads that torch uses for the calling thread.

After each parallel region OpenMP's threads spin for some milliseconds before they sleep. Meanwhile they occupy
processors that other threads need, such as those that move bytes.

``omp_set_num_threads`` sets the number for the calling thread only (OpenMP 5.2, 18.2.1), unlike
``torch.set_num_threads``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Limit the calling thread to ``count`` OpenMP threads during the block."""
    import torch

    before: int = torch.get_num_threads()
    if count >= before or not _set_threads(count):
        yield
        return
    try:
        yield
    finally:
        _set_threads(before)


def _set_threads(count: int) -> bool:
    """Set the number of OpenMP threads for the calling thread; return False if that does not change torch's number."""
    import torch

    call = _omp_set_num_threads()
    if call is None:
        return False
    before = torch.get_num_threads()
    call(count)
    if torch.get_num_threads() == count:
        return True
    call(before)
    return False


@functools.cache
def _omp_set_num_threads() -> Any:
    # torch loads its OpenMP library with RTLD_GLOBAL, so the symbol is visible in the main program's namespace.
    call = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if call is not None:
        call.argtypes, call.restype = [ctypes.c_int], None
    return call
