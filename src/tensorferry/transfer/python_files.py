"""Python file objects for local files and for objects in a bucket.

They serve small reads and libraries that expect a file object; bulk data goes through :class:`File` instead.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tensorferry.base.checks import is_url
from tensorferry.transfer.files import File

if TYPE_CHECKING:
    from collections.abc import Callable

# A smaller read of an object fetches this many bytes, which saves HTTP requests for later reads of neighbouring bytes.
_BUFFER_NBYTES = 1 << 20


class ObjectStream(io.RawIOBase):
    """A raw Python stream that reads an object in a bucket.

    Like :class:`File`, it is pinned to the version of the object that existed when it was opened: if the object is
    replaced, later reads raise StorageError.

    Attributes
    ----------
    file : File
        The object.
    """

    def __init__(self, file: File) -> None:
        super().__init__()
        self.file = file
        self.name = file.path
        self._position = 0
        # The bytes that the last small read fetched, and their offset in the object.
        self._window: tuple[int, bytearray] = (0, bytearray())

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Return up to ``nbytes`` bytes at ``offset``, like :func:`os.pread`."""
        nbytes = min(nbytes, self.file.size - offset)
        if nbytes <= 0:
            return b""
        if nbytes >= _BUFFER_NBYTES:
            return bytes(self.file.read(bytearray(nbytes), offset))
        begin, window = self._window
        if not begin <= offset <= offset + nbytes <= begin + len(window):
            window = self.file.read(bytearray(min(_BUFFER_NBYTES, self.file.size - offset)), offset)
            self._window = begin, window = offset, window
        return bytes(memoryview(window)[offset - begin :][:nbytes])

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer up to the end of the object and return the number of bytes read."""
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.file.size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def close(self) -> None:
        """Close the object."""
        if not self.closed:
            self.file.close()
        super().close()


def open_python_file(path: str, *, buffered: bool = False) -> BinaryIO:
    """Open a local file, or an object in a bucket by its URL, for reading."""
    if not is_url(path):
        return open(path, "rb", buffering=-1 if buffered else 0)
    return _open_object_stream(File(path), buffered)


def reopen_python_file(file: File, *, buffered: bool = False) -> BinaryIO:
    """Return a Python file object for the file that ``file`` has open, even if its path now names another file."""
    if file._version is None:
        return open_python_file(f"/proc/self/fd/{file._open_file().descriptor}", buffered=buffered)
    return _open_object_stream(file._reopen(), buffered)


def _open_object_stream(file: File, buffered: bool) -> BinaryIO:
    stream = ObjectStream(file)
    return cast("BinaryIO", io.BufferedReader(stream, _BUFFER_NBYTES) if buffered else stream)


def open_zip(file: Any) -> zipfile.ZipFile:
    """Open a zip archive. An error of the drive, which zipfile reports as "not a zip file", is raised as such."""
    handled = sys.exc_info()[1]
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        if isinstance(error.__context__, OSError) and error.__context__ is not handled:
            raise error.__context__ from None
        raise


def reader_and_size(file: Any) -> tuple[Callable[[int, int], bytes], int]:
    """Return a function ``read(nbytes, offset)`` for a file object of :func:`open_python_file`, and the file's size."""
    raw = getattr(file, "raw", file)
    if isinstance(raw, ObjectStream):
        return raw.pread, raw.file.size
    descriptor = file.fileno()
    return lambda nbytes, offset: os.pread(descriptor, nbytes, offset), os.fstat(descriptor).st_size


def reopen(file: Any) -> File:
    """Return a :class:`File` for the file that a file object has open, even if its path now names another file.

    Raises
    ------
    StorageError
        The object has been replaced since it was opened, or the file cannot be opened.
    """
    raw = getattr(file, "raw", file)
    if isinstance(raw, ObjectStream):
        return raw.file._reopen()
    return File(f"/proc/self/fd/{file.fileno()}")
