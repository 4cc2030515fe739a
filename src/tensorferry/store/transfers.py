"""One tensor's way to the store or from it: one request of the core for each piece, looked at as one.

A write makes a version of its own in space of its own, and becomes the tensor's when it has ended well. A read is of
the version that was the last one begun before it; it begins when that write has ended. Both are what a
:class:`tensorferry.Future` is of: the store has no thread, whoever looks at them takes them further.
"""

from __future__ import annotations

import copy
import os
import time
from array import array as numbers
from errno import ECANCELED
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import StorageError, first_of, memory_moved
from tensorferry.transfer import futures
from tensorferry.transfer.arrays import moved
from tensorferry.transfer.memory import locked_memory
from tensorferry.transfer.requests import submit_one
from tensorferry.transfer.runtime import scheduler_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.store.segments import Piece
    from tensorferry.store.tensor_store import TensorStore
    from tensorferry.store.tensors import TensorInfo
    from tensorferry.transfer.arrays import AnyMemory

# Of what a CRC-32 is taken.
CHUNK_NBYTES = 256 << 10
# A multiple of it: how much is copied at a time.
_COPIED_NBYTES = 8 << 20


class TensorVersion:
    """What a write makes of a tensor: on its way (``write``), kept, or failed (``pieces`` is None)."""

    __slots__ = ("chunk_nbytes", "chunks", "info", "pieces", "previous", "write")

    def __init__(
        self, info: TensorInfo, pieces: tuple[Piece, ...] | None, previous: TensorVersion | None
    ) -> None:
        self.info = info
        self.pieces = pieces
        self.previous = previous  # what counts if this one fails; None when it has ended well
        self.write: Write | None = None  # until it has ended
        self.chunks: list[numbers[int]] | None = None  # CRC-32s, of each piece
        self.chunk_nbytes = CHUNK_NBYTES


class Transfer:
    """The requests of one tensor's pieces."""

    def __init__(self, store: TensorStore, name: str, memory: AnyMemory) -> None:
        self._store = store
        self._name = name
        self._memory: AnyMemory | None = memory
        # Without the pieces: the space of an old version comes back though somebody keeps its ticket.
        self._parts: list[tuple[_core.Request, _core.Checksums | None]] = []
        self._begins_at = ("", 0)
        self._ended = False
        self._error: StorageError | None = None

    def done(self) -> bool:
        """Return whether it has ended, and what is to follow has been done."""
        return self._ended or self._look()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait, and return whether it has ended."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.done():
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._pending_request().wait(left):
                return False
        return True

    def cancel(self) -> None:
        """End it before its time."""
        for request, _ in self._parts:
            request.cancel()

    def exception(self) -> StorageError | None:
        """Return what went wrong; valid once done."""
        self.done()
        return self._error

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Have a queue told when one more of its requests is done."""
        self._pending_request().notify(queue, token)

    def _pending_request(self) -> futures.Request:
        waited_for = (request for request, _ in self._parts if not request.done())
        return next(waited_for, self._parts[-1][0])

    def _look(self) -> bool:
        """Return whether all parts have ended; if so, and for the first time, draw the consequences."""
        if self._store.is_parents:
            return False  # the lock may be that of a thread that is not here
        if not all(request.done() for request, _ in self._parts):
            return False
        with self._store._lock:
            if not self._ended:
                self._end()
                self._ended = True  # last: Ctrl-C may come at any line, and then it is done again
                self._memory = None
        return True

    def _end(self) -> None:
        raise NotImplementedError

    def _begin(
        self,
        version: TensorVersion,
        owner: object,
        *,
        write: bool,
        background: bool,
    ) -> None:
        """Submit every piece, or raise with none on its way.

        The core keeps the owner of the memory, and the pieces, until it has done with them: whatever happens here.
        """
        assert self._memory is not None
        pieces = version.pieces
        assert pieces is not None
        chunks = version.chunks
        if pieces:
            self._begins_at = (pieces[0].segment.file.path, pieces[0].offset)
        try:
            for at, (piece, memory) in enumerate(
                zip(pieces, cut(self._memory, pieces), strict=True)
            ):
                sums = None
                if write and self._store._checksums:
                    sums = _core.Checksums(version.chunk_nbytes, False, [], False)
                elif chunks is not None:
                    # The memory is nobody's before the read has ended well: what arrives there can be compared there.
                    sums = _core.Checksums(version.chunk_nbytes, False, chunks[at], True)
                request = _submit(piece, memory, sums, (owner, pieces), write, background)
                self._parts.append((request, sums))
        except BaseException as error:
            for request, _ in self._parts:
                request.cancel()
            if isinstance(error, Exception):  # not for Ctrl-C: the arrays stay referenced
                for request, _ in self._parts:
                    request.wait(None)
            raise

    def _outcome(self, verb: str) -> StorageError | None:
        """Return what went wrong, of requests that have ended."""
        memory = self._memory
        if memory is None:  # a signal handler has seen the end meanwhile
            return self._error
        failed = [error for request, _ in self._parts if (error := request.exception())]
        # Those that were cancelled after another's fault are no news.
        failed.sort(key=lambda error: error.errno == ECANCELED)
        if failed:
            return told(failed, f"{verb} tensor {self._name!r}")
        if moved(memory) and self._parts:
            error = memory_moved(*self._begins_at, memory[1])
            return told([error], f"{verb} tensor {self._name!r}")
        return None


class Write(Transfer):
    """A new version on its way."""

    def __init__(
        self,
        store: TensorStore,
        name: str,
        memory: AnyMemory,
        version: TensorVersion,
        *,
        background: bool,
        owner: object,
    ) -> None:
        super().__init__(store, name, memory)
        self._version: TensorVersion | None = version
        self._begin(version, owner, write=True, background=background)

    def _end(self) -> None:
        version = self._version
        if version is None:
            return
        self._error = self._outcome("writing")
        if self._error is None:
            if self._store._checksums:
                version.chunks = [
                    numbers("I", sums.chunks or []) for _, sums in self._parts if sums
                ]
            version.previous = None
        else:
            version.pieces = None
            self._store._failed(self._name, version)
        version.write = None
        self._version = None


class Read(Transfer):
    """A version on its way into memory, or waiting for the end of its write."""

    def __init__(
        self,
        store: TensorStore,
        name: str,
        memory: AnyMemory,
        version: TensorVersion,
        info: TensorInfo | None,
        *,
        background: bool,
        owner: object,
    ) -> None:
        super().__init__(store, name, memory)
        self._version: TensorVersion | None = version
        # Of the array that is made for it; None: it is the caller's, and only bytes count.
        self._info = info
        self._background = background
        self._owner = owner  # of the memory, until the core has it
        self._behind: Write | None = None  # what it waits for, or has waited for
        self._begun = False
        self._cancelled = False
        self._follow()

    def done(self) -> bool:
        """Return whether it has ended; begin it if it can begin."""
        return self._ended or (self._advance() and super().done())

    def cancel(self) -> None:
        """End it before its time; what has not begun ends when the write that it waits for has."""
        if self._store.is_parents:
            return  # the lock may be that of a thread that is not here
        with self._store._lock:
            self._cancelled = True
        super().cancel()

    def _pending_request(self) -> futures.Request:
        with self._store._lock:
            if not self._parts and self._behind is not None:
                return self._behind
        return super()._pending_request()

    def _follow(self) -> None:
        """Begin when the write has ended, whether somebody looks or not."""
        if not self._advance():
            assert self._behind is not None
            futures._callback_thread().add(self._behind, self._follow)

    def _advance(self) -> bool:
        """Begin if the write has ended; return whether it has been begun, or never will be."""
        if self._begun or self._ended:
            return True
        if self._store.is_parents:
            return False
        with self._store._lock:
            while not (self._begun or self._ended):
                version = self._version
                assert version is not None
                write = version.write
                if write is not None and not write.done():
                    self._behind = write
                    return False
                if version.pieces is None and version.previous is not None:
                    self._version = version.previous
                    continue
                self._start(version)
        return True

    def _start(self, version: TensorVersion) -> None:
        for request, _ in self._parts:
            request.wait(None)  # of an attempt that Ctrl-C has ended
        self._parts.clear()
        try:
            if self._cancelled:
                raise StorageError(ECANCELED, f"{os.strerror(ECANCELED)} (before it had begun)")
            if version.pieces is None:
                raise StorageError(None, "nothing is stored: the write has failed")
            self._check_fit(version.info)
            self._begin(version, self._owner, write=False, background=self._background)
            self._begun = True
            self._owner = None
        except Exception as error:
            if not isinstance(error, StorageError):  # the store has been closed
                error = StorageError(None, str(error))
            self._error = told([error], f"reading tensor {self._name!r}")
            self._version = self._memory = self._owner = None
            self._ended = True

    def _check_fit(self, info: TensorInfo) -> None:
        assert self._memory is not None
        if self._memory[1] != info.nbytes or (self._info is not None and self._info != info):
            raise StorageError(
                None,
                f"the write that it waited for has failed, and what was stored before is another tensor: {info}",
            )

    def _end(self) -> None:
        self._error = self._outcome("reading")
        self._version = None


class Copier:
    """Copies pieces of at most so many bytes, verified.

    There are two buffers: one is read into while the other is written from.
    """

    def __init__(self, largest_nbytes: int = _COPIED_NBYTES, *, background: bool = False) -> None:
        self._background = background
        nbytes = min(largest_nbytes, _COPIED_NBYTES)
        self._buffers = [memoryview(locked_memory(nbytes)[0]) for _ in range(2)]
        self._writing: list[_core.Request | None] = [None, None]

    def copy(
        self, source: Piece, sums: Sequence[int] | None, chunk_nbytes: int, target: Piece
    ) -> None:
        """Begin to copy; ``finish`` waits for the end of what has been begun."""
        for begin in range(0, source.nbytes, _COPIED_NBYTES):
            buffer = self._buffers[0][: min(_COPIED_NBYTES, source.nbytes - begin)]
            self._wait()
            address, nbytes = _core.buffer_memory(buffer, True) or (0, 0)
            memory = (address, nbytes, buffer, None)
            wanted = None
            if sums is not None:
                first, last = begin // chunk_nbytes, -(-(begin + nbytes) // chunk_nbytes)
                wanted = _core.Checksums(chunk_nbytes, False, sums[first:last], True)
            self._writing[0] = self._submitted(source, memory, wanted, False, begin)
            self._wait()
            self._writing[0] = self._submitted(target, memory, None, True, begin)
            self._buffers.reverse()
            self._writing.reverse()

    def finish(self) -> None:
        """Wait until all that has been begun is written."""
        for _ in range(2):
            self._wait()
            self._writing.reverse()

    def _submitted(
        self, piece: Piece, memory: AnyMemory, sums: Any, write: bool, begin: int
    ) -> _core.Request:
        owner = (
            memory[2],
            piece,
        )  # both are kept until the core has done with them, whatever happens here
        return _submit(piece, memory, sums, owner, write, self._background, begin)

    def _wait(self) -> None:
        if (request := self._writing[0]) is not None:
            request.wait(None)
            if (failure := request.exception()) is not None:
                raise failure
            self._writing[0] = None


def told(errors: Sequence[StorageError], what: str) -> StorageError:
    """Return the first of some failures, whose message begins with what was done to which tensor."""
    error = copy.copy(first_of(errors, "of its pieces"))
    error.strerror = f"{what}: {error.strerror}"
    return error


def cut(memory: AnyMemory, pieces: Sequence[Piece]) -> list[AnyMemory]:
    """Return the memory of each piece. All pieces but the last one are of one size."""
    if len(pieces) <= 1:
        return [memory] * len(pieces)
    given, _, owner, location = memory
    if not isinstance(given, int):
        parts = given.split(0, pieces[0].nbytes, len(pieces))
        return [(part, part.nbytes, None, None) for part in parts]
    found: list[AnyMemory] = []
    for piece in pieces:
        found.append((given, piece.nbytes, owner, location))
        given += piece.nbytes
    return found


def _submit(
    piece: Piece,
    memory: AnyMemory,
    sums: _core.Checksums | None,
    owner: object,
    write: bool,
    background: bool,
    begin: int = 0,
) -> _core.Request:
    file = piece.segment.file
    scheduler = scheduler_of(piece.segment.directory.scheduler, file, write, memory[3])
    scheduler.check_usable()
    request = scheduler.new_request(write, False, False, False, background)
    submit_one(scheduler, request, file, memory, piece.offset + begin, owner, sums)
    return request
