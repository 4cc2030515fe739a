"""A state that is sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "same": Replicate()}


def whole(seed: int = 0) -> dict[str, torch.Tensor]:
    """The state as one process sees it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(37, 50, generator=generator),
        "columns": torch.randn(64, 33, generator=generator).to(torch.bfloat16),
        "few": torch.randn(1, 5, generator=generator, dtype=torch.float64),
        "same": torch.randn(100, generator=generator),
        "large": torch.randn(1 << 10, 1 << 10, generator=generator),
        "deep": torch.randn(8, 6, 4, generator=generator).half(),
    }


def distributed(seed: int = 0) -> dict[str, Any]:
    """This rank's part of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS.get(name, Shard(0))])
        for name, tensor in whole(seed).items()
    }
