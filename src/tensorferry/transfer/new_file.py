"""A new file, written in order by a stream."""

from __future__ import annotations

import contextlib
import io
import sys
from array import array as packed_array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.processes import Owned
from tensorferry.transfer.files import File

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.streams import Field, Stream

# Copied twice rather than waited for.
_SMALL_NBYTES = 64 << 10


@dataclass(frozen=True)
class FileSummary:
    """A file that has been written.

    Attributes
    ----------
    nbytes : int
        Its size.
    chunk_crcs : bytes
        The CRC-32 of each chunk, as little-endian 32-bit numbers; empty where they were not asked for.
    """

    nbytes: int
    chunk_crcs: bytes


class NewFile(Owned):
    """A file that is written from its beginning to its end, by one thread.

    Parameters
    ----------
    file : str or tensorferry.File
        A path at which there is nothing, or an empty open file; it is closed at the end.
    reserve_nbytes : int
        Space to reserve at once, so that a full disk is found before anything is written. The file gets as long as
        what is written, more or less.
    checksums : Checksums, optional
        Which to take; those of segments are needed for fields.

    Raises
    ------
    StorageError
        The file cannot be made, or there is no space for it.

    Notes
    -----
    After any failure call :meth:`abort`.
    """

    _refusal = (
        "this was begun before fork(): the parent process writes it, and a child must begin its own"
    )

    def __init__(
        self,
        file: str | File,
        *,
        reserve_nbytes: int = 0,
        checksums: Checksums | None = None,
    ) -> None:
        self._made = isinstance(file, str)
        self._file = File(file, "x") if isinstance(file, str) else file
        self._checksums = checksums
        self._belong_here()
        self._stream: Stream | None = None
        try:
            self._stream = self._file.stream(nbytes_reserved=reserve_nbytes, checksums=checksums)
        except BaseException:
            self.abort()
            raise

    @property
    def path(self) -> str:
        """The path that the file was opened by."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """How many bytes have been written so far."""
        return self._open().nbytes

    @property
    def segment_count(self) -> int:
        """The number that the next array gets; :class:`tensorferry.transfer.streams.Field` asks for it."""
        return self._open().segment_count

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a file of ``nbytes`` bytes."""
        self._file.preallocate(nbytes)

    def write(self, array: Any, *, kept: bool = False) -> None:
        """Write an array; it must not change before :meth:`wait_until_copied` returns.

        ``kept`` says that it stays in memory anyway: then this does not wait for copies.
        """
        self._open().append(array, kept=kept)

    def write_bytes(self, data: bytes, fields: Sequence[Field] = ()) -> None:
        """Write a few bytes, with checksums of what is before them."""
        self._open().append_made(data, fields)

    def write_copied(self, data: Any) -> int:
        """Write a buffer that may change afterwards, and return how many bytes it has."""
        view = memoryview(data)
        if view.nbytes < _SMALL_NBYTES:
            self.write_bytes(bytes(view))
        else:
            self.write(view)
            self.wait_until_copied()
        return view.nbytes

    def wait_until_copied(self) -> None:
        """Return when nothing that was given is needed any more."""
        self._open().wait_until_copied()

    def finish(self, sync: bool = True) -> FileSummary:
        """Write what is left, and close the file; with ``sync``, its data would survive a power cut.

        The file's name would not yet: that takes an fsync of the directory, which may serve many files.
        """
        self.begin_to_finish(sync)
        return self.wait()

    def begin_to_finish(self, sync: bool = True) -> None:
        """Do as :meth:`finish`, but leave the waiting to :meth:`wait`."""
        self._open().begin_to_finish(truncate=True, sync=sync, sync_names=False)

    def wait(self) -> FileSummary:
        """Wait for the end that has been begun."""
        nbytes = self._open().wait()
        self._file.close()
        crcs = packed_array("I", self._checksums.chunks if self._checksums is not None else ())
        if sys.byteorder == "big":
            crcs.byteswap()
        return FileSummary(nbytes, crcs.tobytes())

    def abort(self) -> None:
        """Close the file, when nothing is being written to it any more; remove it if it was made here.

        A forked child leaves it to its parent.
        """
        if self.is_parents:
            return
        with contextlib.ExitStack() as whatever_happens:  # Ctrl-C among it
            if self._made:
                whatever_happens.callback(Path(self.path).unlink, missing_ok=True)
            whatever_happens.callback(self._file.close)
            if self._stream is not None:
                self._stream.abort()

    def _open(self) -> Stream:
        self._check_process()
        assert self._stream is not None
        return self._stream


class RawNewFile(io.RawIOBase):
    """A new file as one that can be written to, for torch.save and others."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._file.nbytes

    def write(self, data: Any) -> int:
        """Write a buffer; it may change afterwards."""
        return self._file.write_copied(data)
