"""Random models and random programs: a training on drives is the same as in memory, bit for bit, at each moment.

A program is a sequence of operations: passes, clipping, changes in ``in_memory()``, hooks, evaluation, freezing, state
dicts, checkpoints, commits. Each operation appends what it sees to a log. To repeat a failure, set
``TENSORFERRY_TEST_SEED`` to the seed in pytest's header.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tensorferry.offload import TrainingOptimizer, offload_training, plan, slabs
from tensorferry.offload.equality import same
from tests.offload.trainings import OPTIMIZERS, least
from tests.support.data import SEED
from tests.support.effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 24
KINDS = (
    *("mlp", "norm", "batch", "dropout", "scale", "kept", "lstm", "frozen", "inner", "counter"),
    *("drawn", "list"),
)


class Block(nn.Module):
    """A block of one of several kinds; ``bias`` is an argument by keyword, in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch" else nn.LayerNorm(WIDTH)
        self.inner = nn.LSTM(WIDTH, WIDTH) if kind == "lstm" else nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(2))
        self.factor, self.earlier = 1.0, {"sums": [0.0]}
        if kind == "frozen":
            self.inner.requires_grad_(False)
        if kind == "inner":
            self.inner.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, extra: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        y = self.norm(x) * self.factor + extra["bias"][0]
        if self.kind == "counter":
            self.factor *= 1.0625
        if self.kind == "drawn":
            y = y * random.random()
        if self.kind == "list":
            y = y * len(self.earlier["sums"])
            self.earlier["sums"].append(self.factor)
        y = self.inner(y)[0] if self.kind == "lstm" else self.inner(y)
        y = self.down(torch.tanh(self.up(y))) * self.scale
        if self.kind == "dropout":
            y = nn.functional.dropout(y, 0.3, self.training)
        if self.kind == "kept":
            self.kept = self.scale.detach()
        self.calls += 1
        return x + y


class Model(nn.Module):
    """Blocks, called in some order, between a shared embedding; the model has a parameter of its own."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block(rng.choice(KINDS)) for _ in range(rng.randint(1, 4)))
        self.head = nn.Linear(WIDTH, 11)
        if rng.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.order = [rng.randrange(len(self.blocks)) for _ in range(len(self.blocks) + 1)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift
        for number, at in enumerate(self.order):
            bias = torch.full((WIDTH,), 0.1 * number)
            x = self.blocks[at](x, extra={"bias": [bias, self.shift]})
        return self.head(x)


class Program:
    """A training, in memory or on drives, and what it has seen."""

    def __init__(self, seed: int, directory: Path | None) -> None:
        self.seed, self.directory = seed, directory
        self.log: list[Any] = []
        self.saved: Any = None
        self.noise = torch.Generator().manual_seed(seed)
        self.begin()
        torch.manual_seed(seed + 1)
        self.state_of_random = torch.get_rng_state()

    def begin(self) -> None:
        """Make the model and the optimizer, as a new process does."""
        rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.model: Any = Model(rng)
        params = [param for param in self.model.parameters() if param.requires_grad]
        cut = rng.randint(0, len(params) - 1)
        groups = [{"params": params[:cut]}, {"params": params[cut:]}] if cut else params
        self.optimizer: Any = OPTIMIZERS[rng.choice(sorted(OPTIMIZERS))](groups)
        options = {
            "blocks": self.model.blocks if rng.random() < 0.7 else [],
            "checkpoint_activations": rng.random() < 0.7,
            "commit": "step" if rng.random() < 0.3 else "none",
        }
        self.commits = options["commit"] == "step"
        share = rng.choice([1.0, 1.0, 1.3, 4.0])
        self.is_large = share > 2
        if self.directory is not None:
            budget = least(self.model, self.optimizer, self.directory / "least", **options)
            self.model, self.optimizer = offload_training(
                *(self.model, self.optimizer, self.directory / "training"),
                memory_budget=int(share * budget),
                **options,
            )

    def in_memory(self, module: nn.Module) -> Any:
        if self.directory is None:
            return contextlib.nullcontext()
        return self.optimizer.in_memory(module)

    def learning(self) -> list[Any]:
        return [param for param in self.model.parameters() if param.requires_grad]

    # Operations. All random choices come from the argument, which is the same for both trainings.

    def backward(self, rng: random.Random, *, retain: bool = False) -> None:
        torch.set_rng_state(self.state_of_random)
        tokens = torch.randint(0, 11, (3, 4), generator=self.noise).flatten()
        out = self.model(tokens)
        loss = out.float().square().mean() * 2.0 ** rng.randint(-3, 3)
        for block in self.model.blocks:  # what the program changes after the forward pass
            block.factor += 0.25
            block.earlier["sums"].append(block.factor)
        self.model.eval()
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        self.model.train()
        self.log.append(random.random())
        self.log.append(loss.item())
        self.state_of_random = torch.get_rng_state()

    def backward_twice(self, rng: random.Random) -> None:
        self.backward(rng, retain=True)

    def evaluate(self, rng: random.Random) -> None:
        self.model.eval()
        with torch.no_grad():
            self.log.append(self.model(torch.arange(11)).sum().item())
        self.model.train()

    def clip_norm(self, rng: random.Random) -> None:
        kind = rng.choice([1.0, 2.0, 3.0, float("inf")])
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), rng.choice([1e-3, 0.1]), kind)
        self.log.append(norm.item())

    def clip_value(self, rng: random.Random) -> None:
        if all(param.grad is None for param in self.model.parameters()):
            return  # torch raises
        nn.utils.clip_grad_value_(self.model.parameters(), rng.choice([1e-4, 1e-2]))

    def scale_gradients(self, rng: random.Random) -> None:
        for param in self.learning():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def zero_in_place(self, rng: random.Random) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def zero_a_part(self, rng: random.Random) -> None:
        rng.choice([self.model.head, *self.model.blocks]).zero_grad()

    def step(self, rng: random.Random) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * rng.choice([0.5, 1.0, 1.5])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def change_in_memory(self, rng: random.Random) -> None:
        # The copies of a whole model may be larger than a small budget.
        module = rng.choice([self.model.head, *self.model.blocks, *[self.model] * self.is_large])
        ways = [rng.randrange(7) for _ in range(40)]
        with self.in_memory(module), torch.no_grad():
            for param, way in zip(module.parameters(), ways, strict=False):
                if way == 0:
                    param.mul_(0.9)
                elif way == 1:
                    param.data = torch.full_like(param, 0.25)
                elif way == 2 and param.requires_grad:
                    param.grad = torch.ones_like(param)
                elif way == 3:
                    param.grad = None
                elif way == 4 and param.grad is not None:
                    param.grad.add_(0.125)
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            self.log.append((norm.item(), sum(param.sum().item() for param in module.parameters())))

    def teach(self, rng: random.Random) -> None:
        for block in self.model.blocks:
            with self.in_memory(block), torch.no_grad():
                for param in block.parameters():
                    if not param.requires_grad:
                        param.lerp_(torch.ones_like(param), 0.25)

    def hook(self, rng: random.Random) -> None:
        """Register a hook that reads a gradient, and one that changes it, for one backward pass."""
        number = rng.randrange(len(self.learning()))
        param, way = self.learning()[number], rng.randrange(4)

        def call(param: torch.Tensor) -> None:
            assert param.grad is not None
            self.log.append(param.grad.sum().item())
            if way == 1:
                param.grad = param.grad * 2
            elif way == 2:
                param.grad.neg_()
            elif way == 3:
                param.grad = None

        handle = param.register_post_accumulate_grad_hook(call)
        self.backward(rng)
        handle.remove()

    def freeze(self, rng: random.Random) -> None:
        block = rng.choice(self.model.blocks)
        block.down.weight.requires_grad_(not block.down.weight.requires_grad)

    def write_to_a_view(self, rng: random.Random) -> None:
        for block in self.model.blocks:
            if hasattr(block, "kept"):
                self.log.append(block.kept.sum().item())
                block.kept.mul_(0.75)

    def save_and_load(self, rng: random.Random) -> None:
        state = {
            name: value.clone().mul_(1.25) if value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
        }
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def fail(self, rng: random.Random) -> None:
        """Have a backward pass fail in the middle, and forget its gradients."""

        def stop(*_: Any) -> None:
            raise ZeroDivisionError

        handle = self.model.blocks[0].up.register_full_backward_hook(stop)
        with contextlib.suppress(ZeroDivisionError):
            self.backward(rng)
        handle.remove()
        self.state_of_random = torch.get_rng_state()
        self.optimizer.zero_grad()

    def checkpoint(self, rng: random.Random) -> None:
        """Save, train on, and go back."""
        if self.directory is not None:
            self.optimizer.checkpoint(self.directory / f"checkpoint-{len(self.log)}")
        else:
            kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        number = len(self.log)
        self.backward(rng)
        self.step(rng)
        if self.directory is not None:
            self.optimizer.restore(self.directory / f"checkpoint-{number}")
        else:
            self.model.load_state_dict(kept[0])
            self.optimizer.load_state_dict(kept[1])

    def resume(self, rng: random.Random) -> None:
        """Continue from the last committed step in a new process."""
        if not self.commits:
            return
        self.backward(rng)
        self.step(rng)
        learning = [param.requires_grad for param in self.model.parameters()]
        state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if self.directory is not None:
            self.optimizer.close()
            del state
        self.begin()
        if self.directory is not None:
            assert self.optimizer.resume() is not None
        else:
            self.model.load_state_dict(state[0])
            self.optimizer.load_state_dict(state[1])
        for param, learns in zip(self.model.parameters(), learning, strict=True):
            param.requires_grad_(learns)

    def compare(self, other: Program, name: str) -> None:
        """Raise if the two trainings differ."""
        assert same(other.log, self.log), name
        state, wanted = self.model.state_dict(), other.model.state_dict()
        for key, value in wanted.items():
            assert same(value, state[key]), (name, key)
        theirs, ours = other.optimizer.state_dict(), self.optimizer.state_dict()
        assert same(theirs["state"], ours["state"]), name


OPERATIONS: list[Callable[[Program, random.Random], None]] = [
    *(Program.backward, Program.backward, Program.backward, Program.backward_twice),
    *(Program.step, Program.step, Program.clip_norm, Program.clip_value, Program.scale_gradients),
    *(Program.zero_in_place, Program.zero_a_part, Program.change_in_memory, Program.teach),
    *(Program.hook, Program.freeze, Program.write_to_a_view, Program.save_and_load),
    *(Program.fail, Program.checkpoint, Program.resume, Program.evaluate),
]


@pytest.mark.parametrize("number", range(examples(12)))
def test_any_program(directory: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(slabs, "MAX_SLAB_NBYTES", 8 << 10)
    monkeypatch.setattr(TrainingOptimizer, "_params_nbytes", 8 << 10)
    monkeypatch.setattr(plan, "_MIN_BUCKET_NBYTES", 4 << 10)
    rng = random.Random(SEED + number)
    seed = rng.randrange(1 << 30)
    print("seed", seed)
    expected, run = Program(seed, None), Program(seed, directory)
    names = []
    for _ in range(16):
        operation = rng.choice(OPERATIONS)
        names.append(operation.__name__)
        choices = rng.randrange(1 << 30)
        for program in (expected, run):
            random.seed(choices)
            operation(program, random.Random(choices))
        run.compare(expected, " ".join(names))
    run.optimizer.close()
