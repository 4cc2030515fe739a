"""Random bytes from a seed, which pytest's header shows, so failures can be replayed."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED_VARIABLE = "TENSORFERRY_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))

Bytes = npt.NDArray[np.uint8]


class RandomBytes:
    """Gives arrays of random bytes that depend on the session's seed and the test's name alone."""

    def __init__(self, name: str) -> None:
        self.generator = np.random.default_rng([SEED, zlib.crc32(name.encode())])

    def __call__(self, nbytes: int) -> Bytes:
        """Return a new array of nbytes random bytes."""
        return np.frombuffer(self.generator.bytes(nbytes), np.uint8).copy()

    def at(self, nbytes: int, misalignment: int) -> Bytes:
        """Return random bytes at an address that is `misalignment` modulo 4096."""
        array = aligned(nbytes, misalignment)
        array[:] = self(nbytes)
        return array


def crcs(data: bytes, nbytes: int) -> list[int]:
    """Return the CRC-32 of each chunk of ``nbytes`` bytes."""
    return [zlib.crc32(data[begin : begin + nbytes]) for begin in range(0, len(data), nbytes)]


def aligned(nbytes: int, misalignment: int = 0) -> Bytes:
    """Return an array of zeros at an address that is `misalignment` modulo 4096."""
    storage = np.zeros(nbytes + 8192, np.uint8)
    start = (misalignment - storage.ctypes.data) % 4096
    return storage[start : start + nbytes]


FOLD_NBYTES = 32 << 20


def folded(nbytes: int, apart: Sequence[slice]) -> Bytes:
    """Return an array in which all parts of 32 MiB map the same memory, except those with offsets of `apart`."""
    memory = mmap.mmap(-1, nbytes + FOLD_NBYTES)
    array = np.frombuffer(memory, np.uint8)
    map_fixed = ctypes.CDLL(None, use_errno=True).mmap
    map_fixed.restype = ctypes.c_void_p
    fold = os.memfd_create("fold")
    os.truncate(fold, FOLD_NBYTES)
    for begin in range(0, nbytes, FOLD_NBYTES):
        if not any(part.start < begin + FOLD_NBYTES and part.stop > begin for part in apart):
            place, flags = array.ctypes.data + begin, mmap.MAP_SHARED | 0x10  # MAP_FIXED
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            size, offset = ctypes.c_size_t(FOLD_NBYTES), ctypes.c_long(0)
            made = map_fixed(ctypes.c_void_p(place), size, protection, flags, fold, offset)
            assert made == place, os.strerror(ctypes.get_errno())
    os.close(fold)
    return array[:nbytes]


def long_name(nbytes: int, letter: str, suffix: str = "") -> str:
    """Return a name of so many bytes."""
    each = len(letter.encode())
    free = nbytes - len(suffix)
    return "x" * (free % each) + letter * (free // each) + suffix
