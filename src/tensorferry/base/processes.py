"""Which process owns an object after fork(), what a finalizer may do, and signals that must wait.

A forked child shares the files and locks of its parent, and has none of its threads: what the parent was doing ends
there. So a child refuses to use the parent's objects (:class:`Owned`), closes descriptors of locks without unlocking
them (:data:`lock_descriptors`), makes locks of threads anew (:func:`in_forked_children`), and runs no finalizers
(:func:`when_dropped`).
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
    """Base of what belongs to the process that made it; the constructor calls :meth:`_belong_here`."""

    # Libraries put objects into classes of their own, which must have the same layout.
    __slots__ = ()
    _generation: int

    _refusal: ClassVar[str] = "this object was made before fork(): it is the parent process's"
    """What a forked child is told that uses it."""

    def _belong_here(self) -> None:
        """Belong to this process from now on."""
        self._generation = _core.fork_generation()  # type: ignore[misc]  # in subclasses

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child: it may close what it has inherited, no more."""
        return self._generation != _core.fork_generation()

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child, which cannot have the object's locks either."""
        if self.is_parents:
            raise RuntimeError(self._refusal)


def in_forked_children(function: Callable[[], object]) -> Callable[[], object]:
    """Decorate a function that makes anew, in a forked child, what another thread may have held at fork()."""
    os.register_at_fork(after_in_child=function)
    return function


forked_with_obstore = False
"""Whether this is a forked child whose parent had obstore, which would wait for ever for that process's threads."""


@in_forked_children
def _note_obstore() -> None:
    global forked_with_obstore
    forked_with_obstore |= "obstore" in sys.modules


def when_dropped(
    owner: object, function: Callable[..., object], *arguments: Any
) -> weakref.finalize[..., Any]:
    """Call a function when an object goes, or the result is called: once, not at the interpreter's end, in no child."""
    finalizer = weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)
    finalizer.atexit = False  # threads may still be at it
    return finalizer


def _in_process(process: int, function: Callable[..., object], *arguments: Any) -> None:
    if os.getpid() == process:
        function(*arguments)


class LockDescriptors:
    """Descriptors of files with locks: a forked child closes its own, and the parent's keep the locks."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # which process has each
        in_forked_children(self._close_all)

    def __contains__(self, descriptor: object) -> bool:
        return descriptor in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, descriptor: int) -> None:
        """Take a descriptor."""
        self._held[descriptor] = os.getpid()

    def unlock(self, descriptor: int, unlock: Callable[[], object]) -> None:
        """Unlock a file and close it, if it is still held, and this process's; failures are passed over.

        Closing is not enough while a child that was forked without Python's knowledge has the file open.
        """
        if self._held.get(descriptor) != os.getpid():
            return
        with contextlib.suppress(OSError):
            unlock()
        self._held.pop(descriptor, None)
        # Remote file systems may refuse it, and what was written here is in other files.
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def _close_all(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


lock_descriptors = LockDescriptors()


_SIGNALS = sorted(map(int, signal.valid_signals()))


class Interrupts:
    """Holds signals back while something is done that must not be left half done.

    Every handler that is written in Python may raise: that of SIGTERM often does, so that a training can end well.
    """

    def __init__(self) -> None:
        self._count = 0
        self._came: list[int] = []
        self._defers = False  # in the main thread

    def insisted(self) -> bool:
        """Return whether Ctrl-C has come twice: then a wait for a drive should be given up."""
        return self._count > 1

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold them back; afterwards call their handlers. Other threads are never interrupted anyway."""
        self._count = 0
        if self._defers or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._defers = True
        handlers: dict[int, Any] = {}
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:  # not those that are held back already
                handlers[number] = handler
        for number in handlers:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            self._defers = False
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
