"""A file that is read as one version.

A program that reads a file lazily takes from its header where the data are, and reads the data later. If another
process writes to the file meanwhile, the data are at other places, or of another version. Therefore every read of a
:class:`VersionedFile` compares the file's version after its last byte has arrived, and raises an error if it differs
from the version that the header came from. A file that is replaced (a new file is renamed over it) stays readable: the
open descriptor still refers to the old file.
"""

from __future__ import annotations

import os
import time
from errno import ESTALE
from typing import TYPE_CHECKING, TypeVar

from tensorferry.errors import StorageError
from tensorferry.transfer.arrays import is_iterable_of_arrays
from tensorferry.transfer.files import File
from tensorferry.transfer.remote import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.base.checks import Direct, Readable
    from tensorferry.transfer.files import How
    from tensorferry.transfer.futures import Future

_Array = TypeVar("_Array")

_CHANGED = "the file has been changed since its header was read (remedy: open it again)"
# CLOCK_REALTIME_COARSE of <linux/time.h>, from which file systems take their time stamps. It ticks every 1 to 10 ms.
_COARSE_CLOCK = 5
_MAX_TICK_SECONDS = 0.02
_POLL_SECONDS = 0.0005


class VersionedFile(File):
    """A file, open for reading, of which every read returns the same version, or raises an error.

    Parameters
    ----------
    path, direct
        As for :func:`tensorferry.open`.
    version : Version, optional
        The version of the file from which the header was read earlier; by default the present version.
    changed : function of a path
        Makes the exception for a file that has another version; by default a StorageError with the errno ESTALE.

    Raises
    ------
    StorageError
        The file cannot be opened.
    Exception
        The file has another version than the given one.

    Notes
    -----
    A change is noticed by the file's time of modification, size and inode. It stays unnoticed where a program sets the
    time of modification back after it has written, and for a time on network file systems that cache attributes.
    """

    def __init__(
        self,
        path: Readable,
        *,
        direct: Direct = "auto",
        version: Version | None = None,
        changed: Callable[[str], Exception] | None = None,
    ) -> None:
        super().__init__(path, direct=direct)
        self._changed = changed
        # close() settles futures, which asks for the version, when it has already forgotten the core's file.
        self._core = self._open_file()
        try:
            self.version = version or self._lasting_version()
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise the exception for a changed file if the file has another version than the expected one."""
        if (error := self.change()) is not None:
            raise error

    def change(self) -> Exception | None:
        """Return the exception for a changed file, or None."""
        if self._present_version() == self.version:
            return None
        if self._changed is not None:
            return self._changed(self.path)
        return StorageError(ESTALE, f"{os.strerror(ESTALE)}; {_CHANGED}", self.path)

    def _reopen(self) -> VersionedFile:
        path = self.path
        if self._version is None:
            path = f"/proc/self/fd/{self._open_file().descriptor}"
        found = VersionedFile(path, version=self.version, changed=self._changed)
        found._path = self.path
        return found

    def _transfer(self, array: _Array, offset: int, how: How) -> _Array:
        found = super()._transfer(array, offset, how)
        self.check()
        return found

    def _start(self, array: _Array, offset: int, how: How) -> Future[_Array]:
        given = list(array) if is_iterable_of_arrays(array) else array  # type: ignore[call-overload]
        future: Future[_Array] = super()._start(given, offset, how)
        # The requests for objects in buckets compare the version themselves.
        if self._version is None:
            future._gives(given, self.change)
            # close() asks only those futures that were not done when the transfer began, and a file that is closed
            # cannot be asked for its version.
            future.done()
        return future

    def _present_version(self) -> Version:
        if self._version is not None:
            return self._version
        return Version.of_status(os.fstat(self._core.descriptor))

    def _lasting_version(self) -> Version:
        """Return the version, at a time from which on a change leads to another version.

        The clock of time stamps ticks every few milliseconds, and two changes in the same tick have the same time
        (except on Linux 6.13 and later, if the time was asked for between them). So if the file was modified in the
        present tick, wait for the next one.
        """
        version = self._present_version()
        give_up = time.monotonic() + _MAX_TICK_SECONDS
        while (
            version.modified == time.clock_gettime_ns(_COARSE_CLOCK) and time.monotonic() < give_up
        ):
            time.sleep(_POLL_SECONDS)
            version = self._present_version()
        return version
