"""stream_weights(): a model computes the same as in memory with any budget, and its weights stay within the budget."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import io
import itertools
import pickle
import random
import shutil
import signal
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.fx.experimental import proxy_tensor

import tensorferry.checkpoint
import tensorferry.safetensors.torch
from tensorferry.offload import (
    MemoryBudgetError,
    WeightsMap,
    holder,
    scan,
    stream_weights,
)
from tensorferry.offload.arena import Arena, round_to_pages
from tensorferry.offload.swapper import AbsentParameter
from tensorferry.safetensors import SafetensorError
from tensorferry.transfer import pipeline
from tests.safetensors.files import bytes_of, written
from tests.support import interrupts, leaks, required
from tests.support.faultfs import Fault
from tests.support.forks import passes_in_child
from tests.support.threads import in_threads

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faultfs import FaultFS

MIB = 1 << 20
WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Not in the order in which forward() has them.
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.scale = nn.ParameterList([nn.Parameter(torch.randn(WIDTH))])

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0] * self.scale[0]
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A model with tied weights, modules used twice or without forward(), torch's own modules, and buffers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("fixed", torch.ones(3), persistent=False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.tie()
        self.eval().requires_grad_(False)

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any, skip: int = -1, stop_at: int = -1) -> Any:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]] + self.shift
        for number, block in enumerate(self.blocks):
            if number == stop_at:
                raise ZeroDivisionError
            if number != skip:
                x = self.shared(block(x))
        return self.head(self.recurrent(x)[0])


@pytest.fixture
def stored(directory: Path) -> tuple[Model, Path]:
    """A model, and the directory that has its weights, in two files."""
    torch.manual_seed(14)
    model = Model()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    for number in range(2):
        part = {name: state[name] for name in sorted(state)[number::2]}
        save_file(part, directory / f"{number}.safetensors")
    return model, directory


def empty(layers: int = 6) -> Model:
    with torch.device("meta"):
        model = Model(layers)
    model.tie()
    model.fixed = torch.ones(3)
    return model


def tokens(seed: int = 0) -> Any:
    return torch.randint(1000, (2, 16), generator=torch.Generator().manual_seed(seed))


def nbytes_of(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def test_names_of_a_tied_weight_are_compared_on_any_default_device(directory: Path) -> None:
    values = torch.eye(8)
    save_file({f"{at}.weight": values.clone() for at in range(2)}, directory / "model.safetensors")
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))).requires_grad_(False)
    model[1].weight = model[0].weight
    with torch.device("meta"):
        stream = stream_weights(model, directory, memory_budget="1MiB")
    with stream:
        assert torch.equal(model(torch.ones(8)), torch.ones(8))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 2.0])
def test_results_are_those_in_memory(stored: tuple[Model, Path], share: float) -> None:
    whole, directory = stored
    model = empty()
    total = nbytes_of(whole)
    budget = max(int(share * total), 4200 << 10)
    with stream_weights(model, directory, memory_budget=budget) as stream:
        for seed in range(4):
            assert torch.equal(model(tokens(seed)), whole(tokens(seed)))
        stats = stream.stats()
        assert stats["passes"] == 4
        assert stats["memory_nbytes"] <= budget
        assert stats["kept_nbytes"] <= budget
        assert stats["weights_nbytes"] == total + whole.shift.nbytes
        assert all(isinstance(param, AbsentParameter) for param in model.parameters())
    assert not any(name == "forward" for name in vars(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.head.weight is model.embedding.weight


def test_a_budget_for_all_reads_once(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="64MiB") as stream:
        for _ in range(3):
            model(tokens())
        assert stream.stats()["read_nbytes"] <= 1.05 * nbytes_of(whole)


def test_a_pass_reads_what_the_budget_cannot_keep_and_nothing_else(
    stored: tuple[Model, Path],
) -> None:
    whole, directory = stored
    total = nbytes_of(whole)
    model = empty()
    with stream_weights(model, directory, memory_budget=total // 2) as stream:
        read = []
        for _ in range(6):
            before = stream.stats()["read_nbytes"]
            model(tokens())
            read.append(stream.stats()["read_nbytes"] - before)
        used = total - model.unused.weight.nbytes
        kept = stream.stats()["kept_nbytes"]
        assert kept >= total // 8
        assert read[0] <= 1.4 * total
        # A pass begins with the weights that the previous one has read ahead; each weight is read in whole pages.
        assert sum(read[2:]) / 4 <= 1.05 * (used - kept)
        assert stream.stats()["unexpected_steps"] > 0
        unexpected = stream.stats()["unexpected_steps"]
        model(tokens())
        assert stream.stats()["unexpected_steps"] == unexpected


def test_another_control_flow_costs_time_only(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    rng = random.Random(3)
    with stream_weights(model, directory, memory_budget="9MiB"):
        for seed in range(15):
            skip = rng.randint(-1, 5)
            assert torch.equal(model(tokens(seed), skip), whole(tokens(seed), skip))
            with suppress(ZeroDivisionError):
                model(tokens(), stop_at=rng.randint(0, 5))
            if seed % 4 == 0:  # parts of the model, called directly
                x = torch.randn(1, 3, WIDTH)
                assert torch.equal(model.blocks[seed % 6](x), whole.blocks[seed % 6](x))
                assert torch.equal(model.unused(x), whole.unused(x))


def test_generation_under_inference_mode_and_then_without(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        for way in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
            with way():
                assert torch.equal(model(tokens()), whole(tokens()))


def test_training_is_refused(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty().requires_grad_(True)
    with pytest.raises(ValueError, match=r"embedding\.weight.*requires_grad_"):
        stream_weights(model, directory, memory_budget="9MiB")
    model.requires_grad_(False)
    with stream_weights(model, directory, memory_budget="9MiB"):
        x = torch.randn(1, 3, WIDTH, requires_grad=True)
        with pytest.raises(RuntimeError, match="inference"):
            model.blocks[0](x)
        with torch.no_grad():
            model.blocks[0](x)


def test_files_that_do_not_fit_are_refused(stored: tuple[Model, Path], directory: Path) -> None:
    whole, _ = stored
    state = dict(whole.state_dict())
    del state["head.weight"]
    path = directory / "other.safetensors"

    def refused(match: str, **changes: Any) -> None:
        changed = {**state, **{name.replace("__", "."): value for name, value in changes.items()}}
        save_file({name: one for name, one in changed.items() if one is not None}, path)
        with pytest.raises(ValueError, match=match):
            stream_weights(empty(), path, memory_budget="9MiB")

    refused(
        r"missing tensors: shift, embedding\.weight or head\.weight",
        embedding__weight=None,
        shift=None,
    )
    refused(
        r"shared\.bias has shape \[7\] in the files and \[256\] in the model",
        shared__bias=torch.zeros(7),
    )
    save_file({**state, "more": torch.zeros(3)}, path)
    with pytest.warns(UserWarning, match="no parameters or buffers with the names more"):
        stream_weights(empty(), path, memory_budget="9MiB").close()
    save_file(state, path)
    with pytest.raises(MemoryBudgetError, match="LSTM") as caught:
        stream_weights(empty(), path, memory_budget="1MiB")
    stream_weights(empty(), path, memory_budget=caught.value.needed_nbytes).close()
    with pytest.raises(MemoryBudgetError):
        stream_weights(empty(), path, memory_budget=caught.value.needed_nbytes - 1)
    lost = empty()
    lost.fixed = torch.ones(3, device="meta")
    with pytest.raises(ValueError, match=r"fixed.*meta"):
        stream_weights(lost, path, memory_budget="9MiB")
    model = empty()
    with (
        stream_weights(model, path, memory_budget="9MiB"),
        pytest.raises(ValueError, match="already"),
    ):
        stream_weights(model, path, memory_budget="9MiB")
    for wrong in (
        {"memory_budget": 0},
        {"memory_budget": "x"},
        {"blocks": [3]},
        {"device": "meta"},
    ):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            stream_weights(empty(), path, **{"memory_budget": "9MiB", **wrong})


def test_smallest_budget_is_enough_for_any_order(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    with pytest.raises(MemoryBudgetError) as caught:
        stream_weights(empty(), directory, memory_budget=1)
    model = empty()
    with stream_weights(model, directory, memory_budget=caught.value.needed_nbytes):
        for skip in (-1, 2, 4, -1):
            assert torch.equal(model(tokens(), skip), whole(tokens(), skip))


def stored_at(at: int, modulo: int, directory: Path, dtype: str, weight: torch.Tensor) -> Path:
    """Write a file in which the weight begins at such an offset."""
    entry = {"weight": (dtype, list(weight.shape), bytes_of(weight))}
    path = written(directory / "x.safetensors", entry)
    begin = path.stat().st_size - weight.nbytes
    return written(path, entry, pad=(at - begin) % modulo)


def test_dtypes_are_those_of_the_files_and_unaligned_ones_are_read(directory: Path) -> None:
    weight = torch.randn(300, 500).to(torch.bfloat16)
    path = stored_at(1, 2, directory, "BF16", weight)
    with torch.device("meta"):
        model = nn.Linear(500, 300, bias=False).requires_grad_(False)
    x = torch.randn(4, 500).to(torch.bfloat16)
    with stream_weights(model, path, memory_budget="1MiB"):
        assert torch.equal(model(x), nn.functional.linear(x, weight))


@pytest.mark.parametrize("shift", [0, 4, 8, 24, 32, 56])
def test_weights_begin_where_torchs_do_and_give_the_same_bits(directory: Path, shift: int) -> None:
    torch.manual_seed(2)
    whole = nn.Linear(512, 777, bias=False).requires_grad_(False)
    path = stored_at(shift, 64, directory, "F32", whole.weight)

    class Told(nn.Linear):
        def forward(self, x: Any) -> Any:
            assert self.weight.data_ptr() % 64 == 0
            return super().forward(x)

    with torch.device("meta"):
        model = Told(512, 777, bias=False).requires_grad_(False)
    x = torch.randn(1, 512)
    with stream_weights(model, path, memory_budget="2MiB"):
        assert torch.equal(model(x), whole(x))


def test_real_parameters_are_given_up(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    wanted = whole(tokens())
    model = Model()
    with stream_weights(model, directory, memory_budget="9MiB"):
        assert all(isinstance(param, AbsentParameter) for param in model.parameters())
        assert torch.equal(model(tokens()), wanted)
    assert model.head.weight is model.embedding.weight
    assert model.shift.abs().sum() > 0


def test_modules_that_use_others_parameters_are_blocks(directory: Path) -> None:
    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x @ self.inner.weight

    whole = nn.Sequential(Reaches(), Reaches()).requires_grad_(False)
    save_file(whole.state_dict(), directory / "x.safetensors")
    x = torch.randn(2, 8)
    with torch.device("meta"):
        model = nn.Sequential(Reaches(), Reaches()).requires_grad_(False)
    with (
        stream_weights(model, directory, memory_budget="1MiB"),
        pytest.raises(RuntimeError, match=r"0\.inner\.weight is not in memory.*blocks="),
    ):
        model(x)
    with stream_weights(model, directory, memory_budget="1MiB", blocks=[Reaches]):
        assert torch.equal(model(x), whole(x))


def test_an_absent_weight_tells_its_shape_and_no_more(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        weight = model.shared.weight
        assert weight.shape == (WIDTH, WIDTH)
        assert (weight.dtype, weight.device) == (torch.float32, torch.device("cpu"))
        assert weight.numel() == WIDTH * WIDTH
        assert not weight.requires_grad
        x = torch.randn(2, WIDTH)
        for use in (
            lambda: x @ weight,
            lambda: x @ weight.T,
            lambda: x @ weight.data,
            lambda: x @ weight.detach(),
            lambda: weight + 1,
            lambda: weight.double(),
            lambda: nn.functional.linear(x, weight),
            lambda: torch.cat([x, weight]),
        ):
            with pytest.raises(RuntimeError, match="is not in memory"):
                use()


def test_inputs_on_the_models_device_are_where_the_stream_computes(
    stored: tuple[Model, Path],
) -> None:
    whole, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        device = next(model.parameters()).device
        assert torch.equal(model(tokens().to(device)), whole(tokens()))
        assert model.to(device) is model.to(torch.float32) is model
        assert torch.equal(model(tokens()), whole(tokens()))
    assert all(param.is_meta for param in model.parameters())


def test_a_forward_that_asks_a_weight_for_its_device_gets_the_right_one(directory: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(20, 16)
            self.eval().requires_grad_(False)

        def forward(self, ids: Any) -> Any:
            numbers = torch.arange(ids.shape[1], device=self.positions.weight.device)
            return self.embed(ids) + self.positions(numbers)

    whole = Positions()
    save_file(whole.state_dict(), directory / "x.safetensors")
    with torch.device("meta"):
        model = Positions()
    ids = torch.randint(0, 50, (1, 8))
    with stream_weights(model, directory, memory_budget="1MiB"):
        assert torch.equal(model(ids), whole(ids))


def test_inputs_without_values_are_refused(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    meta = torch.empty(1, 3, WIDTH, device="meta")
    x = torch.randn(1, 3, WIDTH)
    state = torch.empty(1, 1, WIDTH, device="meta")
    with stream_weights(model, directory, memory_budget="9MiB"):
        for use in (
            lambda: model(tokens().to("meta")),
            lambda: model(tokens=tokens().to("meta")),
            lambda: model.blocks[0](meta),
            lambda: model.shared(meta),
            lambda: model.recurrent(x, (state, torch.zeros(1, 1, WIDTH))),
            lambda: model.recurrent(x, hx=[torch.zeros(1, 1, WIDTH), state]),
        ):
            with pytest.raises(RuntimeError, match="an input is on the meta device"):
                use()
        assert torch.equal(model(tokens()), whole(tokens()))


class Held(nn.Module):
    """The model has a tensor that is neither a parameter nor a buffer."""

    def __init__(self, held: Any = None, *, one: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.held = held if held is not None else torch.ones(8)
        if one:
            self.held = [self.inner.weight]
        self.eval().requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + (self.held if isinstance(self.held, torch.Tensor) else 0)


def test_tensors_that_would_stay_as_they_are_are_refused(directory: Path) -> None:
    """They have no values on the meta device; a parameter in a list would keep its old value."""
    whole = Held()
    save_file(whole.state_dict(), directory / "x.safetensors")

    def stream(model: nn.Module) -> Any:
        return stream_weights(model, directory, memory_budget="1MiB")

    meta = torch.ones(8, device="meta")
    for held in (meta, [meta], {"x": meta}):
        with pytest.raises(ValueError, match=r"held.*meta device"):
            stream(Held(held))
    for device in ("meta", "cpu"):
        with torch.device(device), pytest.raises(ValueError, match=r"held.*refer to parameters"):
            stream(Held(one=True))
    x = torch.randn(2, 8)
    with torch.device("meta"):
        model = Held(torch.ones(8, device="cpu"))
    with stream(model):
        assert torch.equal(model(x), whole(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_weight_that_a_hook_makes_anew_is_no_tensor_that_stays(directory: Path) -> None:
    def new() -> nn.Module:
        layer = nn.utils.weight_norm(nn.Linear(8, 8))
        return nn.Sequential(layer).eval().requires_grad_(False)

    whole = new()
    save_file(whole.state_dict(), directory / "x.safetensors")
    with torch.device("meta"):
        model = new()
    x = torch.randn(2, 8)
    with stream_weights(model, directory, memory_budget="1MiB"):
        assert torch.equal(model(x), whole(x))


def test_what_is_streamed_already_is_refused_in_a_larger_model(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        outer = nn.ModuleDict({"inner": model})
        with pytest.raises(ValueError, match=r"inner\.embedding\.weight.*streamed already"):
            stream_weights(outer, directory, memory_budget="9MiB")


@pytest.mark.parametrize("seed", range(6))
def test_names_of_a_tied_parameter_are_one(
    directory: Path, recwarn: pytest.WarningsRecorder, seed: int
) -> None:
    """Other shapes are refused, and other values cause a warning; the last value is used, as by load_state_dict."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.third.weight = self.second.weight = self.first.weight
            self.eval().requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.third(torch.relu(self.second(torch.relu(self.first(x)))))

    rng = random.Random(seed)
    path = directory / "x.safetensors"
    names = [f"{name}.weight" for name in ("first", "second", "third")]
    given = rng.sample(names, rng.randint(1, 3))
    values = [torch.randn(8, 8), torch.randn(8, 8)]
    state = {name: rng.choice(values).clone() for name in given}
    save_file(state, path)
    whole = Tied()
    whole.load_state_dict(state, strict=False)
    with torch.device("meta"):
        model = Tied()
    model.third.weight = model.second.weight = model.first.weight
    x = torch.randn(2, 8)
    with stream_weights(model, path, memory_budget="1MiB"):
        assert torch.equal(model(x), whole(x))
    warned = [str(one.message) for one in recwarn if "different values" in str(one.message)]
    used = max(given, key=names.index)
    differing = [
        name for name in names if name in state and not torch.equal(state[name], state[used])
    ]
    assert len(warned) == bool(differing)
    if warned:
        expected = ", ".join(f"{name} and {used} ({used} is used)" for name in differing)
        assert f"different values in the files: {expected}. " in warned[0]
    for dtype in (torch.float16, torch.bfloat16):
        save_file({names[0]: values[0], names[1]: values[0].to(dtype)}, path)
        with pytest.warns(
            UserWarning, match=r"first\.weight and second\.weight \(second\.weight is used\)"
        ):
            stream_weights(model, path, memory_budget="1MiB").close()
    save_file({names[0]: values[0], names[2]: torch.zeros(9, 8)}, path)
    with pytest.raises(
        ValueError, match=r"third\.weight has shape \[9, 8\] in the files and \[8, 8\]"
    ):
        stream_weights(model, path, memory_budget="1MiB")


def test_a_tied_parameter_is_compared_to_its_last_byte(directory: Path) -> None:
    weight = torch.zeros(3 << 20, dtype=torch.int32)  # 12 MiB: more than is compared at a time
    with torch.device("meta"):
        model = Holder()
    other = weight.clone()
    save_file({"one": weight, "two": other}, directory / "x.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream_weights(model, directory, memory_budget="16MiB").close()
    other[-1] = 1
    save_file({"one": weight, "two": other}, directory / "x.safetensors")
    with pytest.warns(UserWarning, match=r"one and two \(two is used\)"):
        stream_weights(model, directory, memory_budget="16MiB").close()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Parameter(torch.zeros(3 << 20, dtype=torch.int32), False)


def test_a_streamed_model_that_is_saved_or_copied_names_what_is_not_there(
    stored: tuple[Model, Path], directory: Path
) -> None:
    model = empty()
    other = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32)).eval().requires_grad_(False)
    save_file(other.state_dict(), directory / "other")
    with (
        stream_weights(model, directory, memory_budget="9MiB"),
        stream_weights(other, directory / "other", memory_budget="1MiB"),
    ):
        for each in (model, other):
            state = each.state_dict()
            for save in (
                lambda state=state: torch.save(state, io.BytesIO()),
                lambda each=each: torch.save(each, io.BytesIO()),
                lambda each=each: pickle.dumps(each),
                lambda each=each: copy.deepcopy(each),
                lambda state=state: copy.deepcopy(state),
                lambda state=state: save_file(state, directory / "saved"),
                lambda state=state: tensorferry.checkpoint.save(state, directory / "saved"),
                lambda state=state: tensorferry.safetensors.torch.save_file(
                    state, directory / "saved"
                ),
            ):
                with pytest.raises(RuntimeError, match=r"cannot be saved|is not in memory"):
                    save()
        for each in (model.forward, *other[0]._forward_hooks.values()):
            with pytest.raises(RuntimeError, match="a streamed model cannot be saved or copied"):
                pickle.dumps(each)
    assert not (directory / "saved").exists()


def test_values_that_would_be_ignored_are_refused(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    state = whole.state_dict()
    zeros = {name: torch.zeros_like(one) for name, one in state.items()}
    wanted = whole(tokens())
    with stream_weights(model, directory, memory_budget="9MiB"):
        with pytest.raises(RuntimeError, match=r"(?s)positions.*the model is streamed"):
            model.load_state_dict(zeros)
        with pytest.raises(RuntimeError, match=r"(?s)weight.*the model is streamed"):
            model.shared.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
        model.shift.copy_(whole.shift)  # a buffer, which has been loaded
        assert model.load_state_dict({}, strict=False).missing_keys
        weight = model.shared.weight
        for change in (
            lambda: setattr(weight, "data", torch.zeros(WIDTH, WIDTH)),
            lambda: weight.data.zero_(),
            lambda: weight.copy_(torch.zeros(WIDTH, WIDTH)),
            lambda: setattr(weight, "grad", torch.zeros(WIDTH, WIDTH)),
            lambda: nn.init.zeros_(weight),
            lambda: model.half(),
            lambda: model.to(torch.bfloat16),
            lambda: model.to("meta"),
            lambda: model.requires_grad_(True),
            lambda: setattr(weight, "requires_grad", True),
            lambda: torch.func.functional_call(model, {"positions": weight}, (tokens(),)),
        ):
            with pytest.raises(RuntimeError, match=r"the parameter \S+ .*(stream|not in memory)"):
                change()
        model.requires_grad_(False)
        weight.grad = None
        assert torch.equal(model(tokens()), wanted)
        model.load_state_dict({"shift": zeros["shift"]}, strict=False)  # in memory, and no weight
        assert not torch.equal(model(tokens()), wanted)


def test_a_weight_that_is_replaced_meanwhile_is_used_and_stays(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    for module, name in ((".", "positions"), ("shared", "weight"), ("recurrent", "bias_ih_l0")):
        model, expected = empty(), copy.deepcopy(whole)
        stream = stream_weights(model, directory, memory_budget="9MiB")
        parts = [
            each if module == "." else each.get_submodule(module) for each in (model, expected)
        ]
        given = nn.Parameter(torch.rand(getattr(parts[1], name).shape), requires_grad=False)
        for part in parts:
            setattr(part, name, given)
        for seed in range(3):
            assert torch.equal(model(tokens(seed)), expected(tokens(seed)))
        stream.close()
        assert getattr(parts[0], name) is given


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_streams_outside_of_the_graph(
    stored: tuple[Model, Path], backend: str
) -> None:
    whole, directory = stored

    def whole_model(model: Any) -> Any:
        return torch.compile(model, backend=backend)

    def in_place(model: Any) -> Any:
        model.compile(backend=backend)
        return model

    def parts(model: Any) -> Any:
        model.blocks[1].compile(backend=backend)
        model.shared = torch.compile(model.shared, backend=backend)
        return model

    for compiled_first, compile_it in itertools.product(
        (True, False), (whole_model, in_place, parts)
    ):
        if compiled_first and compile_it is parts:
            continue  # names in the files are no longer the model's
        torch._dynamo.reset()
        model = empty()
        run = compile_it(model) if compiled_first else None
        with stream_weights(model, directory, memory_budget="9MiB") as stream:
            run = run if compiled_first else compile_it(model)
            for seed in range(3):
                assert torch.allclose(run(tokens(seed)), whole(tokens(seed)), atol=1e-5)
            assert stream.stats()["passes"] == 3
    with (
        stream_weights(model := empty(), directory, memory_budget="9MiB"),
        pytest.raises(RuntimeError, match=r"Swapper\._run"),
    ):
        torch.compile(model, backend=backend, fullgraph=True)(tokens())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_streamed_model_is_not_traced(stored: tuple[Model, Path]) -> None:
    """A trace would refer to memory that the stream reuses."""
    whole, directory = stored
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        for trace in (
            lambda: torch.jit.trace(model, tokens(), check_trace=False),
            lambda: proxy_tensor.make_fx(model)(tokens()),
            lambda: proxy_tensor.make_fx(model.shared)(torch.randn(1, WIDTH)),
        ):
            with pytest.raises(RuntimeError, match=r"cannot be traced|is not in memory"):
                trace()
        with pytest.raises(RuntimeError, match="is not in memory"):
            torch.export.export(model, (tokens(),), strict=False)
        assert torch.equal(model(tokens()), whole(tokens()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_absent_weight_is_nan_where_python_is_not_asked(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty()
    product = torch.jit.script(_product)
    with stream_weights(model, directory, memory_budget="9MiB"):
        x, weight = torch.randn(2, WIDTH), model.shared.weight
        assert product(x, weight).isnan().all()
        with torch._C.DisableTorchFunctionSubclass():
            assert (x @ weight).isnan().all()
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                weight.zero_()
        assert "not in memory" in repr(weight)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def test_several_threads_take_turns(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    wanted = [whole(tokens(seed)) for seed in range(4)]

    def work(seed: int) -> None:
        for _ in range(3):
            assert torch.equal(model(tokens(seed)), wanted[seed])

    with stream_weights(model, directory, memory_budget="9MiB"):
        in_threads(4, work)


def test_a_part_is_refused_while_another_thread_runs_the_model(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty()
    said: list[str] = []

    def other() -> None:
        try:
            model.shared(torch.zeros(1, WIDTH))
        except RuntimeError as error:
            said.append(str(error))

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = model.blocks[2].register_forward_hook(meanwhile)
    with stream_weights(model, directory, memory_budget="9MiB") as stream:
        model(tokens())
        assert len(said) == 1
        assert "another thread" in said[0]
        hook.remove()
        model.blocks[2].register_forward_hook(lambda *_: stream.close())
        with pytest.raises(RuntimeError, match="the model is running in this thread"):
            model(tokens())


def test_while_a_thread_runs_a_part_no_other_gets_its_memory(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    model = empty()
    x = torch.randn(1, 3, WIDTH)
    inside, go_on = threading.Event(), threading.Event()
    found: list[Any] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is part:
            inside.set()
            go_on.wait()

    part = threading.Thread(target=lambda: found.append(model.blocks[0](x)))
    with stream_weights(model, directory, memory_budget="5MiB") as stream:
        model.blocks[0].norm.register_forward_pre_hook(wait)
        part.start()
        inside.wait()
        try:
            for use in (
                lambda: model.blocks[1](x),
                lambda: model.shared(x),
                lambda: model(tokens()),
                stream.close,
            ):
                with pytest.raises(RuntimeError, match="another thread runs the model"):
                    use()
        finally:
            go_on.set()
            part.join()
        assert torch.equal(found[0], whole.blocks[0](x))
        assert torch.equal(model(tokens()), whole(tokens()))


def test_a_child_closes_what_another_thread_of_the_parent_runs(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    model = empty()
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go_on.wait()

    model.blocks[0].register_forward_hook(wait)
    stream = stream_weights(model, directory, memory_budget="9MiB")
    thread = threading.Thread(target=lambda: model(tokens()))
    thread.start()
    inside.wait()
    try:
        passes_in_child(stream.close)
    finally:
        go_on.set()
        thread.join()
    stream.close()


def test_what_cannot_be_read_ahead_is_told_to_who_needs_it(directory: Path) -> None:
    whole = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]).requires_grad_(False)
    for name, value in whole.state_dict().items():
        save_file({name: value}, directory / f"{name}.safetensors")
    x = torch.randn(1, 64)
    with torch.device("meta"):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
        model = nn.Sequential(*layers).requires_grad_(False)
    with stream_weights(model, directory, memory_budget="1MiB"):
        gone = directory / "1.weight.safetensors"
        gone.rename(directory / "gone")
        assert torch.equal(model[0](x), whole[0](x))
        with pytest.raises(OSError, match=r"1\.weight"):
            model(x)
        (directory / "gone").rename(gone)
        assert torch.equal(model(x), whole(x))


def test_a_file_that_cannot_be_read_is_told_and_the_next_pass_may_succeed(
    stored: tuple[Model, Path], faultfs: FaultFS
) -> None:
    whole, directory = stored
    for each in directory.iterdir():  # below the mount, so the mount has no cached pages of it
        shutil.copy(each, faultfs.backing / each.name)
    model = empty()
    with stream_weights(model, faultfs.path, memory_budget="9MiB"):
        wanted = whole(tokens())
        assert torch.equal(model(tokens()), wanted)
        faultfs.order(Fault("read", error=errno.EIO))
        with pytest.raises(OSError, match=r"[01]\.safetensors"):
            [model(tokens()) for _ in range(3)]
        faultfs.clear()
        with contextlib.suppress(OSError):  # an error of the read-ahead
            model(tokens())
        for _ in range(3):
            assert torch.equal(model(tokens()), wanted)


def test_a_file_that_is_changed_in_place_is_refused_by_each_pass(
    stored: tuple[Model, Path],
) -> None:
    """Its weights may be of another version than those that stay in memory."""
    whole, directory = stored
    path = directory / "0.safetensors"
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        assert torch.equal(model(tokens()), whole(tokens()))
        path.write_bytes(path.read_bytes())
        for _ in range(3):
            with pytest.raises(SafetensorError, match="replaced or changed"):
                model(tokens())
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        assert torch.equal(model(tokens()), whole(tokens()))


def test_interrupted_at_any_moment_the_next_pass_is_right(directory: Path) -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(*[nn.Linear(600, 600) for _ in range(5)]).requires_grad_(False)
    save_file(whole.state_dict(), directory / "x.safetensors")
    x = torch.randn(1, 600)
    wanted = whole(x)
    model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(5)]).requires_grad_(False)
    sources = holder.__file__.rsplit("/", 1)[0], pipeline.__file__

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    with stream_weights(model, directory, memory_budget="4MiB"):
        for number in itertools.count(1, 7):
            with interrupts.At(number, sources, interrupt) as at, suppress(KeyboardInterrupt):
                model(x)
            assert torch.equal(model(x), wanted), at.happened_in
            if at.happened_in is None:
                break
        assert number > 50


def test_a_forked_child_streams_for_itself(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    torch.set_num_threads(1)  # torch's own threads do not survive fork()
    wanted = whole(tokens())
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        assert torch.equal(model(tokens()), wanted)

        def work() -> None:
            for _ in range(2):
                assert torch.equal(model(tokens()), wanted)

        passes_in_child(work)
        assert torch.equal(model(tokens()), wanted)


def test_a_file_that_was_replaced_meanwhile_is_refused(stored: tuple[Model, Path]) -> None:
    _, directory = stored
    weights = WeightsMap(directory)
    name = next(iter(weights))
    model = empty()
    with stream_weights(model, directory, memory_budget="9MiB"):
        for path in directory.glob("*.safetensors"):
            path.with_suffix(".new").write_bytes(path.read_bytes())
            path.with_suffix(".new").rename(path)
        with pytest.raises(SafetensorError, match="replaced or changed"):
            model(tokens())
    with pytest.raises(SafetensorError, match="replaced or changed"):
        weights[name]


def test_closed_or_dropped_nothing_is_left(stored: tuple[Model, Path]) -> None:
    _, directory = stored

    def closed() -> None:
        stream = stream_weights(model := empty(), directory, memory_budget="9MiB")
        model(tokens())
        stream.close()
        stream.close()
        with pytest.raises(ValueError, match="closed"), stream:
            pass

    def dropped() -> None:
        model = empty()
        stream_weights(model, directory, memory_budget="9MiB")
        model(tokens())

    for work in (closed, dropped):
        for _ in range(3):
            work()
        gc.collect()
        with leaks.nothing_leaks(resident_slack_nbytes=24 * MIB):
            for _ in range(10):
                work()
            gc.collect()


def test_weights_map_is_a_mapping(stored: tuple[Model, Path]) -> None:
    whole, directory = stored
    weights = WeightsMap(directory)
    state = whole.state_dict()
    assert set(weights) == set(state) - {"head.weight"}
    assert len(weights) == len(state) - 1
    assert "nothing" not in weights
    for name, tensor in weights.items():
        assert torch.equal(tensor, state[name])
    with pytest.raises(KeyError):
        weights["nothing"]


def test_weights_map_serves_accelerate(stored: tuple[Model, Path]) -> None:
    hooks = required.module("accelerate.hooks")
    whole, directory = stored
    model = empty()
    served = _Aliased(WeightsMap(directory))
    hooks.attach_align_device_hook(
        model,
        execution_device=torch.device("cpu"),
        offload=True,
        offload_buffers=True,
        weights_map=served,
        preload_module_classes=["MultiheadAttention", "Block"],
    )
    assert torch.equal(model(tokens()), whole(tokens()))
    assert served.asked
    assert all(param.is_meta for param in model.parameters())


class _Aliased(dict[str, Any]):
    """accelerate asks for tied weights by each name."""

    def __init__(self, weights: WeightsMap) -> None:
        super().__init__()
        self.weights, self.asked = weights, 0

    def __getitem__(self, name: str) -> Any:
        self.asked += 1
        if name == "fixed":
            return torch.ones(3)
        return self.weights["embedding.weight" if name == "head.weight" else name]


# Arithmetic without a model


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept_leaves_a_window_and_wastes_little(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([4096, 65536, MIB, 8 * MIB, 30 * MIB, 200 * MIB]) for _ in range(60)]
    steps = [[number] for number in range(len(sizes))]
    rng.shuffle(steps)
    nbytes = sizes
    least = max(sizes)
    for budget in (least, 2 * least, 4 * least, sum(sizes) // 2, sum(sizes) - 1, sum(sizes)):
        if budget < least:
            continue
        kept = scan.kept([one for step in steps for one in step], steps, nbytes, budget)
        held = sum(nbytes[one] for one in kept)
        streamed = [size for one, size in enumerate(sizes) if one not in kept]
        assert held + max(streamed, default=0) <= budget
        if budget == sum(sizes):
            assert not streamed
        if budget >= 4 * least:
            assert held + 2 * max(streamed, default=0) <= budget
            assert held >= 0.6 * (budget - 2 * max(streamed, default=0) - 64 * MIB)


def test_what_is_kept_is_spread_over_the_pass() -> None:
    steps = [[number] for number in range(100)]
    kept = scan.kept([one for step in steps for one in step], steps, [20 * MIB] * 100, 1064 * MIB)
    assert len(kept) >= 48
    runs = [len(list(group)) for _, group in itertools.groupby(range(100), kept.__contains__)]
    assert max(runs) <= 3


def test_what_is_used_often_is_kept_first() -> None:
    steps = [[number % 7 if number % 2 else 7 + number] for number in range(60)]
    nbytes = [10 * MIB] * 67
    kept = scan.kept([one for step in steps for one in step], steps, nbytes, 160 * MIB)
    assert set(range(7)) <= kept


@pytest.mark.parametrize("seed", range(10))
def test_order_finds_back_after_anything(seed: int) -> None:
    rng = random.Random(seed)
    usual = [rng.randrange(30) for _ in range(60)]
    order = scan.Order(range(30))
    for number in range(6):
        order.begin_pass()
        strange = [rng.randrange(40) for _ in range(5)] if number in (2, 4) else usual[20:25]
        other = usual[:20] + strange + usual[25:]
        found = [order.used(step) for step in other]
        if number == 1:
            assert order.learned
            assert all(found)
        if number == 2:
            assert all(found[:20])
            assert sum(found[25:]) >= 20
        if number in (2, 4):
            order.abandon_pass()


def test_arena_never_gives_a_byte_twice() -> None:
    rng = random.Random(5)
    arena = Arena(1000 * 4096)
    held: dict[int, tuple[int, int]] = {}
    for number in range(5000):
        if held and (rng.random() < 0.45 or len(held) > 40):
            owner = rng.choice(list(held))
            arena.give_back(owner)
            del held[owner]
            continue
        nbytes = rng.randint(1, 60 * 4096)
        at = arena.take(number, nbytes, stays=rng.random() < 0.3)
        if at is None:
            continue
        end = at + round_to_pages(nbytes)
        assert 0 <= at <= end <= arena.nbytes
        assert all(end <= begin or stop <= at for begin, stop in held.values())
        held[number] = (at, end)
    for owner in list(held):
        arena.give_back(owner)
    assert arena.take("all", arena.nbytes) == 0
