"""Which tensors of files a model's parameters and buffers are, and which module wants which; no tensor is read here."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from tensorferry.offload.absent import Absent
from tensorferry.offload.conversions import Elements, Layout, by_transformers
from tensorferry.safetensors.dtypes import DTYPES, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tensorferry.safetensors.sources import Stored

# Their forward() takes parameters of modules below them without calling these.
WHOLE: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)

_NAMES_TOLD = 8


class ByteRange(NamedTuple):
    """Bytes of a file: [begin, end) of it are those of a tensor from ``at`` on."""

    stored: Stored
    begin: int
    end: int
    at: int


@dataclass(eq=False)
class Matched:
    """A tensor of files, and where in the model it belongs: in several places where parameters are tied."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[ByteRange]  # in the order of its bytes, without gaps
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    original: torch.Tensor | None = None
    buffer: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes, without padding."""
        return sum(part.end - part.begin for part in self.parts)


@dataclass
class Matches:
    """What a model has in its files."""

    found: list[Matched]
    rivals: list[
        tuple[Matched, Matched]
    ]  # one of `found`, and what the files have under another name of it
    unexpected: list[str]  # names in the files that the model has no place for


def match(model: nn.Module, stored: Mapping[str, Stored], *, in_training: bool = False) -> Matches:
    """Find out what the model has in the files.

    Of several names of a tied parameter the last one in the files counts, as for ``load_state_dict``.

    Raises
    ------
    ValueError
        Parameters or persistent buffers are missing in the files, have other shapes there, require gradients, or are
        streamed already. ``in_training`` they may require gradients, and those that have values may be missing.
    """
    tensors = {name: tensor for name, _, _, tensor, _ in _tensors(model)}
    if away := [name for name, tensor in tensors.items() if isinstance(tensor, Absent)]:
        raise ValueError(f"model: {told(away)}: streamed already")
    learning = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if learning and not in_training:
        raise ValueError(
            f"model: {told(learning)} requires gradients: streamed weights are for inference; call "
            "model.requires_grad_(False)"
        )
    if in_training:
        stored = {**stored, **_adapted(stored, tensors)}
    here, unexpected = _named(model, stored, tensors)
    found: dict[int, Matched] = {}
    rivals: list[tuple[Matched, Matched]] = []
    names: dict[int, list[str]] = {}
    known: set[tuple[int, str]] = set()
    odd: list[str] = []
    for name, _, _, tensor, is_buffer in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
        one = here.pop(name, None)
        if one is None:
            continue
        if one.shape != tuple(tensor.shape):
            odd.append(f"{name} is {list(one.shape)}, not {list(tensor.shape)}")
        one.original, one.buffer = tensor, is_buffer
        if id(tensor) in found:
            rivals.append((one, found[id(tensor)]))
        found[id(tensor)] = one
    missing: dict[int, str] = {}
    for _, module, attribute, tensor, _ in _tensors(model):
        if id(tensor) not in found:
            if tensor.is_meta or not in_training:  # else it has values
                missing[id(tensor)] = " or ".join(names[id(tensor)])
        elif (id(module), attribute) not in known:
            known.add((id(module), attribute))
            found[id(tensor)].places.append((module, attribute))
    if missing:
        raise ValueError(f"files: they lack {told(list(missing.values()))}")
    if odd:
        raise ValueError(f"files: other shapes than the model's: {told(odd, '; ')}")
    _check_attributes(model)
    return Matches(list(found.values()), rivals, unexpected)


def _adapted(
    stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Stored]:
    """Return what files have of a model to which peft has added adapters, by its names then."""
    before = {
        name: name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for name in tensors
        if name not in stored
    }
    return {name: stored[plain] for name, plain in before.items() if plain in stored}


def _named(
    model: nn.Module, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Matched], list[str]]:
    """Return what the files have by the model's names, and the files' names that are none of these."""
    here = {name: matched(name, stored[name]) for name in tensors if name in stored}
    complete = all(
        name in here and here[name].shape == tuple(tensor.shape) for name, tensor in tensors.items()
    )
    if not complete:
        shapes = {name: matched(name, each).shape for name, each in stored.items()}
        converted = by_transformers(model, shapes, tensors)
        if converted is not None:
            layouts = converted.layouts
            here = {name: _made(name, layout, stored) for name, layout in layouts.items()}
            return here, [*converted.unexpected, *(name for name in here if name not in tensors)]
    return here, [name for name in stored if name not in tensors]


def _made(name: str, layout: Layout, stored: Mapping[str, Stored]) -> Matched:
    """Return a tensor that is made of pieces of several in the files."""
    parts: list[ByteRange] = []
    at = 0
    first, *others = dict.fromkeys(piece.name for piece in layout.pieces)
    whole = matched(name, stored[first])
    if not others and layout.pieces == [Elements(first, 0, math.prod(layout.shape))]:
        return whole
    for other in others:
        if stored[other].tensor.dtype != stored[first].tensor.dtype:
            raise ValueError(
                f"files: transformers makes {name} of {first} and {other}, which have other dtypes: "
                f"{stored[first].tensor.dtype} and {stored[other].tensor.dtype}"
            )
    itemsize = whole.dtype.itemsize
    for piece in layout.pieces:
        each, begin = stored[piece.name], stored[piece.name].tensor.begin + piece.begin * itemsize
        nbytes = (piece.end - piece.begin) * itemsize
        last = parts[-1] if parts else None
        if last and last.stored.path == each.path and last.end == begin:
            parts[-1] = last._replace(end=begin + nbytes)  # neighbours in the file, too
        else:
            parts.append(ByteRange(each, begin, begin + nbytes, at))
        at += nbytes
    return Matched(name, layout.shape, whole.dtype, parts)


def told(names: list[str], between: str = ", ") -> str:
    """Return names for a message; of many the first ones, and how many more."""
    more = len(names) - _NAMES_TOLD
    text = between.join(names[:_NAMES_TOLD])
    return f"{text} and {more} more" if more > 0 else text


def users(
    model: nn.Module, is_whole: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, list[nn.Module], list[nn.Module]]]:
    """Yield each module that runs, the modules whose parameters it uses, and those whose are in use meanwhile.

    A module that has no forward() of its own, such as a ParameterList, belongs to the one that has it. To a ``whole``
    one belong all modules below it.
    """
    seen: set[int] = set()

    def visit(
        module: nn.Module, above: list[nn.Module]
    ) -> Iterator[tuple[nn.Module, list[nn.Module], list[nn.Module]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if is_whole(module):
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
    return Matched(name, shape, dtype, [ByteRange(stored, tensor.begin, tensor.end, 0)])


def _check_attributes(model: nn.Module) -> None:
    """Refuse tensors that streaming would leave as they are and that are used all the same.

    Torch computes with tensors on the meta device, and the results are wrong; a parameter that a module has in a list
    besides keeps the values of before.
    """
    ours = {id(one) for one in model.parameters()}
    lost: list[str] = []
    beside: list[str] = []
    for prefix, module in model.named_modules():
        for name, held in itertools.chain(module._buffers.items(), _plain(module)):
            if name in module._buffers and name not in module._non_persistent_buffers_set:
                continue
            told_name = f"{prefix}.{name}" if prefix else name
            for tensor in held if isinstance(held, (list, tuple)) else (held,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) in ours:
                    beside.append(told_name)
                elif tensor.is_meta:
                    lost.append(told_name)
    if lost:
        raise ValueError(
            f"model: {told(list(dict.fromkeys(lost)))}: these tensors are on the meta device and not meant to be in "
            "files; make their modules again outside of it, or the model with accelerate's init_empty_weights(), which "
            "leaves all but parameters alone"
        )
    if beside:
        raise ValueError(
            f"model: {told(list(dict.fromkeys(beside)))}: these attributes hold parameters beside the places that the "
            "model has for them, and would keep the present values; remove them"
        )


def _plain(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield attributes of a module that torch knows nothing of: objects, and lists or tuples of objects."""
    # Made anew before each pass: old-style weight_norm() and spectral_norm().
    made = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or name in made:
            continue
        if isinstance(module, nn.RNNBase) and name == "_flat_weights":
            continue  # setattr() keeps it up to date
        yield name, list(value.values()) if isinstance(value, dict) else value
