"""Steps on a device other than that of the slots: here the host stands in for the device, with real copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry import offload
from tensorferry.offload import optimizer as optimizers
from tensorferry.offload.equality import same
from tensorferry.offload.staging import Staging
from tests.offload.numbered import (
    ALL,
    SOME,
    assert_same,
    in_memory,
    offloaded,
    parameters,
    step,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every optimizer stage its buckets; return how many bytes have been loaded."""
    monkeypatch.setattr(
        offload.OffloadedOptimizer, "_device_to_stage_on", lambda _: torch.device("cpu")
    )
    loaded: list[int] = []
    load = Staging.load

    def counted(self: Any, memory: torch.Tensor) -> torch.Tensor:
        loaded.append(memory.numel())
        here = load(self, memory)
        assert here.data_ptr() != memory.data_ptr()
        return here

    monkeypatch.setattr(Staging, "load", counted)
    return loaded


@pytest.mark.parametrize("budget", [SOME, ALL])
def test_steps_on_a_device_are_those_in_memory(
    directory: Path, budget: int, staged: list[int]
) -> None:
    with_us, expected = offloaded(parameters(), directory, budget), in_memory(0)
    for number in range(5):
        for each in (with_us, expected):
            step(each, number, without=[number % 3])
    assert_same(with_us, expected)
    assert sum(staged) >= 3 * with_us.stats()["state_nbytes"]
    again = offloaded(parameters(), directory)
    again.load_state_dict(expected.state_dict())
    assert same(again.state_dict(), expected.state_dict())
    again.close()
    with_us.close()


@pytest.mark.parametrize("first", [0, 1])
def test_buckets_of_a_later_group_may_be_larger(directory: Path, first: int) -> None:
    found = []
    for place in (None, directory):
        params = parameters([(17,), (300, 200)])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([{"params": params[:first]}])
        if place is not None:
            optimizer = offload.offload_optimizer(optimizer, place, memory_budget=ALL)
        optimizer.add_param_group({"params": params[first:]})
        for number in range(2):
            step(optimizer, number)
        found.append(optimizer)
    assert_same(*found)
    found[1].close()  # type: ignore[attr-defined]


def test_masters_are_stepped_on_the_device(directory: Path) -> None:
    with_us = offloaded(
        parameters(dtype=torch.bfloat16), directory, commit="step", master_dtype=torch.float32
    )
    masters = [
        torch.nn.Parameter(param.detach().float()) for param in parameters(dtype=torch.bfloat16)
    ]
    expected = torch.optim.AdamW(masters)
    for number in range(3):
        step(with_us, number)
        for master, param in zip(masters, with_us.param_groups[0]["params"], strict=True):
            master.grad = param.grad.float()
        expected.step()
    for master, param in zip(masters, with_us.param_groups[0]["params"], strict=True):
        assert torch.equal(with_us.read_state(param)["master"], master.detach())
        assert torch.equal(param.detach(), master.detach().to(torch.bfloat16))
    with_us.close()


def test_step_device_reaches_the_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    class Told(optimizers.Lender):
        def __init__(self, *arguments: Any, on_host: bool) -> None:
            told.append(on_host)
            super().__init__(*arguments, on_host=on_host)

    monkeypatch.setattr(optimizers, "Lender", Told)
    for device in ("cpu", "param"):
        with_us, expected = offloaded(parameters(), directory, step_device=device), in_memory(1)
        step(with_us, 0)
        assert_same(with_us, expected)
        with_us.close()
    assert told == [True, False]
