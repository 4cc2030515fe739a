"""Whether GPUs can be measured with, and by gds_handle; asked in this process, which is to use them."""

from __future__ import annotations

import importlib.util

import tensorferry
from tensorferry import _core

# What the core calls the engine of a gds_handle that goes past host memory.
CUFILE = "cufile"


def device_count() -> int:
    """Return the number of GPUs that torch can use."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_gpu() -> str | None:
    """Return why CUDA tensors cannot be made and moved here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    if device_count() == 0:
        return "torch finds no CUDA device on this machine"
    return _core.cuda_refusal()


def why_no_gds() -> str | None:
    """Return why no gds_handle can be made here, or None."""
    try:
        tensorferry.gds_handle().close()
    except (tensorferry.EngineUnavailableError, ValueError) as refusal:
        return str(refusal)
    return None


def gds_uses_cufile() -> bool:
    """Return whether a gds_handle moves GPU memory by cuFile; if not, it does so as aio_handle does."""
    with tensorferry.gds_handle() as handle:
        return handle.engine.partition(" ")[0] == CUFILE
