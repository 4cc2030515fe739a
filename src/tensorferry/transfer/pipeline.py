"""Reading ahead: reads begin in the order in which they are wanted, as far ahead as memory and one limit allow.

A product describes its reads (:class:`Read`: which bytes of which file, into which memory) and takes them, usually
oldest first. The pipeline decides when each begins, and is the one place that knows about cancelling, closing, fork and
Ctrl-C.

Two limits hold back a read that is not wanted yet:

memory
    What begun reads hold until they are released, where a product has a budget for it.
read-ahead
    What has been asked of the drives and is not here yet: :func:`read_ahead_nbytes`, the same for all products. More
    would only delay what is wanted first, since a drive serves requests in turn. Two reads may always be on their way,
    so that a drive has something to do when one of them ends.

A signal handler may raise between any two lines. The order of changes is such that a step that is done again has the
same result: a read that was begun twice holds the memory of the second time, and the core keeps that of the first until
it has done with it.
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
    from collections.abc import Iterable, Iterator, Sequence

    from tensorferry.transfer.files import File
    from tensorferry.transfer.futures import Future

_VARIABLE = "TENSORFERRY_READ_AHEAD"
_READ_AHEAD = "64MiB"
# Of buckets: as many requests as may be on their way, whose answers take long.
_FAR_READ_AHEAD = "128MiB"

# Reads on their way, however small they are.
_MAX_FLYING = 128


def read_ahead_nbytes(*, far: bool = False) -> int:
    """Return how many bytes one reader asks of files before they are wanted: 64 MiB by default, 128 of ``far`` ones.

    The environment variable TENSORFERRY_READ_AHEAD sets it, for example to ``"32MiB"``.

    Raises
    ------
    ValueError
        The variable is not a positive number of bytes.
    """
    return checked_nbytes(
        os.environ.get(_VARIABLE) or (_FAR_READ_AHEAD if far else _READ_AHEAD), _VARIABLE
    )


class Read:
    """Something to be read; a subclass says what.

    Attributes
    ----------
    nbytes : int
        What is read of files.
    futures : sequence of Future
        The transfers, once it has begun.
    begun : bool
        Whether it has.
    released : bool
        Whether its memory is the caller's; see :meth:`Pipeline.release`.
    """

    nbytes: int = 0
    futures: Sequence[Future[Any]] = ()
    begun: bool = False
    released: bool = False
    # Of all reads of the pipeline that began before: bytes read, and memory.
    _read_before = 0
    _held_before = 0

    def begin(self) -> None:
        """Allocate memory and submit the transfers, which become :attr:`futures`."""
        raise NotImplementedError

    @property
    def memory_nbytes(self) -> int:
        """The memory that it takes from its beginning on."""
        return self.nbytes

    @property
    def given_nbytes(self) -> int:
        """The part of it that has become the caller's."""
        return 0

    def done(self) -> bool:
        """Return whether all of it has come, or failed."""
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Return when all of it has come; raise the first failure."""
        for future in self.futures:
            future.result()

    def cancel(self, *, wait: bool = False) -> None:
        """Cancel the transfers and discard their outcome. ``wait``: until its memory is free."""
        for future in self.futures:
            future._abandon()
        for future in self.futures if wait else ():
            with contextlib.suppress(Exception):
                future.exception()


_Read = TypeVar("_Read", bound=Read)


class Pipeline(Owned, Generic[_Read]):
    """Reads, some of them on their way; a context manager. Any number of threads may use it.

    Iterating gives reads in their order, each when all of it has come, and releases it when the next one is asked for.

    Parameters
    ----------
    reads : iterable of Read
        What will be wanted, in order; further ones by :meth:`add`. An interrupted generator cannot go on: whoever
        resumes after Ctrl-C gives a list.
    memory_nbytes : int, optional
        The memory of reads that have begun and are not released; a read that is the only one may have more.
    by_itself : bool
        Begin the next reads as soon as others end, instead of when one is asked for.
    far : bool
        The files are in a bucket: see :func:`read_ahead_nbytes`.

    Attributes
    ----------
    lock : RLock
        Held while reads begin. A product may use it for what has to agree with that.
    files : dict of File
        Files that are open for the reads, by keys of the product's; closed with the pipeline.
    ahead_nbytes : int
        The limit of what is on its way.
    nbytes_read : int
        What has been asked of files so far.
    closed : bool
        Whether it is closed: nothing begins any more.
    """

    _refusal = (
        "these reads were begun before fork(): the parent process reads (remedy: begin anew here)"
    )

    def __init__(
        self,
        reads: Iterable[_Read] = (),
        *,
        memory_nbytes: int | None = None,
        by_itself: bool = False,
        far: bool = False,
    ) -> None:
        self._belong_here()
        self._held: deque[_Read] = deque()  # begun and not released, in the order of beginning
        self.lock = threading.RLock()  # a signal handler may use the pipeline, too
        self.files: dict[Any, File] = {}
        self.nbytes_read = 0
        self.closed = False
        self.memory_nbytes = memory_nbytes
        self._by_itself = by_itself
        self.ahead_nbytes = read_ahead_nbytes(far=far)
        self._source = iter(reads)
        self._waiting: deque[_Read] = deque()  # not begun; the front may be, after an interruption
        self._flying: deque[_Read] = deque()  # begun; the front is not known to have ended
        self._read_end = self._held_end = 0  # sums over all that began

    def add(self, read: _Read) -> None:
        """Have a read begin after those before, as soon as there is room."""
        self._waiting.append(read)

    def advance(self) -> bool:
        """Begin what there is room for; return whether nothing waits.

        Raises
        ------
        Exception
            What a read's :meth:`Read.begin` raises; it is still waiting.
        """
        with self.lock:
            while not self.closed:
                if not self._waiting:
                    # One call of C: no signal comes between taking a read and keeping it.
                    self._waiting.extend(itertools.islice(self._source, 1))
                    if not self._waiting:
                        break
                read = self._waiting[0]
                if not read.begun and not read.released:
                    if not self.has_room(read):
                        return False
                    self.begin(read)
                # A signal handler, or a callback of this read's, may have gone on with the next ones.
                with contextlib.suppress(ValueError):
                    self._waiting.remove(read)
        return True

    def begin(self, read: _Read) -> None:
        """Begin a read now, whether there is room or not."""
        read.begin()
        read._read_before, read._held_before = self._read_end, self._held_end
        self._held.append(read)
        self._flying.append(read)
        self._read_end += read.nbytes
        self._held_end += read.memory_nbytes
        self.nbytes_read += read.nbytes
        read.begun = True
        if self._by_itself and not read.done():
            # The future does not keep the pipeline: dropping it ends what it has begun.
            pipeline = weakref.ref(self)
            for future in read.futures:
                future.add_done_callback(lambda _: _advance(pipeline()))

    def has_room(self, read: Read) -> bool:
        """Return whether a read may begin before it is wanted."""
        if not self._held:
            return True
        if self.memory_nbytes is not None:
            first = self._held[0]
            held_nbytes = self._held_end - first._held_before - first.given_nbytes
            if held_nbytes + read.memory_nbytes > self.memory_nbytes:
                return False
        flying = self._flying
        while flying and flying[0].done():
            flying.popleft()
        if len(flying) < 2:
            return True
        return (
            len(flying) < _MAX_FLYING
            and self._read_end - flying[0]._read_before < self.ahead_nbytes
        )

    @property
    def held(self) -> tuple[_Read, ...]:
        """Reads that have begun and are not released."""
        return tuple(self._held)

    @property
    def oldest(self) -> _Read | None:
        """The first read that has begun and is not released."""
        return self._held[0] if self._held else None

    def first(self) -> _Read | None:
        """Begin what there is room for, and return the oldest read; None if there are no more."""
        self.advance()
        return self.oldest

    def release(self, read: _Read) -> None:
        """Take a read's memory for the caller's from now on."""
        read.released = True
        if read.done():
            # A future keeps the memory. Failed ones stay, so that a later wait() raises the failure.
            read.futures = [each for each in read.futures if each._settle() is not None]
        while self._held and self._held[0].released:
            self._held.popleft()

    def __iter__(self) -> Iterator[_Read]:
        for read in iter(self.first, None):
            read.wait()
            yield read
            self.release(read)

    def close(self, *, wait: bool = True) -> None:
        """Cancel what is on its way and close the files; ``wait`` until memory is free. A forked child does nothing."""
        if self.is_parents:
            return
        with self.lock:
            self.closed = True
            self._waiting.clear()
            self._source = iter(())  # the old one may hold all reads, and with them their memory
            # Released reads belong to the caller.
            reads = [read for read in self._held if not read.released]
            for read in reads:
                read.cancel()
            with contextlib.ExitStack() as closing:  # all of it, also where Ctrl-C comes again
                for read in reads if wait else ():
                    closing.callback(read.cancel, wait=True)
                for file in self.files.values():
                    closing.callback(file.close)
            self.files.clear()
            self._held.clear()
            self._flying.clear()

    def __enter__(self) -> Pipeline[_Read]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A finalizer takes no lock and waits for nothing: the core keeps memory and files until it has done.
        if not self.is_parents:
            for read in tuple(self._held):
                if not read.released:
                    read.cancel()


def _advance(pipeline: Pipeline[Any] | None) -> None:
    if pipeline is not None:
        # The next call of first() or advance() raises it again.
        with contextlib.suppress(Exception):
            pipeline.advance()
