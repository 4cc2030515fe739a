"""Ctrl-C in the middle of a step: it is heard when the step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Interrupts:
    """Holds SIGINT back while something is done that must not be left half done."""

    def __init__(self) -> None:
        self._count = 0

    def insisted(self) -> bool:
        """Return whether it has come twice: then whoever waits for a drive should give up."""
        return self._count > 1

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold it back; afterwards do with it what would have been done. Other threads are never interrupted anyway."""
        self._count = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        count = 0
        try:
            yield
        finally:
            count, self._count = self._count, 0
            signal.signal(signal.SIGINT, handler)
            if count:  # also where something has failed: it is told with it, as its context
                handler(signal.SIGINT, None)

    def _note(self, _: int, __: FrameType | None) -> None:
        self._count += 1
