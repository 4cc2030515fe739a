"""A model whose weights do not fit into memory, in the benchmark: ours, all in memory, and accelerate's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorferry
from benchmarks.harness import MeasurementError, UnavailableError
from benchmarks.measure import Stopwatch
from tensorferry.offload import stream_weights

_TOKENS = 4  # for one sample
_SHARDS = 4


class Model:
    """Blocks of two linear layers, as a decoder has them, of about so many bytes in float32; one token at a time."""

    def __init__(self, nbytes: int, directory: str) -> None:
        self.width = 1024 if nbytes >= 256 << 20 else 128
        self.blocks = max(2, nbytes // (4 * 8 * self.width * self.width))
        self.directory = Path(directory)
        self.paths = [self.directory / f"{number}.safetensors" for number in range(_SHARDS)]
        self.token = torch.randn(1, self.width, generator=torch.Generator().manual_seed(3))
        self.model: nn.Module | None = None
        self.stream: Any = None

    def save(self) -> dict[str, Any]:
        """Write the weights, in shards, so that they are not in the page cache."""
        from safetensors.torch import save_file

        state = self._whole().state_dict()
        names = list(state)
        each = -(-len(names) // _SHARDS)
        for number, path in enumerate(self.paths):
            some = names[number * each : (number + 1) * each]
            save_file({name: state[name] for name in some}, path)
        return {"nbytes": sum(value.nbytes for value in state.values())}

    def in_memory(self) -> dict[str, Any]:
        """Compute tokens with all weights in memory."""
        if self.model is None:
            self.model = self._whole()
        return self._tokens(sum(param.nbytes for param in self.model.parameters()))

    def streamed(self, budget_nbytes: int) -> dict[str, Any]:
        """Compute tokens with weights streamed; the first samples' passes are those that learn the order."""
        if self.stream is None:
            with torch.device("meta"):
                self.model = self._new()
            self.stream = stream_weights(self.model, self.paths, memory_budget=budget_nbytes)
            self._check(self._forward())
            self._forward()
        before = self.stream.stats()
        result = self._tokens(int(before["weights_nbytes"]))
        after = self.stream.stats()
        read = (after["read_nbytes"] - before["read_nbytes"]) / _TOKENS
        return {**result, "details": {"read_nbytes": read, "kept_nbytes": after["kept_nbytes"]}}

    def read(self, nbytes: int) -> dict[str, Any]:
        """Read as many bytes as a token of the streamed model does, and do nothing with them."""
        memory = tensorferry.empty(nbytes // _SHARDS, torch.uint8)
        with Stopwatch() as watch:
            for path in self.paths:
                tensorferry.read(path, memory[: path.stat().st_size])
        return {**watch.result(nbytes), "value": watch.seconds}

    def disk_offload(self) -> dict[str, Any]:
        """Compute tokens with accelerate's, which has no budget: it keeps nothing."""
        if self.model is None:
            try:
                from accelerate import disk_offload
            except ImportError as error:
                raise UnavailableError(f"accelerate: {error}") from None
            folder = self.directory / "offloaded"
            self.model = disk_offload(self._whole(), folder, execution_device=torch.device("cpu"))
        return self._tokens(sum(param.nbytes for param in self.model.parameters()))

    def _tokens(self, nbytes: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            for _ in range(_TOKENS):
                found = self._forward()
        self._check(found)
        return {**watch.result(nbytes * _TOKENS), "value": watch.seconds / _TOKENS}

    def _forward(self) -> torch.Tensor:
        assert self.model is not None
        with torch.no_grad():
            result: torch.Tensor = self.model(self.token)
        return result

    def _check(self, found: torch.Tensor) -> None:
        if not bool(torch.isfinite(found).all()):
            raise MeasurementError("the result is not finite")

    def _whole(self) -> nn.Module:
        torch.manual_seed(7)
        return self._new()

    def _new(self) -> nn.Module:
        width = self.width
        blocks = [
            layer
            for _ in range(self.blocks)
            for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        ]
        return nn.Sequential(*blocks).eval().requires_grad_(False)
