"""Data for the tests of stores."""

import numpy as np

from tests.support.optional import torch

# The size from which a tensor has its own file in these tests.
SMALL, LARGE = 5000, 256 << 10


def pattern(nbytes, seed=0):
    """Return random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def full(value, nbytes):
    """Return bytes that are all the same."""
    return np.full(nbytes, value, np.uint8)


def fill(store, seed, count=12):
    """Write tensors of many sizes, with and without a file of their own."""
    tensors = {
        f"t{at}": torch.from_numpy(pattern(1 + 7919 * at * at, seed + at)) for at in range(count)
    }
    for future in [store.write(name, tensor) for name, tensor in tensors.items()]:
        future.result()
    return tensors


def assert_has(store, tensors):
    assert sorted(store) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(store.read(name).result(), tensor)
