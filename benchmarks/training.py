"""A transformer under DeepSpeed's ZeRO-3, its states on NVMe: what benchmarks time, and the tests compare.

It imports DeepSpeed, so it is for processes of its own. Which engine moves the tensors is decided outside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import nn

from benchmarks.models import Transformer, batch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
    memory_budget : int, optional
        Bytes for parameters, gradients and buffers, as far as DeepSpeed can keep to them: what is beyond really is on
        NVMe, and activations of blocks are computed again.
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
        memory_budget: int | None = None,
    ) -> None:
        self._directory = directory
        self._evaluate = evaluate
        self._step = 0
        self._sequence = sequence
        config = _configuration(directory, offload, evaluate, hidden, dtype, aio or {})
        if memory_budget is not None:
            _hold_to(config, memory_budget, layers, hidden)
        torch.manual_seed(1)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Transformer(layers, hidden, checkpoint_activations=memory_budget is not None)
        parameters = None if evaluate else list(model.parameters())
        self._engine = deepspeed.initialize(
            model=model, model_parameters=parameters, config=config
        )[0]
        self._engine.train(not evaluate)

    def step(self) -> str:
        """Compute and, where it trains, learn from one batch; return the loss to the last bit, hexadecimal."""
        rank = torch.distributed.get_rank()
        tokens = batch(self._step, self._sequence, rank)
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


def _hold_to(config: dict[str, Any], memory_budget: int, layers: int, hidden: int) -> None:
    """Have parameters on NVMe that the budget has no room for, and the fastest settings that work.

    By its defaults DeepSpeed keeps the first 10^9 parameters in memory, all that are used again within 10^9, and a
    bucket of 5 * 10^8 gradients. Gradients are in memory in any case. Of parameters it prefetches one: where it may
    prefetch more, and they are used twice in a row, as the last block's are, it fails to assign their buffers; so does
    a head that is on NVMe. Activations are computed again by torch's reentrant function: with the other one DeepSpeed
    0.19.8 trains with wrong gradients.
    """
    largest = 4 * hidden * hidden
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = largest
    zero["stage3_max_reuse_distance"] = 0
    zero["stage3_prefetch_bucket_size"] = 1
    zero["stage3_max_live_parameters"] = 4 * largest
    buffers = {"buffer_count": 8, "buffer_size": largest}
    gradients = 12 * layers * hidden * hidden
    buffers_numel = (8 + zero["offload_optimizer"]["buffer_count"]) * largest
    room = memory_budget // 4 - gradients - buffers_numel
    zero["offload_param"] |= buffers | {"max_in_cpu": max(0, room)}
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-4, "torch_adam": True, "fused": True},
    }


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
