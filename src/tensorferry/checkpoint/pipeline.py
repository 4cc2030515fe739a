"""Threads and buffers between memory and files: what streams of one save share.

A stream fills one buffer after the other. The buffer's copies and checksums are a job for the threads, which end it by
handing the buffer to the core. Buffers come round in the order in which they were handed out, so that taking the next
one waits for the oldest to be written, and memory is bounded whatever the amount of data.

Jobs begin in the order of submission and may wait for earlier ones only, so that they cannot wait in a circle.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tensorferry import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    import tensorferry

BUFFER_NBYTES = 4 << 20
# While it writes, a planner's temporary tensors need memory as well.
WRITING_BUFFER_COUNT = 10
READING_BUFFER_COUNT = 12
# All but so many buffers are with the drive at once. It works on all of these and finishes them together: were they all
# there are, it would idle until the next ones are filled.
_SPARE_BUFFER_COUNT = 3
MAX_THREADS = 4

_Result = TypeVar("_Result")


class Buffer:
    """Page-aligned memory on huge pages. It is not locked: the core needs that no more than the limit allows it."""

    def __init__(self, nbytes: int) -> None:
        self._memory, _ = _core.allocate(nbytes, False)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.hand_out(None)

    def hand_out(self, predecessor: Buffer | None) -> None:
        """Begin a new use, which has the drive when that of the predecessor is done with it."""
        # Done when the buffer's bytes are where they belong, or on their way: its result is the write, if there is one.
        self.filled: Future[tensorferry.Future | None] = Future()
        self._predecessor = None if predecessor is None else predecessor.filled

    def wait_for_turn(self) -> None:
        """Wait before writing until few enough of the buffers handed out earlier are being written."""
        before = self._predecessor
        if before is not None and before.exception() is None and (write := before.result()):
            write.exception()  # for those who wait for its result


# Those of the last save or load: memory that is fresh from the system costs more than what is copied into it.
_kept: list[Buffer] = []
_kept_lock = threading.Lock()


def _new_buffer() -> Buffer:
    with _kept_lock:
        if _kept:
            return _kept.pop()
    return Buffer(BUFFER_NBYTES)


def _keep(buffers: Iterable[Buffer]) -> None:
    with _kept_lock:
        _kept.extend(buffers)
        del _kept[READING_BUFFER_COUNT:]


def _forget_after_fork() -> None:
    global _kept_lock
    _kept_lock = threading.Lock()  # a thread of the parent may have held it
    _kept.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class Pipeline:
    """A few threads and buffers; a context manager that waits for all jobs at its end.

    Parameters
    ----------
    buffer_count : int
        How many buffers of BUFFER_NBYTES it has at most.
    """

    def __init__(self, buffer_count: int = WRITING_BUFFER_COUNT) -> None:
        self.in_flight_count = buffer_count - _SPARE_BUFFER_COUNT
        self._buffer_count = buffer_count
        self._buffers: deque[Buffer] = deque()
        self._copying = _Crew(min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._writing = _Crew(1)
        self._generation = _core.fork_generation()

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child, which has neither the threads nor a right to what they write."""
        return self._generation != _core.fork_generation()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if self.is_parents:
            raise RuntimeError(
                "this was begun before fork(): the parent process writes it, and a child must begin its own"
            )

    def take_buffer(self) -> Buffer:
        """Return a buffer for the next part of a stream; whoever takes it completes its ``filled``.

        Raises
        ------
        StorageError
            What the oldest buffer held could not be written.
        """
        self.check_process()
        if len(self._buffers) < self._buffer_count:
            buffer = _new_buffer()
        else:
            buffer = self._buffers.popleft()
            written = buffer.filled.result()
            if written is not None:
                written.result()
        late = len(self._buffers) - self.in_flight_count
        buffer.hand_out(self._buffers[late] if late >= 0 else None)
        self._buffers.append(buffer)
        return buffer

    def submit(self, action: Callable[[], _Result], done: Future[Any] | None = None) -> Future[Any]:
        """Have a thread call ``action``; the future (``done``, if given) gets its result or exception."""
        self.check_process()
        return self._copying.submit(action, done)

    def submit_write(self, action: Callable[[], tensorferry.Future], done: Future[Any]) -> None:
        """Have another thread call what waits for a buffer's turn and begins to write it; in the order of calls."""
        self._writing.submit(action, done)

    def wait_until_copied(self) -> None:
        """Wait until all that was submitted for buffers has been copied into them."""
        for buffer in self._buffers:
            buffer.filled.result()

    def close(self) -> None:
        """End the threads when all jobs are done."""
        if self.is_parents:
            return
        self._copying.close()
        self._writing.close()
        _keep(self._buffers)
        self._buffers.clear()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Crew:
    """Threads that do jobs in the order in which they come, begun as they are needed."""

    def __init__(self, max_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._max_threads = max_threads

    def submit(self, action: Callable[[], _Result], done: Future[Any] | None = None) -> Future[Any]:
        """Have a thread call ``action``; the future (``done``, if given) gets its result or exception."""
        done = Future() if done is None else done

        def job() -> None:
            _run(action, done)

        if len(self._threads) < self._max_threads:
            self._start_thread()
        if self._threads:
            self._jobs.put(job)
        else:
            job()
        return done

    def close(self) -> None:
        """End the threads when all jobs are done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._max_threads = 0

    def _start_thread(self) -> None:
        # No pool of concurrent.futures: that takes no jobs once the main thread has ended, when an asynchronous save
        # may still be on its way. No thread can be started then either; jobs are done by who submits them.
        thread = threading.Thread(target=self._work, name="tensorferry-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._max_threads = len(self._threads)
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _run(action: Callable[[], _Result], done: Future[Any]) -> None:
    try:
        result = action()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)
