"""Files and functions: read and write arrays by path, blocking or with futures."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.arrays import memory_of
from tensorferry.runtime import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    AnyScheduler,
    close_scheduler,
    default_scheduler,
    make_scheduler,
    scheduler_of,
    with_descriptors,
)
from tensorferry.transfers import (
    Direct,
    Path,
    checked_offset,
    checked_path,
    direct_mode,
    start,
    transfer,
    transfer_many,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tensorferry.futures import Future


def write(
    path: Path,
    array: Any,
    offset: int = 0,
    *,
    truncate: bool = False,
    sync: bool = False,
    direct: Direct = "auto",
) -> None:
    """Write an array's bytes to a file.

    Parameters
    ----------
    path : str, bytes or PathLike
        Created if missing, with mode 0666 less the umask.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Any dtype and shape, in host memory or on an NVIDIA GPU. One of torch's or NumPy's that is not
        contiguous is copied first.
    offset : int
        Where in the file to begin, in bytes. Bytes of the file before and behind stay as they are.
    truncate : bool
        After success, end the file behind the last byte written. Without it a longer file stays as long.
    sync : bool
        Return only when data, size and name would survive a power cut (fdatasync, and fsync of the directory).
    direct : "auto", True or False
        "auto" and True write past the page cache (O_DIRECT), "auto" only where the file system can; False goes
        through the page cache.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable; nothing was touched.
    StorageError
        Not all bytes could be written; it names the first that could not.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used.

    Notes
    -----
    GPU memory is written as it is when all that has been queued on its current stream has been done. Large arrays pass
    through a few page-locked buffers, so that copies and writes overlap and no host memory as large is needed.
    """
    memory = memory_of(array, writable=False)
    transfer(
        default_scheduler(),
        path,
        memory,
        checked_offset(offset, memory[1]),
        write=True,
        direct=direct_mode(direct),
        truncate=truncate,
        sync=sync,
    )


def read(path: Path, array: Any, offset: int = 0, *, direct: Direct = "auto") -> Any:
    """Fill an array with bytes of a file, and return it.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file to read.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Contiguous and writable, of any dtype and shape, in host memory or on an NVIDIA GPU; all of it is filled.
    offset : int
        Where in the file to begin, in bytes.
    direct : "auto", True or False
        "auto" reads past the page cache (O_DIRECT) but takes from it what it holds; True never looks there; False
        always goes through it.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable; nothing was touched.
    ShortReadError
        The file ends before the array is full.
    StorageError
        Not all bytes could be read; it names the first that could not.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used.

    Notes
    -----
    GPU memory is not touched before all that has been queued on its current stream has been done. When this returns,
    the bytes are there: work that is queued afterwards, on any stream, sees them.
    """
    memory = memory_of(array, writable=True)
    transfer(
        default_scheduler(),
        path,
        memory,
        checked_offset(offset, memory[1]),
        write=False,
        direct=direct_mode(direct),
    )
    return array


def write_many(
    items: Sequence[tuple[Any, ...]],
    *,
    truncate: bool = False,
    sync: bool = False,
    direct: Direct = "auto",
) -> None:
    """Write many arrays, all outstanding at once, and return when all are written.

    Parameters
    ----------
    items : sequence of (path, array) or (path, array, offset)
        Pieces of one file may be given in any order; where they overlap, the later one wins.
    truncate, sync, direct
        As for :func:`write`. With ``truncate``, give each file once.

    Raises
    ------
    ValueError, TypeError
        An item is not usable; nothing was touched.
    StorageError
        The failure of the first item that failed; the message counts further ones.
    """
    transfer_many(
        default_scheduler(),
        items,
        write=True,
        direct=direct_mode(direct),
        truncate=truncate,
        sync=sync,
    )


def read_many(items: Sequence[tuple[Any, ...]], *, direct: Direct = "auto") -> None:
    """Fill many arrays, all outstanding at once, and return when all are full.

    Parameters
    ----------
    items : sequence of (path, array) or (path, array, offset)
        A path that comes again is opened once.
    direct : "auto", True or False
        As for :func:`read`.

    Raises
    ------
    ValueError, TypeError
        An item is not usable; nothing was touched.
    StorageError
        The failure of the first item that failed; the message counts further ones.
    """
    transfer_many(default_scheduler(), items, write=False, direct=direct_mode(direct))


# mode: read, write, create, exclusive, truncate
_MODES = {
    "r": (True, False, False, False, False),
    "r+": (True, True, False, False, False),
    "w": (False, True, True, False, True),
    "w+": (True, True, True, False, True),
    "x": (False, True, True, True, False),
    "x+": (True, True, True, True, False),
}


def open(
    path: Path,
    mode: str = "r",
    *,
    direct: Direct = "auto",
    engine: str | None = None,
    block_size: int | None = None,
    queue_depth: int | None = None,
) -> File:
    """Open a file for many transfers; see :class:`File`.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file.
    mode : str
        As for the built-in ``open``: "r" to read, "r+" to read and write an existing file, "w" and "w+" to begin
        with an empty one, "x" and "x+" to create one that must not exist. Always binary.
    direct : "auto", True or False
        As for :func:`read` and :func:`write`.
    engine : str, optional
        "io_uring", "libaio" or "threads"; by default TENSORFERRY_ENGINE, or the first that works.
    block_size : int, optional
        Bytes that one submission carries.
    queue_depth : int, optional
        Blocks in flight at most. Any of these three gives the file workers of its own. With none of them, the
        profile of the file's file system is used where ``tensorferry tune`` has stored one.

    Raises
    ------
    ValueError
        An argument is not usable.
    StorageError
        The file cannot be opened.
    EngineUnavailableError
        The engine cannot be had here.
    """
    return File(
        path, mode, direct=direct, engine=engine, block_size=block_size, queue_depth=queue_depth
    )


class File:
    """An open file, made by :func:`tensorferry.open`.

    Any number of threads may use it, and any number of transfers may be on their way. Closing waits for them. Files
    are context managers.
    """

    def __init__(
        self,
        path: Path,
        mode: str = "r",
        *,
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode: {mode!r} is none of {', '.join(_MODES)}")
        text = checked_path(path)
        how = direct_mode(direct)
        self._own_scheduler = not (engine is None and block_size is None and queue_depth is None)
        scheduler: AnyScheduler
        if self._own_scheduler:
            scheduler = make_scheduler(
                engine,
                positive(
                    block_size if block_size is not None else DEFAULT_BLOCK_NBYTES, "block_size"
                ),
                positive(
                    queue_depth if queue_depth is not None else DEFAULT_QUEUE_DEPTH, "queue_depth"
                ),
                1,
                False,
            )
        else:
            scheduler = default_scheduler()
        self._pending: list[Future] = []
        self._file: _core.File | None = with_descriptors(
            scheduler, lambda: _core.open_file(text, *_MODES[mode], how)
        )
        self._scheduler = scheduler_of(scheduler, self._file)
        self._path = self._file.path

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

    def read(self, array: Any, offset: int = 0) -> Any:
        """Fill an array from ``offset`` (bytes) on, and return it. See :func:`tensorferry.read`."""
        file = self._open_file(reading=True)
        memory = memory_of(array, writable=True)
        transfer(self._scheduler, file, memory, checked_offset(offset, memory[1]), write=False)
        return array

    def write(self, array: Any, offset: int = 0, *, sync: bool = False) -> None:
        """Write an array at ``offset`` (bytes). See :func:`tensorferry.write`."""
        file = self._open_file(writing=True)
        memory = memory_of(array, writable=False)
        transfer(
            self._scheduler,
            file,
            memory,
            checked_offset(offset, memory[1]),
            write=True,
            sync=sync,
        )

    def read_into(self, array: Any, offset: int = 0) -> Future:
        """Begin to fill an array from ``offset`` (bytes) on.

        Returns
        -------
        Future
            Its result is the array.
        """
        file = self._open_file(reading=True)
        memory = memory_of(array, writable=True)
        return self._track(
            start(
                self._scheduler,
                file,
                array,
                memory,
                checked_offset(offset, memory[1]),
                write=False,
            )
        )

    def write_from(self, array: Any, offset: int = 0, *, sync: bool = False) -> Future:
        """Begin to write an array at ``offset`` (bytes). Do not change the array before the future is done.

        Returns
        -------
        Future
            Its result is the array.
        """
        file = self._open_file(writing=True)
        memory = memory_of(array, writable=False)
        return self._track(
            start(
                self._scheduler,
                file,
                array,
                memory,
                checked_offset(offset, memory[1]),
                write=True,
                sync=sync,
            )
        )

    def sync(self) -> None:
        """Make what has been written, and the size, durable (fdatasync). Transfers on their way are not covered."""
        self._open_file().sync()

    def preallocate(self, nbytes: int, offset: int = 0) -> None:
        """Reserve space for what [offset, offset + nbytes) has beyond the present end; the file then is longer.

        A disk that has not so much left refuses at once with StorageError (ENOSPC), and nothing has changed. File
        systems that cannot reserve are left alone, and so is the size there.
        """
        file = self._open_file(writing=True)
        file.preallocate(checked_offset(offset, nbytes), checked_offset(nbytes, 0, "nbytes"))

    def truncate(self, nbytes: int) -> None:
        """Set the file's size in bytes."""
        self._open_file(writing=True).truncate(checked_offset(nbytes, 0, "nbytes"))

    def stats(self) -> dict[str, Any]:
        """Return the counters of the workers it uses.

        They are its own, or shared by all files without explicit settings (of file systems with the same profile).
        """
        return self._scheduler.stats()

    def close(self) -> None:
        """Wait for transfers on their way, and close. Their futures keep results and failures."""
        if self._file is None:
            return
        if self._scheduler.belongs_to_this_process():
            for future in self._pending:
                future._request.wait(None)
                future.done()  # sees the end while the arrays are as they were
            if self._own_scheduler:
                close_scheduler(self._scheduler)
            else:
                self._scheduler.reap()
        self._pending.clear()
        file, self._file = self._file, None
        if file.retire(60):
            file.close()

    def __enter__(self) -> File:
        self._open_file()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.File {self._path!r}>"

    def _open_file(self, *, reading: bool = False, writing: bool = False) -> _core.File:
        if self._file is None:
            raise ValueError(f"the file {self._path!r} is closed")
        if reading and not self._file.readable:
            raise ValueError(f"the file {self._path!r} was not opened for reading")
        if writing and not self._file.writable:
            raise ValueError(f"the file {self._path!r} was not opened for writing")
        return self._file

    def _track(self, future: Future) -> Future:
        # Those that are done need no waiting for; looking every so often keeps the list short.
        if len(self._pending) >= 256:
            self._pending = [pending for pending in self._pending if not pending.done()]
        self._pending.append(future)
        return future


def positive(value: int, name: str, maximum: int = (1 << 31) - 1) -> int:
    """Return an argument that must be an integer from 1 on."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} is no integer")
    value = operator.index(value)
    if not 1 <= value <= maximum:
        raise ValueError(f"{name}: {value} is not between 1 and {maximum}")
    return value
