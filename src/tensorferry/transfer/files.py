"""Open files, with blocking and asynchronous transfers of arrays.

A scheduler is the core's object that owns worker threads. It divides transfers into blocks, and its engine (io_uring,
libaio or threads) submits these to the kernel. Files that are opened without settings share schedulers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, overload

from tensorferry import _core
from tensorferry.base.checks import (
    Direct,
    Readable,
    checked_offset,
    checked_path,
    direct_mode,
    is_pair,
    is_url,
    one_of,
)
from tensorferry.base.reprs import safe_repr
from tensorferry.errors import StorageError
from tensorferry.transfer import sidecars
from tensorferry.transfer.arrays import memory_or_segments
from tensorferry.transfer.futures import PendingFutures
from tensorferry.transfer.requests import set_size, start, transfer, write_segments
from tensorferry.transfer.runtime import (
    close_scheduler,
    default_scheduler,
    make_scheduler,
    wait_while_progressing,
    warn_of_abandoned_io,
    with_descriptors,
)
from tensorferry.transfer.settings import Settings
from tensorferry.transfer.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self, Unpack

    from tensorferry.transfer.arrays import Array
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.futures import Future
    from tensorferry.transfer.remote import Version

    # Options that the overloads of a method share. The method itself has them with their defaults.
    class ReadOptions(TypedDict, total=False):  # noqa: D101
        priority: Priority
        checksums: Checksums | None

    class WriteOptions(ReadOptions, total=False):  # noqa: D101
        sync: bool


_Array = TypeVar("_Array")
# An argument that is returned unchanged: one array, or a list or tuple of arrays and of numbers of bytes to skip.
_ArrayArgument = TypeVar("_ArrayArgument", bound="Array | Sequence[Array | int]")

Priority: TypeAlias = "Literal['normal', 'background']"
# How one transfer is made: (write, sync, background, checksums).
How: TypeAlias = "tuple[bool, bool, bool, Checksums | None]"

# mode: read, write, create, exclusive, truncate
_MODES = {
    "r": (True, False, False, False, False),
    "r+": (True, True, False, False, False),
    "w": (False, True, True, False, True),
    "w+": (True, True, True, False, True),
    "x": (False, True, True, True, False),
    "x+": (True, True, True, True, False),
}


class File:
    """An open file, made by :func:`tensorferry.open`.

    Any number of threads may use it at the same time, with any number of outstanding transfers. Closing waits for the
    transfers. Files are context managers. The end of an ``async with`` block awaits the outstanding transfers, and
    other tasks of the event loop run meanwhile.
    """

    _version: Version | None = None  # the version of an object in a bucket; None for a local file

    def __init__(
        self,
        path: Readable,
        mode: str = "r",
        *,
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        how = _mode_flags(mode)
        past_cache = direct_mode(direct)
        if mode in ("r", "rb") and (is_pair(path) or is_url(path)):
            self._open_object(path)
            return
        text = checked_path(path)  # type: ignore[arg-type]  # raises for a pair, which cannot be opened for writing
        own = scheduler_for_settings(engine, block_size, queue_depth)
        self._open(text, how, past_cache, own)

    @classmethod
    def _from_descriptor(cls, descriptor: int, *, direct: Direct = "auto") -> File:
        """Open the file of a descriptor for reading and writing; the caller still has to close the descriptor.

        If the file system refuses to open the file a second time, the new File uses a duplicate of the descriptor,
        which shares the open file description.
        """
        file = cls.__new__(cls)
        file._open(descriptor, _MODES["r+"], direct_mode(direct))
        return file

    def _open_object(self, path: Any) -> None:
        """Open an object in a bucket. Engine, block size and queue depth are settings of drives and do not apply."""
        # Imported here: most programs read no buckets.
        from tensorferry.transfer.remote import open_object, source_path

        found = open_object(source_path(path))
        self._set_file(found.file, found.scheduler, None)
        self._version = found.version

    def _reopen(self) -> File:
        """Open the same file again, even if its path now names another file. A forked child can call this, too."""
        if self._version is None:
            return File(f"/proc/self/fd/{self._open_file().descriptor}")
        found = File(self._path)
        if found._version != self._version:
            found.close()
            why = f"{os.strerror(errno.ESTALE)}; the object has been replaced since it was opened"
            raise StorageError(errno.ESTALE, why, self._path)
        return found

    def _open(
        self,
        path: str | int,
        how: tuple[bool, bool, bool, bool, bool],
        direct: str,
        own: _core.Scheduler | None = None,
    ) -> None:
        """Open a file, with arguments that have been checked.

        ``how`` has the flags of _MODES. ``own`` is the scheduler if only this file uses it; the scheduler then ends
        when the file is closed. Without it, the file shares the default one.
        """
        scheduler = own or default_scheduler()
        file = with_descriptors(
            scheduler,
            lambda: (
                _core.file_from_descriptor(path, how[1], direct)
                if isinstance(path, int)
                else _core.open_file(path, *how[:4], False, direct)
            ),
        )
        self._set_file(file, scheduler, own)
        if how[4] and file.regular:
            set_size(self._scheduler, file, 0)
            sidecars.remove(self.path)

    def _set_file(
        self, file: _core.File, scheduler: _core.Scheduler, own: _core.Scheduler | None
    ) -> None:
        self._pending = PendingFutures()
        self._closing = threading.RLock()
        self._file: _core.File | None = file
        self._own_scheduler = own
        self._scheduler = scheduler
        self._path = file.path

    @property
    def path(self) -> str:
        """The path that was opened."""
        return self._path

    @property
    def size(self) -> int:
        """The file's current size in bytes."""
        size = self._open_file().size()
        return 0 if size is None else size

    @property
    def engine(self) -> str:
        """The name of the engine that submits the file's blocks."""
        return self._scheduler.engine

    @property
    def closed(self) -> bool:
        """Whether the file has been closed."""
        return self._file is None

    @overload
    def read(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self, array: _ArrayArgument, offset: int = 0, **options: Unpack[ReadOptions]
    ) -> _ArrayArgument: ...
    @overload
    def read(
        self, array: Iterable[Array | int], offset: int = 0, **options: Unpack[ReadOptions]
    ) -> list[Any]: ...
    def read(
        self,
        array: Any,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Any:
        """Fill an array, or several, with the bytes at ``offset``, and return it: see :func:`tensorferry.read`."""
        return self._transfer(array, offset, (False, False, in_background(priority), checksums))

    def write(
        self,
        array: Array | Iterable[Array],
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> None:
        """Write an array, or several, into the file at ``offset`` (bytes). Bytes after the last one written are kept.

        See :func:`tensorferry.write`. Opening a file with "w" empties it; :meth:`truncate` shortens it.
        """
        self._transfer(array, offset, (True, sync, in_background(priority), checksums))

    @overload
    def read_into(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self, array: _ArrayArgument, offset: int = 0, **options: Unpack[ReadOptions]
    ) -> Future[_ArrayArgument]: ...
    @overload
    def read_into(
        self, array: Iterable[Array | int], offset: int = 0, **options: Unpack[ReadOptions]
    ) -> Future[list[Any]]: ...
    def read_into(
        self,
        array: Any,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[Any]:
        """Start to fill an array, or several, with the bytes at ``offset``.

        Returns
        -------
        Future
            Its result is ``array``.
        """
        return self._start(array, offset, (False, False, in_background(priority), checksums))

    @overload
    def write_from(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self, array: _ArrayArgument, offset: int = 0, **options: Unpack[WriteOptions]
    ) -> Future[_ArrayArgument]: ...
    @overload
    def write_from(
        self, array: Iterable[Array], offset: int = 0, **options: Unpack[WriteOptions]
    ) -> Future[list[Any]]: ...
    def write_from(
        self,
        array: Any,
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[Any]:
        """Start to write an array, or several, at ``offset`` (bytes). Do not change them until the future is done.

        Returns
        -------
        Future
            Its result is ``array``.
        """
        return self._start(array, offset, (True, sync, in_background(priority), checksums))

    def stream(
        self,
        offset: int = 0,
        *,
        nbytes_reserved: int = 0,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Stream:
        """Return a stream that writes arrays one after the other, starting at ``offset`` (bytes).

        Parameters
        ----------
        offset : int
            The position of the first array in the file.
        nbytes_reserved : int
            Space to reserve immediately, as :meth:`preallocate` does: the approximate size of all arrays, if known.
        priority : "normal" or "background"
            As for :func:`tensorferry.write`.
        checksums : Checksums, optional
            Receives the CRC-32s of the bytes written once the stream has been finished.

        Returns
        -------
        Stream
            Finish it before closing the file.

        Examples
        --------
        >>> with tensorferry.open(path, "w") as file, file.stream() as stream:  # doctest: +SKIP
        ...     stream.append(make(name).cpu() for name in names)
        """
        file = self._open_file(writing=True)
        offset = checked_offset(offset, nbytes_reserved)
        nbytes_reserved = checked_offset(nbytes_reserved, 0, "nbytes_reserved")
        return Stream(
            self._scheduler,
            file,
            offset,
            checksums=checksums,
            background=in_background(priority),
            nbytes_reserved=nbytes_reserved,
        )

    def sync(self) -> None:
        """Make the bytes written so far and the file size durable (fdatasync). Outstanding transfers are not covered.

        Once a sync of this file has failed, here or with ``sync=True``, every later one fails, too: the kernel reports
        a write-back error only once, and bytes written earlier may be lost. Open the file again and rewrite it.
        """
        self._open_file().sync()

    def preallocate(self, nbytes: int, offset: int = 0) -> None:
        """Extend the file to ``offset + nbytes`` bytes, and reserve space for the new bytes from ``offset`` on.

        A file that is longer already stays as it is. Without enough free space this method raises StorageError
        (ENOSPC), and the size stays the same. On a file system that cannot reserve space this method does nothing.
        """
        file = self._open_file(writing=True)
        file.preallocate(checked_offset(offset, nbytes), checked_offset(nbytes, 0, "nbytes"))

    def truncate(self, nbytes: int) -> None:
        """Set the file's size in bytes. Writes submitted earlier complete first; their bytes beyond it are cut off."""
        file = self._open_file(writing=True)
        set_size(self._scheduler, file, checked_offset(nbytes, 0, "nbytes"))

    def stats(self) -> dict[str, Any]:
        """Return the counters of the file's workers.

        A file opened with explicit settings has its own workers. All other files share workers.
        """
        return self._scheduler.stats()

    def close(self) -> None:
        """Wait for the outstanding transfers, and close the file. Their futures keep results and errors.

        If no byte moves for 60 seconds, stop waiting and emit a ``RuntimeWarning``; the arrays stay referenced.
        """
        self._close(wait_while_progressing)

    def _close(self, wait: Callable[..., bool]) -> None:
        """Close the file; ``wait`` is :func:`wait_while_progressing` or a function with the same parameters."""
        if not self._scheduler.belongs_to_this_process():
            self._file = None
            return
        # A second thread that calls close() also returns only when the file is closed.
        with self._closing:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                left = self._finish(file, wait)
            except BaseException:  # KeyboardInterrupt: the file stays open and can be closed again
                self._file = file
                raise
            if self._own_scheduler is not None:
                close_scheduler(self._own_scheduler, patient=not left)
            else:
                self._scheduler.reap()
                if left:
                    warn_of_abandoned_io(f"outstanding transfers of {self._path!r}")
            if not left:
                file.close()

    def _finish(self, file: _core.File, wait: Callable[..., bool]) -> bool:
        """Wait for all transfers, including blocking calls of other threads; return whether some were abandoned."""
        pending = self._pending.take()
        try:
            for reference in pending:
                future = reference()
                if future is None:
                    continue
                if not wait(future._request.wait, self._scheduler):
                    return True
                future.done()  # checks now that the array still has its memory, before the caller can resize it
            if self._version is not None:
                # Do not wait for the responses of cancelled HTTP requests, which may take minutes. The core keeps the
                # requests' memory until the responses have arrived.
                file.retire(0.0)
                return False
            return not wait(file.retire, self._scheduler)
        except BaseException:
            self._pending.restore(pending)
            raise

    def __enter__(self) -> File:
        self._open_file()
        return self

    async def __aenter__(self) -> File:
        return self.__enter__()

    def __copy__(self) -> Self:
        return self  # a copy would share the core's files, and closing it would close them under the original

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        try:
            for future in self._pending.alive():
                await future._wait_until_done()
        finally:
            # close() blocks the event loop only if transfers are left: if this task was cancelled, or if another thread
            # has started transfers meanwhile.
            self.close()

    @safe_repr
    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.File {self._path!r}>"

    def _write_segments(self, segments: _core.Segments, offset: int, *, sync: bool) -> None:
        """Write rows of a table: segments with gaps between them, which begin at ``offset`` in the file."""
        write_segments(self._scheduler, self._open_file(writing=True), segments, offset, sync=sync)

    def _open_file(self, *, reading: bool = False, writing: bool = False) -> _core.File:
        if self._file is None:
            raise ValueError(f"the file {self._path!r} is closed")
        if reading and not self._file.readable:
            raise ValueError(f"the file {self._path!r} was not opened for reading")
        if writing and not self._file.writable:
            raise ValueError(f"the file {self._path!r} was not opened for writing")
        return self._file

    def _transfer(self, array: _Array, offset: int, how: How) -> _Array:
        write, sync, background, checksums = how
        file = self._open_file(reading=not write, writing=write)
        scheduler = self._scheduler
        # run_plain handles the common kinds of arrays in one call of the core, and returns False for all others. This
        # saves time, because in a small read the Python code takes longer than everything else except the drive.
        if checksums is None and scheduler.run_plain(file, array, offset, write, sync, background):
            return array
        array, memory = memory_or_segments(array, writable=not write)
        transfer(scheduler, file, memory, checked_offset(offset, memory[1]), *how)
        return array

    def _start(self, array: _Array, offset: int, how: How) -> Future[_Array]:
        write, sync, background, checksums = how
        file = self._open_file(reading=not write, writing=write)
        scheduler = self._scheduler
        future = None
        if checksums is None:
            future = with_descriptors(
                scheduler,
                lambda: scheduler.start_plain(file, array, offset, write, sync, background),
                opens=False,
            )
        if future is None:
            array, memory = memory_or_segments(array, writable=not write)
            begin = checked_offset(offset, memory[1])
            future = start(scheduler, file, array, memory, begin, *how)
        if not future.done():
            self._pending.add(future)
        return future


def _mode_flags(mode: str) -> tuple[bool, bool, bool, bool, bool]:
    """Return the flags (read, write, create, exclusive, truncate) of a mode."""
    if not isinstance(mode, str):
        raise TypeError(f"mode: expected a str, got {mode!r}")
    binary = mode[:1] + mode[1:].replace("b", "", 1)  # "rb", "rb+" and "r+b"
    if binary not in _MODES:
        hint = (
            "; appending is not supported, because every transfer has an offset"
            if "a" in mode
            else ""
        )
        raise ValueError(
            f"mode: {mode!r} is not one of {', '.join(_MODES)}, with or without b{hint}"
        )
    return _MODES[binary]


def scheduler_for_settings(
    engine: str | None, block_size: int | None, queue_depth: int | None
) -> _core.Scheduler | None:
    """Return a new scheduler with these settings of :func:`open`, or None if all of them are None."""
    if engine is None and block_size is None and queue_depth is None:
        return None
    return make_scheduler(Settings.of(block_size, queue_depth, engine=engine))


def remove_created(path: str, identity: object) -> None:
    """Remove the file at a path if it is the one that this process created, and not another file that replaced it.

    ``identity`` is that of the core for the created file: its device number and inode.
    """
    with contextlib.suppress(OSError):
        status = os.stat(path)  # noqa: PTH116
        # For a block device the core's identity is another pair of numbers, so a device node is never removed.
        if (status.st_dev, status.st_ino) == identity:
            os.unlink(path)  # noqa: PTH108


def in_background(priority: Priority) -> bool:
    """Return whether a priority is "background": such a transfer gives way to others."""
    one_of(priority, "priority", ("normal", "background"))
    return priority == "background"
