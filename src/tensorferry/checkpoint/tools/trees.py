"""The tensors in a pickle of torch.save's, by the names they have in it: read without trust, and nothing is made.

Any class or function may be named: it becomes a blank that keeps what it would have been made of, its items and its
state, so that tensors in a module or an optimizer are found as well. What is stored under several names is found under
each of them.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch

from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.zipformat import blobs, pickles
from tensorferry.checkpoint.zipformat.blobs import PickledTensor
from tensorferry.checkpoint.zipformat.pickles import (
    Blank,
    Maker,
    MalformedError,
    RefusedError,
    table,
)

# Longer than anything real. Names are made of keys that a pickle may repeat at no cost; longer ones are cut.
MAX_NAME = 256
_MAX_DEPTH, _MAX_NODES = 100, 1_000_000
# What torch names where it makes tensors again.
_TENSOR_MAKERS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
_OF_BUFFERS = ("persistent", "_is_buffer")


def named_tensors(
    pickled: bytes, path: str, others: list[str] | None = None
) -> list[tuple[str, PickledTensor]]:
    """Return names, such as "model.layers.0.weight", and tensors, in the order in which they are met.

    Parameters
    ----------
    pickled : bytes
        The pickle.
    path : str
        What the file is called in messages.
    others : list of str, optional
        Gets the names of what is neither a tensor nor a dict, list or tuple with something in it.

    Raises
    ------
    CheckpointError
        It is no pickle of torch.save's, or describes more than a million tensors. Where ``others`` are wanted: it has
        tensors of a kind that is not known, or deeper than is looked into.
    """
    try:
        root, _ = pickles.loads(pickled, _NAMES, blobs.storage_of)
    except (MalformedError, RefusedError) as error:
        raise CheckpointError(f"its pickle cannot be read ({error})", path) from None
    found: list[tuple[str, PickledTensor]] = []
    # What the present value is in: containers may hold each other, or themselves.
    above: list[int] = []
    todo = [("", root, 0)]
    count = 0
    while todo:
        name, value, depth = todo.pop()
        count += 1
        if count + len(todo) > _MAX_NODES:
            raise CheckpointError("its pickle describes more than a million tensors", path)
        if type(value) is PickledTensor:
            found.append((name or _ROOT, value))
            continue
        del above[depth:]
        is_told = id(value) not in above and depth < _MAX_DEPTH
        if others is not None:
            others += _lost(name, value, depth, path, is_told=is_told)
        if is_told:
            above.append(id(value))
            children = [
                (_joined(name, key), child, depth + 1)
                for key, child in _items(value)
                if type(child) in _LOOKED_INTO
            ]
            todo += reversed(children)
    return found


_LOOKED_INTO = {PickledTensor, dict, list, tuple, deque, Blank}
_ROOT = "(itself)"
_NOTHING = object()  # instead of a key: adds nothing to a name


def _items(value: Any) -> Any:
    """Return keys and values of a container."""
    if type(value) is dict:
        return value.items()
    if type(value) is Blank:
        return ((_NOTHING, each) for each in value.inside)
    return enumerate(value) if type(value) in _LOOKED_INTO else ()


def _lost(name: str, value: Any, depth: int, path: str, *, is_told: bool) -> list[str]:
    """Return the names of what tensors alone would not tell of a container."""
    if depth >= _MAX_DEPTH:
        reason = f"it is in more than {_MAX_DEPTH} containers, and what is in it would be lost"
        raise CheckpointError(reason, path, names=(name,))
    if type(value) is Blank and value.called.startswith(_TENSOR_MAKERS):
        reason = f"it is a kind of tensor that is not known here (made by {value.called})"
        raise CheckpointError(reason, path, names=(name or _ROOT,))
    if type(value) not in _LOOKED_INTO or type(value) is Blank or not is_told:
        return [name or _ROOT]
    if not value and depth:
        return [name]
    return [_joined(name, key) for key, child in _items(value) if type(child) not in _LOOKED_INTO]


def _joined(name: str, key: Any) -> str:
    if key is _NOTHING:
        return name
    known = type(key) is str or (type(key) is int and abs(key) < 1 << 64)
    part = str(key)[:MAX_NAME] if known else "?"
    whole = f"{name}.{part}" if name else part
    return whole if len(whole) <= MAX_NAME else f"{whole[: MAX_NAME - 1]}…"


def _blank(*arguments: Any, called: str = "") -> Blank:
    made = Blank()
    made.inside, made.called = list(arguments), called
    return made


def _with(made: Any, *more: Any) -> Any:
    """Return a tensor, or where there is more to it a blank that has both."""
    more = tuple(each for each in more if each)
    return _blank(made, *more) if more or type(made) is not PickledTensor else made


def _parameter(data: Any, _grad: Any, hooks: Any, state: Any = None) -> Any:
    return _with(data, hooks, state)


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand for _rebuild_from_type_v2, which makes subclasses of tensors, and tensors with attributes."""
    if type(function) is not Maker or type(arguments) is not tuple or type(kind) is not Maker:
        raise MalformedError("a tensor made by what cannot be called")
    if type(state) is dict:
        state = {key: value for key, value in state.items() if key not in _OF_BUFFERS}
    return _with(function.make(*arguments), state, None if kind.name in _PLAIN else [kind])


class _TreeNames(dict[str, Maker]):
    """Every name there may be."""

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype):
            return default  # the machine has them
        return self[name] if name in self else Maker(name, functools.partial(_blank, called=name))


def _dict(*arguments: Any) -> Any:
    """Stand for dicts that are made empty: OrderedDict, and defaultdict of something."""
    return _blank(*arguments) if arguments and type(arguments[0]) is not Maker else {}


def _attributes(made: dict[Any, Any], state: Any) -> None:
    """Take the attributes of a module's state_dict(); others are kept under a key that no name has."""
    if type(state) is not dict or state.keys() - {"_metadata"}:
        made[_blank()] = state


_NAMES = _TreeNames(
    table(
        [
            *blobs.tensor_makers(lambda made, _grad, *more: _with(made, *more)),
            Maker("torch._utils._rebuild_parameter", _parameter),
            Maker("torch._utils._rebuild_parameter_with_state", _parameter),
            Maker("torch._tensor._rebuild_from_type_v2", _of_type),
            Maker("collections.OrderedDict", _dict, _attributes, dict),
            Maker("collections.defaultdict", _dict),
            Maker("", _blank, lambda made, state: made.inside.append(state), Blank),
        ]
    )
)
