"""Optimizers of libraries, and libraries that drive optimizers: exact, or refused with a reason."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry.offload import NotSeparableError, offload_optimizer
from tests.offload import twins
from tests.offload.twins import ByNorm, Gradients, parameters
from tests.support import required

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

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


def assert_exact(
    make: Callable[[Any], Any], directory: pathlib.Path, *, steps: int = 3, budget: int = BUDGET
) -> None:
    """Train in memory and offloaded; then go on from the offloaded one's state in memory."""
    plain, offloaded = model(), model()
    optimizer = make(plain.parameters())
    on_drives = offload_optimizer(make(offloaded.parameters()), directory, memory_budget=budget)
    train(plain, optimizer, steps)
    train(offloaded, on_drives, steps)
    assert_same(plain, offloaded)
    resumed = copy.deepcopy(offloaded)
    in_memory = make(resumed.parameters())
    in_memory.load_state_dict(copy.deepcopy(on_drives.state_dict()))
    on_drives.close()
    train(plain, optimizer, 2)
    train(resumed, in_memory, 2)
    assert_same(plain, resumed)


def assert_same(left: Any, right: Any) -> None:
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(one, other)


def test_rate_of_zero_hides_nothing(directory: pathlib.Path) -> None:
    """Warm-ups begin with a rate of zero, with which a step does not show its later behaviour."""
    plain, offloaded = model(), model()
    optimizers = [ByNorm(each.parameters()) for each in (plain, offloaded)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(step / 3, 1.0))
        for each in optimizers
    ]
    assert optimizers[1].param_groups[0]["lr"] == 0
    on_drives = offload_optimizer(optimizers[1], directory, memory_budget=16 << 20)
    schedules[1].optimizer = on_drives
    train(plain, optimizers[0], 4, schedules[0])
    train(offloaded, on_drives, 4, schedules[1])
    assert_same(plain, offloaded)
    on_drives.close()


@pytest.mark.parametrize("kind", [ByNorm, torch.optim.Adafactor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [1e-3, 1e-8, 1e-45])
def test_a_small_rate_hides_nothing(
    directory: pathlib.Path, kind: Any, dtype: Any, rate: float
) -> None:
    """Its updates are rounded away with large parameters, but not with small ones or after they have grown."""
    shapes = [(600007,)] * 4
    plain, offloaded = [
        [torch.nn.Parameter((param.detach() * 0.03).to(dtype)) for param in parameters(shapes)]
        for _ in range(2)
    ]
    optimizer = kind(plain, lr=rate)
    budget = 3 * 600007 * dtype.itemsize + (64 << 10)
    on_drives = offload_optimizer(kind(offloaded, lr=rate), directory, memory_budget=budget)
    gradients = Gradients(plain, offloaded)
    twins.train(gradients, optimizer, on_drives)
    for each in (optimizer, on_drives):
        each.param_groups[0]["lr"] = 0.03
    twins.train(gradients, optimizer, on_drives)
    twins.assert_equal(plain, offloaded)
    on_drives.close()


class QuietAtFirst(ByNorm):
    """No parameter moves in the first five steps, as in RAdam's without momentum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] *= group["steps"] > 5
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def test_what_begins_only_after_some_steps_is_tried(directory: pathlib.Path) -> None:
    assert_exact(QuietAtFirst, directory, steps=8, budget=16 << 20)


class WithTable(torch.optim.SGD):
    """An attribute holds a table that is moved to the parameter's device, as in bitsandbytes' optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, foreach=False)
        self.tables = {"rates": torch.tensor([0.5, 1.0]), "counts": [0]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.tables["counts"][0] += 1
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                self.tables["rates"] = self.tables["rates"].to(param.device)
                state = self.state[param]
                whole = state.setdefault("mean", torch.zeros(param.shape, device=param.device))
                whole.add_(param.grad / (1 + param.grad.sum().abs()) * self.tables["rates"][0])
                param.data.sub_(whole)


def test_trying_an_optimizer_leaves_its_containers_alone(directory: pathlib.Path) -> None:
    optimizer = WithTable(model().parameters())
    on_drives = offload_optimizer(optimizer, directory, memory_budget=16 << 20)
    assert optimizer.tables["rates"].device.type == "cpu"
    assert optimizer.tables["counts"] == [0]
    on_drives.close()


class Around(torch.optim.Optimizer):
    """An optimizer that hands all to another one, as Lookahead and AcceleratedOptimizer do."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


def test_wrapper_of_an_optimizer_is_refused_and_nothing_is_stepped(directory: pathlib.Path) -> None:
    trained = model()
    wrapper = Around(torch.optim.AdamW(trained.parameters()))
    trained(torch.ones(4, 256)).sum().backward()
    before = copy.deepcopy(list(trained.parameters()))
    with pytest.raises(NotSeparableError, match=r"optimizer.*AdamW.*offload"):
        offload_optimizer(wrapper, directory, memory_budget=BUDGET)
    assert all(map(torch.equal, trained.parameters(), before))
    assert not wrapper.optimizer.state


class OfOwnList(torch.optim.Optimizer):
    """An optimizer that steps the parameters it has kept, and ignores its groups."""

    def __init__(self, params: Any) -> None:
        self.kept = list(params)
        super().__init__(self.kept, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.kept:
            param.data.sub_(param.grad if param.grad is not None else 0)


def test_optimizer_that_ignores_its_groups_is_refused(directory: pathlib.Path) -> None:
    trained = model()
    trained(torch.ones(4, 256)).sum().backward()
    before = copy.deepcopy(list(trained.parameters()))
    with pytest.raises(NotSeparableError, match="cannot be offloaded"):
        offload_optimizer(OfOwnList(trained.parameters()), directory, memory_budget=BUDGET)
    assert all(map(torch.equal, trained.parameters(), before))


class Boxed(torch.Tensor):
    """A tensor of two parts, as torchao's quantised states are."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class WithBoxes(torch.optim.SGD):
    """An optimizer with state tensors of a subclass."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                self.state[param].setdefault("box", Boxed(torch.zeros_like(param)))
                param.data.sub_(param.grad)


def test_state_of_other_tensor_classes_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(NotSeparableError, match=r"state\['box'\] is a Boxed"):
        offload_optimizer(WithBoxes(model().parameters()), directory, memory_budget=BUDGET)


class Projecting(torch.optim.Optimizer):
    """An optimizer that uses whole parameters only if their gradients are orthogonal to them, as AdamP does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.1)
                angle = torch.nn.functional.cosine_similarity(
                    param.view(-1), param.grad.view(-1), dim=0
                )
                at_right_angles = angle.abs() < 1e-6
                scale = mean.norm() if at_right_angles else torch.ones(())
                param.data.sub_(mean * scale * group["lr"])


def test_what_happens_only_at_right_angles_shows(directory: pathlib.Path) -> None:
    optimizers = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.ones(1024, 1024)) for _ in range(4)]
        optimizers.append(Projecting(params))
    on_drives = offload_optimizer(optimizers[1], directory, memory_budget=13 << 20)
    by_optimizer = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for param in itertools.chain(*by_optimizer):
        param.grad = torch.tensor([1.0, -1.0]).repeat(512).expand(1024, 1024).clone()
    optimizers[0].step()
    on_drives.step()
    assert all(map(torch.equal, *by_optimizer))
    on_drives.close()


class OfOneNumber(torch.optim.Optimizer):
    """Has one number for each parameter under a name that others have for tensors, as Amos does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                number = self.state[param].setdefault("exp_avg_sq", torch.zeros(()))
                number.lerp_(param.grad.square().mean(), 0.1)
                param.data.sub_(param.grad / (number.sqrt() + 1), alpha=group["lr"])


def test_state_of_other_shapes_under_known_names_is_loaded(directory: pathlib.Path) -> None:
    first, second = model(), model()
    optimizer = OfOneNumber(first.parameters())
    train(first, optimizer, 2)
    second.load_state_dict(first.state_dict())
    on_drives = offload_optimizer(OfOneNumber(second.parameters()), directory, memory_budget=BUDGET)
    on_drives.load_state_dict(optimizer.state_dict())
    train(first, optimizer, 2)
    train(second, on_drives, 2)
    assert_same(first, second)
    on_drives.close()


class Counting(torch.optim.SGD):
    """An optimizer with state in addition to that of parameters, as MADGRAD has."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["k"] = self.state.get("k", 0) + 1
        return super().step(closure)


def test_state_of_no_parameter_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(NotSeparableError, match="'k'"):
        offload_optimizer(Counting(model().parameters(), lr=0.1), directory, memory_budget=BUDGET)


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


def test_library_optimizers_are_exact(directory: pathlib.Path) -> None:
    assert_exact(required.module("lion_pytorch").Lion, directory)


@pytest.mark.parametrize("name", ["StableAdamW", "AdamP", "Amos"])
def test_pytorch_optimizers_are_exact(name: str, directory: pathlib.Path) -> None:
    optimizers = required.module("pytorch_optimizer")
    assert_exact(getattr(optimizers, name), directory, budget=13 << 20)
