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
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def only_benchmark(waiting: Callable[[], object]) -> Iterator[None]:
    """Wait, after a call of ``waiting``, until no other benchmark of ours runs on this machine."""
    with (Path(tempfile.gettempdir()) / "tensorferry-benchmarks.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class OthersClock:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._everyone = _user_seconds_of_everyone()
        self._ours = _user_seconds_of_ours()

    def share(self) -> float:
        """The part of all processors that processes other than ours have used since."""
        elapsed = time.monotonic() - self._start
        everyone = _user_seconds_of_everyone() - self._everyone
        ours = _user_seconds_of_ours() - self._ours
        processors = os.cpu_count() or 1
        return max(0.0, everyone - ours) / max(elapsed * processors, 1e-9)


def _user_seconds_of_everyone() -> float:
    user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
    return (int(user) + int(nice)) / _TICKS_PER_SECOND


def _user_seconds_of_ours() -> float:
    """This process, the children that it has waited for, and those that live."""
    times = os.times()
    return times.user + times.children_user + sum(_user_seconds_of(c) for c in _children())


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(number) for number in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _user_seconds_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return int(fields[11]) / _TICKS_PER_SECOND
