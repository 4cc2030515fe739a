"""Files and functions: read and write arrays by path, blocking or with futures."""

from __future__ import annotations

import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from tensorferry import _core, runtime
from tensorferry.arrays import memory_or_segments
from tensorferry.runtime import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    AnyScheduler,
    close_scheduler,
    default_scheduler,
    make_scheduler,
    scheduler_of,
    warn_of_left_behind,
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
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tensorferry.checksums import Checksums
    from tensorferry.futures import Future

_Array = TypeVar("_Array")

Priority: TypeAlias = "Literal['normal', 'background']"

# Beyond these a queue has more memory than I/O in it.
MAX_QUEUE_DEPTH = 32768
MAX_BLOCK_NBYTES = 1 << 30

# Looks after its transfers' progress, when a file is closed.
_SLICE_SECONDS = 1.0


def write(
    path: Path,
    array: Any,
    offset: int = 0,
    *,
    truncate: bool = False,
    sync: bool = False,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> None:
    """Write an array's bytes to a file, or those of several arrays, one after the other.

    Parameters
    ----------
    path : str, bytes or PathLike
        Created if missing, with mode 0666 less the umask.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Any dtype and shape, in host memory or on an NVIDIA GPU. One of torch's or NumPy's that is not
        contiguous is copied first. Or any iterable of such: many small ones are as fast as one large one.
    offset : int
        Where in the file to begin, in bytes. Bytes of the file before and behind stay as they are.
    truncate : bool
        After success, end the file behind the last byte written. Without it a longer file stays as long.
    sync : bool
        Return only when data and size would survive a power cut (fdatasync), and the name, where this process made it
        (fsync of the directory). What fails in this, or in closing the file, is raised.
    direct : "auto", True or False
        "auto" and True write past the page cache (O_DIRECT), "auto" only where the file system can; False goes
        through the page cache.
    priority : "normal" or "background"
        Work in the background is done where there is nothing else to do: its blocks come after those of all others.
    checksums : Checksums, optional
        Has CRC-32s of what was written, afterwards.

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
    _, memory = memory_or_segments(array, writable=False)
    transfer(
        default_scheduler(),
        path,
        memory,
        checked_offset(offset, memory[1]),
        write=True,
        direct=direct_mode(direct),
        truncate=truncate,
        sync=sync,
        background=in_background(priority),
        checksums=checksums,
    )


def read(
    path: Path,
    array: _Array,
    offset: int = 0,
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> _Array:
    """Fill an array, or several one after the other, with bytes of a file, and return what was given.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file to read.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Contiguous and writable, of any dtype and shape, in host memory or on an NVIDIA GPU; all of it is filled.
        Or any iterable of such, and of integers: so many bytes of the file are passed over. What cannot be gone
        through twice is returned as a list. No two arrays may share memory.
    offset : int
        Where in the file to begin, in bytes.
    direct : "auto", True or False
        "auto" reads past the page cache (O_DIRECT) but takes from it what it holds; True never looks there; False
        always goes through it.
    priority : "normal" or "background"
        As for :func:`write`.
    checksums : Checksums, optional
        Compares what is read before any of it reaches an array, or has its CRC-32s afterwards.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable; nothing was touched.
    ChecksumError
        Some chunk is not what was expected.
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
    array, memory = memory_or_segments(array, writable=True)
    transfer(
        default_scheduler(),
        path,
        memory,
        checked_offset(offset, memory[1]),
        write=False,
        direct=direct_mode(direct),
        background=in_background(priority),
        checksums=checksums,
    )
    return array


def write_many(
    items: Sequence[tuple[Any, ...]],
    *,
    truncate: bool = False,
    sync: bool = False,
    direct: Direct = "auto",
    priority: Priority = "normal",
) -> None:
    """Write many arrays, all outstanding at once, and return when all are written.

    Parameters
    ----------
    items : sequence of (path, array) or (path, array, offset)
        Pieces of one file may be given in any order; where they overlap, the later one wins.
    truncate : bool
        End each file behind the last byte that this call writes to it, if all of its pieces have been written.
    sync, direct, priority
        As for :func:`write`. Each file is synced once, whatever the number of its pieces.

    Raises
    ------
    ValueError, TypeError
        An item is not usable; nothing was touched.
    StorageError
        The failure of the first item that failed; the message counts further ones, and ``others`` has them. Items that
        did not fail have been written.
    """
    transfer_many(
        default_scheduler(),
        items,
        write=True,
        direct=direct_mode(direct),
        truncate=truncate,
        sync=sync,
        background=in_background(priority),
    )


def read_many(
    items: Sequence[tuple[Any, ...]],
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
) -> None:
    """Fill many arrays, all outstanding at once, and return when all are full.

    Parameters
    ----------
    items : sequence of (path, array) or (path, array, offset)
        A path that comes again is opened once.
    direct, priority
        As for :func:`read`.

    Raises
    ------
    ValueError, TypeError
        An item is not usable; nothing was touched.
    StorageError
        The failure of the first item that failed; the message counts further ones, and ``others`` has them.
    """
    transfer_many(
        default_scheduler(),
        items,
        write=False,
        direct=direct_mode(direct),
        background=in_background(priority),
    )


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
                    DEFAULT_BLOCK_NBYTES if block_size is None else block_size,
                    "block_size",
                    MAX_BLOCK_NBYTES,
                ),
                positive(
                    DEFAULT_QUEUE_DEPTH if queue_depth is None else queue_depth,
                    "queue_depth",
                    MAX_QUEUE_DEPTH,
                ),
                1,
                False,
            )
        else:
            scheduler = default_scheduler()
        # Weak: the core keeps those on their way, and nobody need keep the others' arrays.
        self._pending: list[weakref.ref[Future[Any]]] = []
        self._look_at = 256
        self._lock, self._closing = threading.Lock(), threading.RLock()
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

    def read(
        self,
        array: _Array,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> _Array:
        """Fill an array, or several, from ``offset`` (bytes) on, and return what was given. See :func:`read`."""
        return self._transfer(array, offset, priority, checksums, write=False)

    def write(
        self,
        array: Any,
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> None:
        """Write an array, or several, at ``offset`` (bytes). See :func:`tensorferry.write`."""
        self._transfer(array, offset, priority, checksums, write=True, sync=sync)

    def read_into(
        self,
        array: _Array,
        offset: int = 0,
        *,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[_Array]:
        """Begin to fill an array, or several, from ``offset`` (bytes) on.

        Returns
        -------
        Future
            Its result is what was given.
        """
        return self._start(array, offset, priority, checksums, write=False)

    def write_from(
        self,
        array: _Array,
        offset: int = 0,
        *,
        sync: bool = False,
        priority: Priority = "normal",
        checksums: Checksums | None = None,
    ) -> Future[_Array]:
        """Begin to write an array, or several, at ``offset`` (bytes). Do not change any before the future is done.

        Returns
        -------
        Future
            Its result is what was given.
        """
        return self._start(array, offset, priority, checksums, write=True, sync=sync)

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
        """Wait for transfers on their way, and close. Their futures keep results and failures.

        Where nothing moves for 60 seconds it gives up, with a ``RuntimeWarning``; arrays stay referenced all the same.
        """
        if not self._scheduler.belongs_to_this_process():
            self._file = None
            return
        with self._closing:  # who comes second returns when all is done, too
            file, self._file = self._file, None
            if file is None:
                return
            try:
                left = self._finish(file)
            except BaseException:  # Ctrl-C: to be closed again
                self._file = file
                raise
            if self._own_scheduler:
                close_scheduler(self._scheduler, patient=not left)
            else:
                self._scheduler.reap()
                if left:
                    warn_of_left_behind(f"outstanding transfers of {self._path!r}")
            if not left:
                file.close()

    def _finish(self, file: _core.File) -> bool:
        """Wait for transfers, others' blocking calls among them; return whether some were given up."""
        with self._lock:
            pending, self._pending = self._pending, []
        try:
            for reference in pending:
                future = reference()
                if future is None:
                    continue
                if not _patiently(future._request.wait, self._scheduler):
                    return True
                future.done()  # sees the end while the array is as it was
            return not _patiently(file.retire, self._scheduler)
        except BaseException:
            with self._lock:
                self._pending[:0] = pending
            raise

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
        array, memory = memory_or_segments(array, writable=not write)
        transfer(
            self._scheduler,
            file,
            memory,
            checked_offset(offset, memory[1]),
            write=write,
            sync=sync,
            background=in_background(priority),
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
        array, memory = memory_or_segments(array, writable=not write)
        offset = checked_offset(offset, memory[1])
        future = start(
            self._scheduler,
            file,
            array,
            memory,
            offset,
            write=write,
            sync=sync,
            background=in_background(priority),
            checksums=checksums,
        )
        future._about = ("writing" if write else "reading", self._path, offset, memory[1])
        with self._lock:
            # Those that are done need no waiting for; looking every so often keeps the list short.
            if len(self._pending) >= self._look_at:
                self._pending = [
                    pending
                    for pending in self._pending
                    if (known := pending()) is not None and not known.done()
                ]
                self._look_at = 2 * len(self._pending) + 256
            self._pending.append(weakref.ref(future))
        return future


def _patiently(step: Callable[[float], bool], scheduler: AnyScheduler) -> bool:
    """Take steps, of so many seconds each, until one returns True; False where the scheduler moves nothing for long."""
    # Steps are counted, since the clock goes on while the process is stopped (SIGSTOP, a frozen container).
    step_seconds = min(_SLICE_SECONDS, runtime.CLOSE_PATIENCE_SECONDS / 10)
    seen, left = None, 0.0
    while not step(step_seconds):
        moved = _moved(scheduler)
        left = runtime.CLOSE_PATIENCE_SECONDS if moved != seen else left - step_seconds
        if left <= 0:
            return False
        seen = moved
    return True


def _moved(scheduler: AnyScheduler) -> object:
    """Return what changes as long as blocks end."""
    counted = scheduler.stats()
    return [counted[name] for name in ("read_nbytes", "written_nbytes", "failed_requests")]


def in_background(priority: Priority) -> bool:
    """Return whether a transfer comes after all that are not in the background."""
    if priority not in ("normal", "background"):
        raise ValueError(f'priority: {priority!r} is neither "normal" nor "background"')
    return priority == "background"


def positive(value: int, name: str, maximum: int = (1 << 31) - 1) -> int:
    """Return an argument that must be an integer from 1 on."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} is no integer")
    value = operator.index(value)
    if not 1 <= value <= maximum:
        raise ValueError(f"{name}: {value} is not between 1 and {maximum}")
    return value
