"""A writable file that replaces its target when it is complete: for torch.save(obj, file) and other writers."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from tensorferry.base.checks import Path

# Space is reserved this far ahead: direct writes that extend the file are serialized by file systems.
_RESERVE_NBYTES = 256 << 20


class FileWriter(io.RawIOBase):
    """A new file that replaces ``path`` atomically when it is closed.

    Data are copied into a few aligned buffers and written with direct I/O.

    >>> with FileWriter(path) as file:  # doctest: +SKIP
    ...     torch.save(obj, file)

    Parameters
    ----------
    path : str, bytes or PathLike
        The target; an existing file is unchanged until :meth:`close`. A symbolic link is followed.
    sync : bool
        Whether the file must survive a power cut once :meth:`close` has returned.

    Raises
    ------
    ValueError
        The path exists, and is not a regular file.
    StorageError, OSError
        The file cannot be created.

    Notes
    -----
    An exception that leaves a ``with`` block, or :meth:`abort`, discards the new file. One thread writes the file
    sequentially: there is no seek().
    """

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        self._reserved_nbytes = 0
        self._replacement = Replacement(path, sync=sync)

    @property
    def name(self) -> str:
        """The final path of the file."""
        return self._replacement.target

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._replacement.file.nbytes

    def write(self, data: Any) -> int:
        """Write a buffer, which may change after the call.

        Raises
        ------
        ValueError
            The file is closed.
        StorageError
            This or an earlier write failed; the file can only be discarded.
        """
        if self.closed:
            raise ValueError(f"the writer of {self.name!r} is closed")
        file = self._replacement.file
        with self._replacement.naming_target():
            self._reserve(file.nbytes + memoryview(data).nbytes)
            return file.write_copied(data)

    def flush(self) -> None:
        """Do nothing: writes run in the background, and :meth:`close` waits for them."""

    def close(self) -> None:
        """Finish the file, and put it in place. A second call does nothing.

        Raises
        ------
        StorageError, OSError
            The data could not be written, made durable, or put in place. The old file is unchanged, unless only the new
            file's name could not be made durable.
        """
        if not self.closed:
            self.finish().commit()

    def finish(self) -> Replacement:
        """Close, and return the complete file for the caller to commit; its data are on the drive.

        Raises
        ------
        StorageError, OSError
            The data could not be written or made durable: the file has been discarded.
        """
        super().close()
        try:
            self._replacement.finish()
        except BaseException:
            self._replacement.abort()
            raise
        return self._replacement

    def abort(self) -> None:
        """Discard the new file, and close; an existing file is unchanged."""
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
                f"{self.name!r} was never closed, and is discarded", ResourceWarning, 2, self
            )
            self.abort()

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved_nbytes:
            return
        file = self._replacement.file
        try:
            file.reserve(nbytes + _RESERVE_NBYTES)
            self._reserved_nbytes = nbytes + _RESERVE_NBYTES
        except OSError:  # not enough space to reserve ahead
            file.reserve(nbytes)
            self._reserved_nbytes = nbytes
