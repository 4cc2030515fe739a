"""The division of a model's parameters, and of their gradients, into slabs, and the modules that use them.

A slab is what is moved at a time: one parameter in files, or one tensor in a store, with consecutive parameters that
are used by the same modules and are in the same group of the optimizer. A second slab has their gradients. The division
depends on the model, the blocks and the optimizer's groups, never on the memory budget. This module moves no data.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.offload.arena import ALIGN_NBYTES, round_to_pages
from tensorferry.offload.gradients import StoredGradient, gradient_dtype
from tensorferry.offload.holder import Item, StoredItem
from tensorferry.offload.matching import WHOLE, users
from tensorferry.offload.plan import Field, dense_stride, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tensorferry.offload.matching import Matched
    from tensorferry.safetensors.sources import Stored
    from tensorferry.transfer.files import File
    from tensorferry.transfer.futures import Future

# The largest size of a slab with several parameters; a larger parameter has a slab alone. With this size, several slabs
# can be in flight at the same time.
MAX_SLAB_NBYTES = 16 << 20
# Alignment of torch's own tensors. With less, kernels may add elements in another order, and the last bits differ.
_TORCH_ALIGN_NBYTES = 64


class Slab(Item):
    """Parameters in memory or on a drive.

    Attributes
    ----------
    fields : dict of parameter to Field
        The parameters and their places in the slab.
    gradients : GradientSlab or None
        The slab of the parameters' gradients; None if the optimizer does not have the parameters.
    is_given : bool
        Whether the parameters have their values now.
    lent : torch.Tensor or None
        The memory that the parameters share while they have values: the slab's memory or, if the model computes on
        another device, a copy there.
    versions : list of int
        torch's version counters of the parameters when they got their values. If they have changed when the module has
        run, its forward() has written into the parameters.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.fields: dict[torch.Tensor, Field] = {}
        self.gradients: GradientSlab | None = None
        self.is_given = False
        self.lent: torch.Tensor | None = None
        self.versions: list[int] = []

    def add(self, param: torch.Tensor, dtype: torch.dtype) -> None:
        """Add a parameter."""
        each = Field("", 0, dtype, tuple(param.shape), dense_stride(param))
        self.fields[param] = placed(each, self)

    def versions_now(self) -> list[int]:
        """Return torch's version counters of the parameters."""
        return list(map(version_of, self.fields))


class StoreSlab(Slab, StoredItem):
    """A slab in a store, which may change."""


class GradientSlab(StoreSlab):
    """The gradients of a slab's parameters."""

    def __init__(self) -> None:
        super().__init__()
        #: The stand-ins for the parameters' last gradients.
        self.stand_ins: dict[torch.Tensor, StoredGradient] = {}

    def has_contents(self) -> bool:
        """Return whether a gradient is here, also one that is no parameter's ``grad`` at the moment."""
        return not all(stored.is_released for stored in self.stand_ins.values())


class FileSlab(Slab):
    """A parameter in the user's files, which never changes. Whole pages of a file are read, without a copy.

    Two kinds of parameters are read without the rest of their pages: those that would otherwise begin at an address
    with less alignment than torch's own tensors, and those in several pieces of the files.
    """

    def __init__(self, matched: Matched, param: torch.Tensor, files: Files) -> None:
        super().__init__()
        self.event: Any = None  # completes after the last kernels that use the parameter
        self._files, self._parts, shift = files, matched.parts, 0
        first = matched.parts[0]
        if len(matched.parts) == 1 and first.begin % _TORCH_ALIGN_NBYTES == 0:
            begin = first.begin // ALIGN_NBYTES * ALIGN_NBYTES
            end = min(round_to_pages(first.end), first.stored.file_nbytes)
            self._parts = [first._replace(begin=begin, end=end)]
            shift = first.begin - begin
        stride = torch.empty(matched.shape, device="meta").stride()
        self.fields[param] = Field("", shift, matched.dtype, matched.shape, stride)
        self.nbytes = round_to_pages(sum(part.end - part.begin for part in self._parts))
        self.stored = True

    def read(self, memory: torch.Tensor) -> Sequence[Future[Any]]:
        """Begin to read the parameter, after the kernels that have used the memory, and no others."""
        futures = []
        stream = self._files.stream
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for part in self._parts:
                place = memory[part.at : part.at + part.end - part.begin]
                futures.append(self._files.open(part.stored).read_into(place, part.begin))
        return futures

    def left(self) -> None:
        """Have reads that begin now wait for the kernels that use the memory."""
        if self.event is not None:
            self._files.stream.wait_event(self.event)


class Files:
    """Open files, by path. ``stream`` is for reads into the memory of a GPU."""

    def __init__(self) -> None:
        self._open: dict[str, File] = {}
        self.stream: Any = None

    def open(self, stored: Stored) -> File:
        """Return the open file of a tensor."""
        if stored.path not in self._open:
            self._open[stored.path] = stored.open()
        return self._open[stored.path]

    def close(self) -> None:
        """Wait for all reads, and close the files."""
        while self._open:
            self._open.popitem()[1].close()


@dataclass(eq=False)
class ModuleUse:
    """A module that runs with its parameters in memory.

    It is one of the user's blocks, with all modules below it, or another module with its own parameters.
    """

    module: nn.Module
    name: str  # the module's name in the model, for messages
    is_block: bool
    outer: list[ModuleUse]  # those that run around this one
    slabs: list[Slab] = field(default_factory=list)


class Plan:
    """The modules of a model, and their parameters in slabs."""

    def __init__(self, model: nn.Module, is_block: Callable[[nn.Module], bool]) -> None:
        self.model = model
        self.names: dict[torch.Tensor, str] = {
            param: name for name, param in model.named_parameters()
        }
        self.uses: list[ModuleUse] = []
        self.slabs: list[Slab] = []
        #: The slab of each parameter, and its field there.
        self.place_of: dict[torch.Tensor, tuple[Slab, Field]] = {}
        #: The uses of each parameter, in the order of their first use.
        self.used: dict[torch.Tensor, list[ModuleUse]] = {}
        names = {module: name for name, module in model.named_modules()}
        use_of: dict[nn.Module, ModuleUse] = {}
        for module, own, above in users(model, is_block):
            params = [each for part in own for each in part._parameters.values()]
            used = [each for each in dict.fromkeys(params) if each is not None and each.numel()]
            if used or is_block(module):
                outer = [use_of[each] for each in above if each in use_of]
                use = ModuleUse(module, names[module] or "the model", is_block(module), outer)
                use_of[module] = use
                self.uses.append(use)
                for param in used:
                    self.used.setdefault(param, []).append(use)

    def place(self, slabs: Iterable[Slab]) -> None:
        """Set the slabs of all parameters."""
        for slab in slabs:
            self.slabs.append(slab)
            self.place_of |= {param: (slab, each) for param, each in slab.fields.items()}
            for use in self.used[next(iter(slab.fields))]:
                use.slabs.append(slab)
        for slab in {slab for use in self.uses for outer in use.outer for slab in outer.slabs}:
            slab.lasts = True

    def together(self) -> list[list[Slab]]:
        """Return the slabs, with gradients, that must be in memory at the same time, for each use."""
        return [
            with_gradients(slab for use in (each, *each.outer) for slab in use.slabs)
            for each in self.uses
        ]


class TrainingPlan(Plan):
    """The plan of a training.

    Raises
    ------
    ValueError, TypeError
        The model cannot be trained with these arguments.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]
    ) -> None:
        _check_blocks(model, blocks)
        super().__init__(model, lambda each: each in blocks or isinstance(each, WHOLE))
        self._groups = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._check()

    def learns(self, param: torch.Tensor) -> bool:
        """Return whether the optimizer has a parameter."""
        return param in self._groups

    def divide(self, found: Mapping[torch.Tensor, Matched], files: Files) -> None:
        """Place the parameters: those in ``found`` stay in the user's files, the others get slabs in a store."""
        last: dict[Any, StoreSlab] = {}
        slabs: list[Slab] = []
        for param, uses in self.used.items():
            if param in found:
                slabs.append(FileSlab(found[param], param, files))
                continue
            key = tuple(map(id, uses)), self._groups.get(param)
            slab = last.get(key)
            if slab is None or slab.nbytes + param.nbytes > MAX_SLAB_NBYTES:
                slab = last[key] = StoreSlab()
                slabs.append(slab)
                slab.name = f"values-{len(slabs):06d}"
                if param in self._groups:
                    slab.gradients = GradientSlab()
                    slab.gradients.name = f"gradients-{len(slabs):06d}"
            slab.add(param, param.dtype)
            if slab.gradients is not None:
                slab.gradients.add(param, gradient_dtype(param))
        self.place(slabs)

    @property
    def everything(self) -> list[Slab]:
        """The slabs of parameters, and then those of gradients."""
        return [*self.slabs, *(slab.gradients for slab in self.slabs if slab.gradients is not None)]

    @property
    def nbytes(self) -> int:
        """The memory for all slabs."""
        return _sum(self.everything)

    def needed_nbytes(self, buckets: Sequence[Sequence[torch.Tensor]]) -> int:
        """Return the smallest sufficient memory for slabs.

        It has room for those of the largest module or bucket, with gradients. Each of ``buckets`` is a list of
        parameters that the optimizer steps together.
        """
        wanted = self.together()
        for params in buckets:
            wanted.append(
                with_gradients(
                    self.place_of[param][0] for param in params if param in self.place_of
                )
            )
        # Memory for two more of the largest slabs: one may be read and another one written at the same time. It also
        # lets the largest slab fit although the slabs that are used leave gaps between them.
        largest = max(_sum(with_gradients([slab])) for slab in self.slabs)
        return min(max(map(_sum, wanted)) + 2 * largest, self.nbytes)

    def expected(self) -> list[int]:
        """Return the numbers of slabs in the order of the first step: forward, backward, the optimizer's step."""
        numbers = {slab: number for number, slab in enumerate(self.everything)}
        pairs = [[numbers[each] for each in with_gradients([slab])] for slab in self.slabs]
        backward = [number for pair in reversed(pairs) for number in pair]
        stepped = [number for pair in pairs if len(pair) > 1 for number in pair]
        return [*range(len(self.slabs)), *backward, *stepped]

    def _check(self) -> None:
        for param, name in self.names.items():
            why = ""
            if type(param) is not nn.Parameter:
                why = f"is a {type(param).__name__}; only torch.nn.Parameter can be on drives"
            elif param.layout != torch.strided or param.is_quantized:
                why = "is not a dense tensor"
            elif not (param.is_floating_point() or param.is_complex()):
                why = (
                    f"is {param.dtype}; only floating-point and complex parameters can be on drives (remedy: make it a "
                    "buffer, which stays in memory)"
                )
            elif param.requires_grad and param not in self._groups:
                why = (
                    "requires gradients, and the optimizer does not have it; give it to the optimizer, or call "
                    "requires_grad_(False)"
                )
            if why:
                raise ValueError(f"model: the parameter {name} {why}")
        storages = {
            param.untyped_storage().data_ptr()
            for param in self.names
            if not param.is_meta and param.numel()
        }
        for prefix, module in self.model.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
                if plain and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    raise ValueError(
                        f"model: the tensor {prefix}.{name} shares memory with a parameter; it would not follow the "
                        "parameter, which moves to a drive (remedy: clone it, or remove it)"
                    )
        for param, number in self._groups.items():
            if param not in self.names:
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(param.shape)} that is not the "
                    "model's"
                )


def _check_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(f"blocks[{number}]: {type(block).__name__} is not a torch.nn.Module")
        if block not in names:
            raise ValueError(f"blocks[{number}]: this {type(block).__name__} is not in the model")
        if block is model:
            raise ValueError(
                f"blocks[{number}]: this is the whole model; pass its layers, because a block is entirely in memory "
                "while it runs"
            )
        for inner in block.modules():
            if inner is not block and inner in blocks:
                raise ValueError(
                    f"blocks: {names[inner]} is within {names[block]}; pass only one of them"
                )


def with_gradients(slabs: Iterable[Slab]) -> list[Slab]:
    """Return slabs, each once, followed by those of their gradients."""
    both = [each for slab in slabs for each in (slab, slab.gradients) if each is not None]
    return list(dict.fromkeys(both))


def version_of(param: torch.Tensor) -> int:
    """Return a parameter's version counter, whatever its class is."""
    with torch._C.DisableTorchFunctionSubclass():
        return param._version


def _sum(slabs: Iterable[Slab]) -> int:
    return sum(round_to_pages(slab.nbytes) for slab in slabs)
