"""One logical file over several drives, as RAID 0 has it: a stripe to each file in turn, each with its own queue.

With ``n`` files and stripes of ``s`` bytes, stripe ``k``, which is bytes ``[k * s, (k + 1) * s)`` of the whole, lies in
file ``k % n`` at offset ``(k // n) * s``. Nothing else is in the files: no header, no padding. So a range of the whole
is one range of each file, and a transfer is at most one transfer of each, whose segments are the pieces of the caller's
memory that belong there.
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
from tensorferry.errors import ShortReadError, StorageError, first_of, memory_moved
from tensorferry.transfer import runtime
from tensorferry.transfer.arrays import AnyMemory, memory_or_segments, moved
from tensorferry.transfer.files import (
    File,
    Transferring,
    chosen_scheduler,
    how_to_open,
    in_background,
)
from tensorferry.transfer.futures import Future, Pending
from tensorferry.transfer.requests import submit_one, transfer, write_apart
from tensorferry.transfer.runtime import (
    automatic_scheduler,
    patiently,
    scheduler_of,
    with_descriptors,
)
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.transfer.arrays import Location
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.files import Priority
    from tensorferry.transfer.runtime import AnyScheduler

_Array = TypeVar("_Array")

DEFAULT_STRIPE_NBYTES = 1 << 20
STRIPE_GRANULARITY = 4096
MAX_STRIPE_NBYTES = 1 << 30

# Smaller ranges are not reserved before they are written; the same for one file (`transfer/reservation`).
_MIN_RESERVED_NBYTES = 64 << 10


class Layout(NamedTuple):
    """Where the bytes of a logical file lie."""

    stripe_nbytes: int
    file_count: int

    def nbytes_in(self, index: int, nbytes: int) -> int:
        """Return how many of the first bytes of the logical file lie in one file, which are its first ones."""
        rows, rest = divmod(nbytes, self.stripe_nbytes * self.file_count)
        in_row = min(max(rest - index * self.stripe_nbytes, 0), self.stripe_nbytes)
        return rows * self.stripe_nbytes + in_row

    def offset_of(self, index: int, offset: int) -> int:
        """Return the offset in the logical file of an offset in one of its files."""
        row, within = divmod(offset, self.stripe_nbytes)
        return (row * self.file_count + index) * self.stripe_nbytes + within

    def file_of(self, offset: int) -> int:
        """Return which file has the byte at an offset."""
        return offset // self.stripe_nbytes % self.file_count


class StripedFile(Transferring):
    """An open file over several drives, made by :func:`tensorferry.open` of a list of paths.

    It is used as a :class:`File`: any number of threads, any number of transfers on their way, and closing waits for
    them. Each path has a queue and workers of its own. ``checksums`` are refused. With ``sync`` of a write the names of
    all paths are durable afterwards, too; beyond its end the file reads as zeros up to the ``offset`` of a write.

    Notes
    -----
    With ``n`` paths and stripes of ``s`` bytes, bytes ``[k * s, (k + 1) * s)`` of the file lie in path ``k % n`` at
    offset ``(k // n) * s``, and nothing else is stored: paths, their order and ``stripe_nbytes`` are to be remembered
    by the caller. A drive that is lost takes its stripes with it.

    In a :class:`StorageError` ``filename`` is the path on the drive that failed, and ``offset``, ``expected`` and
    ``transferred`` are of the whole file; its message has both.
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
        how = how_to_open(mode)
        names = [checked_path(path, f"path[{index}]") for index, path in enumerate(paths)]
        if not names:
            raise ValueError("path: a file needs one path at least, and this is an empty list")
        if len({os.path.realpath(name) for name in names}) < len(names):
            raise _same_file(names)
        stripe = DEFAULT_STRIPE_NBYTES
        if stripe_nbytes is not None:
            stripe = integer(
                stripe_nbytes, "stripe_nbytes", 1, MAX_STRIPE_NBYTES, STRIPE_GRANULARITY
            )
        self._layout = Layout(stripe, len(names))
        past_cache = direct_mode(direct)
        self._changing = threading.Condition()
        self._beginning = 0  # transfers of which not every part has been submitted
        self._closed = False
        self._pending = Pending()
        self._files: list[File] = []
        try:
            for name in names:
                own = chosen_scheduler(engine, block_size, queue_depth) or automatic_scheduler()
                file = File.__new__(File)
                # Cut when all are open: until then nothing of what they have is lost.
                file._open(name, (*how[:4], False), past_cache, own, own)
                self._files.append(file)
            if len({_identity(file) for file in self._files}) < len(names):
                raise _same_file(names)
            if how[4]:
                self.truncate(0)
        except BaseException:
            exclusive = how[3]
            for file in self._files:
                if exclusive:
                    _remove(file)
                file.close()
            raise
        self._paths = tuple(file.path for file in self._files)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths it was opened by, in their order."""
        return self._paths

    @property
    def stripe_nbytes(self) -> int:
        """Bytes that go to one path before it is the next one's turn."""
        return self._layout.stripe_nbytes

    @property
    def size(self) -> int:
        """The file's present size in bytes; that of the whole. Ask when no write that extends it is on its way.

        Raises
        ------
        StorageError
            One of the files (``filename``) is shorter than the others say: it is not of this file, a write failed half
            way, or the paths have another order or stripe than when it was written. :meth:`truncate` makes them fit.
        """
        sizes = [file.size for file in self._opened()]
        layout = self._layout
        whole = max(
            layout.offset_of(at, size - 1) + 1 if size else 0 for at, size in enumerate(sizes)
        )
        for at, size in enumerate(sizes):
            wanted = layout.nbytes_in(at, whole)
            if size != wanted:
                raise StorageError(
                    EIO,
                    f"{os.strerror(EIO)} (this part of a file over {layout.file_count} paths has {size} bytes and "
                    f"must have at least {wanted}, since the whole has {whole} by the others; likely causes: a lost "
                    "or older drive, a write that failed, paths in another order, another stripe_nbytes)",
                    self._paths[at],
                    offset=layout.offset_of(at, size),
                    expected=whole,
                )
        return whole

    @property
    def engine(self) -> str:
        """The engine that moves its blocks."""
        return ", ".join(dict.fromkeys(file.engine for file in self._files))

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return all(file.closed for file in self._files)

    def sync(self) -> None:
        """Make what has been written, and the size, durable (fdatasync). Transfers on their way are not covered."""
        self._each(self._opened(), lambda _, file: file.sync())

    def preallocate(self, nbytes: int, offset: int = 0) -> None:
        """Reserve space for what [offset, offset + nbytes) has beyond the present end; the file then is longer.

        A disk that has not so much left refuses at once with StorageError (ENOSPC), and no size has changed. File
        systems that cannot reserve are left alone, and so is the size there.
        """
        files = self._opened_core(writing=True)
        nbytes = checked_offset(nbytes, 0, "nbytes")
        offset = checked_offset(offset, nbytes)
        self._make_room(files, offset, nbytes, all_of_it=True)
        for at, begin, end in self._ranges(offset, nbytes):
            with self._told(at, nbytes):
                files[at].preallocate(begin, end - begin)

    def truncate(self, nbytes: int) -> None:
        """Set the file's size in bytes."""
        nbytes = checked_offset(nbytes, 0, "nbytes")
        self._each(
            self._opened(writing=True),
            lambda at, file: file.truncate(self._layout.nbytes_in(at, nbytes)),
        )

    def stats(self) -> dict[str, Any]:
        """Return the sums of the counters of all paths' workers; percentiles are the highest of any.

        ``files`` has those of each path.
        """
        every = [file.stats() for file in self._files]
        return {**summed_stats(every), "files": every}

    def close(self) -> None:
        """Wait for transfers on their way, and close. Their futures keep results and failures.

        All files are closed, whatever happens to one of them; the first failure is raised. See :meth:`File.close`.
        """
        hung = False
        if all(file._scheduler.belongs_to_this_process() for file in self._files):
            with self._changing:
                self._closed = True
                self._changing.wait_for(
                    lambda: self._beginning == 0, timeout=runtime.CLOSE_PATIENCE_SECONDS
                )
            hung = not self._finish()
        failure: Exception | None = None
        for file in self._files:
            try:
                file._close(_at_once if hung else patiently)
            except Exception as error:
                failure = failure or error
        for reference in self._pending.take():
            future = reference()
            if future is not None:
                future.done()  # sees the end while the array is as it was
        if failure is not None:
            raise failure

    def _finish(self) -> bool:
        """Wait for all transfers; return False where nothing moves any more, on whichever drive."""
        files = [core for file in self._files if (core := file._file) is not None]
        schedulers = [file._scheduler for file in self._files]
        return patiently(
            lambda seconds: all(file.retire(seconds / len(files)) for file in files), *schedulers
        )

    def __enter__(self) -> StripedFile:
        self._opened()
        return self

    async def __aenter__(self) -> StripedFile:
        return self.__enter__()

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.StripedFile {list(self._paths)!r}>"

    # Transfers

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
        files, array, memory, offset = self._prepared(array, offset, checksums, write)
        background = in_background(priority)
        nbytes = memory[1]
        at = self._layout.file_of(offset)
        alone = [one for one, _, _ in self._ranges(offset, nbytes)] in ([], [at])
        if alone and not sync:  # the calling thread may do it by itself
            if write:
                self._make_room(files, offset, nbytes)
            with self._told(at, nbytes):
                transfer(
                    self._files[at]._scheduler,
                    files[at],
                    memory,
                    self._layout.nbytes_in(at, offset),
                    write=write,
                    background=background,
                )
            return array
        parts = FileRequests(self._failure, nbytes)
        try:
            self._begin(parts, files, memory, offset, write, sync, background, memory)
            parts.wait()
        except BaseException:  # Ctrl-C: the arrays stay referenced until what has begun is done
            parts.cancel()
            raise
        if failure := parts.exception() or self._failure_of_memory(memory, offset):
            raise failure
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
        files, array, memory, offset = self._prepared(array, offset, checksums, write)
        future = Future(array, memory)
        parts = FileRequests(self._failure, memory[1])
        self._begin(parts, files, memory, offset, write, sync, in_background(priority), future)
        future._start(parts, lambda: self._failure_of_memory(memory, offset))
        future._is_about(write, ", ".join(self._paths), offset, memory[1])
        self._pending.add(future)
        return future

    def _write_apart(self, segments: _core.Segments, offset: int, *, sync: bool) -> None:
        files, layout = self._opened_core(writing=True), self._layout
        parts = segments.split(offset, layout.stripe_nbytes, len(files))
        with self._while_open():
            write_apart(
                [
                    (self._files[at]._scheduler, files[at], part, layout.nbytes_in(at, offset))
                    for at, part in enumerate(parts)
                    if not part.all_gaps()
                ],
                sync=sync,
            )

    def _prepared(
        self, array: _Array, offset: int, checksums: Checksums | None, write: bool
    ) -> tuple[list[_core.File], _Array, AnyMemory, int]:
        files = self._opened_core(reading=not write, writing=write)
        self._files[0]._scheduler.check_usable()  # in a forked child nothing else may be looked at
        if checksums is not None:
            raise ValueError(
                "checksums: a file over several paths takes none, since a chunk may lie on two drives; remedy: compute "
                "them of the array (zlib.crc32), or use one file"
            )
        array, memory = memory_or_segments(array, writable=not write)
        return files, array, memory, checked_offset(offset, memory[1])

    def _begin(
        self,
        parts: FileRequests,
        files: list[_core.File],
        memory: AnyMemory,
        offset: int,
        write: bool,
        sync: bool,
        background: bool,
        owner: object,
    ) -> None:
        """Submit each file's part; either all of them, or an exception."""
        with self._while_open():
            if write:
                self._make_room(files, offset, memory[1])
            else:
                self._check_size(files, offset, memory[1])
            whole = memory[0]
            if isinstance(whole, int):
                whole = _core.Segments.of(whole, memory[1], memory[2], memory[3])
            segments = whole.split(offset, self._layout.stripe_nbytes, len(files))
            # A file without bytes takes part where its name and size must last; and one where there are none at all.
            wanted = [at for at, part in enumerate(segments) if sync or not part.all_gaps()]
            at = 0
            try:
                for at in wanted or [self._layout.file_of(offset)]:
                    begin = self._layout.nbytes_in(at, offset)
                    parts.submit(
                        *(at, self._files[at]._scheduler, files[at], segments[at], begin, owner),
                        location=memory[3],
                        write=write,
                        sync=sync,
                        background=background,
                    )
            except BaseException as error:
                parts.give_up(error)
                if isinstance(error, StorageError):
                    raise self._failure([(at, error)], memory[1], parts.moved_nbytes()) from None
                raise

    @contextlib.contextmanager
    def _while_open(self) -> Iterator[None]:
        """Let closing wait meanwhile, so that all parts of a transfer are submitted or none is."""
        with self._changing:
            if self._closed:
                raise self._is_closed()
            self._beginning += 1
        try:
            yield
        finally:
            with self._changing:
                self._beginning -= 1
                self._changing.notify_all()

    # Sizes and space

    def _ranges(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Return which files have bytes of a range, with begin and end in each."""
        layout = self._layout
        found = [
            (at, layout.nbytes_in(at, offset), layout.nbytes_in(at, offset + nbytes))
            for at in range(layout.file_count)
        ]
        return [(at, begin, end) for at, begin, end in found if begin < end]

    def _make_room(
        self, files: list[_core.File], offset: int, nbytes: int, *, all_of_it: bool = False
    ) -> None:
        """Reserve what a write will need of every drive before any size changes; let no file end before it.

        A write beyond the end leaves a hole, which files that have none of its bytes must have as well.
        """
        ranges = self._ranges(offset, nbytes)
        for at, begin, end in ranges:
            if all_of_it or (files[at].direct and end - begin >= _MIN_RESERVED_NBYTES):
                with self._told(at, nbytes):
                    files[at].preallocate(begin, end - begin, keep_size=True)
        if not ranges or len(ranges) == len(files):
            return
        with_bytes = {at for at, _, _ in ranges}
        for at, file in enumerate(files):
            if at not in with_bytes:
                with self._told(at, nbytes):
                    self._reach(at, file, offset)

    def _reach(self, at: int, file: _core.File, offset: int) -> None:
        """Let one file have its part of the first ``offset`` bytes."""
        wanted = self._layout.nbytes_in(at, offset)
        size = file.size()
        if size is None or size >= wanted:
            return
        # Its last byte is given space, which also sets the size and never shortens the file, as truncating could
        # where another process extends it in this moment.
        file.preallocate(wanted - 1, 1)
        size = file.size()
        if size is not None and size < wanted:
            raise StorageError(
                EOPNOTSUPP,
                f"{os.strerror(EOPNOTSUPP)} (this file system cannot reserve space, so that a write beyond the end is "
                "not possible; remedy: truncate() to the size that the file will have)",
                file.path,
            )

    def _check_size(self, files: list[_core.File], offset: int, nbytes: int) -> None:
        """Raise where some file ends before the end of what is to be read."""
        failures: list[tuple[int, StorageError]] = []
        for at, begin, end in self._ranges(offset, nbytes):
            size = files[at].size()
            if size is None or size >= end:
                continue
            missing = max(begin, size)
            message = f"End of file (read at offset {missing}; the file has {size} bytes)"
            error = ShortReadError(None, message, files[at].path, offset=missing)
            failures.append((at, error))
        if failures:
            first = min(failures, key=lambda one: self._layout.offset_of(one[0], one[1].offset))
            raise self._failure([first], nbytes, 0)

    # Failures

    def _failure(
        self, failed: list[tuple[int, StorageError]], nbytes: int, moved_nbytes: int
    ) -> StorageError:
        """Return the first of several files' failures as one of the whole file, which knows the others."""
        found = []
        for at, error in failed:
            error = copy.copy(error)
            error.offset = self._layout.offset_of(at, error.offset)
            error.expected, error.transferred = nbytes, moved_nbytes
            found.append(error)
        # Those that were cancelled after another's fault are no news.
        found.sort(key=lambda error: (error.errno == ECANCELED, error.offset))
        first = first_of(found, "of its files")
        first.strerror = (
            f"{first.strerror}; in the file over {self._layout.file_count} paths: offset {first.offset}, "
            f"{moved_nbytes} of {nbytes} bytes moved"
        )
        return first

    @contextlib.contextmanager
    def _told(self, at: int, nbytes: int) -> Iterator[None]:
        """Raise what goes wrong with one file as the whole file's."""
        try:
            yield
        except StorageError as error:
            raise self._failure([(at, error)], nbytes, error.transferred) from None

    def _each(self, files: list[File], action: Callable[[int, File], None]) -> None:
        """Do something with every file, whatever happens to one of them; raise the first failure."""
        failures = []
        for at, file in enumerate(files):
            try:
                action(at, file)
            except StorageError as error:
                failures.append(error.with_traceback(None))
        if failures:
            raise first_of(failures, "of its files")

    def _failure_of_memory(self, memory: AnyMemory, offset: int) -> StorageError | None:
        if not moved(memory):
            return None
        return memory_moved(self._paths[self._layout.file_of(offset)], offset, memory[1])

    # Open or not

    def _opened(self, *, writing: bool = False) -> list[File]:
        self._opened_core(writing=writing)
        return self._files

    def _opened_core(self, *, reading: bool = False, writing: bool = False) -> list[_core.File]:
        if self._closed:
            raise self._is_closed()
        return [file._open_file(reading=reading, writing=writing) for file in self._files]

    def _is_closed(self) -> ValueError:
        return ValueError(f"the file over {list(self._paths)!r} is closed")


def _at_once(step: Callable[[float], bool], *_: object) -> bool:
    return step(0.0)


class FileRequests:
    """The requests of one transfer, looked at as one: done when all are.

    ``failure`` makes one of those of several files, given their places among the files, the bytes of all and those
    moved.
    """

    def __init__(
        self,
        failure: Callable[[list[tuple[int, StorageError]], int, int], StorageError],
        nbytes: int,
    ) -> None:
        self._failure = failure
        self._nbytes = nbytes
        self._parts: list[tuple[int, int, _core.Request]] = []  # which file, bytes, request
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
        """Begin a part: what an open file, of that place, moves from ``offset`` on; or raise what is against it."""
        served = scheduler_of(scheduler, file, write, location)
        served.check_usable()

        def submit() -> None:
            request = served.new_request(write, False, sync, False, background)
            # Known before it is submitted, so that an interrupted call can cancel it; not one that is refused.
            self._requests.append(request)
            try:
                memory = segments, segments.nbytes, None, None
                submit_one(served, request, file, memory, offset, owner)
            except Exception:
                self._requests.remove(request)
                raise
            self._parts.append((at, segments.nbytes, request))

        with_descriptors(served, submit, opens=False)

    def give_up(self, error: BaseException) -> None:
        """Cancel all, and wait, but not after Ctrl-C: the core keeps the arrays' owners until the end."""
        self.cancel()
        if isinstance(error, Exception):
            self.wait()

    def done(self) -> bool:
        """Return whether all have ended."""
        return all(request.done() for request in self._requests)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait, and return whether all have ended."""
        if timeout_seconds is None:
            return all(request.wait(None) for request in self._requests)
        end = time.monotonic() + timeout_seconds
        return all(request.wait(max(end - time.monotonic(), 0.0)) for request in self._requests)

    def cancel(self) -> None:
        """End all before their time."""
        for request in self._requests:
            request.cancel()

    def exception(self) -> StorageError | None:
        """Return what went wrong; valid once done."""
        failed = self._failed()
        if not failed:
            return None
        # Of gaps that no file was asked for nothing was to be moved.
        asked = sum(nbytes for _, nbytes, _ in self._parts)
        return self._failure(failed, self._nbytes, self._nbytes - asked + self.moved_nbytes())

    def moved_nbytes(self) -> int:
        """Return the bytes that those that have ended moved."""
        missing = sum(error.expected - error.transferred for _, error in self._failed())
        return sum(nbytes for _, nbytes, _ in self._parts) - missing

    def notify(self, queue: _core.CompletionQueue, token: int) -> None:
        """Have a queue told when all, or one more of them, are done."""
        waited_for = (request for request in self._requests if not request.done())
        next(waited_for, self._requests[-1]).notify(queue, token)

    def _failed(self) -> list[tuple[int, StorageError]]:
        found = [(at, request.exception()) for at, _, request in self._parts]
        return [(at, error) for at, error in found if error is not None]


def _identity(file: File) -> tuple[int, int]:
    return file._open_file().identity


def _same_file(names: list[str]) -> ValueError:
    return ValueError(f"path: one file comes twice among {names!r}; each part needs its own")


def _remove(file: File) -> None:
    """Remove a name that was made just now, unless it is another's by now."""
    with contextlib.suppress(OSError):
        status = os.stat(file.path)  # noqa: PTH116
        if (status.st_dev, status.st_ino) == _identity(file):  # it is no device's
            os.unlink(file.path)  # noqa: PTH108
