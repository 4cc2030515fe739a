"""What an optimizer's step does to its parameters: read from the operations that it calls, and tried.

A step is *separable* if each parameter's update depends on that parameter, its gradient, its state and the values of
groups and attributes alone: then parameters may be stepped one after the other, and their state need not be in memory
together. It is *element-wise* if the same holds for every element: then a parameter may be cut.

The trial lends the optimizer the user's own parameters, with small data, and steps some of them together and then one
after the other as real steps do: with gradients that come and go, that are large, infinite and NaN. Results must be
equal bit for bit. A parameter may be cut only where the operations of its step are all known to treat each element by
itself (`dryrun`), and pieces of various lengths have arrived at the same bits as the whole.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.offload.counted import (
    ATOMS,
    Draws,
    Snapshot,
    differing,
    frozen,
    reaches_tensor,
    same,
)
from tensorferry.offload.dryrun import MAX_COMPUTED, STEPS, Traced, dry_run, same_trace
from tensorferry.offload.errors import NotSeparableError
from tensorferry.offload.lending import Lender, class_method
from tensorferry.offload.plan import GRANULE, SMALL_NBYTES, flatten, local_of, names_in
from tensorferry.offload.states import CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Powers of ten of gradients in the steps of a trial. They become smaller, and larger than all before: some are limited
# by what has been. More steps follow, since some begin otherwise than they go on (RAdam's first five do not adapt).
_POWERS = (0, -1, 1, 0, 0, 4, 0, -6, 0, 0)

# In the last two steps some gradients are infinite, or NaN.
_FIRST_NOT_FINITE = len(_POWERS) - 2

# No parameter of a trial is longer in any dimension: steps that take roots of matrices take long.
_MAX_LENGTHS = {1: 64, 2: 24, 3: 8}
_MAX_TRIED = 24

# How large the elements of parameters are, one after the other: what a step does is rounded away where they are large.
_MAGNITUDES = (1.0, 1.0, 1e-1, 1.0, 1e-2, 1e-4, 1e-6, 0.0)

# What a group is tried with while its rate is smaller, as at the beginning of a warm-up: nothing would move.
_RATE = 1e-3

# Kernels of torch's round the elements that do not fill a vector otherwise than the rest, for bfloat16 for one, and
# such are wherever a thread ends. Pieces of odd lengths show it. Fused kernels let threads end at cache lines; for
# these cutting at granules is tried, with enough elements for several threads (32,768 each).
_CUT_NUMEL, _ODD_CUTS = 7680, (*range(0, 7680, 509), 7680)
_LARGE_NUMEL, _LARGE_CUTS = 131101, (0, GRANULE, 11 * GRANULE, 131101)

# Operations whose pieces were compared in this process, and whether they agreed.
_agreed: dict[int, bool] = {}
_MAX_AGREED = 1000


class Probe:
    """Finds out how an optimizer may be stepped.

    Raises
    ------
    NotSeparableError
        It may do what cannot be seen.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lender: Lender) -> None:
        self._optimizer = optimizer
        self._lender = lender
        self._name = type(optimizer).__name__
        self._refuse_own_step()
        self._knows_params = Snapshot(optimizer).knows_params
        self._found: dict[Any, Traced] = {}
        self._placed: dict[Any, bool] = {}
        self._pieces: dict[Any, Traced | None] = {}  # of what may be cut, whatever its shape
        #: When parameters may be without a gradient: any time, only from the second step on, or never.
        self.gradients = "any"
        self._shrunk = True
        # The optimizer's own state is given away; what a parameter begins with is kept for later groups.
        self._begun: dict[torch.Tensor, Any] = {}
        self.note_begun(
            {
                param: optimizer.state.get(param)
                for group in optimizer.param_groups
                for param in group["params"]
            }
        )

    def note_begun(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Note what state parameters have already: an optimizer may make it once, and never again."""
        for param, state in states.items():
            if state or param not in self._begun:
                self._begun[param] = _small_state(state or {}, local_of(param))

    def _refuse_own_step(self) -> None:
        step: Any = vars(self._optimizer).get("step")
        while getattr(step, "_wrapped_by_lr_sched", False):
            step = getattr(
                step, "__wrapped__", None
            )  # a scheduler's, which notes that it was called
        own: Any = type(self._optimizer).step
        if step is not None and getattr(step, "__func__", step) is not own:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: a step() was set on this very object, and what it does beside that "
                "of its class cannot be seen. What would help: hooks (register_step_pre_hook), or a class of your own"
            )

    # How parameters are stepped, each by itself

    def behaviour(self, group: dict[str, Any], param: torch.Tensor, dtype: torch.dtype) -> Traced:
        """Return how a parameter of a group is stepped as one of a dtype.

        Raises
        ------
        NotSeparableError
            It cannot be stepped, or its state cannot be stored.
        """
        key = self._key(group, param, dtype)
        if key not in self._found:
            local = local_of(param)
            found = self._tried_dry(param, local.shape, local.stride())
            if found is not None and found.reads:
                # What it does next depends on values: it may skip gradients that are not finite, say. State is what it
                # makes either way.
                other = self._tried_dry(param, local.shape, local.stride(), answer=False)
                if other is not None:
                    found = found._replace(state={**other.state, **found.state})
            if found is None:
                found = Traced(self._stepped_alone(param), False, [])
            self._refuse_state(found.state)
            self._found[key] = found
        return self._found[key]

    def may_be_cut(self, group: dict[str, Any], param: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether a parameter may be stepped in pieces."""
        whole = self.behaviour(group, param, dtype)
        if not whole.pointwise or not local_of(param).numel():
            return False
        values, (_, device, _, _, grad_dtype), *more = self._key(group, param, dtype)
        key = (values, dtype, device, grad_dtype, *more)
        if key not in self._pieces:
            piece = self._tried_dry(param, (GRANULE,), (1,))
            agrees = (
                piece is not None and piece.pointwise and self._pieces_agree(group, param, piece)
            )
            self._pieces[key] = piece if agrees else None
        piece = self._pieces[key]
        return (
            piece is not None
            and same_trace(whole.trace, piece.trace)
            and _cut_alike(whole.state, local_of(param).shape, piece.state)
            and self.acts_on_elements(param)
        )

    def acts_on_elements(self, param: torch.Tensor) -> bool:
        """Return whether the next step of a parameter may be done in pieces, as groups and state are now."""
        local = local_of(param)
        whole = self._tried_dry(param, local.shape, local.stride(), now=True)
        piece = self._tried_dry(param, (GRANULE,), (1,), now=True)
        if whole is None or piece is None:  # it raises: so will the real step
            return True
        return whole.pointwise and piece.pointwise and same_trace(whole.trace, piece.trace)

    def forget(self) -> None:
        """Try all anew: what a step does has changed."""
        self._found.clear()
        self._pieces.clear()

    def _key(self, group: dict[str, Any], param: torch.Tensor, dtype: torch.dtype) -> Any:
        local = local_of(param)
        return (
            pattern(group, numbers=True),
            (dtype, local.device, local.shape, local.stride(), _grad_dtype(param)),
            attributes_of(param),
            id(param) if self._knows_params else None,
            _kind_of(self._begun.get(param)),
        )

    def _tried_dry(
        self,
        param: torch.Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        *,
        answer: bool = True,
        now: bool = False,
    ) -> Traced | None:
        """Step a parameter of this shape without arithmetic: one that moves, or one step as its group is ``now``."""
        target = self._lender.target_of(param)
        device = target.device if target.device.type == "cpu" else torch.device("meta")
        # Its memory is never touched, so that it takes none.
        data = torch.empty_strided(shape, stride, dtype=target.dtype, device=device)
        if (
            data.device != target.device
        ):  # on the device meta: no parameter of the user's can be there
            target = torch.nn.Parameter(data)
            target.__dict__.update(vars(param))
        with self._lent(
            {param: (target, data)}, only=[param], values=False, moving=not now
        ) as optimizer:
            target.grad = torch.empty_like(data, dtype=_grad_dtype(param, target))
            with torch.device(data.device) if data.is_meta else contextlib.nullcontext():
                return dry_run(
                    class_method(optimizer),
                    target,
                    lambda: optimizer.state.get(target, {}),
                    answer=answer,
                    steps=1 if now else STEPS,
                )

    def _stepped_alone(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return the state that a parameter has after two real steps with no movement."""
        target, local = self._lender.target_of(param), local_of(param)
        data = torch.zeros_like(local, dtype=target.dtype, device=target.device)
        with self._lent({param: (target, data)}, only=[param]) as optimizer:
            try:
                for _ in range(2):
                    target.grad = torch.zeros_like(data, dtype=_grad_dtype(param, target))
                    class_method(optimizer)()
            except Exception as error:
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: a step of it on a parameter of shape {tuple(local.shape)} "
                    f"raised {type(error).__name__}: {error}"
                ) from error
            state: dict[Any, Any] = _pytree.tree_map(
                lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf,
                dict(optimizer.state.get(target, {})),
            )
            return state

    def _refuse_state(self, state: dict[Any, Any]) -> None:
        leaves, spec = flatten(state)
        for name, leaf in zip(names_in(spec), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in CLASSES:
                    raise NotSeparableError(
                        f"{self._name} cannot be offloaded: state[{name!r}] is a {type(leaf).__name__}, and only plain "
                        "tensors can be stored"
                    )
            elif not isinstance(leaf, ATOMS) and reaches_tensor(leaf):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: state[{name!r}] is a {type(leaf).__name__} that holds tensors, "
                    "and only tensors in dicts, lists, tuples and deques can be stored"
                )

    # How they are stepped together

    def try_together(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step some parameters together, and one after the other; decide how they are lent.

        Raises
        ------
        NotSeparableError
            The results differ, or the step cannot be tried.
        """
        tried = _chosen(groups)
        why: list[str] = []
        for self.gradients in ("any", "from the first step", "always") if tried else ():
            # Some know of the parameters' shapes.
            for self._shrunk in (True, False):
                try:
                    whole = self._whole(tried)
                except NotSeparableError:
                    raise
                except Exception as error:
                    why.append(
                        f": a step of it on {len(tried)} small parameters, without a closure and with dense gradients, "
                        f"raised {type(error).__name__}: {error}"
                    )
                    continue
                differs = self._differs_apart(tried, whole)
                if differs is None:
                    return
                why.append(f" exactly: {differs}")
                break
        if why:
            why.sort(key=lambda each: not each.startswith(" exactly"))
            raise NotSeparableError(
                f"{self._name} cannot be offloaded{why[0]}. What would help: an optimizer whose step treats each "
                "parameter by itself"
            )

    def _whole(self, tried: Sequence[torch.Tensor]) -> list[Any]:
        """Step parameters together, twice."""
        draws = Draws()
        try:
            whole = self._trial(tried, "together", draws=True)
        finally:
            drawn = draws.were_made()
            draws.undo()
        if drawn:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: its step draws random numbers, so that the result depends on the "
                "order in which parameters are stepped"
            )
        if not same(whole, self._trial(tried, "together")):
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: its step gives another result each time (fused SGD of some "
                "releases of torch does so with bfloat16: it reads memory that nothing has been written to)"
            )
        return whole

    def _differs_apart(self, tried: Sequence[torch.Tensor], whole: list[Any]) -> str | None:
        """Step parameters one after the other; return what differs, or None and lend them so from now on."""
        found: list[str] = []
        for alone in (False, True):
            try:
                apart = self._trial(tried, "alone" if alone else "apart")
            except NotSeparableError as error:
                found.insert(0, str(error))
                continue
            except Exception as error:
                found.append(f"one parameter by itself raised {type(error).__name__}: {error}")
                continue
            if same(whole, apart):
                self._lender.alone = alone
                return None
            left = whole[-1], apart[-1]
            name = differing(*left) if all(isinstance(each, dict) for each in left) else None
            found.insert(
                0,
                f"{name} depends on the gradients of several parameters at once"
                if name is not None
                else "a parameter stepped by itself differs from the same stepped together with others",
            )
        return found[0]

    def acts_apart(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the next step of some parameters may be done one after the other, as all is now."""
        how = "alone" if self._lender.alone else "apart"
        draws = Draws()
        try:
            together, apart = (
                self._trial(params, each, now=True, draws=True) for each in ("together", how)
            )
            return same(together, apart) and not draws.were_made()
        except NotSeparableError:
            return False
        except Exception:  # it does not take such small parameters with this state, or the real step will raise, too
            return True
        finally:
            draws.undo()

    def _trial(
        self,
        tried: Sequence[torch.Tensor],
        how: str,
        *,
        now: bool = False,
        draws: bool = False,
    ) -> list[Any]:
        """Step parameters with small data; return what has become of them, step by step, and the values at the end.

        It is one step of these alone, with groups as they are, if ``now``.
        """
        make = torch.Generator().manual_seed(7)
        lent = {}
        for param in tried:
            target, local = self._lender.target_of(param), local_of(param)
            shape = _shrunk(local.shape) if self._shrunk else tuple(local.shape)
            lent[param] = target, _of_magnitudes(_random(shape, target, make, 0.5))
        results: list[Any] = []
        only = tried if now or self.gradients == "always" else None
        with self._lent(lent, only, draws=draws, moving=not now) as optimizer:
            step = class_method(optimizer)
            all_params = [group["params"] for group in optimizer.param_groups]
            for number, power in enumerate(_POWERS[:1] if now else _POWERS):
                begin = Snapshot(optimizer)
                grads = [
                    self._gradient(at, number, data, _grad_dtype(param, target), power, make)
                    for at, (param, (target, data)) in enumerate(lent.items())
                ]
                targets = [target for target, _ in lent.values()]
                after: Any = None
                for portion in _portions(how, grads):
                    if after is not None:
                        begin.restore()
                    for at, target in enumerate(targets):
                        target.grad = grads[at] if at in portion else None
                    if how == "alone":
                        [at] = portion
                        for group, params in zip(optimizer.param_groups, all_params, strict=True):
                            group["params"] = [each for each in params if each is targets[at]]
                    try:
                        returned = step()
                    except Exception as error:
                        if number < _FIRST_NOT_FINITE:
                            raise
                        # In memory it fails so, too: roots of matrices cannot be taken, say.
                        return [*results, type(error).__name__]
                    begin.check_large()
                    left = {**begin.frozen(), "what step() returns": frozen(returned)}
                    name = None if after is None else differing(after, left)
                    if name is not None:
                        raise NotSeparableError(
                            f"{name} depends on the gradients of several parameters at once"
                        )
                    after = left
                for group, params in zip(optimizer.param_groups, all_params, strict=True):
                    group["params"] = params
                self._refuse_shared_state(optimizer, targets)
                results.append(
                    [
                        (
                            target.detach().clone(),
                            frozen(optimizer.state.get(target, {})),
                        )
                        for target in targets
                    ]
                )
                results.append(after)
        return results

    def _gradient(
        self,
        at: int,
        number: int,
        data: torch.Tensor,
        dtype: torch.dtype,
        power: int,
        make: torch.Generator,
    ) -> torch.Tensor | None:
        """Return a parameter's gradient in a step of a trial."""
        scale = 10.0 ** (power + at % 5)
        grad = _random(tuple(data.shape), data, make, scale).to(dtype)
        if number == 0 and data.dim() and data.numel() % 2 == 0 and not data.is_complex():
            # What some do only where a gradient is at right angles to its parameter (AdamP) shows.
            pairs = data.reshape(-1, 2)
            turned = torch.stack((pairs[:, 1], -pairs[:, 0]), 1).reshape(data.shape)
            grad = (turned * 10.0 ** (at % 5)).to(dtype)
        late = self.gradients == "any" and at % 4 == 1 and number < 3
        goes = self.gradients != "always" and number and (number + at) % 4 == 3
        if late or goes:
            return None
        if (
            grad.is_floating_point()
            and grad.numel()
            and number == _FIRST_NOT_FINITE
            and at % 3 == 0
        ):
            grad.view(-1)[0] = float("inf")
        if grad.is_floating_point() and grad.numel() and number > _FIRST_NOT_FINITE and at % 3 == 2:
            grad.view(-1)[0] = float("nan")
        return grad

    def _refuse_shared_state(
        self, optimizer: torch.optim.Optimizer, targets: Sequence[torch.Tensor]
    ) -> None:
        known = {id(target) for target in targets}
        for key, state in optimizer.state.items():
            if id(key) not in known and state:
                what = (
                    f"no parameter, {key!r}"
                    if not isinstance(key, torch.Tensor)
                    else "parameters without gradients"
                )
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: it has state of {what}, which would change with every piece of "
                    "a step"
                )

    # Gradients that are not placed as their parameter

    def check_placed(self, group: dict[str, Any], param: Any, grad: Any) -> None:
        """Try whether a gradient may be placed as its parameter before the step. All ranks call it alike.

        torch does so where an operation needs it. Some come before, on a sum that is still to be made: a weight decay
        that is added to the gradient is then rounded otherwise.

        Raises
        ------
        NotSeparableError
            It may not.
        """
        key = (pattern(group), param.dtype, param.placements, grad.placements)
        if key not in self._placed:
            self._placed[key] = self._is_placed_first(param, grad)
        if not self._placed[key] or not self.behaviour(group, param, param.dtype).pointwise:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: a gradient is placed {grad.placements} where its parameter "
                f"is placed {param.placements}, and the step does something with it before it is placed so, too. What "
                "would help: grad.redistribute(placements=param.placements) before the step"
            )

    def _is_placed_first(self, param: Any, grad: Any) -> bool:
        from torch.distributed.tensor import DTensor

        mesh, make = param.device_mesh, torch.Generator().manual_seed(3)
        size = 32 * mesh.size()

        def distributed(like: Any, generator: torch.Generator, scale: float = 1.0) -> Any:
            shape = [size, size]
            for dimension, placement in enumerate(like.placements):
                if placement.is_shard():
                    shape[placement.dim % 2] //= mesh.size(dimension)
            local = (torch.randn(shape, generator=generator) * scale).to(param.device, like.dtype)
            return DTensor.from_local(local, mesh, like.placements, run_check=False)

        of_rank = torch.Generator().manual_seed(torch.distributed.get_rank())
        data = distributed(param, make)
        local_of(data).copy_(_of_magnitudes(local_of(data)))
        grads = [distributed(grad, of_rank, 10.0**power) for power in (0, 0, -2, -4)]
        # Before they are used, and not as copies: a copy of a sum that is to be made is that sum.
        placed = [
            local_of(each.redistribute(placements=param.placements)).clone() for each in grads
        ]
        results = []
        for native in (True, False):
            own = torch.nn.Parameter(data.clone() if native else local_of(data).clone())
            with self._lent({param: (own, own.data)}, only=[param]) as optimizer:
                for own.grad in grads if native else placed:
                    class_method(optimizer)()
                state = _pytree.tree_leaves(dict(optimizer.state.get(own, {})))
            results.append([local_of(each) for each in (own.detach(), *state)])
        alike = torch.tensor(int(same(*results)), device=param.device)
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            torch.distributed.all_reduce(alike, torch.distributed.ReduceOp.MIN, group)
        return bool(alike)

    # Pieces

    def _pieces_agree(self, group: dict[str, Any], param: torch.Tensor, piece: Traced) -> bool:
        """Return whether pieces of a parameter arrive at the same bits as the whole; its shape does not matter."""
        target = self._lender.target_of(param)
        kinds = target.dtype, target.device, _grad_dtype(param, target), torch.get_num_threads()
        # The same operations, element by element, with the same numbers have the same result, whoever calls them.
        key = None if piece.reads else hash((repr(piece.trace), kinds))
        if key is None or key not in _agreed:
            odd = bool(group.get("fused")) or self._agree(param, _CUT_NUMEL, _ODD_CUTS)
            agrees = odd and self._agree(param, _LARGE_NUMEL, _LARGE_CUTS)
            if key is None:
                return agrees
            while len(_agreed) >= _MAX_AGREED:
                _agreed.popitem()
            _agreed[key] = agrees
        return _agreed[key]

    def _agree(self, param: torch.Tensor, numel: int, cuts: Sequence[int]) -> bool:
        make = torch.Generator().manual_seed(9)
        target = self._lender.target_of(param)
        data = _of_magnitudes(_random((numel,), target, make, 0.5))
        grads = [
            _random((numel,), target, make, 10.0**power).to(_grad_dtype(param, target))
            for power in _POWERS
        ]

        def stepped(piece: slice) -> tuple[torch.Tensor, dict[Any, Any]]:
            own = data[piece].clone()
            with self._lent({param: (target, own)}, only=[param]) as optimizer:
                for grad in grads:
                    target.grad = grad[piece].clone()
                    class_method(optimizer)()
                return target.detach().clone(), dict(optimizer.state.get(target, {}))

        try:
            whole, state = stepped(slice(0, numel))
            pieces = [stepped(slice(*each)) for each in itertools.pairwise(cuts)]
        except Exception:  # it wants another shape, say
            return False
        if not same(whole, torch.cat([data for data, _ in pieces])):
            return False
        return all(
            same(
                value,
                torch.cat([each[key] for _, each in pieces])
                if isinstance(value, torch.Tensor) and value.numel() == numel
                else pieces[-1][1][key],
            )
            for key, value in state.items()
        )

    # What the optimizer has meanwhile

    @contextlib.contextmanager
    def _lent(
        self,
        lent: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
        only: Sequence[torch.Tensor] | None,
        *,
        draws: bool = False,
        values: bool = True,
        moving: bool = True,
    ) -> Iterator[torch.optim.Optimizer]:
        """Lend the optimizer parameters with other data; afterwards nothing has changed that a user can see.

        Parameters that the optimizer can reach beside these have no elements that can be written meanwhile, and no
        gradient. With ``only`` groups have none but these. What is drawn at random is drawn again later, but for
        ``draws``. Without ``values`` large tensors of their state take no memory, and have none. ``moving`` groups have
        a rate at which steps can be told apart.
        """
        optimizer = self._optimizer
        snapshot = Snapshot(optimizer)
        reaches_others = only is None or snapshot.knows_params
        kept_state = optimizer.state
        kept = [group["params"] for group in optimizer.param_groups]
        own = [
            (target, target.data, target.grad)
            for param in (itertools.chain(*kept) if reaches_others else only or ())
            for target in {
                id(each): each for each in (param, self._lender.target_of(param))
            }.values()
            if local_of(target) is target
        ]
        drawn = Draws()
        try:
            with torch.no_grad():
                for target, data, _ in own:
                    target.grad = None
                    if reaches_others:
                        target.data = data.new_zeros(()).expand(data.shape)
                state: defaultdict[Any, Any] = defaultdict(dict)
                for param, (target, data) in lent.items():
                    target.data = data
                    begun = self._begun.get(param)
                    if begun:
                        state[target] = _state_like(begun, data, param.dtype, values)
                for group, params in zip(optimizer.param_groups, kept, strict=True):
                    group["params"] = [
                        lent[param][0] if param in lent else self._lender.target_of(param)
                        for param in params
                        if only is None or param in lent
                    ]
                    if moving:
                        _make_moving(group)
            optimizer.state = state
            yield optimizer
        finally:
            for group, params in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
            optimizer.state = kept_state
            for target, data, grad in own:
                target.grad = None
                target.data = data
                target.grad = grad
            snapshot.restore()
            if not draws:
                drawn.undo()


class _Uniform(NamedTuple):
    """A state tensor, whose elements are alike as far as that matters; without a shape it has the parameter's."""

    value: Any
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


def _kind_of(state: Any) -> str:
    """Return what of a state decides how its parameter is stepped: small values, a count of steps, say."""
    leaves, spec = _pytree.tree_flatten(state, is_leaf=lambda each: isinstance(each, _Uniform))
    return repr(
        [
            spec,
            *(leaf[1:] if isinstance(leaf, _Uniform) else _value_of(leaf) for leaf in leaves),
        ]
    )


def _value_of(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


def _small_state(state: dict[Any, Any], local: torch.Tensor) -> dict[Any, Any]:
    """Return what a state is like, without its large tensors."""

    def small(leaf: Any) -> Any:
        leaf = local_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if leaf.shape != local.shape or (leaf.dim() == 0 and leaf.dtype != local.dtype):
            small_one = leaf.nbytes <= SMALL_NBYTES and not leaf.is_meta
            return (
                leaf.detach().clone() if small_one else _Uniform(0, leaf.dtype, tuple(leaf.shape))
            )
        first = leaf.reshape(-1)[:1].item() if leaf.numel() and not leaf.is_meta else 0
        return _Uniform(first, leaf.dtype)

    return {key: _pytree.tree_map(small, value) for key, value in state.items()}


def _state_like(
    state: dict[Any, Any], data: torch.Tensor, dtype: torch.dtype, values: bool
) -> dict[Any, Any]:
    """Return a state for a parameter with these data, as what is loaded is cast where they have another dtype."""

    def like(leaf: Any) -> Any:
        if isinstance(leaf, _Uniform):
            cast = data.dtype if leaf.shape is None and leaf.dtype == dtype else leaf.dtype
            made = (
                torch.empty_like(data, dtype=cast)
                if leaf.shape is None
                else torch.empty(leaf.shape, dtype=cast, device=data.device)
            )
            return made.fill_(leaf.value) if values or made.numel() <= MAX_COMPUTED else made
        return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return {
        key: _pytree.tree_map(like, value, is_leaf=lambda each: isinstance(each, _Uniform))
        for key, value in state.items()
    }


def _make_moving(group: dict[str, Any]) -> None:
    """Give a group a rate at which steps can be told apart, if it has none."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and rate.numel() == 1 and abs(rate.item()) < _RATE:
        group["lr"] = torch.full_like(rate, _RATE)
    elif isinstance(rate, (int, float)) and not isinstance(rate, bool) and abs(rate) < _RATE:
        group["lr"] = _RATE


def _portions(how: str, grads: Sequence[Any]) -> list[list[int]]:
    """Return which parameters one call of the optimizer steps: all, or one of those that are stepped at all."""
    if how == "together":
        return [list(range(len(grads)))]
    return [[at] for at, grad in enumerate(grads) if how == "alone" or grad is not None] or [[]]


def _chosen(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Return parameters to try: of each group and kind, and spread over all."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            attributes = tuple(
                (name, value if isinstance(value, ATOMS) else type(value).__name__)
                for name, value in sorted(vars(param).items())
            )
            kinds.setdefault((number, param.dtype, param.dim(), attributes), []).append(param)
    every = [param for group in groups for param in group["params"]]
    wanted = [param for of in kinds.values() for param in (of[0], of[-1])][: _MAX_TRIED - 8]
    wanted += every[:2] + every[-2:] + every[:: max(len(every) // 8, 1)]
    places = {id(param): at for at, param in enumerate(every)}
    chosen = {places[id(param)]: param for param in wanted}
    return [chosen[at] for at in sorted(chosen)][:_MAX_TRIED]


def _shrunk(shape: Sequence[int]) -> tuple[int, ...]:
    longest = _MAX_LENGTHS.get(len(shape), 4)
    return tuple(min(length, longest) for length in shape)


def _cut_alike(state: dict[Any, Any], shape: torch.Size, of_piece: dict[Any, Any]) -> bool:
    """Return whether a piece has the state of the whole, with an element for each of its own or as small as there."""
    if flatten(state)[1] != flatten(of_piece)[1] or not isinstance(flatten(state)[1], tuple):
        return False
    for key, value in state.items():
        piece = of_piece[key]
        if isinstance(value, torch.Tensor) != isinstance(piece, torch.Tensor):
            return False
        if isinstance(value, torch.Tensor):
            per_element = value.shape == shape and value.dim() > 0 and piece.dim() == 1
            if value.dtype != piece.dtype or not (per_element or value.shape == piece.shape):
                return False
    return True


def attributes_of(param: torch.Tensor) -> tuple[Any, ...]:
    """Return what a parameter's attributes are."""
    return tuple(
        (name, value if isinstance(value, ATOMS) else id(value))
        for name, value in sorted(vars(param).items())
    )


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
    if zero or isinstance(value, (bool, type(None))):
        return bool(value) if zero else value
    return value if isinstance(value, (str, int)) else id(value)


def _grad_dtype(param: torch.Tensor, target: torch.Tensor | None = None) -> torch.dtype:
    """Return the dtype of a parameter's gradients; those of a stand-in of another dtype are cast."""
    if target is not None and target.dtype != param.dtype:
        return target.dtype
    dtype: Any = getattr(param, "grad_dtype", None) if param.is_leaf else None
    if param.grad is not None:
        return param.grad.dtype
    return dtype or param.dtype


def _random(
    shape: tuple[int, ...], like: torch.Tensor, make: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    full = torch.complex64 if like.dtype.is_complex else torch.float32
    values = torch.randn(shape, generator=make, dtype=full, device="cpu") * scale
    return values.to(like.device, like.dtype)


def _of_magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements have all magnitudes, of the parameter's own down to none."""
    scales = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=tensor.device)
    repeated = scales.repeat(-(-tensor.numel() // len(scales)))[: tensor.numel()]
    return (tensor * repeated.view(tensor.shape)).to(tensor.dtype)
