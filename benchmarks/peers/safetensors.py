"""Models in safetensors files in the benchmark: loaded, saved, and read by plan, by ours and by the original."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import tensorferry.safetensors.torch
from benchmarks.harness import MIB, MeasurementError, UnavailableError
from benchmarks.measure import Stopwatch, drive_nbytes, touch_free_memory, touch_memory
from benchmarks.peers.plain import sync
from benchmarks.peers.state import state, tensors
from tensorferry import _core, checkpoint
from tensorferry.safetensors.plans import load_files, tensor_parallel_plan
from tensorferry.safetensors.saving import save_file

if TYPE_CHECKING:
    from collections.abc import Callable

_TENSOR_NBYTES = 32 * MIB

warnings.filterwarnings("ignore", module="torch")


class Loader:
    """Loads files again and again: by "ours", or by the original's "map" or "pread"."""

    def __init__(self, way: str) -> None:
        theirs: Callable[..., dict[str, Any]] = safetensors.torch.load_file
        if way == "pread" and "backend" not in inspect.signature(theirs).parameters:
            raise UnavailableError("this safetensors has no backends to choose from")
        self._load: Callable[[str], dict[str, Any]] = {
            "ours": tensorferry.safetensors.torch.load_file,
            "map": theirs,
            "pread": lambda path: theirs(path, backend="pread"),
        }[way]

    def save(self, path: str, nbytes: int, seed: int) -> dict[str, Any]:
        """Write a file of a model's size, and return the checksum of its tensors."""
        generator = torch.Generator().manual_seed(seed)
        model = {}
        for at in range(max(1, nbytes // _TENSOR_NBYTES)):
            shape = (min(_TENSOR_NBYTES, nbytes) // 2048, 1024)
            weight = torch.empty(shape, dtype=torch.bfloat16).random_(generator=generator)
            model[f"layers.{at}.weight"] = weight
            model[f"layers.{at}.norm"] = torch.ones(1024, dtype=torch.bfloat16)
        safetensors.torch.save_file(model, path)
        sync(path)
        return {"crc": _crc(model)}

    def load(self, paths: list[str], crcs: list[int], fresh: bool) -> dict[str, Any]:
        """Load all files, and touch every page; ``fresh``: into memory that has to be found."""
        if fresh:
            touch_free_memory()
        with Stopwatch() as watch:
            states = [self._load(path) for path in paths]
            for loaded in states:
                for tensor in loaded.values():
                    _bytes(tensor)[::4096].sum()
        nbytes = sum(tensor.nbytes for loaded in states for tensor in loaded.values())
        if [_crc(loaded) for loaded in states] != crcs:
            raise MeasurementError("loaded other bytes than were saved")
        return watch.result(nbytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _crc(model: dict[str, torch.Tensor]) -> int:
    crc = 0
    for name in sorted(model):
        crc = _core.crc32(_bytes(model[name]).numpy(), crc)
    return crc


class Saver:
    """Saves the weights of a model, and loads them."""

    def __init__(self, nbytes: int, ours: bool) -> None:
        found = tensors(state(2 * nbytes))  # half as many bytes in bfloat16
        self._state = {f"t{k}": tensor.to(torch.bfloat16) for k, tensor in enumerate(found)}
        self._nbytes = sum(tensor.nbytes for tensor in self._state.values())
        self._ours = ours
        self._storage: Any = checkpoint if ours else dcp

    def save(self, path: str) -> dict[str, Any]:
        """Save to a file."""
        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            if self._ours:
                save_file(self._state, path, sync=True)
            else:
                safetensors.torch.save_file(self._state, path)
                sync(path)
                sync(str(Path(path).parent))
        return watch.result(self._nbytes)

    def save_by_storage(self, path: str) -> dict[str, Any]:
        """Save to a directory, by torch.distributed.checkpoint."""
        touch_memory(2 * self._nbytes)
        writer = self._storage.HuggingFaceStorageWriter
        with Stopwatch() as watch:
            dcp.save(self._state, storage_writer=writer(path), no_dist=True)
        return watch.result(self._nbytes)

    def load_by_storage(self, path: str) -> dict[str, Any]:
        """Load from a directory."""
        reader = self._storage.HuggingFaceStorageReader
        with Stopwatch() as watch:
            dcp.load(self._state, storage_reader=reader(path), no_dist=True)
        return watch.result(self._nbytes)


class Planner:
    """Reads by plan."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def save(self, path: str, nbytes: int) -> None:
        """Write a model whose tensors are divided by rows, by columns, and not at all."""
        width = 4096 if nbytes >= 256 * MIB else 512
        each = 4 * width * width  # two matrices of bfloat16
        model = {}
        for layer in range(max(1, nbytes // each)):
            for kind in ("rows", "columns"):
                matrix = torch.empty(width, width, dtype=torch.bfloat16).random_()
                model[f"layers.{layer}.{kind}"] = matrix
            model[f"layers.{layer}.norm"] = torch.ones(width, dtype=torch.bfloat16)
        safetensors.torch.save_file(model, path)

    def load(self, path: str, ranks: int) -> dict[str, Any]:
        """Load each rank's part, and say how much more was read for all than they need."""
        needed, before = 0, drive_nbytes("read")
        with Stopwatch() as watch:
            for rank in range(ranks):
                plan = tensor_parallel_plan(path, {"*.rows": 0, "*.columns": 1}, rank, ranks)
                needed += sum(tensor.nbytes for _, tensor in load_files(path, plan))
        fetched = drive_nbytes("read") - before
        return {"value": fetched / needed, "seconds": watch.seconds, "nbytes": needed}

    def pass_over(self, path: str, budget_nbytes: int) -> dict[str, Any]:
        """Read all tensors in a budget, and keep none."""
        nbytes = 0
        with Stopwatch() as watch:
            for _, tensor in load_files(path, memory_budget=budget_nbytes):
                nbytes += tensor.nbytes
                del tensor
        return watch.result(nbytes)
