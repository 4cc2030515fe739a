"""Changes after an optimizer has been offloaded: a replaced step, and writes to its state and options."""

from __future__ import annotations

import copy
import random
import types
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from tensorferry.offload import NotSeparableError, offload_optimizer
from tensorferry.offload.optimizer_snapshot import same

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [(130, 250), (17,), (50000,), (64, 64)]
BUDGET = 300_000


def parameters() -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=random) * 0.3) for shape in SHAPES]


def give(step: int, *lists: list[torch.nn.Parameter]) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape, generator=random)
        for param in params:
            param.grad = grad.clone()


class Later(torch.optim.Optimizer):
    """An element-wise optimizer that can be switched to divide by the norm of the whole parameter."""

    def __init__(self, params: Any, when: Any, lr: float = 0.05) -> None:
        defaults = {"lr": lr, "trust": 0.3, "settings": types.SimpleNamespace(trust=False)}
        super().__init__(params, defaults)
        self.when, self.flag = when, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "m" not in state:
                    state["m"], state["t"] = torch.zeros_like(param), 0
                state["t"] += 1
                update = state["m"].mul_(0.9).add_(param.grad)
                if self.when(self, group, param, state):
                    update = update / (update.norm() + 1e-6)
                param.add_(update, alpha=-group["lr"])


def at_3(change: Any) -> Any:
    return lambda step, optimizer, params: step == 3 and change(optimizer, params)


CHANGES = {
    "a parameter's attribute": (
        lambda _, __, param, ___: getattr(param, "trust", False),
        at_3(lambda _, params: setattr(params[2], "trust", True)),
    ),
    "a group's number": (
        lambda _, group, __, ___: group["trust"] > 0.5,
        at_3(lambda optimizer, _: optimizer.param_groups[0].update(trust=0.7)),
    ),
    "the rate": (
        lambda _, group, __, ___: group["lr"] < 1e-3,
        at_3(lambda optimizer, _: optimizer.param_groups[0].update(lr=5e-4)),
    ),
    "the rate it begins with": (
        lambda _, group, __, ___: group["lr"] < 1e-4,
        lambda step, optimizer, _: optimizer.param_groups[0].update(lr=1e-5 if step < 3 else 0.05),
    ),
    "a group's object": (
        lambda _, group, __, ___: group["settings"].trust,
        at_3(lambda optimizer, _: setattr(optimizer.param_groups[0]["settings"], "trust", True)),
    ),
    "an attribute of the optimizer": (
        lambda optimizer, _, __, ___: optimizer.flag,
        at_3(lambda optimizer, _: setattr(optimizer, "flag", True)),
    ),
    "the 19th step": (lambda _, __, ___, state: state["t"] > 18, lambda *_: None),
    "each 25th step": (lambda _, __, ___, state: state["t"] % 25 == 0, lambda *_: None),
}


@pytest.mark.parametrize(("when", "change"), CHANGES.values(), ids=CHANGES)
def test_a_step_that_is_no_longer_element_wise_gets_whole_parameters(
    directory: Path, when: Any, change: Any
) -> None:
    wanted, params = parameters(), parameters()
    memory = Later(wanted, when)
    drive = offload_optimizer(Later(params, when), directory, memory_budget=BUDGET)
    assert drive.stats()["memory_nbytes"] < drive.stats()["state_nbytes"]
    for step in range(28):
        change(step, memory, wanted)
        change(step, drive, params)
        give(step, wanted, params)
        memory.step()
        drive.step()
        assert all(map(torch.equal, wanted, params))
    drive.close()


def test_a_piece_of_one_parameter_that_is_otherwise_than_the_rest_is_noticed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only some parameters are tried before each step; operations on pieces are looked at as they are done."""
    params = parameters()
    inner = Later(params, lambda _, __, ___, state: state["t"] == 20)
    drive = offload_optimizer(inner, directory, memory_budget=BUDGET)
    monkeypatch.setattr(drive._probe, "may_step_in_pieces", lambda _: True)
    for step in range(19):
        give(step, params)
        drive.step()
    with pytest.raises(NotSeparableError, match="does not treat each element independently"):
        drive.step()
    drive.close()


COUNTS = {"n": 0}
CALLS = 0


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None, calls: Any = [0]) -> Any:  # type: ignore[override]  # noqa: B006
        global CALLS
        COUNTS["n"] += 1
        CALLS += 1
        calls[0] += 1
        super().step()
        return {"calls": (COUNTS["n"], CALLS, calls[0])}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.5)
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": getattr(self, "mine", 7)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.mine = state_dict.pop("mine")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("budget", [200_000, 64 << 20])
def test_variables_that_a_step_counts_in_and_methods_of_its_class(
    directory: Path, budget: int
) -> None:
    COUNTS["n"] = 0
    before = CALLS
    wanted, params = parameters(), parameters()
    memory = Counting(wanted, lr=0.1, momentum=0.9)
    drive = offload_optimizer(
        Counting(params, lr=0.1, momentum=0.9), directory, memory_budget=budget
    )
    assert COUNTS["n"] == 0
    for step in range(1, 4):
        give(step, wanted, params)
        memory.step()
        assert drive.step() == {"calls": (2 * step, before + 2 * step, before + 2 * step)}
        memory.zero_grad()
        drive.zero_grad()
        assert all(map(torch.equal, wanted, params))
    assert params[0].grad is None
    saved = copy.deepcopy(drive.state_dict())
    assert same(saved, memory.state_dict())
    saved["mine"] = 8
    drive.load_state_dict(saved)
    assert drive.mine == drive.state_dict()["mine"] == 8
    drive.close()


def test_the_optimizer_itself_reads_and_loads_what_is_offloaded(directory: Path) -> None:
    wanted, params = parameters(), parameters()
    memory, inner = torch.optim.AdamW(wanted), torch.optim.AdamW(params)
    drive = offload_optimizer(inner, directory, memory_budget=BUDGET)
    give(0, wanted, params)
    memory.step()
    drive.step()
    assert same(inner.state_dict(), memory.state_dict())
    saved = copy.deepcopy(memory.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    memory.load_state_dict(copy.deepcopy(saved))
    inner.load_state_dict(saved)
    give(1, wanted, params)
    memory.step()
    drive.step()
    assert all(map(torch.equal, wanted, params))
    drive.close()


WRITES = {
    "an entry": lambda state: state.update(step=torch.tensor(1.0)),
    "all entries": lambda state: state.clear(),
    "an item": lambda state: state.__setitem__("step", state["step"]),
    "data": lambda state: state["exp_avg"].data.zero_(),
    "an array": lambda state: state["exp_avg"].numpy().fill(0),
    "what is there": lambda state: state["exp_avg"].mul_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_into_a_state_of_an_earlier_step_are_not_lost_silently(
    directory: Path, write: Any
) -> None:
    params = parameters()
    drive = offload_optimizer(torch.optim.AdamW(params), directory, memory_budget=BUDGET)
    give(0, params)
    drive.step()
    state = drive.state[params[2]]
    drive.step()
    write(state)
    with pytest.raises(RuntimeError, match="has no effect"):
        drive.step()
    drive.step()
    drive.close()


class Joined(torch.optim.SGD):
    """Joins parameters from some step on, by a norm of all gradients or by random numbers."""

    def __init__(self, params: Any, join: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.join, self.count = join, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        grads = [each.grad for each in self.param_groups[0]["params"] if each.grad is not None]
        if self.count > 14:
            self.join(grads)
        super().step()


def divide_by_norm(grads: list[torch.Tensor]) -> None:
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.div_(norm + 1)


def drop_some(grads: list[torch.Tensor], draw: Any) -> None:
    for grad in grads:
        if draw() < 0.5:
            grad.zero_()


JOINS = {
    "norm": divide_by_norm,
    "Python": lambda grads: drop_some(grads, random.random),
    "NumPy": lambda grads: drop_some(grads, numpy.random.random),
    "torch": lambda grads: drop_some(grads, lambda: torch.rand(())),
}


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_a_step_that_joins_parameters_later_is_refused_and_nothing_has_changed(
    directory: Path, join: Any
) -> None:
    numpy.random.seed(1)
    random.seed(1)
    wanted, params = parameters(), parameters()
    memory = Joined(wanted, join)
    before = random.getstate(), numpy.random.random(), random.random()
    numpy.random.seed(1)
    random.setstate(before[0])
    drive = offload_optimizer(Joined(params, join), directory, memory_budget=BUDGET)
    for step in range(14):
        give(step, wanted, params)
        memory.step()
        drive.step()
    assert (numpy.random.random(), random.random()) == before[1:]
    give(14, params)
    with pytest.raises(NotSeparableError, match="nothing has changed"):
        drive.step()
    assert all(map(torch.equal, wanted, params))
    assert same(drive.state_dict()["state"], memory.state_dict()["state"])
    drive.close()


def test_a_parameter_that_lies_with_gaps_is_compared_as_it_lies(directory: Path) -> None:
    def made() -> list[torch.nn.Parameter]:
        draw = torch.Generator().manual_seed(1)
        shapes = [(333, 77), (1000,), (40000,), (39000,)]
        return [
            torch.nn.Parameter(torch.randn(*each, 2, generator=draw)[..., 0]) for each in shapes
        ]

    wanted, params = made(), made()
    memory = torch.optim.Adafactor(wanted)
    drive = offload_optimizer(torch.optim.Adafactor(params), directory, memory_budget=200_000)
    assert drive.stats()["memory_nbytes"] < drive.stats()["state_nbytes"]
    for step in range(5):
        give(step, wanted, params)
        memory.step()
        drive.step()
        assert all(map(torch.equal, wanted, params))
    drive.close()


def test_what_hooks_keep_in_the_state_beside_parameters_is_there(directory: Path) -> None:
    params = parameters()
    drive = offload_optimizer(torch.optim.AdamW(params), directory, memory_budget=BUDGET)
    drive.register_load_state_dict_post_hook(
        lambda optimizer: optimizer.state.update(loads={"count": 1})
    )
    drive.load_state_dict(drive.state_dict())
    assert drive.state["loads"] == drive.state_dict()["state"]["loads"] == {"count": 1}
    del drive.state["loads"]
    assert "loads" not in drive.state
    drive.close()
