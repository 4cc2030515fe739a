"""The exceptions for failed I/O. Problems that are found before any I/O raise ``ValueError`` or ``TypeError``."""

from __future__ import annotations

import copy
import os
from errno import EFAULT, ENOENT
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class StorageError(OSError):
    """Some bytes could not be transferred.

    Attributes
    ----------
    errno : int or None
        The error number of the system; None for a read past the end of the file.
    filename : str
        The path of the file.
    offset : int
        The file offset of the first byte that could not be transferred. For a read that was refused because the file
        is too short, this is the end of the file, or the offset of the read if that is larger; nothing was read.
    expected : int
        The number of bytes that the call was to transfer.
    transferred : int
        The number of bytes that had been transferred when the error occurred. Blocks are transferred in parallel, so
        these are not always the first bytes.
    others : tuple of StorageError
        If one call transfers several arrays, and further arrays failed: their errors, in the order of the arrays.
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
        # OSError's own method would return the message that the constructor got, not one that was set later.
        return type(self), (self.errno, self.strerror, self.filename), self.__dict__


class ShortReadError(StorageError):
    """A read reached the end of the file before the array was full."""


class ChecksumError(StorageError):
    """A chunk's bytes do not have the expected checksum.

    None of these bytes is in the caller's array, unless the read had ``Checksums(in_place=True)``: then bytes are
    compared after they have arrived there.

    Attributes
    ----------
    offset : int
        The file offset of the chunk. If several chunks are damaged, this is the one that was found first.
    nbytes : int
        The size of the chunk in bytes.
    """

    nbytes: int = 0


class EngineUnavailableError(RuntimeError):
    """No engine works on this machine, or the requested one does not; the message has the reason and the remedy."""


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
    refused: bool = False,
) -> StorageError:
    """Return the exception for a fault of the core. The core calls this function."""
    kind: type[StorageError]
    if damaged_nbytes:
        kind, reason = ChecksumError, "Checksum mismatch"
        hint = f"bytes {offset} to {offset + damaged_nbytes} do not match the checksum"
    elif end_of_file:
        kind, reason = ShortReadError, "End of file"
    else:
        kind, reason = StorageError, os.strerror(errno)
    if not hint and errno == ENOENT and operation == "open":
        hint = missing_folder(os.fsdecode(path))
    message = f"{reason} ({operation}"
    # A transfer that was refused before it began has a hint with its offset and size. Otherwise `expected` is 0 if the
    # error occurred before the size of the transfer was known.
    if expected > 0 and not refused:
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


def missing_folder(path: str) -> str:
    """Say that the folder of a path does not exist; return an empty text if it exists."""
    folder = os.path.dirname(path)  # noqa: PTH120 (shows the folder as the caller has typed it)
    return f"the folder {folder!r} does not exist" if folder and not os.path.exists(folder) else ""  # noqa: PTH110


def first_error(failures: Sequence[StorageError], what: str) -> StorageError:
    """Return the first of several errors with the rest in ``others``; its message has their number and ``what``."""
    first, *others = failures
    if others:
        first = copy.copy(first)  # another call may raise the same object
        first.strerror = f"{first.strerror}; {len(others)} more {what} failed too"
        first.others = tuple(others)
    return first


def memory_moved(path: str, offset: int, nbytes: int) -> StorageError:
    """Return the exception for a transfer of an array that released its memory before the transfer ended."""
    return StorageError(
        EFAULT,
        f"{os.strerror(EFAULT)} (the array's memory was released to torch or NumPy, for example by resize_(), before "
        f"its transfer of {nbytes} bytes at offset {offset} had ended: the transferred bytes are not valid)",
        path,
        offset=offset,
        expected=nbytes,
    )
