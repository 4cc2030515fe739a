"""The transfers of a store: reads and writes of tensors.

A tensor is stored in pieces, which are ranges of the store's files. A read or a write of a tensor, a transfer, consists
of one request of the core for each piece.

A write creates a separate version in newly allocated space, which becomes the tensor's current version once the write
has succeeded. A read gets the last version that was begun before the read, and starts once that version has been
written. :class:`Read` and :class:`Write` implement the request that a :class:`tensorferry.Future` wraps. The store has
no thread that completes transfers: each call that checks or waits for a transfer also performs the steps that follow
the transfer's end.
"""

from __future__ import annotations

import copy
import os
import time
from array import array as numbers
from dataclasses import dataclass
from errno import ECANCELED
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import StorageError, first_error, memory_moved
from tensorferry.transfer import futures
from tensorferry.transfer.arrays import has_moved
from tensorferry.transfer.memory import locked_memory
from tensorferry.transfer.requests import submit_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.store.segments import Piece
    from tensorferry.store.tensor_store import TensorStore
    from tensorferry.store.tensors import TensorInfo
    from tensorferry.transfer.arrays import AnyMemory

# The size of the chunks, each of which has a CRC-32.
CHUNK_NBYTES = 256 << 10
# The size of one copy operation, a multiple of the chunk size.
_BLOCK_NBYTES = 8 << 20


@dataclass(eq=False, slots=True)
class TensorVersion:
    """One version of a tensor. It is being written (``write`` is set), is complete, or has failed (no ``pieces``)."""

    info: TensorInfo
    pieces: tuple[Piece, ...] | None
    previous: TensorVersion | None  # the version that counts if this one fails; None after success
    chunks: list[numbers[int]] | None = None  # for each piece, the CRC-32s of its chunks
    chunk_nbytes: int = CHUNK_NBYTES
    write: Write | None = None  # None once the write has ended


class Transfer:
    """The transfer of one tensor, which consists of the requests for its pieces."""

    def __init__(self, store: TensorStore, name: str, memory: AnyMemory) -> None:
        self._store = store
        self._name = name
        self._memory: AnyMemory | None = memory
        # This list does not reference the pieces. So the space of an old version is freed even if the caller keeps the
        # future of its write.
        self._parts: list[tuple[_core.Request, _core.Checksums | None]] = []
        self._first_location = ("", 0)  # the path and offset of the first piece, for errors
        self._ended = False
        self._error: StorageError | None = None

    def done(self) -> bool:
        """Return whether the transfer has ended. The first call after the end also updates the store."""
        return self._ended or self._check_ended()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the transfer, and return whether it has ended."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.done():
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._pending_request().wait(left):
                return False
        return True

    def cancel(self) -> None:
        """Cancel all requests."""
        for request, _ in self._parts:
            request.cancel()

    def exception(self) -> StorageError | None:
        """Return the error, or None. The result is valid once the transfer is done."""
        self.done()
        return self._error

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Post ``token`` to a queue when the next request of this transfer is done."""
        self._pending_request().notify(queue, token)

    def _pending_request(self) -> futures.Request:
        pending = (request for request, _ in self._parts if not request.done())
        return next(pending, self._parts[-1][0])

    def _check_ended(self) -> bool:
        """Return whether all requests have ended. If so, update the store once."""
        if self._store.is_parents:
            return False  # in a forked child, the lock may be held by a thread that exists only in the parent
        if not all(request.done() for request, _ in self._parts):
            return False
        with self._store._lock:
            if not self._ended:
                self._end()
                # This is set last: if Ctrl-C interrupts _end(), which is idempotent, the next call repeats it.
                self._ended = True
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
        """Submit the requests for all pieces. If one fails, cancel the others, wait for them, and raise.

        In all cases, the core keeps the owner of the memory and the pieces alive until the requests have ended.
        """
        assert self._memory is not None
        pieces = version.pieces
        assert pieces is not None
        chunks = version.chunks
        if pieces:
            self._first_location = (pieces[0].segment.file.path, pieces[0].offset)
        try:
            for at, (piece, memory) in enumerate(
                zip(pieces, split_memory(self._memory, pieces), strict=True)
            ):
                sums = None
                if write and self._store._checksums:
                    sums = _core.Checksums(version.chunk_nbytes, False, [], False)
                elif chunks is not None:
                    # The caller may not use the memory before the read succeeds, so the data can be verified in place,
                    # after it has been written to this memory.
                    sums = _core.Checksums(version.chunk_nbytes, False, chunks[at], True)
                request = _submit(piece, memory, sums, (owner, pieces), write, background)
                self._parts.append((request, sums))
        except BaseException as error:
            for request, _ in self._parts:
                request.cancel()
            # KeyboardInterrupt must not wait. The core keeps the arrays alive.
            if isinstance(error, Exception):
                for request, _ in self._parts:
                    request.wait(None)
            raise

    def _outcome(self, verb: str) -> StorageError | None:
        """Return the error of requests that have all ended, or None."""
        memory = self._memory
        if memory is None:  # a signal handler completed this transfer during the call
            return self._error
        failed = [error for request, _ in self._parts if (error := request.exception())]
        # The first of these errors is reported, so an error is sorted before the cancellations that it has caused.
        failed.sort(key=lambda error: error.errno == ECANCELED)
        if failed:
            return with_context(failed, f"{verb} tensor {self._name!r}")
        if has_moved(memory) and self._parts:
            error = memory_moved(*self._first_location, memory[1])
            return with_context([error], f"{verb} tensor {self._name!r}")
        return None


class Write(Transfer):
    """The write of a new version."""

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
            self._store._revert_to_previous(self._name, version)
        version.write = None
        self._version = None


class Read(Transfer):
    """The read of a version, which waits for the end of the version's write if necessary."""

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
        # The description of the array that the store allocated. None for the caller's own array, where only the number
        # of bytes must match.
        self._info = info
        self._background = background
        self._owner = owner  # keeps the memory alive until the core does
        self._blocking_write: Write | None = (
            None  # the write that this read waits, or has waited, for
        )
        self._begun = False
        self._cancelled = False
        self._begin_after_write()

    def done(self) -> bool:
        """Return whether the read has ended. Begin the read if the write that it waits for has ended."""
        return self._ended or (self._advance() and super().done())

    def cancel(self) -> None:
        """Cancel the read. If it has not begun, it ends once the write that it waits for has ended."""
        if self._store.is_parents:
            return  # the lock may be held by a thread that exists only in the parent
        with self._store._lock:
            self._cancelled = True
        super().cancel()

    def _pending_request(self) -> futures.Request:
        with self._store._lock:
            if not self._parts and self._blocking_write is not None:
                return self._blocking_write
        return super()._pending_request()

    def _begin_after_write(self) -> None:
        """Begin the read, or register a callback that begins it at the end of the write without a call by the user."""
        if not self._advance():
            assert self._blocking_write is not None
            futures._callback_thread().add(self._blocking_write, self._begin_after_write)

    def _advance(self) -> bool:
        """Begin the read if the write has ended. Return whether it has begun, or has failed without beginning."""
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
                    self._blocking_write = write
                    return False
                if version.pieces is None and version.previous is not None:
                    self._version = version.previous
                    continue
                self._start(version)
        return True

    def _start(self, version: TensorVersion) -> None:
        for request, _ in self._parts:
            request.wait(None)  # requests of an earlier attempt that Ctrl-C interrupted
        self._parts.clear()
        try:
            if self._cancelled:
                raise StorageError(ECANCELED, f"{os.strerror(ECANCELED)} (before it had begun)")
            if version.pieces is None:
                raise StorageError(None, "no data is stored: the write has failed")
            self._check_fit(version.info)
            self._begin(version, self._owner, write=False, background=self._background)
            self._begun = True
            self._owner = None
        except Exception as error:
            if not isinstance(error, StorageError):  # for example, ValueError from a closed store
                error = StorageError(None, str(error))
            self._error = with_context([error], f"reading tensor {self._name!r}")
            self._version = self._memory = self._owner = None
            self._ended = True

    def _check_fit(self, info: TensorInfo) -> None:
        assert self._memory is not None
        if self._memory[1] != info.nbytes or (self._info is not None and self._info != info):
            raise StorageError(
                None,
                f"the write that this read waited for has failed, and the tensor stored before does not match the "
                f"array to read into: it is {info}",
            )

    def _end(self) -> None:
        self._error = self._outcome("reading")
        self._version = None


class Copier:
    """A copier of pieces, which verifies their checksums.

    It has two buffers: a block is read into one of them while the other is being written. ``largest_nbytes``, the size
    of the largest piece, limits the size of the buffers.
    """

    def __init__(self, largest_nbytes: int = _BLOCK_NBYTES, *, background: bool = False) -> None:
        self._background = background
        nbytes = min(largest_nbytes, _BLOCK_NBYTES)
        self._buffers = [memoryview(locked_memory(nbytes)[0]) for _ in range(2)]
        self._writing: list[_core.Request | None] = [None, None]

    def copy(
        self, source: Piece, sums: Sequence[int] | None, chunk_nbytes: int, target: Piece
    ) -> None:
        """Copy a piece. The last writes may still be in progress on return; :meth:`finish` waits for them."""
        for begin in range(0, source.nbytes, _BLOCK_NBYTES):
            buffer = self._buffers[0][: min(_BLOCK_NBYTES, source.nbytes - begin)]
            self._wait()
            address, nbytes = _core.buffer_memory(buffer, True) or (0, 0)
            memory = (address, nbytes, buffer, None)
            expected = None
            if sums is not None:
                first, last = begin // chunk_nbytes, -(-(begin + nbytes) // chunk_nbytes)
                expected = _core.Checksums(chunk_nbytes, False, sums[first:last], True)
            self._writing[0] = self._submit_block(source, memory, expected, False, begin)
            self._wait()
            self._writing[0] = self._submit_block(target, memory, None, True, begin)
            self._buffers.reverse()
            self._writing.reverse()

    def finish(self) -> None:
        """Wait until all copies have been written."""
        for _ in range(2):
            self._wait()
            self._writing.reverse()

    def _submit_block(
        self, piece: Piece, memory: AnyMemory, sums: Any, write: bool, begin: int
    ) -> _core.Request:
        owner = (memory[2], piece)  # the core keeps both alive until the request has ended
        return _submit(piece, memory, sums, owner, write, self._background, begin)

    def _wait(self) -> None:
        if (request := self._writing[0]) is not None:
            request.wait(None)
            if (failure := request.exception()) is not None:
                raise failure
            self._writing[0] = None


def with_context(errors: Sequence[StorageError], operation: str) -> StorageError:
    """Return the first of several errors, with the operation and the tensor's name before its message."""
    error = copy.copy(first_error(errors, "of its pieces"))
    error.strerror = f"{operation}: {error.strerror}"
    return error


def split_memory(memory: AnyMemory, pieces: Sequence[Piece]) -> list[AnyMemory]:
    """Return the memory of each piece. All pieces except the last one must have the same size."""
    if len(pieces) <= 1:
        return [memory] * len(pieces)
    address, _, owner, location = memory
    if not isinstance(address, int):  # segments of several arrays
        parts = address.split(0, pieces[0].nbytes, len(pieces))
        return [(part, part.nbytes, None, None) for part in parts]
    found: list[AnyMemory] = []
    for piece in pieces:
        found.append((address, piece.nbytes, owner, location))
        address += piece.nbytes
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
    scheduler = piece.segment.directory.scheduler
    scheduler.check_usable()
    request = scheduler.new_request(write, False, False, False, background)
    submit_one(scheduler, request, file, memory, piece.offset + begin, owner, sums)
    return request
