"""Functions that tests of saving run in separate processes; some run until the process is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import save_sharded
from tests.support.child import ROOT

KILLS = int(os.environ.get("TENSORFERRY_SAVE_KILLS", "5"))
LIMITS = ("1MB", "1MB", "2MB", "1GB")


def killed(function: str, path: os.PathLike[str], seed: int) -> None:
    """Run one of these functions in a process that it has killed."""
    code = f"from tests.safetensors import programs; programs.{function}({str(path)!r}, {seed})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


def save_until_killed(path: str, seed: int) -> None:
    """Save one of two states after the other to a file, until a thread kills the process at a random moment."""
    save_file(state(2), path)  # the first call makes objects that do not count
    kill_after(random.Random(seed).uniform(0, 0.15))
    while True:
        for number in (1, 2):
            save_file(state(number), path, {"made": "by a test"})


def save_model_until_killed(path: str, seed: int) -> None:
    """Do so with models in a directory: two of as many files, one of fewer, and one of one file."""
    save_sharded(state(0), path, LIMITS[0])
    kill_after(random.Random(seed).uniform(0, 0.3))
    while True:
        for number, limit in enumerate(LIMITS):
            save_sharded(state(number), path, limit)


def state(number: int) -> dict[str, Any]:
    """Return a state in which all elements of all tensors are the same number."""
    sizes = {"a": 800_000, "b": 3, "c": 900_000, "d": 0, "e": 700_000}
    return {name: np.full(nbytes, number, "u1") for name, nbytes in sizes.items()}


def kill_after(seconds: float) -> None:
    """Have this process killed."""

    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


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
