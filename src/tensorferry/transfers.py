"""From arrays and files to requests: the one way that every product's bytes take into the core."""

from __future__ import annotations

import os
import sys
from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from tensorferry import _core
from tensorferry.arrays import Location, Memory, first_moved, memory_of, moved
from tensorferry.errors import StorageError, memory_moved
from tensorferry.futures import Future
from tensorferry.runtime import AnyScheduler, scheduler_of, with_descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError(f"{name}: {path!r} has a null character")
    return text


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
    if isinstance(path, bool):
        raise TypeError(f"{name}: {path!r} is neither a path nor a descriptor")
    if isinstance(path, int):
        return _core.file_from_descriptor(path, write, direct)
    text = checked_path(path, name)
    return _core.open_file(text, not write, write, write, False, False, direct)


def transfer(
    scheduler: AnyScheduler,
    target: Path | int | _core.File,
    memory: Memory,
    offset: int,
    *,
    write: bool,
    direct: str = "auto",
    truncate: bool = False,
    sync: bool = False,
    background: bool = False,  # noqa: ARG001
    name: str = "path",
) -> None:
    """Move one array and return when it is done.

    If the caller is interrupted, blocks not yet begun are cancelled; the array stays referenced until those that
    have begun are done.
    """
    address, nbytes, _, location = memory
    if isinstance(target, _core.File):
        request = scheduler.run(
            target, address, nbytes, offset, write, truncate, sync, memory, location
        )
    else:
        scheduler.check_usable()
        path = target

        def run() -> _core.Request | None:
            file = open_for_transfer(path, write, direct, name)
            return scheduler.run(
                file, address, nbytes, offset, write, truncate, sync, memory, location
            )

        request = with_descriptors(scheduler, run)
    if request is not None:
        _finish(request)
    if failure := _failure_of_memory(memory, target, offset):
        raise failure


def start(
    scheduler: AnyScheduler,
    target: Path | int | _core.File,
    array: _Array,
    memory: Memory,
    offset: int,
    *,
    write: bool,
    direct: str = "auto",
    sync: bool = False,
    background: bool = False,  # noqa: ARG001
    name: str = "path",
) -> Future[_Array]:
    """Begin to move one array."""
    address, nbytes, _, location = memory
    scheduler.check_usable()
    future = Future(array, memory)
    locations = None if location is None else [location]

    def submit() -> _core.Request:
        file = (
            target
            if isinstance(target, _core.File)
            else open_for_transfer(target, write, direct, name)
        )
        return scheduler.submit(
            [file], [address], [nbytes], [offset], write, False, sync, future, locations
        )

    request = with_descriptors(scheduler, submit)
    future._start(request, lambda: _failure_of_memory(memory, target, offset))
    return future


def _failure_of_memory(
    memory: Memory, target: Path | int | _core.File, offset: int
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
    background: bool = False,  # noqa: ARG001
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

    requests: list[_core.Request] = []
    try:
        begin = 0
        while begin < len(batch.paths):
            chunk = batch.part(begin, begin + _CHUNK)
            begin += _submit_chunk(scheduler, chunk, requests, write, direct, truncate, sync)
        for request in requests:
            request.wait(None)
    except BaseException as error:
        for request in requests:
            request.cancel()
        if isinstance(error, Exception):  # not for Ctrl-C: the arrays stay referenced until the end
            for request in requests:
                request.wait(None)
        raise
    for request in requests:
        exception = request.exception()
        if exception is not None:
            raise exception
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
        return _Batch(
            self.paths[begin:end],
            self.addresses[begin:end],
            self.nbytes[begin:end],
            self.offsets[begin:end],
            self.owners[begin:end],
            None if self.locations is None else self.locations[begin:end],
        )


_DESCRIPTOR_ERRORS = (EMFILE, ENFILE)

# Items in one submission: the first blocks fly while the next items are opened.
_CHUNK = 256


def _submit_chunk(
    scheduler: AnyScheduler,
    batch: _Batch,
    requests: list[_core.Request],
    write: bool,
    direct: str,
    truncate: bool,
    sync: bool,
) -> int:
    """Submit one request, or halves of it where descriptors are short, and return how many items that took.

    With profiles it may be fewer than all: a request is one scheduler's, so it ends before the first file that is
    another's. Items stay in order, so that the first failure in the list is the one reported.
    """
    scheduler.check_usable()

    def submit() -> tuple[_core.Request, int]:
        opened: dict[Path, _core.File] = {}
        chosen = scheduler if isinstance(scheduler, _core.Scheduler) else None
        part = batch
        for index, path in enumerate(batch.paths):
            if path in opened:
                continue
            file = open_for_transfer(path, write, direct)
            if chosen is not scheduler:
                of_file = scheduler_of(scheduler, file)
                if chosen is not None and of_file is not chosen:
                    part = batch.part(0, index)
                    break
                chosen = of_file
            opened[path] = file
        request = (chosen or scheduler).submit(
            [opened[path] for path in part.paths],
            part.addresses,
            part.nbytes,
            part.offsets,
            write,
            truncate,
            sync,
            part.owners,
            part.locations,
        )
        return request, len(part.paths)

    try:
        request, count = with_descriptors(scheduler, submit)
        requests.append(request)
        return count
    except OSError as error:
        if error.errno not in _DESCRIPTOR_ERRORS or len(batch.paths) == 1:
            raise
    # Out here the exception is gone, and with it the frame that held the files opened so far.
    half, begin = len(batch.paths) // 2, 0
    while begin < len(batch.paths):
        part = batch.part(begin, begin + half)
        begin += _submit_chunk(scheduler, part, requests, write, direct, truncate, sync)
    return begin
