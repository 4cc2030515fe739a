"""A file written in order, past the page cache, with checksums: pieces of any size become aligned buffers.

Whatever is written goes into the next place of a 4 MiB buffer. Full buffers are copied into, checksummed and written
while later pieces arrive; each byte is copied once, and its checksums are taken while it is in the processor's cache.
The last buffer is padded to the alignment that O_DIRECT needs, and the file cut to its length afterwards.

What depends on the checksum of a payload before it (:meth:`Stream.write_deferred`) gets its place at once, and is
made when its buffer's turn comes.
"""

from __future__ import annotations

import ctypes
import io
import sys
from array import array as packed_array
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.arrays import Memory, memory_of
from tensorferry.checkpoint.checksums import CHUNK_NBYTES, chunk_count, crc32, crc32_combine
from tensorferry.checkpoint.pipeline import BUFFER_NBYTES, Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.checkpoint.pipeline import Buffer

_PAGE_NBYTES = 4096
# Copied twice rather than waited for.
_SMALL_NBYTES = 64 << 10
# Of what was given, so much is referenced at most: a planner's temporaries could be many more than there are buffers.
_MAX_UNCOPIED_PARTS = 3


@dataclass
class _Piece:
    """Bytes that go into one buffer: from memory, or from a function that returns them."""

    begin: int  # in the buffer
    nbytes: int
    source: int | Callable[[], bytes]  # an address
    owner: object = None
    part: _Part | None = None  # for pieces whose CRC-32 is wanted
    crc: int | None = None


class Checksum:
    """The CRC-32 of a payload, once that has been copied."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def value(self) -> int:
        """Wait for the payload to be copied, and return its CRC-32."""
        total = 0
        for piece in self._pieces:
            if piece.crc is None:
                assert piece.part is not None
                piece.part.copied.result()
                assert piece.crc is not None
            total = crc32_combine(total, piece.crc, piece.nbytes)
        return total


@dataclass(frozen=True)
class FileSummary:
    """A file that has been written.

    Attributes
    ----------
    nbytes : int
        Its size.
    chunk_crcs : bytes
        The CRC-32 of each chunk of CHUNK_NBYTES, as little-endian 32-bit numbers.
    """

    nbytes: int
    chunk_crcs: bytes


class _Part:
    """A buffer's stay in a stream: which bytes of the file it gets, and from where."""

    def __init__(self, buffer: Buffer, offset: int) -> None:
        self.buffer = buffer
        self.filled = buffer.filled
        self.copied: Future[None] = Future()
        self.offset = offset  # in the file
        self.used = 0
        self.pieces: list[_Piece] = []  # not yet copied
        self.crcs: list[int] = []  # of the chunks begun so far

    def fill(self) -> None:
        """Copy what is still to be copied, and let go of where it came from."""
        for piece in self.pieces:
            self._copy(piece)
        self.pieces.clear()

    def _copy(self, piece: _Piece) -> None:
        source, made = piece.source, None
        if not isinstance(source, int):
            made = memory_of(source(), writable=False, host=True)
            source = made[0]
        view, base = self.buffer.view, self.buffer.address
        begin, end = piece.begin, piece.begin + piece.nbytes
        total = 0
        while begin < end:
            chunk, within = divmod(begin, CHUNK_NBYTES)
            nbytes = min(end - begin, CHUNK_NBYTES - within)
            # Both let others have the GIL.
            ctypes.memmove(base + begin, source + begin - piece.begin, nbytes)
            crc = crc32(view[begin : begin + nbytes])
            if piece.part is not None:
                total = crc32_combine(total, crc, nbytes)
            if within == 0:
                self.crcs.append(crc)
            else:
                self.crcs[chunk] = crc32_combine(self.crcs[chunk], crc, nbytes)
            begin += nbytes
        if piece.part is not None:
            piece.crc = total
        piece.owner = made = None


class Stream:
    """A new file that is written from its beginning to its end.

    Parameters
    ----------
    file : str or tensorferry.File
        A path at which there is nothing, or an empty open file, which is closed at the end.
    pipeline : Pipeline
        Its threads and buffers.
    reserve_nbytes : int
        Space to reserve at once, so that a full disk is found before anything is written. The file gets as long as
        what is written, more or less.

    Raises
    ------
    StorageError
        The file cannot be made, or there is no space for it.

    Notes
    -----
    One thread writes. What is given must not change until :meth:`finish` or :meth:`wait_until_copied` returns; it is
    referenced until it has been copied, no longer. After any failure call :meth:`abort`.
    """

    def __init__(
        self, file: str | tensorferry.File, pipeline: Pipeline, *, reserve_nbytes: int = 0
    ) -> None:
        self.nbytes = 0  # written so far
        self._pipeline = pipeline
        self._part: _Part | None = None
        self._parts: list[_Part] = []
        self._copied = 0  # of the parts: those known to have been copied
        self._ending: Future[FileSummary] | None = None
        self._made = isinstance(file, str)
        self._file = tensorferry.open(file, "x") if isinstance(file, str) else file
        try:
            self.reserve(reserve_nbytes)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> str:
        """The path that the file was opened by."""
        return self._file.path

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a file of ``nbytes`` bytes."""
        self._pipeline.check_process()
        self._file.preallocate(_aligned(nbytes))

    def write(self, array: Any) -> None:
        """Write an array in host memory: any that tensorferry.write() takes."""
        self.write_memory(memory_of(array, writable=False, host=True))

    def write_copied(self, data: Any) -> int:
        """Write a buffer that may change afterwards, and return how many bytes it has."""
        view = memoryview(data)
        if view.nbytes < _SMALL_NBYTES:
            self.write(bytes(view))
        else:
            self.write(view)
            self.wait_until_copied()
        return view.nbytes

    def write_memory(self, memory: Memory, *, checksummed: bool = False) -> Checksum:
        """Write host memory.

        Returns
        -------
        Checksum
            Of these bytes; only if ``checksummed``.
        """
        self._pipeline.check_process()
        address, nbytes, owner, location = memory
        assert location is None
        checksum = Checksum()
        done = 0
        while done < nbytes:
            part = self._open_part()
            piece = _Piece(
                part.used, min(nbytes - done, BUFFER_NBYTES - part.used), address + done, owner
            )
            if checksummed:
                piece.part = part
                checksum._pieces.append(piece)
            self._place(part, piece)
            done += piece.nbytes
        return checksum

    def write_deferred(self, nbytes: int, function: Callable[[], bytes]) -> None:
        """Write ``nbytes`` bytes that ``function`` returns later, in a thread; it may ask for checksums from before."""
        self._pipeline.check_process()
        cache: list[bytes] = []

        def part_of(begin: int, end: int) -> bytes:
            data = cache[0] if cache else function()
            cache[:] = [data]
            if len(data) != nbytes:
                raise ValueError(f"{len(data)} bytes instead of {nbytes}")
            return data[begin:end]

        done = 0
        while done < nbytes:
            part = self._open_part()
            count = min(nbytes - done, BUFFER_NBYTES - part.used)
            begin, end = done, done + count
            self._place(
                part,
                _Piece(part.used, count, lambda b=begin, e=end: part_of(b, e)),  # type: ignore[misc]
            )
            done = end

    def copy_begun(self) -> None:
        """Copy what waits for the present buffer to become full: it is let go of when the buffers before are copied."""
        if self._part is not None:
            self._part.fill()

    def wait_until_copied(self) -> None:
        """Return when nothing that was given is needed any more."""
        self._pipeline.check_process()
        self.copy_begun()
        while self._copied < len(self._parts):
            self._parts[self._copied].copied.result()
            self._copied += 1

    def finish(self, sync: bool = True) -> FileSummary:
        """Write what is left, and close the file; with ``sync``, its data would survive a power cut.

        The file's name would not yet: that takes an fsync of the directory, which may serve many files.
        """
        result: FileSummary = self.finish_later(sync).result()
        return result

    def finish_later(self, sync: bool = True) -> Future[FileSummary]:
        """Do as :meth:`finish` does, without waiting for it."""
        self._pipeline.check_process()
        if self._part is not None:
            self._submit(self._part)
        self._ending = self._pipeline.submit(lambda: self._end(sync))
        return self._ending

    def abort(self) -> None:
        """Close the file, when nothing is being written to it any more; remove it if it was made here.

        A forked child leaves it to its parent.
        """
        if self._pipeline.is_parents:
            return
        if self._part is not None:
            self._part.filled.set_result(None)
            self._part = None
        for part in self._parts:
            if part.filled.exception() is None and (written := part.filled.result()) is not None:
                written.exception()  # it has been asked for; what is reported is the first failure
        if self._ending is not None:
            self._ending.exception()
        self._file.close()
        if self._made:
            Path(self.path).unlink(missing_ok=True)

    def _open_part(self) -> _Part:
        if self._part is None:
            if len(self._parts) >= _MAX_UNCOPIED_PARTS:
                self._parts[-_MAX_UNCOPIED_PARTS].copied.result()
            self._part = _Part(self._pipeline.take_buffer(), self.nbytes)
        return self._part

    def _place(self, part: _Part, piece: _Piece) -> None:
        part.pieces.append(piece)
        part.used += piece.nbytes
        self.nbytes += piece.nbytes
        if part.used == BUFFER_NBYTES:
            self._submit(part)

    def _submit(self, part: _Part) -> None:
        self._part = None
        self._parts.append(part)

        def write() -> tensorferry.Future:
            part.copied.result()
            nbytes = _aligned(part.used)
            ctypes.memset(part.buffer.address + part.used, 0, nbytes - part.used)
            part.buffer.wait_for_turn()
            return self._file.write_from(part.buffer.view[:nbytes], part.offset)

        self._pipeline.submit(part.fill, part.copied)
        self._pipeline.submit_write(write, part.filled)

    def _end(self, sync: bool) -> FileSummary:
        crcs = packed_array("I")
        for part in self._parts:
            written = part.filled.result()
            if written is not None:
                written.result()
            crcs.extend(part.crcs)
        self._file.truncate(self.nbytes)
        if sync:
            self._file.sync()
        self._file.close()
        assert len(crcs) == chunk_count(self.nbytes)
        if sys.byteorder == "big":
            crcs.byteswap()
        return FileSummary(self.nbytes, crcs.tobytes())


class StreamFile(io.RawIOBase):
    """A stream as a file that can be written to, for torch.save and others."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._stream.nbytes

    def write(self, data: Any) -> int:
        """Write a buffer; it may change afterwards."""
        return self._stream.write_copied(data)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
