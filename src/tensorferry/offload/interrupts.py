"""Ctrl-C, and other signals, in the middle of a step: they are heard when the step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Interrupts:
    """Holds signals back while something is done that must not be left half done.

    Every handler that is written in Python may raise: that of SIGTERM often does, so that a training can end well.
    """

    def __init__(self) -> None:
        self._count = 0
        self._came: list[int] = []

    def insisted(self) -> bool:
        """Return whether Ctrl-C has come twice: then a wait for a drive should be given up."""
        return self._count > 1

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold them back; afterwards call their handlers. Other threads are never interrupted anyway."""
        self._count = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Any] = {}
        for number in map(int, signal.valid_signals()):
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:  # not those that are held back already
                handlers[number] = handler
        for number in handlers:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            if handlers:
                came, self._came, self._count = self._came, [], 0
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                # Also where something has failed: that is the context of what a handler raises.
                _call([(handlers[each], each) for each in dict.fromkeys(came) if each in handlers])

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)
        if number == signal.SIGINT:
            self._count += 1


def _call(handlers: list[tuple[Any, int]]) -> None:
    """Call all handlers, whatever one of them raises."""
    if handlers:
        handler, number = handlers[0]
        try:
            handler(number, None)
        finally:
            _call(handlers[1:])
