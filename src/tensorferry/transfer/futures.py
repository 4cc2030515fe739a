"""Futures: what an asynchronous call returns.

Completion reaches Python through a queue and an eventfd of the core. A running event loop watches the descriptor;
callbacks are called by one thread that sleeps on it. No worker of the core ever needs the GIL. What is asked often
(``done``, ``result``, ``await``, ``cancel``) is the core's: see csrc/bindings/future.h.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol

from tensorferry import _core
from tensorferry.base.processes import in_forked_children

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    from typing_extensions import TypeVar

    from tensorferry.errors import StorageError

    # `Future` alone is `Future[Any]`.
    _T_co = TypeVar("_T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    _T_co = TypeVar("_T_co", covariant=True)


class Request(Protocol):
    """What a future is of: one of the core's requests, or several looked at as one."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait, and return whether it has ended."""

    def cancel(self) -> None:
        """End it before its time."""

    def exception(self) -> StorageError | None:
        """Return what went wrong; valid once done."""

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Have a queue told when the request, or one more of several, is done."""


class Future(_core.Future, Generic[_T_co]):
    """The outcome of a transfer on its way: ``Future[T]`` gives a ``T``. Await it, or ask :meth:`result`.

    It keeps the array alive until the transfer is done. Read the array, or change what is being written, only then.
    A failure that nobody asked about is warned of (``RuntimeWarning``) when the future goes away.

    For asyncio it is a coroutine as well, so that ``create_task``, ``TaskGroup.create_task``, ``gather``, ``wait_for``,
    ``shield`` and ``as_completed`` take it; several tasks may await one. As with ``asyncio.Future``, cancelling a task
    that awaits it cancels the transfer. The task need not wait for what is in flight then, but whoever wants to use
    the array again must: until :meth:`done`.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # Their docstrings are the core's.
        def __init__(self, array: _T_co, keep: object) -> None: ...
        def result(self, timeout: float | None = None) -> _T_co: ...  # noqa: D102
        def __await__(self) -> Generator[Any, None, _T_co]: ...

    def add_done_callback(self, callback: Callable[[Future[_T_co]], object]) -> None:
        """Call ``callback(future)`` when the transfer has ended: now if it has, else from a thread of tensorferry's.

        A callback may do whatever it likes: begin other transfers, close the file. An exception of it is logged and
        otherwise ignored, as with ``concurrent.futures``.
        """
        if self.done():
            _call(callback, self)
            return
        self._check_process()
        # Called again by that thread: of several requests it is told of each.
        _callback_thread().add(self._request, lambda: self.add_done_callback(callback))

    async def _ended(self) -> None:
        """Wait for the end, whatever it is, and leave the transfer alone if that is cancelled."""
        while not self.done():
            await self._waiter()

    def __repr__(self) -> str:
        what = "of a transfer"
        if self._about is not None:
            verb, path, offset, nbytes = self._about
            what = f"{verb} {nbytes} bytes at offset {offset} of {path!r}"
        return f"<tensorferry.Future {what}: {self._state}>"


def _call(callback: Callable[[Future[_T_co]], object], future: Future[_T_co]) -> None:
    future.done()  # gives its memory back, whether the callback asks for the outcome or not
    try:
        callback(future)
    except Exception:
        _log(future)


def _log(what: object) -> None:
    import logging

    logging.getLogger("tensorferry").exception("exception in a callback of %r", what)


# The core has the last one at hand.
_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _core.LoopListener] = (
    weakref.WeakKeyDictionary()
)


def _listener_of(loop: asyncio.AbstractEventLoop) -> _core.LoopListener:
    """Return what tells an event loop of transfers that have ended."""
    listener = _listeners.get(loop)
    if listener is None:
        listener = _listeners[loop] = _core.LoopListener()
        loop.add_reader(listener.fileno(), listener.deliver)
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
        try:
            self._thread.start()
        except RuntimeError as error:
            why = f"{error}; {_core.why_no_thread()}"
            raise RuntimeError(f"callbacks of futures need a thread: {why}") from None

    def add(self, request: Request, callback: Callable[[], None]) -> None:
        with self._lock:
            self._last += 1
            token = self._last
            self._callbacks[token] = callback
        try:
            request.notify(self._queue, token)
        except BaseException:  # Ctrl-C: nobody is to wait for ever, with an array in hand
            self._callbacks.pop(token, None)
            raise

    def stop(self) -> None:
        self._stopping = True
        self._queue.wake()
        self._thread.join()

    def _run(self) -> None:
        while True:
            tokens = self._queue.take()
            for token in tokens:
                with self._lock:
                    callback = self._callbacks.pop(token, None)
                if callback is None:
                    continue
                try:
                    callback()
                except BaseException:
                    # SystemExit, say: it is not for others' callbacks to go without.
                    _log(callback)
                del callback  # and what it keeps: the future, and its array
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
    _core.warn_of_unseen_futures()


@in_forked_children
def _forget_parent() -> None:
    global _lock, _listeners
    _lock = threading.Lock()  # another thread may have held it
    _listeners = weakref.WeakKeyDictionary()


class Pending:
    """A file's futures, known weakly: the core keeps those on their way, and nobody need keep the others' arrays."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what a future lets go of may begin a transfer
        self._futures: list[weakref.ref[Future[Any]]] = []
        self._look_at = 64

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future[Any]) -> None:
        """Know one more."""
        with self._lock:
            # Those that are done need no waiting for; looking every so often keeps the list short.
            if len(self._futures) >= self._look_at:
                # What begins meanwhile, on this thread, only joins the list.
                self._look_at = sys.maxsize
                self._futures = [
                    each
                    for each in self._futures
                    if (known := each()) is not None and not known.done()
                ]
                self._look_at = 2 * len(self._futures) + 64
            self._futures.append(weakref.ref(future))

    def living(self) -> list[Future[Any]]:
        """Return those that somebody still has, or that are on their way."""
        with self._lock:
            return [future for each in self._futures if (future := each()) is not None]

    def take(self) -> list[weakref.ref[Future[Any]]]:
        """Return all of them, and forget them."""
        with self._lock:
            taken, self._futures = self._futures, []
        return taken

    def put_back(self, futures: list[weakref.ref[Future[Any]]]) -> None:
        """Know again what was taken."""
        with self._lock:
            self._futures[:0] = futures
