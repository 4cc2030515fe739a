"""Dry runs of an optimizer's step: which state the step makes, and whether it treats each element independently.

The optimizer's own step() runs in Python as usual, but the operations that it calls are recorded and not executed. So
a parameter of any size costs no time and no memory, and its values are never touched. Operations on tensors that are
not derived from the parameter or its gradient, such as a step count, are executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tensorferry.offload.states import PLAIN_TENSOR_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

# Some optimizers create state late: variants of RAdam, and optimizers that keep the last ten gradients.
STEPS = 12

# A step of more than 1000 operations is repeated only until its state has been unchanged for 4 steps.
_MANY_OPERATIONS, _SETTLED_STEPS = 1000, 4

# Operations on tensors with more elements are never executed, even if the tensors are not derived from the parameter.
MAX_COMPUTED = 1024

# A limit: a loop that waits for a certain value would never end, because a dry run has no values.
_MAX_OPERATIONS = 20_000

# Element-wise operations that torch does not tag as such (`torch.Tag.pointwise`).
_POINTWISE = {
    *("copy_", "zero_", "fill_", "_to_copy", "clone", "masked_fill", "masked_fill_", "lift_fresh"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "detach", "alias", "view_as_real"),
    *("index_put_", "where"),
    *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"),
}
_NOT_POINTWISE = {"_foreach_norm", "_foreach_max", "_foreach_mm"}


class DryRunResult(NamedTuple):
    """The result of a dry run.

    ``state`` is the parameter's state after some steps; its tensors have shapes and no values. ``pointwise`` tells
    whether every operation treated each element independently. ``trace`` lists the recorded operations, each with the
    numbers and dtypes among its arguments.
    """

    state: dict[Any, Any]
    pointwise: bool
    trace: list[Any]
    reads: bool = False  # whether the step asked for the value of a tensor


class _TooManyOperationsError(Exception):
    """The step calls too many operations for a dry run."""


def dry_run(
    step: Callable[[], Any],
    param: torch.Tensor,
    state_of: Callable[[], dict[Any, Any]],
    *,
    answer: bool = True,
    steps: int = STEPS,
) -> DryRunResult | None:
    """Step one parameter, which has a gradient, without arithmetic.

    Parameters
    ----------
    step : callable
        Steps this parameter and no other.
    param : torch.Tensor
        In host memory or on the ``meta`` device, like its gradient. The values of both are neither read nor written.
    state_of : callable
        Returns the parameter's state.
    answer : bool
        The result of each comparison of values on which the step branches: a dry run has no values to compare.
    steps : int
        The number of steps.

    Returns
    -------
    DryRunResult or None
        None if the step needs values.
    """
    with _OperationRecorder(param, answer) as recorder:
        try:
            known, unchanged = None, 0
            for _ in range(steps):
                grad = param.grad
                step()
                if param.grad is not grad:
                    recorder.pointwise = False
                recorder.forget_values(state_of())
                shapes = _shapes_in(state_of())
                unchanged = unchanged + 1 if shapes == known else 0
                known = shapes
                if unchanged >= _SETTLED_STEPS and len(recorder.trace) > _MANY_OPERATIONS:
                    break
        except Exception:  # an optimizer that needs values may raise any exception without them
            return None
    state = _pytree.tree_map(_without_memory, dict(state_of()))
    return DryRunResult(state, recorder.pointwise, recorder.trace, recorder.reads)


def _without_memory(leaf: Any) -> Any:
    is_large = isinstance(leaf, torch.Tensor) and leaf.numel() > MAX_COMPUTED
    return leaf.to("meta") if is_large and type(leaf) in PLAIN_TENSOR_CLASSES else leaf


def _shapes_in(state: Any) -> Any:
    return _pytree.tree_map(
        lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf), state
    )


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on derived tensors instead of executing them.

    A tensor is *derived* if its storage is that of the parameter, of its gradient, or of the result of an operation on
    derived tensors.
    """

    def __init__(self, param: torch.Tensor, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pointwise = True
        self.reads = False
        self._answer = answer
        self.trace: list[Any] = []
        self._param = param
        self._shapes = (param.shape, (*param.shape, 2))  # the second: complex elements as pairs
        self._device = param.device
        self._derived: dict[int, Any] = {}
        self._count = 0
        self._results: dict[Any, Any] = {}  # of recorded operations, on the meta device
        self.forget_values({})

    def forget_values(self, state: dict[Any, Any]) -> None:
        """Forget derived tensors, except those of the next step: the parameter, its gradient and its derived state."""
        derived, self._derived = self._derived, {}
        for tensor in (self._param, self._param.grad, *_pytree.tree_leaves(state)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if not derived or storage._cdata in derived:
                    self._derived[storage._cdata] = storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [
            leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        derived = [tensor for tensor in tensors if self._is_derived(tensor)]
        if not derived and any(tensor.numel() > MAX_COMPUTED for tensor in tensors):
            derived = tensors
        if not derived:
            return self._run_underived(func, tensors, args, kwargs)
        self._count += 1
        if self._count > _MAX_OPERATIONS:
            raise _TooManyOperationsError
        name = func._schema.name.split("::")[1]
        self._record_operation(func, name, tensors, derived, args, kwargs)
        returns = func._schema.returns
        if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            return func(*args, **kwargs)  # a view: it reads no values
        if name in ("_local_scalar_dense", "item", "equal", "is_nonzero"):
            self.reads = True
            kind = torch.bool if name in ("equal", "is_nonzero") else derived[0].dtype
            return self._answer if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        written = [
            value
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            for tensor in _pytree.tree_leaves(written):
                if isinstance(tensor, torch.Tensor):
                    self._mark_derived(tensor)
            return None if not returns else written[0] if len(returns) == 1 else tuple(written)
        return self._outputs_without_values(func, args, kwargs)

    def _run_underived(self, func: Any, tensors: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors that are not derived, such as a count; a large new tensor gets no values."""
        makes = not tensors and any(each.name == "device" for each in func._schema.arguments)
        if makes:
            there = func(*args, **{**kwargs, "device": torch.device("meta")})
            if isinstance(there, torch.Tensor) and there.numel() > MAX_COMPUTED:
                return self._outputs_without_values(func, args, kwargs)
        return func(*args, **kwargs)

    def _outputs_without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the operation's outputs with the right shapes and dtypes, and without values."""

        def to_meta(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type == "meta":
                return value
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )

        def without_values(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=self._device
            )
            self._mark_derived(made)
            return made

        leaves, spec = _pytree.tree_flatten((args, kwargs))
        key: Any = (
            func,
            spec,
            *(
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ),
        )
        try:
            known = self._results.get(key)
        except TypeError:  # an unhashable argument
            known, key = None, None
        if known is None:
            args, kwargs = _pytree.tree_unflatten([to_meta(leaf) for leaf in leaves], spec)
            if "device" in kwargs and kwargs["device"] is not None:
                kwargs["device"] = torch.device("meta")
            known = func(*args, **kwargs)
            if key is not None:
                self._results[key] = known
        return _pytree.tree_map(without_values, known)

    def _record_operation(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        derived: list[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Record an operation, and whether it treats each element independently."""
        known = _is_known(func)
        # index_put_ is element-wise only if a mask chooses the elements; with positions, it is not.
        if name == "index_put_":
            known = (
                all(index is not None and index.dtype == torch.bool for index in args[1])
                and tuple(args[1][0].shape) in self._shapes
            )
        shaped = all(tuple(tensor.shape) in self._shapes for tensor in derived) and all(
            tensor.numel() == 1 or tuple(tensor.shape) in self._shapes for tensor in tensors
        )
        if not known or not shaped or (len(self._param.shape) == 0):
            self.pointwise = False
        numbers = [
            leaf
            for leaf in _pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, (bool, int, float, complex, torch.dtype))
        ]
        self.trace.append((str(func), numbers))

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._derived

    def _mark_derived(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._derived[storage._cdata] = storage


def _is_known(func: Any) -> bool:
    """Return whether an operation is known to treat each element independently."""
    name = func._schema.name.split("::")[1]
    return func.namespace == "aten" and (
        torch.Tag.pointwise in func.tags
        or name in _POINTWISE
        or (name.startswith("_foreach_") and name not in _NOT_POINTWISE)
    )


class NotPointwiseError(Exception):
    """An operation that does not treat each element independently is about to run on a piece of a parameter."""


class PieceGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises in a real step before an operation that is not element-wise gets a piece of a parameter as input.

    A piece is recognized by its shape: ``lengths`` are the numbers of elements of the pieces.
    """

    _known: dict[Any, bool] = {}  # noqa: RUF012 (shared by all instances)

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = {
            shape for length in lengths for shape in ((length,), (length, 2)) if length > 1
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = _is_known(func) or "index_put_" in func._schema.name
        if not known:
            for leaf in _pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) in self._shapes:
                    raise NotPointwiseError(str(func))
        return func(*args, **(kwargs or {}))


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return pairs of an operation's declared arguments and their values."""
    declared = func._schema.arguments
    named = [(each, kwargs[each.name]) for each in declared if each.name in kwargs]
    return [*zip(declared, args, strict=False), *named]


def same_trace(left: list[Any], right: list[Any]) -> bool:
    """Return whether two steps called the same operations with the same numbers."""
    return len(left) == len(right) and all(map(_same_operation, left, right))


def _same_operation(left: Any, right: Any) -> bool:
    return (
        left[0] == right[0]
        and len(left[1]) == len(right[1])
        and all(
            one == other or (one != one and other != other)  # NaN counts as equal to NaN
            for one, other in zip(left[1], right[1], strict=True)
        )
    )
