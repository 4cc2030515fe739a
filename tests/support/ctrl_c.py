"""Ctrl-C that comes in the middle of a call, not after so many seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.leaks import settled
from tests.support.threads import InThread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.faultfs import FaultFS


@contextlib.contextmanager
def interrupted_in(function: Any, faultfs: FaultFS) -> Iterator[None]:
    """Send Ctrl-C when the main thread is in a function and requests are held, and let these go; it ends the block."""

    def there() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None

    def send() -> None:
        faultfs.await_held()
        assert settled(there)
        os.kill(os.getpid(), signal.SIGINT)
        faultfs.release()

    sender = InThread(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sender.result("who sends Ctrl-C")
