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
from tensorferry.offload.optimizer_snapshot import same
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


class Simple(torch.optim.Optimizer):
    """SGD with momentum; subclasses define the size of an update."""

    def __init__(self, params: Any, lr: float = 0.1, **values: Any) -> None:
        super().__init__(params, {"lr": lr, **values})

    def scale(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["m"] = torch.zeros_like(param)
                    state["m"].add_(param.grad)
                    scale = self.scale(group, param, state)
                    param.add_(state["m"] * scale, alpha=-group["lr"])

    def begin(self, group: dict[str, Any]) -> None:
        pass


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


class OddState(Simple):
    """An optimizer with state of single elements that have arbitrary strides."""

    def scale(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        if "odd" not in state:
            state["odd"] = torch.zeros(9).as_strided((1, 1), (3, 3))
        state["odd"] += 1
        return 1 / state["odd"].item()


def test_single_elements_may_have_any_strides(directory: Path) -> None:
    def params() -> Params:
        odd = torch.ones(9).as_strided((1, 1), (3, 3))
        return [torch.nn.Parameter(odd), *parameters([(5000,), (70, 80)])]

    pair = Pair(directory, OddState, params)
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
        [(_, state)] = optimizer.state.items()
        assert state["exp_avg"].shape == (0,)
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 1
    alone.step(1)
    alone.assert_same()
    with pytest.raises(offload.NotSeparableError, match="raised ZeroDivisionError"):
        Pair(directory / "other", torch.optim.Adafactor, lambda: parameters([(0,)]))


def test_a_parameter_that_is_laid_out_anew_is_refused_and_its_state_is_whole(
    directory: Path,
) -> None:
    pair = Pair(directory, torch.optim.AdamW)
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


def test_groups_without_gradients_count_their_steps(directory: Path) -> None:
    class Counting(Simple):
        def begin(self, group: dict[str, Any]) -> None:
            group["k"] += 1

        def scale(self, group: dict[str, Any], *_: Any) -> Any:
            return 1 / group["k"]

    pair = Pair(
        directory,
        lambda params: Counting([{"params": params[:2]}, {"params": params[2:]}], k=0),
    )
    pair.step(0, 1, without=(0, 1))
    pair.step(2)
    pair.step(3, without=(0, 1, 2, 3, 4))
    pair.assert_same()
    assert pair.ours.param_groups[0]["k"] == 4


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


def test_a_value_that_lets_elements_depend_on_each_other_counts(directory: Path) -> None:
    class Sometimes(Lamb):
        def scale(self, group: dict[str, Any], *args: Any) -> Any:
            return super().scale(group, *args) if group["trust"] else 1.0

    pair = Pair(directory, lambda params: Sometimes(params, trust=False), budget=260 << 10)
    pair.step(0)
    assert any(unit.stop for bucket in pair.ours._buckets for unit in bucket.units)
    for groups in pair.groups():
        groups[0]["trust"] = True
    pair.step(1, 2)
    pair.assert_same()


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


class Lamb(Simple):
    def scale(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        return param.norm() / state["m"].norm()


class Upright(Simple):
    def scale(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        return max(1.0, param.shape[0] / param.shape[1]) ** 0.5 if param.dim() == 2 else 1.0


class Exchanging(Simple):
    def scale(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> Any:
        state.setdefault("n", torch.ones_like(param)).mul_(0.5)
        state["m"], state["n"] = state["n"], state["m"]
        return 1.0


class Factored(Simple):
    """Has another state for matrices that are large enough."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if param.dim() == 2 and min(param.shape) >= 150:
                    state.setdefault("rows", torch.zeros(param.shape[0])).add_(
                        (param.grad**2).mean(1)
                    )
                    factor = state["rows"][:, None]
                else:
                    factor = state.setdefault("v", torch.zeros_like(param)).add_(param.grad**2)
                param.addcdiv_(param.grad, factor.sqrt() + 1e-8, value=-group["lr"])


@pytest.mark.parametrize(
    ("make", "budget"), [(Upright, 250 << 10), (Exchanging, 300 << 10), (Factored, ALL)]
)
def test_what_depends_on_shapes_or_exchanges_state_is_exact(
    directory: Path, make: type[Simple], budget: int
) -> None:
    pair = Pair(directory, make, budget=budget)
    assert budget == ALL or not pair.ours._in_memory
    pair.step(0, 1, 2)
    pair.assert_same()


def test_a_rate_of_zero_hides_nothing(directory: Path) -> None:
    pair = Pair(directory, lambda params: Lamb(params, lr=0.0), budget=800 << 10)
    for groups in pair.groups():
        groups[0]["lr"] = 0.1
    pair.step(0, 1)
    pair.assert_same()


class ListAttribute(Simple):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[int] = []

    def begin(self, group: dict[str, Any]) -> None:
        self.history.append(1)

    def scale(self, *_: Any) -> Any:
        return 1 / len(self.history)


class StringState(Simple):
    def begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1  # type: ignore[index]


class OtherOptimizer(Simple):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(self.param_groups)


class FirstGroup(Simple):
    def __init__(self, params: Params) -> None:
        super().__init__([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])

    def scale(self, group: dict[str, Any], *_: Any) -> Any:
        return self.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (StringState, "it keeps state for 'all', which is not a parameter"),
        (OtherOptimizer, r"another optimizer \(its attribute 'base'"),
    ],
)
def test_what_cannot_be_separated_is_refused_and_untouched(
    directory: Path, make: Any, message: str
) -> None:
    optimizer = make(parameters())
    random = torch.get_rng_state()
    with pytest.raises(offload.NotSeparableError, match=message):
        offload.offload_optimizer(optimizer, directory, memory_budget=SOME)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


class Decaying(Simple):
    """Does something with parameters that have no gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
                if param.grad is not None:
                    self.state[param].setdefault("m", torch.zeros_like(param)).add_(param.grad)
                if "m" in self.state[param]:
                    param.sub_(self.state[param]["m"], alpha=group["lr"])


@pytest.mark.parametrize("make", [ListAttribute, FirstGroup, Decaying])
@pytest.mark.parametrize("budget", [300 << 10, ALL])
def test_a_step_finds_what_it_finds_in_memory(directory: Path, make: Any, budget: int) -> None:
    """Counters of any kind, other groups' values, and parameters without gradients."""
    pair = Pair(directory, make, budget=budget)
    pair.step(0, 1)
    pair.step(2, without=(0, 2))
    pair.step(3)
    pair.assert_same()


def test_an_optimizer_that_raised_cannot_be_retried_and_says_so(directory: Path) -> None:
    class Raising(Simple):
        bad = False

        def begin(self, group: dict[str, Any]) -> None:
            if Raising.bad:
                raise RuntimeError("no")

    pair = Pair(directory, Raising)
    pair.step(0)
    kept = copy.deepcopy(pair.ours.state_dict())
    Raising.bad = True
    with pytest.raises(RuntimeError, match="no"):
        step(pair.ours, 1)
    Raising.bad = False
    for call in (pair.ours.retry, pair.ours.step):
        with pytest.raises(offload.OffloadError, match="cannot be finished"):
            call()
    pair.ours.load_state_dict(kept)
    pair.step(1)
    pair.assert_same()


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
    with pytest.raises(ValueError, match="'square_avg' of parameter 0 has the shape"):
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
