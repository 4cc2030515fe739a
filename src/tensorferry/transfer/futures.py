"""Futures: the results of asynchronous calls.

A request is the core's object for a transfer; it is divided into blocks, each one submission to the kernel. When a
request is done, the core puts a token (a number) into a completion queue, which makes the queue's eventfd readable.
Each event loop that awaits futures watches the eventfd of its own queue (a listener). A thread of this module sleeps on
another queue and calls the functions of :meth:`Future.add_done_callback`. Therefore no worker thread of the core ever
needs the GIL. The methods that are called often (``done``, ``result``, ``await``, ``cancel``) are implemented in the
core: see csrc/bindings/future.h.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, Protocol

from tensorferry import _core
from tensorferry.base.processes import in_forked_children, module_lock

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
    """The request behind a future: one request of the core, or several that are treated as one."""

    def done(self) -> bool:
        """Return whether the request has ended."""

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait, and return whether the request has ended."""

    def cancel(self) -> None:
        """Cancel the blocks that have not started."""

    def exception(self) -> StorageError | None:
        """Return the request's error, or None if it succeeded; valid once the request is done."""

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Put ``token`` into a completion queue once, when the request is done.

        For several requests that are treated as one, this is when the first of the unfinished requests is done.
        """


class Future(_core.Future, Generic[_T_co]):
    """The future result of a transfer: ``Future[T]`` yields a ``T``. Await it, or call :meth:`result`.

    A future keeps its array alive until the transfer is done. Until then, do not read an array that is being filled
    and do not change one that is being written. If a transfer fails and its future is deleted before any code has
    asked for the outcome, the failure is emitted as a ``RuntimeWarning``.

    For asyncio a future is also a coroutine: ``create_task``, ``TaskGroup.create_task``, ``gather``, ``wait_for``,
    ``shield`` and ``as_completed`` accept it, and several tasks may await the same one. As with ``asyncio.Future``,
    cancelling a task that awaits it cancels the transfer. The task ends without waiting for the blocks in flight; code
    that wants to use the array again must wait until :meth:`done` returns True.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # The core implements these and has their docstrings.
        def __init__(self, array: _T_co, keep: object) -> None: ...
        def result(self, timeout: float | None = None) -> _T_co: ...  # noqa: D102
        def __await__(self) -> Generator[Any, None, _T_co]: ...

    def add_done_callback(self, callback: Callable[[Future[_T_co]], object]) -> None:
        """Call ``callback(future)`` when the transfer has ended: immediately if it has, else from tensorferry's thread.

        A callback may call any function of tensorferry, such as starting another transfer or closing the file. As with
        ``concurrent.futures``, an exception that it raises is logged and otherwise ignored.
        """
        if self.done():
            _call(callback, self)
            return
        self._check_process()
        # The future may have several requests, and a notification shows only that one of them is done. Therefore the
        # callback thread calls this method again, which calls the callback if all requests are done, and otherwise
        # registers for the next notification.
        _callback_thread().add(self._request, lambda: self.add_done_callback(callback))

    async def _wait_until_done(self) -> None:
        """Wait until the transfer has ended, with or without success.

        Cancelling the wait does not cancel the transfer.
        """
        while not self.done():
            await self._waiter()

    def __repr__(self) -> str:
        what = "of a transfer"
        if self._about is not None:
            verb, path, offset, nbytes = self._about
            what = f"{verb} {nbytes} bytes at offset {offset} of {path!r}"
        return f"<tensorferry.Future {what}: {self._state}>"


def _call(callback: Callable[[Future[_T_co]], object], future: Future[_T_co]) -> None:
    future.done()  # makes the future release its array even if the callback does not ask for the outcome
    try:
        callback(future)
    except Exception:
        _log_exception(future)


def _log_exception(what: object) -> None:
    import logging

    with contextlib.suppress(Exception):  # a logging handler of the program may raise
        logging.getLogger("tensorferry").exception("exception in a callback of %r", what)


# One listener for each event loop. The core caches the listener that was used last.
_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _core.LoopListener] = (
    weakref.WeakKeyDictionary()
)


def _listener_of(loop: asyncio.AbstractEventLoop) -> _core.LoopListener:
    """Return the listener that wakes an event loop's tasks when their transfers have ended."""
    listener = _listeners.get(loop)
    if listener is None:
        listener = _listeners[loop] = _core.LoopListener()
        loop.add_reader(listener.fileno(), listener.deliver)
    return listener


class _CallbackThread:
    """A daemon thread that sleeps on a completion queue and calls the registered callbacks."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._queue = _core.CompletionQueue()
        self._lock = threading.RLock()  # reentrant: see module_lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._last = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tensorferry-callbacks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            why = f"{error}; {_core.why_no_thread()}"
            raise RuntimeError(
                f"cannot start the thread that calls futures' callbacks: {why}"
            ) from None
        self.ident = self._thread.ident or 0

    def add(self, request: Request, callback: Callable[[], None]) -> None:
        with self._lock:
            self._last += 1
            token = self._last
            self._callbacks[token] = callback
        try:
            request.notify(self._queue, token)
        except BaseException:
            # A KeyboardInterrupt may arrive before the request knows the token. No notification would then remove the
            # entry, and the entry would keep the future and its array for ever.
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
                    # Not even a SystemExit may end the thread: the other callbacks would never be called.
                    _log_exception(callback)
                # Otherwise this variable would keep the callback's future and array while the thread sleeps.
                del callback
            if not tokens:
                if self._stopping:
                    return
                self._queue.wait(3600.0)


_callbacks: _CallbackThread | None = None
_lock = module_lock()


def _callback_thread() -> _CallbackThread:
    global _callbacks
    with _lock:
        if _callbacks is None or _callbacks.process != os.getpid():
            _callbacks = _CallbackThread()
        return _callbacks


def callback_thread() -> int:
    """Return the number of the thread that calls callbacks, or 0. :func:`finish_at_exit` waits for it."""
    return _callbacks.ident if _callbacks is not None and _callbacks.process == os.getpid() else 0


def finish_at_exit() -> None:
    """Run the remaining callbacks and warn of failures that no code asked for; all transfers must have ended."""
    if _callbacks is not None and callback_thread():
        _callbacks.stop()
    _core.warn_of_unseen_futures()


@in_forked_children
def _reset_after_fork() -> None:
    global _listeners
    _listeners = weakref.WeakKeyDictionary()


class PendingFutures:
    """The unfinished futures of one file, held by weak references.

    The core holds strong references to futures in flight. Futures that are done must not be kept alive here, because
    each of them would keep its array.
    """

    def __init__(self) -> None:
        # Reentrant: dropping a future may run a finalizer that starts another transfer of the same file.
        self._lock = threading.RLock()
        self._futures: list[weakref.ref[Future[Any]]] = []
        self._prune_at = 64

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future[Any]) -> None:
        """Add a future."""
        with self._lock:
            # Pruning futures that are done, each time the list has doubled, keeps the list short at little cost.
            if len(self._futures) >= self._prune_at:
                # If the pruning drops an object, its finalizer may start another transfer on this thread, and with it
                # another add(). With this limit that call only appends to the list, and does not prune it, too.
                self._prune_at = sys.maxsize
                self._futures = [
                    each
                    for each in self._futures
                    if (known := each()) is not None and not known.done()
                ]
                self._prune_at = 2 * len(self._futures) + 64
            self._futures.append(weakref.ref(future))

    def alive(self) -> list[Future[Any]]:
        """Return the futures that still exist, among them all that are in flight."""
        with self._lock:
            return [future for each in self._futures if (future := each()) is not None]

    def take(self) -> list[weakref.ref[Future[Any]]]:
        """Return all references and empty the list."""
        with self._lock:
            taken, self._futures = self._futures, []
        return taken

    def restore(self, futures: list[weakref.ref[Future[Any]]]) -> None:
        """Insert the references that :meth:`take` returned at the front of the list again."""
        with self._lock:
            self._futures[:0] = futures
