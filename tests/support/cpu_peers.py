"""The GPU benchmark's contenders on tensors of the CPU, to test the scenario on machines without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.scenarios import gpu


class Device:
    """No GPU."""

    def describe(self) -> dict[str, Any]:
        return {"name": "none", "torch": "any"}


Handle = partial(gpu.Handle, device="cpu")
CopyThen = partial(gpu.CopyThen, device="cpu")
CopyLimit = partial(gpu.CopyLimit, device="cpu")
StorageLimit = gpu.StorageLimit
