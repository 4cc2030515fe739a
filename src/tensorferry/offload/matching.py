"""Matching of a model's parameters and buffers to the tensors of files, and to the modules that use them.

A parameter is *tied* if the model has it under several names.

This module reads headers only, and no tensor data.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from tensorferry.base.reprs import first_of
from tensorferry.offload.absent import Absent
from tensorferry.offload.conversions import Elements, Layout, by_transformers
from tensorferry.safetensors.dtypes import DTYPES, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tensorferry.safetensors.sources import Stored

# The forward() of these classes uses parameters of modules below them without calling those modules.
WHOLE: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)

_MAX_NAMES = 8


class ByteRange(NamedTuple):
    """Bytes [begin, end) of a file, which are the bytes of a tensor from offset ``at`` on."""

    stored: Stored
    begin: int
    end: int
    at: int


@dataclass(eq=False)
class Matched:
    """A tensor of the files, and its places in the model (modules with attribute names): several if it is tied."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[ByteRange]  # in the order of the tensor's bytes, without gaps
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    original: torch.Tensor | None = None  # the model's parameter or buffer
    buffer: bool = False  # whether it is a buffer

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes, without padding."""
        return sum(part.end - part.begin for part in self.parts)


@dataclass
class Matches:
    """The tensors of a model in its files."""

    found: list[Matched]
    # Pairs of tensors in the files that are values of the same tied parameter: that of a later name, which counts, and
    # that of the name before it. Three names in the files give two pairs: (second, first) and (third, second). `found`
    # has the third.
    duplicates: list[tuple[Matched, Matched]]
    unexpected: list[str]  # names in the files that the model does not have


def match(model: nn.Module, stored: Mapping[str, Stored], *, in_training: bool = False) -> Matches:
    """Match the model's parameters and persistent buffers to tensors of the files.

    If the files have several names of a tied parameter, the last one counts, as in ``load_state_dict``.

    Raises
    ------
    ValueError
        The files lack parameters or persistent buffers or have other shapes; or parameters require gradients or are
        streamed already. With ``in_training``, parameters may require gradients, and the files may lack those that have
        values in the model, that is, those that are not on the meta device.
    """
    tensors = {name: tensor for name, _, _, tensor, _ in _tensors(model)}
    if away := [name for name, tensor in tensors.items() if isinstance(tensor, Absent)]:
        raise ValueError(f"model: {told(away)}: these weights are streamed already")
    learning = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if learning and not in_training:
        raise ValueError(
            f"model: {told(learning)} requires gradients: streamed weights are for inference; call "
            "model.requires_grad_(False)"
        )
    if in_training:
        stored = {**stored, **_names_with_adapters(stored, tensors)}
    here, unexpected = _match_names(model, stored, tensors)
    found: dict[int, Matched] = {}
    duplicates: list[tuple[Matched, Matched]] = []
    names: dict[int, list[str]] = {}
    known: set[tuple[int, str]] = set()
    odd: list[str] = []
    for name, _, _, tensor, is_buffer in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
        one = here.pop(name, None)
        if one is None:
            continue
        if one.shape != tuple(tensor.shape):
            odd.append(
                f"{name} has shape {list(one.shape)} in the files and {list(tensor.shape)} in the model"
            )
        one.original, one.buffer = tensor, is_buffer
        if id(tensor) in found:
            duplicates.append((one, found[id(tensor)]))
        found[id(tensor)] = one
    missing: dict[int, str] = {}
    for _, module, attribute, tensor, _ in _tensors(model):
        if id(tensor) not in found:
            # In training, a parameter that is not in the files keeps the values that it has.
            if tensor.is_meta or not in_training:
                missing[id(tensor)] = " or ".join(names[id(tensor)])
        elif (id(module), attribute) not in known:
            known.add((id(module), attribute))
            found[id(tensor)].places.append((module, attribute))
    if missing:
        raise ValueError(f"files: missing tensors: {told(list(missing.values()))}")
    if odd:
        raise ValueError(f"files: shapes differ from the model's: {told(odd, '; ')}")
    _check_attributes(model)
    return Matches(list(found.values()), duplicates, unexpected)


def _names_with_adapters(
    stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Stored]:
    """Return tensors of the files under the names that peft gives the same parameters when it adds adapters."""
    before = {
        name: name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for name in tensors
        if name not in stored
    }
    return {name: stored[plain] for name, plain in before.items() if plain in stored}


def _match_names(
    model: nn.Module, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Matched], list[str]]:
    """Return the tensors of the files by the model's names, and the names that the model does not have."""
    here = {name: matched(name, stored[name]) for name in tensors if name in stored}
    complete = all(
        name in here and here[name].shape == tuple(tensor.shape) for name, tensor in tensors.items()
    )
    if not complete:
        shapes = {name: matched(name, each).shape for name, each in stored.items()}
        converted = by_transformers(model, shapes, tensors)
        if converted is not None:
            layouts = converted.layouts
            here = {name: _assemble(name, layout, stored) for name, layout in layouts.items()}
            return here, [*converted.unexpected, *(name for name in here if name not in tensors)]
    return here, [name for name in stored if name not in tensors]


def _assemble(name: str, layout: Layout, stored: Mapping[str, Stored]) -> Matched:
    """Return a tensor that consists of pieces of tensors in the files."""
    parts: list[ByteRange] = []
    at = 0
    first, *others = dict.fromkeys(piece.name for piece in layout.pieces)
    whole = matched(name, stored[first])
    if not others and layout.pieces == [Elements(first, 0, math.prod(layout.shape))]:
        return whole
    for other in others:
        if stored[other].tensor.dtype != stored[first].tensor.dtype:
            raise ValueError(
                f"files: transformers makes {name} from {first} and {other}, which have different dtypes: "
                f"{stored[first].tensor.dtype} and {stored[other].tensor.dtype}"
            )
    itemsize = whole.dtype.itemsize
    for piece in layout.pieces:
        each, begin = stored[piece.name], stored[piece.name].tensor.begin + piece.begin * itemsize
        nbytes = (piece.end - piece.begin) * itemsize
        last = parts[-1] if parts else None
        if last and last.stored.path == each.path and last.end == begin:
            # Adjacent in the file, so one read is enough.
            parts[-1] = last._replace(end=begin + nbytes)
        else:
            parts.append(ByteRange(each, begin, begin + nbytes, at))
        at += nbytes
    return Matched(name, layout.shape, whole.dtype, parts)


def told(names: list[str], between: str = ", ") -> str:
    """Return names for a message: the first ones, and how many more there are."""
    return first_of(names, _MAX_NAMES, between)


def users(
    model: nn.Module, is_whole: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, list[nn.Module], list[nn.Module]]]:
    """Yield for each module that runs: the module, the modules whose parameters it uses, and those in use around it.

    The third list has the modules whose parameters the modules around this one use: they run while it runs.

    A module without its own forward(), such as a ParameterList, belongs to the nearest module above that has
    one. A module for which ``is_whole`` is true also uses the parameters of all modules below it.
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
        if _has_forward(module) or module is model:
            own = [module, *_modules_without_forward(module)]
            yield module, own, above
            above = above + own
        for child in module.children():
            yield from visit(child, above)

    yield from visit(model, [])


def _modules_without_forward(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not _has_forward(child):
            yield child
            yield from _modules_without_forward(child)


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, bool]]:
    """Yield parameters and persistent buffers under all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                full_name = f"{prefix}.{name}" if prefix else name
                yield full_name, module, name, tensor, name in module._buffers


def matched(name: str, stored: Stored) -> Matched:
    """Return a stored tensor with its shape and dtype in torch's terms.

    Raises
    ------
    SafetensorError
        Torch does not have the dtype.
    """
    tensor = stored.tensor
    dtype = torch_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    bits = DTYPES[tensor.dtype].bits
    if bits < 8 and shape:  # torch stores two 4-bit elements as one element
        shape = (*shape[:-1], shape[-1] * bits // 8)
    return Matched(name, shape, dtype, [ByteRange(stored, tensor.begin, tensor.end, 0)])


def _check_attributes(model: nn.Module) -> None:
    """Raise if the model holds tensors that streaming would not replace and that would give wrong results.

    These are tensors on the meta device, with which torch computes without an error, and parameters that a module also
    holds in another attribute, which would keep their present values.
    """
    ours = {id(one) for one in model.parameters()}
    lost: list[str] = []
    duplicated: list[str] = []
    for prefix, module in model.named_modules():
        for name, held in itertools.chain(module._buffers.items(), _unmanaged_attributes(module)):
            if name in module._buffers and name not in module._non_persistent_buffers_set:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            for tensor in held if isinstance(held, (list, tuple)) else (held,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if id(tensor) in ours:
                    duplicated.append(full_name)
                elif tensor.is_meta:
                    lost.append(full_name)
    if lost:
        raise ValueError(
            f"model: {told(list(dict.fromkeys(lost)))}: these tensors are on the meta device, and files do not contain "
            "them; make their modules on the CPU, or make the model with accelerate's init_empty_weights(), which "
            "moves only parameters to the meta device"
        )
    if duplicated:
        raise ValueError(
            f"model: {told(list(dict.fromkeys(duplicated)))}: these attributes refer to parameters that the "
            "model has under another name; streaming cannot replace them there, and they would keep the present "
            "values; remove the attributes"
        )


def _unmanaged_attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's attributes that torch does not manage: objects, and lists or tuples of objects."""
    # The old hooks of weight_norm() and spectral_norm() set these attributes again before each forward pass.
    made = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or name in made:
            continue
        if isinstance(module, nn.RNNBase) and name == "_flat_weights":
            continue  # setattr() keeps it up to date
        yield name, list(value.values()) if isinstance(value, dict) else value
