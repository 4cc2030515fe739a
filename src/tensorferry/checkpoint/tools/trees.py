"""The tensors in a pickle of torch.save's, by the names they have in it: read without trust, and nothing is made.

Any class or function may be named: it becomes a blank that keeps what it would have been made of, so that tensors in a
module or an optimizer are found as well. What a class would do with items that a pickle gives it is not known, and
those are passed over.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.zipformat import blobs, pickles
from tensorferry.checkpoint.zipformat.blobs import Tensor
from tensorferry.checkpoint.zipformat.pickles import (
    Blank,
    Maker,
    MalformedError,
    RefusedError,
    table,
)

# Longer than anything real. Names are made of keys that a pickle may repeat at no cost; longer ones are cut.
MAX_NAME = 256
_MAX_DEPTH, _MAX_TENSORS = 100, 1_000_000


def named_tensors(
    pickled: bytes, path: str, others: list[str] | None = None
) -> list[tuple[str, Tensor]]:
    """Return names, such as "model.layers.0.weight", and tensors, in the order in which they are met.

    Parameters
    ----------
    pickled : bytes
        The pickle.
    path : str
        What the file is called in messages.
    others : list of str, optional
        Gets the names of what is neither a tensor nor a dict, list or tuple.

    Raises
    ------
    CheckpointError
        It is no pickle of torch.save's, or describes more than a million tensors.
    """
    try:
        root, _ = pickles.loads(pickled, _NAMES, blobs.storage_of)
    except (MalformedError, RefusedError) as error:
        raise CheckpointError(f"its pickle cannot be read ({error})", path) from None
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()  # containers may hold each other, or themselves
    todo = [("", root, 0)]
    while todo:
        name, value, depth = todo.pop()
        if type(value) is Tensor:
            found.append((name or "(itself)", value))
        elif id(value) not in seen and depth < _MAX_DEPTH:
            seen.add(id(value))
            if others is not None:
                others += _lost(name, value, depth)
            children = [
                (_joined(name, key), child, depth + 1)
                for key, child in _items(value)
                if type(child) in _LOOKED_INTO
            ]
            todo += reversed(children)
        if len(found) + len(todo) > _MAX_TENSORS:
            raise CheckpointError("its pickle describes more than a million tensors", path)
    return found


_LOOKED_INTO = {Tensor, dict, list, tuple, deque, Blank}


def _items(value: Any) -> Any:
    """Return keys and values of a container; None as a key adds nothing to a name."""
    if type(value) is dict:
        return value.items()
    if type(value) is Blank:
        return ((None, each) for each in value.inside)
    return enumerate(value) if type(value) in _LOOKED_INTO else ()


def _lost(name: str, value: Any, depth: int) -> list[str]:
    """Return the names of what tensors alone would not tell of a container."""
    if type(value) is Blank or type(value) not in _LOOKED_INTO:
        return [name or "(itself)"]
    told = {Tensor} if depth + 1 == _MAX_DEPTH else _LOOKED_INTO
    return [_joined(name, key) for key, child in _items(value) if type(child) not in told]


def _joined(name: str, key: Any) -> str:
    if key is None:
        return name
    known = type(key) is str or (type(key) is int and abs(key) < 1 << 64)
    part = str(key)[:MAX_NAME] if known else "?"
    whole = f"{name}.{part}" if name else part
    return whole if len(whole) <= MAX_NAME else f"{whole[: MAX_NAME - 1]}…"


def _blank(*arguments: Any) -> Blank:
    made = Blank()
    made.inside = list(arguments)
    return made


def _build(made: Blank, state: Any) -> None:
    made.inside.append(state)


def _tensor(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> Any:
    """Stand for _rebuild_tensor_v2 and v3, of which the latter has a dtype, with hooks or without."""
    if type(storage) is not tuple:
        raise MalformedError("a tensor without a storage")
    dtype = rest[2] if len(rest) > 2 and rest[2] is not None else storage[1]
    return blobs.described(storage, offset, sizes, strides, dtype, ())


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_type(function: Any, _kind: Any, arguments: Any, *state: Any) -> Any:
    """Stand for _rebuild_from_type_v2, which makes subclasses of tensors."""
    if type(function) is not Maker or type(arguments) is not tuple:
        raise MalformedError("a tensor made by what cannot be called")
    made = function.make(*arguments)
    return made if type(made) is Tensor else _blank(made, *state)


class _Names(dict[str, Maker]):
    """Every name there may be."""

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(vars(torch).get(name.removeprefix("torch.")), torch.dtype):
            return default  # the machine has them
        return self[name] if name in self else Maker(name, _blank)


def _dict(*arguments: Any) -> Any:
    """Stand for dicts that are made empty: OrderedDict, and defaultdict of something."""
    return _blank(*arguments) if arguments and type(arguments[0]) is not Maker else {}


def _no_state(_made: dict[Any, Any], _state: Any) -> None:
    """Take the attributes of a module's state_dict()."""


_NAMES = _Names(
    table(
        [
            Maker("torch._utils._rebuild_tensor_v2", lambda *rest: _tensor(*rest[:6])),
            Maker("torch._utils._rebuild_tensor_v3", _tensor),
            Maker("torch._utils._rebuild_parameter", _first),
            Maker("torch._utils._rebuild_parameter_with_state", _first),
            Maker("torch._tensor._rebuild_from_type_v2", _of_type),
            Maker("collections.OrderedDict", _dict, _no_state, dict),
            Maker("collections.defaultdict", _dict),
            Maker("", _blank, _build, Blank),
        ]
    )
)
