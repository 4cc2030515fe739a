"""Futures: what an asynchronous call returns.

Completion reaches Python through a queue and an eventfd of the core. A running event loop watches the descriptor;
callbacks are called by one thread that sleeps on it. No worker of the core ever needs the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from errno import ECANCELED
from typing import TYPE_CHECKING, Any, Generic, Protocol

from tensorferry import _core
from tensorferry.base.processes import Owned, in_forked_children
from tensorferry.base.warned import line_of_caller, warn

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator
    from typing import NoReturn

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


class Future(Owned, Generic[_T_co]):
    """The outcome of a transfer on its way: ``Future[T]`` gives a ``T``. Await it, or ask :meth:`result`.

    It keeps the array alive until the transfer is done. Read the array, or change what is being written, only then.
    A failure that nobody asked about is warned of (``RuntimeWarning``) when the future goes away.

    For asyncio it is a coroutine as well, so that ``create_task``, ``TaskGroup.create_task``, ``gather``, ``wait_for``,
    ``shield`` and ``as_completed`` take it; several tasks may await one. As with ``asyncio.Future``, cancelling a task
    that awaits it cancels the transfer. The task need not wait for what is in flight then, but whoever wants to use
    the array again must: until :meth:`done`.
    """

    __slots__ = (
        "__weakref__",
        "_about",
        "_array",
        "_asked",
        "_begun_at",
        "_cancelling",
        "_check",
        "_exception",
        "_generation",
        "_keep",
        "_request",
        "_settled",
    )
    _request: Request
    _refusal = "this transfer was begun before fork(): it ends in the parent process, and nobody tells this one"

    def __init__(self, array: _T_co, keep: object) -> None:
        self._array = array
        self._keep = keep
        self._about: tuple[str, str, int, int] | None = None  # verb, path, offset, bytes
        self._begun_at = line_of_caller()
        self._asked = False
        self._cancelling = False
        self._settled = False
        self._exception: StorageError | None = None
        self._check: Callable[[], StorageError | None] | None = None
        self._belong_here()

    def _start(
        self, request: Request, check: Callable[[], StorageError | None] | None = None
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
        """Return whether the transfer has ended: well, with a failure, or cancelled."""
        if not self._request.done():
            return False
        if self._check is not None:
            self._settle()
        return True

    def running(self) -> bool:
        """Return whether the transfer has not ended; also a cancelled one takes until what is in flight is done."""
        return not self.done()

    def cancel(self) -> bool:
        """End the transfer before its time.

        What has not been handed to the kernel never will be; what is in flight is waited for, by :meth:`done`,
        :meth:`result` and the array. A write leaves its range with old and new bytes.

        Returns
        -------
        bool
            False if it has ended already, else True. Whether it came in time shows in the end: see :meth:`cancelled`.
        """
        if self.done():
            return False
        self._cancelling = True
        self._request.cancel()
        return True

    def cancelled(self) -> bool:
        """Return whether it has ended by :meth:`cancel`; one that moved all its bytes nevertheless is a success."""
        return self.done() and self._was_cancelled(self._settle())

    def _was_cancelled(self, exception: StorageError | None) -> bool:
        return self._cancelling and exception is not None and exception.errno == ECANCELED

    def _settle(self) -> StorageError | None:
        """Return how the transfer, which has ended, went."""
        if not self._settled:
            with _settling:  # one outcome for all threads
                if not self._settled:
                    self._exception = self._request.exception()
                    if self._exception is None and self._check is not None:
                        self._exception = self._check()
                    self._check = None
                    self._keep = None  # perhaps a copy that the caller knows nothing of
                    self._settled = True
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
        concurrent.futures.CancelledError
            It was cancelled.
        RuntimeError
            This is a forked child, and the transfer is its parent's.
        """
        request = self._request
        if not request.done():
            self._check_process()
            if not request.wait(timeout):
                raise TimeoutError(f"the transfer has not ended within {timeout} seconds")
        self._asked = True
        _unseen.discard(self)
        exception = self._settle()
        if self._was_cancelled(exception):
            from concurrent.futures import CancelledError

            raise CancelledError(str(exception))
        return exception

    def result(self, timeout: float | None = None) -> _T_co:
        """Wait, and return the array.

        Raises
        ------
        StorageError
            The transfer failed.
        TimeoutError
            It has not ended within ``timeout`` seconds; it goes on.
        concurrent.futures.CancelledError
            It was cancelled.
        RuntimeError
            This is a forked child, and the transfer is its parent's.
        """
        exception = self.exception(timeout)
        if exception is not None:
            raise exception
        return self._array

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

    # What asyncio asks of an awaitable, and of a coroutine that a task may run. There is no state here but the
    # transfer's: so any number of tasks may be at it.

    def __await__(self) -> Generator[Any, None, _T_co]:
        import asyncio

        try:
            while not self.done():
                yield from self._waiter()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._awaited()

    def send(self, _: None) -> Any:
        """Go on as a coroutine; for asyncio."""
        if not self.done():
            waiter = self._waiter()
            waiter._asyncio_future_blocking = True  # as `await` marks what it hands to the task
            return waiter
        raise StopIteration(self._awaited())

    def throw(self, error: BaseException | type[BaseException], *_: object) -> NoReturn:
        """Go on with an exception, as a coroutine; for asyncio."""
        import asyncio

        error = error() if isinstance(error, type) else error
        if isinstance(error, asyncio.CancelledError):
            self.cancel()
        raise error

    def close(self) -> None:
        """Do nothing: coroutines have this method. The transfer goes on."""

    def _waiter(self) -> asyncio.Future[None]:
        import asyncio

        self._check_process()
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        listener = _listeners.get(loop)
        if listener is None:
            listener = _listeners[loop] = _LoopListener(loop)
        listener.add(self._request, waiter)
        return waiter

    async def _ended(self) -> None:
        """Wait for the end, whatever it is, and leave the transfer alone if that is cancelled."""
        while not self.done():
            await self._waiter()

    def _awaited(self) -> _T_co:
        """Return or raise, as asyncio does, how it ended."""
        if not self.cancelled():
            return self.result(0)
        import asyncio

        self._asked = True
        _unseen.discard(self)
        raise asyncio.CancelledError(str(self._exception))

    def __repr__(self) -> str:
        what = "of a transfer"
        if self._about is not None:
            verb, path, offset, nbytes = self._about
            what = f"{verb} {nbytes} bytes at offset {offset} of {path!r}"
        return f"<tensorferry.Future {what}: {self._state()}>"

    def _state(self) -> str:
        request = getattr(self, "_request", None)
        if request is None:
            return "never begun"
        if not request.done():
            return "being cancelled" if self._cancelling else "running"
        # Not _check: looking at a future is not asking for the outcome.
        exception = self._exception or request.exception()
        if exception is None:
            return "done"
        return "cancelled" if self._was_cancelled(exception) else f"failed: {exception}"

    def __del__(self) -> None:
        if not sys.is_finalizing():  # leave() has warned by then
            self._warn_if_unseen()

    def _warn_if_unseen(self) -> None:
        request = getattr(self, "_request", None)  # None: it was never submitted
        if request is None or self._asked or not request.done():
            return
        # Not _check: the array has been the caller's again for who knows how long.
        exception = self._exception or request.exception()
        if exception is not None and not self._was_cancelled(exception):
            warn(f"nobody asked for this transfer's outcome: {exception}", self._begun_at)


# Futures whose outcome nobody has asked for; the interpreter may leave before they are collected.
_unseen: weakref.WeakSet[Future] = weakref.WeakSet()


def _call(callback: Callable[[Future[_T_co]], object], future: Future[_T_co]) -> None:
    future.done()  # gives its memory back, whether the callback asks for the outcome or not
    try:
        callback(future)
    except Exception:
        _log(future)


def _log(what: object) -> None:
    import logging

    logging.getLogger("tensorferry").exception("exception in a callback of %r", what)


class _LoopListener:
    """Completions for one event loop, whose thread alone uses this."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = _core.CompletionQueue()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        loop.add_reader(self._queue.fileno(), self._deliver)

    def add(self, request: Request, waiter: asyncio.Future[None]) -> None:
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
_settling = threading.RLock()


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


@in_forked_children
def _forget_parent() -> None:
    global _lock, _settling, _unseen, _listeners
    # Another thread may have held them at fork.
    _lock, _settling = threading.Lock(), threading.RLock()
    _unseen = weakref.WeakSet()  # the parent warns
    _listeners = weakref.WeakKeyDictionary()


class Pending:
    """A file's futures, known weakly: the core keeps those on their way, and nobody need keep the others' arrays."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what a future lets go of may begin a transfer
        self._futures: list[weakref.ref[Future[Any]]] = []
        self._look_at = 256

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
                self._look_at = 2 * len(self._futures) + 256
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
