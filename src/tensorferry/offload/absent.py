"""What a model has for a weight that is not in memory: its shape, and an error for whoever computes with it.

A tensor on the meta device alone would not do: torch (2.13) multiplies one of the CPU with one of the meta device
without a word, and what comes out is what happened to be in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

# What may be asked; all of it is said by shape, dtype and device.
_ASKED = {
    "__get__",
    "__len__",
    "__repr__",
    "detach",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
}


class Absent(nn.Parameter):
    """A parameter on the meta device that no operation takes; made by :func:`absent`."""

    weight_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse whatever needs its values."""
        if getattr(func, "__name__", "") in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not isinstance(found, Absent):  # .data, .T
                return _absent(args[0].weight_name, found)
            return found
        name = next((one.weight_name for one in args if isinstance(one, Absent)), "")
        raise RuntimeError(
            f"the weight {name} is not in memory: it is while its module runs, and something else "
            f"({getattr(func, '__name__', func)}) uses it. A module whose forward() uses parameters of modules below "
            "it is to be given to stream_weights() as one of blocks="
        )


def absent(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Return what stands for a weight."""
    return _absent(name, torch.empty(shape, dtype=dtype, device="meta"))


def _absent(name: str, empty: torch.Tensor) -> nn.Parameter:
    found: Any = torch.Tensor._make_subclass(Absent, empty, False)
    found.weight_name = name
    return found  # type: ignore[no-any-return]
