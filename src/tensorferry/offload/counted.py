"""Everything beside parameters and state that an optimizer may count in: its attributes and its groups' values.

A step is made of many calls of the optimizer, one for each bucket. In memory it is one call. So each call must begin
with the values that the step began with, and all calls must leave the same values: these are the step's. A `Snapshot`
holds the values with which a step began. It follows containers and plain objects, and puts what they contained back in
place, so that whoever holds such an object still has the right one.
"""

from __future__ import annotations

import functools
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

# Hooks are called once for a step, around all of its calls.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Attributes of every torch.optim.Optimizer that are no counters.
_OF_TORCH = {
    *("state", "param_groups", "_zero_grad_profile_name", "_need_device_dtype_check_for_fused"),
    *HOOKS,
}

# Methods that offloading puts on the optimizer itself, in place of its class's.
REPLACED = ("step", "train", "eval", "state_dict", "load_state_dict", "add_param_group")

# Larger tensors are not copied for each bucket. A step that changes one is refused.
_LARGE_NUMEL = 1 << 16

_MAX_DEPTH = 12
_MAX_OBJECTS = 10_000

# Objects of these are no counters, and much can be reached from them.
_SKIPPED = ("logging", "threading", "_thread", "concurrent.futures", "multiprocessing")

ATOMS = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """What an optimizer and its groups have now.

    Raises
    ------
    NotSeparableError
        It holds a module, or another optimizer: what a step does by these cannot be seen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._numbers: list[tuple[Any, str, Any]] = []  # outside of the optimizer: where, and which
        self._large: list[tuple[str, torch.Tensor, int]] = []
        self._params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        #: Whether parameters, or their ids, are among the values: what a step does may differ for each.
        self.knows_params = False
        self._variables = list(_variables_of(type(optimizer)))
        self._note_places()
        for name, root in self._roots():
            self._note(name, root, 0)

    def restore(self) -> None:
        """Have all values as they were, in the objects in which they were."""
        for held, content in self._contents.values():
            _restored(held, content)
        for place, name, number in self._numbers:
            if _variable(place, name) is number:
                continue
            if isinstance(place, dict):
                place[name] = number
            else:
                place.cell_contents = number

    def frozen(self) -> Any:
        """Return all values as they are now, for a comparison."""
        memo: dict[int, int] = {}
        return {name: _frozen(root, memo, self._params, 0) for name, root in self._roots()}

    def check_large(self) -> None:
        """Refuse what a step has changed and is too large to be put back for each bucket.

        Raises
        ------
        NotSeparableError
            It says where the tensor is.
        """
        for name, tensor, version in self._large:
            if tensor._version != version:
                raise NotSeparableError(
                    f"{type(self._optimizer).__name__} cannot be offloaded: its step changes {name}, a tensor of "
                    f"{tensor.numel()} elements that is not the state of a parameter"
                )

    def _roots(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._optimizer).items():
            if name not in _OF_TORCH and name not in REPLACED:
                yield f"its attribute {name!r}", value
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"param_groups[{number}][{key!r}]", value
        for kind in type(self._optimizer).__mro__:
            if kind is torch.optim.Optimizer:
                break
            for name, value in vars(kind).items():
                if not name.startswith("__") and type(value) in (
                    *ATOMS[:4],
                    list,
                    dict,
                    set,
                    deque,
                ):
                    yield f"its class's attribute {name!r}", value
        for name, place, key in self._variables:
            yield name, _variable(place, key)

    def _note(self, name: str, value: Any, depth: int) -> None:
        if type(value) is int and value in self._params:
            self.knows_params = True
        if isinstance(value, ATOMS) or id(value) in self._contents or depth > _MAX_DEPTH:
            return
        if value is self._optimizer:
            return
        if isinstance(value, torch.nn.Module):
            raise NotSeparableError(
                f"{type(self._optimizer).__name__} cannot be offloaded: it holds a module ({name}, of class "
                f"{type(value).__name__}), and may step parameters by it. What would help: an optimizer that knows "
                "parameters by its groups alone"
            )
        if isinstance(value, torch.optim.Optimizer):
            raise NotSeparableError(
                f"{type(self._optimizer).__name__} cannot be offloaded: it hands its steps to another optimizer "
                f"({name}, of class {type(value).__name__}). What would help: offload that one, and make a "
                f"{type(self._optimizer).__name__} of what offload_optimizer() returns"
            )
        if isinstance(value, torch.Tensor):
            if id(value) in self._params:
                self.knows_params = True
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
            self._note(name, member, depth + 1)

    def _note_places(self) -> None:
        """Note the dicts of attributes and groups themselves, which gain and lose entries in steps."""
        own = vars(self._optimizer)
        kept = {name: value for name, value in own.items() if name not in (*_OF_TORCH, *REPLACED)}
        self._contents[id(own)] = own, kept
        for group in self._optimizer.param_groups:
            kept = {key: value for key, value in group.items() if key != "params"}
            self._contents[id(group)] = group, kept
        for kind in type(self._optimizer).__mro__:
            if kind is torch.optim.Optimizer:
                break
            kept = {
                name: value
                for name, value in vars(kind).items()
                if not name.startswith("__") and type(value) in (bool, int, float, complex)
            }
            if kept:
                self._contents[id(kind)] = kind, kept
        for _, place, name in self._variables:
            number = _variable(place, name)
            if isinstance(number, ATOMS):
                self._numbers.append((place, name, number))


def _variables_of(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Yield the variables that a class's own functions may count in: where each is, and its name there."""
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
            is_counter = type(_variable(place, name)) in (*ATOMS[:4], list, dict, set, deque)
            if is_counter and (id(place), name) not in seen:
                seen.add((id(place), name))
                yield f"the variable {name!r} that it uses", place, name


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield a class's functions, and those around them, but for torch's."""
    for each in kind.__mro__:
        if each is torch.optim.Optimizer:
            return
        for value in vars(each).values():
            while isinstance(value, types.FunctionType):
                if not str(value.__globals__.get("__name__")).startswith("torch."):
                    yield value
                value = getattr(value, "__wrapped__", None)


def _variable(place: Any, name: str) -> Any:
    """Return the value of a global variable, or what is in a cell; None where there is none."""
    if isinstance(place, dict):
        return place.get(name)
    return next(iter(_in_cell(place)), None)


def _content(value: Any) -> Any:
    """Return a copy of what an object contains, if that can be put back."""
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
    """Return what can be reached from an object."""
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
    except ValueError:  # it is empty
        return []


def _is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not str(getattr(type(value), "__module__", "")).startswith(_SKIPPED)
        and not isinstance(value, (type, types.ModuleType, types.FunctionType, torch.Tensor))
        and not callable(getattr(type(value), "__get__", None))
    )


def _restored(held: Any, content: Any) -> None:
    if isinstance(held, torch.Tensor):
        if not same_bits(held, content):
            with torch.no_grad():
                held.copy_(content)
    elif isinstance(held, torch.Generator):
        held.set_state(content)
    elif isinstance(held, type):
        for name, value in content.items():
            if vars(held).get(name) is not value:
                setattr(held, name, value)
    elif isinstance(held, (dict, list)) or _is_plain_object(held):
        now = held if isinstance(held, (dict, list)) else vars(held)
        if isinstance(now, list):
            now[:] = content
            return
        kept = {name: now[name] for name in _not_counted(now) if name in now}
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


def _not_counted(now: dict[Any, Any]) -> tuple[str, ...]:
    """Return the entries of an optimizer's or a group's dict that a snapshot leaves alone."""
    if "params" in now:
        return ("params",)
    return (*_OF_TORCH, *REPLACED) if "param_groups" in now else ()


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


class Draws:
    """The generators that all share, torch's, Python's and NumPy's, as they are now."""

    def __init__(self) -> None:
        # NumPy's are there only where somebody has used them.
        self._numpy: Any = sys.modules.get("numpy.random")
        self._before = self._now()

    def _now(self) -> tuple[Any, ...]:
        of_numpy = () if self._numpy is None else self._numpy.get_state()
        return torch.get_rng_state(), random.getstate(), of_numpy

    def were_made(self) -> bool:
        """Return whether anything has been drawn since."""
        (torchs, pythons, numpys), now = self._before, self._now()
        return (
            not torch.equal(torchs, now[0])
            or pythons != now[1]
            or any(
                bool((one != other).any() if hasattr(one, "any") else one != other)
                for one, other in zip(numpys, now[2], strict=True)
            )
        )

    def undo(self) -> None:
        """Let all of it be drawn again."""
        torch.set_rng_state(self._before[0])
        random.setstate(self._before[1])
        if self._numpy is not None:
            self._numpy.set_state(self._before[2])


def frozen(value: Any) -> Any:
    """Return a copy of a value and of what it contains, for a comparison."""
    return _frozen(value, {}, set(), 0)


def differing(left: Any, right: Any) -> str | None:
    """Return the name of the first value in which two frozen ones differ."""
    for name in (*left, *(name for name in right if name not in left)):
        if name not in left or name not in right or not same(left[name], right[name]):
            return str(name)
    return None


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal, tensors and floating-point numbers bit for bit."""
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
    """Return whether two tensors of one dtype and shape have the same bytes: NaNs are equal, 0.0 and -0.0 are not."""
    if left.device.type == "meta" or right.device.type == "meta":
        return left.device == right.device
    return torch.equal(tensor_bytes(left.contiguous()), tensor_bytes(right.contiguous()))


def reaches_tensor(value: Any) -> bool:
    """Return whether a tensor can be reached from an object."""
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
