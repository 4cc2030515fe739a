"""What users call: read and write arrays by path, and open files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensorferry.base.checks import Direct, Path, checked_offset, checked_path, direct_mode, is_pair
from tensorferry.transfer.arrays import memory_of, memory_or_segments
from tensorferry.transfer.files import File, in_background
from tensorferry.transfer.requests import checked_items, transfer, transfer_many
from tensorferry.transfer.runtime import default_scheduler
from tensorferry.transfer.striped import StripedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorferry.base.checks import Readable
    from tensorferry.transfer.arrays import Array
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.files import Priority

    _Path = TypeVar("_Path", bound=Path)

# What comes back as it was given: one array, or a list or tuple of arrays and of bytes to pass over.
_Given = TypeVar("_Given", bound="Array | Sequence[Array | int]")


def write(
    path: Path,
    array: Array | Iterable[Array],
    offset: int | None = None,
    *,
    truncate: bool | None = None,
    sync: bool = False,
    atomic: bool = False,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> None:
    """Write an array's bytes to a file, or those of several arrays, one after the other.

    Without an offset they are all that the file holds then, as with ``pathlib.Path.write_bytes``; with one they are
    written into it.

    Parameters
    ----------
    path : str, bytes or PathLike
        Created if missing, with mode 0666 less the umask.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        Any dtype and shape, in host memory or on an NVIDIA GPU. One of torch's or NumPy's that is not
        contiguous is copied first. Or any iterable of such: many small ones are as fast as one large one.
    offset : int, optional
        Where in the file to begin, in bytes. Bytes of the file before and behind stay as they are.
    truncate : bool, optional
        After success, end the file behind the last byte written, or leave a longer file as long as it is. By default
        it is ended where no offset is given, 0 being one. Devices have no end to be moved.
    sync : bool
        Return only when data and size would survive a power cut (fdatasync), and the name, where this process made it
        (fsync of the directory). What fails in this, or in closing the file, is raised.
    atomic : bool
        Write another file, make its data durable, and let it take this one's place by a rename: whatever ends the call
        or the machine, the path holds all of the old bytes or all of the new ones, and who has the old file open reads
        on in that. It takes space for both. Hard links to the old file stay with it, and a symbolic link is followed.
        Owner, group, permissions and POSIX ACL stay; where this process may not give them, the file is its own, and
        nobody else gets a right that he had not. Other extended attributes, capabilities among them, are lost. With
        ``sync`` the name is durable, too.
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
        Not all bytes could be written; it names the first that could not. The file is as long as before, or longer;
        unless it is making it durable that failed.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used.

    Notes
    -----
    A file that is not replaced atomically is overwritten, and ended last: who reads meanwhile finds old and new bytes,
    but never fewer than the shorter of the two. Of two such calls of one process at the same time one is all of what
    the file holds in the end. Several processes that write one file at the same time must give offsets, or ``atomic``:
    else one may end the file where another has written behind, and holes of zeros remain.

    GPU memory is written as it is when all that has been queued on its current stream has been done. Large arrays pass
    through a few page-locked buffers, so that copies and writes overlap and no host memory as large is needed.
    """
    array, memory = memory_or_segments(array, writable=False)
    past_cache, background = direct_mode(direct), in_background(priority)
    begin = checked_offset(0 if offset is None else offset, memory[1])
    if atomic:
        if offset is not None:
            raise ValueError(f"offset: {offset}, but an atomic write is of the whole file")
        _check_atomic(truncate)
        path = checked_path(path)
        _write_whole([(path, array)], sync, direct, priority, checksums)
        return
    transfer(
        default_scheduler(),
        path,
        memory,
        begin,
        write=True,
        direct=past_cache,
        truncate=bool(truncate),
        replaced=offset is None and truncate is None,
        sync=sync,
        background=background,
        checksums=checksums,
    )


@overload
def read(  # type: ignore[overload-overlap]  # a list is an iterable, too
    path: Path,
    array: _Given,
    offset: int = 0,
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> _Given: ...
@overload
def read(
    path: Path,
    array: Iterable[Array | int],
    offset: int = 0,
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> list[Any]: ...
def read(
    path: Path,
    array: Any,
    offset: int = 0,
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
    checksums: Checksums | None = None,
) -> Any:
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
    items: Iterable[tuple[Path, Array] | tuple[Path, Array, int]],
    *,
    truncate: bool | None = None,
    sync: bool = False,
    atomic: bool = False,
    direct: Direct = "auto",
    priority: Priority = "normal",
) -> None:
    """Write many arrays, all outstanding at once, and return when all are written.

    Parameters
    ----------
    items : iterable of (path, array) or (path, array, offset)
        Without an offset the file is replaced, with one it is written into, as by :func:`write`. Pieces of one file may
        be given in any order; where they overlap, the later one wins.
    truncate : bool, optional
        End each file behind the last byte that this call writes to it, if all of its pieces have been written; or
        none. By default those are ended of which a piece has no offset.
    atomic : bool
        As for :func:`write`, for each file by itself: some may have taken their places, and others not.
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
    if atomic:
        direct_mode(direct)
        in_background(priority)
        _check_atomic(truncate)
        _write_whole(_whole_items(items), sync, direct, priority, None)
        return
    transfer_many(
        default_scheduler(),
        items,
        write=True,
        direct=direct_mode(direct),
        truncate=truncate,
        sync=sync,
        background=in_background(priority),
    )


def _check_atomic(truncate: bool | None) -> None:
    if truncate is not None and not truncate:
        raise ValueError("truncate: False, but an atomic write is of the whole file")


def _whole_items(items: Iterable[Any]) -> list[tuple[Path, Any]]:
    """Return paths and arrays of an atomic call, checked as :func:`transfer_many` does."""
    found: dict[str, tuple[Path, Any]] = {}
    for index, item in enumerate(checked_items(items)):
        name = f"items[{index}]"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(f"{name}: expected (path, array), which is atomic; got {item!r}")
        asked = checked_path(item[0], name)
        path = os.path.realpath(asked)
        if path in found:
            raise ValueError(f"{name}: {path!r} comes twice")
        memory_of(item[1], writable=False, name=name)
        found[path] = asked, item[1]
    return list(found.values())


def _write_whole(
    items: list[tuple[Path, Any]],
    sync: bool,
    direct: Direct,
    priority: Priority,
    checksums: Checksums | None,
) -> None:
    from tensorferry.transfer.replacement import (
        write_whole,  # which few need, and takes a while to import
    )

    write_whole(items, sync=sync, direct=direct, priority=priority, checksums=checksums)


def read_many(
    items: Iterable[tuple[Path, Array] | tuple[Path, Array, int]],
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
) -> None:
    """Fill many arrays, all outstanding at once, and return when all are full.

    Parameters
    ----------
    items : iterable of (path, array) or (path, array, offset)
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


@overload
def open(
    path: list[_Path] | tuple[Path, ...],
    mode: str = "r",
    *,
    stripe_nbytes: int | None = None,
    direct: Direct = "auto",
    engine: str | None = None,
    block_size: int | None = None,
    queue_depth: int | None = None,
) -> StripedFile: ...
@overload
def open(
    path: Readable,
    mode: str = "r",
    *,
    direct: Direct = "auto",
    engine: str | None = None,
    block_size: int | None = None,
    queue_depth: int | None = None,
) -> File: ...
def open(
    path: Readable | list[_Path] | tuple[Path, ...],
    mode: str = "r",
    *,
    stripe_nbytes: int | None = None,
    direct: Direct = "auto",
    engine: str | None = None,
    block_size: int | None = None,
    queue_depth: int | None = None,
) -> File | StripedFile:
    """Open a file for many transfers; see :class:`File`. With several paths, one file over several drives.

    Parameters
    ----------
    path : str, bytes or PathLike, or a list or tuple of these
        The file. Several are the parts of one file, in this order: see :class:`StripedFile`. To be read, also an object
        of a bucket, by its URL (``s3://``, ``gs://``, ``az://``, ``https://``) or as a pair of an obstore store and a
        key, with the extra ``tensorferry[remote]``; the settings below mean nothing for it.
    mode : str
        As for the built-in ``open``: "r" to read, "r+" to read and write an existing file, "w" and "w+" to begin
        with an empty one, "x" and "x+" to create one that must not exist. Always binary: a "b" says nothing more.
    stripe_nbytes : int, optional
        For several paths: bytes that go to one of them before it is the next one's turn, a multiple of 4096; 1 MiB by
        default. A file must be opened with those that it was written with.
    direct : "auto", True or False
        As for :func:`read` and :func:`write`.
    engine : str, optional
        "io_uring", "libaio" or "threads"; by default TENSORFERRY_ENGINE, or the first that works.
    block_size : int, optional
        Bytes that one submission carries.
    queue_depth : int, optional
        Blocks in flight at most. Any of these three gives the file workers of its own. With none of them, the
        profile of the file's file system is used where ``tensorferry tune`` has stored one. Each of several paths has
        workers of its own in any case.

    Raises
    ------
    ValueError
        An argument is not usable.
    StorageError
        The file cannot be opened.
    EngineUnavailableError
        The engine cannot be had here.
    ImportError
        It is in a bucket, and obstore is not installed.
    """
    if isinstance(path, (list, tuple)) and not is_pair(path):
        return StripedFile(
            path,
            mode,
            stripe_nbytes=stripe_nbytes,
            direct=direct,
            engine=engine,
            block_size=block_size,
            queue_depth=queue_depth,
        )
    if stripe_nbytes is not None:
        raise ValueError("stripe_nbytes: one file has no stripes; several are given as a list")
    return File(
        path, mode, direct=direct, engine=engine, block_size=block_size, queue_depth=queue_depth
    )
