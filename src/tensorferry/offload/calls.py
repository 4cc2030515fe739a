"""Calls of an optimizer's own step for a part of its parameters.

A step on drives calls the optimizer once for each bucket. Each call gets a *stepper*: a copy of the optimizer object
whose groups have only the parameters to step, and whose state is theirs. So the user's optimizer is never half changed.
In memory a step is one call, and counters in groups advance once. Therefore each call begins with the values that the
step began with, and the groups get the values of the first call when the step is complete.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from tensorferry.offload.equality import same
from tensorferry.offload.errors import NotSeparableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# The attributes of an optimizer that contain torch's hooks. The hooks of a step run once, around the calls for all
# buckets.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS = (
    *STEP_HOOKS,
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Methods that offloading sets on the optimizer object, where they hide those of its class.
REPLACED_METHODS = ("step", "train", "eval", "state_dict", "load_state_dict", "add_param_group")

_ATOMS = (bool, int, float, complex, str, bytes, type(None))


def class_step(optimizer: torch.optim.Optimizer, name: str = "step") -> Callable[[Any], Any]:
    """Return a method of an optimizer's class, without torch's profiler wrapper and the hooks around step()."""
    method: Any = getattr(type(optimizer), name)
    if getattr(method, "hooked", False):
        method = method.__wrapped__
    return method  # type: ignore[no-any-return]


class StepCalls:
    """The calls of one step, or of another method such as ``train()``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The user's optimizer; only :meth:`end` changes it.
    method : callable
        The method of its class; it is called with the stepper.
    attributes : mapping of str
        Further attributes of the stepper.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: Callable[[Any], Any],
        attributes: Mapping[str, Any],
    ) -> None:
        self._optimizer = optimizer
        self._method = method
        kept = vars(optimizer).items()
        self._attributes = {
            **{name: value for name, value in kept if name not in REPLACED_METHODS},
            # A step() that calls super().step() would run the hooks for each bucket.
            **{name: OrderedDict() for name in STEP_HOOKS},
            **attributes,
        }
        self._before = [_values(group) for group in optimizer.param_groups]
        self._after: list[dict[str, Any]] | None = None
        self._new_attributes: dict[str, Any] = {}
        #: The return value of the last call.
        self.returned: Any = None

    def call(self, params: Mapping[int, Sequence[torch.Tensor]], state: dict[Any, Any]) -> Any:
        """Step parameters, by the number of their group, with the state of each; return the new state.

        Raises
        ------
        NotSeparableError
            The call left other values in the groups than the first call of this step.
        """
        stepper: Any = object.__new__(type(self._optimizer))
        stepper.__dict__.update(self._attributes)
        stepper.state = defaultdict(dict, state)
        copies: dict[int, torch.Tensor] = {}
        stepper.param_groups = [
            {
                key: list(params.get(number, ())) if key == "params" else _fresh(value, copies)
                for key, value in group.items()
            }
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        self.returned = self._method(stepper)
        lent = {target for each in params.values() for target in each}
        others = [key for key, value in stepper.state.items() if value and key not in lent]
        if others:
            raise NotSeparableError(
                f"{type(self._optimizer).__name__} cannot be offloaded: it keeps state for {others[0]!r}, which is "
                "not one of the parameters that it steps"
            )
        after = [_values(group) for group in stepper.param_groups]
        if self._after is None:
            self._after = after
            self._new_attributes = {
                name: value
                for name, value in vars(stepper).items()
                if name not in ("state", "param_groups")
                and (name not in self._attributes or value is not self._attributes[name])
            }
        else:
            self._check(after)
        return stepper.state

    def end(self) -> None:
        """Give the values after the step to the user's optimizer."""
        assert self._after is not None
        for group, before, after in zip(
            self._optimizer.param_groups, self._before, self._after, strict=True
        ):
            for key, value in after.items():
                if key in before and same(before[key], value):
                    continue
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)  # the user, or a scheduler, may hold this tensor
                else:
                    group[key] = value
        vars(self._optimizer).update(self._new_attributes)

    def _check(self, after: list[dict[str, Any]]) -> None:
        assert self._after is not None
        for number, (first, now) in enumerate(zip(self._after, after, strict=True)):
            for key in {**first, **now}:
                if key not in first or key not in now or not same(first[key], now[key]):
                    raise NotSeparableError(
                        f"{type(self._optimizer).__name__} cannot be offloaded: its step leaves different values in "
                        f"param_groups[{number}][{key!r}], depending on the parameters that it gets; in memory it "
                        "gets all of them at once. The step is partly done"
                    )


def state_after_a_step(
    optimizer: torch.optim.Optimizer,
    method: Callable[[Any], Any],
    group: dict[str, Any],
    zeros: torch.Tensor,
) -> dict[Any, Any]:
    """Return the state that a step of zeros creates for a parameter of zeros.

    Raises
    ------
    NotSeparableError
        The step raised.
    """
    param = torch.nn.Parameter(zeros, requires_grad=zeros.is_floating_point())
    param.grad = torch.zeros_like(zeros)
    [number] = [at for at, each in enumerate(optimizer.param_groups) if each is group]
    with torch.random.fork_rng(devices=()):
        try:
            calls = StepCalls(optimizer, method, {})
            return dict(calls.call({number: [param]}, {})[param])
        except Exception as error:
            raise NotSeparableError(
                f"{type(optimizer).__name__} cannot be offloaded: its step on a parameter of zeros of shape "
                f"{tuple(zeros.shape)} raised {type(error).__name__}: {error}"
            ) from error


def _fresh(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a value of a group with copies of its tensors and containers, which a step could change in place.

    ``copies`` has those of tensors by id: groups may share a tensor, such as one of the defaults.
    """
    if isinstance(value, _ATOMS) or (
        isinstance(value, tuple) and all(isinstance(each, _ATOMS) for each in value)
    ):
        return value

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone()
        return copies[id(leaf)]

    return _pytree.tree_map(copied, value)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
