"""Optimizers that keep their state's tensors but replace the memory of these; budgets that become too small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.offload import offload_optimizer

if TYPE_CHECKING:
    from pathlib import Path


class Moving(torch.optim.SGD):
    """Gives the tensor that it has as state other memory in each step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param))
                state["sum"].data = state["sum"] + param.grad
                param.data.sub_(state["sum"], alpha=group["lr"])


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


@pytest.mark.parametrize("budget", ["3MiB", "64MiB"])
@pytest.mark.parametrize("kind", [Moving, torch.optim.AdamW])
def test_state_whose_memory_is_exchanged_is_that_of_the_optimizer_in_memory(
    kind: Any, budget: str, directory: Path
) -> None:
    params, others = parameters(20), parameters(20)
    plain = kind(params, lr=0.1)
    offloaded = offload_optimizer(kind(others, lr=0.1), directory, memory_budget=budget)
    step(plain, params, 4)
    step(offloaded, others, 4)
    assert all(map(torch.equal, params, others))
    for param, other in zip(params, others, strict=True):
        state = offloaded.state[other]
        assert set(state) == set(plain.state[param])
        assert all(torch.equal(state[key], value) for key, value in plain.state[param].items())
    offloaded.close()


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
