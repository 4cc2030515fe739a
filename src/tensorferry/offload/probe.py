"""What an optimizer's step does to its parameters, found by trying it on small ones and never assumed.

A step is *separable* if each parameter's update depends on that parameter, its gradient, its state and its group's
values alone: then parameters may be stepped one after the other, and their state need not be in memory together. It is
*element-wise* if the same holds for every element: then a parameter may be cut anywhere.

The probe steps a twin of the optimizer, of the same class with the same values, on some hundred thousand elements:
together, each by itself, and in pieces. What is equal bit for bit is taken as equal.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.arrays import tensor_bytes
from tensorferry.offload.errors import NotSeparableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

# Pieces begin at multiples of this many elements: whole pages, whatever the dtype, and no vector unit's tail within.
GRANULE = 4096

# Gradients become smaller, and larger than all before: some are limited by what has been (StableAdamW, AdaNorm). More
# steps follow, since some begin otherwise than they go on (RAdam's first five do not adapt, or change nothing at all).
_POWERS = (0, -1, 1, 0, 0, 0, 0, 0)
_STEPS = len(_POWERS)

_SHAPES = {0: (), 1: (7680,), 2: (60, 128), 3: (8, 20, 48), 4: (8, 4, 5, 48)}
_CUTS = (0, GRANULE, None)

# Kernels of torch's round the elements that do not fill a vector otherwise than the rest, for bfloat16 for one, and
# such are wherever a thread ends. Pieces of odd lengths show it.
_ODD_CUTS = (*range(0, 7680, 509), None)

# Fused kernels let threads end at cache lines, so that cutting at granules is safe all the same. That is tried with
# enough elements for several threads (32,768 each), of a length that no number of threads divides into vectors.
_LARGE = (131101,)
_CUTS_OF_LARGE = (0, GRANULE, 11 * GRANULE, None)

_SMALL_ELEMENTS = 64

# What the constructor makes of this shape has the parameter's; it is no likely shape of anything else.
_EXAMPLE_SHAPE = (3,)

# Classes of tensors whose elements are all there is of them.
_CLASSES = (torch.Tensor, torch.nn.Parameter)

# What a group is tried with while its rate is smaller, as at the beginning of a warm-up: nothing would move.
_RATE = 1e-3

# How large the elements of parameters are, one after the other: what a step does is rounded away where they are large.
_MAGNITUDES = (1.0, 1.0, 1e-1, 1.0, 1e-2, 1e-4, 1e-6, 0.0)

# What users registered is called for the wrapper, once a step, not for pieces.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


# Attributes that every optimizer has: they are replaced, or are not of the step.
_OF_TORCH = ("defaults", "state", "param_groups", *HOOKS)

_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class _Member(NamedTuple):
    """A group with one small parameter, and its gradients."""

    group: dict[str, Any]
    param: torch.Tensor
    grads: list[torch.Tensor]


class Behaviour(NamedTuple):
    """How the parameters of a group may be stepped.

    ``element_state`` has, for each entry of an element-wise optimizer's state in its order, the dtype of what has an
    element for each of the parameter's, and None for anything else. It is None where parameters must stay whole.
    """

    element_state: dict[str, torch.dtype | None] | None


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer that steps as another does, with groups of its own, no state and no hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({name: _contained(value) for name, value in vars(optimizer).items()})
    for hooks in HOOKS:
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def _contained(value: Any) -> Any:
    """Return an attribute whose containers a twin may change; what they contain is shared."""
    if isinstance(value, list) and type(value) is list:
        return [_contained(each) for each in value]
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _contained(each) for key, each in value.items()})
        return copied
    return copy.copy(value) if isinstance(value, set) else value


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def bare_step(optimizer: Optimizer) -> None:
    """Step an optimizer without the profiler's entry and the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values, all but its parameters; what could be changed in place is copied."""
    return {
        key: value.clone()
        if isinstance(value, torch.Tensor)
        else value
        if isinstance(value, (int, float, str, tuple, type(None)))
        else copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _moving(values: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values with a rate at which steps can be told apart, if it has none."""
    rate = values.get("lr")
    if isinstance(rate, torch.Tensor) and rate.numel() == 1 and abs(rate.item()) < _RATE:
        values["lr"] = torch.full_like(rate, _RATE)
    elif isinstance(rate, (int, float)) and abs(rate) < _RATE:
        values["lr"] = _RATE
    return values


def scalars_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return those of an optimizer's own attributes that a step may count in."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, float, str, type(None)))
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal, tensors bit for bit."""
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
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, deque) and isinstance(right, deque):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bytes: NaNs are equal, 0.0 and -0.0 are not."""
    return torch.equal(tensor_bytes(left.contiguous()), tensor_bytes(right.contiguous()))


class Probe:
    """Finds out how an optimizer may be stepped. What it has found of one group serves others like it."""

    def __init__(self, optimizer: Optimizer, *, on_host: bool = False) -> None:
        self._optimizer = optimizer
        self._on_host = on_host
        self._name = type(optimizer).__name__
        self._refuse_other_holders()
        self._known: dict[Any, Behaviour] = {}
        self._known_states: dict[Any, Any] = {}
        self._known_elements: dict[Any, bool] = {}
        # Whether it steps parameters that have no gradient, too.
        self.steps_all = False
        # Adagrad's constructor makes state, and its step wants it: what it is for an example. Kept, since the
        # optimizer's own is given away.
        self._example = torch.zeros(_EXAMPLE_SHAPE)
        self._begun = _begun_for(self._example, optimizer)

    def _refuse_other_holders(self) -> None:
        """Refuse an optimizer that reaches its parameters by other ways than its groups: it would step them all.

        Raises
        ------
        NotSeparableError
            The way.
        """
        own = {id(param) for group in self._optimizer.param_groups for param in group["params"]}
        for name, value in vars(self._optimizer).items():
            if isinstance(value, torch.optim.Optimizer):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: it hands its steps to another optimizer (its attribute "
                    f"{name!r}, of class {type(value).__name__}). What would help: offload that one, and make a "
                    f"{self._name} of what offload_optimizer() returns"
                )
            if name in ("param_groups", "state", "defaults") or not isinstance(
                value, (list, tuple, dict)
            ):
                continue
            if any(id(leaf) in own for leaf in _pytree.tree_leaves(value)):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: it keeps parameters in its attribute {name!r}, and may step "
                    "them whatever its groups have"
                )

    def behaviour(
        self, group: dict[str, Any], params: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Behaviour:
        """Return how parameters of a group, of one dtype, may be stepped.

        Raises
        ------
        NotSeparableError
            They cannot be stepped one by one, or not at all.
        """
        dimensions = sorted({param.dim() for param in params})
        key = (pattern(group, numbers=True), dtype, params[0].device, tuple(dimensions))
        if key not in self._known:
            shapes = [_shape_of(dimension) for dimension in dimensions]
            self._known[key] = self._try(group, shapes, dtype, params[0])
        return self._known[key]

    def has_elements(
        self,
        group: dict[str, Any],
        param: torch.Tensor,
        dtype: torch.dtype,
        state: dict[str, torch.dtype | None],
    ) -> bool:
        """Return whether a parameter of this very shape has the state that small ones have, as far as can be told."""
        key = (pattern(group, numbers=True), dtype, param.shape)
        if key not in self._known_elements:
            small = param.numel() <= _LARGE[0]
            try:
                found = self._state_on(param.device if small else "meta", group, param, dtype)
            except Exception:  # it needs values
                self._known_elements[key] = True
            else:
                self._known_elements[key] = tuple(found) == tuple(state) and all(
                    leaf_dtype is None
                    or (found[name].shape, found[name].dtype) == (param.shape, leaf_dtype)
                    for name, leaf_dtype in state.items()
                )
        return self._known_elements[key]

    def check_together(self, groups: Sequence[dict[str, Any]]) -> None:
        """Try whether a group's step depends on another group's values.

        Raises
        ------
        NotSeparableError
            It does.
        """
        groups = [group for group in groups if group["params"]]
        if len(groups) < 2:
            return
        make = torch.Generator().manual_seed(8)
        scratch = []
        for group in (groups[0], groups[-1]):
            example = group["params"][0]
            device = "cpu" if self._on_host else example.device
            shape = _shape_of(example.dim())
            values = [_random(shape, example.dtype, make).to(device) for _ in range(1 + _STEPS)]
            scratch.append(_Member(group, _of_magnitudes(values[0]), values[1:]))
        for one, own in (scratch, scratch[::-1]):
            other = one._replace(group=_others_like(one.group))
            try:
                alone = self._run_groups([own])[0]
                beside = self._run_groups([other, own])[1]
                behind = self._run_groups([own, other])[0]
            except (
                Exception
            ):  # values that do not go together; each group by itself is tried elsewhere
                return
            if not same(alone, beside) or not same(alone, behind):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded exactly: its step of one group depends on another group's values"
                )

    def state_of(self, group: dict[str, Any], param: torch.Tensor, dtype: torch.dtype) -> Any:
        """Return what a parameter's state looks like after some steps: with tensors whose values mean nothing.

        Where the optimizer lets it, on torch's meta device, so that it takes no memory.

        Raises
        ------
        NotSeparableError
            It does not step a parameter of this shape.
        """
        key = (pattern(group, numbers=True), dtype, param.device, param.shape, param.stride())
        if key not in self._known_states:
            try:
                state = self._state_on("meta", group, param, dtype)
            except Exception:  # whatever an optimizer does that needs values
                device = "cpu" if self._on_host else param.device
                try:
                    state = self._state_on(device, group, param, dtype)
                except Exception as error:
                    raise NotSeparableError(
                        f"{self._name} cannot be offloaded: a step of it on a parameter of shape {tuple(param.shape)} "
                        f"raised {type(error).__name__}: {error}"
                    ) from error
            self._known_states[key] = _pytree.tree_map(
                lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, state
            )
        return self._known_states[key]

    def _state_on(
        self, device: Any, group: dict[str, Any], param: torch.Tensor, dtype: torch.dtype
    ) -> Any:
        scratch = torch.nn.Parameter(
            torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=device).zero_()
        )
        twin = self._twin([{**_moving(values_of(group)), "params": [scratch]}])
        self._begin(twin, scratch)
        with torch.device(device):  # for what it makes without looking where the parameter is
            for _ in range(2):
                scratch.grad = torch.zeros_like(scratch)
                bare_step(twin)
        return twin.state[scratch]

    def _try(
        self,
        group: dict[str, Any],
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        example: torch.Tensor,
    ) -> Behaviour:
        make = torch.Generator().manual_seed(7)

        def some(shape: tuple[int, ...], scale: float) -> torch.Tensor:
            device = "cpu" if self._on_host else example.device
            return _random(shape, dtype, make, scale).to(device)

        # Two of each shape, with gradients of different sizes: what depends on all of them shows.
        # One of them lies on its side: what depends on the proportions shows, too.
        shapes = [shape for each in shapes for shape in (each, each[::-1])]
        params = [_of_magnitudes(some(shape, 0.5)) for shape in shapes]
        grads = [
            [some(shape, 10.0 ** (index + power)) for index, shape in enumerate(shapes)]
            for power in _POWERS
        ]
        # What some do only where a gradient is at right angles to its parameter (AdamP) must show, too.
        grads[0] = [
            _turned(param) * 10.0**index if param.dim() else grads[0][index]
            for index, param in enumerate(params)
        ]

        random_before = torch.get_rng_state()
        try:
            whole, whole_values = self._run(group, params, grads)
            again, _ = self._run(group, params, grads)
            apart, _ = self._run(group, params, grads, apart=True)
        except NotSeparableError:
            raise
        except Exception as error:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: a step of it on {len(shapes)} small parameters, without a closure "
                f"and with dense gradients, raised {type(error).__name__}: {error}"
            ) from error
        if not torch.equal(torch.get_rng_state(), random_before):
            torch.set_rng_state(random_before)
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: its step draws random numbers, so that the result depends on the "
                "order in which parameters are stepped"
            )
        if not same(whole, again):
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: its step gives another result each time (fused SGD of some "
                "releases of torch does so with bfloat16: it reads memory that nobody has set)"
            )
        for index in range(len(params)):
            alone, values = self._run(
                group, params[index : index + 1], [at[index : index + 1] for at in grads]
            )
            differing = _differing(whole_values, values)
            if differing is not None:
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded exactly: {differing} depends on the gradients of several "
                    "parameters at once. What would help: an optimizer whose step treats each parameter by itself"
                )
            if not same(whole[index], alone[0]):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded exactly: a parameter stepped by itself differs from the same "
                    "stepped together with others"
                )
        if not same(whole, apart):
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: it depends on how often it has stepped, or what, by "
                f"attributes that are no plain numbers ({', '.join(self._changeable(self._optimizer))})"
            )
        self.steps_all |= self._steps_without_gradients(group, params, grads)
        found = self._in_pieces(group, params, grads, whole, _ODD_CUTS)
        if found is None and group.get("fused"):
            found = self._in_pieces(group, params, grads, whole, _CUTS)
        if found is not None:
            large = [_of_magnitudes(some(_LARGE, 0.5))]
            large_grads = [[some(_LARGE, 10.0**power)] for power in _POWERS]
            whole, _ = self._run(group, large, large_grads)
            of_large = self._in_pieces(group, large, large_grads, whole, _CUTS_OF_LARGE)
            found = of_large if of_large == found or not found else None
        return Behaviour(found)

    def _in_pieces(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[list[torch.Tensor]],
        whole: list[tuple[torch.Tensor, Any]],
        cuts: Sequence[int | None],
    ) -> dict[str, torch.dtype | None] | None:
        """Return what is said at Behaviour, by stepping pieces of each parameter."""
        found: list[dict[str, torch.dtype | None]] = []
        for index, param in enumerate(params):
            if param.dim() == 0:  # nothing to cut
                continue
            pieces = []
            for piece in map(slice, cuts, cuts[1:]):
                piece_grads = [[at[index].reshape(-1)[piece]] for at in grads]
                try:
                    stepped, _ = self._run(group, [param.reshape(-1)[piece]], piece_grads)
                except Exception:  # it wants matrices, say
                    return None
                pieces.append(stepped[0])
            param_whole, state_whole = whole[index]
            joined = torch.cat([piece for piece, _ in pieces]).view(param_whole.shape)
            states = [state for _, state in pieces]
            if not same(joined, param_whole):
                return None
            kinds = _element_state(state_whole, states, param_whole)
            if kinds is None:
                return None
            found.append(kinds)
        if not found:
            return {}
        return found[0] if all(kinds == found[0] for kinds in found) else None

    def _run(
        self,
        group: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[Sequence[torch.Tensor]],
        *,
        apart: bool = False,
    ) -> tuple[list[tuple[torch.Tensor, Any]], dict[str, Any]]:
        """Step copies of parameters; return them with their states, and the group's and optimizer's values.

        With ``apart`` they are stepped one after the other, as if each was in a bucket of its own.
        """
        copies = [torch.nn.Parameter(param.clone()) for param in params]
        twin = self._twin([{**_moving(values_of(group)), "params": copies}])
        for param in copies:
            self._begin(twin, param)
        for step_grads in grads:
            for param, grad in zip(copies, step_grads, strict=True):
                param.grad = None if grad is None else grad.clone()
            if not apart:
                bare_step(twin)
                continue
            before, numbers = values_of(twin.param_groups[0]), scalars_of(twin)
            for param in copies:
                vars(twin).update(numbers)
                twin.param_groups = [{**values_of(before), "params": [param]}]
                bare_step(twin)
            twin.param_groups[0]["params"] = copies
        values = {
            **{f"its attribute {name!r}": value for name, value in scalars_of(twin).items()},
            **{f"its group's {key!r}": v for key, v in values_of(twin.param_groups[0]).items()},
        }
        shared = [key for key in twin.state if not isinstance(key, torch.Tensor)]
        if shared:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: it has state of no parameter, {shared[0]!r}, which would change "
                "with every piece of a step"
            )
        for param in copies:
            self._refuse_classes(twin.state[param])
        return [(param.detach(), twin.state[param]) for param in copies], values

    def _run_groups(self, members: Sequence[_Member]) -> list[Any]:
        """Step one parameter of each of several groups; return them with their states."""
        copies = [torch.nn.Parameter(param.clone()) for _, param, _ in members]
        twin = self._twin(
            [
                {**_moving(values_of(group)), "params": [param]}
                for (group, _, _), param in zip(members, copies, strict=True)
            ]
        )
        for param in copies:
            self._begin(twin, param)
        for step in range(_STEPS):
            for param, (_, _, grads) in zip(copies, members, strict=True):
                param.grad = grads[step].clone()
            bare_step(twin)
        return [(param.detach(), twin.state[param]) for param in copies]

    def _steps_without_gradients(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[list[torch.Tensor]],
    ) -> bool:
        without: list[list[Any]] = [[None, *at[1:]] for at in grads]
        try:
            (param, state), *_ = self._run(group, params, without)[0]
        except Exception:  # then it does in memory, too
            return False
        return not same(param, params[0]) or (bool(state) and self._begun is None)

    def _twin(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return a twin that can change nothing of the optimizer's."""
        twin = twin_of(self._optimizer, groups)
        for name in self._changeable(twin):
            vars(twin)[name] = copy.deepcopy(vars(twin)[name])
        return twin

    def _changeable(self, optimizer: Optimizer) -> list[str]:
        """Return the names of its own attributes that a step may change in place, as far as they can be compared."""
        return [
            name
            for name, value in vars(optimizer).items()
            if name not in _OF_TORCH and _is_plain(value)
        ]

    def _refuse_classes(self, state: Any) -> None:
        paths, _ = _pytree.tree_flatten_with_path(state)
        for path, leaf in paths:
            if isinstance(leaf, torch.Tensor) and type(leaf) not in _CLASSES:
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: state{_pytree.keystr(path)} is a {type(leaf).__name__}, and "
                    "only plain tensors can be stored"
                )

    def _begin(self, twin: Optimizer, scratch: torch.Tensor) -> None:
        """Give a scratch parameter the state that the optimizer gave its own when it was made, if it does so."""
        if self._begun is not None:
            twin.state[scratch] = _begun_like(self._begun, self._example, scratch)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that is no parameter, or a container of such and of numbers."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad and value.numel() <= _LARGE[0]
    if type(value) in (list, set, deque):
        return all(type(each) in _SCALARS or _is_plain(each) for each in value)
    if type(value) in (dict, defaultdict, OrderedDict):
        return all(
            type(key) in _SCALARS and (type(each) in _SCALARS or _is_plain(each))
            for key, each in value.items()
        )
    return False


def _others_like(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with other values."""

    def other(value: Any) -> Any:
        if isinstance(value, float) or (
            isinstance(value, torch.Tensor) and value.is_floating_point()
        ):
            return value * 0.5
        return tuple(map(other, value)) if isinstance(value, tuple) else value

    return {key: other(value) for key, value in _moving(values_of(group)).items()}


def _begun_like(state: dict[str, Any], param: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    """Return a state as an optimizer's constructor made it for one parameter, for another one."""

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if leaf.shape != param.shape or leaf.dim() == 0:
            return leaf.clone()
        first = leaf.reshape(-1)[:1].item() if leaf.numel() else 0
        return torch.full_like(other, first, dtype=leaf.dtype, requires_grad=False)

    return {key: _pytree.tree_map(like, value) for key, value in state.items()}


def _begun_for(example: torch.Tensor, optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the state that an optimizer's constructor gives a parameter like the example; None if it gives none."""
    if not optimizer.state:
        return None
    scratch = torch.nn.Parameter(example.clone())
    try:
        made: Any = type(optimizer)([scratch])  # type: ignore[call-arg]
    except Exception:  # arguments that have no default
        return None
    if not made.state:
        return None
    begun = [
        (local_of(param), _pytree.tree_map_only(torch.Tensor, local_of, state))
        for param, state in optimizer.state.items()
    ]
    param, state = next((each for each in begun if each[0].dim() and each[0].numel()), begun[0])
    if param.dim():
        return _begun_like(state, param, example)
    # Of one without dimensions it tells nothing that a value has its shape, but what was just made does.
    of_scratch = made.state[scratch]
    return {
        key: leaf.expand(_EXAMPLE_SHAPE).clone()
        if isinstance(leaf, torch.Tensor)
        and isinstance(of_scratch.get(key), torch.Tensor)
        and of_scratch[key].shape == _EXAMPLE_SHAPE
        else copy.deepcopy(leaf)
        for key, leaf in state.items()
    }


def pattern(group: dict[str, Any], *, numbers: bool = False) -> tuple[Any, ...]:
    """Return what of a group's values may decide which state there is: not how large a rate is, but whether it is 0.

    Of integers it is the same, unless all ``numbers`` are to be told apart: some optimizers count in their groups.
    """
    return tuple(
        (key, _kind(value, numbers))
        for key, value in sorted(group.items())
        if key not in ("params", "param_names", "lr", "initial_lr")
    )


def _kind(value: Any, numbers: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_kind(each, numbers) for each in value)
    if isinstance(value, torch.Tensor):
        return bool(value.any()) if value.device.type == "cpu" else True
    zero = isinstance(value, float) or (isinstance(value, int) and not numbers)
    return bool(value) if zero else repr(value)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, make: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    full = torch.complex64 if dtype.is_complex else torch.float32
    return (torch.randn(shape, generator=make, dtype=full) * scale).to(dtype)


def _of_magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements have all magnitudes, of the parameter's own down to none."""
    scales = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=tensor.device)
    repeated = scales.repeat(-(-tensor.numel() // len(scales)))[: tensor.numel()]
    return (tensor * repeated.view(tensor.shape)).to(tensor.dtype)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose every row is at right angles to another's."""
    pairs = tensor.reshape(-1, 2)
    return torch.stack((pairs[:, 1], -pairs[:, 0]), 1).reshape(tensor.shape)


def _shape_of(dimensions: int) -> tuple[int, ...]:
    return _SHAPES.get(dimensions, (*_SHAPES[4], *(1,) * (dimensions - 4)))


def _differing(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    return next((key for key in left if not same(left[key], right.get(key))), None)


def _element_state(
    whole: dict[str, Any], pieces: list[dict[str, Any]], param: torch.Tensor
) -> dict[str, torch.dtype | None] | None:
    """Return which entries of a state have an element for each of the parameter's; None where some fit neither way."""
    kinds: dict[str, torch.dtype | None] = {}
    for key, value in whole.items():
        in_pieces = [piece.get(key) for piece in pieces]
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0:
            if not all(isinstance(piece, torch.Tensor) and piece.dim() == 1 for piece in in_pieces):
                return None
            if not same(
                value.reshape(-1), torch.cat([piece for piece in in_pieces if piece is not None])
            ):
                return None
            kinds[key] = value.dtype
        else:
            small = not isinstance(value, torch.Tensor) or value.numel() <= _SMALL_ELEMENTS
            if not small or not all(same(value, piece) for piece in in_pieces):
                return None
            if isinstance(value, (list, tuple, dict)):
                return None
            kinds[key] = None
    return kinds if all(piece.keys() == whole.keys() for piece in pieces) else None
