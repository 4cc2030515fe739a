"""Objects of a checkpoint that are not tensors: read safely, and pickled again for a planner.

torch's planners pass an object's blob (the bytes of torch.save) to `torch.load(weights_only=False)`, which runs code in
it. The author of `.metadata` can declare any entry to be an object. So a planner never gets the blob from the file.
:mod:`tensorferry.checkpoint.zipformat.pickles` reads the object from that blob, and the planner gets a new blob of the
object. This module has the table of the constructors that such a pickle may use: those of numbers, text, containers,
times, arrays and tensors, which can be created without running code that the pickle chooses. Classes that the program
itself has declared safe (``torch.serialization.add_safe_globals``) are created as torch.load creates them.

The messages of RefusedError and MalformedError name the thing in the blob that is not accepted ("it contains a tensor
with hooks").
"""

from __future__ import annotations

import argparse
import array as arrays
import codecs
import collections
import datetime
import decimal
import fractions
import functools
import io
import math
import pickle
import re
import struct
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tensorferry._core import crc32
from tensorferry.base.caller_warnings import warn
from tensorferry.checkpoint.storage.metadata import OLDER_MODULES, SIMPLE_CONSTRUCTORS
from tensorferry.checkpoint.zipformat import blobs, pickles, zips
from tensorferry.checkpoint.zipformat.pickles import (
    Constructor,
    MalformedError,
    RefusedError,
    empty,
    record,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# The cache of small blobs that sanitize_pickle() has returned: the maximum size of a blob, and the number of blobs.
_KEPT_NBYTES, _KEPT_COUNT = 4096, 1024
_NUMPY_TYPE = re.compile(r"[biufc]\d{1,2}|\?|[bBhHiIlLqQefdgFDG]|[SUV]\d{1,9}|[mM]8")
_TIME_UNIT = re.compile(rb"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as")
# NumPy handles nested dtypes by recursion, so their depth must be limited.
_MAX_DTYPE_DEPTH = 16
_ALIGNED_STRUCT = 0x80  # NPY_ALIGNED_STRUCT
_DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps)(:\d{1,3})?")
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
        _sanitize_with_declared(blob, _sanitize, placed=False)
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
    # Optimizers store the same few numbers for each of thousands of parameters, so small blobs are cached. Refusals are
    # not, because the declarations of safe classes may change.
    return _sanitize_with_declared(
        blob, _sanitize_small if len(blob) <= _KEPT_NBYTES else _sanitize
    )


def _sanitize_with_declared(
    blob: bytes, sanitize: Callable[..., bytes], *, placed: bool = True
) -> bytes:
    try:
        return sanitize(blob, placed=placed)
    except RefusedError:
        if not (trusted := _declared_safe()):
            raise
        return _sanitize(blob, trusted, placed=placed)


def _declared_safe() -> dict[str, Any]:
    """Return the classes that the program has declared safe, by their names in pickles."""
    declared: Any = torch.serialization.get_safe_globals()
    pairs = (
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        for each in declared
    )
    return {name: kind for kind, name in pairs}


def _sanitize(
    blob: bytes, trusted: Mapping[str, Any] | None = None, *, placed: bool = True
) -> bytes:
    linked: list[Any] = []
    try:
        value, has_tensors = _loads(blob, linked, trusted, placed)
        try:
            if not has_tensors:
                return _archive(pickle.dumps(value, 2))
            torch.save(value, stream := io.BytesIO())
            return stream.getvalue()
        except RefusedError:
            raise
        except Exception as error:
            raise MalformedError(f"{type(error).__name__}: {error}") from None
    except (RefusedError, MalformedError):
        # Python frees nested deques and defaultdicts recursively, without a depth limit; clear them one by one instead.
        for each in linked:
            each.clear()
        raise


_sanitize_small = functools.lru_cache(_KEPT_COUNT)(_sanitize)


def _loads(
    blob: bytes, linked: list[Any], trusted: Mapping[str, Any] | None, placed: bool
) -> tuple[Any, bool]:
    """Return the object in a blob of torch.save, and whether it contains tensors.

    Deques and defaultdicts are added to ``linked`` in the order of their creation. Tensors stay in host memory unless
    ``placed`` is set.
    """
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
    storages = _Storages(records, placed)
    names = _Names({**_constructors(), **storages.constructors(), **_linking(linked)})
    value, _ = pickles.loads(
        records["data.pkl"], names, storages.storage_for, OLDER_MODULES, trusted=trusted
    )
    return value, storages.used


def _archive(pickled: bytes) -> bytes:
    """Return an archive with a pickle in it that torch.load accepts."""
    body, directory = bytearray(), bytearray()
    for name, data in ((b"data.pkl", pickled), (b"byteorder", b"little"), (b"version", b"3\n")):
        full_name, crc = b"archive/" + name, crc32(data)
        directory += zips.pack_entry(full_name, len(data), crc, len(body))
        body += zips.pack_header(full_name, len(data), crc, len(body)) + data
    return bytes(body + directory + zips.pack_ends(3, len(body), len(directory)))


class _Storage(NamedTuple):
    """A storage that tensors of the object refer to.

    It is the tuple that :func:`blobs.storage_of` returns, with the storage's data in place of its key.

    An object that refers to a storage in any other way than by a tensor is refused.
    """

    what: str
    dtype: torch.dtype
    data: torch.Tensor
    device: str
    numel: int

    def __reduce__(self) -> Any:
        raise RefusedError("a storage outside a tensor")


class _Storages:
    """Creates the storages of one blob, each once, and the tensors that refer to them."""

    def __init__(self, records: dict[str, bytes], placed: bool) -> None:
        self._records = records
        self._placed = placed
        self._made: dict[str, torch.Tensor] = {}
        self.used = False

    def constructors(self) -> dict[str, Constructor]:
        """Return the constructors of tensors."""
        return table(
            [
                *blobs.tensor_constructors(self._tensor),
                Constructor("torch._utils._rebuild_parameter", self._parameter),
            ]
        )

    def storage_for(self, identity: Any) -> _Storage:
        """Return the storage that a persistent id of a pickle refers to."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise RefusedError("a persistent object")
        _, kind, key, location, count = identity
        dtype = blobs.STORAGES.get(kind.name) if type(kind) is Constructor else None
        if dtype is None or type(key) is not str or type(count) is not int:
            raise MalformedError("a storage of an unknown kind")
        if self._records.get("byteorder", b"little") != b"little":
            raise MalformedError("a tensor of a machine with the other byte order")
        data = self._made.get(key)
        if data is None:
            content = self._records[f"data/{key}"]
            data = torch.empty(0, dtype=torch.uint8, device="cpu")
            if content:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if location != "cpu":
                if type(location) is not str or not _DEVICE.fullmatch(location):
                    raise RefusedError("memory of an unknown device")
                try:
                    data = data.to(location) if self._placed else data
                except Exception as error:
                    # The type of the error depends on the device's backend: AssertionError, ModuleNotFoundError, ...
                    raise RefusedError(f"memory of the device {location}: {error}") from None
            self._made[key] = data
        if data.numel() != count * dtype.itemsize:
            raise MalformedError("a storage with a wrong size")
        self.used = True
        return _Storage("storage", dtype, data, location, count)

    def _tensor(
        self, described: blobs.PickledTensor, grad: Any, hooks: Any, more: dict[Any, Any]
    ) -> torch.Tensor:
        storage, offset, size, stride, dtype, conj, neg = described
        if hooks or more or conj or neg:
            raise RefusedError("a tensor with hooks or attributes")
        if type(storage) is not _Storage:
            raise MalformedError("a malformed tensor")
        data = storage.data
        # The index of the last element that the tensor uses, in elements from the beginning of the storage.
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= data.numel() // dtype.itemsize:
            raise MalformedError("a tensor that extends beyond its storage")
        if 0 in size:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=data.device)
        else:
            tensor = data.view(dtype).as_strided(size, stride, offset)
        return tensor.requires_grad_(grad is True)

    def _parameter(self, data: Any, grad: Any, hooks: Any) -> torch.nn.Parameter:
        if not isinstance(data, torch.Tensor) or hooks:
            raise RefusedError("a parameter with hooks")
        return torch.nn.Parameter(data, grad is True)


class _Names(dict[str, Constructor]):
    """The table of constructors, with the named tuples of imported modules added on access."""

    def get(self, name: str, default: Any = None) -> Any:
        maker = super().get(name, default)
        if maker is None and (kind := _named_tuple(name)) is not None:
            maker = self[name] = Constructor(name, functools.partial(_make_named_tuple, kind))
        return maker


def _named_tuple(full_name: str) -> type[tuple[Any, ...]] | None:
    """Return the class of that name if it is a plain named tuple, with only the methods that Python generates.

    Otherwise return None, also if the program has not imported the class's module.
    """
    module, _, name = full_name.rpartition(".")
    kind = vars(sys.modules.get(module, types)).get(name)
    if not isinstance(kind, type) or kind.__mro__ != (kind, tuple, object):
        return None
    # Refuse a class with other special methods than namedtuple() generates: pickle would call them, and so would a dict
    # that has an instance as a key.
    fields = vars(kind).get("_fields")
    if type(kind) is not type or type(fields) is not tuple or not fields:
        return None
    usual: Any = collections.namedtuple("usual", fields, rename=True)  # type: ignore[misc]
    odd = {each for each in vars(kind) if each.startswith("__")} - {*vars(usual)} - _HARMLESS_NAMES
    return None if odd or _pickle_code_of(kind) != _pickle_code_of(usual) else kind


def _pickle_code_of(named_tuple: Any) -> list[Any]:
    """Return the code of the methods by which pickle creates instances, and gets the values of instances to save."""
    functions = [named_tuple.__new__, named_tuple.__getnewargs__]
    return [getattr(getattr(each, "__code__", None), "co_code", each) for each in functions]


# Attributes that typing.NamedTuple and copyreg add, and methods that pickle does not call.
_HARMLESS_NAMES = frozenset(
    [
        *("__annotations__", "__orig_bases__", "__annotate__", "__annotate_func__"),
        *("__annotations_cache__", "__firstlineno__", "__static_attributes__", "__classdictcell__"),
        *("__repr__", "__str__", "__replace__", "__slotnames__"),
    ]
)


def _make_named_tuple(kind: type[tuple[Any, ...]], *values: Any) -> tuple[Any, ...]:
    if len(values) != len(kind._fields):  # type: ignore[attr-defined]
        raise MalformedError(f"a {kind.__name__} with another number of fields")
    return tuple.__new__(kind, values)


def _refuse_call(*_arguments: Any) -> Any:
    raise MalformedError("a class used as a function")


# The classes that a defaultdict may have as its factory.
_FACTORIES = {
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, str, bool, set)},
    "collections.OrderedDict": collections.OrderedDict,
}


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is None:
        return collections.defaultdict()
    if type(factory) is not Constructor or factory.name not in _FACTORIES:
        raise RefusedError("a defaultdict with a factory that is not a plain type")
    return collections.defaultdict(_FACTORIES[factory.name])


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise MalformedError("a Counter made from something other than a dict")
    counter: collections.Counter[Any] = collections.Counter()
    dict.update(counter, counts or {})
    return counter


def _deque(values: Any = (), most: Any = None) -> collections.deque[Any]:
    """Return a deque with the maximum length ``most``; its values must be in a list or tuple."""
    if type(values) not in (list, tuple):
        raise MalformedError("a deque made from something other than a list")
    return collections.deque(values, most)


def _linking(linked: list[Any]) -> dict[str, Constructor]:
    """Return the constructors of containers that must be freed one by one; each container is added to ``linked``."""

    def linking(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_link(*arguments: Any) -> Any:
            linked.append(make(*arguments))
            return linked[-1]

        return make_and_link

    return table(
        [
            Constructor("collections.defaultdict", linking(_defaultdict)),
            Constructor("collections.deque", linking(_deque)),
        ]
    )


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Replace codecs.encode(), which pickles of bytes for Python 2 call."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedError("_codecs.encode")
    return codecs.encode(text, "latin-1")


def _bytes(data: Any = b"") -> bytes:
    if data != b"" or type(data) is not bytes:
        raise MalformedError("bytes created from another object")
    return b""


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    return bytearray(data if type(data) is bytes and encoding is None else _encode(data, encoding))


def _of_numbers(kind: Any) -> Any:
    def make(*arguments: Any) -> Any:
        if not all(type(each) in (int, float, bool, type(None)) for each in arguments):
            raise MalformedError(f"a {kind.__name__} made from something other than numbers")
        return kind(*arguments)

    return make


def _decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str:
        raise MalformedError("a Decimal made from something other than text")
    return decimal.Decimal(text)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise MalformedError("a malformed device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _date(packed: Any) -> datetime.date:
    year, month, day = struct.unpack(">HBB", packed)
    return datetime.date(year, month, day)


def _checked_zone(zone: Any) -> datetime.timezone | None:
    if zone is not None and type(zone) is not datetime.timezone:
        raise RefusedError("a time zone")
    return zone


def _datetime(packed: Any, zone: Any = None) -> datetime.datetime:
    year, month, day, hour, minute, second, high, low = struct.unpack(">HBBBBBBH", packed)
    fields = (year, month & 0x7F, day, hour, minute, second, high << 16 | low)
    return datetime.datetime(*fields, _checked_zone(zone), fold=month >> 7)


def _time(packed: Any, zone: Any = None) -> datetime.time:
    hour, minute, second, high, low = struct.unpack(">BBBBH", packed)
    fields = (hour & 0x7F, minute, second, high << 16 | low)
    return datetime.time(*fields, _checked_zone(zone), fold=hour >> 7)


def _fraction(*values: Any) -> fractions.Fraction:
    """Return a fraction of two integers, or of text such as "1/3", which Python before 3.12 pickles.

    Other text is refused: Fraction("1e999999999") would need an unlimited amount of memory.
    """
    if len(values) == 1 and type(values[0]) is str and re.fullmatch(r"-?\d+(/\d+)?", values[0]):
        return fractions.Fraction(values[0])
    if len(values) != 2 or {*map(type, values)} != {int}:
        raise MalformedError("a Fraction made from something other than two integers")
    return fractions.Fraction(*values)


def _array(code: Any, values: Any) -> arrays.array[Any]:
    if type(code) is not str or code not in arrays.typecodes or type(values) is not list:
        raise MalformedError("an array of an unknown kind")
    if not {*map(type, values)} <= {int, float, str}:
        raise MalformedError("an array made from something other than numbers")
    return arrays.array(code, values)


def _build_uuid(target: Any, state: Any) -> None:
    number = state.get("int") if type(state) is dict else None
    if (
        type(number) is not int
        or not 0 <= number < 1 << 128
        or not {*state} <= {"int", "is_safe"}
        or type(state.get("is_safe")) not in (int, type(None))
    ):
        raise MalformedError("a malformed UUID")
    target.__setstate__(state)


def _build_stream(target: Any, state: Any) -> None:
    """Set the contents and position of a BytesIO or StringIO, and its attributes, such as a name."""
    if type(state) is not tuple or len(state) < 3:
        raise MalformedError(f"a malformed {type(target).__name__}")
    *fields, attributes = state
    if attributes is not None:
        _check_attributes(target, attributes)
    if any(type(each) not in (bytes, str, int, type(None)) for each in fields):
        raise MalformedError(f"a {type(target).__name__} with a malformed state")
    target.__setstate__(state)


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not set(map(type, name)) <= {str}:
        raise MalformedError("a malformed time zone")
    return datetime.timezone(offset, *name)


def _build_ordered(target: collections.OrderedDict[Any, Any], state: Any) -> None:
    """Set attributes of an OrderedDict, such as the ``_metadata`` of a module's state_dict()."""
    _check_attributes(target, state)
    target.__dict__.update(state)


def _check_attributes(target: Any, state: Any) -> None:
    if type(state) is not dict or not all(
        type(name) is str and not name.startswith("__") for name in state
    ):
        raise RefusedError(f"unexpected attributes of a {type(target).__name__}")


@functools.cache
def _constructors() -> Mapping[str, Constructor]:
    made = [
        # Classes that a pickle may name, but not call; some of them get constructors below.
        *(Constructor(name, _refuse_call) for name in (*blobs.STORAGES, *_FACTORIES)),
        *SIMPLE_CONSTRUCTORS,
        Constructor("builtins.bytes", _bytes),
        Constructor("builtins.bytearray", _bytearray),
        Constructor("_codecs.encode", _encode),
        Constructor("builtins.complex", _of_numbers(complex)),
        Constructor("builtins.slice", _of_numbers(slice)),
        Constructor("builtins.range", _of_numbers(range)),
        # Python 2's name, in pickles of protocol 2
        Constructor("builtins.xrange", _of_numbers(range)),
        Constructor("datetime.timedelta", _of_numbers(datetime.timedelta)),
        Constructor(
            "collections.OrderedDict",
            empty(collections.OrderedDict),
            _build_ordered,
            collections.OrderedDict,
        ),
        Constructor("collections.Counter", _counter),
        Constructor("decimal.Decimal", _decimal),
        Constructor("datetime.date", _date),
        Constructor("datetime.datetime", _datetime),
        Constructor("datetime.time", _time),
        Constructor("datetime.timezone", _timezone),
        Constructor("fractions.Fraction", _fraction),
        Constructor("array.array", _array),
        Constructor("_io.BytesIO", empty(io.BytesIO), _build_stream, io.BytesIO),
        Constructor("_io.StringIO", empty(io.StringIO), _build_stream, io.StringIO),
        Constructor(
            "types.SimpleNamespace",
            empty(types.SimpleNamespace),
            pickles.update,
            types.SimpleNamespace,
        ),
        record("uuid.UUID", uuid.UUID, _build_uuid),
        Constructor("torch.device", _device),
        record("argparse.Namespace", argparse.Namespace),
    ]
    try:
        import numpy as np
    except ImportError:
        return table(made)
    return table(made + _numpy_constructors(np))


def _numpy_constructors(np: Any) -> list[Constructor]:
    class Dtype:
        """Represents a dtype while the pickle is read.

        A pickle sets the state of its dtypes. NumPy's own dtype objects are shared by all arrays of the process, so
        the pickle must not change them.
        """

        def __init__(self, dtype: Any) -> None:
            self.dtype = dtype
            self.depth = 0

        def __reduce__(self) -> Any:
            return self.dtype.__reduce__()

    def make_dtype(name: Any, _align: Any = False, _copy: Any = True) -> Dtype:
        if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
            raise RefusedError("a NumPy dtype that is not a number, text, time or record")
        return Dtype(np.dtype(name))

    def build_dtype(dtype: Dtype, state: Any) -> None:
        if (
            type(state) is not tuple
            or len(state) not in (8, 9)
            or state[1] not in ("<", ">", "|", "=")
        ):
            raise RefusedError("a NumPy dtype that is not a number, text, time or record")
        kind, more = dtype.dtype.kind, state[8:]
        inner, names, fields, nbytes, _, flags = state[2:8]
        if kind == "V" and not more and names is not None:
            dtype.dtype = record_dtype(dtype, names, fields, nbytes, flags)
        elif kind == "V" and not more and inner is not None:
            dtype.dtype = inner_dtype(dtype, inner)
        elif (inner, names, fields) != (None, None, None) or (more and kind not in "mM"):
            raise RefusedError("a NumPy dtype that is not a number, text, time or record")
        elif more:
            dtype.dtype = np.dtype(f"{kind}8{time_unit(*more)}").newbyteorder(state[1])
        else:
            dtype.dtype = dtype.dtype.newbyteorder(state[1])

    def within(dtype: Dtype, inner: Any) -> Any:
        if type(inner) is not Dtype or inner.depth >= _MAX_DTYPE_DEPTH:
            raise MalformedError("a malformed dtype")
        dtype.depth = max(dtype.depth, inner.depth + 1)
        return inner.dtype

    def record_dtype(dtype: Dtype, names: Any, fields: Any, nbytes: Any, flags: Any) -> Any:
        if (
            type(names) is not tuple
            or type(fields) is not dict
            or not {*map(type, names)} <= {str}
            or any(type(place) is not tuple or len(place) != 2 for place in fields.values())
            or {*fields} != {*names}
            or type(flags) is not int
        ):
            raise RefusedError("a NumPy record with titles")
        spec = {
            "names": list(names),
            "formats": [within(dtype, fields[name][0]) for name in names],
            "offsets": [fields[name][1] for name in names],
            "itemsize": nbytes,
        }
        return np.dtype(spec, align=bool(flags & _ALIGNED_STRUCT))

    def inner_dtype(dtype: Dtype, inner: Any) -> Any:
        if type(inner) is not tuple or len(inner) != 2 or type(inner[1]) is not tuple:
            raise MalformedError("a malformed dtype")
        return np.dtype((within(dtype, inner[0]), inner[1]))

    def time_unit(metadata: Any) -> str:
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

    def make_scalar(dtype: Any, data: Any) -> Any:
        return array(dtype, (), data, False)[()]

    def array(dtype: Any, shape: Any, data: Any, columns: Any) -> Any:
        if (
            type(dtype) is not Dtype
            or type(shape) is not tuple
            or any(type(length) is not int or length < 0 for length in shape)
            or type(data) not in (bytes, bytearray)
            or math.prod(shape) * dtype.dtype.itemsize != len(data)
        ):
            raise MalformedError("a malformed array")
        flat = np.frombuffer(data, dtype.dtype) if data else np.empty(0, dtype.dtype)
        return flat.reshape(shape, order="F" if columns else "C").copy(order="A")

    def reconstruct(kind: Any, _shape: Any = None, _type: Any = None) -> Any:
        if type(kind) is not Constructor or kind.name != "numpy.ndarray":
            raise RefusedError("a subclass of NumPy's ndarray")
        return np.empty(0, np.int8)

    def build_array(target: Any, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise MalformedError("a malformed array")
        _, shape, dtype, columns, data = state
        array(dtype, shape, data, columns)
        target.__setstate__((1, shape, dtype.dtype, columns is True, bytes(data)))

    def from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_axes: Any) -> Any:
        return array(dtype, shape, data, order == "F")

    return [
        Constructor("numpy.dtype", make_dtype, build_dtype, Dtype),
        Constructor("numpy.ndarray", _refuse_call, build_array, np.ndarray),
        *(
            Constructor(f"numpy.{core}.{name}", make)
            for core in ("core", "_core")  # before and since NumPy 2
            for name, make in (
                ("multiarray.scalar", make_scalar),
                ("multiarray._reconstruct", reconstruct),
                ("numeric._frombuffer", from_buffer),
            )
        ),
    ]
