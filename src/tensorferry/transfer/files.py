"""Open files: arrays to and from them, blocking or with futures."""

from __future__ import annotations

import abc
import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from tensorferry import _core
from tensorferry.base.checks import (
    Direct,
    Path,
    Readable,
    checked_offset,
    checked_path,
    direct_mode,
    is_pair,
    is_url,
    one_of,
    positive,
)
from tensorferry.errors import StorageError
from tensorferry.transfer.arrays import memory_or_segments
from tensorferry.transfer.defaults import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    MAX_BLOCK_NBYTES,
    MAX_QUEUE_DEPTH,
)
from tensorferry.transfer.futures import Pending
from tensorferry.transfer.requests import set_size, start, transfer, write_apart
from tensorferry.transfer.runtime import (
    AnyScheduler,
    close_scheduler,
    default_scheduler,
    make_scheduler,
    patiently,
    scheduler_of,
    schedulers_of,
    warn_of_left_behind,
    with_descriptors,
)
from tensorferry.transfer.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.transfer.arrays import Array
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.futures import Future
    from tensorferry.transfer.remote import Version

    _Path = TypeVar("_Path", bound=Path)

_Array = TypeVar("_Array")
# What comes back as it was given: one array, or a list or tuple of arrays and of bytes to pass over.
_Given = TypeVar("_Given", bound="Array | Sequence[Array | int]")

Priority: TypeAlias = "Literal['normal', 'background']"

# mode: read, write, create, exclusive, truncate
_MODES = {
    "r": (True, False, False, False, False),
    "r+": (True, True, False, False, False),
    "w": (False, True, True, False, True),
    "w+": (True, True, True, False, True),
    "x": (False, True, True, True, False),
    "x+": (True, True, True, True, False),
}


class Transferring(abc.ABC):
    """What all open files have: reading and writing, blocking or with futures, and the end of a ``with`` block.

    At the end of an ``async with`` block other tasks go on while transfers on their way are waited for.
    """

    _pending: Pending

    @overload
    def read(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self,
        array: _Given,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> _Given: ...
    @overload
    def read(
        self,
        array: Iterable[Array | int],
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> list[Any]: ...
    def read(
        self,
        array: Any,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Any:
        """Fill an array, or several, from ``offset`` (bytes) on, and return what was given. See :func:`read`."""
        return self._transfer(array, offset, priority, checksums, write=False)

    def write(
        self,
        array: Array | Iterable[Array],
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> None:
        """Write an array, or several, into the file at ``offset`` (bytes): what is behind stays as it is.

        See :func:`tensorferry.write`. A file opened with "w" was empty, and :meth:`File.truncate` ends one.
        """
        self._transfer(array, offset, priority, checksums, write=True, sync=sync)

    @overload
    def read_into(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self,
        array: _Given,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[_Given]: ...
    @overload
    def read_into(
        self,
        array: Iterable[Array | int],
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[list[Any]]: ...
    def read_into(
        self,
        array: Any,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[Any]:
        """Begin to fill an array, or several, from ``offset`` (bytes) on.

        Returns
        -------
        Future
            Its result is what was given.
        """
        return self._start(array, offset, priority, checksums, write=False)

    @overload
    def write_from(  # type: ignore[overload-overlap]  # a list is an iterable, too
        self,
        array: _Given,
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[_Given]: ...
    @overload
    def write_from(
        self,
        array: Iterable[Array],
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
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
        """Begin to write an array, or several, at ``offset`` (bytes). Do not change any before the future is done.

        Returns
        -------
        Future
            Its result is what was given.
        """
        return self._start(array, offset, priority, checksums, write=True, sync=sync)

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        try:
            for future in self._pending.living():
                await future._ended()
        finally:
            self.close()  # which finds nothing to wait for, unless this was cancelled or others went on

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for transfers on their way, and close."""

    @abc.abstractmethod
    def _write_apart(self, segments: _core.Segments, offset: int, *, sync: bool) -> None:
        """Write rows of a table, which are segments with gaps from ``offset`` on."""

    @abc.abstractmethod
    def _transfer(
        self,
        array: _Array,
        offset: int,
        priority: Priority,
        checksums: Checksums | None,
        *,
        write: bool,
        sync: bool = False,
    ) -> _Array: ...

    @abc.abstractmethod
    def _start(
        self,
        array: _Array,
        offset: int,
        priority: Priority,
        checksums: Checksums | None,
        *,
        write: bool,
        sync: bool = False,
    ) -> Future[_Array]: ...


class File(Transferring):
    """An open file, made by :func:`tensorferry.open`.

    Any number of threads may use it, and any number of transfers may be on their way. Closing waits for them. Files
    are context managers.
    """

    _version: Version | None = None  # of an object of a bucket

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
        how = how_to_open(mode)
        past_cache = direct_mode(direct)
        if mode in ("r", "rb") and (is_pair(path) or is_url(path)):
            self._open_object(path)
            return
        text = checked_path(path)  # type: ignore[arg-type]  # it says what is wrong with a pair
        own = chosen_scheduler(engine, block_size, queue_depth)
        self._open(text, how, past_cache, own or default_scheduler(), own)

    @classmethod
    def _of_descriptor(cls, descriptor: int, *, direct: Direct = "auto") -> File:
        """Open, for writing, the file of a descriptor, which stays the caller's.

        Where the file system refuses to open it a second time, both share what is open.
        """
        file = cls.__new__(cls)
        file._open(descriptor, _MODES["r+"], direct_mode(direct), default_scheduler(), None)
        return file

    def _open_object(self, path: Any) -> None:
        """Open an object of a bucket; the settings of drives are not its own."""
        from tensorferry.transfer.remote import open_object, source_path  # for those who need it

        found = open_object(source_path(path))
        self._hold(found.file, found.scheduler, None)
        self._version = found.version

    def _again(self) -> File:
        """Open the very same file once more, whatever has its name now; in a forked child as well."""
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
        scheduler: AnyScheduler,
        own: AnyScheduler | None,
    ) -> None:
        """Open what has been checked; the scheduler ``own`` ends with the file."""
        file = with_descriptors(
            scheduler,
            lambda: (
                _core.file_from_descriptor(path, how[1], direct)
                if isinstance(path, int)
                else _core.open_file(path, *how[:4], False, direct)
            ),
        )
        self._hold(file, schedulers_of(scheduler, file), own)
        if how[4] and file.regular:
            set_size(self._scheduler, file, 0)

    def _hold(self, file: _core.File, scheduler: AnyScheduler, own: AnyScheduler | None) -> None:
        self._pending = Pending()
        self._closing = threading.RLock()
        self._file: _core.File | None = file
        self._own_scheduler = own
        self._scheduler = scheduler
        self._path = file.path

    @property
    def path(self) -> str:
        """The path it was opened by."""
        return self._path

    @property
    def size(self) -> int:
        """The file's present size in bytes."""
        size = self._open_file().size()
        return 0 if size is None else size

    @property
    def engine(self) -> str:
        """The engine that moves its blocks."""
        return self._scheduler.engine

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._file is None

    def stream(
        self,
        offset: int = 0,
        *,
        nbytes_reserved: int = 0,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Stream:
        """Begin to write arrays that come one by one, from ``offset`` (bytes) on.

        Parameters
        ----------
        offset : int
            Where in the file the first one goes.
        nbytes_reserved : int
            Space to reserve at once, as by :meth:`preallocate`: about as much as will come, if that is known.
        priority : "normal" or "background"
            As for :func:`tensorferry.write`.
        checksums : Checksums, optional
            Has CRC-32s of what was written, when the stream has been finished.

        Returns
        -------
        Stream
            To be finished before the file is closed.

        Examples
        --------
        >>> with tensorferry.open(path, "w") as file, file.stream() as stream:  # doctest: +SKIP
        ...     stream.append(make(name).cpu() for name in names)
        """
        file = self._open_file(writing=True)
        offset = checked_offset(offset, nbytes_reserved)
        nbytes_reserved = checked_offset(nbytes_reserved, 0, "nbytes_reserved")
        background = in_background(priority)
        return Stream(
            scheduler_of(self._scheduler, file, True),
            file,
            offset,
            checksums=checksums,
            background=background,
            nbytes_reserved=nbytes_reserved,
        )

    def sync(self) -> None:
        """Make what has been written, and the size, durable (fdatasync). Transfers on their way are not covered.

        Once this has failed, here or for ``sync=True``, it fails for ever: the kernel tells of a failure only once, and
        what was written before may be lost. Open the file anew, and write it again.
        """
        self._open_file().sync()

    def preallocate(self, nbytes: int, offset: int = 0) -> None:
        """Reserve space for what [offset, offset + nbytes) has beyond the present end; the file then is longer.

        A disk that has not so much left refuses at once with StorageError (ENOSPC), and nothing has changed. File
        systems that cannot reserve are left alone, and so is the size there.
        """
        file = self._open_file(writing=True)
        file.preallocate(checked_offset(offset, nbytes), checked_offset(nbytes, 0, "nbytes"))

    def truncate(self, nbytes: int) -> None:
        """Set the file's size in bytes, when what was to be written behind it before has been written."""
        file = self._open_file(writing=True)
        set_size(self._scheduler, file, checked_offset(nbytes, 0, "nbytes"))

    def stats(self) -> dict[str, Any]:
        """Return the counters of the workers it uses.

        They are its own, or shared by all files without explicit settings (of file systems with the same profile).
        """
        return self._scheduler.stats()

    def close(self) -> None:
        """Wait for transfers on their way, and close. Their futures keep results and failures.

        Where nothing moves for 60 seconds it gives up, with a ``RuntimeWarning``; arrays stay referenced all the same.
        """
        self._close(patiently)

    def _close(self, wait: Callable[..., bool]) -> None:
        """Close, with a way to wait for steps as :func:`patiently` has it."""
        if not self._scheduler.belongs_to_this_process():
            self._file = None
            return
        with self._closing:  # who comes second returns when all is done, too
            file, self._file = self._file, None
            if file is None:
                return
            try:
                left = self._finish(file, wait)
            except BaseException:  # Ctrl-C: to be closed again
                self._file = file
                raise
            if self._own_scheduler is not None:
                close_scheduler(self._own_scheduler, patient=not left)
            else:
                self._scheduler.reap()
                if left:
                    warn_of_left_behind(f"outstanding transfers of {self._path!r}")
            if not left:
                file.close()

    def _finish(self, file: _core.File, wait: Callable[..., bool]) -> bool:
        """Wait for transfers, others' blocking calls among them; return whether some were given up."""
        pending = self._pending.take()
        try:
            for reference in pending:
                future = reference()
                if future is None:
                    continue
                if not wait(future._request.wait, self._scheduler):
                    return True
                future.done()  # sees the end while the array is as it was
            if self._version is not None:
                file.retire(
                    0.0
                )  # an answer that nobody waits for may take minutes; its memory is kept
                return False
            return not wait(file.retire, self._scheduler)
        except BaseException:
            self._pending.put_back(pending)
            raise

    def __enter__(self) -> File:
        self._open_file()
        return self

    async def __aenter__(self) -> File:
        return self.__enter__()

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.File {self._path!r}>"

    def _write_apart(self, segments: _core.Segments, offset: int, *, sync: bool) -> None:
        file = self._open_file(writing=True)
        write_apart([(self._scheduler, file, segments, offset)], sync=sync)

    def _open_file(self, *, reading: bool = False, writing: bool = False) -> _core.File:
        if self._file is None:
            raise ValueError(f"the file {self._path!r} is closed")
        if reading and not self._file.readable:
            raise ValueError(f"the file {self._path!r} was not opened for reading")
        if writing and not self._file.writable:
            raise ValueError(f"the file {self._path!r} was not opened for writing")
        return self._file

    def _transfer(
        self,
        array: _Array,
        offset: int,
        priority: Priority,
        checksums: Checksums | None,
        *,
        write: bool,
        sync: bool = False,
    ) -> _Array:
        file = self._open_file(reading=not write, writing=write)
        scheduler, background = self._scheduler, in_background(priority)
        # One call of the core where it can be: of a small read, Python's part takes longer than all else but the drive.
        if checksums is None and scheduler.run_plain(file, array, offset, write, sync, background):
            return array
        array, memory = memory_or_segments(array, writable=not write)
        transfer(
            scheduler,
            file,
            memory,
            checked_offset(offset, memory[1]),
            write=write,
            sync=sync,
            background=background,
            checksums=checksums,
        )
        return array

    def _start(
        self,
        array: _Array,
        offset: int,
        priority: Priority,
        checksums: Checksums | None,
        *,
        write: bool,
        sync: bool = False,
    ) -> Future[_Array]:
        file = self._open_file(reading=not write, writing=write)
        scheduler, background = self._scheduler, in_background(priority)
        future = None
        if checksums is None:
            future = with_descriptors(
                scheduler,
                lambda: scheduler.start_plain(file, array, offset, write, sync, background),
                opens=False,
            )
        if future is None:
            array, memory = memory_or_segments(array, writable=not write)
            future = start(
                scheduler,
                file,
                array,
                memory,
                checked_offset(offset, memory[1]),
                write=write,
                sync=sync,
                background=background,
                checksums=checksums,
            )
        if not future.done():
            self._pending.add(future)
        return future


def how_to_open(mode: str) -> tuple[bool, bool, bool, bool, bool]:
    """Return what a mode means: whether to read, to write, to create, only to create, to begin with nothing."""
    if not isinstance(mode, str):
        raise TypeError(f"mode: {mode!r} is no text")
    binary = mode[:1] + mode[1:].replace("b", "", 1)  # "rb", "rb+" and "r+b"
    if binary not in _MODES:
        hint = "; transfers have offsets, and append nothing" if "a" in mode else ""
        raise ValueError(f"mode: {mode!r} is none of {', '.join(_MODES)}, with or without b{hint}")
    return _MODES[binary]


def chosen_scheduler(
    engine: str | None, block_size: int | None, queue_depth: int | None
) -> _core.Scheduler | None:
    """Return a scheduler for these settings, as :func:`open` has them; None where nothing was chosen."""
    if engine is None and block_size is None and queue_depth is None:
        return None
    block = DEFAULT_BLOCK_NBYTES if block_size is None else block_size
    depth = DEFAULT_QUEUE_DEPTH if queue_depth is None else queue_depth
    return make_scheduler(
        engine,
        positive(block, "block_size", MAX_BLOCK_NBYTES),
        positive(depth, "queue_depth", MAX_QUEUE_DEPTH),
        1,
        False,
    )


def in_background(priority: Priority) -> bool:
    """Return whether a transfer comes after all that are not in the background."""
    one_of(priority, "priority", ("normal", "background"))
    return priority == "background"
