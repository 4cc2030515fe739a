"""How far a save or load has come, and how fast it was."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a save or load has come.

    Attributes
    ----------
    nbytes, total_nbytes : int
        Bytes of tensors and objects: those that are where they belong, and all.
    files, total_files : int
        Data files: those that are done, and all.
    """

    nbytes: int
    total_nbytes: int
    files: int
    total_files: int


@dataclass(frozen=True)
class Throughput:
    """How much a save or load has moved, and in what time.

    Attributes
    ----------
    nbytes : int
        Bytes of tensors and objects.
    seconds : float
        From its beginning to its end.
    """

    nbytes: int
    seconds: float

    @property
    def gb_per_second(self) -> float:
        """Speed in GB/s, of 10^9 bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


# Whom to tell; what it returns is ignored.
Listener: TypeAlias = "Callable[[Progress], object]"


def checked_listener(progress: Listener | None) -> Listener | None:
    """Return what was given as ``progress=``, or raise TypeError if it cannot be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: {progress!r} cannot be called")
    return progress


class Meter:
    """Counts what is done, and tells a listener now and then; for one thread.

    Parameters
    ----------
    listener : function of a Progress, optional
        Called by :meth:`add`, at most every 0.1 seconds, and once by :meth:`finish`. What it raises goes on from there.
    total_nbytes, total_files : int
        How much there is to do.
    """

    def __init__(
        self, listener: Listener | None = None, *, total_nbytes: int = 0, total_files: int = 0
    ) -> None:
        self._listener = listener
        self._total_nbytes, self._total_files = total_nbytes, total_files
        self._nbytes = self._files = 0
        self._begun = self._told = time.monotonic()

    @property
    def nbytes(self) -> int:
        """How many bytes are done."""
        return self._nbytes

    def expect(self, nbytes: int, files: int) -> None:
        """Take note that there is so much more to do."""
        self._total_nbytes += nbytes
        self._total_files += files

    def add(self, nbytes: int, files: int = 0) -> None:
        """Count what has been done."""
        self._nbytes += nbytes
        self._files += files
        if self._listener is not None and time.monotonic() - self._told >= _PAUSE_SECONDS:
            self._tell(self._listener)

    def finish(self) -> Throughput:
        """Say that all is done, and return how fast that was."""
        seconds = time.monotonic() - self._begun
        if self._listener is not None:
            self._tell(self._listener)
        return Throughput(self._nbytes, seconds)

    def _tell(self, listener: Listener) -> None:
        # Objects may be longer than was known before.
        total_nbytes = max(self._nbytes, self._total_nbytes)
        listener(Progress(self._nbytes, total_nbytes, self._files, self._total_files))
        self._told = time.monotonic()
