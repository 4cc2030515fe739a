"""Which optimizers may be stepped in parts with the same result: a table, and the user's word.

A step is *element-wise* if each element's update depends only on that element, its gradient, its state and the values
of its group. A step is *per parameter* if the same holds for each whole parameter. Nothing is tried out to learn this:
no number of examples proves that a step has no other inputs. The classes of the table are compared with steps in memory
by the tests (``tests/offload/test_table.py``). Any other class, a subclass of one in the table included, needs the word
of a user or of its package. Packages in the table are recognized by module and name, and none of them is imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from tensorferry.base.checks import one_of
from tensorferry.offload.errors import NotSeparableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind: TypeAlias = Literal["elementwise", "per_parameter"]
KINDS = ("elementwise", "per_parameter")

# For each tensor of a parameter's state: its name, and its shape.
Shapes: TypeAlias = "dict[str, Sequence[int]]"


class Known(NamedTuple):
    """What is known about a class of optimizers.

    ``state`` returns the tensors of a parameter's state, for a group and the parameter's shape. The budget and the
    first layout of the state are computed from them; a step may create other tensors. None: not known.
    ``sums_first`` returns whether a step begins by summing a gradient that is a partial sum on each rank (a DTensor's
    ``Partial``). Other steps compute with the partial sum first, which rounds in another way. None: no.
    """

    kind: Kind
    state: Callable[[dict[str, Any], Sequence[int]], Shapes] | None = None
    sums_first: Callable[[dict[str, Any]], bool] | None = None


def _alike(
    *names: str, **conditional: Callable[[dict[str, Any]], Any]
) -> Callable[[dict[str, Any], Sequence[int]], Shapes]:
    """Return a function for :class:`Known` of tensors that have the shape of their parameter.

    ``conditional`` has those that exist only if a function of the group returns a true value.
    """

    def state(group: dict[str, Any], shape: Sequence[int]) -> Shapes:
        more = [name for name, exists in conditional.items() if exists(group)]
        return dict.fromkeys([*names, *more], shape)

    return state


def _adafactor(_: dict[str, Any], shape: Sequence[int]) -> Shapes:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


# Adam adds its weight decay to the gradient; AdamW applies it to the parameter.
_ADAM = Known(
    "elementwise",
    _alike("exp_avg", "exp_avg_sq", max_exp_avg_sq=lambda group: group["amsgrad"]),
    lambda group: group["weight_decay"] == 0 or group.get("decoupled_weight_decay", False),
)
_MOMENTS = Known("elementwise", _alike("exp_avg", "exp_avg_sq"))

# By module and name; classes of torch by the name under which torch.optim has them.
TABLE: dict[str, Known] = {
    "lion_pytorch.lion_pytorch.Lion": Known("elementwise", _alike("exp_avg")),
    "muon.SingleDeviceMuon": Known("per_parameter", _alike("momentum_buffer")),
    "pytorch_optimizer.optimizer.came.CAME": Known("per_parameter"),
    "pytorch_optimizer.optimizer.lion.Lion": Known("per_parameter", _alike("exp_avg")),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": Known(
        "elementwise", _alike("z", "exp_avg_sq")
    ),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": Known("elementwise", _alike("z")),
    "torch.optim.ASGD": Known("elementwise", _alike("ax")),
    "torch.optim.Adadelta": Known("elementwise", _alike("square_avg", "acc_delta")),
    "torch.optim.Adafactor": Known("per_parameter", _adafactor),
    "torch.optim.Adagrad": Known("elementwise", _alike("sum")),
    "torch.optim.Adam": _ADAM,
    "torch.optim.AdamW": _ADAM._replace(sums_first=lambda _: True),
    "torch.optim.Adamax": Known("elementwise", _alike("exp_avg", "exp_inf")),
    "torch.optim.Muon": Known("per_parameter", _alike("momentum_buffer")),
    "torch.optim.NAdam": _MOMENTS,
    "torch.optim.RAdam": _MOMENTS,
    "torch.optim.RMSprop": Known(
        "elementwise",
        _alike(
            "square_avg",
            momentum_buffer=lambda group: group["momentum"] > 0,
            grad_avg=lambda group: group["centered"],
        ),
    ),
    "torch.optim.Rprop": Known("elementwise", _alike("prev", "step_size")),
    "torch.optim.SGD": Known(
        "elementwise", _alike(momentum_buffer=lambda group: group["momentum"] != 0)
    ),
}

# Classes for which a package has given its word.
_registered: dict[type, Known] = {}


def register(optimizer_class: type[torch.optim.Optimizer], kind: Kind) -> None:
    """Declare how the optimizers of a class may be stepped; packages call this for their own classes.

    Parameters
    ----------
    optimizer_class : type
        A subclass of ``torch.optim.Optimizer``. Its own subclasses need a call of their own.
    kind : "elementwise" or "per_parameter"
        As for :func:`offload_optimizer`.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, or tensorferry's own table has the class with another kind.
    """
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"optimizer_class: {optimizer_class!r} is not a subclass of torch.optim.Optimizer"
        )
    known = _in_table(optimizer_class)
    if known is not None and kind != known.kind:
        raise ValueError(f"kind: {optimizer_class.__name__} is known to be {known.kind!r}")
    _registered[optimizer_class] = Known(_checked(kind))


def known_of(optimizer: torch.optim.Optimizer, word: Kind | None) -> Known:
    """Return what is known about an optimizer; ``word`` is the ``kind`` that the user has given, or None.

    Raises
    ------
    NotSeparableError
        The class is not in the table, and there is no word for it; or ``step`` was replaced on the object.
    ValueError
        The word is not one of the kinds, or claims more than the table does.
    """
    cls = type(optimizer)
    name = cls.__name__
    known = _in_table(cls) or _registered.get(cls)
    if word is not None:
        _checked(word)
        if known is not None and known.kind == "per_parameter" and word != known.kind:
            raise ValueError(
                f"kind: a step of {name} depends on whole parameters; it is not {word!r}"
            )
        known = known._replace(kind=word) if known is not None else Known(word)
    if known is None:
        raise NotSeparableError(
            f"{name} ({cls.__module__}) cannot be offloaded without your word, because tensorferry does not know what "
            'its step depends on. Pass kind="per_parameter" if the update of a parameter depends only on that '
            "parameter, its gradient, its state and the values of its group, which the step changes in the same way "
            'whichever parameters it gets; pass kind="elementwise" if this holds for each element, too. '
            "tensorferry.offload.check() compares such steps with steps in memory"
        )
    step: Any = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):  # a scheduler's wrapper, which counts calls
        step = getattr(step, "__wrapped__", None)
    own: Any = cls.step
    if step is not None and getattr(step, "__func__", step) is not own:
        raise NotSeparableError(
            f"{name} cannot be offloaded: optimizer.step has been replaced on this object. Remedy: hooks "
            "(register_step_pre_hook), or a class of your own"
        )
    return known


def _in_table(cls: type) -> Known | None:
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    if getattr(sys.modules.get(module), cls.__name__, None) is not cls:
        return None
    return TABLE.get(f"{module}.{cls.__name__}")


def _checked(kind: Any) -> Kind:
    one_of(kind, "kind", KINDS)
    return kind  # type: ignore[no-any-return]
