"""From arrays and files to requests: the one way that every product's bytes take into the core."""

from __future__ import annotations

import copy
import itertools
import os
import stat
from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tensorferry import _core
from tensorferry.base.checks import (
    Path,
    checked_descriptor,
    checked_offset,
    checked_path,
)
from tensorferry.errors import StorageError, first_of, memory_moved
from tensorferry.transfer.arrays import (
    AnyMemory,
    Location,
    memory_of,
    moved,
)
from tensorferry.transfer.futures import Future
from tensorferry.transfer.runtime import AnyScheduler, scheduler_of, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from tensorferry.transfer.checksums import Checksums

_Array = TypeVar("_Array")


def open_for_transfer(
    path: Path | int, write: bool, direct: str, name: str = "path", *, replaced: bool = False
) -> _core.File:
    """Open a path (created if missing, for writing) or reopen the file of a descriptor, which stays the caller's.

    It is for one request, which closes it.

    ``replaced`` says that what one request writes to a path is all that the file is to hold.
    """
    if isinstance(path, int):
        descriptor = checked_descriptor(path, name)
        return _core.file_from_descriptor(descriptor, write, direct, for_request=True)
    text = checked_path(path, name)
    return _core.open_file(
        *(text, not write, write, write, False, False, direct), replaced=replaced, for_request=True
    )


def transfer(
    scheduler: AnyScheduler,
    target: Path | int | _core.File,
    memory: AnyMemory,
    offset: int,
    *,
    write: bool,
    direct: str = "auto",
    truncate: bool = False,
    replaced: bool = False,
    sync: bool = False,
    background: bool = False,
    checksums: Checksums | None = None,
    name: str = "path",
) -> None:
    """Move one array, or several that follow each other, and return when it is done.

    ``truncate`` cuts the file behind what was written; ``replaced`` does where it is a file, and no device.

    If the caller is interrupted, blocks not yet begun are cancelled; the array stays referenced until those that
    have begun are done.
    """
    address, segments, location = _told_of(memory)
    nbytes, how = memory[1], (write, truncate, sync)
    sums = None if checksums is None else checksums._use(nbytes, write=write)

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
                scheduler,
                lambda: run(open_for_transfer(path, write, direct, name, replaced=replaced), True),
            )
    except BaseException:
        if checksums is not None and sums is not None:
            checksums._give_back(sums)
        raise
    failure = None if request is None else request.exception()
    if failure := failure or _failure_of_memory(memory, target, offset):
        raise failure


def set_size(scheduler: AnyScheduler, file: _core.File, nbytes: int) -> None:
    """Set an open file's size in its turn among writes: it cuts off what was submitted before, and nothing else."""
    transfer(scheduler, file, (0, 0, None, None), nbytes, write=True, truncate=True)


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
    scheduler.check_usable()
    sums = None if checksums is None else checksums._use(memory[1], write=write)
    future = Future(array, memory)
    opened = not isinstance(target, _core.File)

    def submit() -> _core.Request:
        file = (
            target
            if isinstance(target, _core.File)
            else open_for_transfer(target, write, direct, name)
        )
        served = scheduler_of(scheduler, file, write, memory[3])
        request = served.new_request(write, False, sync, opened, background)
        submit_one(served, request, file, memory, offset, future, sums)
        return request

    try:
        request = with_descriptors(scheduler, submit, opens=opened)
    except BaseException:
        if checksums is not None and sums is not None:
            checksums._give_back(sums)
        raise
    future._start(request, lambda: _failure_of_memory(memory, target, offset))
    future._is_about(write, _text_of(target), offset, memory[1])
    return future


def submit_one(
    scheduler: _core.Scheduler,
    request: _core.Request,
    file: _core.File,
    memory: AnyMemory,
    offset: int,
    owner: object,
    sums: _core.Checksums | None = None,
) -> None:
    """Give a request its one transfer, or raise what is against it. The core keeps the owner of the memory."""
    address, segments, location = _told_of(memory)
    locations = None if location is None else [location]
    for _, refusal in scheduler.submit(
        *(request, [file], [address], [memory[1]], [offset], [0], owner, locations),
        segments=segments,
        checksums=sums,
    ):
        raise refusal


def write_apart(
    parts: Sequence[tuple[AnyScheduler, _core.File, _core.Segments, int]], *, sync: bool
) -> None:
    """Write what is no gap of segments, each to its place from an offset of an open file on; return when it is done."""
    requests: list[_core.Request] = []
    try:
        for scheduler, file, segments, offset in parts:
            served = scheduler_of(scheduler, file, True)
            served.check_usable()
            requests.append(served.new_request(True, False, sync, False, False))
            columns = segments.ranges(offset)
            count = len(columns[0])
            for begin in range(0, count, _CHUNK):
                addresses, nbytes, offsets = (column[begin : begin + _CHUNK] for column in columns)
                positions = range(begin, begin + len(addresses))
                last = None if begin + _CHUNK >= count else [False] * len(addresses)
                refused = served.submit(
                    *(requests[-1], [file] * len(addresses), addresses, nbytes, offsets),
                    *(positions, segments, None, last),
                )
                for _, refusal in refused:
                    raise refusal
        for request in requests:
            request.wait(None)
    except BaseException as error:
        for request in requests:
            request.cancel()
            request.seal()
        if isinstance(error, Exception):  # not for Ctrl-C: the rows stay referenced until the end
            for request in requests:
                request.wait(None)
        raise
    failures = [failure for request in requests for _, failure in request.failures()]
    if failures:
        raise first_of(failures, "of this call")


def _told_of(memory: AnyMemory) -> tuple[int, _core.Segments | None, Location | None]:
    """Return what the core is told of memory: an address and its location, or segments, which have their own."""
    given, _, _, location = memory
    return (given, None, location) if isinstance(given, int) else (0, given, None)


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


def transfer_many(
    scheduler: AnyScheduler,
    items: Iterable[tuple[Any, ...]],
    *,
    write: bool,
    direct: str,
    truncate: bool | None = False,
    sync: bool = False,
    background: bool = False,
) -> None:
    """Move many arrays with all of them outstanding at once, and return when all are done.

    Everything is checked before the first byte moves. ``truncate`` as for :func:`tensorferry.write_many`.
    """
    items = checked_items(items)

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
    batch = _Batch(*_core.collect(items, not write, check))
    for at, path in enumerate(batch.paths):
        if isinstance(path, int):
            checked_descriptor(path, f"items[{at}]")
        elif type(path) is not str or not path.isascii() or "\0" in path:
            batch.paths[at] = checked_path(path, f"items[{at}]")
    files = _files_of(batch.paths) if write else {}
    replaced = _replaced(batch.paths, items, files) if truncate is None else frozenset()
    call = _Call(scheduler, batch, files, write, direct, bool(truncate), replaced, sync, background)
    failures = call.run()
    if failures:
        raise first_of([failure for _, failure in failures], "of this call")
    index = _core.first_moved(batch.addresses, batch.nbytes, batch.owners)
    if index is not None:
        path = _text_of(batch.paths[index])
        raise memory_moved(path, batch.offsets[index], batch.nbytes[index])


def checked_items(items: Iterable[Any]) -> Sequence[Any]:
    """Return the items of one call; what can be gone through only once is gone through."""
    if isinstance(items, (list, tuple)):
        return items
    if not hasattr(items, "__iter__"):
        raise TypeError(
            f"items: {type(items).__name__} is no iterable of (path, array) or (path, array, offset)"
        )
    return list(items)


def _replaced(
    paths: Sequence[Path], items: Sequence[tuple[Any, ...]], files: dict[Path, object]
) -> AbstractSet[Path]:
    """Return the paths that come without an offset: what the call writes to them is all that they are to hold."""
    first_of_file: dict[object, int] = {}
    whole = [index for index, item in enumerate(items) if len(item) == 2]
    for index in whole:
        path = paths[index]
        first = first_of_file.setdefault(files.get(path, path), index)
        if first != index:
            raise ValueError(
                f"items[{index}]: {_text_of(path)!r} is written as a whole by items[{first}] already; "
                "pieces of one file have offsets"
            )
    return {paths[index] for index in whole}


def _files_of(paths: Sequence[Path]) -> dict[Path, object]:
    """Return for each name what is the same for all names of its file; nothing where there is but one name."""
    known = set(paths)
    if len(known) < 2:
        return {}
    directories: dict[str, str] = {}
    return {path: _file_of(path, directories) for path in known}


def _file_of(path: Path, directories: dict[str, str]) -> object:
    """Return what is the same for all names of a file, also of one that is not there yet."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        text = os.fsdecode(path)
        if os.path.islink(text):  # noqa: PTH114
            return os.path.realpath(text)
        directory, name = os.path.split(text)
        if directory not in directories:
            directories[directory] = os.path.realpath(directory)
        return f"{directories[directory]}/{name}"
    if stat.S_ISBLK(status.st_mode):  # which may have several nodes
        return status.st_rdev
    return status.st_dev, status.st_ino


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
        files: dict[Path, object],
        write: bool,
        direct: str,
        truncate: bool,
        replaced: AbstractSet[Path],
        sync: bool,
        background: bool,
    ) -> None:
        self._scheduler = scheduler
        self._write = write
        self._truncate = truncate
        self._replaced = replaced
        self._direct = direct
        self._how = write, truncate, sync, True, background
        # What is of one file follows each other, so that it is opened, cut and synced once, and neighbours are joined.
        self._files = files
        self._order = _order_of(batch, files, write)
        self._batch = batch if isinstance(self._order, range) else batch.ordered(self._order)
        # One for all: what is of one file must be of one request, which cuts it.
        locations = batch.locations or [None]
        devices = {None if location is None else location[0] for location in locations}
        self._location = locations[0] if len(devices) == 1 else None
        self._requests: dict[_core.Scheduler, _core.Request] = {}
        # What was refused before it could be submitted, by position.
        self._refused: dict[int, StorageError] = {}
        # The file of which a part has been submitted.
        self._begun: tuple[Path, _core.File | StorageError] | None = None

    def run(self) -> list[tuple[int, StorageError]]:
        """Move everything; return what failed, with its position, in order."""
        requests = self._requests
        try:
            begin = 0
            while begin < len(self._batch.paths):
                end = self._end_of_chunk(begin)
                self._submit(begin, end)
                begin = end
            for request in requests.values():
                request.seal()
            for request in requests.values():
                request.wait(None)
        except BaseException as error:
            for request in requests.values():
                request.cancel()
                request.seal()
            # Not for Ctrl-C: the arrays stay referenced until the end.
            if isinstance(error, Exception):
                for request in requests.values():
                    request.wait(None)
            raise
        failures = dict(self._refused)
        for request in requests.values():
            failures.update(request.failures())
        order = self._order
        return sorted(((order[at], why) for at, why in failures.items()), key=lambda one: one[0])

    def _end_of_chunk(self, begin: int) -> int:
        paths = self._batch.paths
        end = min(begin + _CHUNK, len(paths))
        # What is cut gets into line with all that is written to it, or another one's write would come in between.
        # All of it: what goes by another name of the file would else be cut off, or come after the cut.
        if self._truncate or self._replaced:
            while end < len(paths) and self._file_of(end) == self._file_of(end - 1):
                end += 1
        return end

    def _file_of(self, at: int) -> object:
        path = self._batch.paths[at]
        return self._files.get(path, path)

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
                serving = scheduler_of(self._scheduler, file, self._write, self._location)
                if scheduler is not None and serving is not scheduler:
                    end = at
                    break
                scheduler = serving
            opened[path] = file
        # Of a file with items on both sides of the end all space is reserved at once.
        paths = self._batch.paths
        is_cut = end < len(paths) and paths[end] == paths[end - 1]
        continued = paths[end] if is_cut else None
        begins = continued is not None and (self._begun is None or self._begun[0] != continued)
        if continued is not None and begins and self._write:
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
            return open_for_transfer(
                path, self._write, self._direct, replaced=path in self._replaced
            )
        except StorageError as error:
            if error.errno in _DESCRIPTOR_ERRORS:
                raise
            return error.with_traceback(None)

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


def _order_of(batch: _Batch, files: dict[Path, object], write: bool) -> Sequence[int]:
    """Return an order of items in which those of one file follow each other, by offset.

    Where what is written overlaps they stay in their order.
    """
    positions: dict[object, list[int]] = {}
    for index, path in enumerate(batch.paths):
        positions.setdefault(files.get(path, path), []).append(index)
    count = len(batch.paths)
    if len(positions) == count:
        return range(count)
    if len(positions) == 1:
        return _by_offset(range(count), batch, write)
    return [at for of_file in positions.values() for at in _by_offset(of_file, batch, write)]


def _by_offset(positions: Sequence[int], batch: _Batch, write: bool) -> Sequence[int]:
    offsets, nbytes = batch.offsets, batch.nbytes
    if all(offsets[one] <= offsets[other] for one, other in itertools.pairwise(positions)):
        return positions
    found = sorted(positions, key=offsets.__getitem__)
    if write and any(
        offsets[one] + nbytes[one] > offsets[other] for one, other in itertools.pairwise(found)
    ):
        return positions
    return found
