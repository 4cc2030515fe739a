"""Random bytes that any failure can be replayed with: the seed stands in pytest's header."""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np
import numpy.typing as npt

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
        """Return random bytes whose address is `misalignment` modulo 4096."""
        array = aligned(nbytes, misalignment)
        array[:] = self(nbytes)
        return array


def aligned(nbytes: int, misalignment: int = 0) -> Bytes:
    """Return an array of zeros whose address is `misalignment` modulo 4096."""
    storage = np.zeros(nbytes + 8192, np.uint8)
    start = (misalignment - storage.ctypes.data) % 4096
    return storage[start : start + nbytes]
