"""A file object for ``torch.save`` whose large pieces go straight from the tensors to the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import tensorferry

# A larger piece is written from where it lies; smaller ones are gathered.
_LARGE_NBYTES = 1 << 20


class FastSaveFile:
    """What ``torch.save`` needs of a file: ``write`` and ``flush``. Close it, or the end is missing.

    Parameters
    ----------
    path : Path
        The file, created if missing.
    handle : aio_handle
        Which writes.
    buffer_nbytes : int
        How much of small pieces is gathered before it is written.
    """

    def __init__(self, path: Path, handle: tensorferry.aio_handle, buffer_nbytes: int) -> None:
        self._path = path
        self._handle = handle
        self._buffer_nbytes = buffer_nbytes
        self._gathered = bytearray()
        self._written_nbytes = 0

    def write(self, data: Any) -> int:
        """Take a piece; torch may reuse its memory afterwards."""
        piece = memoryview(data).cast("B")
        if piece.nbytes >= min(_LARGE_NBYTES, self._buffer_nbytes):
            self.flush()
            self._write(piece)
        else:
            if len(self._gathered) + piece.nbytes > self._buffer_nbytes:
                self.flush()
            self._gathered += piece
        return piece.nbytes

    def flush(self) -> None:
        """Write what was gathered."""
        if self._gathered:
            self._write(memoryview(self._gathered))
            self._gathered = bytearray()

    def close(self) -> None:
        """Write what was gathered; to be called once all pieces are here."""
        self.flush()

    def _write(self, piece: memoryview) -> None:
        self._handle.sync_pwrite(piece, self._path, self._written_nbytes)
        self._written_nbytes += piece.nbytes
