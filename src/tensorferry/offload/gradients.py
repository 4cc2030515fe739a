"""Gradients on drives: stand-ins for them, the changes that are made later, and their norms.

While a gradient is on a drive, the parameter's ``grad`` is a :class:`StoredGradient`. Functions that clip, scale or
zero gradients change each of them in the same way, whatever its values are. So the stand-in only records the change,
and :meth:`StoredGradient.settle` makes it when the gradient is in memory the next time. Norms, which clipping needs
first, are computed when the gradients arrive. With these two, ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler``
work as in memory and read no gradient.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.absent import AbsentWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.offload.training import TrainingSwapper

# In-place operations whose result for one gradient depends on that gradient and numbers only, by the names of torch's
# functions, which are those for one tensor or (_foreach_) for several.
_CHANGES: dict[str, Callable[..., Any]] = {
    "mul_": torch.Tensor.mul_,
    "div_": torch.Tensor.div_,
    "clamp_": torch.Tensor.clamp_,
    "zero_": torch.Tensor.zero_,
    "_foreach_mul_": torch.Tensor.mul_,
    "_foreach_zero_": torch.Tensor.zero_,
}
_ZEROS = {"zero_", "_foreach_zero_"}
_NORMS = {"linalg_vector_norm", "vector_norm"}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class StoredGradient(AbsentWrapper):
    """The stand-in for a gradient on a drive.

    Attributes
    ----------
    param : torch.Tensor
        The parameter.
    is_released : bool
        Whether the values no longer exist: a step has used them, or the parameter has got another gradient.
    """

    _swapper: weakref.ref[TrainingSwapper]
    param: torch.Tensor
    is_released: bool
    _pending: list[Callable[[torch.Tensor], object]]
    _norms: dict[float, torch.Tensor]

    @classmethod
    def for_param(cls, swapper: TrainingSwapper, param: torch.Tensor) -> StoredGradient:
        """Return a new stand-in for a parameter's gradient."""
        found: StoredGradient = cls.made(
            tuple(param.shape), gradient_dtype(param), swapper.device, tuple(param.stride())
        )
        found._swapper, found.param, found.is_released = weakref.ref(swapper), param, False
        found._pending, found._norms = [], {}
        return found

    @staticmethod
    def of(param: torch.Tensor) -> StoredGradient | None:
        """Return the stand-in that a parameter has as its ``grad``, or None."""
        found = grad_of(param)
        return found if isinstance(found, StoredGradient) else None

    def refusal(self, operation: str) -> str:
        """Return the message of the error for an operation."""
        if self.is_released:
            return (
                f"this gradient has been released, by a step or by a later gradient of its parameter, and {operation} "
                "needs its values; call optimizer.zero_grad() before the next backward()"
            )
        return f"this gradient is on a drive, and {operation} needs its values: use `with optimizer.in_memory(module):`"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Perform operations on metadata, record changes, return norms, and raise for all other operations."""
        name = getattr(func, "__name__", "")
        if name in _CHANGES or name in _NORMS or name == _UNSCALE:
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            stored = [each for each in targets if isinstance(each, StoredGradient)]
            others = [each for each in targets if not isinstance(each, StoredGradient)]
            numbers: dict[Any, Any] = {**dict(enumerate(args[1:])), **(kwargs or {})}
            numbers_only = all(
                type(each) is torch.Tensor and each.dim() == 0
                if isinstance(each, torch.Tensor)
                else each is None or isinstance(each, (int, float, str, bool))
                for each in numbers.values()
            )
            swapper = stored[0]._swapper() if stored else None
            if swapper is not None and name in _ZEROS:
                swapper.revive(stored)
            if any(each.is_released for each in stored):
                swapper = None
            if swapper is not None and numbers_only:
                if name in _NORMS:
                    if numbers.keys() <= {0, "ord"}:
                        kind = float(numbers.get(0, numbers.get("ord", 2)))
                        return swapper.norm(stored[0], kind)
                else:
                    if others:
                        func(others, *args[1:], **(kwargs or {}))
                    if name == _UNSCALE:
                        return swapper.unscale(stored, *args[1:])
                    for each in stored:
                        each.change(_CHANGES[name], args[1:], kwargs or {})
                    return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def change(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Change the gradient by an operation in place when it is in memory the next time."""
        args = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        # This raises the errors that the operation raises for the dtype or the arguments.
        function(torch.empty(0, dtype=self.dtype, device="cpu"), *args, **kwargs)
        self._pending.append(lambda values: function(values, *args, **kwargs))
        self._norms.clear()

    @property
    def has_changes(self) -> bool:
        """Whether changes are recorded."""
        return bool(self._pending)

    def settle(self, values: torch.Tensor) -> None:
        """Make the recorded changes of the gradient's values."""
        changes, self._pending = self._pending, []
        for change in changes:
            change(values)

    def known_norm(self, kind: float) -> torch.Tensor | None:
        """Return the norm of the order ``kind`` if it is known."""
        return self._norms.get(kind)

    def note_norm(self, kind: float | None, values: torch.Tensor) -> None:
        """Compute and keep the norm of the order ``kind``; forget those of earlier values."""
        self._norms = {}
        if kind is not None:
            self._norms[kind] = torch.linalg.vector_norm(values, kind)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient on a drive: {list(self.shape)}, {self.dtype}>"


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: from torch 2.10 on it may differ from the parameter's."""
    found: torch.dtype | None = getattr(param, "grad_dtype", None)
    return found or param.dtype


def grad_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's ``grad``, whatever the parameter's class is."""
    own: Any = torch._C.TensorBase.grad
    with torch._C.DisableTorchFunctionSubclass():
        return own.__get__(param)  # type: ignore[no-any-return]


def set_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set a parameter's ``grad``, whatever the parameter's class is."""
    own: Any = torch._C.TensorBase.grad
    with torch._C.DisableTorchFunctionSubclass():
        own.__set__(param, grad)


def stored_gradients(params: Any) -> Iterator[StoredGradient]:
    """Yield the stand-ins of parameters' gradients."""
    return (found for param in params if (found := StoredGradient.of(param)) is not None)
