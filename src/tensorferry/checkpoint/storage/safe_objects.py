"""Objects of a checkpoint that are not tensors: read safely, and pickled again for a planner.

torch's planners pass an object's blob (the bytes of torch.save) to `torch.load(weights_only=False)`, which runs code in
it. The author of `.metadata` can declare any entry to be an object. So a planner never gets the blob from the file: the
object is read by an unpickler with a table of names (:mod:`tensorferry.checkpoint.zipformat.unpickling`), and the
planner gets a new blob of it. The table has numbers, text, containers, times, arrays and tensors, and the classes that
the program itself has declared safe (``torch.serialization.add_safe_globals``).

The messages of RefusedError and MalformedError name the thing in the blob that is not accepted ("it contains a tensor
with hooks").
"""

from __future__ import annotations

import argparse
import array
import codecs
import collections
import datetime
import decimal
import fractions
import functools
import io
import math
import re
import struct
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tensorferry.base.caller_warnings import warn
from tensorferry.checkpoint.storage.metadata import SIMPLE
from tensorferry.checkpoint.zipformat import blobs, zips
from tensorferry.checkpoint.zipformat.unpickling import (
    MalformedError,
    RefusedError,
    StandIn,
    Unpickler,
    declared,
    refuse_call,
    stand_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# The cache of small blobs that sanitize_pickle() has returned: the maximum size of a blob, and the number of blobs.
_KEPT_NBYTES, _KEPT_COUNT = 4096, 1024
# Types of arguments from which the classes in the table are made, and which bound what they need in memory and time.
_PLAIN = frozenset(
    [
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        tuple,
        list,
        dict,
        datetime.timedelta,
        datetime.timezone,
    ]
)
_NUMPY_TYPE = re.compile(r"[biufc]\d{1,2}|\?|[bBhHiIlLqQefdgFDG]|[SUV]\d{1,9}|[mM]8")
_TIME_UNIT = re.compile(rb"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as")
# The opcode for a class or function in pickles of protocol 2, which torch.save writes.
_GLOBAL = re.compile(rb"c[\w.]+\n[\w.]+\n")
# Types whose instances are accepted without a check of their contents.
_CERTAIN = frozenset(
    [str, bytes, int, float, bool, complex, type(None), torch.Size, torch.dtype, torch.device]
)


def refusal_message(error: RefusedError) -> str:
    """Return the reason for refusing an object that needs trust, with the remedies."""
    return (
        f"it contains {error}, which is not a plain value and may run any code; if you trust the author of this "
        "checkpoint, read it with trust_pickle=True, or declare the class safe by torch.serialization.add_safe_globals"
    )


def refusal(blob: bytes) -> str | None:
    """Return why :func:`sanitize_pickle` would refuse an object in a blob of torch.save, or None if it accepts it."""
    # A pickle that names no class or function has plain values only, which are accepted.
    if _GLOBAL.search(blob) is None:
        return None
    try:
        _sanitize(blob, _declared_safe(), placed=False)
    except RefusedError as error:
        return refusal_message(error)
    except Exception as error:
        return f"it cannot be read without trust ({error})"
    return None


def refusals_in(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and reason for each object of a state that :func:`sanitize_pickle` would refuse.

    If an object cannot be pickled, and so cannot be saved, pickle's error is raised.
    """
    objects, _ = flatten_state_dict(state)
    for name, value in objects.items():
        if not isinstance(value, torch.Tensor) and not _is_certain(value):
            torch.save(value, stream := io.BytesIO())
            if (why := refusal(stream.getvalue())) is not None:
                yield name, why


def _is_certain(value: Any) -> bool:
    """Return whether an object is certain to be accepted; False means that only a full check can decide."""
    todo, seen = [value], set()
    while todo:
        each = todo.pop()
        kind = type(each)
        if kind in _CERTAIN or id(each) in seen:
            continue
        seen.add(id(each))
        if kind in (dict, collections.OrderedDict):
            todo += [*each, *each.values()]
        elif kind in (list, tuple):
            todo += each
        else:
            return False
    return True


def warn_of_refusals(refusals: Mapping[str, str], reader: str) -> None:
    """Warn of saved objects that a reader will refuse."""
    for name, why in refusals.items():
        warn(f"{name!r} is saved, but {reader} will refuse to load it: {why}")


def sanitize_pickle(blob: bytes) -> bytes:
    """Return a blob of the same object that may be given to ``torch.load(weights_only=False)``.

    Raises
    ------
    RefusedError
        The blob contains something that may run code, or is not supported.
    MalformedError
        The bytes are not a blob of torch.save.
    """
    # Optimizers store the same few numbers for each of thousands of parameters, so small blobs are cached.
    sanitize = _sanitize_small if len(blob) <= _KEPT_NBYTES else _sanitize
    return sanitize(blob, _declared_safe())


def _declared_safe() -> tuple[tuple[str, Any], ...]:
    """Return the classes and functions that the program has declared safe, with their names in pickles."""
    found: Any = torch.serialization.get_safe_globals()
    pairs = (
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        for each in found
    )
    return tuple(sorted(((name, kind) for kind, name in pairs), key=lambda pair: pair[0]))


def _sanitize(blob: bytes, safe: tuple[tuple[str, Any], ...], *, placed: bool = True) -> bytes:
    """Read an object and pickle it again; its tensors stay in host memory unless ``placed`` is set."""
    try:
        places = zips.layout(lambda begin, end: blob[begin:end], len(blob))
    except (zips.UnknownArchiveError, struct.error, UnicodeDecodeError) as error:
        raise MalformedError(f"not an archive of torch.save: {error}") from None
    records = {
        place.name.partition("/")[2]: blob[place.begin : place.begin + place.nbytes]
        for place in places
    }
    if "data.pkl" not in records:
        raise MalformedError("an archive without an object")
    value = _ObjectUnpickler(records, dict(safe), placed).load()
    try:
        torch.save(value, stream := io.BytesIO())
    except RefusedError:
        raise
    except Exception as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from None
    return stream.getvalue()


_sanitize_small = functools.lru_cache(_KEPT_COUNT)(_sanitize)


class _ObjectUnpickler(Unpickler):
    """Reads the pickle of an archive, and creates the storages that its tensors refer to."""

    def __init__(self, records: dict[str, bytes], safe: dict[str, Any], placed: bool) -> None:
        super().__init__(records["data.pkl"], self._stand_in_for)
        self._records, self._declared, self._placed = records, safe, placed
        self._storages: dict[str, torch.UntypedStorage] = {}

    def _stand_in_for(self, name: str) -> Any:
        found = _table().get(name) or blobs.torch_constant(name)
        if found is None and name in self._declared:
            return declared(self._declared[name], name)
        return found or _named_tuple(name)

    def persistent_load(self, identity: Any) -> torch.storage.TypedStorage:
        """Return the storage that a persistent id of a pickle refers to."""
        _, dtype, key, location, count = blobs.storage_of(identity)
        if dtype is None or type(count) is not int:
            raise MalformedError("a storage of an unknown kind")
        if self._records.get("byteorder", b"little") != b"little":
            raise MalformedError("a tensor of a machine with the other byte order")
        content = self._records[f"data/{key}"]
        if len(content) != count * dtype.itemsize:
            raise MalformedError("a storage with a wrong size")
        if key not in self._storages:
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
            if content:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            try:
                data = data.to(location if self._placed else "cpu")
            except Exception as error:
                # The type of the error depends on the device's backend: AssertionError, ModuleNotFoundError, ...
                raise RefusedError(f"memory of the device {location}: {error}") from None
            self._storages[key] = data.untyped_storage()
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=self._storages[key], dtype=dtype, _internal=True)  # type: ignore[no-any-return]


def _of_plain(kind: Any) -> Callable[..., Any]:
    """Return a function that makes an instance of a class from plain values."""

    def make(*arguments: Any) -> Any:
        if not {*map(type, arguments)} <= _PLAIN:
            raise MalformedError(f"a {kind.__name__} made from something other than plain values")
        return kind(*arguments)

    return make


def _named_tuple(name: str) -> StandIn | None:
    """Return a stand-in for a class of plain named tuples that the program has imported, else None.

    A class that overrides what pickle calls is refused.
    """
    module, _, short = name.rpartition(".")
    kind: Any = vars(sys.modules.get(module, types)).get(short)
    if not isinstance(kind, type) or kind.__mro__ != (kind, tuple, object):
        return None
    fields = vars(kind).get("_fields")
    if type(kind) is not type or type(fields) is not tuple or not fields:
        return None
    plain = collections.namedtuple("plain", fields, rename=True)  # type: ignore[misc]
    for each in ("__new__", "__getnewargs__", "__reduce__", "__reduce_ex__", "__hash__", "__eq__"):
        codes = {_code_of(getattr(one, each)) for one in (kind, plain)}
        if len(codes) > 1:
            return None

    def make(*values: Any) -> Any:
        if len(values) != len(fields):
            raise MalformedError(f"a {short} with another number of fields")
        return tuple.__new__(kind, values)

    return stand_in(name, make)


def _code_of(function: Any) -> Any:
    return getattr(getattr(function, "__code__", None), "co_code", function)


# The classes that a defaultdict may have as its factory.
_FACTORIES = {
    **{kind.__name__: kind for kind in (list, dict, int, float, str, bool, set)},
    "OrderedDict": collections.OrderedDict,
}


def _defaultdict(factory: Any = None, *items: Any) -> collections.defaultdict[Any, Any]:
    if items or not (factory is None or isinstance(factory, StandIn)):
        raise MalformedError("a defaultdict made from something other than a class")
    if factory is None:
        return collections.defaultdict()
    module, _, short = factory.name.rpartition(".")
    if module not in ("builtins", "collections") or short not in _FACTORIES:
        raise RefusedError("a defaultdict with a factory that is not a plain type")
    return collections.defaultdict(_FACTORIES[short])


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Replace codecs.encode(), which pickles of bytes for Python 2 call."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedError("_codecs.encode")
    return codecs.encode(text, "latin-1")


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    return bytearray(data if type(data) is bytes and encoding is None else _encode(data, encoding))


def _bytes(data: Any = b"") -> bytes:
    if data != b"" or type(data) is not bytes:
        raise MalformedError("bytes created from another object")
    return b""


def _fraction(*values: Any) -> fractions.Fraction:
    """Return a fraction of two integers, or of text such as "1/3", which Python before 3.12 pickles.

    Other text is refused: Fraction("1e999999999") would need an unlimited amount of memory.
    """
    if len(values) == 1 and type(values[0]) is str and re.fullmatch(r"-?\d+(/\d+)?", values[0]):
        return fractions.Fraction(values[0])
    if len(values) != 2 or {*map(type, values)} != {int}:
        raise MalformedError("a Fraction made from something other than two integers")
    return fractions.Fraction(*values)


def _tensor(rebuild: Any) -> Callable[..., Any]:
    """Return a function that rebuilds a tensor in its storage, with torch's function; ``rebuild`` is that function."""

    def make(storage: Any, *arguments: Any) -> torch.Tensor:
        if type(storage) is not torch.storage.TypedStorage or len(arguments) < 5 or arguments[4]:
            raise RefusedError("a tensor with hooks or without a storage")
        nbytes = storage._untyped_storage.nbytes()
        tensor: torch.Tensor = rebuild(storage, *arguments)
        if storage._untyped_storage.nbytes() != nbytes:  # torch enlarges it
            raise MalformedError("a tensor that extends beyond its storage")
        return tensor

    return make


def _parameter(data: Any, grad: Any, hooks: Any) -> torch.nn.Parameter:
    if type(data) is not torch.Tensor or hooks:
        raise RefusedError("a parameter with hooks")
    return torch.nn.Parameter(data, grad is True)


class _Dtype:
    """A dtype while the pickle is read.

    A pickle sets the state of its dtypes. NumPy's own dtypes are shared by all arrays of the process, and trust the
    state that they get.
    """

    def __init__(self, name: Any, _align: Any = False, _copy: Any = True) -> None:
        if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
            raise RefusedError("a NumPy dtype that is not a number, text or time")
        self.dtype: Any = _numpy().dtype(name)

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) not in (8, 9) or state[2:5] != (None, None, None):
            raise RefusedError("a NumPy dtype that is not a number, text or time")
        order, more = state[1], state[8:]
        if order not in ("<", ">", "|", "=") or (more and self.dtype.kind not in "mM"):
            raise MalformedError("a malformed dtype")
        if more:
            kind = f"{self.dtype.kind}8{_time_unit(*more)}"
            self.dtype = _numpy().dtype(kind)
        self.dtype = self.dtype.newbyteorder(order)

    def __reduce__(self) -> Any:
        return self.dtype.__reduce__()


def _time_unit(metadata: Any) -> str:
    """Return the unit of a dtype of times, such as "[25s]", from the metadata of its state."""
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0]:
        raise RefusedError("a NumPy dtype with metadata")
    if type(metadata[1]) is not tuple or len(metadata[1]) != 4:
        raise MalformedError("a malformed time unit")
    unit, count, *rest = metadata[1]
    if unit == b"generic":
        return ""
    is_unit = type(unit) is bytes and _TIME_UNIT.fullmatch(unit) and rest == [1, 1]
    if not is_unit or type(count) is not int or not 0 < count < 1 << 31:
        raise MalformedError("a malformed time unit")
    return f"[{count}{unit.decode()}]"


def _array(dtype: Any, shape: Any, data: Any, columns: Any = False) -> Any:
    if (
        type(dtype) is not _Dtype
        or type(shape) is not tuple
        or any(type(length) is not int or length < 0 for length in shape)
        or type(data) is not bytes
        or math.prod(shape) * dtype.dtype.itemsize != len(data)
    ):
        raise MalformedError("a malformed array")
    flat = _numpy().frombuffer(data, dtype.dtype) if data else _numpy().empty(0, dtype.dtype)
    return flat.reshape(shape, order="F" if columns else "C")


class _Array:
    """An array while the pickle is read."""

    def __init__(self, kind: Any, _shape: Any = None, _type: Any = None) -> None:
        if getattr(kind, "name", None) != "numpy.ndarray":
            raise RefusedError("a subclass of NumPy's ndarray")

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise MalformedError("a malformed array")
        _, shape, dtype, columns, data = state
        self.array = _array(dtype, shape, data, columns)

    def __reduce__(self) -> Any:
        return self.array.__reduce__()


@functools.cache
def _table() -> dict[str, StandIn]:
    """Return the stand-ins by name."""
    utils: Any = torch._utils
    makers: dict[str, Callable[..., Any]] = {
        "_codecs.encode": _encode,
        "builtins.bytes": _bytes,
        "builtins.bytearray": _bytearray,
        "collections.defaultdict": _defaultdict,
        "fractions.Fraction": _fraction,
        "torch._utils._rebuild_tensor_v2": _tensor(utils._rebuild_tensor_v2),
        "torch._utils._rebuild_tensor_v3": _tensor(utils._rebuild_tensor_v3),
        "torch._utils._rebuild_parameter": _parameter,
        "numpy.dtype": _Dtype,
    }
    for core in ("core", "_core"):  # before and since NumPy 2
        makers[f"numpy.{core}.multiarray._reconstruct"] = _Array
        makers[f"numpy.{core}.multiarray.scalar"] = lambda dtype, data: _array(dtype, (), data)[()]
    # Classes of which pickles make instances by calls with plain values, and classes that they instantiate and then
    # give a state.
    for kind in _CALLED + _GIVEN_STATE:
        name = f"{kind.__module__}.{kind.__qualname__}"
        makers.setdefault(name, _of_plain(kind))
    table = {name: stand_in(name, make) for name, make in makers.items()}
    for kind in _GIVEN_STATE:
        name = f"{kind.__module__}.{kind.__qualname__}"
        table[name] = stand_in(name, makers[name], functools.partial(kind.__new__, kind))
    # Classes that a pickle may only name.
    for name in (*blobs.STORAGES, "numpy.ndarray", *(f"builtins.{each}" for each in _FACTORIES)):
        table.setdefault(name, stand_in(name, refuse_call))
    sparse = "torch._utils._rebuild_sparse_tensor"
    return table | SIMPLE | {sparse: declared(utils._rebuild_sparse_tensor, sparse)}


_CALLED: tuple[Any, ...] = (
    *(complex, slice, range, array.array, decimal.Decimal, torch.device),
    *(collections.Counter, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)
_GIVEN_STATE: tuple[Any, ...] = (
    *(collections.OrderedDict, collections.ChainMap, collections.UserDict, collections.UserList),
    *(collections.UserString, types.SimpleNamespace, argparse.Namespace, uuid.UUID),
    *(io.BytesIO, io.StringIO),
)


def _numpy() -> Any:
    import numpy as np

    return np
