"""How many of torch's threads the calling thread uses.

After each parallel region OpenMP's threads spin for some milliseconds before they sleep, and take the processors from
the threads that move bytes, and from everybody else.

The number is the calling thread's own (``omp_set_num_threads``, OpenMP 5.2, 18.2.1), unlike what
``torch.set_num_threads`` sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def limited(count: int | None) -> Iterator[None]:
    """Have the calling thread use so many at most; None: as many as torch has."""
    import torch

    before: int = torch.get_num_threads()
    if count is None or count >= before or not _set(count):
        yield
        return
    try:
        yield
    finally:
        _set(before)


def _set(count: int) -> bool:
    """Set the calling thread's number of threads, or return False: torch's are not OpenMP's."""
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
    # torch loads its OpenMP for everybody to see, with its global dependencies.
    call = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if call is not None:
        call.argtypes, call.restype = [ctypes.c_int], None
    return call
