"""Offloaded optimizers in difficult cases: odd layouts, changing groups, dependent elements, and failed steps."""

from __future__ import annotations

import copy
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry import offload
from tensorferry.base.processes import Interrupts
from tensorferry.offload import plan
from tensorferry.offload.equality import same
from tests.offload.numbered import ALL, SOME, Params, assert_same, parameters, params_of, step
from tests.offload.twins import assert_equal, copies
from tests.support.forks import held_by_another_thread, passes_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Pair:
    """The same optimizer in memory and offloaded, with the same steps."""

    def __init__(
        self,
        directory: Path,
        make: Callable[[Params], torch.optim.Optimizer],
        params: Callable[[], Params] = parameters,
        budget: int = SOME,
        **more: Any,
    ) -> None:
        self.plain = make(params())
        self.ours = offload.offload_optimizer(
            make(params()), directory, memory_budget=budget, **more
        )

    def step(self, *numbers: int, without: tuple[int, ...] = ()) -> None:
        for number in numbers:
            step(self.plain, number, without=without)
            step(self.ours, number, without=without)

    def groups(self) -> Iterator[list[dict[str, Any]]]:
        yield self.plain.param_groups
        yield self.ours.param_groups

    def assert_same(self) -> None:
        assert_same(self.ours, self.plain)


# Parameters


@pytest.mark.parametrize("budget", [700 << 10, ALL])
def test_parameters_that_are_not_dense(directory: Path, budget: int) -> None:
    def params() -> Params:
        big, small = parameters([(300, 400), (40, 30)])
        views = [big.detach()[:, :200], small.detach()[:, ::2]]
        return [*map(torch.nn.Parameter, views), *parameters([(17,)])]

    pair = Pair(directory, torch.optim.AdamW, params, budget)
    pair.step(0, 1, 2)
    pair.assert_same()


@pytest.mark.parametrize("shapes", [[(), (5000,), (70, 80)], [()], [(0,), ()]])
def test_state_that_an_optimizer_begins_with_may_be_of_scalars(
    directory: Path, shapes: list[tuple[int, ...]]
) -> None:
    def make(params: Params) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, initial_accumulator_value=0.5)

    pair = Pair(directory, make, lambda: parameters(shapes))
    pair.step(0, 1, 2)
    for optimizer in (pair.plain, pair.ours):
        for more in ((), (300,), (20, 30)):
            optimizer.add_param_group({"params": parameters([more]), "lr": 0.5})
    pair.step(3, 4)
    pair.assert_same()


def test_parameters_without_elements(directory: Path) -> None:
    pair = Pair(directory, torch.optim.AdamW, lambda: parameters([(0,), (3, 0, 2), (5000,), ()]))
    pair.step(0, 1)
    pair.assert_same()
    alone = Pair(directory / "alone", torch.optim.AdamW, lambda: parameters([(0,)]))
    alone.step(0)
    for optimizer in (alone.plain, alone.ours):  # larger than the budget: no state in memory
        optimizer.add_param_group({"params": parameters([(300, 400)])})
        state = optimizer.state_dict()["state"][0]
        assert state["exp_avg"].shape == (0,)
        assert state["step"] == 1
    alone.step(1)
    alone.assert_same()


def test_a_parameter_that_is_laid_out_anew_is_refused_and_its_state_is_whole(
    directory: Path,
) -> None:
    pair = Pair(directory, torch.optim.AdamW, budget=600 << 10)
    pair.step(0, 1)
    for groups in pair.groups():
        param = groups[0]["params"][0]
        param.data = param.data.t().contiguous().t()
    before = copy.deepcopy(pair.ours.state_dict())
    assert same(before, pair.plain.state_dict())
    with pytest.raises(
        ValueError, match=r"strides \(1, 300\); when it was offloaded, it had.*strides \(200, 1\)"
    ):
        step(pair.ours, 2)
    assert same(pair.ours.state_dict(), before)
    pair.ours.load_state_dict(pair.ours.state_dict())
    pair.step(2, 3)
    pair.assert_same()


def test_parameters_that_are_there_twice_or_share_memory_are_refused(directory: Path) -> None:
    one, other = parameters([(40, 30), (17,)])
    matrix = torch.zeros(100, 20)
    parts = [torch.nn.Parameter(matrix[:60]), torch.nn.Parameter(matrix[50:])]
    for params, message in [([one, other, one], "twice"), (parts, "shares memory")]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of duplicate parameters
            optimizer = torch.optim.AdamW(params)
        with pytest.raises(ValueError, match=message):
            offload.offload_optimizer(optimizer, directory, memory_budget=SOME)
    woven = [torch.nn.Parameter(matrix[:, at::2]) for at in range(2)]
    ours = offload.offload_optimizer(torch.optim.AdamW(woven), directory, memory_budget=SOME)
    with pytest.raises(ValueError, match="shares memory"):
        ours.add_param_group({"params": [torch.nn.Parameter(matrix[3])]})
    assert len(ours.param_groups) == 1
    ours.close()


def test_thousands_of_small_parameters_are_planned_in_one_go(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    local_of = plan.local_of

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return local_of(tensor)

    monkeypatch.setattr(plan, "local_of", counted)
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1000)]
    ours = offload.offload_optimizer(torch.optim.SGD(params), directory, memory_budget=ALL)
    assert 0 < calls < 20 * len(params)
    ours.close()


# Groups


def test_a_value_that_brings_other_state_has_it_laid_out_anew(directory: Path) -> None:
    pair = Pair(directory, lambda params: torch.optim.SGD(params, lr=0.1), budget=300 << 10)
    pair.step(0)
    for groups in pair.groups():
        groups[0]["momentum"] = 0.9
    pair.step(1)
    assert pair.ours.stats()["state_nbytes"] > 0
    for groups in pair.groups():
        groups[0]["weight_decay"] = 0.1  # brings none
    pair.step(2, 3)
    pair.assert_same()
    assert pair.ours.stats()["memory_nbytes"] <= 300 << 10


@pytest.mark.parametrize("shape", [(100,), (20000,)])
def test_a_group_that_is_added_keeps_to_the_budget(directory: Path, shape: tuple[int, ...]) -> None:
    ours = offload.offload_optimizer(
        torch.optim.Adafactor(parameters([shape])), directory, memory_budget=100_000
    )
    with pytest.raises(offload.MemoryBudgetError):
        ours.add_param_group({"params": parameters([(50000,)])})
    assert len(ours.param_groups) == 1
    step(ours, 0)
    assert ours.stats()["memory_nbytes"] <= 100_000
    ours.close()


# Optimizers that behave differently with small parameters


# Masters, and parameters that are stored


@pytest.mark.parametrize("dtype", [torch.int32, "float32", torch.float32])
def test_masters_of_no_use_are_refused(directory: Path, dtype: Any) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(9, dtype=torch.complex64))])
    with pytest.raises((TypeError, ValueError), match="master_dtype: "):
        offload.offload_optimizer(optimizer, directory, memory_budget=ALL, master_dtype=dtype)


def test_masters_last_where_the_optimizer_has_no_state(directory: Path) -> None:
    def sgd(params: Params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-3)

    def offloaded(params: Params, budget: int) -> offload.OffloadedOptimizer:
        return offload.offload_optimizer(
            sgd(params), directory, memory_budget=budget, master_dtype=torch.float32
        )

    masters = [
        torch.nn.Parameter(param.detach().float()) for param in parameters(dtype=torch.bfloat16)
    ]
    expected = sgd(masters)
    ours = offloaded(parameters(dtype=torch.bfloat16), SOME)
    for number in range(6):
        step(ours, number)
        for master, param in zip(masters, ours.param_groups[0]["params"], strict=True):
            master.grad = param.grad.float()
        expected.step()
        assert_equal([master.bfloat16() for master in masters], params_of(ours))
        if number in (2, 4):  # continue with a new optimizer
            fresh = copies(params_of(ours))
            other = offloaded(fresh, 200 << 10)
            if number == 2:
                other.load_state_dict(ours.state_dict())
            else:
                ours.checkpoint(directory / "kept")
                other.restore(directory / "kept")
            ours.close()
            ours = other
    ours.close()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_all_parameters_are_resumed_with_state_or_without(directory: Path, make: Any) -> None:
    def offloaded(seed: int) -> offload.OffloadedOptimizer:
        return offload.offload_optimizer(
            make(parameters(seed=seed)), directory, memory_budget=SOME, commit="step"
        )

    ours = offloaded(1)
    for number in range(2):
        step(ours, number, without=(0, 3))
    expected, state = copies(params_of(ours)), copy.deepcopy(ours.state_dict())
    ours.close()
    again = offloaded(2)
    assert again.resume() == 2
    assert_equal(params_of(again), expected)
    assert same(again.state_dict(), state)
    again.close()


# Loading


def test_a_tensor_of_another_shape_is_refused_before_anything_is_lost(directory: Path) -> None:
    pair = Pair(directory, torch.optim.RMSprop)
    pair.step(0)
    bad = copy.deepcopy(pair.plain.state_dict())
    bad["state"][0]["square_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"'square_avg' of parameter 0 .* has the shape"):
        pair.ours.load_state_dict(bad)
    pair.step(1)
    pair.assert_same()


# Threads, forks, interrupts


def test_a_child_does_not_wait_for_a_lock_that_nobody_gives_back(directory: Path) -> None:
    pair = Pair(directory, torch.optim.AdamW)
    pair.step(0)

    def child() -> None:
        with pytest.raises(RuntimeError, match="fork"):
            pair.ours.step()
        pair.ours.close()

    with held_by_another_thread(pair.ours._lock):
        passes_in_child(child)


def test_an_inner_block_does_not_forget_the_first_interrupt() -> None:
    interrupts = Interrupts()

    def interrupt_twice() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            with interrupts.deferred():
                pass
            signal.raise_signal(signal.SIGINT)
            assert interrupts.was_repeated()

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_an_interrupt_is_heard_where_a_step_fails_too() -> None:
    interrupts = Interrupts()

    def fail() -> None:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            raise OSError("the drive")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, OSError)
    assert not interrupts.was_repeated()
