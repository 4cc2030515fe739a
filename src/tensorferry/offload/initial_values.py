"""The values with which a training begins: those that the model's parameters have, or those in files."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.offload.holder import Together
from tensorferry.offload.matching import match, told
from tensorferry.offload.weights import put_fixed, read_matched
from tensorferry.safetensors.sources import stored_tensors

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from tensorferry.offload.matching import Matched
    from tensorferry.offload.plan import Field
    from tensorferry.offload.slabs import Plan, Slab
    from tensorferry.safetensors.sources import Source
    from tensorferry.transfer.files import File

# The file that marks a directory as a checkpoint of torch.distributed.checkpoint.
METADATA = ".metadata"


class InitialValues:
    """The values of a model's parameters and buffers.

    Parameters
    ----------
    plan : Plan
        The slabs of the model. Those of frozen parameters that the files have in the same form get their ``source``.
    files : path or sequence of paths, optional
        Safetensors files, or a directory with a checkpoint of ``torch.distributed.checkpoint``.

    Raises
    ------
    ValueError
        A parameter has no values, or the files do not have the model.
    """

    def __init__(self, plan: Plan, files: Source | None) -> None:
        self._plan = plan
        self._found: dict[torch.Tensor, Matched] = {}
        self._buffers: list[Matched] = []
        self._files: dict[str, File] = {}
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

    def _match(self, files: Source) -> None:
        for one in match(self._plan.model, stored_tensors(files), in_training=True).found:
            if one.buffer:
                self._buffers.append(one)
            elif isinstance(one.original, torch.Tensor):
                self._found[one.original] = one
        for slab in self._plan.slabs:
            if slab.gradients is None and all(
                itertools.starmap(self._lies_alike, slab.fields.items())
            ):
                slab.source = functools.partial(self._read, slab)
                slab.stored = True

    def _lies_alike(self, param: torch.Tensor, field: Field) -> bool:
        """Return whether a parameter's bytes in the files can be read into its slab as they are.

        For this, the files must have the parameter with the same dtype, and its layout in the slab must be contiguous.
        """
        one = self._found.get(param)
        contiguous = torch.empty(field.shape, device="meta").stride()
        return one is not None and one.dtype == field.dtype and contiguous == field.stride

    def _read(self, slab: Slab, memory: torch.Tensor) -> Any:
        """Begin to read frozen parameters from their files."""
        futures = []
        for param, field in slab.fields.items():
            for part in self._found[param].parts:
                path = part.stored.path
                if path not in self._files:
                    self._files[path] = part.stored.open()
                begin = field.offset + part.at
                place = memory[begin : begin + part.end - part.begin]
                futures.append(self._files[path].read_into(place, part.begin))
        return Together(futures)

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

    def take_from_meta(
        self, put_away: Callable[[torch.Tensor], None], undo: contextlib.ExitStack
    ) -> None:
        """Replace parameters on the meta device by absent ones; ``undo`` swaps them back."""
        swap: Any = torch.utils.swap_tensors
        for param in self._plan.names:
            if param.is_meta:
                empty = torch.empty(0, dtype=param.dtype, device="cpu")
                other = nn.Parameter(empty, requires_grad=param.requires_grad)
                swap(param, other)
                undo.callback(swap, param, other)
                put_away(param)

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
                put_fixed(one, value)
            else:
                one.original.copy_(value)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
