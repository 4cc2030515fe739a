"""Training under DeepSpeed, with states on NVMe (ZeRO-3) or in memory, for the benchmarks and the tests.

The module imports DeepSpeed, so use it in separate processes. The caller chooses the engine that moves the tensors
before it makes one of these objects.
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
    """The training of a transformer by a DeepSpeed engine under ZeRO-3, in one process of the training.

    Parameters
    ----------
    directory : Path
        The directory for DeepSpeed's files.
    offload : str
        The states on NVMe: "optimizer", "parameters", "both"; or "nothing", which keeps all states in memory.
    evaluate : bool
        Only compute losses, without gradients and without an optimizer.
    layers, hidden : int
        The model's size; a layer has about 12 * hidden**2 parameters.
    sequence : int
        The number of tokens of a sequence; a batch has two sequences.
    dtype : str
        "float32" or "bfloat16".
    aio : dict
        The section "aio" of DeepSpeed's configuration.
    memory_budget : int, optional
        Bytes for parameters, gradients and buffers, as far as DeepSpeed can keep the limit. Parameters beyond it are
        on NVMe, and the backward pass computes the activations of blocks again.
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
        """Train on one batch, or only evaluate it; return the exact loss as a hexadecimal string."""
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
        """Return the bytes of the swap files of all processes."""
        return sum(path.stat().st_size for path in self._directory.rglob("*.swp"))


class Sum(nn.Module):
    """A model that only sums its parameters, of given shapes: the gradient of each element is 0.001."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.each]).sum() * 1e-3


class OptimizerOnNvme:
    """Steps of Adam by DeepSpeed with pipelined states on NVMe, and a model with nearly no other work.

    Parameters
    ----------
    directory : Path
        The directory for DeepSpeed's files.
    shapes : sequence of tuple
        The shapes of the parameters.
    buffers : int
        The number of DeepSpeed's swap buffers; each has the size of the largest parameter.
    aio : dict
        The section "aio" of DeepSpeed's configuration.
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
        """Run the forward and the backward pass."""
        self._engine.backward(self._engine())

    def step(self) -> None:
        """Step the optimizer."""
        self._engine.step()


def join(**options: Any) -> None:
    """Make this process a rank of the training, with gloo only; its collectives need no compiled op of DeepSpeed."""
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
        config["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's CPU Adam has to be compiled
    return config


def _hold_to(config: dict[str, Any], memory_budget: int, layers: int, hidden: int) -> None:
    """Move parameters to NVMe that exceed the budget, with the fastest settings of DeepSpeed that work.

    By default DeepSpeed keeps in memory: the first 10^9 parameters, parameters that are used again within 10^9
    parameters, and a bucket of 5 * 10^8 gradients. Gradients are always in memory.

    The settings let DeepSpeed prefetch one parameter only. With more, it fails to assign buffers to parameters that are
    used twice in a row, as those of the last block are. It fails in the same way if the model's head is on NVMe. The
    model's blocks are checkpointed with use_reentrant=True: with False, DeepSpeed 0.19.8 trains with wrong gradients.
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
    # All of these are numbers of float32 elements.
    room = memory_budget // 4 - gradients - buffers_numel
    zero["offload_param"] |= buffers | {"max_in_cpu": max(0, room)}
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-4, "torch_adam": True, "fused": True},
    }


class Kept:
    """A DeepSpeed engine with states in memory: ZeRO-2 with a model in bfloat16, or float32 without ZeRO.

    Parameters
    ----------
    parameters : int
        The approximate number of parameters.
    stage : int
        ZeRO's stage: 2, with a checkpoint of 14 bytes for each parameter, or 0 (no ZeRO), with 12 bytes.
    writer : dict, optional
        The value of "writer" in the section "checkpoint" of DeepSpeed's configuration.
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
        """Run a training step."""
        self.engine.backward(self.engine())
        self.engine.step()
