"""The public functions that read and write arrays by path, and :func:`open`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensorferry.base.checks import Direct, Path, checked_offset, checked_path, direct_mode, is_pair
from tensorferry.transfer.arrays import memory_of, memory_or_segments
from tensorferry.transfer.checksums import checked
from tensorferry.transfer.files import File, in_background
from tensorferry.transfer.requests import checked_items, transfer, transfer_many
from tensorferry.transfer.runtime import default_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Unpack

    from tensorferry.base.checks import Readable
    from tensorferry.transfer.arrays import AnyMemory, Array
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.files import Priority, ReadOptions

    # Options that the overloads of a function share. The function itself has them with their defaults.
    class _ReadOptions(ReadOptions, total=False):
        direct: Direct


# An argument that is returned unchanged: one array, or a list or tuple of arrays and of numbers of bytes to skip.
_ArrayArgument = TypeVar("_ArrayArgument", bound="Array | Sequence[Array | int]")


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
    """Write the bytes of an array, or of several consecutive arrays, to a file.

    Without an offset the bytes become the file's whole content, as with ``pathlib.Path.write_bytes``. With an offset
    they are written into the existing file.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file. It is created with mode 0666 minus the umask if it does not exist.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        An array of any dtype and shape, in host memory or on an NVIDIA GPU. A torch tensor or NumPy array that is not
        contiguous is copied first. Or any iterable of such arrays: many small ones are as fast as one large one.
    offset : int, optional
        The file position of the first byte. The file's bytes before and after the range written are kept.
    truncate : bool, optional
        True truncates the file after the last byte written, once the write has succeeded; False keeps a longer file's
        length. By default the file is truncated if no offset is given (an offset of 0 counts as given). Devices are
        never truncated.
    sync : bool
        Return only when data and size are durable (fdatasync), and also the name if this process created the file
        (fsync of the directory). An error of these calls, or of closing the file, is raised.
    atomic : bool
        Write a new file, make its data durable, and rename it to ``path``. If the call or the machine stops at any
        moment, the path holds either all old bytes or all new ones, and processes that have the old file open continue
        to read the old bytes. The call needs space for both files. Other hard links still name the old file, and a
        symbolic link is followed. Owner, group, permissions and POSIX ACL are kept; where this process may not set
        them, the new file belongs to the user of the process, and no other user gains a right. Other extended
        attributes, including capabilities, are lost. With ``sync`` the rename is durable, too.
    direct : "auto", True or False
        "auto" and True bypass the page cache (O_DIRECT), "auto" only if the file system supports it. False writes
        through the page cache.
    priority : "normal" or "background"
        A background transfer gives way to others: while these wait, it gets one block of 17.
    checksums : Checksums, optional
        Receives the CRC-32s of the bytes written.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; nothing was changed.
    StorageError
        Not all bytes could be written; the error has the offset of the first that could not, and the file is not
        shorter than before. Or only the sync failed: then the file may have been truncated already.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used.

    Notes
    -----
    Without ``atomic`` the file is overwritten in place and truncated last. A concurrent reader sees a mixture of old
    and new bytes, and never fewer bytes than the shorter of the two contents. When two such calls of one process
    overlap, the file finally holds the complete content of one of them. Several processes that write one file at the
    same time must use offsets or ``atomic``: otherwise one may truncate the file while another writes beyond its new
    end, which leaves holes of zeros.

    GPU memory is written with the content that it has after all work queued on its current stream. Large arrays pass
    through a few pinned bounce buffers: copies and writes overlap, and host memory of the array's size is not needed.
    """
    array, memory = _memory_of_argument(array, writable=False)
    path = checked_path(path)
    past_cache, background = direct_mode(direct), in_background(priority)
    begin = checked_offset(0 if offset is None else offset, memory[1])
    if atomic:
        if offset is not None:
            raise ValueError(f"offset: an atomic write replaces the whole file (got {offset})")
        if checksums is not None:
            checked(checksums)
        _write_atomically([(path, array)], truncate, sync, direct, priority, checksums)
        return
    transfer(
        *(default_scheduler(), path, memory, begin, True, sync, background, checksums),
        direct=past_cache,
        truncate=bool(truncate),
        replaced=offset is None and truncate is None,
    )


@overload
def read(  # type: ignore[overload-overlap]  # a list is an iterable, too
    path: Path, array: _ArrayArgument, offset: int = 0, **options: Unpack[_ReadOptions]
) -> _ArrayArgument: ...
@overload
def read(
    path: Path, array: Iterable[Array | int], offset: int = 0, **options: Unpack[_ReadOptions]
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
    """Fill an array, or several consecutive arrays, with bytes of a file, and return ``array``.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file to read.
    array : torch.Tensor, numpy.ndarray, buffer, or object with ``__cuda_array_interface__`` or DLPack
        A contiguous and writable array of any dtype and shape, in host memory or on an NVIDIA GPU; all of it is
        filled. Or any iterable of such arrays and of integers, each a number of bytes of the file to skip. An iterable
        that is not a list or tuple is returned as a list. No two arrays may share memory.
    offset : int
        The file position of the first byte.
    direct : "auto", True or False
        "auto" bypasses the page cache (O_DIRECT) but uses the pages that are already in it. True never uses the page
        cache; False always reads through it.
    priority : "normal" or "background"
        As for :func:`write`.
    checksums : Checksums, optional
        Verifies each chunk before its bytes reach an array (``expected=``), or receives the CRC-32s of the bytes read.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; nothing was changed.
    ChecksumError
        The checksum of a chunk differs from the expected one.
    ShortReadError
        The file ends before the array is full.
    StorageError
        Not all bytes could be read; the error has the offset of the first that could not.
    EngineUnavailableError
        The array is in GPU memory, and the CUDA driver cannot be used.

    Notes
    -----
    GPU memory is written only after all work queued on its current stream. When the call returns, the bytes have
    arrived: work queued afterwards, on any stream, sees them.
    """
    array, memory = _memory_of_argument(array, writable=True)
    path = checked_path(path)
    how = False, False, in_background(priority), checksums
    begin = checked_offset(offset, memory[1])
    transfer(default_scheduler(), path, memory, begin, *how, direct=direct_mode(direct))
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
    """Write many arrays, all outstanding at the same time, and return when all are written.

    Parameters
    ----------
    items : iterable of (path, array) or (path, array, offset)
        As with :func:`write`, an item without an offset replaces the file, and one with an offset is written into it.
        The items of one file may be in any order; where they overlap, the file finally has the bytes of the later item.
    truncate : bool, optional
        True truncates each file after the last byte that this call writes to it, once all its items have been
        written; False truncates none. By default the files that have an item without an offset are truncated.
    atomic : bool
        As for :func:`write`, for each file separately: after a failure some files may be replaced and others not.
    sync, direct, priority
        As for :func:`write`. Each file is synced once, however many items it has.

    Raises
    ------
    ValueError, TypeError
        An item is invalid; nothing was changed.
    StorageError
        The error of the first item that failed. Its message has the number of further errors, and ``others`` holds
        them. All other items have been written.
    """
    past_cache, background = direct_mode(direct), in_background(priority)
    if atomic:
        _write_atomically(_atomic_items(items), truncate, sync, direct, priority)
    else:
        transfer_many(items, True, past_cache, truncate, sync, background)


def _memory_of_argument(array: Any, *, writable: bool) -> tuple[Any, AnyMemory]:
    """Call memory_or_segments(). If ``array`` is a path, the error says that path and array are swapped."""
    try:
        return memory_or_segments(array, writable=writable)
    except TypeError:
        if isinstance(array, (str, os.PathLike)):
            raise TypeError(
                f"array: expected an array, got {type(array).__name__} (the path comes first, then the array)"
            ) from None
        raise


def _atomic_items(items: Iterable[Any]) -> list[tuple[Path, Any]]:
    """Check the items of an atomic call, as :func:`transfer_many` checks items, and return their paths and arrays."""
    found: dict[str, tuple[Path, Any]] = {}
    for index, item in enumerate(checked_items(items)):
        name = f"items[{index}]"
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise TypeError(f"{name}: an atomic write expects (path, array), got {item!r}")
        asked = checked_path(item[0], name)
        path = os.path.realpath(asked)
        if path in found:
            raise ValueError(
                f"{name}: an atomic write replaces a whole file, and another item already replaces {path!r}"
            )
        memory_of(item[1], writable=False, name=name)
        found[path] = asked, item[1]
    return list(found.values())


def _write_atomically(
    items: list[tuple[Path, Any]],
    truncate: bool | None,
    sync: bool,
    direct: Direct,
    priority: Priority,
    checksums: Checksums | None = None,
) -> None:
    if truncate is not None and not truncate:
        raise ValueError(
            "truncate: cannot be combined with atomic=True, which replaces the whole file (got False)"
        )
    # Imported here: few programs need it, and it would slow down `import tensorferry`.
    from tensorferry.transfer.replacement import replace_files

    replace_files(items, sync=sync, direct=direct, priority=priority, checksums=checksums)


def read_many(
    items: Iterable[tuple[Path, Array] | tuple[Path, Array, int]],
    *,
    direct: Direct = "auto",
    priority: Priority = "normal",
) -> None:
    """Fill many arrays, all outstanding at the same time, and return when all are full.

    Parameters
    ----------
    items : iterable of (path, array) or (path, array, offset)
        A file with several items is opened once. No two arrays may share memory.
    direct, priority
        As for :func:`read`.

    Raises
    ------
    ValueError, TypeError
        An item is invalid; nothing was changed.
    StorageError
        The error of the first item that failed. Its message has the number of further errors, and ``others`` holds
        them.
    """
    past_cache, background = direct_mode(direct), in_background(priority)
    transfer_many(items, False, past_cache, background=background)


def open(
    path: Readable,
    mode: str = "r",
    *,
    direct: Direct = "auto",
    engine: str | None = None,
    block_size: int | None = None,
    queue_depth: int | None = None,
) -> File:
    """Open a file for many transfers.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file. For reading, the path may also be an object in a bucket: a URL (``s3://``, ``gs://``, ``az://``,
        ``https://``) or a pair of an obstore store and a key. This requires the extra ``tensorferry[remote]``, and the
        settings below have no effect.
    mode : str
        As for the built-in ``open``: "r" reads, "r+" reads and writes an existing file, "w" and "w+" start with an
        empty file, "x" and "x+" create a file that must not exist. Files are always binary; a "b" is allowed and has
        no effect.
    direct : "auto", True or False
        As for :func:`read` and :func:`write`.
    engine : str, optional
        "io_uring", "libaio" or "threads". By default the value of TENSORFERRY_ENGINE, or the first engine that works.
    block_size : int, optional
        Bytes in one submission (block).
    queue_depth : int, optional
        The maximum number of blocks in flight. If any of ``engine``, ``block_size`` and ``queue_depth`` is given, the
        file has its own workers; else it shares those of all such files. A setting that is not given is the value of
        its environment variable (TENSORFERRY_ENGINE, TENSORFERRY_BLOCK_SIZE, TENSORFERRY_QUEUE_DEPTH), or the default.

    Raises
    ------
    ValueError
        An argument is invalid.
    StorageError
        The file cannot be opened.
    EngineUnavailableError
        The engine does not work on this machine.
    ImportError
        The path is an object in a bucket, and obstore is not installed.
    """
    if isinstance(path, (list, tuple)) and not is_pair(path):
        raise TypeError(
            f"path: expected one path, got a {type(path).__name__} (remedy: to use several drives, one file on each "
            "with read_many and write_many, a TensorStore over several directories, or one file system over the "
            "drives, by md or LVM)"
        )
    return File(
        path, mode, direct=direct, engine=engine, block_size=block_size, queue_depth=queue_depth
    )
