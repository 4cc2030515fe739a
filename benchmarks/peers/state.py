"""What the checkpoint scenarios save and load: a transformer's weights and AdamW's moments."""

from __future__ import annotations

from typing import Any

import torch

_LAYERS = 12
_VOCABULARY = 8_000


def state(nbytes: int) -> dict[str, Any]:
    """A state of about ``nbytes`` bytes in float32 and some 600 tensors, of every size that transformers have."""
    generator = torch.Generator().manual_seed(17)
    weights = {
        name: torch.empty(shape).normal_(generator=generator)
        for name, shape in _shapes(_width(nbytes)).items()
    }
    moments = {
        name: {
            "step": torch.tensor(1000.0),
            "exp_avg": weight * 0.5,
            "exp_avg_sq": weight * 0.25,
        }
        for name, weight in weights.items()
    }
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4}]}}


def tensors(state: dict[Any, Any]) -> list[torch.Tensor]:
    """The tensors of a state."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors(value)
    return found


def state_nbytes(state: dict[str, Any]) -> int:
    """The bytes of a state's tensors."""
    return sum(tensor.nbytes for tensor in tensors(state))


def _width(nbytes: int) -> int:
    """The width with which weights and two moments have about so many bytes."""
    width = 16
    while 12 * sum(_count(s) for s in _shapes(width + 16).values()) <= nbytes:
        width += 16
    return width


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.in.weight": (3 * width, width),
        "attention.in.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    layers = {f"layers.{k}.{name}": shape for k in range(_LAYERS) for name, shape in layer.items()}
    ends: dict[str, tuple[int, ...]] = {"norm.weight": (width,), "norm.bias": (width,)}
    return {"embedding.weight": (_VOCABULARY, width), **layers, **ends}


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
