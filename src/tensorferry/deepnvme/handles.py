"""DeepNVMe's handle on tensorferry's core: the same names, argument order and meaning; errors raise exceptions.

An operation is one asynchronous call. It is pending until :meth:`aio_handle.wait` counts it. A validation compares the
buffer of a transfer with the file afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import (
    Path,
    absolute_path,
    checked_descriptor,
    checked_offset,
)
from tensorferry.errors import StorageError, first_error
from tensorferry.transfer.arrays import LEGACY_STREAM, Memory, memory_of
from tensorferry.transfer.memory import elements_like, free_locked_tensor, is_pinned, locked_tensor
from tensorferry.transfer.requests import start, text_of, transfer
from tensorferry.transfer.runtime import (
    close_scheduler,
    default_scheduler,
    make_scheduler,
)
from tensorferry.transfer.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from tensorferry import _core
    from tensorferry.transfer.futures import Future

# Slices of a buffer at multiples of this alignment need no copy on any drive.
_ALIGNMENT = 4096

# The number of bytes that a validation compares at a time.
_CHUNK_NBYTES = 8 << 20


class aio_handle:  # noqa: N801  DeepNVMe's name
    """DeepNVMe's ``aio_handle``: read and write tensors, blocking or asynchronously.

    Parameters
    ----------
    block_size : int
        The number of bytes in one submission to the kernel, rounded up to the file system's requirement; 1 MiB by
        default. With the default, large transfers use blocks of 4 MiB if this keeps the queue full.
    queue_depth : int
        The maximum number of blocks in flight for each worker; 128 by default. The queue depth times the block size is
        the maximum number of bytes in flight for each worker.
    single_submit : bool
        Use one system call for each block. This costs time and is meant for comparisons.
    overlap_events : bool
        Accepted and reported, without effect: queues are always refilled as blocks complete.
    intra_op_parallelism : int
        The number of workers: threads with a queue each, which share the blocks of all requests; 1 by default. It need
        not divide any size. One worker is enough for one drive with aligned memory; more workers copy unaligned memory
        faster.
    num_threads : int, optional
        The name of ``intra_op_parallelism`` in older DeepSpeed versions.
    engine : str, optional
        "io_uring", "libaio" or "threads". By default the value of the environment variable TENSORFERRY_ENGINE, or the
        first engine that works.

    Raises
    ------
    ValueError
        An argument is out of range.
    EngineUnavailableError
        The requested engine does not work on this machine; the message has the reason and the remedy.

    Notes
    -----
    Tensors must be contiguous; they may have any dtype and shape and any address, pinned or not. File offsets and sizes
    are arbitrary. ``filename`` is a ``str``, ``bytes``, ``PathLike`` or an open file descriptor, which remains
    the caller's. A write creates a missing file and never shortens an existing one. Buffers of asynchronous calls are
    kept alive until the calls are complete; do not change them before that.

    Tensors, and arrays of other libraries, may be on NVIDIA GPUs. They are copied through a few pinned bounce buffers
    of the process: copies and I/O overlap, and host memory of the tensor's size is not needed. A transfer starts after
    all work that was queued on the current stream of the tensor's device before the call; the call itself does not wait
    for that work. Once the transfer has ended, work queued on any stream sees the bytes read. A tensor may be deleted
    meanwhile. If its storage is resized, its memory is lost, and a ``StorageError`` with ``EFAULT`` is raised.

    Every transfer moves exactly the requested bytes or raises an exception: :class:`tensorferry.StorageError` with
    path, offset, errno and bytes moved, :class:`tensorferry.ShortReadError` if the file is too short, ``ValueError`` or
    ``TypeError`` before any I/O.

    A setting that is not given is the value of its environment variable (TENSORFERRY_BLOCK_SIZE,
    TENSORFERRY_QUEUE_DEPTH, TENSORFERRY_INTRA_OP_PARALLELISM, TENSORFERRY_ENGINE), or the default.

    A file descriptor that is passed as ``filename`` remains unchanged, with its ``flock`` and ``F_OFD_SETLK`` locks.
    ``F_SETLK`` and ``lockf`` locks belong to the process: POSIX releases them whenever the process closes any
    descriptor of the file. Every operation does so at its end, because it opens the file separately, even if a
    descriptor was passed. To keep such locks, use a file of ``tensorferry.open``, which stays open until it is closed.

    Any number of threads may use a handle. A child of ``fork()`` must create its own. Deleting a handle waits for its
    outstanding transfers.

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
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int | None = None,
        *,
        num_threads: int | None = None,
        engine: str | None = None,
    ) -> None:
        if num_threads is not None:
            if intra_op_parallelism not in (None, 1, num_threads):
                raise ValueError(
                    "num_threads: another name of intra_op_parallelism, so both must be equal "
                    f"(got {num_threads!r} and {intra_op_parallelism!r})"
                )
            intra_op_parallelism = num_threads
        self._settings = Settings.of(
            *(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism),
            engine=engine,
        )
        # Reentrant, because a signal handler may use the handle while its thread holds a lock.
        self._lock, self._closing = threading.RLock(), threading.RLock()
        self._pending: list[_Operation] = []
        # For each wait() that has not returned, its operations. The key is the id() of that list.
        self._awaited: dict[int, list[_Operation]] = {}
        self._scheduler = self._make_scheduler()

    def _make_scheduler(self) -> _core.Scheduler:
        """Start workers with the handle's settings."""
        return make_scheduler(self._settings)

    # Transfers

    def read(
        self, buffer: Any, filename: Path | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Fill a buffer from a file and return 0.

        With ``validate``, compare the buffer with the file afterwards, and raise StorageError (EIO) if they differ.
        """
        self._transfer(buffer, filename, file_offset, False, validate)
        return 0

    def write(
        self, buffer: Any, filename: Path | int, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write a buffer to a file and return 0.

        With ``validate``, compare the buffer with the file afterwards, and raise StorageError (EIO) if they differ.
        """
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
            Compare the buffer with the file afterwards. For asynchronous calls :meth:`wait` does this.
        async_ : bool
            Return immediately. DeepNVMe's name is ``async``: pass it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            0 if asynchronous, else as for :meth:`sync_pread`.
        """
        return self._transfer_or_start(
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
        return self._transfer_or_start(
            buffer, filename, file_offset, True, validate, _async_of(async_, keywords)
        )

    def sync_pread(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Fill a buffer from a file.

        Parameters
        ----------
        buffer : torch.Tensor or any other array
            A contiguous and writable array; all of it is filled.
        filename : str, bytes, PathLike or int
            A path, or an open file descriptor.
        file_offset : int
            The file position of the first byte.

        Returns
        -------
        int
            The number of completed operations: 1, plus all that were pending on this handle.

        Raises
        ------
        ShortReadError
            The file ends before the buffer is full.
        StorageError
            A system call failed.
        ValueError, TypeError
            An argument is invalid; nothing was changed.
        """
        return self._transfer_or_start(buffer, filename, file_offset, False, False, False)

    def sync_pwrite(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Write a buffer to a file, which is created if missing and never shortened.

        Parameters, result and exceptions are those of :meth:`sync_pread`.
        """
        return self._transfer_or_start(buffer, filename, file_offset, True, False, False)

    def async_pread(self, buffer: Any, filename: Path | int, file_offset: int = 0) -> int:
        """Start to fill a buffer from a file, and return 0; :meth:`wait` counts the operation.

        Problems that are detected immediately (a missing or too short file, invalid arguments) raise an exception here
        and are not counted.
        """
        return self._transfer_or_start(buffer, filename, file_offset, False, False, True)

    def async_pwrite(
        self,
        buffer: Any,
        filename: Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Start to write a buffer to a path or an open descriptor, and return 0; :meth:`wait` counts the operation.

        As in DeepNVMe, a write never shortens a file: a longer file keeps the bytes after the range. Problems that
        are detected immediately (a missing directory, a full drive, invalid arguments) raise an exception here and are
        not counted. ``fd`` is DeepNVMe's keyword for a descriptor; pass either it or ``filename``.
        """
        target = fd if filename is None else filename
        if target is None or (fd is not None and filename is not None):
            raise TypeError("filename, fd: exactly one of them must be given")
        return self._transfer_or_start(buffer, target, file_offset, True, False, True)

    def wait(self) -> int:
        """Wait for all pending operations.

        Each operation is counted by exactly one call, from any thread. A call also waits for the operations that a
        concurrent call of another thread will count, and raises their errors, too. A call that is interrupted
        (KeyboardInterrupt) leaves its operations pending for the next call.

        Returns
        -------
        int
            The number of completed operations; 0 if none was pending.

        Raises
        ------
        StorageError
            The first error in the order of submission, after all operations have ended; ``error.others`` has the
            others. The handle remains usable.
        """
        self._scheduler.check_usable()
        return self._wait()

    def _wait(self) -> int:
        operations: list[_Operation] = []
        failures = []
        try:  # a KeyboardInterrupt may arrive between any two lines
            with self._lock:
                in_other_waits = [one for counted in self._awaited.values() for one in counted]
                operations, self._pending = self._pending, []
                self._awaited[id(operations)] = operations
            for operation in in_other_waits:
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
            raise first_error(failures, "operations")
        return len(operations)

    # Memory

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any:
        """Return a tensor that can be transferred to and from files without a copy.

        Parameters
        ----------
        num_elem : int
            The number of elements.
        example_tensor : torch.Tensor
            A tensor with the dtype. DeepNVMe's ``aio_handle`` spells the keyword ``example_tenosr``; both spellings
            work.

        Returns
        -------
        torch.Tensor
            A one-dimensional tensor of zeros, page-aligned and page-locked. Beyond RLIMIT_MEMLOCK it is not locked, and
            a warning is emitted once. If the process already uses CUDA, the memory is registered with it; see
            :func:`tensorferry.empty`. The memory is freed with the last tensor that shares it, independently of the
            handle.

        Raises
        ------
        MemoryError
            The system cannot allocate the memory.
        """
        example = example_tensor if example_tensor is not None else example_tenosr
        return locked_tensor(*elements_like(num_elem, example))[0]

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Unlock a tensor of :meth:`new_cpu_locked_tensor`, or a view with the same first byte.

        Returns
        -------
        bool
            False for any other tensor, or if it was unlocked before. The memory is freed with the last tensor that
            shares it, so a later use is safe.
        """
        return free_locked_tensor(tensor)

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer is page-locked by torch, tensorferry or CUDA; False for GPU memory."""
        return is_pinned(buffer)

    # Settings

    def get_block_size(self) -> int:
        """Return the block size in bytes."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Return the queue depth."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Return whether each block has its own system call."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Return ``overlap_events``, as passed."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers."""
        return self._settings.intra_op_parallelism

    def get_thread_count(self) -> int:
        """Return the number of workers; the older name of :meth:`get_intra_op_parallelism`."""
        return self._settings.intra_op_parallelism

    def get_alignment(self) -> int:
        """Return an alignment in bytes: aligned slices of locked memory need no copy on any drive.

        Use it to lay out buffers. Other offsets work, too.
        """
        return _ALIGNMENT

    @property
    def engine(self) -> str:
        """The engine in use: "io_uring", "libaio" or "threads"."""
        return self._scheduler.engine

    @property
    def engine_refusals(self) -> dict[str, str]:
        """The engines that were tried first and do not work, each with the reason and the remedy."""
        return dict(self._scheduler.refusals)

    def stats(self) -> dict[str, Any]:
        """Return counters since the handle was created.

        Returns
        -------
        dict
            ``engine``; ``requests`` and ``failed_requests``; ``read_nbytes`` and ``written_nbytes``;
            ``direct_nbytes``, ``bounced_nbytes`` and ``buffered_nbytes``, by the way in which the bytes were
            transferred; ``touched_nbytes``, read into memory that had no pages before; ``gpu_nbytes``, from and to GPU
            memory, and among these ``gds_nbytes``, by GPUDirect Storage; ``engine_blocks``, moved by the engine, and
            ``inline_blocks``, moved without it by the calling thread or from the page cache; ``resumed_blocks`` after
            short reads and writes, and ``retried_blocks`` after EINTR and EAGAIN;
            ``block_latency_microseconds`` with p50, p90, p99 and p99.9.
        """
        return self._scheduler.stats()

    # Lifetime

    def close(self) -> None:
        """Wait for outstanding operations, end the workers, and warn of errors that no :meth:`wait` has raised.

        If no byte moves for 60 seconds, stop waiting and emit a warning; the buffers stay referenced. A call that is
        interrupted (KeyboardInterrupt) can be repeated; until then the handle accepts no new operations.
        """
        self._close(interruptible=True)

    def _close(self, *, interruptible: bool = False) -> None:
        if not hasattr(self, "_scheduler") or not self._scheduler.belongs_to_this_process():
            return
        # A second thread that calls close() also returns only when the handle is closed.
        with self._closing:
            close_scheduler(self._scheduler, interruptible=interruptible)
            self._release_resources()
            with self._lock:
                operations, self._pending = self._pending, []
            for operation in operations:
                # Do not wait for an operation that has not ended: close_scheduler() has waited until its time limit.
                failure = operation.failure() if operation.future.done() else "it has not ended"
                if failure is not None:
                    warn(
                        f"a handle was closed before wait() reported {operation}: {failure}",
                        operation.future._begun_at,
                    )

    def _release_resources(self) -> None:
        """Release the handle's other resources; called when no transfer is in flight."""

    def __repr__(self) -> str:
        if not hasattr(self, "_scheduler"):
            return f"<tensorferry.{type(self).__name__}: not initialized>"
        settings = self._settings.as_deepspeed()
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        try:
            self._scheduler.check_usable()
        except ValueError:
            state = "closed"
        except RuntimeError:
            state = "of the parent process"
        else:
            state = f"{self._scheduler.engine}, {len(self._pending)} pending"
        return f"<tensorferry.{type(self).__name__}({given}): {state}>"

    def __copy__(self) -> Self:
        return self  # the finalizer of a copy would close the workers of the original

    def __enter__(self) -> Self:
        self._scheduler.check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the exit handler has waited for all transfers by then
            self._close()

    def _transfer_or_start(
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
        check = _Validation(memory, filename, offset) if validate else None
        future = start(
            self._scheduler, filename, buffer, memory, offset, write=write, name="filename"
        )
        operation = _Operation(future, filename, offset, check)
        with self._lock:
            self._pending.append(operation)
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
    """An asynchronous call that wait() has not counted yet."""

    __slots__ = ("_check", "_filename", "_offset", "future")

    def __init__(
        self, future: Future, filename: Path | int, offset: int, check: _Validation | None
    ) -> None:
        self.future = future
        self._check = check
        self._filename = filename
        self._offset = offset

    def __str__(self) -> str:
        return f"the transfer at offset {self._offset} of {self._filename!r}"

    def failure(self) -> StorageError | None:
        """Return the operation's error, or None if it succeeded; the operation must have ended."""
        failure = self.future.exception()
        return self._check.failure() if failure is None and self._check is not None else failure


class _Validation:
    """The validation that wait() makes of an asynchronous call.

    It finds the same file even if the process changes its directory, or the caller closes the descriptor, meanwhile.
    """

    __slots__ = ("_file", "_filename", "_memory", "_offset")

    def __init__(self, memory: Memory, filename: Path | int, offset: int) -> None:
        self._memory, self._offset = memory, offset
        self._file: str | int = ""
        try:
            if isinstance(filename, int):
                self._file = os.dup(checked_descriptor(filename, "filename"))
            else:
                self._file = absolute_path(filename, "filename")
        except OSError as error:  # e.g. the current directory was deleted
            raise StorageError(error.errno, str(error.strerror), text_of(filename)) from None
        self._filename = text_of(filename if isinstance(filename, int) else self._file)

    def __del__(self) -> None:
        if isinstance(self._file, int):
            os.close(self._file)

    def failure(self) -> StorageError | None:
        """Return an error if the file cannot be read or differs from the buffer, else None."""
        try:
            _compare(self._memory, self._file, self._offset)
        except StorageError as difference:
            difference.filename = self._filename
            return difference
        except OSError as error:  # e.g. the file was removed; an exception would hide the other operations' errors
            return StorageError(
                error.errno,
                f"validation failed: {error.strerror}",
                self._filename,
                offset=self._offset,
                expected=self._memory[1],
                transferred=self._memory[1],
            )
        return None


def _async_of(async_: bool | None, keywords: dict[str, bool]) -> bool:
    given = keywords.pop("async", async_)
    if keywords:
        raise TypeError(f"unexpected keyword argument {next(iter(keywords))!r}")
    if given is None:
        raise TypeError("missing argument 'async'")
    return bool(given)


def _compare(memory: Memory, filename: Path | int, offset: int) -> None:
    """Raise a StorageError with EIO if file and memory differ.

    The file is read with pread(), because an error of tensorferry's own reads could hide the difference.
    """
    # A descriptor is reopened through /proc, because one that was opened for writing cannot be read.
    path = text_of(filename)
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


def _chunks(memory: Memory) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) for each chunk of an array."""
    address, nbytes, owner, location = memory
    pieces = [(at, min(_CHUNK_NBYTES, nbytes - at)) for at in range(0, nbytes, _CHUNK_NBYTES)]
    if location is None:
        everything = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        yield from ((begin, everything[begin : begin + count]) for begin, count in pieces)
        return
    # Copy GPU memory of any library to the host by writing it to a file in memory. The transfer that is validated has
    # already waited for the array's stream, which may no longer exist. Therefore this copy names the legacy stream.
    device, _ = location
    copy = os.memfd_create("tensorferry-validation")
    try:
        for begin, count in pieces:
            part = (address + begin, count, owner, (device, LEGACY_STREAM))
            transfer(default_scheduler(), copy, part, 0, write=True)
            yield begin, memoryview(os.pread(copy, count, 0))
    finally:
        os.close(copy)
