"""The table of exact classes, proved: each class in each form, stepped on drives and in memory, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tensorferry.offload import NotSeparableError, check, kinds, offload_optimizer
from tests.support import required

optim = torch.optim

# A class with its options, for each of its implementations.
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
FUSED = {"fused": True}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"weight_decay": 0.1, "t0": 2.0}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adafactor": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.1}, {"initial_accumulator_value": 0.5, "weight_decay": 0.1}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True}],
    "AdamW": [{"amsgrad": True, "maximize": True}, {}],
    "Adamax": [{"weight_decay": 0.1}],
    "Muon": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}, {"weight_decay": 0.1}],
    "Rprop": [{}],
    "SGD": [
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"dampening": 0.1, "momentum": 0.5},
    ],
}
LIBRARIES: dict[str, list[dict[str, Any]]] = {
    "lion_pytorch.lion_pytorch.Lion": [{"weight_decay": 0.1}],
    "muon.SingleDeviceMuon": [{}],
    "pytorch_optimizer.optimizer.came.CAME": [{}],
    "pytorch_optimizer.optimizer.lion.Lion": [{}, {"cautious": True, "use_gc": True}],
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": [*FORMS],
    "schedulefree.sgd_schedulefree.SGDScheduleFree": [*FORMS],
}

MATRICES = [(300, 101), (64, 33), (129, 257)]
SHAPES = [*MATRICES, (20011,), (7,), (), (16, 3, 3, 5), (1, 1), (0,)]


def forms(name: str) -> list[dict[str, Any]]:
    if name == "Muon":
        return [{}]
    return [*FORMS, FUSED] if name in ("Adagrad", "Adam", "AdamW", "SGD") else FORMS


def params(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    made = [(torch.randn(each, generator=random) * 0.3).to(dtype) for each in shapes]
    return [*made, made[0].clone().t(), torch.cat((made[1], made[1]), 1)[:, ::2]]


CASES = [
    pytest.param(name, {**options, **form}, dtype, id=f"{name}-{options}-{form}-{dtype}")
    for name, several in OPTIONS.items()
    for options in several
    for form in forms(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    # torch's own fused SGD reads uninitialized memory for bfloat16: each run has another result.
    if not (name == "SGD" and form == FUSED and dtype in (torch.bfloat16, torch.float16))
    if dtype in (torch.float32, torch.bfloat16) or (options, form) == (several[0], forms(name)[0])
]


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_a_class_of_torch_is_stepped_as_in_memory(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")
    shapes = MATRICES if name == "Muon" else SHAPES
    if name == "Adafactor":
        shapes = shapes[:-1]  # torch divides by the number of elements
    threads = 1 + len(str(options)) % 2
    torch.set_num_threads(threads)
    make = functools.partial(getattr(optim, name), **options)
    try:
        make(params(shapes, dtype)[:1])
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"this torch does not have this form: {error}")
    # torch's fused SGD raises if some parameters have momentum and others get their first gradient.
    missing = not (name == "SGD" and options.get("fused") and options.get("momentum"))
    assert check(make, params(shapes, dtype), steps=9, missing=missing, seed=threads) == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
@pytest.mark.parametrize("options", [{"foreach": False}, FUSED])
def test_masters_are_stepped_as_in_memory(name: str, options: dict[str, Any]) -> None:
    if name == "Adafactor" and options == FUSED:
        pytest.skip("it has no fused form")
    make = functools.partial(getattr(optim, name), lr=0.1, **options)
    found = check(make, params(SHAPES[:-1], torch.bfloat16), master_dtype=torch.float32)
    assert found == []


@pytest.mark.parametrize(
    ("path", "options"),
    [
        pytest.param(path, each, id=f"{path}-{each}")
        for path, all_of in LIBRARIES.items()
        for each in all_of
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_of_a_library_is_stepped_as_in_memory(
    path: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    module, _, name = path.rpartition(".")
    cls = getattr(required.module(module), name)

    def make(given: Any) -> Any:
        optimizer = cls(given, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    shapes = MATRICES if "Muon" in name else SHAPES[:-1]
    assert check(make, params(shapes, dtype), missing="muon" not in path) == []


def test_the_table_and_the_tests_have_the_same_classes() -> None:
    tested = {f"torch.optim.{name}" for name in OPTIONS} | set(LIBRARIES)
    assert tested == set(kinds.TABLE)


def test_state_is_planned_as_it_is_made(tmp_path: Any) -> None:
    """With the planned layout a step lays nothing out again, so the smallest budget is enough from the start."""
    for name, several in OPTIONS.items():
        for options in several if hasattr(optim, name) else ():
            given = [torch.nn.Parameter(torch.randn(each)) for each in MATRICES]
            made = offload_optimizer(
                getattr(optim, name)(given, **options), tmp_path / name, memory_budget="300KiB"
            )
            planned = [bucket.nbytes for bucket in made._held.buckets]
            for param in given:
                param.grad = torch.ones_like(param)
            made.step()
            assert planned == [bucket.nbytes for bucket in made._held.buckets], name
            made.close()


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_other_classes_of_torch_are_refused(name: str, tmp_path: Any) -> None:
    optimizer = getattr(optim, name)([torch.nn.Parameter(torch.zeros(9))])
    with pytest.raises(NotSeparableError, match=rf"{name} .*cannot be offloaded without your word"):
        offload_optimizer(optimizer, tmp_path / "state", memory_budget="1MiB")
    assert not (tmp_path / "state").exists()
