"""Futures: what an asynchronous call returns.

Completion reaches Python through a queue and an eventfd of the core. A running event loop watches the descriptor;
callbacks are called by one thread that sleeps on it. No worker of the core ever needs the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from tensorferry import _core

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    from tensorferry.errors import StorageError


class Future:
    """The outcome of a transfer on its way. Await it, or ask :meth:`result`.

    It keeps the array alive until the transfer is done. Read the array, or change what is being written, only then.
    A failure that nobody asked about is warned of (``RuntimeWarning``) when the future goes away.
    """

    __slots__ = ("__weakref__", "_array", "_asked", "_check", "_exception", "_keep", "_request")
    _request: _core.Request

    def __init__(self, array: object, keep: object) -> None:
        self._array = array
        self._keep = keep
        self._asked = False
        self._exception: StorageError | None = None
        self._check: Callable[[], StorageError | None] | None = None

    def _start(
        self, request: _core.Request, check: Callable[[], StorageError | None] | None = None
    ) -> None:
        """Be the future of a request; what ended well is asked of ``check`` too, when its end is first seen."""
        self._check = check
        self._request = request
        _unseen.add(self)

    def _abandon(self) -> None:
        """End the transfer before its time; how it ends is of no interest."""
        self._request.cancel()
        self._asked = True
        _unseen.discard(self)

    def done(self) -> bool:
        """Return whether the transfer has ended, well or not."""
        if not self._request.done():
            return False
        if self._check is not None:
            self._settle()
        return True

    def _settle(self) -> StorageError | None:
        """Return how the transfer, which has ended, went."""
        if self._exception is None:
            self._exception = self._request.exception()
            if self._exception is None and self._check is not None:
                self._exception = self._check()
            self._check = None
            self._keep = None  # perhaps a copy that the caller knows nothing of
        return self._exception

    def exception(self, timeout: float | None = None) -> StorageError | None:
        """Wait, and return what went wrong, or None.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; None waits as long as it takes.

        Raises
        ------
        TimeoutError
            The transfer has not ended in time; it goes on.
        """
        request = self._request
        if not request.wait(timeout):
            raise TimeoutError(f"the transfer has not ended within {timeout} seconds")
        self._asked = True
        _unseen.discard(self)
        return self._settle()

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the array.

        Raises
        ------
        StorageError
            The transfer failed.
        TimeoutError
            It has not ended within ``timeout`` seconds; it goes on.
        """
        exception = self.exception(timeout)
        if exception is not None:
            raise exception
        return self._array

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call ``callback(future)`` when the transfer has ended: now if it has, else from a thread of tensorferry's.

        An exception of the callback is logged and otherwise ignored, as with ``concurrent.futures``.
        """
        if self.done():
            _call(callback, self)
            return
        _callback_thread().add(self._request, lambda: _call(callback, self))

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            import asyncio

            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            _listener_of(loop).add(self._request, waiter)
            yield from waiter
        return self.result(0)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # leave() has warned by then
            self._warn_if_unseen()

    def _warn_if_unseen(self) -> None:
        request = getattr(self, "_request", None)  # None: it was never submitted
        if request is None or self._asked or not request.done():
            return
        # Not _check: the array has been the caller's again for who knows how long.
        exception = self._exception or request.exception()
        if exception is not None:
            message = f"nobody asked for this transfer's outcome: {exception}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


# Futures whose outcome nobody has asked for; the interpreter may leave before they are collected.
_unseen: weakref.WeakSet[Future] = weakref.WeakSet()


def _call(callback: Callable[[Future], object], future: Future) -> None:
    try:
        callback(future)
    except Exception:
        import logging

        logging.getLogger("tensorferry").exception("exception in a callback of %r", future)


class _LoopListener:
    """Completions for one event loop, whose thread alone uses this."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = _core.CompletionQueue()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        loop.add_reader(self._queue.fileno(), self._deliver)

    def add(self, request: _core.Request, waiter: asyncio.Future[None]) -> None:
        self._last += 1
        self._waiters[self._last] = waiter
        request.notify(self._queue, self._last)

    def _deliver(self) -> None:
        for token in self._queue.take():
            waiter = self._waiters.pop(token)
            if not waiter.done():  # the task that awaited it may have been cancelled
                waiter.set_result(None)


_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopListener] = (
    weakref.WeakKeyDictionary()
)


def _listener_of(loop: asyncio.AbstractEventLoop) -> _LoopListener:
    listener = _listeners.get(loop)
    if listener is None:
        listener = _listeners[loop] = _LoopListener(loop)
    return listener


class _CallbackThread:
    """Sleeps on a completion queue and calls what was registered."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._queue = _core.CompletionQueue()
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._last = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tensorferry-callbacks", daemon=True)
        self._thread.start()

    def add(self, request: _core.Request, callback: Callable[[], None]) -> None:
        with self._lock:
            self._last += 1
            token = self._last
            self._callbacks[token] = callback
        request.notify(self._queue, token)

    def stop(self) -> None:
        self._stopping = True
        self._queue.wake()
        self._thread.join()

    def _run(self) -> None:
        while True:
            tokens = self._queue.take()
            for token in tokens:
                with self._lock:
                    callback = self._callbacks.pop(token)
                callback()
            if not tokens:
                if self._stopping:
                    return
                self._queue.wait(3600.0)


_callbacks: _CallbackThread | None = None
_lock = threading.Lock()


def _callback_thread() -> _CallbackThread:
    global _callbacks
    with _lock:
        if _callbacks is None or _callbacks.process != os.getpid():
            _callbacks = _CallbackThread()
        return _callbacks


def leave() -> None:
    """Call what is left to call and warn of failures nobody saw; for when all transfers have ended."""
    if _callbacks is not None and _callbacks.process == os.getpid():
        _callbacks.stop()
    for future in list(_unseen):
        future._warn_if_unseen()
        _unseen.discard(future)


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it at fork


os.register_at_fork(after_in_child=_forget_lock)
