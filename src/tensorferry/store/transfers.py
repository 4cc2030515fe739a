"""Reads and writes of tensors.

A write stores its tensor in a new piece, which replaces the old one once the write has succeeded. A read waits for the
write before it. The store has no thread that completes transfers: each call that uses a tensor first performs the steps
that follow the end of its write.
"""

from __future__ import annotations

import contextlib
import copy
import errno
from array import array as numbers
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.errors import ChecksumError, StorageError, memory_moved
from tensorferry.store.tensors import CHUNK_NBYTES, TensorInfo
from tensorferry.transfer import futures
from tensorferry.transfer.arrays import has_moved
from tensorferry.transfer.publication import OWN_FILES, storage_errors
from tensorferry.transfer.requests import submit_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

    from tensorferry.store.segments import Piece, Segment
    from tensorferry.transfer.arrays import AnyMemory

_WINDOW_NBYTES = 4 << 20  # copies read so much at once, at least one chunk


class KeptTensor(NamedTuple):
    """A stored tensor: its description, its piece, and the CRC-32s of its chunks or None."""

    info: TensorInfo
    piece: Piece
    chunks: numbers[int] | None


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


class Write(NamedTuple):
    """A write in progress."""

    info: TensorInfo
    request: _core.Request
    future: StoreFuture
    piece: Piece
    sums: _core.Checksums | None

    def kept(self) -> KeptTensor:
        """Return the tensor that the write has stored."""
        chunks = None if self.sums is None else numbers("I", self.sums.chunks or ())
        return KeptTensor(self.info, self.piece, chunks)


def submit(
    file: _core.File,
    piece: Piece,
    memory: AnyMemory,
    owner: object,
    sums: _core.Checksums | None,
    *,
    write: bool,
) -> _core.Request:
    """Begin to move a tensor. The core keeps the owner of the memory, and the piece, until the request has ended."""
    scheduler = piece.segment.directory.scheduler
    scheduler.check_usable()
    is_own = piece.segment.file is None  # opened for this request
    request = scheduler.new_request(write, False, False, is_own, False)
    try:
        submit_one(scheduler, request, file, memory, piece.offset, (owner, piece), sums)
    except BaseException:
        request.cancel()
        request.seal()
        raise
    return request


def copy_pieces(items: Sequence[tuple[str, KeptTensor, Piece]]) -> None:
    """Copy tensors of one segment, through the page cache, and compare their checksums.

    Each item is (name, tensor, new piece). They are sorted by their offsets, and many small ones are read at once.

    Raises
    ------
    StorageError
        A tensor cannot be read or written, or does not match its checksums, or may be damaged and has none.
    """
    source = items[0][1].piece.segment
    file = source.open()
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(_buffered(file, "rb"))
        writing: dict[Segment, IO[bytes]] = {}
        for name, (info, piece, chunks), target in items:
            with named(f"copying tensor {name!r}"), storage_errors(file.path):
                if chunks is None:
                    source.check_synced()
                if (segment := target.segment) not in writing:
                    writing[segment] = stack.enter_context(_buffered(segment.open(), "r+b"))
                reading.seek(piece.offset)
                writing[segment].seek(target.offset)
                for at in range(0, info.nbytes, CHUNK_NBYTES):
                    data = reading.read(size := min(CHUNK_NBYTES, info.nbytes - at))
                    if chunks is not None and _core.crc32(data) != chunks[at // CHUNK_NBYTES]:
                        error = ChecksumError(None, "Checksum mismatch", file.path)
                        error.offset, error.nbytes = piece.offset + at, size
                        raise error
                    if writing[segment].write(data) != size:
                        raise OSError(errno.EIO, "A part of the tensor could not be copied")
            segment.written += 1


@contextlib.contextmanager
def _buffered(file: _core.File, mode: str) -> Iterator[IO[bytes]]:
    """Open a file again for the block, without O_DIRECT."""
    with (
        storage_errors(file.path, "copying a tensor"),
        open(f"{OWN_FILES}/{file.descriptor}", mode, _WINDOW_NBYTES) as opened,
    ):
        yield opened


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
