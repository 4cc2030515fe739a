"""Functions that tests of saving run in separate processes; some run until the process is killed."""

from __future__ import annotations

import sys

import numpy as np

from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import save_sharded


def save_numpy(path: str) -> bool:
    """Save arrays, and return whether this imports torch."""
    save_file({"a": np.arange(5)}, path)
    save_sharded({"a": np.arange(5)}, path + ".sharded")
    return "torch" in sys.modules


def load_numpy(path: str) -> bool:
    """Load, and return whether this imports torch."""
    list(load_files(path, framework="np"))
    return "torch" in sys.modules or "tensorferry.safetensors.ranks" in sys.modules


def peak_of_save(path: str, nbytes: int) -> int:
    """Save a state of so many bytes, and return how much memory that took at most."""
    import torch

    from tensorferry.tuning.stopwatch import Stopwatch

    tensors = {str(k): torch.ones(nbytes // 8, dtype=torch.uint8) for k in range(8)}
    save_file({"a": torch.ones(1)}, path)
    with Stopwatch() as watch:
        save_file(tensors, path, sync=True)
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes
