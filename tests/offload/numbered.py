"""Numbered steps: the gradients of a step are the same for every optimizer, so another one can continue a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensorferry import offload
from tests.offload import twins

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

SHAPES = [(300, 200), (17,), (64, 64), (5000,), ()]
SOME, OTHER, ALL = 300 << 10, 500 << 10, 64 << 20

Params = list[torch.nn.Parameter]


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Params:
    return twins.parameters(shapes, dtype, seed)


def step(optimizer: torch.optim.Optimizer, number: int, *, without: Collection[int] = ()) -> None:
    """Step with the gradients that belong to a number; some parameters have none."""
    make = torch.Generator().manual_seed(100 + number)
    for index, param in enumerate(params_of(optimizer)):
        grad = torch.randn(param.shape, generator=make).to(param.dtype)
        param.grad = None if index in without else grad
    optimizer.step()


def in_memory(steps: int) -> torch.optim.Optimizer:
    """Return an optimizer that has made the first steps."""
    optimizer = torch.optim.AdamW(parameters())
    for number in range(steps):
        step(optimizer, number)
    return optimizer


def offloaded(
    params: Params, directory: Path, budget: int = SOME, **more: Any
) -> offload.OffloadedOptimizer:
    inner = torch.optim.AdamW(params, lr=more.pop("lr", 1e-3))
    return offload.offload_optimizer(inner, directory, memory_budget=budget, **more)


def params_of(optimizer: torch.optim.Optimizer) -> Params:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_same(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    """Compare parameters and the results of state_dict(), bit for bit."""
    twins.assert_equal(params_of(left), params_of(right))
    twins.assert_same_state(left, right)
