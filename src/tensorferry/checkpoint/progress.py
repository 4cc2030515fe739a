"""Progress and throughput of saves and loads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Progress:
    """The progress of a save or load.

    Attributes
    ----------
    nbytes, total_nbytes : int
        Bytes of tensors and objects: the number of delivered bytes, and the total.
    files, total_files : int
        Data files: the number of complete files, and the total.
    """

    nbytes: int
    total_nbytes: int
    files: int
    total_files: int


@dataclass(frozen=True)
class Throughput:
    """The amount of data that a save or load moved, and the time it took.

    Attributes
    ----------
    nbytes : int
        Bytes of tensors and objects.
    seconds : float
        The time from beginning to end.
    """

    nbytes: int
    seconds: float

    @property
    def gb_per_second(self) -> float:
        """The speed in GB/s (10^9 bytes per second)."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


# A progress callback; its return value is ignored.
Listener: TypeAlias = "Callable[[Progress], object]"


def checked_listener(progress: Listener | None) -> Listener | None:
    """Return the ``progress`` argument, or raise TypeError if it is not callable."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: {progress!r} is not callable")
    return progress


class Meter:
    """Counts completed work and reports it to a listener; for use by one thread.

    Parameters
    ----------
    listener : function of a Progress, optional
        Called by :meth:`add`, at most every 0.1 seconds, and once by :meth:`finish`. Both methods raise the exceptions
        that it raises.
    total_nbytes, total_files : int
        The total amount of work.
    """

    def __init__(
        self, listener: Listener | None = None, *, total_nbytes: int = 0, total_files: int = 0
    ) -> None:
        self._listener = listener
        self._total_nbytes, self._total_files = total_nbytes, total_files
        self._nbytes = self._files = 0
        self._began_at = self._reported_at = time.monotonic()

    @property
    def nbytes(self) -> int:
        """The number of completed bytes."""
        return self._nbytes

    def expect(self, nbytes: int, files: int) -> None:
        """Add to the total amount of work."""
        self._total_nbytes += nbytes
        self._total_files += files

    def add(self, nbytes: int, files: int = 0) -> None:
        """Count completed work."""
        self._nbytes += nbytes
        self._files += files
        if self._listener is not None and time.monotonic() - self._reported_at >= _PAUSE_SECONDS:
            self._report(self._listener)

    def finish(self) -> Throughput:
        """Report the end, and return the throughput."""
        seconds = time.monotonic() - self._began_at
        if self._listener is not None:
            self._report(self._listener)
        return Throughput(self._nbytes, seconds)

    def _report(self, listener: Listener) -> None:
        # The total lacks objects whose size was not known in advance, so more bytes than that may have been counted.
        total_nbytes = max(self._nbytes, self._total_nbytes)
        listener(Progress(self._nbytes, total_nbytes, self._files, self._total_files))
        self._reported_at = time.monotonic()
