"""The tensors in a pickle of torch.save, with names made of the keys that lead to them; no objects are created.

Any class or function may occur in the pickle. Instead of its result there is a placeholder with the arguments, items
and state that the pickle gives it, so tensors inside modules or optimizers are found as well. A tensor that is stored
under several names is found under each of them.
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
    Constructor,
    MalformedError,
    Placeholder,
    RefusedError,
    table,
)

# The limit for a name, longer than any real one; longer names are cut. A small pickle can use one long key at every
# level of nested dicts, so without a limit its names could need any amount of memory.
MAX_NAME = 256
_MAX_DEPTH, _MAX_NODES = 100, 1_000_000
# Prefixes of the functions with which torch rebuilds tensors.
_TENSOR_MAKERS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")
# The classes of plain tensors, and the attributes by which torch marks buffers: a conversion loses nothing by dropping
# both.
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
_OF_BUFFERS = ("persistent", "_is_buffer")


def named_tensors(
    pickled: bytes, path: str, others: list[str] | None = None
) -> list[tuple[str, PickledTensor]]:
    """Return the names, such as "model.layers.0.weight", and tensors of a pickle, in traversal order.

    Parameters
    ----------
    pickled : bytes
        The pickle.
    path : str
        The file's name for messages.
    others : list of str, optional
        Receives the names of objects other than tensors and non-empty dicts, lists and tuples.

    Raises
    ------
    CheckpointError
        The data are not a pickle of torch.save, or have more than a million tensors and containers. With ``others``
        also: a tensor is of an unknown kind, or the containers are nested too deeply.
    """
    try:
        root, _ = pickles.loads(pickled, _NAMES, blobs.storage_of)
    except (MalformedError, RefusedError) as error:
        raise CheckpointError(f"its pickle cannot be read ({error})", path) from None
    found: list[tuple[str, PickledTensor]] = []
    # The ids of the containers around the current value. A container that is around itself is not traversed again,
    # which would never end.
    above: list[int] = []
    todo = [("", root, 0)]
    count = 0
    while todo:
        name, value, depth = todo.pop()
        count += 1
        if count + len(todo) > _MAX_NODES:
            raise CheckpointError("its pickle has more than a million tensors and containers", path)
        if type(value) is PickledTensor:
            found.append((name or _ROOT, value))
            continue
        del above[depth:]
        is_traversed = id(value) not in above and depth < _MAX_DEPTH
        if others is not None:
            others += _lost_names(name, value, depth, path, is_traversed=is_traversed)
        if is_traversed:
            above.append(id(value))
            children = [
                (_join_name(name, key), child, depth + 1)
                for key, child in _items(value)
                if type(child) in _LOOKED_INTO
            ]
            todo += reversed(children)
    return found


_LOOKED_INTO = {PickledTensor, dict, list, tuple, deque, Placeholder}
_ROOT = "(itself)"
_NOTHING = object()  # a key that adds nothing to a name


def _items(value: Any) -> Any:
    """Return the keys and values of a container."""
    if type(value) is dict:
        return value.items()
    if type(value) is Placeholder:
        return ((_NOTHING, each) for each in value.inside)
    return enumerate(value) if type(value) in _LOOKED_INTO else ()


def _lost_names(name: str, value: Any, depth: int, path: str, *, is_traversed: bool) -> list[str]:
    """Return the names of objects in a container that would be lost if only tensors were kept."""
    if depth >= _MAX_DEPTH:
        reason = f"it is nested in more than {_MAX_DEPTH} containers, and would be lost"
        raise CheckpointError(reason, path, names=(name,))
    if type(value) is Placeholder and value.called.startswith(_TENSOR_MAKERS):
        reason = f"it is an unknown kind of tensor (created by {value.called})"
        raise CheckpointError(reason, path, names=(name or _ROOT,))
    if type(value) not in _LOOKED_INTO or type(value) is Placeholder or not is_traversed:
        return [name or _ROOT]
    if not value and depth:
        return [name]
    return [
        _join_name(name, key) for key, child in _items(value) if type(child) not in _LOOKED_INTO
    ]


def _join_name(name: str, key: Any) -> str:
    if key is _NOTHING:
        return name
    known = type(key) is str or (type(key) is int and abs(key) < 1 << 64)
    part = str(key)[:MAX_NAME] if known else "?"
    whole = f"{name}.{part}" if name else part
    return whole if len(whole) <= MAX_NAME else f"{whole[: MAX_NAME - 1]}…"


def _placeholder(*arguments: Any, called: str = "") -> Placeholder:
    instance = Placeholder()
    instance.inside, instance.called = list(arguments), called
    return instance


def _with_parts(instance: Any, *more: Any) -> Any:
    """Return ``instance`` if it is a tensor without more parts, otherwise a placeholder for it and its parts."""
    more = tuple(each for each in more if each)
    is_plain = type(instance) is PickledTensor and not more
    return instance if is_plain else _placeholder(instance, *more)


def _parameter(data: Any, _grad: Any, hooks: Any, state: Any = None) -> Any:
    return _with_parts(data, hooks, state)


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Replace _rebuild_from_type_v2, which creates subclasses of tensors, and tensors with attributes."""
    if (type(function), type(kind), type(arguments)) != (Constructor, Constructor, tuple):
        raise MalformedError("a tensor created by an object that cannot be called")
    if type(state) is dict:
        state = {key: value for key, value in state.items() if key not in _OF_BUFFERS}
    return _with_parts(function.make(*arguments), state, None if kind.name in _PLAIN else [kind])


class _TreeNames(dict[str, Constructor]):
    """A table that has a constructor for every name."""

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype):
            return default  # the unpickler resolves dtypes without this table
        known = super().get(name)
        return known or Constructor(name, functools.partial(_placeholder, called=name))


def _dict(*arguments: Any) -> Any:
    """Replace dicts that are created empty: OrderedDict, and a defaultdict with a factory."""
    return _placeholder(*arguments) if arguments and type(arguments[0]) is not Constructor else {}


def _attributes(instance: dict[Any, Any], state: Any) -> None:
    """Ignore ``_metadata``, the attribute of a module's state_dict(); keep other attributes as an item of the dict.

    The item's key is a placeholder, which names show as "?".
    """
    if type(state) is not dict or state.keys() - {"_metadata"}:
        instance[_placeholder()] = state


_NAMES = _TreeNames(
    table(
        [
            *blobs.tensor_constructors(lambda instance, _grad, *more: _with_parts(instance, *more)),
            Constructor("torch._utils._rebuild_parameter", _parameter),
            Constructor("torch._utils._rebuild_parameter_with_state", _parameter),
            Constructor("torch._tensor._rebuild_from_type_v2", _of_type),
            Constructor("collections.OrderedDict", _dict, _attributes, dict),
            Constructor("collections.defaultdict", _dict),
            Constructor(
                "", _placeholder, lambda instance, state: instance.inside.append(state), Placeholder
            ),
        ]
    )
)
