"""Training a model on drives gives the same losses, parameters, buffers and state as in memory, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import random
import signal
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import tensorferry
from tensorferry.offload import (
    MemoryBudgetError,
    OffloadError,
    TrainingOptimizer,
    offload_optimizer,
    offload_training,
    plan,
    slabs,
    training_optimizer,
)
from tensorferry.offload.equality import same
from tensorferry.offload.initial_values import InitialValues
from tensorferry.offload.slabs import FileSlab, TrainingPlan
from tensorferry.offload.swapper import Swapper
from tensorferry.offload.training import TrainingSwapper
from tests.offload.test_memory import memory
from tests.offload.trainings import (
    MODELS,
    OPTIMIZERS,
    VOCABULARY,
    WIDTH,
    Attention,
    Mixture,
    Run,
    Stack,
    Transformer,
    assert_same,
)
from tests.support import child, warm
from tests.support.effort import examples
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADAMW = OPTIMIZERS["AdamW"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several slabs in each block, and parameters in several buckets: as large models do."""
    monkeypatch.setattr(slabs, "MAX_SLAB_NBYTES", 64 << 10)
    monkeypatch.setattr(TrainingOptimizer, "_params_nbytes", 64 << 10)
    monkeypatch.setattr(plan, "_MIN_BUCKET_NBYTES", 16 << 10)


@pytest.fixture
def pair(directory: Path) -> Iterator[Callable[..., tuple[Run, Run]]]:
    """A function that makes a training in memory and the same one on drives."""
    made: list[Run] = []

    def make(model: Callable[[], nn.Module] = Transformer, **options: Any) -> tuple[Run, Run]:
        ours = {
            name: options.pop(name)
            for name in ("budget", "blocks", "checkpoint_activations", "commit")
            if name in options
        }
        optimizer = options.pop("optimizer", ADAMW)
        path = options.pop("path", directory / "training")
        expected = Run(model, optimizer, None, **options)
        made.append(Run(model, optimizer, path, **options, **ours))
        return expected, made[-1]

    yield make
    for each in made:
        each.optimizer.close()


def train(*runs: Run, steps: int = 2) -> None:
    for run in runs:
        run.train(steps)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(pair: Any, optimizer: str) -> None:
    both = pair(optimizer=OPTIMIZERS[optimizer], groups=True, micro=2, clip="norm")
    for run in both:
        run.schedule()
    train(*both, steps=5)
    assert_same(*both)
    stats = both[1].optimizer.stats()
    assert stats["memory_nbytes"] < stats["state_nbytes"] + stats["params_nbytes"]
    assert stats["read_nbytes"] > stats["params_nbytes"]  # it has moved


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_any_model(pair: Any, model: Any, checkpoints: bool) -> None:
    both = pair(model, checkpoint_activations=checkpoints)
    for run in both:
        run.train(3)
        run.evaluate()
        run.train(2)
    assert_same(*both)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_parameters_are_copied_to_a_device(
    pair: Any, monkeypatch: pytest.MonkeyPatch, model: Any, checkpoints: bool
) -> None:
    """Here the host plays the device, with copies that are real."""
    monkeypatch.setattr(TrainingSwapper, "_computes_elsewhere", lambda _: True)
    both = pair(model, checkpoint_activations=checkpoints, micro=2, clip="norm")
    train(*both, steps=3)
    assert_same(*both)


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_training(directory: Path, data: Any) -> None:
    model = data.draw(st.sampled_from(MODELS))
    options = {
        "groups": data.draw(st.booleans()),
        "micro": data.draw(st.integers(1, 3)),
        "clip": data.draw(st.sampled_from(["", "norm", "value"])),
        "frozen": data.draw(st.sampled_from([(), ("embedding",), ("head",), ("blocks.0",)])),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
    }
    optimizer = OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))]
    expected = Run(model, optimizer, None, **options)
    run = Run(
        *(model, optimizer, directory / "any"),
        budget="least" if data.draw(st.booleans()) else data.draw(st.integers(2 << 20, 8 << 20)),
        blocks=data.draw(st.booleans()),
        checkpoint_activations=data.draw(st.booleans()),
        **options,
    )
    try:
        for _ in range(data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                for each in (expected, run):
                    each.evaluate()
            train(expected, run, steps=data.draw(st.integers(1, 3)))
        assert_same(expected, run)
    finally:
        run.optimizer.close()


def test_masters_are_stepped_as_an_offloaded_optimizer_steps_them(directory: Path) -> None:
    expected = Run(Transformer, ADAMW, None, dtype=torch.bfloat16, clip="norm")
    expected.optimizer = offload_optimizer(
        *(expected.optimizer, directory / "state"),
        memory_budget="64MiB",
        master_dtype=torch.float32,
    )
    run = Run(
        *(Transformer, ADAMW, directory / "training"),
        dtype=torch.bfloat16,
        clip="norm",
        master_dtype=torch.float32,
    )
    train(expected, run, steps=6)
    assert run.losses == expected.losses
    for name, value in expected.model.state_dict().items():
        assert same(value, run.model.state_dict()[name])
    assert same(expected.optimizer.state_dict(), run.optimizer.state_dict())
    run.optimizer.close()
    expected.optimizer.close()


@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_unscales_and_leaves_steps_out(pair: Any, clips: bool) -> None:
    both = pair()
    for run in both:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
        torch.set_rng_state(run.state_of_random)
        for number in range(5):
            tokens = torch.randint(0, VOCABULARY, (2, 9), generator=run.random)
            loss = run.model(tokens).float().pow(2).mean()
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            if clips:
                scaler.unscale_(run.optimizer)
                norm = (
                    run.optimizer.clip_grad_norm_(0.5)
                    if run.offloaded
                    else nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
                )
                run.losses.append(str(norm.item()))
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.losses.append((str(loss.item()), scaler.get_scale()))
    assert_same(*both)


@pytest.mark.parametrize("norm", [-1.0, -float("inf"), 0.0])
def test_a_scaler_finds_infinity_whatever_the_norms_are_of(directory: Path, norm: float) -> None:
    """Norms of such orders are finite for some infinite gradients."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    before = model.weight.detach().clone()
    _, drive = offload_training(model, optimizer, directory / "x", memory_budget="64MiB")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factors = torch.ones(WIDTH)
    for factors[0] in (1.0, float("inf")):
        drive.zero_grad()
        scaler.scale((model(torch.ones(2, WIDTH)) * factors).sum()).backward()
        scaler.unscale_(drive)
        drive.clip_grad_norm_(0.0, norm)
        scaler.step(drive)
        scaler.update()
    assert scaler.get_scale() == 2.0
    with drive.in_memory(model):
        assert same(model.weight.detach(), before)
    drive.close()


class Mixed(nn.Module):
    """Parameters of two dtypes, and one with ``count`` elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.zeros(count))
        self.narrow, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x).double()).pow(2).mean() + self.few.sum()


@pytest.mark.parametrize("count", [0, 1])
def test_a_scaler_unscales_gradients_of_each_dtype_once(directory: Path, count: int) -> None:
    found = []
    for place in (None, directory / "x"):
        torch.manual_seed(1)
        model: Any = Mixed(count)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if place is not None:
            _, optimizer = offload_training(model, optimizer, place, memory_budget="1MiB")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(torch.ones(2, WIDTH))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(*found)
    optimizer.close()


def test_gradients_that_cannot_be_clipped_stay_as_they_are(directory: Path) -> None:
    model = nn.Module()
    model.real = nn.Parameter(torch.zeros(4))
    model.complex = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    model.forward = lambda: (model.real.sum() + model.complex.real.sum()) * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, drive = offload_training(model, optimizer, directory / "x", memory_budget="1MiB")
    model.forward().backward()
    with pytest.raises(NotImplementedError):  # as in memory
        drive.clip_grad_value_(0.5)
    drive.step()
    with drive.in_memory(model):
        assert model.real.tolist() == [-3.0] * 4
    drive.close()


def test_a_model_without_values_stays_as_it_is_if_it_is_not_offloaded(directory: Path) -> None:
    values = nn.Linear(WIDTH, WIDTH)
    save_file(values.state_dict(), directory / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    train = functools.partial(
        offload_training, model, optimizer, directory / "x", files=directory / "model.safetensors"
    )
    with pytest.raises(MemoryBudgetError):
        train(memory_budget=4096)
    assert (
        model.weight.is_meta
    )  # and not on the CPU without memory, where a read would end the process
    _, drive = train(memory_budget="64MiB")
    with drive.in_memory(model):
        assert same(model.weight.detach(), values.weight.detach())
    drive.close()


@pytest.mark.parametrize("where", [(training_optimizer, "reserve"), (Swapper, "around")])
def test_a_training_that_fails_to_begin_leaves_model_and_optimizer(
    directory: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    model, alone = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in "ab")
    alone.load_state_dict(model.state_dict())
    both = [(each, torch.optim.AdamW(each.parameters())) for each in (model, alone)]

    def step() -> None:
        for each, optimizer in both:
            optimizer.zero_grad()
            each(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()

    def fail(*_: Any, **__: Any) -> None:
        raise tensorferry.StorageError(errno.ENOSPC, "No space left on device", "x")

    step()
    monkeypatch.setattr(*where, fail)
    with pytest.raises(tensorferry.StorageError):
        offload_training(model, both[0][1], directory / "x", memory_budget="64MiB")
    step()
    assert same(model.state_dict(), alone.state_dict())
    assert same(both[0][1].state_dict(), both[1][1].state_dict())


def test_state_dicts_go_both_ways(pair: Any, directory: Path) -> None:
    expected, run = pair()
    train(expected, run)
    model, optimizer = expected.model.state_dict(), expected.optimizer.state_dict()
    snapshot = {name: value.clone() for name, value in run.model.state_dict().items()}
    kept = run.model.state_dict()
    train(run)
    assert same(kept, snapshot)  # further training does not change it
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.random.set_state(expected.random.get_state())
    run.state_of_random, run.losses = expected.state_of_random, list(expected.losses)
    train(expected, run)
    assert_same(expected, run)


def test_a_model_begins_in_files_and_is_saved_to_files(directory: Path) -> None:
    from torch.distributed import checkpoint

    from tensorferry.safetensors.torch import load_file, save_file

    expected = Run(Mixture, ADAMW, None)
    save_file(expected.model.state_dict(), directory / "model.safetensors")
    checkpoint.save(
        {"model": expected.model.state_dict()}, checkpoint_id=directory / "dcp", no_dist=True
    )
    train(expected, steps=3)
    for files in (directory / "model.safetensors", directory / "dcp"):
        run = Run(lambda: Mixture().to("meta"), ADAMW, directory / "training", files=files)
        train(run, steps=3)
        assert_same(expected, run)
        save_file(run.model.state_dict(), directory / "trained.safetensors")
        loaded = load_file(directory / "trained.safetensors")
        assert same(dict(expected.model.state_dict()), dict(loaded))
        run.optimizer.close()


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_default_device_without_values_may_be_set(directory: Path, kind: str) -> None:
    from torch.distributed import checkpoint

    values = nn.Linear(WIDTH, WIDTH).state_dict()
    save_file(values, directory / "safetensors")
    checkpoint.save(values, checkpoint_id=directory / "dcp", no_dist=True)
    with torch.device("meta"):
        model = nn.Linear(WIDTH, WIDTH)
        _, drive = offload_training(
            *(model, torch.optim.SGD(model.parameters()), directory / "x"),
            memory_budget="1MiB",
            files=directory / kind,
        )
    assert same({name: value.clone() for name, value in model.state_dict().items()}, dict(values))
    drive.close()


class Adapted(nn.Module):
    """A model with a frozen layer and trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedModel(Stack):
    def __init__(self) -> None:
        super().__init__(Adapted() for _ in range(6))


FROZEN = ("embedding", "head", *(f"blocks.{number}.base" for number in range(6)))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_frozen_base_stays_in_its_files(directory: Path, checkpoints: bool) -> None:
    from tensorferry.safetensors.torch import save_file

    expected = Run(AdaptedModel, ADAMW, None, frozen=FROZEN)
    save_file(expected.model.state_dict(), directory / "base.safetensors")
    run = Run(
        *(lambda: AdaptedModel().to("meta"), ADAMW, directory / "training"),
        frozen=FROZEN,
        files=directory / "base.safetensors",
        checkpoint_activations=checkpoints,
    )
    train(expected, run, steps=4)
    assert_same(expected, run)
    stats = run.optimizer.stats()
    adapters = sum(p.nbytes for p in expected.model.parameters() if p.requires_grad)
    assert stats["written_nbytes"] < 4 * 20 * adapters  # the base never
    run.model.load_state_dict(expected.model.state_dict())
    run.optimizer.close()


def test_a_state_dict_cannot_change_a_frozen_base(directory: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(super().forward(x))

    model = Scaled()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(before, directory / "model.safetensors")
    _, drive = offload_training(
        *(model, torch.optim.SGD([model.weight, model.bias]), directory / "x"),
        memory_budget="1MiB",
        files=directory / "model.safetensors",
    )
    with pytest.raises(RuntimeError, match=r"base\.weight: parameters that are read from files"):
        model.load_state_dict({name: value + 1 for name, value in before.items()})
    assert same(model.state_dict()["base.weight"].clone(), before["base.weight"])
    model.load_state_dict(before)
    assert same({name: value.clone() for name, value in model.state_dict().items()}, before)
    drive.close()


def test_adapters_begin_in_memory_and_their_base_in_its_own_files(directory: Path) -> None:
    from tensorferry.safetensors.torch import save_file

    class Layer(nn.Module):  # as peft names them
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(WIDTH, WIDTH)
            self.lora_A = nn.Linear(WIDTH, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.lora_A(x).sum(-1, keepdim=True)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(Layer() for _ in range(4))

    frozen = ("embedding", *(f"blocks.{number}.base" for number in range(4)))
    expected = Run(Model, ADAMW, None, frozen=frozen)
    base = {
        name.replace(".base_layer.", "."): value
        for name, value in expected.model.state_dict().items()
        if "lora" not in name
    }
    save_file(base, directory / "base.safetensors")

    def begun() -> nn.Module:
        model = Model()
        model.embedding.to("meta")
        for block in model.blocks:
            block.base_layer.to("meta")
        return model

    run = Run(
        begun, ADAMW, directory / "training", frozen=frozen, files=directory / "base.safetensors"
    )
    train(expected, run, steps=3)
    assert_same(expected, run)
    run.optimizer.close()


def test_what_is_frozen_in_memory_need_not_be_in_the_files(directory: Path) -> None:
    from tensorferry.safetensors.torch import save_file

    expected = Run(AdaptedModel, ADAMW, None, frozen=FROZEN)
    base = expected.model.state_dict()
    del base["blocks.1.base.weight"], base["head.bias"]
    save_file(base, directory / "base.safetensors")

    def begun() -> nn.Module:
        model = AdaptedModel()
        model.blocks[0].base.to("meta")
        return model

    run = Run(
        *(begun, ADAMW, directory / "training"), frozen=FROZEN, files=directory / "base.safetensors"
    )
    train(expected, run, steps=2)
    assert_same(expected, run)
    run.optimizer.close()


def test_a_base_whose_file_was_replaced_is_refused_each_time(directory: Path) -> None:
    from tensorferry.safetensors import SafetensorError
    from tensorferry.safetensors.torch import save_file

    model = AdaptedModel()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN))
    path = directory / "base.safetensors"
    save_file(model.state_dict(), path)
    optimizer = ADAMW([param for param in model.parameters() if param.requires_grad])
    planned = TrainingPlan(model, optimizer, [])
    given = InitialValues(planned, path)  # no read has begun
    save_file({name: value * 2 for name, value in model.state_dict().items()}, path)
    found = next(slab for slab in planned.slabs if isinstance(slab, FileSlab))
    for _ in range(3):
        with pytest.raises(SafetensorError, match="replaced or changed"):
            found.read(torch.empty(found.nbytes, dtype=torch.uint8))
    given.files.close()


def test_a_training_that_is_dropped_is_freed(directory: Path) -> None:
    run = Run(Transformer, ADAMW, directory / "training")
    train(run)
    there = [weakref.ref(each) for each in (run.optimizer, run.model)]
    del run
    gc.collect()
    assert [each() for each in there] == [None] * 2


def test_gradients_that_the_user_keeps(pair: Any) -> None:
    expected, run = pair()
    kept = []
    for each in (expected, run):
        torch.manual_seed(5)
        each.forward_and_backward()
        params = [param for param in each.model.parameters() if param.grad is not None]
        kept.append([param.grad for param in params])
        for param in params:
            param.grad = None
        for param, grad in zip(params, kept[-1], strict=True):
            param.grad = grad
        norm = torch.linalg.vector_norm(params[0].grad)
        norm.mul_(2)  # a result is the user's own
        nn.utils.clip_grad_norm_(params, 0.1)
        each.step()
        each.optimizer.zero_grad(set_to_none=False)
        each.train(1)
    assert_same(expected, run)
    run.forward_and_backward()
    params = [param for param in run.model.parameters() if param.grad is not None]
    earlier = [param.grad for param in params]
    run.optimizer.zero_grad()
    run.forward_and_backward()
    for param, grad in zip(params, earlier, strict=True):
        param.grad = grad
    with pytest.raises(RuntimeError, match="released"):
        run.step()
    run.optimizer.zero_grad()
    run.forward_and_backward()
    norm = run.model.blocks[1].norm
    norm.weight.grad = norm.bias.grad
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="is the gradient of"):
        run.step()
    assert same(dict(run.model.state_dict()), before)


def test_gradients_that_hooks_keep(pair: Any) -> None:
    both = pair()
    kept: list[list[torch.Tensor]] = [[], []]
    for run, found in zip(both, kept, strict=True):
        torch.manual_seed(5)
        run.forward_and_backward()
        param = run.model.blocks[1].up.weight
        handle = param.register_post_accumulate_grad_hook(
            lambda param, found=found: found.append(param.grad)
        )
        run.forward_and_backward()
        handle.remove()
        run.optimizer.zero_grad()
        run.train(1)
    assert same(kept[0], kept[1])


def test_what_is_detached_is_another_tensor(pair: Any) -> None:
    expected, run = pair()
    for each in (expected, run):
        param = each.model.blocks[1].up.weight
        for other in (param.detach(), param.data):
            assert other is not param
            assert not other.requires_grad
            other.requires_grad_(False)
        assert param.requires_grad
        param.data.copy_(torch.ones(param.shape))
        each.train(1)
    assert_same(expected, run)
    with pytest.raises(RuntimeError, match="is on a drive"):
        param.to("cpu", copy=True)
    with pytest.raises(RuntimeError, match="is on a drive"):
        param.detach().sum()


def test_parameters_in_memory_for_a_while(pair: Any) -> None:
    both = pair()
    for run in both:
        run.train(2)
        block = run.model.blocks[1]
        with (
            torch.no_grad(),
            run.optimizer.in_memory(block) if run.offloaded else contextlib.nullcontext(),
        ):
            block.up.weight.clamp_(-0.01, 0.01)
            block.norm.bias.data = torch.full((WIDTH,), 0.5)
            run.losses.append(block.down.weight.sum().item())
        run.train(2)
    assert_same(*both)


def test_data_that_does_not_fit_is_refused_and_other_changes_are_kept(directory: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters())
    _, drive = offload_training(model, optimizer, directory / "x", memory_budget="1MiB")

    def change() -> None:
        with drive.in_memory(model), torch.no_grad():
            model[0].weight.data = before.double() * 2
            model[1].weight.zero_()

    with pytest.raises(ValueError, match=r"0\.weight: its data must be torch.float32"):
        change()
    assert model[0].weight.dtype == torch.float32
    values = model.state_dict()  # as they are on the drive
    assert same(values["0.weight"].clone(), before)
    assert not values["1.weight"].any()
    assert not any(slab.is_given for slab in drive._swapper.plan.slabs)
    drive.close()


def linears(directory: Path, width: int = WIDTH, **options: Any) -> tuple[Any, TrainingOptimizer]:
    """Return two layers in training on drives."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return offload_training(model, optimizer, directory, memory_budget="4MiB", **options)


def test_parameters_are_not_lent_to_another_thread_during_a_backward_pass(directory: Path) -> None:
    model, drive = linears(directory / "x")
    errors: list[BaseException | None] = []

    def beside(_: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as threads:
            errors.append(threads.submit(drive.in_memory(model).__enter__).exception())

    model[0].register_forward_hook(lambda *given: given[-1].register_hook(beside) and None)
    model(torch.ones(2, WIDTH)).sum().backward()
    [error] = errors
    assert "still running" in str(error)
    with drive.in_memory(model):
        assert all(param.grad is not None for param in model.parameters())
    drive.close()


@pytest.mark.parametrize("learns", [True, False])
def test_what_requires_gradients_may_change_between_the_passes(
    directory: Path, learns: bool
) -> None:
    trained = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if offloaded:
            model, optimizer = offload_training(
                *(model, optimizer, directory), memory_budget="4MiB", blocks=list(model)
            )
        model[1].requires_grad_(learns)
        loss = model(torch.ones(2, 9)).sum()
        model[1].requires_grad_(not learns)
        if offloaded:
            with optimizer.in_memory(model), pytest.raises(RuntimeError, match="in a block of"):
                loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trained.append([value.clone() for value in model.state_dict().values()])
    assert same(*trained)
    optimizer.close()


def test_views_and_data_of_other_parameters_may_become_the_data(directory: Path) -> None:
    model, drive = linears(directory / "x")
    first, second = [model[at].weight for at in (0, 1)]
    wanted = [value.clone() for value in model.state_dict().values()]
    with drive.in_memory(model):
        first.data, second.data = second.data, first.data.t()
        # These two are in one slab.
        model[1].bias.data = model[1].weight.data[0]
    wanted[0], wanted[2] = wanted[2], wanted[0].t().contiguous()
    wanted[3] = wanted[2][0].clone()
    assert same([value.clone() for value in model.state_dict().values()], wanted)
    with pytest.raises(ValueError, match=r"0\.weight: its data must be"), drive.in_memory(model):
        first.data = first.data[:2]
    assert same([value.clone() for value in model.state_dict().values()], wanted)
    drive.close()


@pytest.mark.parametrize("way", ["in place", "data"])
def test_frozen_parameters_in_files_cannot_be_changed(directory: Path, way: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(before, directory / "model.safetensors")
    optimizer = torch.optim.SGD(model[1].parameters())
    _, drive = offload_training(
        *(model, optimizer, directory / "x"),
        memory_budget="4MiB",
        files=directory / "model.safetensors",
    )

    def change() -> None:
        with drive.in_memory(model), torch.no_grad():
            if way == "data":
                model[0].weight.data = torch.zeros(WIDTH, WIDTH)
            else:
                model[0].weight.data.zero_()
            model[1].weight.zero_()

    with pytest.raises(RuntimeError, match=r"0\.weight: parameters that are read from files"):
        change()
    before["1.weight"].zero_()
    assert same({name: value.clone() for name, value in model.state_dict().items()}, before)
    with drive.in_memory(model):
        assert same(model[0].weight.detach(), before["0.weight"])
    drive.close()


def test_a_load_that_raises_in_the_middle_releases_parameters(directory: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(WIDTH))
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + self.own)

    def refuses(*_: Any) -> None:
        raise ValueError("no")

    model: Any = Outer()
    optimizer = torch.optim.SGD(model.parameters())
    _, drive = offload_training(model, optimizer, directory / "x", memory_budget="4MiB")
    values = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    hook = model.inner.register_load_state_dict_pre_hook(refuses)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            model.load_state_dict(values)
        assert model.state_dict()["own"].unique().tolist() == [1]
    hook.remove()
    model(torch.ones(WIDTH))
    assert not any(slab.is_given for slab in drive._swapper.plan.slabs)
    drive.close()


def test_clipping_by_other_norms_and_several_times(pair: Any) -> None:
    both = pair()
    for run in both:
        torch.set_rng_state(run.state_of_random)
        for kind in (2.0, 1.0, float("inf"), 3.0, 2.0):
            run.forward_and_backward()
            for limit in (0.7, 0.3):
                norm = (
                    run.optimizer.clip_grad_norm_(limit, kind)
                    if run.offloaded
                    else nn.utils.clip_grad_norm_(run.model.parameters(), limit, kind)
                )
                run.losses.append(norm.item())
            run.clip = "value"
            run.step()
    assert_same(*both)


# Passes that are refused, or have to be exact


class Holder(Stack):
    """A model with one odd block among others."""

    def __init__(self, odd: Callable[[], nn.Module]) -> None:
        super().__init__([Attention(0.0), odd(), Attention(0.0), Attention(0.0)])


class Keeps(nn.Linear):
    """Keeps a view of its weight when it has run."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight.detach()[:2]
        return super().forward(x)


class Writes(nn.Linear):
    """Writes into its weight each time it runs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


class Shares(nn.Module):
    """Two buffers of one memory, which change in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("many", torch.zeros(3))
        self.register_buffer("first", self.many[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.many += 1
        return self.linear(x) * self.first


@pytest.mark.parametrize("checkpoints", [False, True])
def test_views_that_are_kept_stay_those_of_the_parameter(pair: Any, checkpoints: bool) -> None:
    both = pair(functools.partial(Holder, Keeps), checkpoint_activations=checkpoints)
    for _ in range(3):
        train(*both, steps=1)
        expected, run = (each.model.blocks[1].kept for each in both)
        assert same(expected, run)
    for each in both:
        each.model.blocks[1].kept.mul_(0.5)
    train(*both)
    assert_same(*both)


def test_parameters_that_forward_changes(pair: Any) -> None:
    both = pair(functools.partial(Holder, Writes), checkpoint_activations=False)
    train(*both, steps=3)
    assert_same(*both)
    _, run = pair(functools.partial(Holder, Writes))
    with pytest.raises(RuntimeError, match="writes into its parameters, and would do so twice"):
        run.forward_and_backward()


def test_buffers_that_share_memory(pair: Any) -> None:
    both = pair(functools.partial(Holder, Shares))
    train(*both, steps=3)
    assert_same(*both)


class Remembers(nn.Linear):
    """A module whose result depends on attributes and on random numbers, and which changes them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.factor, self.calls, self.seen = 1.0, {"seen": [0.5]}, {0}
        self.own = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + float(np.random.random()) if self.training else 0.0
        one, two, three = self.own
        drawn += one.random() + float(two.random()) + torch.rand((), generator=three).item()
        drawn += len(self.seen)
        self.seen.add(len(self.seen))
        y = super().forward(x * self.factor * sum(self.calls["seen"]) + drawn)
        self.factor *= 1.5
        self.calls["seen"].append(drawn)
        return torch.tanh(y) * len(self.calls["seen"])


def test_a_block_that_runs_again_gets_what_it_got_before(pair: Any) -> None:
    both = pair(functools.partial(Holder, Remembers))
    for number in range(3):
        drawn = []
        for run in both:
            random.seed(number)
            np.random.seed(number)
            loss = run.model(torch.arange(6).reshape(2, 3)).square().mean()
            block = run.model.blocks[1]
            block.factor = -3.0
            block.calls["seen"].append(1.0)
            run.model.eval()
            loss.backward()
            run.model.train()
            run.optimizer.step()
            run.optimizer.zero_grad()
            drawn.append(
                (loss.item(), block.factor, block.calls, random.random(), np.random.random())
            )
        assert drawn[0] == drawn[1]
    assert_same(*both)


@pytest.mark.parametrize("changes", ["append", "pop"])
def test_a_block_that_changes_its_arguments_is_refused(pair: Any, changes: str) -> None:
    class Changes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
            getattr(options["numbers"], changes)(*([1.0] if changes == "append" else []))
            return super().forward(x)

    class Calls(Holder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            options = {"numbers": [1.0, 2.0]}
            x = self.embedding(tokens)
            return self.head(self.blocks[1](x, options))

    _, run = pair(functools.partial(Calls, Changes))
    with pytest.raises(RuntimeError, match="changes a list or dict that it gets as an argument"):
        run.forward_and_backward()
    both = pair(functools.partial(Calls, Changes), checkpoint_activations=False)
    train(*both)
    assert_same(*both)


@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_of_gradients_are_refused(pair: Any, blocks: bool) -> None:
    _, run = pair(blocks=blocks)
    x = run.model(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        x.sum().backward(create_graph=True)
    run.optimizer.zero_grad()
    train(run)


def test_activations_that_change_are_noticed(pair: Any) -> None:
    class Changed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x * 2)
            z = torch.exp(y)
            y.mul_(2)
            z.mul_(3)  # exp() has saved it
            return z

    for run in pair(functools.partial(Holder, Changed), blocks=False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.forward_and_backward()


def test_passes_in_several_threads_are_refused(pair: Any) -> None:
    _, run = pair()
    losses = [run.model(torch.zeros(1, 4, dtype=torch.int64)).sum() for _ in range(2)]
    failures: list[BaseException] = []

    def other(_: torch.Tensor) -> None:
        def backward() -> None:
            try:
                losses[1].backward()
            except RuntimeError as error:
                failures.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()

    handle = run.model.blocks[1].up.bias.register_hook(other)
    losses[0].backward()
    handle.remove()
    assert [str(each)[:36] for each in failures] == ["a backward pass has failed or is sti"]
    run.optimizer.zero_grad()
    train(run)


def test_a_parameter_that_learns_later(pair: Any) -> None:
    both = pair()
    for run in both:
        run.model.blocks[0].up.weight.requires_grad_(False)
        run.train(2)
        run.model.blocks[0].up.weight.requires_grad_(True)
        run.train(2)
    assert_same(*both)


def test_gradients_and_parameters_on_drives_are_refused_by_name(pair: Any) -> None:
    _, run = pair()
    model, optimizer = run.model, run.optimizer
    weight = model.blocks[0].up.weight
    assert weight.grad is None
    run.forward_and_backward()
    assert weight.grad is not None
    for call in (
        lambda: weight.grad.norm(),
        lambda: weight.grad.add_(torch.ones(weight.shape)),
        lambda: weight.grad.view(-1),
        lambda: torch._foreach_norm([weight.grad]),
    ):
        with pytest.raises(RuntimeError, match=r"on a drive.*in_memory"):
            call()
    for call in (
        lambda: weight.add_(1),
        lambda: weight.sum(),
        lambda: weight @ weight.T,
        lambda: nn.init.zeros_(weight),
    ):
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight is on a drive"):
            call()
    model.zero_grad()
    assert weight.grad is None
    model.to("cpu").float()
    for number in range(2):  # a step drops gradients, with a warning
        train(run, steps=1)
        run.forward_and_backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="zero_grad"):
            run.forward_and_backward() if number else optimizer.step()
        optimizer.zero_grad()


def test_what_cannot_be_trained_is_refused_before_anything(directory: Path) -> None:
    def refused(error: type[Exception], match: str, **options: Any) -> None:
        model = options.pop("model", None) or Transformer()
        optimizer = options.pop("optimizer", None) or ADAMW(model.parameters())
        given = {"memory_budget": "16MiB", "blocks": model.blocks, **options}
        with pytest.raises(error, match=match):
            offload_training(model, optimizer, directory / "refused", **given)
        assert all(type(each) is nn.Parameter for each in model.parameters())

    model = Transformer()
    refused(TypeError, "blocks", blocks=["a"])
    refused(ValueError, r"blocks\[0\]: this Linear is not in the model", blocks=[nn.Linear(1, 1)])
    refused(ValueError, "is within", model=model, blocks=[model.blocks[0], model.blocks[0].up])
    refused(ValueError, "this is the whole model", model=model, blocks=[model])
    refused(MemoryBudgetError, "bytes are too few", memory_budget=4096)
    refused(
        ValueError,
        "the optimizer does not have it",
        optimizer=ADAMW(Transformer().head.parameters()),
    )
    refused(ValueError, "on the meta device", model=Transformer().to("meta"))
    model = Transformer()
    model.register_buffer("view", model.norm.weight[:3].detach())
    refused(ValueError, "view shares memory", model=model)
    model = Transformer()
    refused(
        tensorferry.offload.NotSeparableError,
        "",
        model=model,
        optimizer=torch.optim.LBFGS(model.parameters()),
    )


# Faults


@pytest.fixture
def both(pair: Any, faultfs: Any) -> tuple[Run, Run]:
    found: tuple[Run, Run] = pair(path=faultfs.path)
    train(*found)
    found[1].optimizer.drain()
    return found


def whole(expected: Run, run: Run) -> None:
    """Check that the training continues as in memory."""
    train(expected, run)
    assert_same(expected, run)


@pytest.mark.parametrize("skip", [0, 2, 5, 9])
def test_a_drive_that_does_not_read(both: tuple[Run, Run], faultfs: Any, skip: int) -> None:
    expected, run = both
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=run.random)
    expected.random.set_state(run.random.get_state())
    for each in both:
        torch.set_rng_state(each.state_of_random)
        before = torch.get_rng_state()
        if each is run:
            faultfs.order(Fault("read", error=errno.EIO, skip=skip))

            def iteration(run: Run = each) -> None:
                run.model(tokens).sum().backward()
                run.optimizer.step()

            with pytest.raises((tensorferry.StorageError, OffloadError)) as caught:
                iteration()
            while isinstance(caught.value, OffloadError):  # a step that can be finished
                faultfs.clear()
                each.optimizer.retry()
                break
            else:
                assert caught.value.errno == errno.EIO
                faultfs.clear()
                torch.set_rng_state(before)
                each.optimizer.zero_grad()
                each.model(tokens).sum().backward()
                each.optimizer.step()
        else:
            each.model(tokens).sum().backward()
            each.optimizer.step()
        each.optimizer.zero_grad()
        each.state_of_random = torch.get_rng_state()
    whole(expected, run)


def test_a_drive_that_does_not_write(both: tuple[Run, Run], faultfs: Any) -> None:
    expected, run = both
    expected.train(1)
    state, random = run.state_of_random, run.random.get_state()
    faultfs.order(Fault("write", error=errno.ENOSPC))

    def iterations() -> None:
        for _ in range(3):
            torch.set_rng_state(state)
            run.random.set_state(random)
            run.forward_and_backward()
            run.step()
            run.optimizer.drain()

    with pytest.raises((tensorferry.StorageError, OffloadError)):
        iterations()
    faultfs.clear()
    # No data are lost: unwritten data are in memory, and a failed backward pass is repeated.
    finished = run.optimizer.steps > expected_steps(expected) - 1
    if not finished:
        with contextlib.suppress(OffloadError):
            run.optimizer.retry()
        finished = run.optimizer.steps > expected_steps(expected) - 1
    run.optimizer.zero_grad()
    run.losses = list(expected.losses) if finished else run.losses[: len(expected.losses) - 1]
    if not finished:
        run.state_of_random = state
        run.random.set_state(random)
        run.train(1)
    else:
        run.state_of_random = expected.state_of_random
        run.random.set_state(expected.random.get_state())
    whole(expected, run)


def test_a_barrier_reports_writes_that_failed_before_it(
    both: tuple[Run, Run], faultfs: Any
) -> None:
    expected, run = both
    expected.train(1)
    state, random = run.state_of_random, run.random.get_state()
    faultfs.order(Fault("write", error=errno.EIO))
    with pytest.raises(tensorferry.StorageError):
        run.forward_and_backward()
    faultfs.clear()
    for _ in range(2):
        with pytest.raises(OffloadError, match="retry"):
            run.optimizer.drain()
    run.optimizer.retry()
    run.optimizer.drain()
    run.optimizer.zero_grad()
    run.losses = run.losses[: len(expected.losses) - 1]
    run.state_of_random = state
    run.random.set_state(random)
    run.train(1)
    whole(expected, run)


def expected_steps(run: Run) -> int:
    steps = {int(each["step"]) for each in run.optimizer.state_dict()["state"].values()}
    [found] = steps
    return found


class StopError(Exception):
    """Raised in the middle."""


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
def test_an_exception_in_the_middle_of_a_pass(pair: Any, where: str) -> None:
    expected, run = pair()
    train(expected, run)
    state, random = run.state_of_random, run.random.get_state()

    def stop(*_: Any) -> None:
        raise StopError

    block = run.model.blocks[1]
    if where == "forward":
        handle = block.up.register_forward_hook(stop)
    elif where == "backward":
        handle = block.register_full_backward_hook(stop)
    else:
        handle = block.up.weight.register_hook(stop)
    with pytest.raises(StopError):
        run.train(1)
    handle.remove()
    with (
        pytest.raises(RuntimeError, match="incomplete")
        if where != "forward"
        else contextlib.nullcontext()
    ):
        if where != "forward":
            run.optimizer.step()
    run.optimizer.zero_grad()
    run.state_of_random = state
    run.random.set_state(random)
    whole(expected, run)


def committed(directory: str, steps: int, early: bool) -> None:
    """Train with commits, and print each completed step; the test of kills runs this function."""
    torch.set_num_threads(1)
    run = Run(
        *(Transformer, ADAMW, Path(directory)),
        budget="64MiB",
        commit="step",
    )
    done = run.optimizer.resume() or 0
    for number in range(done, steps):
        run.random.manual_seed(number)
        torch.manual_seed(number)
        run.state_of_random = torch.get_rng_state()
        run.train(1)
        print(number + 1, flush=True)
    values = [value.double().sum().item() for value in run.model.state_dict().values()]
    print("end", values, flush=True)


@pytest.mark.parametrize("early", [False, True])
def test_kills_leave_the_last_committed_step(directory: Path, early: bool) -> None:
    def run(path: Path, kill_after: int | None) -> str:
        code = f"from tests.offload.test_training import committed; committed({str(path)!r}, 4, {early})"
        with subprocess.Popen(
            [warm.python(), "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("end"):
                    return line
                if kill_after is not None and int(line) >= kill_after:
                    process.send_signal(signal.SIGKILL)
        return ""

    whole = run(directory / "whole", None)
    assert whole
    assert run(directory / "killed", 2) == ""
    assert run(directory / "killed", None) == whole


def test_checkpoints_have_parameters_too(pair: Any, directory: Path) -> None:
    expected, run = pair()
    train(expected, run)
    run.optimizer.checkpoint(directory / "kept")
    state, random = run.state_of_random, run.random.get_state()
    train(run)
    run.optimizer.restore(directory / "kept")
    run.state_of_random, run.losses = state, list(expected.losses)
    run.random.set_state(random)
    whole(expected, run)


def test_a_commit_has_what_the_optimizer_does_not(directory: Path) -> None:
    def begin(value: float) -> tuple[Any, TrainingOptimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.fill_(value)
        optimizer = ADAMW([param for param in model.parameters() if param.requires_grad])
        return offload_training(
            model, optimizer, directory / "training", memory_budget="1MiB", commit="step"
        )

    model, optimizer = begin(0.0)
    with optimizer.in_memory(model[0]), torch.no_grad():  # an average, or a teacher
        model[0].weight.fill_(0.25)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    again, optimizer = begin(1.0)
    assert optimizer.resume() == 1
    assert same(dict(again.state_dict()), expected)
    assert expected["1.running_var"].ne(1.0).any()
    optimizer.close()


def test_what_in_memory_lends_is_a_copy(pair: Any) -> None:
    expected, run = pair()
    run.train(1)
    with run.optimizer.in_memory(run.model.blocks[1]):
        views = [param.detach()[:1] for param in run.model.blocks[1].parameters()]
        kept = [view.clone() for view in views]
    run.train(2)
    assert same(views, kept)
    for view in views:
        view.zero_()
    expected.train(3)
    assert_same(expected, run)


def test_a_commit_is_resumed_with_other_blocks_and_another_budget(directory: Path) -> None:
    expected = Run(Transformer, ADAMW, None)
    run = Run(Transformer, ADAMW, directory / "training", commit="step")
    train(expected, run)
    run.optimizer.close()
    again = Run(
        Transformer, ADAMW, directory / "training", commit="step", blocks=False, budget="64MiB"
    )
    assert again.optimizer.resume() == 2
    again.losses, again.state_of_random = list(expected.losses), expected.state_of_random
    again.random.set_state(expected.random.get_state())
    whole(expected, again)
    again.optimizer.close()


def test_a_commit_is_found_where_ranks_are_one(directory: Path) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        run = Run(Transformer, ADAMW, directory / "training", commit="step")
        train(run)
        run.optimizer.close()
        again = Run(Transformer, ADAMW, directory / "training", commit="step")
        assert again.optimizer.resume() == 2
        again.optimizer.close()
    finally:
        distributed.destroy_process_group()


def larger(directory: str) -> dict[str, int]:
    """Train a model from a file, in less memory than its parameters need."""
    from tensorferry.safetensors.torch import save_file

    torch.set_num_threads(1)

    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(40)))  # 160 MiB

    path = Path(directory) / "model.safetensors"
    save_file(model().state_dict(), path)
    small = nn.Linear(2, 2)
    small(torch.ones(2)).sum().backward()
    torch.optim.AdamW(small.parameters(), fused=True).step()
    with torch.device("meta"):
        large = model()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
    budget = 64 << 20
    large, optimizer = offload_training(
        *(large, torch.optim.AdamW(large.parameters(), fused=True), Path(directory) / "training"),
        memory_budget=budget,
        blocks=list(large),
        files=path,
    )
    for _ in range(3):
        large(torch.ones(1, 1024)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    peak = memory("VmHWM") - before
    optimizer.close()
    return {"peak": peak, "budget": budget}


def test_memory_is_the_budget_and_what_a_block_computes(directory: Path) -> None:
    told = child.call(f"{__name__}:larger", directory=str(directory)).result
    # All state would be 640 MiB, and gradients that accumulate in the heap 160 MiB. In addition to the budget there are
    # imports, and 32 MiB of gradients.
    assert told["peak"] < told["budget"] + (96 << 20)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_needed_memory_does_not_grow_with_the_number_of_blocks(
    tmp_path: Path, optimizer: Any
) -> None:
    needed = []
    for count in (8, 64):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(count)))
        with pytest.raises(MemoryBudgetError) as caught:
            offload_training(
                model,
                optimizer(model.parameters(), lr=0.1),
                tmp_path,
                memory_budget="1KiB",
                blocks=list(model),
            )
        needed.append(caught.value.needed_nbytes)
    assert needed[1] < 1.5 * needed[0]
