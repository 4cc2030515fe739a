"""The values with which a training begins: those that the model's parameters have, or those in files."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.matching import match, told
from tensorferry.offload.plan import dense_stride
from tensorferry.offload.slabs import Files
from tensorferry.offload.weights import put, read_matched
from tensorferry.safetensors.sources import stored_tensors

if TYPE_CHECKING:
    from tensorferry.offload.matching import Matched
    from tensorferry.offload.slabs import TrainingPlan
    from tensorferry.safetensors.sources import Source

# The file that marks a directory as a checkpoint of torch.distributed.checkpoint.
METADATA = ".metadata"


class InitialValues:
    """The values of a model's parameters and buffers.

    Parameters
    ----------
    plan : TrainingPlan
        The parameters. They get their places: frozen ones that the files have in the same form stay there.
    files : path or sequence of paths, optional
        Safetensors files, or a directory with a checkpoint of ``torch.distributed.checkpoint``.

    Raises
    ------
    ValueError
        A parameter has no values, or the files do not have the model.
    """

    def __init__(self, plan: TrainingPlan, files: Source | None) -> None:
        self._plan = plan
        self._found: dict[torch.Tensor, Matched] = {}
        self._buffers: list[Matched] = []
        self.files = Files()
        self._reader: Any = None  # of a checkpoint
        self._names: dict[torch.Tensor, str] = {}  # of the parameters in the checkpoint
        folder = os.fsdecode(files) if isinstance(files, (str, bytes, os.PathLike)) else None
        if folder is not None and Path(folder, METADATA).exists():
            self._open_checkpoint(folder)
        elif files is not None:
            self._match(files)
        missing = [
            name
            for param, name in plan.names.items()
            if param.is_meta and param not in self._found and param not in self._names
        ]
        if missing:
            raise ValueError(
                f"model: {told(missing)}: on the meta device, and not in files=, so these have no values"
            )
        in_files = {
            param: one
            for param, one in self._found.items()
            if not plan.learns(param) and self._lies_alike(param, one)
        }
        plan.divide(in_files, self.files)

    def _match(self, files: Source) -> None:
        for one in match(self._plan.model, stored_tensors(files), in_training=True).found:
            if one.buffer:
                self._buffers.append(one)
            elif isinstance(one.original, torch.Tensor):
                self._found[one.original] = one

    def _lies_alike(self, param: torch.Tensor, one: Matched) -> bool:
        """Return whether a parameter's bytes in the files are those that it has in memory."""
        contiguous = torch.empty(param.shape, device="meta").stride()
        return one.dtype == param.dtype and contiguous == dense_stride(param)

    def _open_checkpoint(self, path: str) -> None:
        # Imported lazily, because only checkpoints need it.
        self._reader = importlib.import_module("tensorferry.checkpoint").FileSystemReader(path)
        there = self._reader.read_metadata().state_dict_metadata
        names = list(self._plan.names.values())
        prefixes = {name.removesuffix(names[0]) for name in there if name.endswith(names[0])}
        complete = [each for each in prefixes if all(f"{each}{name}" in there for name in names)]
        if len(complete) != 1:
            raise ValueError(
                f"files: the checkpoint {path!r} has {'several models' if complete else 'no model'} with the "
                f"parameters {told(names)}"
            )
        self._names = {param: f"{complete[0]}{name}" for param, name in self._plan.names.items()}
        for param, name in self._names.items():
            if tuple(getattr(there[name], "size", ())) != tuple(param.shape):
                raise ValueError(f"files: {name} does not have the shape {list(param.shape)} there")

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's values from the files, or None if the files do not have them."""
        name, one = self._names.get(param), self._found.get(param)
        if name is not None:
            load: Any = importlib.import_module("torch.distributed.checkpoint").load
            values = torch.empty(param.shape, dtype=param.dtype, device="cpu")
            load({name: values}, storage_reader=self._reader, no_dist=True)
            return values
        return None if one is None else read_matched(one, torch.device("cpu"))

    def read_buffers(self) -> None:
        """Set the model's buffers to the values of the files."""
        for one in self._buffers:
            assert one.original is not None
            is_meta = one.original.is_meta
            value = read_matched(one, torch.device("cpu") if is_meta else one.original.device)
            if is_meta:
                put(one, value)
            else:
                one.original.copy_(value)
