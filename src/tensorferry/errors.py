"""The exceptions. What can be known before any I/O is a ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations

import copy
import os
from errno import EFAULT
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class StorageError(OSError):
    """Some bytes could not be moved, and which.

    Attributes
    ----------
    errno : int or None
        The system's error number; None for a read past the end of the file.
    filename : str
        Path of the file.
    offset : int
        File offset of the first byte that could not be moved, in bytes.
    expected : int
        Bytes that the call was to move.
    transferred : int
        Bytes that had been moved when it failed. Blocks move in parallel, so they need not be the first ones.
    others : tuple of StorageError
        Where one call moves several arrays: the further ones that failed, in the order in which they were given.
    """

    filename: str
    offset: int
    expected: int
    transferred: int
    others: tuple[StorageError, ...]

    def __init__(
        self,
        errno: int | None,
        message: str,
        filename: str = "",
        *,
        offset: int = 0,
        expected: int = 0,
        transferred: int = 0,
        others: tuple[StorageError, ...] = (),
    ) -> None:
        super().__init__(errno, message, filename)
        self.offset = offset
        self.expected = expected
        self.transferred = transferred
        self.others = others

    def __str__(self) -> str:
        number = "" if self.errno is None else f"[Errno {self.errno}] "
        return f"{number}{self.strerror}: {self.filename!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {
            "offset": self.offset,
            "expected": self.expected,
            "transferred": self.transferred,
            "others": self.others,
        }
        return _rebuild, (type(self), self.errno, self.strerror, self.filename, keywords)


class ShortReadError(StorageError):
    """A read reached the end of the file before the array was full."""


class ChecksumError(StorageError):
    """What was read is not what its checksum is of. No byte of the chunk concerned has reached an array.

    Attributes
    ----------
    offset : int
        File offset of the first byte of the chunk, the first one of those found.
    nbytes : int
        Bytes of the chunk.
    """

    nbytes: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {"nbytes": self.nbytes}


class EngineUnavailableError(RuntimeError):
    """No engine, or not the one that was asked for, can be had here; the message has reason and remedy."""


def _rebuild(
    kind: type[StorageError],
    errno: int | None,
    message: str,
    filename: str,
    keywords: dict[str, Any],
) -> StorageError:
    return kind(errno, message, filename, **keywords)


def storage_error(
    errno: int,
    operation: str,
    path: bytes,
    offset: int,
    expected: int,
    transferred: int,
    end_of_file: bool,
    damaged_nbytes: int,
    hint: str,
) -> StorageError:
    """Build the exception for a fault of the core, which calls this."""
    kind: type[StorageError]
    if damaged_nbytes:
        kind, reason = ChecksumError, "Checksum mismatch"
        hint = f"bytes {offset} to {offset + damaged_nbytes} are not those of the checksum"
    elif end_of_file:
        kind, reason = ShortReadError, "End of file"
    else:
        kind, reason = StorageError, os.strerror(errno)
    message = f"{reason} ({operation}"
    if expected > 0:  # else it failed before there was anything to move
        message += f" at offset {offset}: {transferred} of {expected} bytes moved"
    if hint:
        message += f"; {hint}"
    error = kind(
        errno if kind is StorageError else None,
        message + ")",
        os.fsdecode(path),
        offset=offset,
        expected=expected,
        transferred=transferred,
    )
    if isinstance(error, ChecksumError):
        error.nbytes = damaged_nbytes
    return error


def first_of(failures: Sequence[StorageError], what: str) -> StorageError:
    """Return the first of several failures, which knows the others; its message counts them as ``what``."""
    first, *others = failures
    if others:
        first = copy.copy(first)  # another call may raise it as well
        first.strerror = f"{first.strerror}; {len(others)} more {what} failed too"
        first.others = tuple(others)
    return first


def memory_moved(path: str, offset: int, nbytes: int) -> StorageError:
    """Build the exception for a transfer whose array gave its memory back to its library meanwhile."""
    return StorageError(
        EFAULT,
        f"{os.strerror(EFAULT)} (the array's memory went back to torch or NumPy, as by resize_(), before its transfer "
        f"of {nbytes} bytes at offset {offset} was seen to end: what was moved cannot be trusted)",
        path,
        offset=offset,
        expected=nbytes,
    )
