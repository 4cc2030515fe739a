"""A block that runs in the forward pass and again in the backward pass, with the same inputs or not at all.

The second run computes the activations that the first one did not keep (``torch.utils.checkpoint``), and gives the same
gradients only if its inputs are the same: arguments, however they are passed and nested, and buffers and attributes of
its modules. The second run gets them as they were before the first one. Autograd's own checks cannot show that a
tensor has changed in place, because one that no operation has saved may change legally. So tensors are compared by
their bytes, and the second run raises if one has changed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import pickle
import random
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree, checkpoint

from tensorferry import _core
from tensorferry.offload.equality import same
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensorferry.offload.slabs import ModuleUse
    from tensorferry.offload.training import TrainingSwapper

# Arguments of these types cannot change.
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    types.BuiltinFunctionType,
)
_REMEDY = "or use checkpoint_activations=False"

# The attributes of modules that torch manages.
_OF_TORCH = {name for name in vars(nn.Module()) if name.startswith("_")}


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
        self._arguments: tuple[Any, Any] | None = arguments  # until the first run ends
        leaves, self._spec = _pytree.tree_flatten(arguments)
        # Tensors are arguments of checkpoint(), which keeps them. The others are here; None is the place of a tensor.
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        for leaf in self._leaves:
            is_function = isinstance(leaf, types.FunctionType) and leaf.__closure__ is None
            if not (is_function or isinstance(leaf, _CONSTANT)):
                raise RuntimeError(
                    f"{use.name}: an argument is a {type(leaf).__name__}, which may change between the forward and "
                    "the backward pass, where the block runs again: pass tensors and numbers, in lists, tuples or "
                    f"dicts, {_REMEDY}"
                )
        self._versions = [slab.versions_now() for slab in use.slabs]
        self._learns = {param: param.requires_grad for slab in use.slabs for param in slab.fields}
        self._attributes = _Attributes(use.module)
        self._marks: list[Any] = []  # of tensors in arguments and attributes, before the first run
        # Copies of the tensors in attributes, if the first run has changed any of them.
        self._copies: list[torch.Tensor] = []
        # States of Python's and NumPy's random generators, if the first run has used them. torch restores its own.
        self._random: list[Any] = []

    def run(self) -> Any:
        """Run the block in the forward pass, and return its outputs."""
        call: Any = checkpoint.checkpoint
        tensors, self._tensors = self._tensors, []
        return call(self._run, *tensors, use_reentrant=False)

    def _run(self, *tensors: torch.Tensor) -> Any:
        if self._arguments is not None:
            return self._first_run(*self._arguments, tensors)
        name, attributes = self._use.name, self._attributes
        if self._versions != [slab.versions_now() for slab in self._use.slabs]:
            raise RuntimeError(f"{name}: {STEPPED}")
        compared = [*tensors, *([] if self._copies else attributes.tensors)]
        if any(
            mark is not None and mark != self._mark(tensor)
            for mark, tensor in zip(self._marks, compared, strict=False)
        ):
            raise RuntimeError(
                f"{name}: an argument, a buffer or a tensor in an attribute of this block has changed since the "
                "forward pass, and the backward pass, which runs the block again, needs it as it was: give each call "
                f"of the block tensors of its own (clone()), {_REMEDY}"
            )
        each = iter(tensors)
        leaves = [
            next(each) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        with (
            attributes.as_before(_copies(self._copies), self._random),
            self._swapper.present_again(self._use),
            _learning(self._learns),
        ):
            return self._forward(*args, **kwargs)

    def _first_run(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        name, before = self._use.name, self._attributes.tensors
        self._marks = [self._mark(tensor) for tensor in (*tensors, *before)]
        copies, random_states = _copies(before), self._attributes.random_states()
        with self._swapper.present(self._use):
            outputs = self._forward(*args, **kwargs)
        if self._versions != [slab.versions_now() for slab in self._use.slabs]:
            raise RuntimeError(
                f"{name}: forward() writes into its parameters, and would do so twice; remedy: "
                "checkpoint_activations=False"
            )
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if spec != self._spec or plain != self._leaves:
            raise RuntimeError(
                f"{name}: forward() changes a list or dict that it gets as an argument, and would do so twice; remedy: "
                "checkpoint_activations=False"
            )
        if not all(map(same, before, copies)):
            self._copies = copies
        if pickle.dumps(random_states) != pickle.dumps(self._attributes.random_states()):
            self._random = random_states
        self._arguments = None
        return outputs

    def _mark(self, tensor: torch.Tensor) -> Any:
        """Return a value that is equal only for the same bytes; None for a parameter, whose version is checked."""
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


@contextlib.contextmanager
def _learning(learns: Mapping[torch.Tensor, bool]) -> Iterator[None]:
    """Have parameters require gradients, or not, for a ``with`` block: what autograd saves depends on it."""
    now = {param: param.requires_grad for param in learns}
    try:
        for param, requires_grad in learns.items():
            param.requires_grad_(requires_grad)
        yield
    finally:
        for param, requires_grad in now.items():
            param.requires_grad_(requires_grad)


#: The error of a backward pass for parameters that have changed.
STEPPED = (
    "backward() belongs to a forward pass after which the parameters have changed, by a step of the optimizer or by a "
    "write; run the forward pass again"
)


def _generators(leaves: Sequence[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return functions that get and set the states of random generators: global ones, and those among leaves."""
    numpy: Any = sys.modules.get("numpy.random")
    found: list[Any] = [(random.getstate, random.setstate)]
    found += [] if numpy is None else [(numpy.get_state, numpy.set_state)]
    for leaf in leaves:
        if isinstance(leaf, random.Random):
            found.append((leaf.getstate, leaf.setstate))
        elif isinstance(leaf, torch.Generator) or (numpy and isinstance(leaf, numpy.RandomState)):
            found.append((leaf.get_state, leaf.set_state))
        elif numpy and isinstance(leaf, numpy.Generator):
            bits = leaf.bit_generator
            found.append(
                (
                    functools.partial(getattr, bits, "state"),
                    functools.partial(setattr, bits, "state"),
                )
            )
    return found


def _own_copy(leaf: Any) -> Any:
    """Return a copy of a container of plain values, and any other leaf itself."""
    return leaf.copy() if type(leaf) in (set, bytearray) else leaf


class _Attributes:
    """The attributes and buffers that the modules of a block have now."""

    def __init__(self, block: nn.Module) -> None:
        self._owners = [
            owner for module in block.modules() for owner in (vars(module), module._buffers)
        ]
        leaves, self._spec = _pytree.tree_flatten([self._own(each) for each in self._owners])
        self._leaves = list(map(_own_copy, leaves))
        self._generators = _generators(leaves)
        #: The tensors that may change in place.
        self.tensors = [leaf for leaf in self._leaves if self._is_tensor(leaf)]

    def random_states(self) -> list[Any]:
        """Return the states of random generators."""
        return [get() for get, _ in self._generators]

    @contextlib.contextmanager
    def as_before(
        self, copies: Sequence[torch.Tensor], random_states: Sequence[Any]
    ) -> Iterator[None]:
        """Give the modules these attributes for a ``with`` block.

        If there are any, ``copies`` take the place of the tensors, and generators have ``random_states``.
        """
        each = iter(copies or self.tensors)
        leaves = [next(each) if self._is_tensor(leaf) else _own_copy(leaf) for leaf in self._leaves]
        now = [self._own(owner) for owner in self._owners]
        drawn = self.random_states() if random_states else []
        try:
            self._set(_pytree.tree_unflatten(leaves, self._spec))
            self._set_random(random_states)
            yield
        finally:
            self._set(now)
            self._set_random(drawn)

    def _set_random(self, states: Sequence[Any]) -> None:
        for (_, set_state), state in zip(self._generators, states, strict=False):
            set_state(state)

    def _set(self, values: Sequence[dict[str, Any]]) -> None:
        for owner, value in zip(self._owners, values, strict=True):
            for name in self._own(owner).keys() - value.keys():
                del owner[name]
            owner.update(value)

    @staticmethod
    def _own(owner: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in owner.items() if name not in _OF_TORCH}

    @staticmethod
    def _is_tensor(leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, nn.Parameter)
            and leaf.layout == torch.strided
            and not leaf.is_meta
        )


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
