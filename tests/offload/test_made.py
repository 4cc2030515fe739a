"""Generated optimizers with random update rules, and trainings with them: equal to those in memory, or refused."""

from __future__ import annotations

import copy
import tempfile
import types
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry.offload import MemoryBudgetError, NotSeparableError, offload_optimizer
from tensorferry.offload.optimizer_snapshot import same
from tests.support.effort import examples

RULES = {
    "rate": [
        *("one", "by parameter", "by id", "by position", "attribute", "group", "counter"),
        *("shape", "dimensions"),
    ],
    "state": [
        *("none", "momentum", "two", "late", "nested", "replaced", "scalar", "exchanged", "queue"),
        *("factored", "first step of the group"),
    ],
    "move": [
        *("plain", "plain", "plain", "norm", "sign", "clips its gradient", "new data", "trust"),
        *("rows of large ones", "norm each third step", "norm of large ones"),
    ],
    "guard": [
        *("none", "none", "none", "none", "all finite", "own finite", "global norm", "not zero"),
        *("first is finite", "not huge"),
    ],
    "no gradient": ["skip", "skip", "skip", "decay", "momentum"],
    "counts in": ["nothing", "attribute", "new attribute", "list", "object", "class", "group"],
    "knows": ["nothing", "nothing", "parameters", "flags", "names"],
}
rules = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in RULES.items()})
shapes = st.lists(
    st.one_of(
        st.sampled_from([(), (30000,), (3, 4, 5)]),
        st.tuples(st.integers(1, 300), st.integers(1, 200)),
        st.tuples(st.integers(50, 400), st.just(100)),
        st.tuples(st.integers(1, 5000)),
    ),
    min_size=1,
    max_size=6,
)
events = st.sampled_from(
    [
        *(None, None, None, "infinite", "nan", "zero", "huge", "rate", "state", "load", "restore"),
        *("parameters", "none at all"),
    ]
)


class Made(torch.optim.Optimizer):
    """An optimizer that applies its generated rules."""

    calls_of_class = 0

    def __init__(self, groups: Any, rule: dict[str, str], lr: float = 0.05) -> None:
        values = types.SimpleNamespace(scale=1.0) if rule["rate"] == "group" else None
        super().__init__(groups, {"lr": lr, "k": 0, "values": values})
        self.rule = rule
        params = self.all_params()
        first, last = params[0], params[-1]
        self.rates: Any = {
            "by parameter": {first: 0.5, last: 0.25},
            "by id": {id(first): 0.5},
            "by position": [1.0 - 0.1 * at for at in range(len(params))],
        }.get(rule["rate"])
        self.calls: Any = {"attribute": 0, "list": [], "object": types.SimpleNamespace(n=0)}.get(
            rule["counts in"]
        )
        if rule["counts in"] == "new attribute":
            del self.calls
        self.known: Any = {
            "parameters": params,
            "flags": {id(param): param.dim() == 2 for param in params},
            "names": {param: f"p{at}" for at, param in enumerate(params)},
        }.get(rule["knows"])

    def all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def count(self) -> int:
        counts = self.rule["counts in"]
        if counts == "attribute":
            self.calls += 1
        elif counts == "new attribute":
            self.calls = getattr(self, "calls", 0) + 1
        elif counts == "list":
            self.calls.append(1)
            return len(self.calls)
        elif counts == "object":
            self.calls.n += 1
            return int(self.calls.n)
        elif counts == "class":
            type(self).calls_of_class += 1
            return type(self).calls_of_class
        return int(getattr(self, "calls", None) or 1)

    def skips(self, grads: list[torch.Tensor], params: list[torch.Tensor]) -> bool:
        guard = self.rule["guard"]
        first = params[0].grad if params else None
        return (
            (guard == "all finite" and not all(bool(each.isfinite().all()) for each in grads))
            or (guard == "not huge" and any(float(each.abs().sum()) > 1e5 for each in grads))
            or (guard == "first is finite" and first is not None and not first.isfinite().all())
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.count()
        params = self.all_params()
        grads = [param.grad for param in params if param.grad is not None]
        if self.skips(grads, params):
            return
        scale = 1.0
        if self.rule["guard"] == "global norm" and grads:
            norm = torch.stack([each.float().norm() for each in grads]).norm()
            scale = float(1 / norm.clamp(min=1))
        at = -1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                at += 1
                self.step_one(group, param, at, scale, count)

    def step_one(self, group: Any, param: Any, at: int, scale: float, count: int) -> None:
        rule, grad = self.rule, param.grad
        if grad is None:
            if rule["no gradient"] == "decay":
                param.mul_(0.99)
            elif rule["no gradient"] == "momentum" and "m" in self.state[param]:
                param.add_(self.state[param]["m"], alpha=-0.01)
            return
        if rule["guard"] == "own finite" and not bool(grad.isfinite().all()):
            return
        if rule["guard"] == "not zero" and float(grad.abs().sum()) == 0:
            return
        state = self.state[param]
        state["t"] = state.get("t", 0) + 1
        update = self.updated(group, param, state, grad * scale)
        rate = self.rate(group, param, at, count)
        move = rule["move"]
        if move == "clips its gradient":
            grad.clamp_(-0.1, 0.1)
        if (
            move == "norm"
            or (move == "norm each third step" and state["t"] % 3 == 0)
            or (move == "norm of large ones" and param.numel() > 20000)
        ):
            update = update / (update.norm() + 1e-6)
        if move == "sign":
            update = update.sign()
        if move == "trust" and getattr(param, "trust", False):
            update = update * (param.norm() / (update.norm() + 1e-6))
        if move == "rows of large ones" and param.dim() == 2 and param.shape[0] > 100:
            update = update / (update.norm(dim=1, keepdim=True) + 1e-6)
        if move == "new data":
            param.data = param.data - rate * update
        else:
            param.add_(update * rate, alpha=-1)

    def updated(self, group: Any, param: Any, state: Any, update: Any) -> Any:
        kind = self.rule["state"]
        if kind == "momentum":
            state["m"] = state["m"].mul_(0.9).add_(update) if "m" in state else update.clone()
            return state["m"]
        if kind == "two":
            if "m" not in state:
                state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
            state["m"].lerp_(update, 0.1)
            state["v"].mul_(0.9).addcmul_(update, update, value=0.1)
            return state["m"] / (state["v"].sqrt() + 1e-8)
        if kind == "late" and state["t"] >= 3:
            state["m"] = state.get("m", torch.zeros_like(param)) * 0.5 + update
            return state["m"]
        if kind == "nested":
            older = state.get("n", {"a": [torch.zeros_like(param), 0]})["a"]
            state["n"] = {"a": [older[0] * 0.5 + update, older[1] + 1]}
            return state["n"]["a"][0]
        if kind == "replaced":
            state["m"] = state.get("m", torch.zeros_like(param)) * 0.9 + update
            return state["m"]
        if kind == "scalar":
            state["e"] = state.get("e", torch.tensor(0.0)) + update.abs().mean().float()
            return update / (1 + state["e"])
        if kind == "exchanged":
            if "m" not in state:
                state["m"], state["n"] = torch.zeros_like(param), torch.ones_like(param)
            state["m"], state["n"] = state["n"].mul_(0.5), state["m"].add_(update)
            return state["n"]
        if kind == "queue":
            queue = state.setdefault("q", [])
            queue.append(update.clone())
            update = sum(queue) / len(queue)
            if len(queue) > 3:
                queue.pop(0)
            return update
        if kind == "factored" and param.dim() == 2:
            rows = state.get("r", torch.zeros(param.shape[0], dtype=param.dtype))
            state["r"] = rows * 0.9 + (update * update).mean(1)
            return update / (state["r"][:, None].sqrt() + 1e-4)
        if kind == "first step of the group":
            if group["k"] == 1:
                state["m"] = torch.zeros_like(param)
            return state["m"].add_(update) if "m" in state else update
        return update

    def rate(self, group: Any, param: Any, at: int, count: int) -> Any:
        kind, rate = self.rule["rate"], group["lr"]
        if kind == "by parameter":
            rate = rate * self.rates.get(param, 1.0)
        elif kind == "by id":
            rate = rate * self.rates.get(id(param), 1.0)
        elif kind == "by position":
            rate = rate * (self.rates[at] if at < len(self.rates) else 1.0)
        elif kind == "attribute":
            rate = rate * getattr(param, "lr_scale", 1.0)
        elif kind == "counter":
            rate = rate / count / group["k"]
        elif kind == "group":
            rate = rate * group["values"].scale
        elif kind == "shape":
            rate = rate / max(param.shape or (1,))
        elif kind == "dimensions":
            rate = rate / (1 + param.dim())
        if self.rule["knows"] == "flags" and self.known.get(id(param)):
            rate = rate * 0.5
        if self.rule["knows"] == "names" and self.known.get(param) == "p1":
            rate = rate * 0.5
        return rate


@settings(max_examples=examples(60))
@given(
    rule=rules,
    shapes=shapes,
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
    budget=st.sampled_from([200_000, 400_000, 1 << 20, 64 << 20]),
    commit=st.sampled_from(["none", "none", "step"]),
    split=st.booleans(),
    marks=st.integers(0, 255),
    lives=st.lists(st.tuples(events, st.sets(st.integers(0, 5))), min_size=1, max_size=8),
)
def test_as_in_memory_or_refused(
    rule: dict[str, str],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    budget: int,
    commit: Any,
    split: bool,
    marks: int,
    lives: list[tuple[str | None, set[int]]],
) -> None:
    if rule["rate"] == "group":
        commit = "none"  # an object among a group's values cannot be saved

    def parameters() -> list[torch.nn.Parameter]:
        random = torch.Generator().manual_seed(1)
        made = [
            torch.nn.Parameter((torch.randn(shape, generator=random) * 0.5).to(dtype))
            for shape in shapes
        ]
        for at, param in enumerate(made):
            if marks >> at & 1:
                param.lr_scale = 0.3  # type: ignore[attr-defined]
            if marks >> (at + 1) & 1:
                param.trust = True  # type: ignore[attr-defined]
        return made

    def optimizer(params: list[torch.nn.Parameter]) -> Made:
        if split and len(params) > 2:
            return Made([{"params": params[:2]}, {"params": params[2:], "lr": 0.01}], rule)
        return Made(params, rule)

    Made.calls_of_class = 0
    wanted, params = parameters(), parameters()
    memory, inner = optimizer(wanted), optimizer(params)
    with tempfile.TemporaryDirectory() as directory:
        try:
            try:
                drive = offload_optimizer(inner, directory, memory_budget=budget, commit=commit)
            except MemoryBudgetError as error:
                needed = error.needed_nbytes
                drive = offload_optimizer(inner, directory, memory_budget=needed, commit=commit)
        except NotSeparableError:
            assert not inner.state
            drive = None
        assert all(map(torch.equal, wanted, params))
        assert all(param.grad is None for param in params)
        assert Made.calls_of_class == 0
        if drive is None:
            return
        try:
            for number, (event, missing) in enumerate(lives):
                give_gradients(wanted, params, number, event, missing)
                happens(event, memory, drive, wanted, params, f"{directory}/kept-{number}")
                calls = Made.calls_of_class
                memory.step()
                Made.calls_of_class = calls
                drive.step()
                for one, other in zip(wanted, params, strict=True):
                    assert same(one.detach(), other.detach())
                    assert same(one.grad, other.grad)
            left, right = memory.state_dict(), drive.state_dict()
            left["state"] = {key: state for key, state in left["state"].items() if state}
            assert same(left["state"], right["state"])
            for one, other in zip(left["param_groups"], right["param_groups"], strict=True):
                assert same({**one, "values": None}, {**other, "values": None})
        finally:
            drive.close()


def give_gradients(
    wanted: list[Any], params: list[Any], number: int, event: str | None, missing: set[int]
) -> None:
    random = torch.Generator().manual_seed(100 + number)
    for at, (one, other) in enumerate(zip(wanted, params, strict=True)):
        grad = torch.randn(one.shape, generator=random) * 10.0 ** (number % 3 - 1)
        if at == number % len(wanted):
            if event in ("infinite", "nan"):
                grad.view(-1)[0] = float("inf" if event == "infinite" else "nan")
            grad *= {"zero": 0.0, "huge": 1e4}.get(event or "", 1.0)
        none = at in missing or event == "none at all"
        one.grad = None if none else grad.to(one.dtype)
        other.grad = None if none else grad.to(one.dtype, copy=True)


def happens(
    event: str | None, memory: Any, drive: Any, wanted: list[Any], params: list[Any], path: str
) -> None:
    pairs = ((memory, wanted), (drive, params))
    if event == "rate":
        for optimizer, _ in pairs:
            for group in optimizer.param_groups:
                group["lr"] = 0.02
    elif event == "parameters":
        for _, each in pairs:
            with torch.no_grad():
                each[0].mul_(0.5)
    elif event == "state":
        for optimizer, each in pairs:
            for param in each:
                for value in optimizer.state[param].values():
                    if isinstance(value, torch.Tensor):
                        value.mul_(0.5)
    elif event == "load":
        saved = copy.deepcopy(memory.state_dict())
        memory.load_state_dict(copy.deepcopy(saved))
        drive.load_state_dict(saved)
    elif event == "restore" and memory.rule["rate"] != "group":
        drive.checkpoint(path)
        drive.restore(path)
