"""Optimizers of libraries, and libraries that drive optimizers: exact, or refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.offload import offload_optimizer

if TYPE_CHECKING:
    import pathlib

BUDGET = 3 << 20  # the smallest: less than a third of AdamW's state of `model()`


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024)
    )


def train(trained: Any, optimizer: Any, steps: int, *others: Any) -> None:
    make = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        trained(torch.randn(4, 256, generator=make)).square().mean().backward()
        optimizer.step()
        for other in others:
            other.step()


def assert_same(left: Any, right: Any) -> None:
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other)


def schedules() -> dict[str, Any]:
    rates = torch.optim.lr_scheduler
    return {
        "one-cycle": lambda o: rates.OneCycleLR(o, max_lr=0.1, total_steps=10, cycle_momentum=True),
        "in sequence": lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.1), rates.CosineAnnealingLR(o, 5)], milestones=[2]
        ),
        "plateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
        "averaged": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    }


@pytest.mark.parametrize("name", schedules())
def test_schedules_go_on(name: str, directory: pathlib.Path) -> None:
    plain, offloaded = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, offloaded)]
    on_drives = offload_optimizer(optimizers[1], directory, memory_budget=BUDGET)
    for trained, optimizer in ((plain, optimizers[0]), (offloaded, on_drives)):
        schedule = schedules()[name](optimizer)
        for loss in (1.0, 2.0, 3.0, 4.0):
            train(trained, optimizer, 1)
            schedule.step(*([loss] if name == "plateau" else []))
    assert_same(plain, offloaded)
    assert on_drives.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    on_drives.close()
