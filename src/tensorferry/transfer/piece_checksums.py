"""CRC-32s of consecutive pieces of a file; the caller chooses the size of each piece.

The core reads ahead, computes the checksums and discards the bytes, so no data is copied to Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.pipeline import Pipeline, Read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tensorferry.transfer.files import File

# One read (a batch) covers consecutive pieces, up to this size in total and up to this number of pieces.
_BATCH_NBYTES, _BATCH_PIECES = 32 << 20, 4096


def piece_crcs(file: File, begin: int, sizes: Iterable[int]) -> Iterator[int | OSError]:
    """Yield one result for each piece from offset ``begin`` on: its CRC-32, or the error if it cannot be read."""
    with Pipeline(_batches(file, begin, sizes)) as pipeline:
        for batch in iter(pipeline.first, None):
            yield from batch.crcs()
            pipeline.release(batch)


def _batches(file: File, begin: int, sizes: Iterable[int]) -> Iterator[_Batch]:
    batch: list[int] = []
    nbytes = 0
    for size in sizes:
        if batch and (nbytes + size > _BATCH_NBYTES or len(batch) == _BATCH_PIECES):
            yield _Batch(file, begin, batch)
            begin, batch, nbytes = begin + nbytes, [], 0
        batch.append(size)
        nbytes += size
    if batch:
        yield _Batch(file, begin, batch)


class _Batch(Read):
    """Pieces that are read together."""

    def __init__(self, file: File, begin: int, sizes: Sequence[int]) -> None:
        self.nbytes = sum(sizes)
        self._file, self._begin, self._sizes = file, begin, sizes
        self._sums = Checksums(segments=True)
        self._failure: OSError | None = None

    def begin(self) -> None:
        # A segment that is an int is a gap of this many bytes: read_into() computes the checksum of the bytes and
        # discards them. It requires at least one segment that is a buffer, which may be empty.
        segments: list[int | bytearray] = [*self._sizes, bytearray()]
        try:
            self.futures = (self._file.read_into(segments, self._begin, checksums=self._sums),)
        except OSError as error:  # the file has been cut short meanwhile
            self._failure = error

    def crcs(self) -> Iterator[int | OSError]:
        """Yield the result of each piece. A batch with a read error is halved until only unreadable pieces fail."""
        try:
            self.wait()
            if self._failure is not None:
                raise self._failure
        except OSError as error:
            if len(self._sizes) == 1:
                yield error
                return
            middle = len(self._sizes) // 2
            first, second = self._sizes[:middle], self._sizes[middle:]
            for begin, sizes in ((self._begin, first), (self._begin + sum(first), second)):
                batch = _Batch(self._file, begin, sizes)
                batch.begin()
                yield from batch.crcs()
        else:
            yield from self._sums.segments[:-1]
