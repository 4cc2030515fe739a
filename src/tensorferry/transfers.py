"""From arrays and files to requests: the one way that every product's bytes take into the core."""

from __future__ import annotations

import copy
import os
import sys
from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from tensorferry import _core
from tensorferry.arrays import AnyMemory, Location, first_moved, memory_of, moved
from tensorferry.errors import StorageError, first_of, memory_moved
from tensorferry.futures import Future
from tensorferry.runtime import AnyScheduler, scheduler_of, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.checksums import Checksums

_Array = TypeVar("_Array")

Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
Direct: TypeAlias = "bool | Literal['auto']"

# Offsets are signed 64-bit numbers in the kernel.
_MAX_FILE_NBYTES = (1 << 63) - 1


def direct_mode(direct: Direct) -> str:
    """Return the core's name of what a caller says of O_DIRECT."""
    if direct == "auto":
        return "auto"
    if direct is True:
        return "always"
    if direct is False:
        return "never"
    raise ValueError(f'direct: {direct!r} is none of "auto", True and False')


def checked_path(path: Path, name: str = "path") -> str:
    """Return a path as text, which os.fsencode() turns back into its bytes."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}: {path!r} is no path")
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError(f"{name}: {path!r} has a null character")
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {path!r} is no path: {error}") from None
    return text


def checked_descriptor(descriptor: int, name: str = "path") -> int:
    """Return a descriptor, which is no bool and fits a C int."""
    if isinstance(descriptor, bool):
        raise TypeError(f"{name}: {descriptor!r} is neither a path nor a descriptor")
    if not -1 << 31 <= descriptor < 1 << 31:
        raise ValueError(f"{name}: {descriptor} is no descriptor")
    return descriptor


def checked_offset(offset: int, nbytes: int, name: str = "offset") -> int:
    """Return an offset that a file can have, with `nbytes` behind it."""
    if not hasattr(offset, "__index__"):
        raise TypeError(f"{name}: {offset!r} is no integer")
    offset = offset.__index__()
    if offset < 0:
        raise ValueError(f"{name}: {offset} is negative")
    if offset + nbytes > _MAX_FILE_NBYTES:
        raise ValueError(f"{name}: {offset} + {nbytes} bytes is beyond what a file can hold")
    return offset


def open_for_transfer(path: Path | int, write: bool, direct: str, name: str = "path") -> _core.File:
    """Open a path (created if missing, for writing) or reopen the file of a descriptor, which stays the caller's."""
    if isinstance(path, int):
        return _core.file_from_descriptor(checked_descriptor(path, name), write, direct)
    text = checked_path(path, name)
    return _core.open_file(text, not write, write, write, False, False, direct)


def transfer(
    scheduler: AnyScheduler,
    target: Path | int | _core.File,
    memory: AnyMemory,
    offset: int,
    *,
    write: bool,
    direct: str = "auto",
    truncate: bool = False,
    sync: bool = False,
    background: bool = False,
    checksums: Checksums | None = None,
    name: str = "path",
) -> None:
    """Move one array, or several that follow each other, and return when it is done.

    If the caller is interrupted, blocks not yet begun are cancelled; the array stays referenced until those that
    have begun are done.
    """
    given, nbytes, _, location = memory
    address, segments = (given, None) if isinstance(given, int) else (0, given)
    sums = None if checksums is None else checksums._use(nbytes, write=write)
    how = write, truncate, sync

    def run(file: _core.File, opened: bool) -> _core.Request | None:
        return scheduler.run(
            *(file, address, nbytes, offset, *how, opened, background),
            *(memory, location, segments, sums),
        )

    try:
        if isinstance(target, _core.File):
            request = run(target, False)
        else:
            scheduler.check_usable()
            path = target
            request = with_descriptors(
                scheduler, lambda: run(open_for_transfer(path, write, direct, name), True)
            )
    except BaseException:
        if checksums is not None:
            checksums._give_back()
        raise
    if request is not None:
        _finish(request)
    if failure := _failure_of_memory(memory, target, offset):
        raise failure


def start(
    scheduler: AnyScheduler,
    target: Path | int | _core.File,
    array: _Array,
    memory: AnyMemory,
    offset: int,
    *,
    write: bool,
    direct: str = "auto",
    sync: bool = False,
    background: bool = False,
    checksums: Checksums | None = None,
    name: str = "path",
) -> Future[_Array]:
    """Begin to move one array, or several that follow each other."""
    given, nbytes, _, location = memory
    address, segments = (given, None) if isinstance(given, int) else (0, given)
    scheduler.check_usable()
    sums = None if checksums is None else checksums._use(nbytes, write=write)
    future = Future(array, memory)
    locations = None if location is None else [location]

    def submit() -> _core.Request:
        opened = not isinstance(target, _core.File)
        file = (
            target
            if isinstance(target, _core.File)
            else open_for_transfer(target, write, direct, name)
        )
        served = scheduler_of(scheduler, file)
        request = served.new_request(write, False, sync, opened, background)
        for _, refusal in served.submit(
            *(request, [file], [address], [nbytes], [offset], [0], future, locations),
            segments=segments,
            checksums=sums,
        ):
            raise refusal
        return request

    try:
        request = with_descriptors(scheduler, submit)
    except BaseException:
        if checksums is not None:
            checksums._give_back()
        raise
    future._start(request, lambda: _failure_of_memory(memory, target, offset))
    return future


def _failure_of_memory(
    memory: AnyMemory, target: Path | int | _core.File, offset: int
) -> StorageError | None:
    """Return what is wrong where an array has not kept its memory until the end of its transfer."""
    if not moved(memory):
        return None
    return memory_moved(_text_of(target), offset, memory[1])


def _text_of(target: Path | int | _core.File) -> str:
    if isinstance(target, _core.File):
        return target.path
    return f"/proc/self/fd/{target}" if isinstance(target, int) else os.fsdecode(target)


def _finish(request: _core.Request) -> None:
    if not request.done():
        try:
            request.wait(None)
        except BaseException:
            request.cancel()
            raise
    exception = request.exception()
    if exception is not None:
        raise exception


def transfer_many(
    scheduler: AnyScheduler,
    items: Sequence[tuple[Any, ...]],
    *,
    write: bool,
    direct: str,
    truncate: bool = False,
    sync: bool = False,
    background: bool = False,
) -> None:
    """Move many arrays with all of them outstanding at once, and return when all are done.

    Everything is checked before the first byte moves.
    """

    def check(index: int, item: Any) -> tuple[Path, int, int, int, object, Location | None]:
        name = f"items[{index}]"
        if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 3:
            raise TypeError(
                f"{name}: expected (path, array) or (path, array, offset), got {item!r}"
            )
        address, nbytes, owner, location = memory_of(item[1], writable=not write, name=name)
        offset = checked_offset(item[2], nbytes, name) if len(item) == 3 else 0
        return item[0], address, nbytes, offset, owner, location

    # Where an item is plainly usable, the core sees it; the rule is `check`.
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    batch = _Batch(
        *_core.collect(
            items,
            not write,
            getattr(torch, "Tensor", None),
            getattr(torch, "strided", None),
            getattr(numpy, "ndarray", None),
            check,
        )
    )
    for at, path in enumerate(batch.paths):
        if isinstance(path, int):
            checked_descriptor(path, f"items[{at}]")
        elif type(path) is not str or not path.isascii() or "\0" in path:
            batch.paths[at] = checked_path(path, f"items[{at}]")
    call = _Call(scheduler, batch, write, direct, truncate, sync, background)
    failures = call.run()
    if failures:
        raise first_of([failure for _, failure in failures], "of this call")
    index = first_moved(batch.addresses, batch.nbytes, batch.owners)
    if index is not None:
        path = _text_of(batch.paths[index])
        raise memory_moved(path, batch.offsets[index], batch.nbytes[index])


class _Batch(NamedTuple):
    """Lists side by side: thousands of tuples would keep the garbage collector busy.

    Where all is in host memory there is no list of locations.
    """

    paths: list[Path]
    addresses: list[int]
    nbytes: list[int]
    offsets: list[int]
    owners: list[object]
    locations: list[Location | None] | None

    def part(self, begin: int, end: int) -> _Batch:
        return self._with(lambda column: column[begin:end])

    def ordered(self, order: Sequence[int]) -> _Batch:
        return self._with(lambda column: [column[at] for at in order])

    def _with(self, chosen: Callable[[list[Any]], list[Any]]) -> _Batch:
        return _Batch(
            chosen(self.paths),
            chosen(self.addresses),
            chosen(self.nbytes),
            chosen(self.offsets),
            chosen(self.owners),
            None if self.locations is None else chosen(self.locations),
        )


_DESCRIPTOR_ERRORS = (EMFILE, ENFILE)

# Items in one submission: the first blocks fly while the next items are opened.
_CHUNK = 256


class _Call:
    """One call for many items: a request, or one for each of the schedulers that serve their files."""

    def __init__(
        self,
        scheduler: AnyScheduler,
        batch: _Batch,
        write: bool,
        direct: str,
        truncate: bool,
        sync: bool,
        background: bool,
    ) -> None:
        self._scheduler = scheduler
        self._write = write
        self._direct = direct
        self._how = write, truncate, sync, True, background
        # What is written to one file follows each other, so that it is opened, cut and synced once.
        self._order = _by_path(batch.paths) if write and len(batch.paths) > _CHUNK else None
        self._batch = batch if self._order is None else batch.ordered(self._order)
        self._requests: dict[_core.Scheduler, _core.Request] = {}
        # What was refused before it could be submitted, by position.
        self._refused: dict[int, StorageError] = {}
        # The file of which a part has been submitted.
        self._begun: tuple[Path, _core.File | StorageError] | None = None

    def run(self) -> list[tuple[int, StorageError]]:
        """Move everything; return what failed, with its position, in order."""
        requests = self._requests
        try:
            for begin in range(0, len(self._batch.paths), _CHUNK):
                self._submit(begin, min(begin + _CHUNK, len(self._batch.paths)))
            for request in requests.values():
                request.seal()
            for request in requests.values():
                request.wait(None)
        except BaseException as error:
            for request in requests.values():
                request.cancel()
                request.seal()
            if isinstance(
                error, Exception
            ):  # not for Ctrl-C: the arrays stay referenced until the end
                for request in requests.values():
                    request.wait(None)
            raise
        failures = dict(self._refused)
        for request in requests.values():
            failures.update(request.failures())
        order = self._order or range(len(self._batch.paths))
        return sorted(((order[at], why) for at, why in failures.items()), key=lambda one: one[0])

    def _submit(self, begin: int, end: int) -> None:
        """Submit some of the items, or halves of them where descriptors are short."""
        self._scheduler.check_usable()
        while begin < end:
            try:
                begin += with_descriptors(self._scheduler, lambda: self._submit_once(begin, end))  # noqa: B023
                continue
            except OSError as error:
                if error.errno not in _DESCRIPTOR_ERRORS or end - begin == 1:
                    raise
            # Out here the exception is gone, and with it the frame that held the files opened so far.
            half = (end - begin) // 2
            self._submit(begin, begin + half)
            begin += half

    def _submit_once(self, begin: int, end: int) -> int:
        """Submit items of one scheduler as one; return how many have been dealt with."""
        paths = self._batch.paths
        opened: dict[Path, _core.File | StorageError] = {}
        scheduler: _core.Scheduler | None = None
        for at in range(begin, end):
            path = paths[at]
            if path in opened:
                continue
            file = self._open(path)
            if isinstance(file, _core.File):
                serving = scheduler_of(self._scheduler, file)
                if scheduler is not None and serving is not scheduler:
                    end = at
                    break
                scheduler = serving
            opened[path] = file
        # Of a file with items on both sides of the end all space is reserved at once.
        continued = self._continued(end)
        if continued is not None and (self._begun is None or self._begun[0] != continued):
            opened[continued] = self._reserved(continued, opened[continued], begin)
        positions, files = [], []
        for at in range(begin, end):
            file = opened[paths[at]]
            if isinstance(file, _core.File):
                positions.append(at)
                files.append(file)
            else:
                self._refused[at] = copy.copy(file)
        begun = None if continued is None else (continued, opened[continued])
        if scheduler is None or not positions:
            self._begun = begun
            return end - begin
        request = self._requests.get(scheduler)
        if request is None:
            request = self._requests[scheduler] = scheduler.new_request(*self._how)
        complete = len(positions) == end - begin
        part = self._batch.part(begin, end) if complete else self._batch.ordered(positions)
        refused = scheduler.submit(
            request,
            files,
            part.addresses,
            part.nbytes,
            part.offsets,
            positions,
            part.owners,
            part.locations,
            [path != continued for path in part.paths],
        )
        self._begun = begun
        self._refused.update(refused)
        return end - begin

    def _open(self, path: Path) -> _core.File | StorageError:
        """Return the file of a path, or why it cannot be opened."""
        if self._begun is not None and self._begun[0] == path:
            return self._begun[1]
        try:
            return open_for_transfer(path, self._write, self._direct)
        except StorageError as error:
            if error.errno in _DESCRIPTOR_ERRORS:
                raise
            return error.with_traceback(None)

    def _continued(self, end: int) -> Path | None:
        """Return the path with items on both sides of a position, if what is submitted is in order of paths."""
        paths = self._batch.paths
        if self._order is None or end >= len(paths) or paths[end] != paths[end - 1]:
            return None
        return paths[end]

    def _reserved(
        self, path: Path, file: _core.File | StorageError, begin: int
    ) -> _core.File | StorageError:
        """Return a file with space for all items of its path, or why it has not."""
        if isinstance(file, StorageError):
            return file
        batch = self._batch
        pieces = [at for at in range(begin, len(batch.paths)) if batch.paths[at] == path]
        try:
            file.reserve([batch.offsets[at] for at in pieces], [batch.nbytes[at] for at in pieces])
        except StorageError as error:
            return error.with_traceback(None)
        return file


def _by_path(paths: list[Path]) -> list[int] | None:
    """Return an order in which items of one file follow each other as they did; None where that is no matter."""
    if len(set(paths)) == len(paths):
        return None
    real = {path: path if isinstance(path, int) else os.path.realpath(path) for path in paths}
    positions: dict[Any, list[int]] = {}
    for index, path in enumerate(paths):
        positions.setdefault(real[path], []).append(index)
    return [at for of_path in positions.values() for at in of_path]
