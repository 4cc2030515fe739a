"""The division of a model's parameters, and of their gradients, into slabs, and the modules that use them.

A slab is one tensor in a store: consecutive parameters that are used by the same modules and are in the same group of
the optimizer. A second slab has their gradients. The division depends on the model, the blocks and the optimizer's
groups, never on the memory budget. This module moves no data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorferry.offload.arena import round_to_pages
from tensorferry.offload.gradients import StoredGradient
from tensorferry.offload.holder import Item
from tensorferry.offload.matching import WHOLE, users
from tensorferry.offload.plan import Field, dense_stride, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensorferry.store import TensorStore
    from tensorferry.transfer.futures import Future

# The largest size of a slab with several parameters; a larger parameter has a slab alone. With this size, several slabs
# can be in flight at the same time.
MAX_SLAB_NBYTES = 16 << 20


class _Stored(Item):
    """An item in a store, with a field for each of some parameters."""

    kind: str

    def __init__(self, number: int, fields: dict[torch.Tensor, Field], nbytes: int) -> None:
        super().__init__(nbytes)
        self.number = number  # among all slabs
        self.name = f"{self.kind}-{number:06d}"
        self.fields = fields
        self.store: TensorStore

    def read(self, memory: torch.Tensor) -> Future[Any]:
        return self.store.read(self.name, memory)

    def write(self, memory: torch.Tensor) -> Future[Any]:
        return self.store.write(self.name, memory)


class GradientSlab(_Stored):
    """The gradients of a slab's parameters."""

    kind = "gradients"

    def has_contents(self) -> bool:
        """Return whether a parameter has its gradient here."""
        return any(StoredGradient.of(param) is not None for param in self.fields)


class Slab(_Stored):
    """Parameters in one tensor of a store.

    Attributes
    ----------
    gradients : GradientSlab or None
        The slab of the parameters' gradients; None if the optimizer does not have the parameters.
    source : callable or None
        Begins to read frozen parameters from the user's files; None if the slab is in the store.
    is_given : bool
        Whether the parameters have their values now.
    lent : torch.Tensor or None
        The memory that the parameters share while they have values: the slab's memory or, if the model computes on
        another device, a copy there.
    versions : list of int
        torch's version counters of the parameters when they got their values. If they have changed when the module has
        run, its forward() has written into the parameters.
    """

    kind = "values"

    def __init__(self, number: int, fields: dict[torch.Tensor, Field], nbytes: int) -> None:
        super().__init__(number, fields, nbytes)
        self.gradients: GradientSlab | None = None
        self.source: Callable[[torch.Tensor], Future[Any]] | None = None
        self.is_given = False
        self.lent: torch.Tensor | None = None
        self.versions: list[int] = []

    def read(self, memory: torch.Tensor) -> Future[Any]:
        """Begin to read the slab, from the store or from the user's files."""
        return super().read(memory) if self.source is None else self.source(memory)

    def versions_now(self) -> list[int]:
        """Return torch's version counters of the parameters."""
        return list(map(version_of, self.fields))


@dataclass(eq=False)
class ModuleUse:
    """A module that runs with its parameters in memory.

    It is one of the user's blocks, with all modules below it, or another module with its own parameters.
    """

    module: nn.Module
    name: str  # the module's name in the model, for messages
    is_block: bool
    slabs: list[Slab] = field(default_factory=list)


class Plan:
    """The slabs of a model and the modules that use them.

    Raises
    ------
    ValueError, TypeError
        The model cannot be trained with these arguments.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]
    ) -> None:
        self.model = model
        self.names: dict[torch.Tensor, str] = {
            param: name for name, param in model.named_parameters()
        }
        groups = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._check(groups)
        names = {module: name for name, module in model.named_modules()}
        _check_blocks(model, blocks, names)
        self.uses: list[ModuleUse] = []
        above_of: dict[ModuleUse, list[nn.Module]] = {}
        used: dict[torch.Tensor, list[ModuleUse]] = {}
        for module, own, above in users(
            model, lambda each: each in blocks or isinstance(each, WHOLE)
        ):
            params = [
                each for part in own for each in part._parameters.values() if each is not None
            ]
            if not params and module not in blocks:
                continue
            use = ModuleUse(module, names[module] or "model", module in blocks)
            self.uses.append(use)
            above_of[use] = above
            for param in dict.fromkeys(params):
                used.setdefault(param, []).append(use)
        keys = {
            param: (tuple(map(id, uses)), groups.get(param))
            for param, uses in used.items()
            if param.numel()
        }
        self.slabs = slabs_of(keys)
        for slab in self.slabs:
            for use in used[next(iter(slab.fields))]:
                use.slabs.append(slab)
        self.gradients: list[GradientSlab] = []
        for slab in self.slabs:
            if next(iter(slab.fields)) in groups:
                slab.gradients = _gradients_of(slab, len(self.slabs) + len(self.gradients))
                self.gradients.append(slab.gradients)
        #: The slab of each parameter, and its field there.
        self.place_of: dict[torch.Tensor, tuple[Slab, Field]] = {
            param: (slab, each) for slab in self.slabs for param, each in slab.fields.items()
        }
        # Modules whose forward() runs while other modules below them run.
        outer = {module for above in above_of.values() for module in above}
        self._outer = {slab for use in self.uses if use.module in outer for slab in use.slabs}

    @property
    def everything(self) -> list[_Stored]:
        """All slabs, by number."""
        return [*self.slabs, *self.gradients]

    @property
    def nbytes(self) -> int:
        """The memory for all slabs."""
        return sum(round_to_pages(slab.nbytes) for slab in self.everything)

    def needed_nbytes(self, buckets: Sequence[Sequence[torch.Tensor]]) -> int:
        """Return the smallest sufficient memory for slabs.

        It has room for the slabs of modules that run around other modules, and for those of the largest module or
        bucket, with gradients. Each of ``buckets`` is a list of parameters that the optimizer steps together.
        """

        def both(slab: Slab) -> int:
            gradients = 0 if slab.gradients is None else round_to_pages(slab.gradients.nbytes)
            return round_to_pages(slab.nbytes) + gradients

        wanted = [use.slabs for use in self.uses]
        wanted += [
            [self.place_of[param][0] for param in params if param in self.place_of]
            for params in buckets
        ]
        at_once = max(sum(map(both, set(slabs) - self._outer)) for slabs in wanted)
        # Memory for two more of the largest slabs: one may be read and another one written at the same time. It also
        # lets the largest slab fit although the slabs that are used leave gaps between them.
        largest = max(map(both, self.slabs))
        return min(sum(map(both, self._outer)) + at_once + 2 * largest, self.nbytes)

    def together(self) -> list[list[_Stored]]:
        """Return the slabs that modules need at the same time, in the backward pass."""
        return [
            [each for slab in use.slabs for each in (slab, slab.gradients) if each is not None]
            for use in self.uses
        ]

    def expected(self) -> list[int]:
        """Return the numbers of slabs in the order of the first step: forward, backward, the optimizer's step."""
        pairs = [
            [slab.number] if slab.gradients is None else [slab.number, slab.gradients.number]
            for slab in self.slabs
        ]
        backward = [number for pair in reversed(pairs) for number in pair]
        stepped = [number for pair in pairs if len(pair) > 1 for number in pair]
        return [*(slab.number for slab in self.slabs), *backward, *stepped]

    def _check(self, groups: dict[torch.Tensor, int]) -> None:
        for param, name in self.names.items():
            if type(param) is not nn.Parameter:
                raise ValueError(
                    f"model: the parameter {name} is a {type(param).__name__}; only torch.nn.Parameter can be on drives"
                )
            if param.layout != torch.strided or param.is_quantized:
                raise ValueError(f"model: the parameter {name} is not a dense tensor")
            if not (param.is_floating_point() or param.is_complex()):
                raise ValueError(
                    f"model: the parameter {name} is {param.dtype}; only floating-point and complex parameters can be "
                    "on drives (remedy: make it a buffer, which stays in memory)"
                )
            if param.requires_grad and param not in groups:
                raise ValueError(
                    f"model: the parameter {name} requires gradients, and the optimizer does not have it; give it to "
                    "the optimizer, or call requires_grad_(False)"
                )
        storages = {
            param.untyped_storage().data_ptr()
            for param in self.names
            if not param.is_meta and param.numel()
        }
        for prefix, module in self.model.named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
                if plain and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    full_name = f"{prefix}.{name}" if prefix else name
                    raise ValueError(
                        f"model: the tensor {full_name} shares memory with a parameter; it would not follow the "
                        "parameter, which moves to a drive (remedy: clone it, or remove it)"
                    )
        for param, number in groups.items():
            if param not in self.names:
                raise ValueError(
                    f"optimizer: param_groups[{number}] has a parameter of shape {tuple(param.shape)} that is not the "
                    "model's"
                )


def _check_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], names: dict[nn.Module, str]
) -> None:
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
    for block in blocks:
        inner = next(
            (each for each in block.modules() if each is not block and each in blocks), None
        )
        if inner is not None:
            raise ValueError(
                f"blocks: {names[inner]} is within {names[block]}; pass only one of them"
            )


def slabs_of(keys: Mapping[torch.Tensor, Any]) -> list[Slab]:
    """Return slabs of parameters, which are in the order of their use; those with equal keys may share a slab."""
    slabs: list[Slab] = []
    last: dict[Any, Slab] = {}
    for param, key in keys.items():
        slab = last.get(key)
        if slab is None or slab.nbytes + param.nbytes > MAX_SLAB_NBYTES:
            slab = last[key] = Slab(len(slabs), {}, 0)
            slabs.append(slab)
        _add_field(slab.fields, slab, param, param.dtype)
    return slabs


def _gradients_of(slab: Slab, number: int) -> GradientSlab:
    gradients = GradientSlab(number, {}, 0)
    for param in slab.fields:
        # torch 2.10 and later accumulate gradients in `grad_dtype`; None stands for the dtype that arrives.
        dtype = getattr(param, "grad_dtype", None) or param.dtype
        _add_field(gradients.fields, gradients, param, dtype)
    return gradients


def _add_field(
    fields: dict[torch.Tensor, Field], slab: _Stored, param: torch.Tensor, dtype: torch.dtype
) -> None:
    within: Any = slab  # which has the size, as a bucket
    fields[param] = placed(Field("", 0, dtype, tuple(param.shape), dense_stride(param)), within)


def version_of(param: torch.Tensor) -> int:
    """Return a parameter's version counter, whatever its class is."""
    with torch._C.DisableTorchFunctionSubclass():
        return param._version
