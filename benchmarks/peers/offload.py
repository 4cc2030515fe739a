"""An optimizer's state in the benchmark: stepped in memory, offloaded, and its bytes moved alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.harness import MIB, UnavailableError
from benchmarks.measure import Stopwatch, touch_memory
from tensorferry.offload import OffloadedOptimizer, offload_optimizer
from tensorferry.tuning.offload import Traffic


class Stepper:
    """Parameters and gradients, and optimizers of them."""

    def __init__(self, shapes: list[list[int]], threads: int) -> None:
        torch.set_num_threads(threads)
        touch_memory(2 * 4 * sum(map(math.prod, shapes)))
        self._params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for param in self._params:
            param.grad = torch.full_like(param, 1e-3)
        # What torch imports with the first step of all.
        small = torch.nn.Parameter(torch.zeros(1))
        small.grad = torch.zeros(1)
        torch.optim.AdamW([small], fused=True).step()
        self._in_memory: torch.optim.Optimizer | None = None
        self._offloaded: dict[str, OffloadedOptimizer] = {}
        self._alone: dict[str, Traffic] = {}

    def step_in_memory(self) -> dict[str, Any]:
        """Step the optimizer as it is."""
        if self._in_memory is None:
            self._in_memory = self._new()
            self._in_memory.step()
        with Stopwatch() as watch:
            self._in_memory.step()
        return _seconds(watch)

    def step(self, budget_nbytes: int, directories: list[str]) -> dict[str, Any]:
        """Step an offloaded one, and wait for its writes."""
        name = f"{budget_nbytes} {directories}"
        if name not in self._offloaded:
            self._offloaded[name] = self._offload(budget_nbytes, directories)
            for _ in range(2):  # the second one is as all that follow
                self._offloaded[name].step()
                self._offloaded[name].drain()
        optimizer = self._offloaded[name]
        before = optimizer.stats()
        with Stopwatch() as watch:
            optimizer.step()
            optimizer.drain()
        after = optimizer.stats()
        read, written = (after[key] - before[key] for key in ("read_nbytes", "written_nbytes"))
        return _seconds(
            watch,
            read + written,
            read_nbytes=read,
            written_nbytes=written,
            wait_seconds=after["wait_seconds"] - before["wait_seconds"],
            buckets=after["buckets"],
            bucket_nbytes=after["state_nbytes"] // after["buckets"],
            memory_nbytes=after["memory_nbytes"],
        )

    def move_alone(self, label: str, directories: list[str], how: dict[str, int]) -> dict[str, Any]:
        """Move what a step has moved."""
        if label not in self._alone:
            bucket = how["bucket_nbytes"]
            slots = max(how["memory_nbytes"] // bucket, 1)
            self._alone[label] = Traffic(directories, bucket, how["buckets"], slots)
        alone = self._alone[label]
        with Stopwatch() as watch:
            alone.move(how["read_nbytes"], how["written_nbytes"])
        return _seconds(watch)

    def peak(self, budget_nbytes: int, directories: list[str]) -> dict[str, Any]:
        """Make an offloaded optimizer and take its first steps."""
        with Stopwatch() as watch:
            optimizer = self._offload(budget_nbytes, directories)
            for _ in range(3):
                optimizer.step()
            optimizer.drain()
        optimizer.close()
        growth = watch.peak_growth_nbytes
        if growth is None:
            raise UnavailableError("the kernel does not tell the peak of memory")
        return _seconds(watch) | {"value": growth / MIB, "peak_growth_nbytes": growth}

    def checkpoint(self, budget_nbytes: int, directories: list[str], path: str) -> dict[str, Any]:
        """Keep the state as a checkpoint."""
        optimizer = self._offloaded[f"{budget_nbytes} {directories}"]
        with Stopwatch() as watch:
            optimizer.checkpoint(path)
        return _seconds(watch)

    def close(self) -> None:
        """Give space on drives back."""
        for optimizer in self._offloaded.values():
            optimizer.close()
        for alone in self._alone.values():
            alone.close()
        self._offloaded, self._alone = {}, {}

    def _new(self) -> Any:
        return torch.optim.AdamW(self._params, lr=1e-4, fused=True)

    def _offload(self, budget_nbytes: int, directories: list[str]) -> OffloadedOptimizer:
        return offload_optimizer(self._new(), directories, memory_budget=budget_nbytes)


def _seconds(watch: Stopwatch, nbytes: int = 0, **details: Any) -> dict[str, Any]:
    """A measurement whose value is seconds."""
    return {
        "value": watch.seconds,
        "seconds": watch.seconds,
        "nbytes": nbytes,
        "cpu_seconds": watch.cpu_seconds,
        "details": details,
    }
