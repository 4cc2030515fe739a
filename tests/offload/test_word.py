"""Classes that are not in the table: refused without the user's word, and stepped by it with one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tensorferry import offload
from tensorferry.offload import MemoryBudgetError, NotSeparableError, check, kinds
from tensorferry.offload.equality import same
from tests.offload.twins import (
    MATRICES,
    SHAPES,
    SMALL,
    ByNorm,
    Gradients,
    assert_equal,
    assert_same_state,
    copies,
    parameters,
    train,
)


class Simple(torch.optim.Optimizer):
    """SGD with momentum; subclasses add to it."""

    def __init__(self, params: Any, lr: float = 0.1, **values: Any) -> None:
        super().__init__(params, {"lr": lr, **values})

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                if "m" not in state:
                    state["m"] = torch.zeros_like(param)
                state["m"].mul_(0.9).add_(param.grad)
                param.add_(state["m"] * self.scale(group, param, state), alpha=-group["lr"])


class Counting(Simple):
    """Counts its steps in a group, in an attribute, and in a tensor of a group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, k=0, n=torch.zeros(()))
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["n"] += 1

    def scale(self, group: dict[str, Any], *_: Any) -> Any:
        return 1 / (self.count * group["k"] * group["n"])


class Replacing(Simple):
    """Makes new state tensors, some of them late, in nested containers, and exchanges their memory."""

    def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
        state["steps"] = state.get("steps", 0) + 1
        older = state.get("older", {"two": [torch.zeros_like(param), 0]})["two"]
        state["older"] = {"two": [older[0] + state["m"], older[1] + 1]}
        if state["steps"] == 3:
            state["late"], state["vector"] = state["m"].clone(), torch.ones(300)
        if "late" in state:
            state["m"], state["late"] = state["late"], state["m"]
            state["late"].data = state["late"] * 0.5
        return param.norm() / (state["m"].norm() + 1e-6) + older[0] * 1e-3


class Odd(Simple):
    """Has state of single elements with arbitrary strides, which sometimes goes."""

    def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
        odd = state.setdefault("odd", torch.zeros(9).as_strided((1, 1), (3, 3)))
        odd += 1
        if odd.item() % 3 == 0:
            del state["odd"]
        return 1 / odd.item()


WHOLE = [*SHAPES, *SHAPES]
MADE: list[Any] = [ByNorm, Counting, Replacing, Odd]


@pytest.mark.parametrize("budget", [300_000, 64 << 20])
@pytest.mark.parametrize("make", MADE)
def test_a_step_by_parameters_is_as_in_memory(make: Any, budget: int, offloaded: Any) -> None:
    wanted, params = parameters(WHOLE), parameters(WHOLE)
    memory, inner = make(wanted), make(params)
    drive = offloaded(inner, budget if make is not Replacing else 2 * budget, kind="per_parameter")
    gradients = Gradients(wanted, params, missing=lambda step, index: (step + index) % 4 == 3)
    train(gradients, memory, drive, steps=7)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    assert getattr(inner, "count", 7) == 7
    if budget < 64 << 20:
        assert drive.stats()["read_nbytes"] > 0
    saved, fresh = copy.deepcopy(drive.state_dict()), copies(params)
    again = make(fresh)
    again.load_state_dict(saved)
    gradients.lists = (wanted, params, fresh)
    if make is Counting:
        again.count = 7
    train(gradients, memory, drive, again, steps=2)
    assert_equal(wanted, params)
    assert_equal(wanted, fresh)


def test_an_element_wise_step_is_done_in_pieces(offloaded: Any) -> None:
    wanted, params = parameters([(300, 400)]), parameters([(300, 400)])
    memory, drive = Simple(wanted), offloaded(Simple(params), SMALL, kind="elementwise")
    assert drive.stats()["buckets"] > 1
    train(Gradients(wanted, params), memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


@pytest.mark.parametrize(
    "make", [Simple, ByNorm, lambda params: type("AdamW", (torch.optim.AdamW,), {})(params)]
)
def test_without_a_word_it_is_refused_with_the_remedy(make: Any, directory: Any) -> None:
    params = parameters()
    optimizer = make(params)
    before = copies(params)
    with pytest.raises(
        NotSeparableError, match=r'kind="per_parameter".*kind="elementwise".*check\(\)'
    ):
        offload.offload_optimizer(optimizer, directory / "state", memory_budget=SMALL)
    assert not (directory / "state").exists()
    train(Gradients(params, before), optimizer, make(before))
    assert_equal(before, params)


def test_a_package_gives_its_word_for_its_own_class_only(offloaded: Any) -> None:
    class Mine(Simple):
        pass

    class Child(Mine):
        pass

    offload.register(Mine, "elementwise")
    offloaded(Mine(parameters()))
    with pytest.raises(NotSeparableError, match="Child"):
        offloaded(Child(parameters()), path="never made")
    for cls, kind, error in [
        (Mine, "both", ValueError),
        (torch.optim.Adafactor, "elementwise", ValueError),
        (int, "elementwise", TypeError),
        (Mine(parameters()), "elementwise", TypeError),
    ]:
        with pytest.raises(error):
            offload.register(cls, kind)


def test_a_word_may_not_claim_more_than_the_table(offloaded: Any) -> None:
    with pytest.raises(ValueError, match="depends on whole parameters"):
        offloaded(torch.optim.Adafactor(parameters()), kind="elementwise")
    with pytest.raises(ValueError, match="kind: 'pieces'"):
        offloaded(Simple(parameters()), kind="pieces")
    drive = offloaded(torch.optim.AdamW(parameters([(300, 400)])), 2 << 20, kind="per_parameter")
    assert drive.stats()["buckets"] == 1


class ByTotal(Simple):
    """Keeps the sum of all gradients in its group, as Prodigy does."""

    def begin(self, group: dict[str, Any]) -> None:
        grads = [param.grad for param in group["params"] if param.grad is not None]
        group["d"] = sum(float(grad.abs().sum()) for grad in grads)

    def scale(self, group: dict[str, Any], *_: Any) -> Any:
        return 1 / (1 + group["d"])


def test_a_value_of_a_group_that_depends_on_all_parameters_raises(offloaded: Any) -> None:
    params = parameters(WHOLE)
    drive = offloaded(ByTotal(params), kind="per_parameter")
    Gradients(params).give()
    with pytest.raises(NotSeparableError, match=r"param_groups\[0\]\['d'\]"):
        drive.step()
    with pytest.raises(offload.OffloadError, match="half done"):
        drive.step()
    assert check(ByNorm, parameters(), kind="per_parameter") == []


class OfAll(Simple):
    """Keeps state that belongs to no parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1  # type: ignore[index]


class FromStart(Simple):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["k"] = torch.zeros(1)  # type: ignore[index]


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


class WithBoxes(Simple):
    def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
        state.setdefault("box", Boxed(torch.zeros_like(param)))
        return 1.0


class Around(torch.optim.Optimizer):
    """Hands all to another optimizer, as Lookahead and AcceleratedOptimizer do."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.AdamW(params)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


def with_own_step(params: Any) -> torch.optim.Optimizer:
    made = Simple(params)
    made.step = lambda closure=None: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OfAll, "state for 'all'"),
        (FromStart, "state for 'k'"),
        (WithBoxes, "Boxed"),
        (with_own_step, "step has been replaced"),
    ],
)
def test_what_no_word_can_make_exact_is_refused_and_untouched(
    make: Any, why: str, offloaded: Any
) -> None:
    params = parameters()
    optimizer, before = make(params), copies(params)
    random = torch.get_rng_state()
    state = dict(optimizer.state)
    with pytest.raises((NotSeparableError, TypeError), match=why):
        offloaded(optimizer, kind="per_parameter")
    assert_equal(before, params)
    assert dict(optimizer.state) == state
    assert torch.equal(torch.get_rng_state(), random)


def test_a_wrapper_is_refused_as_any_class_that_is_not_known(offloaded: Any) -> None:
    with pytest.raises(NotSeparableError, match="Around"):
        offloaded(Around(parameters()))


def test_the_budget_that_is_said_to_be_needed_is_enough_for_every_step(offloaded: Any) -> None:
    class OfOnes(Simple):
        """Has state tensors of one element, which is also the shape of a parameter (as QHAdam does)."""

        def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
            state.setdefault("w", torch.zeros(1)).add_(1)
            state.setdefault("v", torch.zeros_like(param)).add_(param.grad)
            return 1 / state["w"]

    shapes = [(200, 2), (200,), (200, 200), (200,), (1, 200), (1,)]
    for kind in kinds.KINDS:
        wanted, params = parameters(shapes), parameters(shapes)
        with pytest.raises(MemoryBudgetError) as caught:
            offloaded(OfOnes(params), 1, kind=kind, path="never made")
        memory = OfOnes(wanted)
        drive = offloaded(OfOnes(params), caught.value.needed_nbytes, kind=kind)
        train(Gradients(wanted, params), memory, drive, steps=4)
        assert_equal(wanted, params)
        drive.close()


def test_state_that_outgrows_the_budget_raises_before_the_next_step_and_is_whole(
    offloaded: Any, directory: Any
) -> None:
    class Growing(Simple):
        def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
            state["n"] = state.get("n", 0) + 1
            state[f"more {state['n']}"] = state["m"].clone()
            return 1.0

    wanted, params = parameters([(200, 100)] * 6), parameters([(200, 100)] * 6)
    memory, drive = Growing(wanted), offloaded(Growing(params), 700_000, kind="per_parameter")
    gradients = Gradients(wanted, params)
    for _ in range(20):
        gradients.give()
        try:
            drive.step()
        except MemoryBudgetError as error:
            needed = error.needed_nbytes
            break
        memory.step()
    assert needed > 700_000
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    drive.checkpoint(directory / "kept")
    larger = offloaded(Growing(params), needed, kind="per_parameter", path=directory / "larger")
    larger.restore(directory / "kept")
    memory.step()
    larger.step()
    assert_equal(wanted, params)


def test_hooks_run_once_a_step_although_the_step_calls_that_of_its_class(offloaded: Any) -> None:
    class Warm(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    torch.optim.AdamW(
        parameters()
    )  # torch puts hooks around step() of a class when it is first used
    params = parameters()
    drive = offloaded(Warm(params), kind="elementwise")
    calls: list[str] = []
    drive.register_step_pre_hook(lambda *_: calls.append("before"))
    drive.register_step_post_hook(lambda *_: calls.append("after"))
    train(Gradients(params), drive, steps=3)
    assert calls == ["before", "after"] * 3


def test_what_a_step_compiles_stays_compiled(offloaded: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiling(Simple):
        def scale(self, group: dict[str, Any], param: Any, state: dict[Any, Any]) -> Any:
            return torch.compile(lambda: param * 0 + 2, backend=backend, dynamic=True)()

    params = parameters()
    drive = offloaded(Compiling(params), 64 << 20, kind="per_parameter")
    graphs.clear()
    torch._dynamo.reset()
    train(Gradients(params), drive)
    assert graphs


class Averaging(torch.optim.Optimizer):
    """Trains at one place and computes at another, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "trains": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param]
                state.setdefault("z", param.clone()).sub_(param.grad, alpha=group["lr"])
                param.lerp_(state["z"], 0.25)

    def train(self) -> None:
        self._move(True, 1.25)

    def eval(self) -> None:
        self._move(False, 0.2)

    @torch.no_grad()
    def _move(self, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
            group["trains"] = trains


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
def test_train_and_eval_act_on_what_is_offloaded(offloaded: Any, budget: int) -> None:
    wanted, params = parameters(), parameters()
    memory, inner = Averaging(wanted), Averaging(params)
    drive = offloaded(inner, budget, kind="elementwise")
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    for of_memory, of_drive in (
        (memory.eval, drive.eval),
        (memory.train, inner.train),
        (memory.eval, inner.eval),
    ):
        of_memory()
        of_drive()
        assert_equal(wanted, params)
        assert drive.param_groups[0]["trains"] == memory.param_groups[0]["trains"]
    memory.train()
    drive.train()
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    assert not hasattr(offloaded(torch.optim.SGD(parameters(), 0.1)), "train")


def test_an_optimizer_that_raised_cannot_be_retried_and_says_so(offloaded: Any) -> None:
    class Raising(Simple):
        bad = False

        def begin(self, group: dict[str, Any]) -> None:
            if Raising.bad:
                raise RuntimeError("no")

    wanted, params = parameters(), parameters()
    memory, drive = Raising(wanted), offloaded(Raising(params), kind="per_parameter")
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=1)
    kept = copy.deepcopy(drive.state_dict())
    Raising.bad = True
    with pytest.raises(RuntimeError, match="no"):
        drive.step()
    Raising.bad = False
    for call in (drive.retry, drive.step):
        with pytest.raises(offload.OffloadError, match="cannot be finished"):
            call()
    drive.load_state_dict(kept)
    train(gradients, memory, drive, steps=2)
    assert_equal(wanted, params)


def test_check_says_what_differs() -> None:
    found = check(ByNorm, parameters([(300, 200), (7,)]), kind="elementwise", steps=3)
    assert found[0].startswith("step 1: parameter 0 of shape (300, 200) differs in ")
    assert check(Simple, parameters(MATRICES), kind="elementwise", master_dtype=torch.float64) == []
    with pytest.raises(NotSeparableError):
        check(ByNorm, parameters())
    with pytest.raises(ValueError, match="steps"):
        check(torch.optim.AdamW, parameters(), steps=0)


def test_groups_without_gradients_count_their_steps(offloaded: Any) -> None:
    def made(params: Any) -> Counting:
        return Counting([{"params": params[:2]}, {"params": params[2:]}])

    wanted, params = parameters(WHOLE), parameters(WHOLE)
    memory, drive = made(wanted), offloaded(made(params), 300_000, kind="per_parameter")
    gradients = Gradients(
        wanted, params, missing=lambda step, index: step == 3 or (step < 2 and index < 2)
    )
    train(gradients, memory, drive, steps=4)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    assert drive.param_groups[0]["k"] == 4
    assert same(drive.param_groups[0]["n"], torch.tensor(8.0))  # the groups share this tensor
