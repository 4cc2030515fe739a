"""Requests: every transfer of arrays to and from files is submitted to the core by this module.

A scheduler is the core's object that owns worker threads. A request is what one call submits to one scheduler: one or
several transfers, which are waited for and cancelled together. A request ends only after it was sealed, which tells the
core that it gets no more transfers. An item is one (path, array, offset) of :func:`transfer_many`.
"""

from __future__ import annotations

import contextlib
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
from tensorferry.errors import StorageError, first_error, memory_moved
from tensorferry.transfer import sidecars
from tensorferry.transfer.arrays import (
    AnyMemory,
    Location,
    has_moved,
    memory_of,
)
from tensorferry.transfer.checksums import checked
from tensorferry.transfer.futures import Future
from tensorferry.transfer.runtime import default_scheduler, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from tensorferry.transfer.checksums import Checksums

_Array = TypeVar("_Array")


def open_for_transfer(
    path: Path | int, write: bool, direct: str, name: str = "path", *, replaced: bool = False
) -> _core.File:
    """Open a file for one request, which closes the file when it ends.

    For a write, the file at a path is created if it is missing. The file of a descriptor is opened again, and the
    caller's descriptor stays open.

    ``replaced`` is True when the bytes of this request are to be the file's whole content.
    """
    if isinstance(path, int):
        descriptor = checked_descriptor(path, name)
        return _core.file_from_descriptor(descriptor, write, direct, for_request=True)
    text = checked_path(path, name)
    return _core.open_file(
        *(text, not write, write, write, False, False, direct), replaced=replaced, for_request=True
    )


def transfer(
    scheduler: _core.Scheduler,
    target: Path | int | _core.File,
    memory: AnyMemory,
    offset: int,
    write: bool,
    sync: bool = False,
    background: bool = False,
    checksums: Checksums | None = None,
    *,
    direct: str = "auto",
    truncate: bool = False,
    replaced: bool = False,
    name: str = "path",
) -> None:
    """Move one array, or several consecutive ones, and return when the transfer is complete.

    ``truncate`` truncates the file after the last byte written, and so does ``replaced``. Devices are never truncated.

    If the caller is interrupted, the blocks that have not started are cancelled. The array stays referenced until the
    blocks that have started are complete.
    """
    address, segments, location = _core_arguments(memory)
    nbytes, how = memory[1], (write, truncate, sync)
    sums = None if checksums is None else checked(checksums)._claim(nbytes, write=write)

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
            checksums._release(sums)
        raise
    failure = None if request is None else request.exception()
    if failure := failure or _failure_of_memory(memory, target, offset):
        raise failure
    if replaced and not isinstance(target, (int, _core.File)):
        sidecars.remove(target)
    if checksums is not None:
        checksums._has_succeeded = lambda: True


def set_size(scheduler: _core.Scheduler, file: _core.File, nbytes: int) -> None:
    """Set an open file's size after the writes that were submitted earlier, and before those submitted later.

    Bytes of the earlier writes beyond the size are cut off; those of later writes are not.
    """
    if not file.regular:
        file.truncate(nbytes)  # raises the error of the system: a device has a fixed size
    transfer(scheduler, file, (0, 0, None, None), nbytes, write=True, truncate=True)


def start(
    scheduler: _core.Scheduler,
    target: Path | int | _core.File,
    array: _Array,
    memory: AnyMemory,
    offset: int,
    write: bool,
    sync: bool = False,
    background: bool = False,
    checksums: Checksums | None = None,
    *,
    name: str = "path",
) -> Future[_Array]:
    """Start to move one array, or several consecutive ones, and return a future for the transfer."""
    scheduler.check_usable()
    sums = None if checksums is None else checked(checksums)._claim(memory[1], write=write)
    future = Future(array, memory)
    opened = not isinstance(target, _core.File)

    def submit() -> _core.Request:
        file = (
            target
            if isinstance(target, _core.File)
            else open_for_transfer(target, write, "auto", name)
        )
        request = scheduler.new_request(write, False, sync, opened, background)
        submit_one(scheduler, request, file, memory, offset, future, sums)
        return request

    try:
        request = with_descriptors(scheduler, submit, opens=opened)
    except BaseException:
        if checksums is not None and sums is not None:
            checksums._release(sums)
        raise
    if checksums is not None:
        checksums._has_succeeded = lambda: request.done() and request.exception() is None
    future._start(request, lambda: _failure_of_memory(memory, target, offset))
    future._is_about(write, text_of(target), offset, memory[1])
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
    """Submit the only transfer of a request, which also seals it, and raise the error if the core refuses it.

    The core holds a reference to ``owner``, which owns the memory, until the transfer ends.
    """
    address, segments, location = _core_arguments(memory)
    locations = None if location is None else [location]
    for _, refusal in scheduler.submit(
        *(request, [file], [address], [memory[1]], [offset], [0], owner, locations),
        segments=segments,
        checksums=sums,
    ):
        raise refusal


def write_segments(
    scheduler: _core.Scheduler,
    file: _core.File,
    segments: _core.Segments,
    offset: int,
    *,
    sync: bool,
) -> None:
    """Write segments with gaps between them into an open file, and return when all are written.

    A segment's position in the file is counted from ``offset``, and the gaps keep their bytes in the file.
    """
    scheduler.check_usable()
    addresses, nbytes, offsets = segments.ranges(offset)
    count = len(addresses)
    request = scheduler.new_request(True, False, sync, False, False)
    with _cancelled_on_error(request):
        # One submission: a write of another caller to this file comes before all of the segments or after them.
        for _, refusal in scheduler.submit(
            *(request, [file] * count, addresses, nbytes, offsets, range(count), segments)
        ):
            raise refusal
        request.wait(None)
    if failure := request.exception():
        raise failure


def start_segments(
    scheduler: _core.Scheduler,
    parts: Iterable[tuple[_core.File, _core.Segments, int]],
    future: Future[Any],
    *,
    background: bool,
) -> _core.Request:
    """Start to read segments of several open files, each at an offset, in one request, for which the future is made."""
    scheduler.check_usable()
    request = scheduler.new_request(False, False, False, False, background)
    with _cancelled_on_error(request):
        for at, (file, segments, offset) in enumerate(parts):
            for _, refusal in scheduler.submit(
                *(request, [file], [0], [segments.nbytes], [offset], [at], future),
                segments=segments,
                more=True,
            ):
                raise refusal
        request.seal()
    return request


@contextlib.contextmanager
def _cancelled_on_error(request: _core.Request) -> Iterator[None]:
    """If the block raises, cancel and seal the request, and wait for it.

    KeyboardInterrupt is raised without waiting, which is safe: a request holds references to the arrays until it ends.
    """
    try:
        yield
    except BaseException as error:
        request.cancel()
        request.seal()
        if isinstance(error, Exception):
            request.wait(None)
        raise


def _core_arguments(memory: AnyMemory) -> tuple[int, _core.Segments | None, Location | None]:
    """Return (address, segments, location), the form in which the core expects memory.

    One array has an address and a location. Segments carry their own addresses and locations.
    """
    given, _, _, location = memory
    return (given, None, location) if isinstance(given, int) else (0, given, None)


def _failure_of_memory(
    memory: AnyMemory, target: Path | int | _core.File, offset: int
) -> StorageError | None:
    """Return an error if the array's memory was released or resized before its transfer ended, else None."""
    if not has_moved(memory):
        return None
    return memory_moved(text_of(target), offset, memory[1])


def text_of(target: Path | int | _core.File) -> str:
    """Return a path by which the file of a request can be opened; for a descriptor, its path in /proc."""
    if isinstance(target, _core.File):
        return target.path
    return f"/proc/self/fd/{target}" if isinstance(target, int) else os.fsdecode(target)


def transfer_many(
    items: Iterable[tuple[Any, ...]],
    write: bool,
    direct: str,
    truncate: bool | None = False,
    sync: bool = False,
    background: bool = False,
) -> None:
    """Move many arrays, all outstanding at the same time, and return when all transfers are complete.

    Every item is checked before the first byte moves. ``truncate`` has the meaning that it has for
    :func:`tensorferry.write_many`.
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

    # The core checks the common kinds of items in C++ and calls `check` for all others. `check` defines which items are
    # valid.
    batch = _Batch(*_core.collect(items, not write, check))
    for at, path in enumerate(batch.paths):
        if type(path) is not str or not path.isascii() or "\0" in path:
            batch.paths[at] = checked_path(path, f"items[{at}]")
    files = _file_identities(batch.paths) if write else {}
    replaced = _replaced_paths(batch.paths, items, files) if truncate is None else frozenset()
    flags = write, bool(truncate), sync, True, background
    failures = _BatchTransfer(batch, files, direct, replaced, flags).run()
    for path in replaced:
        if not isinstance(path, int):
            sidecars.remove(path)
    if failures:
        raise first_error([failure for _, failure in failures], "of this call")
    index = _core.first_moved(batch.addresses, batch.nbytes, batch.owners)
    if index is not None:
        raise memory_moved(text_of(batch.paths[index]), batch.offsets[index], batch.nbytes[index])


def checked_items(items: Iterable[Any]) -> Sequence[Any]:
    """Return the items of one call as a sequence; an iterator is consumed into a list."""
    if isinstance(items, (list, tuple)):
        return items
    if not hasattr(items, "__iter__"):
        raise TypeError(
            f"items: expected an iterable of (path, array) or (path, array, offset), got {type(items).__name__}"
        )
    return list(items)


def _replaced_paths(
    paths: Sequence[Path], items: Sequence[tuple[Any, ...]], files: dict[Path, object]
) -> AbstractSet[Path]:
    """Return the paths that are given without an offset: the call replaces the whole content of these files."""
    first_of_file: dict[object, int] = {}
    whole = [index for index, item in enumerate(items) if len(item) == 2]
    for index in whole:
        path = paths[index]
        first = first_of_file.setdefault(files.get(path, path), index)
        if first != index:
            raise ValueError(
                f"items[{index}]: {text_of(path)!r} is already replaced by items[{first}]; "
                "give an offset for each piece of one file"
            )
    return {paths[index] for index in whole}


def _file_identities(paths: Sequence[Path]) -> dict[Path, object]:
    """Return an identity of the file of each path, equal for all paths of the same file; empty for a single path."""
    known = set(paths)
    if len(known) < 2:
        return {}
    directories: dict[str, str] = {}
    return {path: _file_identity(path, directories) for path in known}


def _file_identity(path: Path, directories: dict[str, str]) -> object:
    """Return an identity that is equal for all paths of one file, even if the file does not exist yet.

    It is (device, inode) of an existing file, the device number of a block device, and otherwise the path with its
    symbolic links resolved.
    """
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
    if stat.S_ISBLK(status.st_mode):  # several device nodes (inodes) may name the same device
        return status.st_rdev
    return status.st_dev, status.st_ino


class _Batch(NamedTuple):
    """The items of one call as parallel lists, one list for each field.

    A tuple for each of thousands of items would make the garbage collector run often. ``locations`` is None when all
    memory is host memory.
    """

    paths: list[Path]
    addresses: list[int]
    nbytes: list[int]
    offsets: list[int]
    owners: list[object]
    locations: list[Location | None] | None

    def part(self, begin: int, end: int) -> _Batch:
        return self._map_columns(lambda column: column[begin:end])

    def select(self, order: Sequence[int]) -> _Batch:
        return self._map_columns(lambda column: [column[at] for at in order])

    def _map_columns(self, chosen: Callable[[list[Any]], list[Any]]) -> _Batch:
        return _Batch._make(None if column is None else chosen(column) for column in self)


_DESCRIPTOR_ERRORS = (EMFILE, ENFILE)

# A submission gets no further files once it has this number of items. The drive works on the blocks of one submission
# while the files of the next are opened.
_CHUNK = 256


class _BatchTransfer:
    """The transfers of one `transfer_many` call, all in one request."""

    def __init__(
        self,
        batch: _Batch,
        files: dict[Path, object],
        direct: str,
        replaced: AbstractSet[Path],
        flags: tuple[bool, bool, bool, bool, bool],
    ) -> None:
        self._scheduler = default_scheduler()
        self._replaced = replaced
        self._direct = direct
        self._flags = flags  # write, truncate, sync, close_files, background
        self._write = flags[0]
        # The items of one file are made consecutive, also those that name it by another path. They are a unit, which is
        # submitted at once or not at all: no write of another caller comes between them, the file is truncated behind
        # the last of them, and adjacent ranges are merged into larger blocks.
        self._order, self._ends = _order_of(batch, files, self._write)
        self._batch = batch if isinstance(self._order, range) else batch.select(self._order)
        # Errors of items that were refused before they could be submitted, by position in the batch.
        self._refused: dict[int, StorageError] = {}

    def run(self) -> list[tuple[int, StorageError]]:
        """Move all items; return the position and error of each one that failed, in the caller's order."""
        self._scheduler.check_usable()
        request = self._scheduler.new_request(*self._flags)
        with _cancelled_on_error(request):
            first = 0
            while first < len(self._ends):
                begin, last = self._begin_of(first), first + 1
                while last < len(self._ends) and self._ends[last] <= begin + _CHUNK:
                    last += 1
                self._submit(request, first, last)
                first = last
            request.seal()
            request.wait(None)
        failures = self._refused | dict(request.failures())
        order = self._order
        return sorted(((order[at], why) for at, why in failures.items()), key=lambda one: one[0])

    def _begin_of(self, unit: int) -> int:
        return self._ends[unit - 1] if unit else 0

    def _submit(self, request: _core.Request, first: int, last: int) -> None:
        """Submit the units from ``first`` to ``last``, in halves if the process is short of descriptors."""
        try:
            with_descriptors(self._scheduler, lambda: self._submit_at_once(request, first, last))
        except OSError as error:
            if error.errno not in _DESCRIPTOR_ERRORS or last - first == 1:
                raise
        else:
            return
        # The retry is outside of the `except` block: the exception's traceback keeps alive the frame that holds the
        # files opened so far, and they are closed only when the exception is gone.
        middle = first + (last - first) // 2
        self._submit(request, first, middle)
        self._submit(request, middle, last)

    def _submit_at_once(self, request: _core.Request, first: int, last: int) -> None:
        """Submit a range of units. The error of a file that cannot be opened is kept in ``_refused``."""
        opened: dict[Path, _core.File | StorageError] = {}
        positions: list[int] = []
        files: list[_core.File] = []
        incomplete: list[bool] = []
        paths = self._batch.paths
        begin, end = self._begin_of(first), self._ends[last - 1]
        for unit in range(first, last):
            failed = False
            for at in range(self._begin_of(unit), self._ends[unit]):
                path = paths[at]
                if path not in opened:
                    opened[path] = self._open(path)
                file = opened[path]
                if isinstance(file, _core.File):
                    positions.append(at)
                    files.append(file)
                else:
                    self._refused[at] = copy.copy(file)
                    failed = True
            incomplete += [failed] * (len(files) - len(incomplete))
        if not positions:
            return
        is_whole = len(positions) == end - begin
        part = self._batch.part(begin, end) if is_whole else self._batch.select(positions)
        refused = self._scheduler.submit(
            *(request, files, part.addresses, part.nbytes, part.offsets, positions),
            *(part.owners, part.locations),
            incomplete=incomplete,
            more=True,
        )
        self._refused.update(refused)

    def _open(self, path: Path) -> _core.File | StorageError:
        """Return the open file of a path, or the error that opening it raised."""
        try:
            return open_for_transfer(
                path, self._write, self._direct, replaced=path in self._replaced
            )
        except StorageError as error:
            if error.errno in _DESCRIPTOR_ERRORS:
                raise
            return error.with_traceback(None)


def _order_of(
    batch: _Batch, files: dict[Path, object], write: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Return an order of items in which those of one file are consecutive, and the ends of the files in it.

    The items of a file are sorted by offset. If writes to a file overlap, its items keep the caller's order, because
    the bytes of the later item must remain.
    """
    positions: dict[object, list[int]] = {}
    for index, path in enumerate(batch.paths):
        positions.setdefault(files.get(path, path), []).append(index)
    count = len(batch.paths)
    if len(positions) == count:
        return range(count), range(1, count + 1)
    ends = list(itertools.accumulate(map(len, positions.values())))
    if len(positions) == 1:
        return _by_offset(range(count), batch, write), ends
    return [at for of_file in positions.values() for at in _by_offset(of_file, batch, write)], ends


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
