"""Which tensors of files a model's parameters and buffers are, and which module wants which; no tensor is read here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from tensorferry.safetensors.dtypes import DTYPES, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tensorferry.safetensors.sources import Stored

# Their forward() takes parameters of modules below them without calling these.
WHOLE: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)

_NAMES_TOLD = 8


@dataclass(eq=False)
class Matched:
    """A tensor of a file, and where in the model it belongs: in several places where parameters are tied."""

    name: str
    stored: Stored
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    original: torch.Tensor | None = None
    buffer: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, without padding."""
        return self.stored.tensor.nbytes


def match(model: nn.Module, stored: Mapping[str, Stored]) -> tuple[list[Matched], list[str]]:
    """Return what the model has in the files, and the names that it has no place for.

    Raises
    ------
    ValueError
        Parameters or persistent buffers are missing in the files, have other shapes there, or require gradients.
    """
    found: dict[int, Matched] = {}
    names: dict[int, list[str]] = {}
    taken: set[str] = set()
    known: set[tuple[int, str]] = set()
    training: list[str] = []
    odd: list[str] = []
    for name, _, _, tensor, is_buffer in _tensors(model):
        if tensor.requires_grad:
            training.append(name)
        names.setdefault(id(tensor), []).append(name)
        taken.add(name)
        one = found.get(id(tensor))
        if one is None and name in stored:
            one = matched(name, stored[name])
            one.original, one.buffer = tensor, is_buffer
            found[id(tensor)] = one
            if one.shape != tuple(tensor.shape):
                odd.append(f"{name} is {list(one.shape)}, not {list(tensor.shape)}")
    if training:
        raise ValueError(
            f"model: {told(training)} requires gradients: streamed weights are for inference; call "
            "model.requires_grad_(False)"
        )
    missing: dict[int, str] = {}
    for _, module, attribute, tensor, _ in _tensors(model):
        one = found.get(id(tensor))
        if one is None:
            missing[id(tensor)] = " or ".join(names[id(tensor)])
        elif (id(module), attribute) not in known:
            known.add((id(module), attribute))
            one.places.append((module, attribute))
    if missing:
        raise ValueError(f"files: they lack {told(list(missing.values()))}")
    if odd:
        raise ValueError(f"files: other shapes than the model's: {told(odd, '; ')}")
    _check_meta_buffers(model)
    return list(found.values()), [name for name in stored if name not in taken]


def told(names: list[str], between: str = ", ") -> str:
    """Return names for a message; of many the first ones, and how many more."""
    more = len(names) - _NAMES_TOLD
    text = between.join(names[:_NAMES_TOLD])
    return f"{text} and {more} more" if more > 0 else text


def users(
    model: nn.Module, whole: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, list[nn.Module], list[nn.Module]]]:
    """Yield each module that runs, the modules whose parameters it uses, and those whose are in use meanwhile.

    A module that has no forward() of its own, such as a ParameterList, belongs to the one that has it. Of ``whole``
    classes, all modules below belong to it.
    """
    seen: set[int] = set()

    def visit(
        module: nn.Module, above: list[nn.Module]
    ) -> Iterator[tuple[nn.Module, list[nn.Module], list[nn.Module]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, whole):
            below = list(module.modules())
            seen.update(map(id, below))
            yield module, below, above
            return
        if _runs(module) or module is model:
            own = [module, *_idle_below(module)]
            yield module, own, above
            above = above + own
        for child in module.children():
            yield from visit(child, above)

    yield from visit(model, [])


def _idle_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not _runs(child):
            yield child
            yield from _idle_below(child)


def _runs(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, bool]]:
    """Yield parameters and persistent buffers under all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = (
            (name, buffer)
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        )
        both = itertools.chain(
            ((name, one, False) for name, one in module._parameters.items()),
            ((name, one, True) for name, one in buffers),
        )
        for name, tensor, is_buffer in both:
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name, tensor, is_buffer


def matched(name: str, stored: Stored) -> Matched:
    """Return what a stored tensor is in torch's words.

    Raises
    ------
    SafetensorError
        torch has no such dtype.
    """
    tensor = stored.tensor
    dtype = torch_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    bits = DTYPES[tensor.dtype].bits
    if bits < 8 and shape:  # torch's elements are bytes, of two
        shape = (*shape[:-1], shape[-1] * bits // 8)
    return Matched(name, stored, shape, dtype)


def _check_meta_buffers(model: nn.Module) -> None:
    lost = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if lost:
        raise ValueError(
            f"model: {told(lost)}: these buffers are on the meta device and not meant to be in files; make their "
            "modules again outside of it, or the model with accelerate's init_empty_weights(), which leaves buffers "
            "alone"
        )
