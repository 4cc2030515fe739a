"""Trainings side by side: one in memory, one with its model on drives."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.offload import MemoryBudgetError, offload_training
from tensorferry.offload.equality import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

WIDTH = 64
VOCABULARY = 61


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 5 * WIDTH)
        self.down = nn.Linear(5 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        p = self.dropout if self.training else 0.0
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.dropout(x, p, self.training)


class Transformer(nn.Module):
    """Tied embeddings, a parameter of the model itself, dropout."""

    def __init__(self, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(12, WIDTH))
        self.blocks = nn.ModuleList(Attention(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """A model with batch norm; its statistics must change once in each pass, also within blocks that run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU())
            for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(32)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(tokens).transpose(1, 2))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x).transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.blocks[0](self.embedding(tokens))
        return self.head(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts: each token uses one expert, and experts without tokens get no gradient."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                out[chosen] = expert(x[chosen]) * scores[chosen][:, number : number + 1]
        return x + out


class Stack(nn.Module):
    """Blocks between an embedding and a head, each run once, or as ``order`` has it."""

    def __init__(self, blocks: Iterable[nn.Module], order: Sequence[int] = ()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.order = order or range(len(self.blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for at in self.order:
            x = self.blocks[at](x)
        return self.head(x)


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__(Experts() for _ in range(2))


class Repeated(Stack):
    """One block is called several times."""

    def __init__(self) -> None:
        super().__init__([Attention(0.1), Attention(0.0)], (0, 1, 0, 0))


class Normed(nn.Module):
    """Parametrized weights, an encoder layer of torch's, and one module that only holds parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.head(x)


MODELS: list[Callable[[], nn.Module]] = [
    *(Transformer, Convolutions, Recurrent, Mixture, Repeated, Normed),
]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "AdamW-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam-amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-1),
    "SGD-nesterov": functools.partial(
        torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": functools.partial(torch.optim.RAdam, lr=1e-2),
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "AdamW-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW-maximize": functools.partial(torch.optim.AdamW, lr=1e-3, maximize=True),
}


def least(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, **options: Any
) -> int:
    """Return the smallest possible budget, without changing the training."""
    try:
        offload_training(model, optimizer, directory, memory_budget=4096, **options)
    except MemoryBudgetError as error:
        return error.needed_nbytes
    raise AssertionError("one page is not enough for any model")


class Run:
    """A training, in memory or on drives, that does the same things in the same order."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        directory: Path | None,
        *,
        budget: int | str = "least",
        frozen: Iterable[str] = (),
        dtype: torch.dtype = torch.float32,
        groups: bool = False,
        micro: int = 1,
        clip: str = "",
        blocks: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = make_model().to(dtype)
        for name, param in self.model.named_parameters():
            param.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))
        params: Any = [param for param in self.model.parameters() if param.requires_grad]
        if groups:
            params = [
                {"params": [each for each in params if each.dim() > 1], "weight_decay": 0.1},
                {"params": [each for each in params if each.dim() <= 1], "weight_decay": 0.0},
            ]
        self.optimizer = make_optimizer(params)
        self.scheduler: Any = None
        self.micro, self.clip = micro, clip
        self.offloaded = directory is not None
        self.losses: list[Any] = []
        if directory is not None:
            options["blocks"] = self.model.blocks if blocks else ()
            if budget == "least":
                budget = least(self.model, self.optimizer, directory, **options)
            self.model, self.optimizer = offload_training(
                *(self.model, self.optimizer, directory), memory_budget=budget, **options
            )
        self.random = torch.Generator().manual_seed(7)
        torch.manual_seed(3)
        self.state_of_random = torch.get_rng_state()

    def schedule(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, steps: int) -> None:
        torch.set_rng_state(self.state_of_random)
        for _ in range(steps):
            for _ in range(self.micro):
                self.forward_and_backward()
            self.step()
        self.state_of_random = torch.get_rng_state()

    def forward_and_backward(self) -> None:
        tokens = torch.randint(0, VOCABULARY, (2, 9), generator=self.random)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss / self.micro).backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        if self.clip == "norm":
            norm = (
                self.optimizer.clip_grad_norm_(0.5)
                if self.offloaded
                else nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            )
            self.losses.append(norm.item())
        elif self.clip == "value":
            if self.offloaded:
                self.optimizer.clip_grad_value_(0.01)
            else:
                nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            tokens = torch.arange(8).reshape(1, 8)
            self.losses.append(self.model(tokens).sum().item())
        self.model.train()


def assert_same(expected: Run, run: Run) -> None:
    """Compare losses, parameters, buffers and state bit for bit."""
    assert run.losses == expected.losses
    state, wanted = run.model.state_dict(), expected.model.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert same(value, state[name]), name
    theirs, ours = expected.optimizer.state_dict(), run.optimizer.state_dict()
    for number, each in theirs["state"].items():
        found = {key: value for key, value in ours["state"][number].items() if key != "master"}
        assert same(each, found), number
