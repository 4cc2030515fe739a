"""A step of an offloaded optimizer in progress: what is done, and with which gradients."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorferry.offload.calls import StepCalls, class_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from tensorferry.offload.plan import Bucket


@dataclass(eq=False)
class Sweep:
    """One call of a method for all parameters, bucket by bucket; its progress allows a retry.

    Attributes
    ----------
    calls : StepCalls
        The calls of the optimizer's method.
    group_of : mapping of parameters
        The number of each parameter's group.
    gradient_of : callable
        Returns a parameter's gradient or None.
    is_step : bool
        Whether the method is step(). Other methods get parameters without gradients, too.
    order : list of Bucket
        The buckets, in the order in which they are stepped.
    done : int
        The number of buckets that have been stepped.
    broken : bool
        Whether the optimizer raised in the middle of a bucket: set before each call, and cleared after it.
    placed : dict of parameters
        Gradients that the method gets in place of those that ``gradient_of`` returns.
    """

    calls: StepCalls
    group_of: Mapping[torch.Tensor, int]
    gradient_of: Callable[[torch.Tensor], torch.Tensor | None]
    is_step: bool = True
    order: list[Bucket] = field(default_factory=list)
    done: int = 0
    broken: bool = False
    placed: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    _gradients: dict[torch.Tensor, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        gradient_of: Callable[[torch.Tensor], torch.Tensor | None],
        attributes: Mapping[str, Any],
        method: str = "step",
    ) -> Sweep:
        """Return a sweep that has not begun; ``attributes`` are those that the optimizer has only during the calls."""
        group_of = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        calls = StepCalls(optimizer, class_step(optimizer, method), attributes)
        return cls(calls, group_of, gradient_of, method == "step")

    def lent_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that the method gets for a parameter."""
        return self.placed.get(param, self.gradient_of(param))

    def involves(self, param: torch.Tensor) -> bool:
        """Return whether the method gets a parameter."""
        return not self.is_step or self.gradient_of(param) is not None

    def call(
        self, lent: Iterable[tuple[torch.Tensor, torch.Tensor, dict[Any, Any] | None]]
    ) -> Mapping[torch.Tensor, dict[Any, Any]]:
        """Call the method for lent tensors, each with its parameter and state; return the new state by tensor."""
        params: dict[int, list[torch.Tensor]] = {}
        states = {}
        for param, target, state in lent:
            params.setdefault(self.group_of[param], []).append(target)
            if state:
                states[target] = state
        self.broken = True
        found: Mapping[torch.Tensor, dict[Any, Any]] = self.calls.call(params, states)
        return found

    def note_gradients(self, params: Iterable[torch.Tensor]) -> None:
        """Record the identity and version of gradients, which must be unchanged for a retry."""
        for param in params:
            grad = self.gradient_of(param)
            self._gradients[param] = None if grad is None else (weakref.ref(grad), grad._version)

    def changed_gradient(self, params: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return one of these parameters with another or a modified gradient, or None."""
        for param in params:
            noted, grad = self._gradients.get(param), self.gradient_of(param)
            if (noted is None) != (grad is None):
                return param
            if (
                noted is not None
                and grad is not None
                and (noted[0]() is not grad or grad._version != noted[1])
            ):
                return param
        return None
