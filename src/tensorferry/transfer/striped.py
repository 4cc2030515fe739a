"""One logical file over several drives, striped like RAID 0; each drive has its own queue.

With ``n`` files and stripes of ``s`` bytes, stripe ``k``, which is bytes ``[k * s, (k + 1) * s)`` of the logical file,
is stored in file ``k % n`` at offset ``(k // n) * s``. The files have no header and no padding. Therefore a range of
the logical file is one range in each file, and a transfer consists of at most one part for each file. The segments of a
part are the pieces of the caller's memory that are stored in that file, and gaps: bytes of the file that the caller
skips. A row is one stripe of each file.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from errno import ECANCELED, EIO, EOPNOTSUPP
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tensorferry import _core
from tensorferry.base.checks import Direct, Path, checked_offset, checked_path, direct_mode, integer
from tensorferry.base.reprs import safe_repr
from tensorferry.errors import ShortReadError, StorageError, first_error, memory_moved
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import AnyMemory, has_moved, memory_or_segments
from tensorferry.transfer.files import (
    File,
    TransferMethods,
    mode_flags,
    remove_created,
    scheduler_for_settings,
)
from tensorferry.transfer.futures import Future, PendingFutures
from tensorferry.transfer.requests import submit_one, transfer, write_segments
from tensorferry.transfer.runtime import (
    automatic_scheduler,
    scheduler_of,
    wait_while_progressing,
    with_descriptors,
)
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.transfer.arrays import Location
    from tensorferry.transfer.files import How
    from tensorferry.transfer.runtime import AnyScheduler

_Array = TypeVar("_Array")

DEFAULT_STRIPE_NBYTES = 1 << 20
STRIPE_GRANULARITY = 4096
MAX_STRIPE_NBYTES = 1 << 30

# Smaller ranges are written without a reservation, as they are in a single file (csrc/transfer/reservation.h).
_MIN_RESERVED_NBYTES = 64 << 10


class Layout(NamedTuple):
    """The mapping from offsets in the logical file to its files and the offsets in them."""

    stripe_nbytes: int
    file_count: int

    def nbytes_in(self, index: int, nbytes: int) -> int:
        """Return how many of the first ``nbytes`` bytes of the logical file are stored in file ``index``.

        They are the first bytes of that file. Therefore the result is also the offset in file ``index`` at which the
        part of the logical file from offset ``nbytes`` on begins.
        """
        rows, rest = divmod(nbytes, self.stripe_nbytes * self.file_count)
        in_row = min(max(rest - index * self.stripe_nbytes, 0), self.stripe_nbytes)
        return rows * self.stripe_nbytes + in_row

    def offset_of(self, index: int, offset: int) -> int:
        """Return the offset in the logical file that corresponds to ``offset`` in file ``index``."""
        row, within = divmod(offset, self.stripe_nbytes)
        return (row * self.file_count + index) * self.stripe_nbytes + within

    def file_of(self, offset: int) -> int:
        """Return the index of the file that stores the byte at an offset of the logical file."""
        return offset // self.stripe_nbytes % self.file_count


class StripedFile(TransferMethods):
    """An open file that is striped over several drives, made by :func:`tensorferry.open` for a list of paths.

    It is used like a :class:`File`: any number of threads may use it, with any number of outstanding transfers, and
    closing waits for them. Each path has its own queue and workers. ``checksums`` are not supported. A write with
    ``sync`` also makes the names of all paths durable. A write beyond the end of the file fills the gap with zeros.

    Notes
    -----
    With ``n`` paths and stripes of ``s`` bytes, bytes ``[k * s, (k + 1) * s)`` of the file are stored in path
    ``k % n`` at offset ``(k // n) * s``. Nothing else is stored: the caller must record the paths, their order and
    ``stripe_nbytes``. If a drive is lost, its stripes are lost.

    In a :class:`StorageError` ``filename`` is the path on the drive that failed. ``offset``, ``expected`` and
    ``transferred`` refer to the logical file; the message has both offsets.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        mode: str = "r",
        *,
        stripe_nbytes: int | None = None,
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        how = mode_flags(mode)
        names = [checked_path(path, f"path[{index}]") for index, path in enumerate(paths)]
        if not names:
            raise ValueError("path: expected at least one path, got an empty list")
        if len({os.path.realpath(name) for name in names}) < len(names):
            raise _duplicate_path_error(names)
        stripe = DEFAULT_STRIPE_NBYTES
        if stripe_nbytes is not None:
            stripe = integer(
                stripe_nbytes, "stripe_nbytes", 1, MAX_STRIPE_NBYTES, STRIPE_GRANULARITY
            )
        self._layout = Layout(stripe, len(names))
        past_cache = direct_mode(direct)
        self._changing = threading.Condition()  # protects _submitting and _closed
        self._submitting = 0  # the number of transfers that are being submitted to the files
        self._closed = False
        self._pending = PendingFutures()
        self._files: list[File] = []
        try:
            for name in names:
                own = (
                    scheduler_for_settings(engine, block_size, queue_depth) or automatic_scheduler()
                )
                file = File.__new__(File)
                # Open without truncating. The files are truncated once all are open, so a failure loses no data.
                file._open(name, (*how[:4], False), past_cache, own, own)
                self._files.append(file)
            if len({file._open_file().identity for file in self._files}) < len(names):
                raise _duplicate_path_error(names)
            if how[4]:
                self.truncate(0)
        except BaseException:
            exclusive = how[3]
            for file in self._files:
                if exclusive:
                    remove_created(file.path, file._open_file().identity)
                file.close()
            raise
        self._paths = tuple(file.path for file in self._files)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that were opened, in their order."""
        return self._paths

    @property
    def stripe_nbytes(self) -> int:
        """The number of consecutive bytes in one path before the next path continues."""
        return self._layout.stripe_nbytes

    @property
    def size(self) -> int:
        """The current size of the logical file in bytes; valid only while no outstanding write extends it.

        Raises
        ------
        StorageError
            One of the files (``filename``) is shorter than the sizes of the others require: it is not a part of this
            file, a write failed midway, or the paths have another order or stripe size than when the file was written.
            :meth:`truncate` makes the sizes consistent.
        """
        sizes = [file.size for file in self._open_files()]
        layout = self._layout
        whole = max(
            layout.offset_of(at, size - 1) + 1 if size else 0 for at, size in enumerate(sizes)
        )
        for at, size in enumerate(sizes):
            expected = layout.nbytes_in(at, whole)
            if size != expected:
                raise StorageError(
                    EIO,
                    f"{os.strerror(EIO)} (this part of a file over {layout.file_count} paths has {size} bytes, but "
                    f"needs at least {expected}, because the sizes of the other parts require {whole} bytes in total; "
                    "likely causes: a lost or outdated drive, a write that failed, paths in another order, another "
                    "stripe_nbytes)",
                    self._paths[at],
                    offset=layout.offset_of(at, size),
                    expected=whole,
                )
        return whole

    @property
    def engine(self) -> str:
        """The name of the engine that submits the file's blocks."""
        return ", ".join(dict.fromkeys(file.engine for file in self._files))

    @property
    def closed(self) -> bool:
        """Whether the file has been closed."""
        return all(file.closed for file in self._files)

    def sync(self) -> None:
        """Make the bytes written so far and the size durable (fdatasync). Outstanding transfers are not covered."""
        self._for_each_file(self._open_files(), lambda _, file: file.sync())

    def preallocate(self, nbytes: int, offset: int = 0) -> None:
        """Extend the file to ``offset + nbytes`` bytes, and reserve space for the new bytes from ``offset`` on.

        A file that is longer already stays as it is. If a drive has too little free space, this method raises
        StorageError (ENOSPC) and changes no size. On a file system that cannot reserve space this method does nothing.
        """
        files = self._open_core_files(writing=True)
        nbytes = checked_offset(nbytes, 0, "nbytes")
        offset = checked_offset(offset, nbytes)
        self._reserve_space(files, offset, nbytes, force=True)
        for at, begin, end in self._ranges(offset, nbytes):
            with self._errors_of_file(at, nbytes):
                files[at].preallocate(begin, end - begin)

    def truncate(self, nbytes: int) -> None:
        """Set the file's size in bytes."""
        nbytes = checked_offset(nbytes, 0, "nbytes")
        self._for_each_file(
            self._open_files(writing=True),
            lambda at, file: file.truncate(self._layout.nbytes_in(at, nbytes)),
        )

    def stats(self) -> dict[str, Any]:
        """Return the counters of all paths' workers, added up; a percentile is the highest of the paths' values.

        ``files`` has the counters of each path.
        """
        every = [file.stats() for file in self._files]
        return {**summed_stats(every), "files": every}

    def close(self) -> None:
        """Wait for the outstanding transfers, and close the file. Their futures keep results and errors.

        All files are closed even if closing one of them fails; the first error is raised. See :meth:`File.close`.
        """
        hung = False
        if all(file._scheduler.belongs_to_this_process() for file in self._files):
            with self._changing:
                self._closed = True
                self._changing.wait_for(
                    lambda: self._submitting == 0, timeout=runtime.CLOSE_PATIENCE_SECONDS
                )
            hung = not self._finish()
        failure: Exception | None = None
        for file in self._files:
            try:
                # If the drives hang, _finish() has waited long enough for all of them: do not wait again for each file.
                file._close((lambda step, *_: step(0.0)) if hung else wait_while_progressing)
            except Exception as error:
                failure = failure or error
        for reference in self._pending.take():
            future = reference()
            if future is not None:
                future.done()  # checks now that the array still has its memory, before the caller can resize it
        if failure is not None:
            raise failure

    def _finish(self) -> bool:
        """Wait for all transfers; return False if none of the drives makes progress for 60 seconds."""
        files = [core for file in self._files if (core := file._file) is not None]
        schedulers = [file._scheduler for file in self._files]
        return wait_while_progressing(
            lambda seconds: all(file.retire(seconds / len(files)) for file in files), *schedulers
        )

    def __enter__(self) -> StripedFile:
        self._open_files()
        return self

    async def __aenter__(self) -> StripedFile:
        return self.__enter__()

    @safe_repr
    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.StripedFile {list(self._paths)!r}>"

    # Transfers

    def _transfer(self, array: _Array, offset: int, how: How) -> _Array:
        files, array, memory, offset = self._prepare(array, offset, how)
        write, sync, background, _ = how
        nbytes = memory[1]
        at = self._layout.file_of(offset)
        alone = [one for one, _, _ in self._ranges(offset, nbytes)] in ([], [at])
        if not alone or sync:
            parts = FileRequests(self._failure, nbytes)
            try:
                return self._start_parts(parts, files, array, memory, offset, how).result()
            except BaseException:
                # KeyboardInterrupt: blocks in flight keep the arrays referenced until they are complete.
                parts.cancel()
                raise
        # One file stores the range, and the calling thread may transfer it directly.
        if write:
            self._reserve_space(files, offset, nbytes)
        with self._errors_of_file(at, nbytes):
            transfer(
                self._files[at]._scheduler,
                files[at],
                memory,
                self._layout.nbytes_in(at, offset),
                write=write,
                background=background,
            )
        return array

    def _start(self, array: _Array, offset: int, how: How) -> Future[_Array]:
        files, array, memory, offset = self._prepare(array, offset, how)
        parts = FileRequests(self._failure, memory[1])
        future = self._start_parts(parts, files, array, memory, offset, how)
        self._pending.add(future)
        return future

    def _start_parts(
        self,
        parts: FileRequests,
        files: list[_core.File],
        array: _Array,
        memory: AnyMemory,
        offset: int,
        how: How,
    ) -> Future[_Array]:
        """Start the part of each file, and return a future for all parts."""
        future = Future(array, memory)
        self._submit_parts(parts, files, memory, offset, how, future)
        future._start(parts, lambda: self._failure_of_memory(memory, offset))
        future._is_about(how[0], ", ".join(self._paths), offset, memory[1])
        return future

    def _write_segments(self, segments: _core.Segments, offset: int, *, sync: bool) -> None:
        files, layout = self._open_core_files(writing=True), self._layout
        parts = segments.split(offset, layout.stripe_nbytes, len(files))
        with self._while_open():
            write_segments(
                [
                    (self._files[at]._scheduler, files[at], part, layout.nbytes_in(at, offset))
                    for at, part in enumerate(parts)
                    if not part.all_gaps()
                ],
                sync=sync,
            )

    def _prepare(
        self, array: _Array, offset: int, how: How
    ) -> tuple[list[_core.File], _Array, AnyMemory, int]:
        write, _, _, checksums = how
        files = self._open_core_files(reading=not write, writing=write)
        # Raises in a forked child, which must not use this file's lock.
        self._files[0]._scheduler.check_usable()
        if checksums is not None:
            raise ValueError(
                "checksums: not supported for a file over several paths, because a chunk may be on two drives "
                "(remedy: compute them from the array with zlib.crc32, or use a single file)"
            )
        array, memory = memory_or_segments(array, writable=not write)
        return files, array, memory, checked_offset(offset, memory[1])

    def _submit_parts(
        self,
        parts: FileRequests,
        files: list[_core.File],
        memory: AnyMemory,
        offset: int,
        how: How,
        owner: object,
    ) -> None:
        """Submit the part of each file. If a submission fails, cancel the others and raise."""
        write, sync, background, _ = how
        with self._while_open():
            if write:
                self._reserve_space(files, offset, memory[1])
            else:
                self._check_size(files, offset, memory[1])
            whole = memory[0]
            if isinstance(whole, int):
                whole = _core.Segments.of(whole, memory[1], memory[2], memory[3])
            segments = whole.split(offset, self._layout.stripe_nbytes, len(files))
            # With sync every file takes part, also one without bytes in the range, because its name and size must be
            # durable. An empty transfer has one file, because a request needs at least one part.
            chosen = [at for at, part in enumerate(segments) if sync or not part.all_gaps()]
            at = 0
            try:
                for at in chosen or [self._layout.file_of(offset)]:
                    begin = self._layout.nbytes_in(at, offset)
                    parts.submit(
                        *(at, self._files[at]._scheduler, files[at], segments[at], begin, owner),
                        location=memory[3],
                        write=write,
                        sync=sync,
                        background=background,
                    )
            except BaseException as error:
                parts.cancel_and_wait(error)
                if isinstance(error, StorageError):
                    raise self._failure([(at, error)], memory[1], parts.moved_nbytes()) from None
                raise

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """Keep close() waiting during the block, in which a transfer submits its parts.

        Otherwise the transfer might find some files closed after it has submitted the parts of others.
        """
        with self._changing:
            if self._closed:
                raise self._closed_error()
            self._submitting += 1
        try:
            yield
        finally:
            with self._changing:
                self._submitting -= 1
                self._changing.notify_all()

    # Sizes and space

    def _ranges(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Return (index, begin, end) for each file that stores bytes of a range of the logical file."""
        layout = self._layout
        found = [
            (at, layout.nbytes_in(at, offset), layout.nbytes_in(at, offset + nbytes))
            for at in range(layout.file_count)
        ]
        return [(at, begin, end) for at, begin, end in found if begin < end]

    def _reserve_space(
        self, files: list[_core.File], offset: int, nbytes: int, *, force: bool = False
    ) -> None:
        """Reserve the space that a write needs, on every drive before any size changes; then extend the other files.

        The other files are those that store none of the written bytes. A write beyond the end of the logical file
        leaves a hole, and these files must be extended over their part of the hole.
        """
        ranges = self._ranges(offset, nbytes)
        for at, begin, end in ranges:
            if force or (files[at].direct and end - begin >= _MIN_RESERVED_NBYTES):
                with self._errors_of_file(at, nbytes):
                    files[at].preallocate(begin, end - begin, keep_size=True)
        if not ranges or len(ranges) == len(files):
            return
        with_bytes = {at for at, _, _ in ranges}
        for at, file in enumerate(files):
            if at not in with_bytes:
                with self._errors_of_file(at, nbytes):
                    self._extend_to(at, file, offset)

    def _extend_to(self, at: int, file: _core.File, offset: int) -> None:
        """Extend one file to its part of the first ``offset`` bytes of the logical file, if it is shorter."""
        needed = self._layout.nbytes_in(at, offset)
        size = file.size()
        if size is None or size >= needed:
            return
        # Allocating the last byte sets the size and never shortens the file. ftruncate() could shorten it if another
        # process extends it concurrently.
        file.preallocate(needed - 1, 1)
        size = file.size()
        if size is not None and size < needed:
            raise StorageError(
                EOPNOTSUPP,
                f"{os.strerror(EOPNOTSUPP)} (this file system cannot reserve space, which a write beyond the end "
                "needs; remedy: first truncate() the file to its final size)",
                file.path,
            )

    def _check_size(self, files: list[_core.File], offset: int, nbytes: int) -> None:
        """Raise ShortReadError if a file ends before the range that is to be read."""
        failures: list[tuple[int, StorageError]] = []
        for at, begin, end in self._ranges(offset, nbytes):
            size = files[at].size()
            if size is None or size >= end:
                continue
            missing = max(begin, size)
            message = f"End of file (the file has {size} bytes, but the read needs {end}; nothing was read)"
            error = ShortReadError(None, message, files[at].path, offset=missing)
            failures.append((at, error))
        if failures:
            first = min(failures, key=lambda one: self._layout.offset_of(one[0], one[1].offset))
            raise self._failure([first], nbytes, 0)

    # Failures

    def _failure(
        self, failed: list[tuple[int, StorageError]], nbytes: int, moved_nbytes: int
    ) -> StorageError:
        """Return the first of several files' errors with offsets of the logical file; ``others`` has the rest."""
        found = []
        for at, error in failed:
            error = copy.copy(error)
            error.offset = self._layout.offset_of(at, error.offset)
            error.expected, error.transferred = nbytes, moved_nbytes
            found.append(error)
        # An error of a drive comes before the ECANCELED of parts that were cancelled because of it.
        found.sort(key=lambda error: (error.errno == ECANCELED, error.offset))
        first = first_error(found, "of its files")
        first.strerror = (
            f"{first.strerror}; in the file over {self._layout.file_count} paths: offset {first.offset}, "
            f"{moved_nbytes} of {nbytes} bytes moved"
        )
        return first

    @contextlib.contextmanager
    def _errors_of_file(self, at: int, nbytes: int) -> Iterator[None]:
        """Raise a StorageError of one file as an error of the logical file."""
        try:
            yield
        except StorageError as error:
            raise self._failure([(at, error)], nbytes, error.transferred) from None

    def _for_each_file(self, files: list[File], action: Callable[[int, File], None]) -> None:
        """Call ``action(index, file)`` for every file, also after a StorageError; then raise the first error."""
        failures = []
        for at, file in enumerate(files):
            try:
                action(at, file)
            except StorageError as error:
                failures.append(error.with_traceback(None))
        if failures:
            raise first_error(failures, "of its files")

    def _failure_of_memory(self, memory: AnyMemory, offset: int) -> StorageError | None:
        if not has_moved(memory):
            return None
        return memory_moved(self._paths[self._layout.file_of(offset)], offset, memory[1])

    # Open or not

    def _open_files(self, *, writing: bool = False) -> list[File]:
        self._open_core_files(writing=writing)
        return self._files

    def _open_core_files(self, *, reading: bool = False, writing: bool = False) -> list[_core.File]:
        if self._closed:
            raise self._closed_error()
        return [file._open_file(reading=reading, writing=writing) for file in self._files]

    def _closed_error(self) -> ValueError:
        return ValueError(f"the file over {list(self._paths)!r} is closed")


class FileRequests:
    """The requests of one transfer, one for each file, behind the interface of a single request (``futures.Request``).

    ``failure`` combines the errors of several files into one. Its arguments are a list of (file index, error), the
    number of bytes of the transfer and the number of bytes moved.
    """

    def __init__(
        self,
        failure: Callable[[list[tuple[int, StorageError]], int, int], StorageError],
        nbytes: int,
    ) -> None:
        self._failure = failure
        self._nbytes = nbytes
        self._parts: list[tuple[int, int, _core.Request]] = []  # index of the file, bytes, request
        self._requests: list[_core.Request] = []

    def submit(
        self,
        at: int,
        scheduler: AnyScheduler,
        file: _core.File,
        segments: _core.Segments,
        offset: int,
        owner: object,
        *,
        location: Location | None = None,
        write: bool = False,
        sync: bool = False,
        background: bool = False,
    ) -> None:
        """Submit the part of a transfer in one open file, which is file ``at``; raise if the core refuses the part."""
        served = scheduler_of(scheduler, file, write, location)
        served.check_usable()

        def submit() -> None:
            request = served.new_request(write, False, sync, False, background)
            # Recorded before the submission, which lets an interrupted call cancel it. A request that was refused is
            # removed, because it would never end.
            self._requests.append(request)
            try:
                memory = segments, segments.nbytes, None, None
                submit_one(served, request, file, memory, offset, owner)
            except Exception:
                self._requests.remove(request)
                raise
            self._parts.append((at, segments.nbytes, request))

        with_descriptors(served, submit, opens=False)

    def cancel_and_wait(self, error: BaseException) -> None:
        """Cancel all requests; wait for them, but not after KeyboardInterrupt: the core then keeps the arrays alive."""
        self.cancel()
        if isinstance(error, Exception):
            self.wait()

    def done(self) -> bool:
        """Return whether all requests have ended."""
        return all(request.done() for request in self._requests)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait, and return whether all requests have ended."""
        if timeout_seconds is None:
            return all(request.wait(None) for request in self._requests)
        end = time.monotonic() + timeout_seconds
        return all(request.wait(max(end - time.monotonic(), 0.0)) for request in self._requests)

    def cancel(self) -> None:
        """Cancel the blocks that have not started."""
        for request in self._requests:
            request.cancel()

    def exception(self) -> StorageError | None:
        """Return the combined error, or None if all requests succeeded; valid once done."""
        failed = self._failed()
        if not failed:
            return None
        # The transfer's size includes gaps, which no request moves. The bytes of gaps count as moved.
        asked = sum(nbytes for _, nbytes, _ in self._parts)
        return self._failure(failed, self._nbytes, self._nbytes - asked + self.moved_nbytes())

    def moved_nbytes(self) -> int:
        """Return the number of bytes that the requests have moved. All requests must have ended."""
        missing = sum(error.expected - error.transferred for _, error in self._failed())
        return sum(nbytes for _, nbytes, _ in self._parts) - missing

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Put ``token`` into a completion queue when the first unfinished request is done; at once if all are done."""
        waited_for = (request for request in self._requests if not request.done())
        next(waited_for, self._requests[-1]).notify(queue, token)

    def _failed(self) -> list[tuple[int, StorageError]]:
        found = [(at, request.exception()) for at, _, request in self._parts]
        return [(at, error) for at, error in found if error is not None]


def _duplicate_path_error(names: list[str]) -> ValueError:
    return ValueError(
        f"path: two paths name the same file, each part needs its own (got {names!r})"
    )
