"""The cost of an operation within a process: seconds, CPU seconds and growth of peak memory."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path

from tensorferry.tuning.machine.probe import fields


class Stopwatch:
    """A context manager that measures the whole process while its block runs.

    ``cpu_seconds`` is the user and system time of all threads, including the kernel's io_uring workers. ``peak_nbytes``
    is the peak of the resident memory within the block (``VmHWM``, which is reset at the start), and
    ``peak_growth_nbytes`` is its difference from the resident memory at the start. ``started`` and ``ended`` are
    seconds of the monotonic clock, which all processes of a machine share.
    """

    started = 0.0
    ended = 0.0
    cpu_seconds = 0.0
    peak_nbytes: int | None = None
    peak_growth_nbytes: int | None = None

    @property
    def seconds(self) -> float:
        """The duration of the block in seconds."""
        return self.ended - self.started

    def __enter__(self) -> Stopwatch:
        self._resident = _reset_peak()
        self._cpu_start = _cpu_seconds()
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = time.monotonic()
        self.cpu_seconds = _cpu_seconds() - self._cpu_start
        self.peak_nbytes = _peak_nbytes()
        if self._resident is not None and self.peak_nbytes is not None:
            self.peak_growth_nbytes = max(0, self.peak_nbytes - self._resident)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reset_peak() -> int | None:
    """Reset VmHWM to the current resident memory, and return this size, or None if the kernel does not support it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _peak_nbytes()
    return None


def _peak_nbytes() -> int | None:
    with contextlib.suppress(OSError, KeyError):
        return int(fields(Path("/proc/self/status"))["VmHWM"].split()[0]) * 1024
    return None
