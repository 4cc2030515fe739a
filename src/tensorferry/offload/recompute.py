"""A block that runs in the forward pass and again in the backward pass, with the same inputs or not at all.

The second run computes the activations that the first one did not keep (``torch.utils.checkpoint``), and gives the same
gradients only if its inputs are the same: arguments, however they are passed and nested, buffers, and tensors in
attributes of its modules. Autograd's own checks cannot show that, because a tensor that no operation has saved may
change legally. So all inputs are compared by their bytes, and the second run raises if one has changed.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree, checkpoint

from tensorferry import _core
from tensorferry.offload.equality import same
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.offload.slabs import ModuleUse
    from tensorferry.offload.training import TrainingSwapper

# Arguments of these types cannot change.
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
)
_REMEDY = "or use checkpoint_activations=False"

# A tensor that a module of the block has: the dict with it, and its key there.
_Place = tuple[dict[str, Any], str]


class BlockCall:
    """A call of a block under torch's activation checkpointing."""

    def __init__(
        self,
        swapper: TrainingSwapper,
        use: ModuleUse,
        forward: Callable[..., Any],
        arguments: tuple[Any, Any],
    ) -> None:
        self._swapper, self._use, self._forward = swapper, use, forward
        leaves, self._spec = _pytree.tree_flatten(arguments)
        # Tensors are arguments of checkpoint(), which keeps them. The others are here; None is the place of a tensor.
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        for leaf in self._leaves:
            if not isinstance(leaf, _CONSTANT):
                raise RuntimeError(
                    f"{use.name}: an argument is a {type(leaf).__name__}, which may change between the forward and "
                    "the backward pass, where the block runs again: pass tensors and numbers, in lists, tuples or "
                    f"dicts, {_REMEDY}"
                )
        self._versions = [slab.versions_now() for slab in use.slabs]
        self._marks: list[Any] | None = None  # of the arguments of the first run; None before it
        self._places: list[_Place] = []  # of tensors that the block's modules have
        self._place_marks: list[Any] = []
        # Copies of these tensors, if the first run has changed any of them.
        self._copies: list[torch.Tensor] = []

    def run(self) -> Any:
        """Run the block in the forward pass, and return its outputs."""
        call: Any = checkpoint.checkpoint
        tensors, self._tensors = self._tensors, []
        return call(self._run, *tensors, use_reentrant=False)

    def _run(self, *tensors: torch.Tensor) -> Any:
        each = iter(tensors)
        leaves = [
            next(each) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        run = functools.partial(self._forward, *args, **kwargs)
        if self._marks is None:
            self._marks = [self._mark(tensor) for tensor in tensors]
            return self._first_run(run)
        if self._versions != [slab.versions_now() for slab in self._use.slabs]:
            raise RuntimeError(f"{self._use.name}: {STEPPED}")
        now = [holder.get(key) for holder, key in self._places]
        marks = [*self._marks, *(() if self._copies else self._place_marks)]
        if any(
            mark is not None and mark != self._mark(tensor)
            for mark, tensor in zip(marks, [*tensors, *now], strict=False)
        ):
            raise RuntimeError(
                f"{self._use.name}: an argument or a buffer of this block has changed since the forward pass, and "
                "the backward pass, which runs the block again, needs it as it was: give each call of the block "
                f"tensors of its own (clone()), {_REMEDY}"
            )
        # Give the block the values with which its first run began, and discard the changes that this run makes: the
        # first run has already made them.
        try:
            for (holder, key), copy in zip(self._places, _copies(self._copies), strict=False):
                holder[key] = copy
            with self._swapper.present_again(self._use):
                return run()
        finally:
            for (holder, key), tensor in zip(self._places, now, strict=True):
                holder[key] = tensor

    def _first_run(self, run: Callable[[], Any]) -> Any:
        places = _places_in(self._use.module)
        before = [holder[key] for holder, key in places]
        copies = _copies(before)
        marks = [self._mark(tensor) for tensor in before]
        with self._swapper.present(self._use):
            outputs = run()
        if self._versions != [slab.versions_now() for slab in self._use.slabs]:
            raise RuntimeError(
                f"{self._use.name}: forward() writes into its parameters, and would do so twice; remedy: "
                "checkpoint_activations=False"
            )
        if any(
            holder.get(key) is not tensor or not same(tensor, copy)
            for (holder, key), tensor, copy in zip(places, before, copies, strict=True)
        ):
            self._copies = copies
        self._places, self._place_marks = places, marks
        return outputs

    def _mark(self, tensor: torch.Tensor | None) -> Any:
        """Return a value that is equal only for the same bytes; None for a parameter, whose version is checked."""
        if tensor is None:
            return ()
        if self._swapper.slab_at(tensor) is not None:
            return None
        plain = tensor.detach()
        if type(plain) is not torch.Tensor or plain.layout != torch.strided or not plain.is_cpu:
            return id(tensor), tensor._version
        # For a tensor with repeated elements, the bytes from its first to its last element are fewer.
        reach = sum((n - 1) * step for n, step in zip(plain.shape, plain.stride(), strict=True))
        if plain.numel() and reach < plain.numel():
            dense = plain.as_strided((reach + 1,), (1,))
        else:
            dense = plain.resolve_conj().resolve_neg().contiguous()
        return plain.shape, plain.stride(), plain.dtype, _core.crc32(tensor_bytes(dense).numpy())


#: The error of a backward pass for parameters that have changed.
STEPPED = (
    "backward() belongs to a forward pass after which the parameters have changed, by a step of the optimizer or by a "
    "write; run the forward pass again"
)


def _places_in(block: nn.Module) -> list[_Place]:
    """Return the places of the tensors in a block, other than parameters: buffers and attributes."""
    return [
        (holder, key)
        for module in block.modules()
        for holder in (module._buffers, vars(module))
        for key, value in holder.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_meta
    ]


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors. Copies of tensors that share a storage share one, too."""
    storages: dict[int, torch.UntypedStorage] = {}
    made = []
    for tensor in tensors:
        plain, storage = tensor.detach(), tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            copying: Any = storage
            storages[storage.data_ptr()] = copying.clone()
        copied: Any = torch.empty(0, dtype=plain.dtype, device=plain.device)
        place = plain.storage_offset(), plain.shape, plain.stride()
        copied.set_(storages[storage.data_ptr()], *place)
        made.append(copied.requires_grad_(tensor.requires_grad))
    return made
