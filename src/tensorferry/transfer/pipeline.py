"""Read-ahead: start reads in the order in which they will be needed, within a memory limit and a read-ahead limit.

A package of tensorferry that reads many things in order, such as ``safetensors``, describes its reads (:class:`Read`:
which bytes of which file go into which memory) and takes them, usually oldest first. The pipeline decides when each
read starts. It also handles cancelling, closing, fork() and KeyboardInterrupt in one place. The caller is the program
that uses the package.

Two limits apply to reads that start before they are needed:

memory
    The memory of reads that have started and are not released, if the package sets a limit. The package releases a read
    (:meth:`Pipeline.release`) when it gives the memory to the caller.
read-ahead
    The bytes requested from the drives that have not arrived: :func:`read_ahead_nbytes`, the same for all packages. A
    deeper queue would delay the read that is needed first, because a drive serves requests in turn. Two reads may
    always be in flight, which keeps the drive busy when one of them ends.

A signal handler may raise an exception between any two lines. Therefore each step is idempotent: repeating it has the
same result. A read that was started twice holds the memory of the second start, and the core keeps the memory of the
first until its transfers have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensorferry.base.checks import checked_nbytes
from tensorferry.base.processes import Owned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tensorferry.transfer.files import File
    from tensorferry.transfer.futures import Future

_VARIABLE = "TENSORFERRY_READ_AHEAD"
_READ_AHEAD = "64MiB"
# For buckets: the bytes of 16 concurrent requests of 8 MiB (transfer/remote.py), because their latency is high.
_FAR_READ_AHEAD = "128MiB"

# The maximum number of reads in flight, however small they are.
_MAX_IN_FLIGHT = 128


def read_ahead_nbytes(*, far: bool = False) -> int:
    """Return the read-ahead limit of one reader in bytes.

    The default is 64 MiB, and 128 MiB for files in a bucket (``far``). The environment variable TENSORFERRY_READ_AHEAD
    sets it, for example to ``"32MiB"``.

    Raises
    ------
    ValueError
        The variable is not a positive number of bytes.
    """
    return checked_nbytes(
        os.environ.get(_VARIABLE) or (_FAR_READ_AHEAD if far else _READ_AHEAD), _VARIABLE
    )


class Read:
    """One read of a pipeline; a subclass defines what is read.

    Attributes
    ----------
    nbytes : int
        The number of bytes that are read from files.
    futures : sequence of Future
        The transfers, once the read has started.
    begun : bool
        Whether the read has started.
    released : bool
        Whether its memory belongs to the caller; see :meth:`Pipeline.release`.
    """

    nbytes: int = 0
    futures: Sequence[Future[Any]] = ()
    begun: bool = False
    released: bool = False
    # The bytes of all reads of the pipeline that started before this one, and the memory of the same reads.
    _read_before = 0
    _held_before = 0

    def begin(self) -> None:
        """Allocate the memory, submit the transfers and store them in :attr:`futures`."""
        raise NotImplementedError

    @property
    def memory_nbytes(self) -> int:
        """The memory in bytes that the read holds once it has started."""
        return self.nbytes

    @property
    def released_nbytes(self) -> int:
        """The part of :attr:`memory_nbytes` that already belongs to the caller and no longer counts."""
        return 0

    def done(self) -> bool:
        """Return whether all transfers have ended, with or without success."""
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Wait for all transfers; raise the first error."""
        for future in self.futures:
            future.result()

    def cancel(self, *, wait: bool = False) -> None:
        """Cancel the transfers and discard their outcome; with ``wait``, return when the memory is no longer in use."""
        for future in self.futures:
            future._abandon()
        for future in self.futures if wait else ():
            with contextlib.suppress(Exception):
                future.exception()


_Read = TypeVar("_Read", bound=Read)


class Pipeline(Owned, Generic[_Read]):
    """A queue of reads, the first of which are in flight. A context manager; any number of threads may use it.

    Iteration yields the reads in their order, each when its bytes have arrived, and releases a read when the next one
    is requested.

    Parameters
    ----------
    reads : iterable of Read
        The reads in the order in which they will be needed; :meth:`add` appends further ones. A generator cannot be
        resumed after an exception, so pass a list if the iteration must continue after KeyboardInterrupt.
    memory_nbytes : int, optional
        The limit for the memory of reads that have started and are not released. A single read may exceed it.
    automatic : bool
        Start further reads as soon as earlier ones end, not only when a read is requested.
    far : bool
        The files are in a bucket: see :func:`read_ahead_nbytes`.

    Attributes
    ----------
    lock : RLock
        Held while reads start. A package may hold it to change its own state consistently with the pipeline's.
    files : dict of File
        The open files of the reads, by keys that the package chooses. The pipeline closes them.
    ahead_nbytes : int
        The read-ahead limit.
    nbytes_read : int
        The number of bytes requested from files so far.
    closed : bool
        Whether the pipeline is closed; a closed pipeline starts no reads.
    """

    _refusal = (
        "these reads were started before fork() and belong to the parent process (remedy: start new "
        "ones in the child)"
    )

    def __init__(
        self,
        reads: Iterable[_Read] = (),
        *,
        memory_nbytes: int | None = None,
        automatic: bool = False,
        far: bool = False,
    ) -> None:
        self._set_owner()
        self._held: deque[_Read] = deque()  # started and not released, in the order of their start
        # Reentrant, because a signal handler may use the pipeline, too.
        self.lock = threading.RLock()
        self.files: dict[Any, File] = {}
        self.nbytes_read = 0
        self.closed = False
        self.memory_nbytes = memory_nbytes
        self._by_itself = automatic
        self.ahead_nbytes = read_ahead_nbytes(far=far)
        self._source = iter(reads)
        # Reads that have not started. Only after an interruption of advance() the first one may have started.
        self._waiting: deque[_Read] = deque()
        # Reads that have started. Those that have ended are removed when they are at the front.
        self._in_flight: deque[_Read] = deque()
        # The bytes of all reads that have started so far, and the memory of the same reads. Both only grow; the
        # difference from a read's _read_before or _held_before counts that read and those after it.
        self._read_end = self._held_end = 0

    def add(self, read: _Read) -> None:
        """Append a read, which starts after those before it as soon as the limits allow."""
        self._waiting.append(read)

    def advance(self) -> bool:
        """Start the reads that the limits allow; return whether no read is waiting.

        Raises
        ------
        Exception
            The exception of a read's :meth:`Read.begin`; that read is still waiting.
        """
        with self.lock:
            while not self.closed:
                if not self._waiting:
                    # One call of a C function: no signal handler runs between taking a read from the source and
                    # storing it, so no read is lost.
                    self._waiting.extend(itertools.islice(self._source, 1))
                    if not self._waiting:
                        break
                read = self._waiting[0]
                if not read.begun and not read.released:
                    if not self.may_start(read):
                        return False
                    self.begin(read)
                # A signal handler or a callback of this read may have called advance() and removed it already.
                with contextlib.suppress(ValueError):
                    self._waiting.remove(read)
        return True

    def begin(self, read: _Read) -> None:
        """Start a read now, regardless of the limits."""
        read.begin()
        read._read_before, read._held_before = self._read_end, self._held_end
        self._held.append(read)
        self._in_flight.append(read)
        self._read_end += read.nbytes
        self._held_end += read.memory_nbytes
        self.nbytes_read += read.nbytes
        read.begun = True
        if self._by_itself and not read.done():
            # The callback holds a weak reference: deleting the pipeline must cancel its reads, so their futures must
            # not keep it alive.
            pipeline = weakref.ref(self)
            for future in read.futures:
                future.add_done_callback(lambda _: _advance(pipeline()))

    def may_start(self, read: Read) -> bool:
        """Return whether the limits allow a read to start before it is needed."""
        first = self.oldest
        if first is None:
            return True
        if self.memory_nbytes is not None:
            held_nbytes = self._held_end - first._held_before - first.released_nbytes
            if held_nbytes + read.memory_nbytes > self.memory_nbytes:
                return False
        _drop_from_front(self._in_flight, lambda read: read.done())
        in_flight = list(self._in_flight)  # a signal handler may drop more of them
        if len(in_flight) < 2:
            return True
        return (
            len(in_flight) < _MAX_IN_FLIGHT
            and self._read_end - in_flight[0]._read_before < self.ahead_nbytes
        )

    @property
    def held(self) -> tuple[_Read, ...]:
        """The reads that have started and are not released."""
        return tuple(self._held)

    @property
    def oldest(self) -> _Read | None:
        """The first read that has started and is not released."""
        try:
            return self._held[0]
        except IndexError:
            return None

    def first(self) -> _Read | None:
        """Start the reads that the limits allow, and return the oldest read; None if there are no more."""
        self.advance()
        return self.oldest

    def release(self, read: _Read) -> None:
        """Stop counting a read's memory, which now belongs to the caller."""
        read.released = True
        if read.done():
            # Drop the futures that succeeded, because each keeps its memory. Failed ones are kept, because a later
            # wait() must raise their error.
            read.futures = [each for each in read.futures if each._settle() is not None]
        _drop_from_front(self._held, lambda read: read.released)

    def __iter__(self) -> Iterator[_Read]:
        for read in iter(self.first, None):
            read.wait()
            yield read
            self.release(read)

    def close(self, *, wait: bool = True) -> None:
        """Cancel the reads in flight and close the files; with ``wait``, return when no memory is in use.

        In a forked child this method does nothing.
        """
        if self.is_parents:
            return
        with self.lock:
            self.closed = True
            self._waiting.clear()
            # The old iterator may hold all reads, and with them their memory.
            self._source = iter(())
            # Released reads belong to the caller and are not cancelled.
            reads = [read for read in self._held if not read.released]
            for read in reads:
                read.cancel()
            # The stack makes all of these calls even if a KeyboardInterrupt ends one of them.
            with contextlib.ExitStack() as closing:
                for read in reads if wait else ():
                    closing.callback(read.cancel, wait=True)
                for file in self.files.values():
                    closing.callback(file.close)
            self.files.clear()
            self._held.clear()
            self._in_flight.clear()

    def __enter__(self) -> Pipeline[_Read]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A finalizer may run on any thread at any time, so it must not take a lock or wait. The core keeps memory and
        # files until the transfers have ended.
        if not self.is_parents:
            for read in tuple(self._held):
                if not read.released:
                    read.cancel()


def _drop_from_front(reads: deque[_Read], is_over: Callable[[_Read], bool]) -> None:
    """Remove the first read as long as ``is_over`` is true for it."""
    # Another thread or a signal handler may do the same at any moment. Therefore the read that was checked is removed,
    # and not whichever is the first by then.
    with contextlib.suppress(IndexError):
        while is_over(first := reads[0]):
            with contextlib.suppress(ValueError):
                reads.remove(first)


def _advance(pipeline: Pipeline[Any] | None) -> None:
    if pipeline is not None:
        # The exception is dropped here; the next call of first() or advance() on the caller's thread raises it again.
        with contextlib.suppress(Exception):
            pipeline.advance()
