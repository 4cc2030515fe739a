"""Files as Python has them, for what is small or belongs to libraries: of this machine, or objects of a bucket."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tensorferry.base.checks import is_url
from tensorferry.transfer.files import File

if TYPE_CHECKING:
    from collections.abc import Callable

# What is asked of a store at a time.
_BUFFER_NBYTES = 1 << 20


class ObjectStream(io.RawIOBase):
    """An object of a bucket to be read like a file of Python's; it is pinned, as :class:`File` is.

    Attributes
    ----------
    file : File
        The object.
    """

    def __init__(self, file: File) -> None:
        super().__init__()
        self.file = file
        self.name = file.path
        self._at = 0
        self._window: tuple[int, bytearray] = (
            0,
            bytearray(),
        )  # what was read last, where little was asked for

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Do as os.pread does."""
        nbytes = max(0, min(nbytes, self.file.size - offset))
        if nbytes >= _BUFFER_NBYTES:
            return bytes(self.file.read(bytearray(nbytes), offset))
        begin, window = self._window
        if not begin <= offset <= offset + nbytes <= begin + len(window):
            more = min(_BUFFER_NBYTES, self.file.size - offset)
            window = self.file.read(bytearray(more), offset) if more else bytearray()
            self._window = begin, window = offset, window
        return bytes(memoryview(window)[offset - begin :][:nbytes])

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the object goes."""
        data = self.pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.file.size}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def close(self) -> None:
        """Close the object."""
        if not self.closed:
            self.file.close()
        super().close()


def open_plain(path: str, *, buffered: bool = False) -> BinaryIO:
    """Open a file, or an object of a bucket, for reading."""
    if not is_url(path):
        return open(path, "rb", buffering=-1 if buffered else 0)
    return _streamed(File(path), buffered)


def plain_of(file: File, *, buffered: bool = False) -> BinaryIO:
    """Open the file of an open one once more, whatever has its name now."""
    if file._version is None:
        return open_plain(f"/proc/self/fd/{file._open_file().descriptor}", buffered=buffered)
    return _streamed(file._again(), buffered)


def _streamed(file: File, buffered: bool) -> BinaryIO:
    stream = ObjectStream(file)
    return cast("BinaryIO", io.BufferedReader(stream, _BUFFER_NBYTES) if buffered else stream)


def reading(file: Any) -> tuple[Callable[[int, int], bytes], int]:
    """Return what reads at an offset (bytes, offset) of an open file of :func:`open_plain`, and the size."""
    raw = getattr(file, "raw", file)
    if isinstance(raw, ObjectStream):
        return raw.pread, raw.file.size
    descriptor = file.fileno()
    return lambda nbytes, offset: os.pread(descriptor, nbytes, offset), os.fstat(descriptor).st_size


def again(file: Any) -> File:
    """Open the very same file once more, whatever has its name now.

    Raises
    ------
    StorageError
        It is an object that has been replaced, or it cannot be opened.
    """
    raw = getattr(file, "raw", file)
    if isinstance(raw, ObjectStream):
        return raw.file._again()
    return File(f"/proc/self/fd/{file.fileno()}")
