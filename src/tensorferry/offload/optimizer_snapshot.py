"""Snapshots of the Python values that an optimizer's step may change besides parameters and their state.

In memory, a step is one call of the optimizer. An offloaded step calls it once for each bucket, that is, for some of
the parameters. Counters in its attributes, groups and module variables must nevertheless advance once per step. So the
values at the beginning of the step are restored before each further call, and all calls must leave the same values,
which are then those after the step. A :class:`Snapshot` holds the values at the beginning of a step. It follows
containers and plain objects, and restores their contents in place, because other code may hold references to the same
objects.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.offload.errors import NotSeparableError
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The attributes of an optimizer that contain torch's hooks. The hooks of a step run once, around the calls for all
# buckets.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Attributes of every torch.optim.Optimizer that are not counters.
_TORCH_ATTRIBUTES = {
    *("state", "param_groups", "_zero_grad_profile_name", "_need_device_dtype_check_for_fused"),
    *HOOKS,
}

# Methods that offloading sets on the optimizer object, where they hide those of its class.
REPLACED_METHODS = ("step", "train", "eval", "state_dict", "load_state_dict", "add_param_group")

# A larger tensor is not copied for each bucket; a step that changes one is refused.
_LARGE_NUMEL = 1 << 16

_MAX_DEPTH = 12
_MAX_OBJECTS = 10_000

# Objects of these modules are not counters, and a large part of the process is reachable from them.
_SKIPPED = ("logging", "threading", "_thread", "concurrent.futures", "multiprocessing")

# Immutable values, which need no copy.
ATOMS = (bool, int, float, complex, str, bytes, type(None))


# The types of class attributes, global variables, closure variables and default arguments in which a step may count.
# Variables of other types are not restored.
_COUNTERS = (*ATOMS[:4], list, dict, set, deque)


class Snapshot:
    """The values of an optimizer's attributes, groups and variables at one moment.

    Raises
    ------
    NotSeparableError
        The optimizer holds a module or another optimizer, and the effect of a step on these cannot be observed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # The objects that a step may change, with copies of their contents, by id().
        self._contents: dict[int, tuple[Any, Any]] = {}
        # Variables outside of the optimizer: the container, the name and the value.
        self._variable_values: list[tuple[Any, str, Any]] = []
        # Tensors that are too large to be copied, with their names and versions.
        self._large: list[tuple[str, torch.Tensor, int]] = []
        self._params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        #: Whether parameters, or their ids, are among the values: then the step may treat each parameter differently.
        self.refers_to_params = False
        self._variables = list(_variables_of(type(optimizer)))
        self._snapshot_containers()
        for name, root in self._roots():
            self._snapshot_value(name, root, 0)

    def restore(self) -> None:
        """Restore all values, in place in the objects that held them."""
        for held, content in self._contents.values():
            _restore_contents(held, content)
        for place, name, number in self._variable_values:
            if _variable(place, name) is number:
                continue
            if isinstance(place, dict):
                place[name] = number
            elif isinstance(place, type):
                setattr(place, name, number)
            else:
                place.cell_contents = number

    def frozen(self) -> Any:
        """Return a copy of the current values, for a comparison."""
        memo: dict[int, int] = {}
        return {name: _frozen(root, memo, self._params, 0) for name, root in self._roots()}

    def check_large(self) -> None:
        """Raise if a step has changed a tensor that is too large to be restored for each bucket.

        Raises
        ------
        NotSeparableError
            The message names the tensor.
        """
        for name, tensor, version in self._large:
            if tensor._version != version:
                raise NotSeparableError(
                    f"{type(self._optimizer).__name__} cannot be offloaded: its step changes {name}, a tensor of "
                    f"{tensor.numel()} elements that is not the state of a parameter, and which each bucket's step "
                    "would change again"
                )

    def _roots(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._optimizer).items():
            if name not in _TORCH_ATTRIBUTES and name not in REPLACED_METHODS:
                yield f"its attribute {name!r}", value
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"param_groups[{number}][{key!r}]", value
        for name, place, key in self._variables:
            yield name, _variable(place, key)

    def _snapshot_value(self, name: str, value: Any, depth: int) -> None:
        if type(value) is int and value in self._params:
            self.refers_to_params = True
        if isinstance(value, ATOMS) or id(value) in self._contents or depth > _MAX_DEPTH:
            return
        if value is self._optimizer:
            return
        if isinstance(value, torch.nn.Module):
            raise NotSeparableError(
                f"{type(self._optimizer).__name__} cannot be offloaded: it holds a module ({name}, of class "
                f"{type(value).__name__}) and may step parameters through it. Remedy: an optimizer that reaches "
                "parameters only through its groups"
            )
        if isinstance(value, torch.optim.Optimizer):
            raise NotSeparableError(
                f"{type(self._optimizer).__name__} cannot be offloaded: it passes its steps on to another optimizer "
                f"({name}, of class {type(value).__name__}). Remedy: offload that one, and make a "
                f"{type(self._optimizer).__name__} of what offload_optimizer() returns"
            )
        if isinstance(value, torch.Tensor):
            if id(value) in self._params:
                self.refers_to_params = True
            elif value.requires_grad or value.numel() > _LARGE_NUMEL:
                self._large.append((name, value, value._version))
            elif type(value) is torch.Tensor:
                self._contents[id(value)] = value, value.clone()
            return
        content = _content(value)
        if content is not None:
            if len(self._contents) >= _MAX_OBJECTS:
                raise NotSeparableError(
                    f"{type(self._optimizer).__name__} cannot be offloaded: more than {_MAX_OBJECTS} objects can be "
                    f"reached from {name}, and a step may change any of them"
                )
            self._contents[id(value)] = value, content
        for member in _members(value):
            self._snapshot_value(name, member, depth + 1)

    def _snapshot_containers(self) -> None:
        """Record the dicts of attributes and groups themselves, because a step may add and delete their entries."""
        own = vars(self._optimizer)
        kept = {
            name: value
            for name, value in own.items()
            if name not in (*_TORCH_ATTRIBUTES, *REPLACED_METHODS)
        }
        self._contents[id(own)] = own, kept
        for group in self._optimizer.param_groups:
            kept = {key: value for key, value in group.items() if key != "params"}
            self._contents[id(group)] = group, kept
        for _, place, name in self._variables:
            number = _variable(place, name)
            if isinstance(number, ATOMS):
                self._variable_values.append((place, name, number))


def _variables_of(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Yield the variables in which a class or its functions may count: a description, the container and the name."""
    for each in _own_classes(kind):
        for name, value in vars(each).items():
            if not name.startswith("__") and type(value) in _COUNTERS:
                yield f"its class's attribute {name!r}", each, name
    seen: set[Any] = set()
    for function in _functions_of(kind):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        places: list[tuple[Any, str]] = [(cell, name) for name, cell in cells]
        places += [(function.__globals__, name) for name in function.__code__.co_names]
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        places += [
            ({f"default {name}": each}, f"default {name}") for name, each in defaults.items()
        ]
        for place, name in places:
            if type(_variable(place, name)) in _COUNTERS and (id(place), name) not in seen:
                seen.add((id(place), name))
                yield f"the variable {name!r} that it uses", place, name


def _own_classes(kind: type) -> Iterator[type]:
    """Yield a class and its bases below torch.optim.Optimizer."""
    return itertools.takewhile(lambda each: each is not torch.optim.Optimizer, kind.__mro__)


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield a class's functions and the functions that they wrap, except torch's."""
    for each in _own_classes(kind):
        for value in vars(each).values():
            while isinstance(value, types.FunctionType):
                if not str(value.__globals__.get("__name__")).startswith("torch."):
                    yield value
                value = getattr(value, "__wrapped__", None)


def _variable(place: Any, name: str) -> Any:
    """Return the value of a global variable, a class's attribute or a closure cell, or None if it has none."""
    if isinstance(place, (dict, type)):
        return (place if isinstance(place, dict) else vars(place)).get(name)
    return next(iter(_in_cell(place)), None)


def _content(value: Any) -> Any:
    """Return a copy of an object's contents if they can be restored, else None."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, set, deque)):
        return type(value)(value) if type(value) in (list, set) else list(value)
    if _is_plain_object(value):
        return dict(vars(value))
    return None


def _members(value: Any) -> Iterable[Any]:
    """Return the objects that are directly reachable from an object."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [*(each for cell in cells for each in _in_cell(cell)), *(value.__defaults__ or ())]
    return list(vars(value).values()) if _is_plain_object(value) else ()


def _in_cell(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # an empty cell
        return []


def _is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not str(getattr(type(value), "__module__", "")).startswith(_SKIPPED)
        and not isinstance(value, (type, types.ModuleType, types.FunctionType, torch.Tensor))
        and not callable(getattr(type(value), "__get__", None))
    )


def _restore_contents(held: Any, content: Any) -> None:
    if isinstance(held, torch.Tensor):
        if not same_bits(held, content):
            with torch.no_grad():
                held.copy_(content)
    elif isinstance(held, torch.Generator):
        held.set_state(content)
    elif isinstance(held, (dict, list)) or _is_plain_object(held):
        now = held if isinstance(held, (dict, list)) else vars(held)
        if isinstance(now, list):
            now[:] = content
            return
        kept = {name: now[name] for name in _keys_to_leave(now) if name in now}
        if len(now) == len(content) + len(kept) and all(
            key in now and now[key] is value for key, value in content.items()
        ):
            return
        now.clear()
        now.update(content)
        now.update(kept)
    else:
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(content)


def _keys_to_leave(now: dict[Any, Any]) -> tuple[str, ...]:
    """Return the keys of an optimizer's or a group's dict that a snapshot does not restore."""
    if "params" in now:
        return ("params",)
    return (*_TORCH_ATTRIBUTES, *REPLACED_METHODS) if "param_groups" in now else ()


def _frozen(value: Any, memo: dict[int, int], params: set[int], depth: int) -> Any:
    if isinstance(value, ATOMS):
        return value
    if id(value) in memo or depth > _MAX_DEPTH:
        return "again", memo.get(id(value))
    memo[id(value)] = len(memo)
    if isinstance(value, torch.Tensor):
        if id(value) in params or value.requires_grad or value.numel() > _LARGE_NUMEL:
            return "at", id(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return type(value).__name__, value.dtype, tuple(value.shape)
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()

    def inner(each: Any) -> Any:
        return _frozen(each, memo, params, depth + 1)

    if isinstance(value, dict):
        return {
            key if isinstance(key, (*ATOMS, tuple)) else id(key): inner(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *map(inner, value)]
    if isinstance(value, (set, frozenset)):
        return set(value)
    if _is_plain_object(value):
        return type(value).__name__, {key: inner(each) for key, each in vars(value).items()}
    return "is", id(value)


class RngSnapshot:
    """The states of the global random number generators of torch, Python and NumPy at one moment."""

    def __init__(self) -> None:
        # NumPy's generator counts only if the process has imported numpy.random.
        self._numpy: Any = sys.modules.get("numpy.random")
        self._before = self._now()

    def _now(self) -> tuple[Any, ...]:
        of_numpy = () if self._numpy is None else self._numpy.get_state()
        return torch.get_rng_state(), random.getstate(), of_numpy

    def has_changed(self) -> bool:
        """Return whether any random number has been drawn since the snapshot."""
        (torchs, pythons, numpys), now = self._before, self._now()
        return (
            not torch.equal(torchs, now[0])
            or pythons != now[1]
            or any(
                bool((one != other).any() if hasattr(one, "any") else one != other)
                for one, other in zip(numpys, now[2], strict=True)
            )
        )

    def restore(self) -> None:
        """Restore the generators, so the same numbers are drawn again."""
        torch.set_rng_state(self._before[0])
        random.setstate(self._before[1])
        if self._numpy is not None:
            self._numpy.set_state(self._before[2])


def frozen(value: Any) -> Any:
    """Return a copy of a value and of its contents, for a comparison."""
    return _frozen(value, {}, set(), 0)


def differing(left: Any, right: Any) -> str | None:
    """Return the name of the first value in which two results of :meth:`Snapshot.frozen` differ, or None."""
    for name in (*left, *(name for name in right if name not in left)):
        if name not in left or name not in right or not same(left[name], right[name]):
            return str(name)
    return None


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal; tensors and floating-point numbers are compared bit for bit."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and same_bits(left, right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)) and isinstance(right, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    return bool(left == right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape have the same bytes: NaN equals NaN, 0.0 is not -0.0."""
    if left.device.type == "meta" or right.device.type == "meta":
        return left.device == right.device
    return torch.equal(tensor_bytes(left.contiguous()), tensor_bytes(right.contiguous()))


def reaches_tensor(value: Any) -> bool:
    """Return whether a tensor is reachable from an object."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_OBJECTS:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            return True
        if not isinstance(each, ATOMS) and id(each) not in seen:
            seen.add(id(each))
            left += _members(each)
    return False
