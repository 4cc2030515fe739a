"""A small transformer under DeepSpeed's ZeRO-3, its states on NVMe: what the benchmark times, and the tests compare.

It imports DeepSpeed, so it is for processes of its own. Which engine moves the tensors is decided outside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a perceptron, whose matrices are beyond the least size that DeepSpeed swaps."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.perceptron_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unsqueeze(1) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1)
        x = x + self.projection(attended)
        return x + self.down(nn.functional.gelu(self.up(self.perceptron_norm(x))))


class Transformer(nn.Module):
    """Learns to count."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """An engine of DeepSpeed and its steps, in one of the processes of a training.

    Parameters
    ----------
    directory : Path
        Where DeepSpeed makes its files.
    offload : str
        What is on NVMe: "optimizer", "parameters", "both"; or "nothing" (then all of it is in memory).
    evaluate : bool
        Only compute losses: no gradients, no optimizer.
    layers, hidden : int
        The model's size; a layer has about 12 * hidden**2 parameters.
    sequence : int
        Tokens of a sequence; a batch has two.
    dtype : str
        "float32" or "bfloat16".
    aio : dict
        DeepSpeed's section of that name.
    """

    def __init__(
        self,
        directory: Path,
        offload: str,
        *,
        evaluate: bool = False,
        layers: int = 2,
        hidden: int = 512,
        sequence: int = 32,
        dtype: str = "float32",
        aio: dict[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._evaluate = evaluate
        self._step = 0
        self._sequence = sequence
        config = _configuration(directory, offload, evaluate, hidden, dtype, aio or {})
        torch.manual_seed(1)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Transformer(layers, hidden)
        parameters = None if evaluate else list(model.parameters())
        self._engine = deepspeed.initialize(
            model=model, model_parameters=parameters, config=config
        )[0]
        self._engine.train(not evaluate)

    def step(self) -> str:
        """Compute and, where it trains, learn from one batch; return the loss to the last bit, hexadecimal."""
        rank = torch.distributed.get_rank()
        starts = torch.tensor([[7 * self._step + rank], [11 * self._step + rank]])
        tokens = (starts + torch.arange(self._sequence)) % VOCABULARY
        self._step += 1
        if self._evaluate:
            with torch.no_grad():
                return float(self._engine(tokens)).hex()
        loss = self._engine(tokens)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss).hex()

    def swapped_nbytes(self) -> int:
        """Bytes of the files that tensors were swapped to, of all processes."""
        return sum(path.stat().st_size for path in self._directory.rglob("*.swp"))


class Sum(nn.Module):
    """Parameters of given shapes, and nothing to compute: each element's gradient is 0.001."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.each]).sum() * 1e-3


class OptimizerOnNvme:
    """Steps of Adam by DeepSpeed with its states on NVMe, pipelined, and nothing else to do.

    Parameters
    ----------
    directory : Path
        Where DeepSpeed makes its files.
    shapes : sequence of tuple
        The parameters'.
    buffers : int
        How many of the largest one's size DeepSpeed has for what it moves.
    aio : dict
        DeepSpeed's section of that name.
    """

    def __init__(
        self, directory: Path, shapes: Sequence[tuple[int, ...]], buffers: int, aio: dict[str, Any]
    ) -> None:
        largest = max(map(math.prod, shapes))
        config = _configuration(
            directory, "optimizer", False, math.isqrt(largest) // 2, "float32", aio
        )
        config["zero_optimization"]["sub_group_size"] = largest
        config["zero_optimization"]["offload_optimizer"]["buffer_count"] = buffers
        config["optimizer"]["params"]["fused"] = True
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Sum(shapes)
        self._engine = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]

    def compute_gradients(self) -> None:
        """Go forward and backward."""
        self._engine.backward(self._engine())

    def step(self) -> None:
        """Step the optimizer."""
        self._engine.step()


def join(**options: Any) -> None:
    """Make this process one of the training's: gloo alone, whose collectives need nothing compiled."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, **options)


def _configuration(
    directory: Path, offload: str, evaluate: bool, hidden: int, dtype: str, aio: dict[str, Any]
) -> dict[str, Any]:
    largest = 4 * hidden * hidden
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        "sub_group_size": largest,
    }
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    if offload in ("optimizer", "both"):
        zero["offload_optimizer"] = nvme | {
            "pipeline_read": True,
            "pipeline_write": True,
            "buffer_count": 12,
        }
    if offload in ("parameters", "both"):
        zero["offload_param"] = nvme | {"buffer_count": 8, "buffer_size": 2 * largest}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "aio": aio,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    if not evaluate:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
        config["zero_force_ds_cpu_optimizer"] = False  # torch's Adam: nothing else to compile
    return config


class Kept:
    """An engine with states in memory: under ZeRO-2 of a model in bfloat16, or without ZeRO in float32.

    Parameters
    ----------
    parameters : int
        How many there are, about.
    stage : int
        ZeRO's: 2, with 14 bytes to keep of each parameter; or 0, with 12.
    writer : dict, optional
        DeepSpeed's section "checkpoint": {"writer": ...}.
    """

    def __init__(self, parameters: int, stage: int, writer: dict[str, Any] | None) -> None:
        width = 1024
        torch.manual_seed(1)
        model = Sum([(width, width)] * max(parameters // width**2, 1))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": stage > 0},
            "checkpoint": {"writer": writer},
        }
        self.engine = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]
        self.step()

    def step(self) -> None:
        """Learn."""
        self.engine.backward(self.engine())
        self.engine.step()
