"""Reads and writes of tensors.

A write creates a separate version of its tensor in a piece of its own, which becomes the current version once the write
has succeeded. A read gets the last version that was begun before the read, and starts once that version has been
written. The store has no thread that completes transfers: each call that uses a version first performs the steps that
follow the end of its write.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import time
from array import array as numbers
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import ChecksumError, StorageError, memory_moved
from tensorferry.transfer import futures
from tensorferry.transfer.arrays import has_moved
from tensorferry.transfer.publication import OWN_FILES, storage_errors
from tensorferry.transfer.requests import submit_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.store.commits import KeptTensor
    from tensorferry.store.segments import Piece, Segment
    from tensorferry.store.tensor_store import TensorStore
    from tensorferry.store.tensors import TensorInfo
    from tensorferry.transfer.arrays import AnyMemory

# The size of the chunks, each of which has a CRC-32.
CHUNK_NBYTES = 256 << 10
_WINDOW_NBYTES = 4 << 20  # copies read so much at once, at least one chunk


class Outcome:
    """Whether the caller of a write has retrieved its error."""

    retrieved = False


class StoreFuture(futures.Future[Any]):
    """The future of a read or a write, which names the tensor in errors and records that they were retrieved."""

    __slots__ = ("outcome",)

    def __init__(self, array: Any, keep: object) -> None:
        super().__init__(array, keep)
        self.outcome = Outcome()

    def exception(self, timeout: float | None = None) -> StorageError | None:  # noqa: D102
        error: StorageError | None = super().exception(timeout)
        return error and self._named(error)

    def result(self, timeout: float | None = None) -> Any:  # noqa: D102
        return self._retrieved(super().result, timeout)

    def __next__(self) -> Any:
        return self._retrieved(super().__next__)

    def send(self, value: None) -> Any:  # noqa: D102
        return self._retrieved(super().send, value)

    def _retrieved(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except StorageError as error:
            raise self._named(error) from None

    def _named(self, error: StorageError) -> StorageError:
        self.outcome.retrieved = True
        verb, name, *_ = self._about or ("using", "")
        return with_context(error, f"{verb} tensor {name!r}")


class TensorVersion:
    """One version of a tensor. It is being written (``write`` is set), is complete, or has failed (no ``piece``)."""

    __slots__ = ("chunks", "future", "info", "piece", "previous", "sums", "write")

    def __init__(
        self, info: TensorInfo, piece: Piece | None, chunks: numbers[int] | None = None
    ) -> None:
        self.info, self.piece = info, piece
        self.chunks = chunks  # the CRC-32s of its chunks
        self.previous: TensorVersion | None = None  # the version that counts if this one fails
        # The request, the future and the checksums of the write, until it has ended.
        self.write: _core.Request | None = None
        self.future: StoreFuture | None = None
        self.sums: _core.Checksums | None = None

    def last_kept(self) -> TensorVersion | None:
        """Return the newest version with a successful write, starting from this one and going back."""
        version: TensorVersion | None = self
        while version is not None and (version.write is not None or version.piece is None):
            version = version.previous
        return version

    def settle(self) -> StorageError | None:
        """Update this version after the end of its write. Return the error. If interrupted, this can be repeated."""
        error = None if self.future is None else self.future._settle()
        if error is not None:
            self.piece = None
        elif self.piece is not None:
            if self.sums is not None:
                self.chunks = numbers("I", self.sums.chunks or ())
            self.piece.segment.written += 1
            self.previous = None
        return error


def submit(
    file: _core.File,
    piece: Piece,
    memory: AnyMemory,
    owner: object,
    sums: _core.Checksums | None,
    attempts: list[_core.Request],
    **how: bool,
) -> _core.Request:
    """Begin to move a tensor. The core keeps the owner of the memory, and the piece, until the request has ended.

    The request is added to ``attempts`` first, so the caller knows it if this is interrupted.
    """
    directory, write = piece.segment.directory, how["write"]
    scheduler = directory.scheduler
    scheduler.check_usable()
    is_own = piece.segment.file is None  # opened for this request
    request = scheduler.new_request(write, False, False, is_own, how["background"])
    try:
        attempts.append(request)
        submit_one(scheduler, request, file, memory, piece.offset, (owner, piece), sums)
    except BaseException:
        request.cancel()
        request.seal()
        raise
    return request


class Read:
    """The request of a read, which begins once the write of its version has ended.

    Parameters
    ----------
    owner : object
        What keeps the memory alive.
    info : TensorInfo, optional
        The description of the array, if the store has allocated it.
    """

    def __init__(
        self,
        store: TensorStore,
        version: TensorVersion,
        memory: AnyMemory,
        owner: object,
        info: TensorInfo | None,
        *,
        background: bool,
    ) -> None:
        self._store, self._memory, self._owner, self._info = store, memory, owner, info
        self._version: TensorVersion | None = version
        self._background = background
        self._pending: _core.Request | None = version.write  # what it waits for
        self._attempts: list[_core.Request] = []
        self._location = ("", 0)  # the path and the offset, for errors
        self._begun = self._cancelled = False
        self._error: StorageError | None = None

    def done(self) -> bool:
        """Return whether the read has ended. Begin it if the write has ended."""
        if not (self._begun or self._error or self._store.is_parents):
            self._advance()
        return bool(self._error or (self._begun and self._pending and self._pending.done()))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the read, and return whether it has ended."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self.done():
            assert self._pending is not None
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._pending.wait(left):
                return False
        return True

    def cancel(self) -> None:
        """Cancel the read. If it has not begun, it ends once the write that it waits for has ended."""
        self._cancelled = True
        if self._begun and self._pending is not None:
            self._pending.cancel()

    def exception(self) -> StorageError | None:
        """Return the error, or None. The result is valid once the read is done."""
        return self._error or (self._pending.exception() if self._pending else None)

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Post ``token`` to a queue when the read may have ended."""
        assert self._pending is not None
        self._pending.notify(queue, token)

    def check_memory(self) -> StorageError | None:
        """Return an error if the array's memory was released meanwhile."""
        return moved(self._memory, *self._location)

    def begin_after_write(self) -> None:
        """Begin the read now, or when the write ends, without a call by the user."""
        if not self.done() and not self._begun:
            futures._callback_thread().add(self, self.begin_after_write)

    def _advance(self) -> None:
        """Begin the read, or end it with an error, unless the write is still in progress."""
        try:
            while (version := self._version) is not None:
                if (write := version.write) is not None and not write.done():
                    self._pending = write
                    return
                self._store._settle(version)
                if (piece := version.piece) is not None:
                    self._begin(version, piece)
                elif (previous := version.previous) is not None:
                    self._version = previous
                    continue
                else:
                    raise StorageError(None, "no data is stored: the write has failed")
                return
        except Exception as error:  # for example, ValueError from a closed store
            if not isinstance(error, StorageError):
                error = StorageError(None, str(error))
            self._error, self._owner = error, None

    def _begin(self, version: TensorVersion, piece: Piece) -> None:
        if self._cancelled:
            raise StorageError(
                errno.ECANCELED, f"{os.strerror(errno.ECANCELED)} (before it had begun)"
            )
        if self._memory[1] != version.info.nbytes or self._info not in (None, version.info):
            raise StorageError(
                None,
                "the write that this read waited for has failed, and the tensor stored before does not match the array "
                f"to read into: it is {version.info}",
            )
        file = piece.segment.open()  # without the lock, because this may be slow
        with self._store._lock:
            if not self._begun and self._error is None:
                for each in self._attempts:  # that Ctrl-C has interrupted
                    each.wait(None)
                sums = None
                if version.chunks is not None:
                    # The caller may not use the memory before the read succeeds, so the data can be verified there.
                    sums = _core.Checksums(self._store._chunk_nbytes, False, version.chunks, True)
                what = (self._memory, self._owner, sums, self._attempts)
                self._pending = submit(file, piece, *what, write=False, background=self._background)
                self._location = file.path, piece.offset
                self._begun = True
                self._owner = self._version = None


def copy_pieces(items: Sequence[tuple[str, KeptTensor, Piece]], chunk_nbytes: int) -> None:
    """Copy tensors of one segment, through the page cache, and compare their checksums.

    Each item is (name, tensor, new piece). They are sorted by their offsets, and many small ones are read at once.

    Raises
    ------
    StorageError
        A tensor cannot be read or written, or does not match its checksums, or may be damaged and has none.
    """
    source, window, begin = items[0][1].piece.segment, memoryview(b""), 0
    file = source.open()
    writing: dict[Segment, int] = {}
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(_buffered(file, os.O_RDONLY))
        for name, (info, piece, chunks), target in items:
            with named(f"copying tensor {name!r}"):
                if chunks is None:
                    source.check_synced()
                if (segment := target.segment) not in writing:
                    descriptor = _buffered(segment.open(), os.O_WRONLY)
                    writing[segment] = stack.enter_context(descriptor)
                for at in range(0, info.nbytes, chunk_nbytes):
                    offset, size = piece.offset + at, min(chunk_nbytes, info.nbytes - at)
                    if offset < begin or offset + size > begin + len(window):
                        window = memoryview(os.pread(reading, _WINDOW_NBYTES, offset))
                        begin = offset
                    data = window[offset - begin :][:size]
                    if chunks is not None and _core.crc32(data) != chunks[at // chunk_nbytes]:
                        error = ChecksumError(None, "Checksum mismatch", file.path, offset=offset)
                        error.nbytes = size
                        raise error
                    if os.pwrite(writing[segment], data, target.offset + at) != size:
                        raise OSError(errno.EIO, "A part of the tensor could not be copied")
            segment.written += 1


@contextlib.contextmanager
def _buffered(file: _core.File, flags: int) -> Iterator[int]:
    """Open a file again, without O_DIRECT, and yield the descriptor."""
    with storage_errors(file.path, "copying a tensor"):
        descriptor = os.open(f"{OWN_FILES}/{file.descriptor}", flags | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def moved(memory: AnyMemory, path: str, offset: int) -> StorageError | None:
    """Return an error if the array's memory was released before its transfer ended, else None."""
    return memory_moved(path, offset, memory[1]) if has_moved(memory) else None


@contextlib.contextmanager
def named(operation: str) -> Iterator[None]:
    """Put the operation and the tensor's name before the message of a StorageError."""
    try:
        yield
    except StorageError as error:
        raise with_context(error, operation) from None


def with_context(error: StorageError, operation: str) -> StorageError:
    """Return a copy of an error, with the operation and the tensor's name before its message."""
    error = copy.copy(error)
    error.strerror = f"{operation}: {error.strerror}"
    return error
