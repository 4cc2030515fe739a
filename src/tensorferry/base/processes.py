"""Ownership of objects after fork(), finalizers, and deferred signals.

A forked child shares the open files and file locks of its parent but has none of its threads, so operations in
progress never complete in the child. Therefore a child refuses to use the parent's objects (:class:`Owned`), closes the
descriptors of file locks without unlocking them (:data:`lock_descriptors`), releases the locks of modules
(:func:`module_lock`), and runs no finalizers of the parent (:func:`when_dropped`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from tensorferry import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


class Owned:
    """Base class of objects that belong to the process that created them; constructors call :meth:`_set_owner`."""

    # Empty slots keep the layout of instances unchanged: other libraries assign their own subclasses to an object's
    # __class__, which requires equal layouts.
    __slots__ = ()
    _generation: int

    _refusal: ClassVar[str] = (
        "this object was created before fork() and belongs to the parent process"
    )
    """The message of the RuntimeError that a forked child gets when it uses the object."""

    def _set_owner(self) -> None:
        """Record this process as the owner."""
        self._generation = _core.fork_generation()  # type: ignore[misc]  # in subclasses

    @property
    def is_parents(self) -> bool:
        """Whether this process is a forked child of the object's owner, and may only close the object's descriptors."""
        return self._generation != _core.fork_generation()

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child.

        Another thread of the parent may have held the object's locks during fork(); in the child they stay locked.
        """
        if self.is_parents:
            raise RuntimeError(self._refusal)


def in_forked_children(function: Callable[[], object]) -> Callable[[], object]:
    """Register a function that runs in each forked child, and return it."""
    os.register_at_fork(after_in_child=function)
    return function


def module_lock() -> threading.RLock:
    """Return a lock for the state of a module; a forked child can use it even if a thread of the parent held it.

    It is reentrant, because a signal handler or a finalizer may call the module while its thread holds the lock.
    """
    lock = threading.RLock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as the stdlib does
    return lock


forked_with_obstore = False
"""Whether this process is a forked child of a process that had imported obstore.

obstore would wait for ever in such a child, because its threads exist only in the parent.
"""


@in_forked_children
def _check_for_obstore() -> None:
    global forked_with_obstore
    forked_with_obstore |= "obstore" in sys.modules


def when_dropped(
    owner: object, function: Callable[..., object], *arguments: Any
) -> weakref.finalize[..., Any]:
    """Call a function once when ``owner`` is deleted or when the returned finalizer is called.

    The function is not called at interpreter exit, and not in a forked child.
    """
    finalizer = weakref.finalize(owner, _call_in_process, os.getpid(), function, *arguments)
    finalizer.atexit = False  # threads may still be using the object at exit
    return finalizer


def _call_in_process(process: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == process:
        function(*arguments)


class LockDescriptors:
    """The descriptors of locked files. A forked child closes its copies, and the parent keeps the locks."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # by descriptor: the id of the process that locked it
        in_forked_children(self._close_all)

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, descriptor: int) -> None:
        """Record a descriptor as locked by this process."""
        self._owners[descriptor] = os.getpid()

    def unlock(self, descriptor: int, unlock: Callable[[], object]) -> None:
        """Call ``unlock`` and close the descriptor, if this process has locked it; an OSError is ignored.

        Closing alone would not release the lock while a child that was forked by C code, without Python's fork
        handlers, has the file open.
        """
        if self._owners.get(descriptor) != os.getpid():
            return
        try:
            with contextlib.suppress(OSError):
                unlock()
        finally:
            self.forget(descriptor)
            # close() may fail on a remote file system. That loses nothing, because lock files hold no data.
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def forget(self, descriptor: int) -> None:
        """Record that a descriptor is no longer locked; the caller closes it."""
        self._owners.pop(descriptor, None)

    def _close_all(self) -> None:
        for descriptor in self._owners:
            os.close(descriptor)
        self._owners.clear()


lock_descriptors = LockDescriptors()


class LockedFile:
    """A locked descriptor. :meth:`close` unlocks it, or the deletion of the object if an interrupt ends that early."""

    def __init__(self, descriptor: int, unlock: Callable[[], object]) -> None:
        self.descriptor, self._unlock = descriptor, unlock
        lock_descriptors.add(descriptor)

    def close(self) -> None:
        """Unlock and close the file, once."""
        if self.descriptor >= 0:
            lock_descriptors.unlock(self.descriptor, self._unlock)
            self.descriptor = -1

    __del__ = close


_SIGNALS = sorted(map(int, signal.valid_signals()))


class Interrupts:
    """Deferral of signals during an operation that must not be interrupted midway.

    Any signal handler written in Python may raise an exception, which would interrupt the operation. Handlers of
    SIGTERM often do so, to end a training run cleanly.
    """

    def __init__(self) -> None:
        self._count = 0  # how often SIGINT has arrived in the deferred() block
        self._received: list[int] = []
        self._defers = False  # whether the main thread is in a deferred() block
        self._handlers: dict[int, Any] = {}  # the handlers that _record has replaced

    def was_repeated(self) -> bool:
        """Return whether SIGINT has arrived twice during the block.

        The user then wants to stop now, and the operation should end even its waits for a drive.
        """
        return self._count > 1

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals during the block, then call their handlers.

        In other threads than the main thread this does nothing, because Python runs signal handlers only in the main
        thread.
        """
        if self._defers or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._count = 0
        replaced = []
        # A handler may raise between any two lines here, while some signals already have _record and others do not. So
        # the replacement is inside the try block: the finally block restores the handlers that were replaced by then.
        try:
            self._defers = True
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    # A block that was interrupted before it could restore a signal's handler has left _record there.
                    # The original handler is then still in _handlers.
                    if handler != self._record:
                        self._handlers[number] = handler
                    replaced.append(number)
                    signal.signal(number, self._record)
            yield
        finally:
            self._defers = False
            try:
                for number in replaced:
                    signal.signal(number, self._handlers[number])
            finally:
                received, self._received, self._count = self._received, [], 0
                # The handlers are called even if the block has raised. If a handler raises, too, the exception of the
                # block becomes the __context__ of the handler's exception.
                _call([(self._handlers[each], each) for each in dict.fromkeys(received)])

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not self._defers:  # deferred() was interrupted before it could restore the handler
            self._handlers[number](number, frame)
            return
        self._received.append(number)
        if number == signal.SIGINT:
            self._count += 1


def _call(handlers: list[tuple[Any, int]]) -> None:
    """Call all handlers, even if one of them raises."""
    if handlers:
        handler, number = handlers[0]
        try:
            handler(number, None)
        finally:
            _call(handlers[1:])
