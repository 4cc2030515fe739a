"""Trials of an optimizer's step: find out what it depends on, and which state it makes.

A step is *separable* if the update of each parameter depends only on that parameter, its gradient, its state and the
values of groups and attributes. Then parameters may be stepped one after the other, and their state need not be in
memory together. A step is *element-wise* if the same holds for each element. Then a parameter may be cut into pieces.

A trial lends the optimizer the user's own parameters with small data. It steps some of them together, and then one
after the other, with gradients as in real steps: sometimes missing, large, infinite or NaN. The results must be equal
bit for bit. A parameter may be cut only if all operations of its step are known to be element-wise (``dryrun.py``), and
if pieces of various lengths have given the same bits as the whole parameter.

The *target* of a parameter is the tensor that the optimizer gets for it: the parameter, or a stand-in with another
dtype or device. The *local* tensor of a parameter is this rank's part of a DTensor, or the parameter itself
(``lending.py``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorferry.offload.dryrun import MAX_COMPUTED, STEPS, DryRunResult, dry_run, same_trace
from tensorferry.offload.errors import NotSeparableError
from tensorferry.offload.lending import Lender, class_method, only_params, params_replaced
from tensorferry.offload.optimizer_snapshot import (
    ATOMS,
    RngSnapshot,
    Snapshot,
    differing,
    frozen,
    reaches_tensor,
    same,
)
from tensorferry.offload.plan import GRANULE, SMALL_NBYTES, flatten, local_of, names_in, params_in
from tensorferry.offload.states import PLAIN_TENSOR_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Powers of ten for the gradients, one for each step of a trial. Some optimizers clip by past gradients. So gradients
# are smaller than before in some steps, and larger than all before in others. There are ten steps, because the first
# steps of some optimizers differ from the later ones (RAdam's first five).
_POWERS = (0, -1, 1, 0, 0, 4, 0, -6, 0, 0)

# In the last two steps some gradients are infinite or NaN.
_FIRST_NOT_FINITE = len(_POWERS) - 2

# The largest length of a dimension of a trial's parameters, by the number of dimensions, and the most parameters in a
# trial: steps that compute roots of matrices are slow.
_MAX_LENGTHS = {1: 64, 2: 24, 3: 8}
_MAX_TRIED = 24

# Magnitudes of the elements of trial parameters. Small ones are needed: rounding hides small updates of large elements.
_MAGNITUDES = (1.0, 1.0, 1e-1, 1.0, 1e-2, 1e-4, 1e-6, 0.0)

# The learning rate in a trial if a group's own is smaller. At the beginning of a warm-up, for example, the rate may be
# 0, with which a trial would change no parameter and show nothing.
_RATE = 1e-3

# The cuts that are tried to compare pieces with the whole parameter. A kernel processes elements in vectors. If the
# last elements of a thread's range do not fill a vector, some of torch's kernels, for bfloat16 among others, round
# these elements in another way. So a piece may have other results than the same elements of the whole parameter, whose
# threads have other ranges. Cuts of a small parameter at odd lengths reveal this. They are not tried with fused
# kernels: there a thread's range ends at a cache line, which is a whole number of vectors, so odd cuts would show a
# difference that real steps cannot have. Cuts of a large parameter at multiples of GRANULE, as in real steps, are
# always tried, with enough elements for several threads (32,768 each).
_CUT_NUMEL, _ODD_CUTS = 7680, (*range(0, 7680, 509), 7680)
_LARGE_NUMEL, _LARGE_CUTS = 131101, (0, GRANULE, 11 * GRANULE, 131101)

# Whether pieces gave the same bits as the whole parameter, by a hash of the step's operations; at most 1000 results.
_piece_agreement: dict[int, bool] = {}
_MAX_AGREED = 1000


class Probe:
    """Finds out how an optimizer may be stepped.

    Raises
    ------
    NotSeparableError
        The optimizer may do things that a trial cannot observe.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lender: Lender) -> None:
        self._optimizer = optimizer
        self._lender = lender
        self._name = type(optimizer).__name__
        self._refuse_own_step()
        self._refers_to_params = Snapshot(optimizer).refers_to_params
        self._behaviours: dict[Any, DryRunResult] = {}
        # Whether gradients may be redistributed before the step; see check_placed().
        self._placed: dict[Any, bool] = {}
        # The dry run of a piece, or None if parameters must not be cut; the same for parameters of any shape.
        self._pieces: dict[Any, DryRunResult | None] = {}
        #: Which parameters must have gradients: "any" if gradients may be missing in any step, "from the first step" if
        #: they may be missing in later steps only, "always" if they may never be missing.
        self.gradients = "any"
        # Whether the parameters in trials have small shapes in place of their true ones.
        self._uses_small_shapes = True
        # By parameter: the state that it had before the optimizer was offloaded. Trials begin with it, also those that
        # are made later, when the optimizer's own state has been moved to drives.
        self._initial_state: dict[torch.Tensor, Any] = {}
        self.record_initial_state(
            {param: optimizer.state.get(param) for param in params_in(optimizer.param_groups)}
        )

    def record_initial_state(self, states: Mapping[torch.Tensor, Any]) -> None:
        """Record state that parameters already have: an optimizer may create it once and never again."""
        for param, state in states.items():
            if state or param not in self._initial_state:
                self._initial_state[param] = _small_state(state or {}, local_of(param))

    def _refuse_own_step(self) -> None:
        """Raise if a step() was set on the optimizer object, except by a scheduler."""
        step: Any = vars(self._optimizer).get("step")
        while getattr(step, "_wrapped_by_lr_sched", False):
            # A scheduler's wrapper, which only counts calls.
            step = getattr(step, "__wrapped__", None)
        own: Any = type(self._optimizer).step
        if step is not None and getattr(step, "__func__", step) is not own:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: optimizer.step has been replaced on this object, and tensorferry "
                "cannot check what the replacement does. Remedy: hooks (register_step_pre_hook), or your own class"
            )

    # How each parameter is stepped

    def behaviour(self, group: dict[str, Any], param: torch.Tensor) -> DryRunResult:
        """Return how a parameter of a group is stepped.

        Raises
        ------
        NotSeparableError
            The parameter cannot be stepped, or its state cannot be stored.
        """
        key = self._key(group, param)
        if key not in self._behaviours:
            local = local_of(param)
            found = self._dry_run(param, local.shape, local.stride())
            if found is not None and found.reads:
                # The step branches on values, for example to skip gradients that are not finite, and the dry run has
                # followed one branch. Follow the other one, too, and plan for the state that either of them creates.
                other = self._dry_run(param, local.shape, local.stride(), answer=False)
                if other is not None:
                    found = found._replace(state={**other.state, **found.state})
            if found is None:
                found = DryRunResult(self._state_after_steps(param), False, [])
            self._refuse_state(found.state)
            self._behaviours[key] = found
        return self._behaviours[key]

    def may_be_cut(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        """Return whether a parameter may be stepped in pieces."""
        whole = self.behaviour(group, param)
        if not whole.pointwise or not local_of(param).numel():
            return False
        _, *key_of_any_shape = self._key(group, param)
        key = tuple(key_of_any_shape)
        if key not in self._pieces:
            piece = self._dry_run(param, (GRANULE,), (1,))
            agrees = (
                piece is not None and piece.pointwise and self._pieces_agree(group, param, piece)
            )
            self._pieces[key] = piece if agrees else None
        piece = self._pieces[key]
        return (
            piece is not None
            and same_trace(whole.trace, piece.trace)
            and _piece_state_matches(whole.state, local_of(param).shape, piece.state)
            and self.may_step_in_pieces(param)
        )

    def may_step_in_pieces(self, param: torch.Tensor) -> bool:
        """Return whether the next step of a parameter may be done in pieces, with groups and state as they are now."""
        local = local_of(param)
        whole = self._dry_run(param, local.shape, local.stride(), now=True)
        piece = self._dry_run(param, (GRANULE,), (1,), now=True)
        if whole is None or piece is None:  # the dry run raised, and the real step will raise, too
            return True
        return whole.pointwise and piece.pointwise and same_trace(whole.trace, piece.trace)

    def forget(self) -> None:
        """Forget all results: the step does something different now."""
        self._behaviours.clear()
        self._pieces.clear()

    def _key(self, group: dict[str, Any], param: torch.Tensor) -> tuple[Any, ...]:
        """Return everything on which the behaviour of a parameter's step may depend: first its shape and strides."""
        local = local_of(param)
        return (
            (local.shape, local.stride()),
            pattern(group, numbers=True),
            (self._lender.step_dtype(param), local.device, _grad_dtype(param)),
            attributes_of(param),
            id(param) if self._refers_to_params else None,
            _state_key(self._initial_state.get(param)),
        )

    def _dry_run(
        self,
        param: torch.Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        *,
        answer: bool = True,
        now: bool = False,
    ) -> DryRunResult | None:
        """Dry-run the steps of a trial for a parameter of this shape, or one step with its group as it is ``now``.

        ``answer`` is the result of each comparison of values. Return None if the step raises without values.
        """
        target = self._lender.target_of(param)
        device = target.device if target.device.type == "cpu" else torch.device("meta")
        # The memory is never touched, so the system does not allocate pages for it.
        data = torch.empty_strided(shape, stride, dtype=target.dtype, device=device)
        # A parameter's `.data` cannot be on another device than the parameter, so make a new one on the meta device.
        if data.device != target.device:
            target = torch.nn.Parameter(data)
            target.__dict__.update(vars(param))
        with self._lend(
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

    def _state_after_steps(self, param: torch.Tensor) -> dict[Any, Any]:
        """Return the state that a parameter has after two real steps with zero data and gradients."""
        target, local = self._lender.target_of(param), local_of(param)
        data = torch.zeros_like(local, dtype=target.dtype, device=target.device)
        with self._lend({param: (target, data)}, only=[param]) as optimizer:
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
                if type(leaf) not in PLAIN_TENSOR_CLASSES:
                    raise NotSeparableError(
                        f"{self._name} cannot be offloaded: state[{name!r}] is a {type(leaf).__name__}; only plain "
                        "tensors can be stored"
                    )
            elif not isinstance(leaf, ATOMS) and reaches_tensor(leaf):
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: state[{name!r}] is a {type(leaf).__name__} that holds tensors; "
                    "only tensors in dicts, lists, tuples and deques can be stored"
                )

    # How parameters are stepped together

    def try_together(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step some parameters together and one after the other, and decide how the optimizer is called.

        Raises
        ------
        NotSeparableError
            The results differ, or the trial failed.
        """
        tried = _choose_params(groups)
        why: list[str] = []
        for self.gradients in ("any", "from the first step", "always") if tried else ():
            # Try small shapes first; some optimizers depend on the true shapes.
            for self._uses_small_shapes in (True, False):
                try:
                    whole = self._step_together(tried)
                except NotSeparableError:
                    raise
                except Exception as error:
                    why.append(
                        f": its step on {len(tried)} small parameters, without a closure and with dense gradients, "
                        f"raised {type(error).__name__}: {error}"
                    )
                    continue
                differs = self._compare_apart(tried, whole)
                if differs is None:
                    return
                why.append(f" exactly: {differs}")
                break
        if why:
            why.sort(key=lambda each: not each.startswith(" exactly"))
            raise NotSeparableError(
                f"{self._name} cannot be offloaded{why[0]}. Remedy: an optimizer that steps each parameter "
                "independently"
            )

    def _step_together(self, tried: Sequence[torch.Tensor]) -> list[Any]:
        """Step parameters together, in two trials that must agree."""
        draws = RngSnapshot()
        try:
            whole = self._trial(tried, "together", draws=True)
        finally:
            drawn = draws.has_changed()
            draws.restore()
        if drawn:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded: its step draws random numbers, and the result depends on the order "
                "in which parameters are stepped"
            )
        if not same(whole, self._trial(tried, "together")):
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: its step gives a different result each time (fused SGD of "
                "some torch releases does so with bfloat16, because it reads uninitialized memory)"
            )
        return whole

    def _compare_apart(self, tried: Sequence[torch.Tensor], whole: list[Any]) -> str | None:
        """Step parameters one after the other; return what differs, or set ``lender.alone`` and return None.

        First "apart": the groups keep all parameters, and only one has a gradient. Then "alone": the groups contain
        only that parameter.
        """
        found: list[str] = []
        for alone in (False, True):
            try:
                apart = self._trial(tried, "alone" if alone else "apart")
            except NotSeparableError as error:
                found.insert(0, str(error))
                continue
            except Exception as error:
                found.append(f"one parameter alone raised {type(error).__name__}: {error}")
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
                else "a parameter stepped alone differs from the same one stepped together with others",
            )
        return found[0]

    def may_step_apart(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the next step of parameters may be done one after the other, with all values as they are."""
        how = "alone" if self._lender.alone else "apart"
        draws = RngSnapshot()
        try:
            together, apart = (
                self._trial(params, each, now=True, draws=True) for each in ("together", how)
            )
            return same(together, apart) and not draws.has_changed()
        except NotSeparableError:
            return False
        except Exception:  # the optimizer rejects small parameters with this state, or the real step will raise, too
            return True
        finally:
            draws.restore()

    def _trial(
        self,
        tried: Sequence[torch.Tensor],
        how: str,
        *,
        now: bool = False,
        draws: bool = False,
    ) -> list[Any]:
        """Step parameters with small data; return parameters, state and values after each step.

        ``how`` is "together", "apart" or "alone" (:meth:`_compare_apart`). With ``now``, the trial is a single step of
        these parameters alone, with groups as they are. With ``draws``, the random number generators are not restored
        afterwards, so the caller can see whether the step has drawn numbers.
        """
        make = torch.Generator().manual_seed(7)
        lent = {}
        for param in tried:
            target, local = self._lender.target_of(param), local_of(param)
            shape = _small_shape(local.shape) if self._uses_small_shapes else tuple(local.shape)
            lent[param] = target, _of_magnitudes(_random(shape, target, make, 0.5))
        results: list[Any] = []
        only = tried if now or self.gradients == "always" else None
        with self._lend(lent, only, draws=draws, moving=not now) as optimizer:
            step = class_method(optimizer)
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
                    chosen = {id(targets[at]) for at in portion} if how == "alone" else None
                    try:
                        with only_params(optimizer, chosen):
                            returned = step()
                    except Exception as error:
                        if number < _FIRST_NOT_FINITE:
                            raise
                        # A step in memory fails on such gradients, too, for example in roots of matrices.
                        return [*results, type(error).__name__]
                    begin.check_large()
                    left = {**begin.frozen(), "the return value of step()": frozen(returned)}
                    name = None if after is None else differing(after, left)
                    if name is not None:
                        raise NotSeparableError(
                            f"{name} depends on the gradients of several parameters at once"
                        )
                    after = left
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
        """Return a parameter's gradient for a step of a trial."""
        scale = 10.0 ** (power + at % 5)
        grad = _random(tuple(data.shape), data, make, scale).to(dtype)
        if number == 0 and data.dim() and data.numel() % 2 == 0 and not data.is_complex():
            # Gradients orthogonal to their parameter: AdamP, for one, has a branch for these.
            pairs = data.reshape(-1, 2)
            turned = torch.stack((pairs[:, 1], -pairs[:, 0]), 1).reshape(data.shape)
            grad = (turned * 10.0 ** (at % 5)).to(dtype)
        late = self.gradients == "any" and at % 4 == 1 and number < 3
        disappears = self.gradients != "always" and number and (number + at) % 4 == 3
        if late or disappears:
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
                    f"{key!r}, which is not a parameter"
                    if not isinstance(key, torch.Tensor)
                    else "parameters without gradients"
                )
                raise NotSeparableError(
                    f"{self._name} cannot be offloaded: it keeps state for {what}. An offloaded step calls the "
                    "optimizer once for each bucket, and each call would change that state"
                )

    # DTensor gradients with other placements than their parameter

    def check_placed(self, group: dict[str, Any], param: Any, grad: Any) -> None:
        """Raise unless a gradient may be redistributed to its parameter's placements before the step.

        torch redistributes only when an operation needs it. Operations before that work on the partial sum: for
        example, weight decay that is added to the gradient is then rounded differently. All ranks call this method
        together.

        Raises
        ------
        NotSeparableError
            Redistributing the gradient before the step changes the result.
        """
        key = (pattern(group), param.dtype, param.placements, grad.placements)
        if key not in self._placed:
            self._placed[key] = self._is_placed_first(param, grad)
        if not self._placed[key] or not self.behaviour(group, param).pointwise:
            raise NotSeparableError(
                f"{self._name} cannot be offloaded exactly: a gradient has the placements {grad.placements} and its "
                f"parameter has {param.placements}, and the step changes the gradient before redistributing it. "
                "Remedy: grad.redistribute(placements=param.placements) before the step"
            )

    def _is_placed_first(self, param: Any, grad: Any) -> bool:
        """Return whether a trial on all ranks gives the same bits if gradients are redistributed before the step."""
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
        # Redistribute all gradients before the steps, which may change `grads` in place. A redistributed gradient may
        # share memory with the original one, so clone it.
        placed = [
            local_of(each.redistribute(placements=param.placements)).clone() for each in grads
        ]
        results = []
        for native in (True, False):
            own = torch.nn.Parameter(data.clone() if native else local_of(data).clone())
            with self._lend({param: (own, own.data)}, only=[param]) as optimizer:
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

    def _pieces_agree(
        self, group: dict[str, Any], param: torch.Tensor, piece: DryRunResult
    ) -> bool:
        """Return whether pieces of a parameter of any shape give the same bits as the whole."""
        target = self._lender.target_of(param)
        kinds = target.dtype, target.device, _grad_dtype(param, target), torch.get_num_threads()
        # The same element-wise operations with the same numbers give the same result in any optimizer, so the result of
        # the comparison is kept for all optimizers in this process.
        key = None if piece.reads else hash((repr(piece.trace), kinds))
        if key is None or key not in _piece_agreement:
            odd = bool(group.get("fused")) or self._agree(param, _CUT_NUMEL, _ODD_CUTS)
            agrees = odd and self._agree(param, _LARGE_NUMEL, _LARGE_CUTS)
            if key is None:
                return agrees
            while len(_piece_agreement) >= _MAX_AGREED:
                _piece_agreement.popitem()
            _piece_agreement[key] = agrees
        return _piece_agreement[key]

    def _agree(self, param: torch.Tensor, numel: int, cuts: Sequence[int]) -> bool:
        """Return whether steps of ``numel`` elements give the same bits as steps of the pieces between ``cuts``."""
        make = torch.Generator().manual_seed(9)
        target = self._lender.target_of(param)
        data = _of_magnitudes(_random((numel,), target, make, 0.5))
        grads = [
            _random((numel,), target, make, 10.0**power).to(_grad_dtype(param, target))
            for power in _POWERS
        ]

        def stepped(piece: slice) -> tuple[torch.Tensor, dict[Any, Any]]:
            own = data[piece].clone()
            with self._lend({param: (target, own)}, only=[param]) as optimizer:
                for grad in grads:
                    target.grad = grad[piece].clone()
                    class_method(optimizer)()
                return target.detach().clone(), dict(optimizer.state.get(target, {}))

        try:
            whole, state = stepped(slice(0, numel))
            pieces = [stepped(slice(*each)) for each in itertools.pairwise(cuts)]
        except Exception:  # the optimizer needs another shape, for example
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

    # The optimizer during a trial

    @contextlib.contextmanager
    def _lend(
        self,
        lent: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
        only: Sequence[torch.Tensor] | None,
        *,
        draws: bool = False,
        values: bool = True,
        moving: bool = True,
    ) -> Iterator[torch.optim.Optimizer]:
        """Lend the optimizer parameters with other data, and afterwards restore everything that a user can see.

        Other parameters that the optimizer can reach get unwritable data and no gradient in the meantime. With
        ``only``, groups contain only these parameters. Random number generators are restored unless ``draws`` is true.
        Without ``values``, large state tensors are allocated but never filled, so they take no memory. With
        ``moving``, groups get a learning rate that is large enough to change parameters.
        """
        optimizer = self._optimizer
        snapshot = Snapshot(optimizer)
        reaches_others = only is None or snapshot.refers_to_params
        kept_state = optimizer.state
        own = [
            (target, target.data, target.grad)
            for param in (params_in(optimizer.param_groups) if reaches_others else only or ())
            for target in {
                id(each): each for each in (param, self._lender.target_of(param))
            }.values()
            if local_of(target) is target
        ]
        drawn = RngSnapshot()
        try:
            with torch.no_grad():
                for target, data, _ in own:
                    target.grad = None
                    if reaches_others:
                        target.data = data.new_zeros(()).expand(data.shape)
                state: defaultdict[Any, Any] = defaultdict(dict)
                for param, (target, data) in lent.items():
                    target.data = data
                    begun = self._initial_state.get(param)
                    if begun:
                        state[target] = _state_like(begun, data, param.dtype, values)
                for group in optimizer.param_groups if moving else ():
                    _make_moving(group)
            optimizer.state = state
            with params_replaced(
                optimizer,
                lambda params: [
                    lent[param][0] if param in lent else self._lender.target_of(param)
                    for param in params
                    if only is None or param in lent
                ],
            ):
                yield optimizer
        finally:
            optimizer.state = kept_state
            for target, data, grad in own:
                target.grad = None
                target.data = data
                target.grad = grad
            snapshot.restore()
            if not draws:
                drawn.restore()


class _UniformTensor(NamedTuple):
    """A tensor of a recorded state, reduced to one value for all of its elements to save memory.

    ``shape`` None means the parameter's shape.
    """

    value: Any
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


def _state_key(state: Any) -> str:
    """Return the part of a state that decides how its parameter is stepped, such as a step count."""
    leaves, spec = _pytree.tree_flatten(
        state, is_leaf=lambda each: isinstance(each, _UniformTensor)
    )
    return repr(
        [
            spec,
            *(leaf[1:] if isinstance(leaf, _UniformTensor) else _value_of(leaf) for leaf in leaves),
        ]
    )


def _value_of(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


def _small_state(state: dict[Any, Any], local: torch.Tensor) -> dict[Any, Any]:
    """Return a copy of a state in which large tensors are replaced by :class:`_UniformTensor`."""

    def small(leaf: Any) -> Any:
        leaf = local_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if leaf.shape != local.shape or (leaf.dim() == 0 and leaf.dtype != local.dtype):
            small_one = leaf.nbytes <= SMALL_NBYTES and not leaf.is_meta
            return (
                leaf.detach().clone()
                if small_one
                else _UniformTensor(0, leaf.dtype, tuple(leaf.shape))
            )
        first = leaf.reshape(-1)[:1].item() if leaf.numel() and not leaf.is_meta else 0
        return _UniformTensor(first, leaf.dtype)

    return {key: _pytree.tree_map(small, value) for key, value in state.items()}


def _state_like(
    state: dict[Any, Any], data: torch.Tensor, dtype: torch.dtype, values: bool
) -> dict[Any, Any]:
    """Return the state for a parameter with ``data``; tensors of ``dtype`` are cast to the dtype of ``data``."""

    def like(leaf: Any) -> Any:
        if isinstance(leaf, _UniformTensor):
            cast = data.dtype if leaf.shape is None and leaf.dtype == dtype else leaf.dtype
            made = (
                torch.empty_like(data, dtype=cast)
                if leaf.shape is None
                else torch.empty(leaf.shape, dtype=cast, device=data.device)
            )
            return made.fill_(leaf.value) if values or made.numel() <= MAX_COMPUTED else made
        return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return {
        key: _pytree.tree_map(like, value, is_leaf=lambda each: isinstance(each, _UniformTensor))
        for key, value in state.items()
    }


def _make_moving(group: dict[str, Any]) -> None:
    """Set a small learning rate to one that changes parameters visibly."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and rate.numel() == 1 and abs(rate.item()) < _RATE:
        group["lr"] = torch.full_like(rate, _RATE)
    elif isinstance(rate, (int, float)) and not isinstance(rate, bool) and abs(rate) < _RATE:
        group["lr"] = _RATE


def _portions(how: str, grads: Sequence[Any]) -> list[list[int]]:
    """Return the parameters for each call of the optimizer: all in one call, or one per call."""
    if how == "together":
        return [list(range(len(grads)))]
    return [[at] for at, grad in enumerate(grads) if how == "alone" or grad is not None] or [[]]


def _choose_params(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    """Choose parameters for a trial: some of each group and kind, and some spread over all."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for number, group in enumerate(groups):
        for param in group["params"]:
            attributes = tuple(
                (name, value if isinstance(value, ATOMS) else type(value).__name__)
                for name, value in sorted(vars(param).items())
            )
            kinds.setdefault((number, param.dtype, param.dim(), attributes), []).append(param)
    every = list(params_in(groups))
    wanted = [param for of in kinds.values() for param in (of[0], of[-1])][: _MAX_TRIED - 8]
    wanted += every[:2] + every[-2:] + every[:: max(len(every) // 8, 1)]
    places = {id(param): at for at, param in enumerate(every)}
    chosen = {places[id(param)]: param for param in wanted}
    return [chosen[at] for at in sorted(chosen)][:_MAX_TRIED]


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    longest = _MAX_LENGTHS.get(len(shape), 4)
    return tuple(min(length, longest) for length in shape)


def _piece_state_matches(
    state: dict[Any, Any], shape: torch.Size, of_piece: dict[Any, Any]
) -> bool:
    """Return whether a piece's state matches the whole's: per-element tensors by length, all others by shape."""
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
    """Return a parameter's attributes in a form that can be compared."""
    return tuple(
        (name, value if isinstance(value, ATOMS) else id(value))
        for name, value in sorted(vars(param).items())
    )


def pattern(group: dict[str, Any], *, numbers: bool = False) -> tuple[Any, ...]:
    """Return the properties of a group's values that may decide which state the optimizer creates.

    One is whether a momentum is 0. The learning rate does not count.

    With ``numbers`` integers are compared by value. Otherwise only whether they are 0 counts, because some optimizers
    count their steps in groups.
    """
    return tuple(
        (key, _value_key(value, numbers))
        for key, value in sorted(group.items())
        if key not in ("params", "param_names", "lr", "initial_lr")
    )


def _value_key(value: Any, numbers: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_value_key(each, numbers) for each in value)
    if isinstance(value, torch.Tensor):
        return bool(value.any()) if value.device.type == "cpu" else True
    zero = isinstance(value, float) or (isinstance(value, int) and not numbers)
    if zero or isinstance(value, (bool, type(None))):
        return bool(value) if zero else value
    return value if isinstance(value, (str, int)) else id(value)


def _grad_dtype(param: torch.Tensor, target: torch.Tensor | None = None) -> torch.dtype:
    """Return the dtype of a parameter's gradients; gradients of a stand-in have its dtype."""
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
    """Return a tensor with its elements scaled by all magnitudes, from the original one down to 0."""
    scales = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=tensor.device)
    repeated = scales.repeat(-(-tensor.numel() // len(scales)))[: tensor.numel()]
    return (tensor * repeated.view(tensor.shape)).to(tensor.dtype)
