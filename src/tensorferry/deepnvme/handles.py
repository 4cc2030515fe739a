"""DeepNVMe's handles: the same names, order and meaning, on tensorferry's core; errors are raised."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import Path, checked_offset, kept_path, positive
from tensorferry.base.warned import warn
from tensorferry.errors import StorageError, first_of
from tensorferry.transfer.arrays import LEGACY_STREAM, Memory, memory_of
from tensorferry.transfer.defaults import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    MAX_BLOCK_NBYTES,
    MAX_PARALLELISM,
    MAX_QUEUE_DEPTH,
)
from tensorferry.transfer.memory import elements_like, free_locked_tensor, is_pinned, locked_tensor
from tensorferry.transfer.requests import start, transfer
from tensorferry.transfer.runtime import (
    AnyScheduler,
    automatic_scheduler,
    close_scheduler,
    default_scheduler,
    make_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from tensorferry.transfer.futures import Future
    from tensorferry.transfer.settings import Settings

# Slices of a buffer that begin at multiples of this need no copy on any drive.
_ALIGNMENT = 4096

# What a validation compares at once.
_CHUNK_NBYTES = 8 << 20


class _Default(int):
    """A default that can be told, by identity, from the same value given by the caller."""


class _DefaultFalse(_Default):
    def __repr__(self) -> str:
        return "False"


class _Given(NamedTuple):
    """The settings a handle was made with."""

    block_size: int
    queue_depth: int
    single_submit: bool
    overlap_events: bool
    intra_op_parallelism: int


# Defaults of all handles.
BLOCK_SIZE: int = _Default(DEFAULT_BLOCK_NBYTES)
QUEUE_DEPTH: int = _Default(DEFAULT_QUEUE_DEPTH)
PARALLELISM: int = _Default(1)
SINGLE_SUBMIT: Any = _DefaultFalse()
OVERLAP_EVENTS: Any = _DefaultFalse()


class aio_handle:  # noqa: N801  DeepNVMe's name
    """Read and write tensors, blocking or asynchronously: DeepNVMe's ``aio_handle``.

    Parameters
    ----------
    block_size : int
        Bytes that one submission to the kernel carries. Rounded up to what the file system asks for. With the
        default, large transfers use 4 MiB where that keeps the queue full.
    queue_depth : int
        Blocks in flight at most, for each worker; and bytes in flight at most, in units of the block size.
    single_submit : bool
        Use one system call for each block. Costs time; for comparisons.
    overlap_events : bool
        Accepted and reported. Queues are always refilled as blocks complete.
    intra_op_parallelism : int
        Workers: threads that each drive a queue of their own and share the blocks of all requests. It need not
        divide any size. One is enough for one drive with aligned memory; more help to copy unaligned memory.
    num_threads : int, optional
        Another name for ``intra_op_parallelism``, of older DeepSpeed versions.
    engine : str, optional
        "io_uring", "libaio" or "threads"; by default the environment variable TENSORFERRY_ENGINE, or the first of
        them that works here.

    Raises
    ------
    ValueError
        An argument is out of range.
    EngineUnavailableError
        The engine asked for cannot be had here; the message says why and what helps.

    Notes
    -----
    Tensors may be of any contiguous dtype and shape, at any address, pinned or not; a file's offset and size may be
    anything. ``filename`` is a ``str``, ``bytes``, ``PathLike`` or an open file descriptor, which stays the
    caller's. Writing creates a missing file and never shortens an existing one. Buffers of asynchronous calls are
    kept alive until they are done; do not change them before.

    Tensors may be on NVIDIA GPUs, and so may arrays of other libraries. They pass through a few page-locked buffers
    of the process, so that copies and I/O overlap and no host memory of their size is needed. A transfer begins when
    what was queued on the current stream of the tensor's device before the call has been done, without waiting for it
    here; once it has ended, work that is queued on any stream sees what was read. A tensor may be freed meanwhile, but
    whose storage is resized has lost its memory: that is told by a ``StorageError`` with ``EFAULT``.

    Every transfer moves exactly the bytes asked for or raises: :class:`tensorferry.StorageError` with path, offset,
    errno and bytes moved, :class:`tensorferry.ShortReadError` where the file ends too soon, ``ValueError`` or
    ``TypeError`` before any I/O.

    A handle made without any setting uses, for each file, the profile that ``tensorferry tune`` stored for its file
    system, if there is one. Any setting given, also one equal to its default, is kept to and switches profiles off.

    A descriptor stays as it is, with the locks of ``flock`` and ``F_OFD_SETLK`` on it. Those of ``F_SETLK`` and
    ``lockf`` are the process's: POSIX has them end whenever the process closes the file, as happens at the end of each
    operation, by path too. ``tensorferry.open`` closes a file later.

    Any number of threads may use a handle. A child made by ``fork()`` must make its own. Deleting a handle finishes
    its outstanding transfers first.

    Examples
    --------
    >>> handle = tensorferry.aio_handle()
    >>> handle.async_pwrite(tensor, "/nvme/tensor.bin")
    0
    >>> handle.wait()
    1
    """

    def __init__(
        self,
        block_size: int = BLOCK_SIZE,
        queue_depth: int = QUEUE_DEPTH,
        single_submit: bool = SINGLE_SUBMIT,
        overlap_events: bool = OVERLAP_EVENTS,
        intra_op_parallelism: int = PARALLELISM,
        *,
        num_threads: int | None = None,
        engine: str | None = None,
    ) -> None:
        no_setting_given = (
            block_size is BLOCK_SIZE
            and queue_depth is QUEUE_DEPTH
            and single_submit is SINGLE_SUBMIT
            and overlap_events is OVERLAP_EVENTS
            and intra_op_parallelism is PARALLELISM
            and num_threads is None
            and engine is None
        )
        if num_threads is not None:
            if intra_op_parallelism not in (1, num_threads):
                raise ValueError(
                    f"num_threads: {num_threads} contradicts intra_op_parallelism {intra_op_parallelism}"
                )
            intra_op_parallelism = num_threads
        self._given = _Given(
            block_size=positive(block_size, "block_size", MAX_BLOCK_NBYTES),
            queue_depth=positive(queue_depth, "queue_depth", MAX_QUEUE_DEPTH),
            single_submit=bool(single_submit),
            overlap_events=bool(overlap_events),
            intra_op_parallelism=positive(
                intra_op_parallelism, "intra_op_parallelism", MAX_PARALLELISM
            ),
        )
        self._lock, self._closing = threading.Lock(), threading.RLock()
        self._pending: list[_Operation] = []
        self._awaited: dict[int, list[_Operation]] = {}  # by calls of wait() that have not returned
        self._scheduler: AnyScheduler = self._make_scheduler(engine, no_setting_given)

    def _make_scheduler(self, engine: str | None, automatic: bool) -> AnyScheduler:
        """Start workers: with the settings given, or, where ``automatic``, as file systems have been tuned."""
        if automatic:
            return automatic_scheduler()
        return make_scheduler(engine, *self._settings_of_workers())

    def _settings_of_workers(self) -> tuple[int, int, int, bool]:
        given = self._given
        return (
            given.block_size,
            given.queue_depth,
            given.intra_op_parallelism,
            given.single_submit,
        )

    # Transfers

    def read(
        self, buffer: Any, filename: Path | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Fill a buffer from a file and return 0. With ``validate``, compare it with the file afterwards."""
        self._transfer(buffer, filename, file_offset, False, validate)
        return 0

    def write(
        self, buffer: Any, filename: Path | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write a buffer to a file and return 0. With ``validate``, compare it with the file afterwards."""
        self._transfer(buffer, filename, file_offset, True, validate)
        return 0

    def pread(
        self,
        buffer: Any,
        filename: Path | int,
        validate: bool,
        async_: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Fill a buffer from a file.

        Parameters
        ----------
        buffer, filename, file_offset
            As for :meth:`sync_pread`.
        validate : bool
            Compare the buffer with the file afterwards; for asynchronous calls, in :meth:`wait`.
        async_ : bool
            Return at once. DeepNVMe calls it ``async``: give it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            0 if asynchronous, else as :meth:`sync_pread`.
        """
        return self._either(
            buffer, filename, file_offset, False, validate, _async_of(async_, keywords)
        )

    def pwrite(
        self,
        buffer: Any,
        filename: Path | int,
        validate: bool,
        async_: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Write a buffer to a file; parameters and result as for :meth:`pread`."""
        return self._either(
            buffer, filename, file_offset, True, validate, _async_of(async_, keywords)
        )

    def sync_pread(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Fill a buffer from a file.

        Parameters
        ----------
        buffer : torch.Tensor or any other array
            Contiguous and writable; all of it is filled.
        filename : str, bytes, PathLike or int
            A path, or an open file descriptor.
        file_offset : int
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            Operations completed: 1, and all that were pending on this handle.

        Raises
        ------
        ShortReadError
            The file ends before the buffer is full.
        StorageError
            A system call failed.
        ValueError, TypeError
            An argument is not usable; nothing was touched.
        """
        return self._either(buffer, filename, file_offset, False, False, False)

    def sync_pwrite(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Write a buffer to a file, which is created if missing and never shortened.

        Parameters, result and exceptions as for :meth:`sync_pread`.
        """
        return self._either(buffer, filename, file_offset, True, False, False)

    def async_pread(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Begin to fill a buffer from a file, and return 0; :meth:`wait` counts it.

        What can be known at once (a missing or too short file, bad arguments) is raised here and not counted.
        """
        return self._either(buffer, filename, file_offset, False, False, True)

    def async_pwrite(
        self,
        buffer: Any,
        filename: Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to write a buffer to a path or an open file descriptor, and return 0; :meth:`wait` counts it.

        It never shortens a file: one that is longer keeps what lies behind the buffer, as with DeepNVMe.
        What can be known at once (a missing directory, a full disk, bad arguments) is raised here and not counted.
        DeepNVMe calls a descriptor ``fd``; that keyword and ``filename`` exclude each other.
        """
        target = fd if filename is None else filename
        if target is None or (fd is not None and filename is not None):
            raise TypeError("filename, fd: exactly one of them is needed")
        return self._either(buffer, target, file_offset, True, False, True)

    def wait(self) -> int:
        """Wait for all pending operations.

        Each operation is counted by one call, whichever thread makes it; but operations that another thread's call is
        about to count are waited for, too, and their failures raised. An interrupted call (Ctrl-C) leaves them pending
        for the next.

        Returns
        -------
        int
            Operations completed; 0 if none was pending.

        Raises
        ------
        StorageError
            The first failure, in the order of submission, after all have ended; ``error.others`` has the others. The
            handle stays usable.
        """
        self._scheduler.check_usable()
        return self._wait()

    def _wait(self) -> int:
        operations: list[_Operation] = []
        failures = []
        try:  # Ctrl-C may come anywhere in it
            with self._lock:
                elsewhere = [one for counted in self._awaited.values() for one in counted]
                operations, self._pending = self._pending, []
                self._awaited[id(operations)] = operations
            for operation in elsewhere:
                if (failure := operation.future.exception()) is not None:
                    failures.append(failure)
            for operation in operations:
                operation.future.exception()
            for operation in operations:
                if (failure := operation.failure()) is not None:
                    failures.append(failure)
        except BaseException:
            with self._lock:
                self._pending[:0] = operations
            raise
        finally:
            with self._lock:
                self._awaited.pop(id(operations), None)
        self._scheduler.reap()
        if failures:
            raise first_of(failures, "operations")
        return len(operations)

    # Memory

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any:
        """Return a tensor that needs no copy on its way to or from a file.

        Parameters
        ----------
        num_elem : int
            Its number of elements.
        example_tensor : torch.Tensor
            Whose dtype it gets. DeepNVMe's ``aio_handle`` spells the keyword ``example_tenosr``; both work.

        Returns
        -------
        torch.Tensor
            One-dimensional, zeros, page-aligned and page-locked; not locked, with one warning, beyond
            RLIMIT_MEMLOCK. Where CUDA is in use already, it is registered there, too; see :func:`tensorferry.empty`.
            The memory lasts as long as a tensor shares it, whatever becomes of the handle.

        Raises
        ------
        MemoryError
            The system has no such memory.
        """
        example = example_tensor if example_tensor is not None else example_tenosr
        return locked_tensor(*elements_like(num_elem, example))[0]

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Unlock a tensor made by :meth:`new_cpu_locked_tensor`, or a view that begins where it does.

        Returns
        -------
        bool
            False if it is not such a tensor, or was freed before. The memory itself lasts until the last tensor
            that shares it is gone, so a later use is safe.
        """
        return free_locked_tensor(tensor)

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer is page-locked: by torch, by tensorferry, or by CUDA for it. GPU memory is not."""
        return is_pinned(buffer)

    # Settings

    def get_block_size(self) -> int:
        """Return the block size in bytes: as given, or of the profile that the last transfer used."""
        return self._settings().block_size

    def get_queue_depth(self) -> int:
        """Return the queue depth, as given or of the last transfer's profile."""
        return self._settings().queue_depth

    def get_single_submit(self) -> bool:
        """Return whether each block has its own system call."""
        return self._settings().single_submit

    def get_overlap_events(self) -> bool:
        """Return what was given, or stands in the last transfer's profile."""
        return self._settings().overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers, as given or of the last transfer's profile."""
        return self._settings().intra_op_parallelism

    def get_thread_count(self) -> int:
        """Return the number of workers: the older name."""
        return self._settings().intra_op_parallelism

    def get_alignment(self) -> int:
        """Return a number of bytes; at its multiples, slices of locked memory move without a copy on any drive.

        It is for laying out buffers well. Anything else works too.
        """
        return _ALIGNMENT

    @property
    def engine(self) -> str:
        """The engine in use: "io_uring", "libaio" or "threads"."""
        return self._scheduler.engine

    @property
    def engine_refusals(self) -> dict[str, str]:
        """The engines that were tried first, and for each why it could not be had and what helps."""
        return dict(self._scheduler.refusals)

    def stats(self) -> dict[str, Any]:
        """Return counters since the handle was made.

        Returns
        -------
        dict
            ``engine``; ``requests`` and ``failed_requests``; ``read_nbytes`` and ``written_nbytes``;
            ``direct_nbytes``, ``bounced_nbytes`` and ``buffered_nbytes``, which tell how they went;
            ``touched_nbytes``, read into memory that had no pages before; ``gpu_nbytes``,
            those from and to GPU memory, and of them ``gds_nbytes``, by GPUDirect Storage;
            ``engine_blocks`` and ``inline_blocks``; ``resumed_blocks`` after short reads and writes and
            ``retried_blocks`` after EINTR and EAGAIN; ``block_latency_microseconds`` with p50, p90, p99 and p99.9.
            Of a handle that looks for profiles also ``profiles``: the settings of those in use, by mount point.
        """
        return self._scheduler.stats()

    def _settings(self) -> _Given | Settings:
        scheduler = self._scheduler
        if isinstance(scheduler, _core.Scheduler):
            return self._given
        return scheduler.latest_settings() or self._given

    # Lifetime

    def close(self) -> None:
        """Finish outstanding operations and end the workers. Failures that no wait() reported are warned of.

        Where nothing moves for 60 seconds it gives up and warns; buffers stay referenced all the same. An interrupted
        call (Ctrl-C) can be repeated; meanwhile the handle takes nothing new.
        """
        self._close(interruptible=True)

    def _close(self, *, interruptible: bool = False) -> None:
        if not hasattr(self, "_scheduler") or not self._scheduler.belongs_to_this_process():
            return
        with self._closing:  # who comes second returns when all is done, too
            close_scheduler(self._scheduler, interruptible=interruptible)
            self._let_go()
            with self._lock:
                operations, self._pending = self._pending, []
            for operation in operations:
                # Not to be waited for: close_scheduler() has, and gave up.
                failure = operation.failure() if operation.future.done() else "it has not ended"
                if failure is not None:
                    warn(
                        f"a handle was closed before wait() could report {operation}: {failure}",
                        operation.future._begun_at,
                    )

    def _let_go(self) -> None:
        """Drop what belongs to the handle beside its scheduler, when no transfer is on its way any more."""

    def __repr__(self) -> str:
        if not hasattr(self, "_scheduler"):
            return f"<tensorferry.{type(self).__name__}: never made>"
        given = ", ".join(f"{name}={value!r}" for name, value in self._given._asdict().items())
        try:
            self._scheduler.check_usable()
        except ValueError:
            state = "closed"
        except RuntimeError:
            state = "of the parent process"
        else:
            state = f"{self._scheduler.engine}, {len(self._pending)} to be waited for"
        return f"<tensorferry.{type(self).__name__}({given}): {state}>"

    def __enter__(self) -> Self:
        self._scheduler.check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # all has been finished and reported by then
            self._close()

    def _either(
        self,
        buffer: Any,
        filename: Path | int,
        file_offset: int,
        write: bool,
        validate: bool,
        asynchronous: bool,
    ) -> int:
        if not asynchronous:
            self._transfer(buffer, filename, file_offset, write, validate)
            return 1 + self._wait() if self._pending else 1
        memory = memory_of(buffer, writable=not write, name="buffer")
        offset = checked_offset(file_offset, memory[1], "file_offset")
        future = start(
            self._scheduler, filename, buffer, memory, offset, write=write, name="filename"
        )
        with self._lock:
            self._pending.append(_Operation(future, memory, filename, offset, validate))
        return 0

    def _transfer(
        self, buffer: Any, filename: Path | int, file_offset: int, write: bool, validate: bool
    ) -> None:
        memory = memory_of(buffer, writable=not write, name="buffer")
        offset = checked_offset(file_offset, memory[1], "file_offset")
        transfer(self._scheduler, filename, memory, offset, write=write, name="filename")
        if validate:
            _compare(memory, filename, offset)


class _Operation:
    """An asynchronous call that wait() has not counted."""

    __slots__ = ("_filename", "_memory", "_offset", "_validate", "future")

    def __init__(
        self, future: Future, memory: Memory, filename: Path | int, offset: int, validate: bool
    ) -> None:
        self.future = future
        self._validate = validate
        self._memory = memory if validate else None
        self._filename = (
            kept_path(filename) if validate and not isinstance(filename, int) else filename
        )
        self._offset = offset

    def __str__(self) -> str:
        return f"the transfer at offset {self._offset} of {self._filename!r}"

    def failure(self) -> StorageError | None:
        """Return why it failed, or None; it must have ended."""
        failure = self.future.exception()
        if failure is None and self._memory is not None:
            try:
                _compare(self._memory, self._filename, self._offset)
            except StorageError as difference:
                return difference
            except OSError as error:  # removed meanwhile, say: others' failures must not go with it
                return StorageError(
                    error.errno,
                    f"validation failed: {error.strerror}",
                    _text_of(self._filename),
                    offset=self._offset,
                    expected=self._memory[1],
                    transferred=self._memory[1],
                )
        return failure


def _async_of(async_: bool | None, keywords: dict[str, bool]) -> bool:
    given = keywords.pop("async", async_)
    if keywords:
        raise TypeError(f"unexpected keyword argument {next(iter(keywords))!r}")
    if given is None:
        raise TypeError("missing argument 'async'")
    return bool(given)


def _compare(memory: Memory, filename: Path | int, offset: int) -> None:
    """Raise a StorageError with EIO where the file does not hold what memory does, read by other means than ours."""
    path = _text_of(filename)
    with open(path, "rb", buffering=0) as file:
        for begin, part in _chunks(memory):
            found = os.pread(file.fileno(), len(part), offset + begin)
            if found != part:
                same = next(
                    (i for i, (a, b) in enumerate(zip(found, part, strict=False)) if a != b),
                    len(found),
                )
                raise StorageError(
                    errno.EIO,
                    f"validation failed: the file differs from the buffer at offset {offset + begin + same}",
                    path,
                    offset=offset + begin + same,
                    expected=memory[1],
                    transferred=memory[1],
                )


def _text_of(filename: Path | int) -> str:
    # By number as well: a descriptor for writing cannot be read from.
    return f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fsdecode(filename)


def _chunks(memory: Memory) -> Iterator[tuple[int, memoryview]]:
    """Yield an array's bytes, piece by piece, each with where it begins."""
    address, nbytes, owner, location = memory
    pieces = [(at, min(_CHUNK_NBYTES, nbytes - at)) for at in range(0, nbytes, _CHUNK_NBYTES)]
    if location is None:
        everything = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        yield from ((begin, everything[begin : begin + count]) for begin, count in pieces)
        return
    # Any library's GPU memory can be brought here by writing it to a file: one in memory. Its stream has served, and
    # may be gone.
    device, _ = location
    copy = os.memfd_create("tensorferry-validation")
    try:
        for begin, count in pieces:
            part = (address + begin, count, owner, (device, LEGACY_STREAM))
            transfer(default_scheduler(), copy, part, 0, write=True)
            yield begin, memoryview(os.pread(copy, count, 0))
    finally:
        os.close(copy)
