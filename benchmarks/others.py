"""What other processes do to a measurement: how much of the processors they used meanwhile.

On a machine that others work on, a sample taken while somebody compiles tells nothing. Only time in user
space counts: what the kernel does for a contender's I/O lies in kernel threads that belong to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def only_benchmark(waiting: Callable[[], object]) -> Iterator[None]:
    """Wait, after a call of ``waiting``, until no other benchmark of ours runs on this machine."""
    # The folder itself is locked: in one that everybody may write to, a file's name may be anybody's link.
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


class OthersClock:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds = _user_seconds_of_others()

    def share(self) -> float:
        """The part of all processors that processes other than ours have used since."""
        elapsed = time.monotonic() - self._start
        seconds = _user_seconds_of_others() - self._seconds
        return max(0.0, seconds) / max(elapsed * (os.cpu_count() or 1), 1e-9)


def _user_seconds_of_others() -> float:
    """Everybody's, less those of this process, the children that it has waited for, and those that live."""
    everyone, mine = psutil.cpu_times(), os.times()
    living = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            living += times.user + times.children_user
    ours: float = mine.user + mine.children_user + living
    return everyone.user + everyone.nice - ours  # type: ignore[no-any-return]
