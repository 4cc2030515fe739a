"""Data and sizes of files for the tests of stores."""

import numpy as np

SEGMENT = 64 << 10


def pattern(nbytes, seed=0):
    """Return random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def full(value, nbytes):
    """Return bytes that are all the same."""
    return np.full(nbytes, value, np.uint8)
