"""A file to write to that takes its place when it is whole: for torch.save(obj, file) and others."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from tensorferry.base.checks import Path

# Space is reserved so far ahead: a file that grows with each write takes direct writes one at a time only.
_RESERVE_NBYTES = 256 << 20


class FileWriter(io.RawIOBase):
    """A new file that replaces ``path`` when it is closed: at the drive's speed, whole or not at all.

    Pieces are copied into a few aligned buffers and written past the page cache.

    >>> with FileWriter(path) as file:  # doctest: +SKIP
    ...     torch.save(obj, file)

    Parameters
    ----------
    path : str, bytes or PathLike
        What is there stays as it is until :meth:`close`; a symbolic link is followed.
    sync : bool
        Whether the file would survive a power cut once :meth:`close` has returned.

    Raises
    ------
    ValueError
        What is at the path is no regular file.
    StorageError, OSError
        The file cannot be made.

    Notes
    -----
    Leaving a ``with`` block by an exception, or :meth:`abort`, gives the new file up. It is written from beginning to
    end, by one thread: there is no seek().
    """

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self._reserved_nbytes = 0
        self._replacement = Replacement(path, sync=sync)

    @property
    def name(self) -> str:
        """The path that the file will have."""
        return self._replacement.target

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._replacement.file.nbytes

    def write(self, data: Any) -> int:
        """Write a buffer; it may change afterwards.

        Raises
        ------
        ValueError
            The file is closed.
        StorageError
            This or an earlier piece could not be written; the file can only be given up.
        """
        if self.closed:
            raise ValueError(f"the writer of {self.name!r} is closed")
        file = self._replacement.file
        with self._replacement.named():
            self._reserve(file.nbytes + memoryview(data).nbytes)
            return file.write_copied(data)

    def flush(self) -> None:
        """Do nothing: what has been written is on its way, and has arrived when :meth:`close` returns."""

    def close(self) -> None:
        """Finish the file, and let it take its place. Nothing happens if it is closed already.

        Raises
        ------
        StorageError, OSError
            Not everything could be written, made durable, or put in place. What was there has stayed, unless it is
            only the new file's name that could not be made durable.
        """
        if not self.closed:
            self.finish().commit()

    def finish(self) -> Replacement:
        """Close, and return the file, all of whose data is on the drive: it has yet to take its place.

        Raises
        ------
        StorageError, OSError
            Not everything could be written or made durable: the file is given up.
        """
        super().close()
        try:
            self._replacement.finish()
        except BaseException:
            self._replacement.abort()
            raise
        return self._replacement

    def abort(self) -> None:
        """Give the file up, and close: what was there stays."""
        if not self.closed:
            super().close()
            self._replacement.abort()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_replacement") and not self.closed and not self._replacement.is_parents:
            warnings.warn(
                f"{self.name!r} was never closed, and is given up", ResourceWarning, 2, self
            )
            self.abort()

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved_nbytes:
            return
        file = self._replacement.file
        try:
            file.reserve(nbytes + _RESERVE_NBYTES)
            self._reserved_nbytes = nbytes + _RESERVE_NBYTES
        except OSError:  # there is no space for so much, or may not be
            file.reserve(nbytes)
            self._reserved_nbytes = nbytes
