"""Functions that check whether this process can use GPUs and gds_handle for measurements."""

from __future__ import annotations

import importlib.util

import tensorferry
from tensorferry import _core

# The core's name for the engine of a gds_handle that bypasses host memory.
CUFILE = "cufile"


NO_TORCH = "torch is not installed (pip install torch)"


def device_count() -> int:
    """Return the number of GPUs that torch can use."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def torch_gpu_refusal() -> str | None:
    """Return why torch cannot use a GPU, or None if it can."""
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    if device_count():
        return None
    import torch

    reason = "no device exists"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "it is a CPU-only build"
    else:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # the error of any type has the reason
            reason = str(error).strip().partition("\n")[0]
    return f"torch finds no CUDA device: {reason}"


def gpu_refusal() -> str | None:
    """Return why CUDA tensors cannot be created and transferred, or None if they can."""
    return torch_gpu_refusal() or _core.cuda_refusal()


def gds_refusal() -> str | None:
    """Return why a gds_handle cannot be created, or None if it can."""
    try:
        tensorferry.gds_handle().close()
    except (tensorferry.EngineUnavailableError, ValueError) as refusal:
        return str(refusal)
    return None


def gds_uses_cufile() -> bool:
    """Return whether a gds_handle transfers GPU memory with cuFile. If not, it transfers as an aio_handle does."""
    with tensorferry.gds_handle() as handle:
        return handle.engine.partition(" ")[0] == CUFILE
