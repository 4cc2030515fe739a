"""A new file that a stream (module ``streams``) writes sequentially.

Each array written is a segment. A field is a place in the bytes written that later gets a checksum of segments.
"""

from __future__ import annotations

import contextlib
import io
import sys
from array import array as packed_array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import absolute_path
from tensorferry.base.processes import Owned
from tensorferry.transfer.files import File, remove_created

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.streams import Field, Stream

# write_copied() copies a smaller buffer into a bytes object itself. For a larger one it waits until the stream has
# copied the buffer.
_SMALL_NBYTES = 64 << 10


@dataclass(frozen=True)
class FileSummary:
    """The size and checksums of a file that has been written.

    Attributes
    ----------
    nbytes : int
        The file's size.
    chunk_crcs : bytes
        The CRC-32 of each chunk as little-endian 32-bit numbers; empty if they were not requested.
    """

    nbytes: int
    chunk_crcs: bytes


class NewFile(Owned):
    """A file that one thread writes from beginning to end, through a stream. Each array written is a segment.

    Parameters
    ----------
    file : str or tensorferry.File
        A path that does not exist, or an empty open file. The file is closed at the end.
    reserve_nbytes : int
        Space to reserve immediately, which detects a full drive before anything is written. The file's final size is
        the number of bytes written, which may be more or less.
    checksums : Checksums, optional
        The checksums to compute. Fields (:meth:`write_bytes`) require the checksums of segments.

    Raises
    ------
    StorageError
        The file cannot be created, or there is not enough space.

    Notes
    -----
    After any failure call :meth:`abort`.
    """

    _refusal = (
        "this file was started before fork(), and only the parent process may write it (remedy: start a new file in "
        "the child)"
    )

    def __init__(
        self,
        file: str | File,
        *,
        reserve_nbytes: int = 0,
        checksums: Checksums | None = None,
    ) -> None:
        # An absolute path, so that abort() removes the same file after a change of the working directory.
        self._created_path = absolute_path(file) if isinstance(file, str) else None
        self._file = File(file, "x") if isinstance(file, str) else file
        self._identity = self._file._open_file().identity
        self._checksums = checksums
        self._set_owner()
        self._stream: Stream | None = None
        try:
            self._stream = self._file.stream(nbytes_reserved=reserve_nbytes, checksums=checksums)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> str:
        """The path that was opened."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """The number of bytes written so far."""
        return self._open().nbytes

    @property
    def segment_count(self) -> int:
        """The segment number of the next array, for :class:`tensorferry.transfer.streams.Field`."""
        return self._open().segment_count

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a file of ``nbytes`` bytes."""
        self._file.preallocate(nbytes)

    def write(self, array: Any, *, kept: bool = False) -> None:
        """Write an array. The caller must not change it before :meth:`wait_until_copied` returns.

        With ``kept`` the caller keeps the array in memory anyway, and this method does not wait for copies.
        """
        self._open().append(array, kept=kept)

    def write_bytes(self, data: bytes, fields: Sequence[Field] = ()) -> None:
        """Write a few bytes. ``fields`` are the places in them that get checksums of earlier segments."""
        self._open().append_with_fields(data, fields)

    def write_copied(self, data: Any) -> int:
        """Write a buffer that the caller may change afterwards, and return its size in bytes."""
        view = memoryview(data)
        if view.nbytes < _SMALL_NBYTES:
            self.write_bytes(bytes(view))
        else:
            self.write(view)
            self.wait_until_copied()
        return view.nbytes

    def wait_until_copied(self) -> None:
        """Return when the stream has copied all arrays written so far; the caller may then change them."""
        self._open().wait_until_copied()

    def finish(self, sync: bool = True) -> FileSummary:
        """Write the remaining bytes, and close the file; with ``sync`` its data is then durable.

        The file's name is not yet durable. That needs an fsync of the directory, which the caller can do once for many
        files.
        """
        self.begin_finish(sync)
        return self.wait()

    def begin_finish(self, sync: bool = True) -> None:
        """Start to finish the file, as :meth:`finish` does, without waiting; then call :meth:`wait`."""
        self._open().begin_finish(truncate=True, sync=sync, sync_names=False)

    def wait(self) -> FileSummary:
        """Wait for the completion of :meth:`begin_finish`, and close the file."""
        nbytes = self._open().wait()
        self._file.close()
        crcs = packed_array("I", self._checksums.chunks if self._checksums is not None else ())
        if sys.byteorder == "big":
            crcs.byteswap()
        return FileSummary(nbytes, crcs.tobytes())

    def abort(self) -> None:
        """Close the file once no write is in flight, and remove it if this object created it.

        In a forked child this method does nothing, because the file belongs to the parent.
        """
        if self.is_parents:
            return
        # Closes and removes the file even after a KeyboardInterrupt.
        with contextlib.ExitStack() as cleanup:
            if self._created_path is not None:
                cleanup.callback(remove_created, self._created_path, self._identity)
            cleanup.callback(self._file.close)
            if self._stream is not None:
                self._stream.abort()

    def _open(self) -> Stream:
        self._check_process()
        assert self._stream is not None
        return self._stream


class RawNewFile(io.RawIOBase):
    """A new file as a raw Python stream, for torch.save and other functions that write to a file object."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._file.nbytes

    def write(self, data: Any) -> int:
        """Write a buffer, which the caller may change afterwards."""
        return self._file.write_copied(data)
