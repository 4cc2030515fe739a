"""Whether GPUs can be measured with, and by gds_handle; asked in this process, which is to use them."""

from __future__ import annotations

import importlib.util

import tensorferry
from tensorferry import _core

# What the core calls the engine of a gds_handle that goes past host memory.
CUFILE = "cufile"


NO_TORCH = "torch is not installed (pip install torch)"


def device_count() -> int:
    """Return the number of GPUs that torch can use."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_torch_has_none() -> str | None:
    """Return why torch can use no GPU here, or None."""
    if importlib.util.find_spec("torch") is None:
        return NO_TORCH
    if device_count():
        return None
    import torch

    reason = "there is none"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "it was built for processors only"
    else:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever torch raises is the answer
            reason = str(error).strip().partition("\n")[0]
    return f"torch finds no CUDA device: {reason}"


def why_no_gpu() -> str | None:
    """Return why CUDA tensors cannot be made and moved here, or None."""
    return why_torch_has_none() or _core.cuda_refusal()


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
