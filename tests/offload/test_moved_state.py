"""Optimizers that keep their state's tensors but replace the memory of these; budgets that become too small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload import offload_optimizer

if TYPE_CHECKING:
    from pathlib import Path


def parameters(count: int = 6, length: int = 70_000) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(length, generator=generator).view(7, -1))
        for _ in range(count)
    ]


def step(optimizer: Any, params: list[Any], steps: int) -> None:
    for number in range(steps):
        for at, param in enumerate(params):
            param.grad = torch.full_like(param, 0.01 * (number + at + 1))
        optimizer.step()


def test_a_group_that_exceeds_the_budget_moves_what_was_in_memory_to_slots(directory: Path) -> None:
    params, others = parameters(), parameters()
    more, other_more = parameters(20), parameters(20)
    plain = torch.optim.AdamW(params, lr=0.1)
    offloaded = offload_optimizer(
        torch.optim.AdamW(others, lr=0.1), directory, memory_budget="8MiB"
    )
    step(plain, params, 2)
    step(offloaded, others, 2)
    assert offloaded.stats()["read_nbytes"] == 0
    plain.add_param_group({"params": more})
    offloaded.add_param_group({"params": other_more})
    step(plain, params + more, 3)
    step(offloaded, others + other_more, 3)
    assert offloaded.stats()["read_nbytes"] > 0
    assert all(map(torch.equal, params + more, others + other_more))
    offloaded.close()
