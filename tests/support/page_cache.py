"""Queries which pages of a file are in the page cache, and keeps them there until the test ends.

A kernel may reclaim cached pages at any time, even if memory is free (DAMON's proactive reclaim). The pages that a test
has made warm are therefore mapped and locked, if RLIMIT_MEMLOCK allows it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    import pathlib

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for _call in (_libc.mlock, _libc.munlock, _libc.munmap):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Map(NamedTuple):
    """The mapping of a whole file; its cached pages are locked."""

    address: int
    nbytes: int

    def part(self, begin: int, nbytes: int) -> tuple[int, int]:
        """Return the address and size of the pages that a range of the file touches (0 bytes: all from there)."""
        end = min(begin + nbytes if nbytes else self.nbytes, self.nbytes)
        begin = min(begin, end) // mmap.PAGESIZE * mmap.PAGESIZE
        return self.address + begin, end - begin


_maps: dict[tuple[int, int], _Map] = {}  # by device and inode


def make_cold(path: pathlib.Path, begin: int = 0, nbytes: int = 0) -> None:
    """Have the page cache forget a range of a file (0 bytes: all from there)."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if held := _maps.get(_identity(file)):
            address, part_nbytes = held.part(begin, nbytes)
            _done(_libc.munlock(address, part_nbytes))
            _done(_libc.madvise(address, part_nbytes, mmap.MADV_DONTNEED))
        os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_DONTNEED)


def make_warm(path: pathlib.Path, begin: int = 0, nbytes: int = 0) -> None:
    """Have the page cache hold a range of a file (0 bytes: all from there)."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more than that
        file.seek(begin)
        file.read(nbytes or -1)
        address, part_nbytes = _map(file).part(begin, nbytes)
        if _libc.mlock(address, part_nbytes) != 0:
            number = ctypes.get_errno()
            if number not in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
                raise OSError(number, os.strerror(number), str(path))


def let_go() -> None:
    """Unlock and unmap all pages."""
    while _maps:
        _, held = _maps.popitem()
        _done(_libc.munmap(held.address, held.nbytes))


def _map(file: BinaryIO) -> _Map:
    """Return the map of a file; not by the mmap module, which keeps a descriptor of the file that tests would find."""
    nbytes = os.fstat(file.fileno()).st_size
    held = _maps.get(_identity(file))
    if held is None:
        flags, descriptor = mmap.MAP_SHARED, file.fileno()
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, flags, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            _done(-1)
        held = _maps[_identity(file)] = _Map(address, nbytes)
        _done(_libc.madvise(address, nbytes, mmap.MADV_RANDOM))  # no more than that either
    assert held.nbytes == nbytes, "a file that is held has grown or shrunk"
    return held


def _identity(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _done(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
