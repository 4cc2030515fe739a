"""Objects of a checkpoint that are no tensors: read without trust, and written again for a planner.

torch's planners give an object's blob to `torch.load(weights_only=False)`, which runs what is in it; and whoever can
write `.metadata` can make any entry an object. So a planner never gets the blob of the file, but one made here, of the
object that :mod:`tensorferry.checkpoint.zipformat.pickles` has made of it: numbers, text, containers, times, arrays,
tensors. Whatever can be made without running code that the pickle chooses is in the table; what the program itself has
declared safe (``torch.serialization.add_safe_globals``) is made as torch.load makes it.
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
from tensorferry.base.warned import warn
from tensorferry.checkpoint.storage.metadata import OLDER_MODULES, SIMPLE_MAKERS
from tensorferry.checkpoint.zipformat import blobs, pickles, zips
from tensorferry.checkpoint.zipformat.pickles import (
    Maker,
    MalformedError,
    RefusedError,
    empty,
    record,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tensorferry.base.warned import Line

_KEPT_NBYTES, _KEPT_COUNT = 4096, 1024
_NUMPY_TYPE = re.compile(r"[biufc]\d{1,2}|\?|[bBhHiIlLqQefdgFDG]|[SUV]\d{1,9}|[mM]8")
_TIME_UNIT = re.compile(rb"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as")
# NumPy walks through a dtype within a dtype by recursion.
_MAX_DTYPE_DEPTH = 16
_ALIGNED_STRUCT = 0x80  # NPY_ALIGNED_STRUCT
_DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps)(:\d{1,3})?")
# How a class or function is named in pickles of protocol 2, which torch.save writes.
_GLOBAL = re.compile(rb"c[\w.]+\n[\w.]+\n")
_CERTAIN = frozenset(
    [str, bytes, int, float, bool, complex, type(None), torch.Size, torch.dtype, torch.device]
)


def refused(error: RefusedError) -> str:
    """Return what is said of an object that asks for something else, with the remedies."""
    return (
        f"it asks for {error}, which is not a plain value and may run any code; if you trust whoever made this "
        "checkpoint, read it with trust_pickle=True, or declare the class safe by torch.serialization.add_safe_globals"
    )


def refusal(blob: bytes) -> str | None:
    """Return why :func:`harmless` would refuse an object that torch.save has put into a blob, None if it would not."""
    if _GLOBAL.search(blob) is None:
        return None
    try:
        _harmless_as_trusted(blob, placed=False)
    except RefusedError as error:
        return refused(error)
    except Exception as error:
        return f"it cannot be read without trust ({error})"
    return None


def refused_in(state: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of objects that planners make of a state and :func:`harmless` would refuse, and why.

    What pickle says of an object is raised: it could not be saved.
    """
    objects, _ = flatten_state_dict(state)
    for name, value in objects.items():
        if not isinstance(value, torch.Tensor) and not _is_certain(value):
            torch.save(value, stream := io.BytesIO())
            if (why := refusal(stream.getvalue())) is not None:
                yield name, why


def _is_certain(value: Any) -> bool:
    """Return whether an object is made of nothing that could be refused; False where that takes a closer look."""
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


def warn_of(refusals: Mapping[str, str], reader: str, line: Line | None = None) -> None:
    """Warn of objects that have been saved, or are about to be, and that a reader will refuse."""
    for name, why in refusals.items():
        warn(f"{name!r} is saved, but {reader} will refuse to load it: {why}", line)


def harmless(blob: bytes) -> bytes:
    """Return a blob of the same object that may be given to ``torch.load(weights_only=False)``.

    Raises
    ------
    RefusedError
        It asks for something that may run code, or is not known here.
    MalformedError
        It is not what torch.save writes.
    """
    # Optimizers have the same few numbers for each of thousands of parameters.
    return _kept(blob) if len(blob) <= _KEPT_NBYTES else _harmless_as_trusted(blob)


def _harmless_as_trusted(blob: bytes, *, placed: bool = True) -> bytes:
    try:
        return _harmless(blob, {}, placed)
    except RefusedError:
        if not (trusted := _declared_safe()):
            raise
        return _harmless(blob, trusted, placed)


def _declared_safe() -> dict[str, Any]:
    """Return what the program has declared safe, by the names that pickles have for it."""
    declared: Any = torch.serialization.get_safe_globals()
    return {
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}": (
            each[0] if isinstance(each, tuple) else each
        )
        for each in declared
    }


def _harmless(blob: bytes, trusted: Mapping[str, Any], placed: bool) -> bytes:
    linked: list[Any] = []
    try:
        return _made_harmless(blob, linked, trusted, placed)
    except (RefusedError, MalformedError):
        # Python frees each of them within the one around it, without a limit of depth.
        for each in linked:
            each.clear()
        raise


def _made_harmless(
    blob: bytes, linked: list[Any], trusted: Mapping[str, Any], placed: bool
) -> bytes:
    value, has_tensors = loads(blob, linked, trusted, placed=placed)
    try:
        if not has_tensors:
            return _archive(pickle.dumps(value, 2))
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream.getvalue()
    except RefusedError:
        raise
    except Exception as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from None


def _kept(blob: bytes) -> bytes:
    try:
        return _kept_of_table(blob)
    except RefusedError:  # what is declared safe may change
        return _harmless_as_trusted(blob)


@functools.lru_cache(_KEPT_COUNT)
def _kept_of_table(blob: bytes) -> bytes:
    return _harmless(blob, {}, True)


def loads(
    blob: bytes, linked: list[Any], trusted: Mapping[str, Any] | None = None, *, placed: bool = True
) -> tuple[Any, bool]:
    """Return the object that torch.save has put into a blob, and whether there are tensors in it.

    Deques and defaultdicts are added to ``linked``, in the order in which they are made. Tensors stay in host memory
    unless they are to be ``placed``.
    """
    try:
        places = zips.layout(lambda begin, end: blob[begin:end], len(blob))
    except (zips.UnknownArchiveError, struct.error, UnicodeDecodeError) as error:
        raise MalformedError(f"no archive of torch.save's: {error}") from None
    records = {
        place.name.partition("/")[2]: blob[place.begin : place.begin + place.nbytes]
        for place in places
    }
    if records.get("byteorder", b"little") != b"little":
        raise RefusedError("the other byte order")
    if "data.pkl" not in records:
        raise MalformedError("an archive without an object")
    storages = _Storages(records, placed)
    names = _Names({**_makers(), **storages.makers(), **_linking(linked)})
    value, _ = pickles.loads(
        records["data.pkl"], names, storages.named, OLDER_MODULES, trusted=trusted
    )
    return value, storages.used


def _archive(pickled: bytes) -> bytes:
    """Return what torch.load takes for a file of torch.save's, with that pickle in it."""
    body, directory = bytearray(), bytearray()
    for name, data in ((b"data.pkl", pickled), (b"byteorder", b"little"), (b"version", b"3\n")):
        full_name, crc = b"archive/" + name, crc32(data)
        directory += zips.packed_entry(full_name, len(data), crc, len(body))
        body += zips.packed_header(full_name, len(data), crc, len(body)) + data
    return bytes(body + directory + zips.packed_ends(3, len(body), len(directory)))


class _Storage(NamedTuple):
    """Stands for a storage: what :func:`blobs.storage_of` has, with its bytes. Only tensors may be made of it."""

    what: str
    dtype: torch.dtype
    data: torch.Tensor
    device: str
    numel: int

    def __reduce__(self) -> Any:
        raise RefusedError("a storage that is no tensor's")


class _Storages:
    """The tensors of one blob."""

    def __init__(self, records: dict[str, bytes], placed: bool) -> None:
        self._records = records
        self._placed = placed
        self._made: dict[str, torch.Tensor] = {}
        self.used = False

    def makers(self) -> dict[str, Maker]:
        """Return what makes tensors."""
        return table(
            [
                *blobs.tensor_makers(self._tensor),
                Maker("torch._utils._rebuild_parameter", self._parameter),
            ]
        )

    def named(self, identity: Any) -> _Storage:
        """Return the storage that a pickle names."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise RefusedError("a persistent object")
        _, kind, key, location, count = identity
        dtype = blobs.STORAGES.get(kind.name) if type(kind) is Maker else None
        if dtype is None or type(key) is not str or type(count) is not int:
            raise MalformedError("a storage of an unknown kind")
        data = self._made.get(key)
        if data is None:
            content = self._records[f"data/{key}"]
            data = (
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
                if content
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            if location != "cpu":
                if type(location) is not str or not _DEVICE.fullmatch(location):
                    raise RefusedError("memory of an unknown device")
                try:
                    data = data.to(location) if self._placed else data
                except Exception as error:
                    # AssertionError, ModuleNotFoundError: each backend has its own.
                    raise RefusedError(f"memory of the device {location}: {error}") from None
            self._made[key] = data
        if data.numel() != count * dtype.itemsize:
            raise MalformedError("a storage of another size than it says")
        self.used = True
        return _Storage("storage", dtype, data, location, count)

    def _tensor(
        self, told: blobs.PickledTensor, grad: Any, hooks: Any, more: dict[Any, Any]
    ) -> torch.Tensor:
        storage, offset, size, stride, dtype, conj, neg = told
        if hooks or more or conj or neg:
            raise RefusedError("a tensor with hooks or attributes")
        if type(storage) is not _Storage:
            raise MalformedError("a tensor that is none")
        data = storage.data
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= data.numel() // dtype.itemsize:
            raise MalformedError("a tensor beyond its storage")
        tensor: torch.Tensor
        if 0 in size:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=data.device)
        else:
            tensor = data.view(dtype).as_strided(size, stride, offset)
        return tensor.requires_grad_(grad is True)

    def _parameter(self, data: Any, grad: Any, hooks: Any) -> torch.nn.Parameter:
        if not isinstance(data, torch.Tensor) or hooks:
            raise RefusedError("a parameter with hooks")
        return torch.nn.Parameter(data, grad is True)


class _Names(dict[str, Maker]):
    """The table, and the named tuples of modules that the program has imported."""

    def get(self, name: str, default: Any = None) -> Any:
        maker = super().get(name, default)
        if maker is None and (kind := _named_tuple(name)) is not None:
            maker = self[name] = Maker(name, functools.partial(_make_named_tuple, kind))
        return maker


def _named_tuple(full_name: str) -> type[tuple[Any, ...]] | None:
    """Return the class of that name if it is nothing but a named tuple, with all of that made by Python itself."""
    module, _, name = full_name.rpartition(".")
    kind = vars(sys.modules.get(module, types)).get(name)
    if not isinstance(kind, type) or kind.__mro__ != (kind, tuple, object):
        return None
    # Else pickle, which is given an instance, or a dict of which it is a key, would call what is the class's own.
    fields = vars(kind).get("_fields")
    if type(kind) is not type or type(fields) is not tuple or not fields:
        return None
    usual: Any = collections.namedtuple("usual", fields, rename=True)  # type: ignore[misc]
    odd = {each for each in vars(kind) if each.startswith("__")} - {*vars(usual)} - _HARMLESS_NAMES
    return None if odd or _made_by(kind) != _made_by(usual) else kind


def _made_by(named_tuple: Any) -> list[Any]:
    """Return the code by which pickle makes instances, and takes them apart."""
    functions = [named_tuple.__new__, named_tuple.__getnewargs__]
    return [getattr(getattr(each, "__code__", None), "co_code", each) for each in functions]


# What typing.NamedTuple and copyreg add, and what pickle does not call.
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


def _refused(*_arguments: Any) -> Any:
    raise MalformedError("a class used as a function")


def _factory(kind: type) -> Maker:
    """Return what stands for a class that is only named, as what a defaultdict makes."""
    return Maker(f"{kind.__module__}.{kind.__name__}", _refused)


_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, str, bool)} | {
    "builtins.set": set,
    "collections.OrderedDict": collections.OrderedDict,
}


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is None:
        return collections.defaultdict()
    if type(factory) is not Maker or factory.name not in _FACTORIES:
        raise RefusedError("a defaultdict of something else than plain values")
    return collections.defaultdict(_FACTORIES[factory.name])


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise MalformedError("a Counter of what is no dict")
    counter: collections.Counter[Any] = collections.Counter()
    dict.update(counter, counts or {})
    return counter


def _deque(values: Any = (), most: Any = None) -> collections.deque[Any]:
    if type(values) not in (list, tuple):
        raise MalformedError("a deque of what is no list")
    return collections.deque(values, most)


def _linking(linked: list[Any]) -> dict[str, Maker]:
    """Return what makes containers that may be freed only one by one."""

    def linking(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_link(*arguments: Any) -> Any:
            linked.append(make(*arguments))
            return linked[-1]

        return make_and_link

    return table(
        [
            Maker("collections.defaultdict", linking(_defaultdict)),
            Maker("collections.deque", linking(_deque)),
        ]
    )


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Stand for codecs.encode(), by which bytes are pickled for Python 2."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise RefusedError("_codecs.encode")
    return codecs.encode(text, "latin-1")


def _bytes(data: Any = b"") -> bytes:
    if data != b"" or type(data) is not bytes:
        raise MalformedError("bytes made of something else")
    return b""


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    return bytearray(data if type(data) is bytes and encoding is None else _encode(data, encoding))


def _of_numbers(kind: Any) -> Any:
    def make(*arguments: Any) -> Any:
        if not all(type(each) in (int, float, bool, type(None)) for each in arguments):
            raise MalformedError(f"a {kind.__name__} of what are no numbers")
        return kind(*arguments)

    return make


def _decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str:
        raise MalformedError("a Decimal of what is no text")
    return decimal.Decimal(text)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise MalformedError("a device that is none")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _date(packed: Any) -> datetime.date:
    year, month, day = struct.unpack(">HBB", packed)
    return datetime.date(year, month, day)


def _datetime(packed: Any, zone: Any = None) -> datetime.datetime:
    if zone is not None and type(zone) is not datetime.timezone:
        raise RefusedError("a time zone")
    year, month, day, hour, minute, second, high, low = struct.unpack(">HBBBBBBH", packed)
    fields = (year, month & 0x7F, day, hour, minute, second, high << 16 | low, zone)
    return datetime.datetime(*fields, fold=month >> 7)


def _time(packed: Any, zone: Any = None) -> datetime.time:
    if zone is not None and type(zone) is not datetime.timezone:
        raise RefusedError("a time zone")
    hour, minute, second, high, low = struct.unpack(">BBBBH", packed)
    return datetime.time(hour & 0x7F, minute, second, high << 16 | low, zone, fold=hour >> 7)


def _fraction(*values: Any) -> fractions.Fraction:
    """Take a text with two integers, as before Python 3.12, or these: exponents could ask for any memory."""
    if len(values) == 1 and type(values[0]) is str and re.fullmatch(r"-?\d+(/\d+)?", values[0]):
        return fractions.Fraction(values[0])
    if len(values) != 2 or {*map(type, values)} != {int}:
        raise MalformedError("a Fraction of what are not two integers")
    return fractions.Fraction(*values)


def _array(code: Any, values: Any) -> arrays.array[Any]:
    if type(code) is not str or code not in arrays.typecodes or type(values) is not list:
        raise MalformedError("an array of an unknown kind")
    if not {*map(type, values)} <= {int, float, str}:
        raise MalformedError("an array of what are not numbers")
    return arrays.array(code, values)


def _build_uuid(target: Any, state: Any) -> None:
    if type(state) is not dict or not {*state} <= {"int", "is_safe"}:
        raise MalformedError("a UUID that is none")
    number = state.get("int")
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise MalformedError("a UUID that is none")
    if type(state.get("is_safe")) not in (int, type(None)):
        raise MalformedError("a UUID that is none")
    target.__setstate__(state)


def _build_stream(target: Any, state: Any) -> None:
    """Take what was written, where the next write goes, and attributes, such as a name."""
    if type(state) is not tuple or len(state) < 3:
        raise MalformedError(f"a {type(target).__name__} that is none")
    *fields, attributes = state
    if attributes is not None:
        _check_attributes(target, attributes)
    if any(type(each) not in (bytes, str, int, type(None)) for each in fields):
        raise MalformedError(f"a {type(target).__name__} of something else")
    target.__setstate__(state)


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not set(map(type, name)) <= {str}:
        raise MalformedError("a time zone that is none")
    return datetime.timezone(offset, *name)


def _build_ordered(target: collections.OrderedDict[Any, Any], state: Any) -> None:
    """Take attributes, as a module's state_dict() has one."""
    _check_attributes(target, state)
    target.__dict__.update(state)


def _check_attributes(target: Any, state: Any) -> None:
    if type(state) is not dict or not all(
        type(name) is str and not name.startswith("__") for name in state
    ):
        raise RefusedError(f"odd attributes of a {type(target).__name__}")


@functools.cache
def _makers() -> Mapping[str, Maker]:
    made = [
        *SIMPLE_MAKERS,
        *(Maker(name, _refused) for name in blobs.STORAGES),
        *(_factory(kind) for kind in (list, dict, int, float, str, bool)),
        Maker("builtins.bytes", _bytes),
        Maker("builtins.bytearray", _bytearray),
        Maker("_codecs.encode", _encode),
        *(
            Maker(f"{module}.{kind.__name__}", _of_numbers(kind))
            for module, kind in (
                ("builtins", complex),
                ("builtins", slice),
                ("builtins", range),
                ("datetime", datetime.timedelta),
            )
        ),
        Maker("builtins.xrange", _of_numbers(range)),  # Python 2's name, in pickles of protocol 2
        Maker(
            "collections.OrderedDict",
            empty(collections.OrderedDict),
            _build_ordered,
            collections.OrderedDict,
        ),
        Maker("collections.Counter", _counter),
        Maker("decimal.Decimal", _decimal),
        Maker("datetime.date", _date),
        Maker("datetime.datetime", _datetime),
        Maker("datetime.time", _time),
        Maker("datetime.timezone", _timezone),
        Maker("fractions.Fraction", _fraction),
        Maker("array.array", _array),
        Maker("_io.BytesIO", empty(io.BytesIO), _build_stream, io.BytesIO),
        Maker("_io.StringIO", empty(io.StringIO), _build_stream, io.StringIO),
        Maker(
            "types.SimpleNamespace",
            empty(types.SimpleNamespace),
            pickles.update,
            types.SimpleNamespace,
        ),
        record("uuid.UUID", uuid.UUID, _build_uuid),
        Maker("torch.device", _device),
        record("argparse.Namespace", argparse.Namespace),
    ]
    try:
        import numpy as np
    except ImportError:
        return table(made)
    return table(made + _numpy_makers(np))


def _numpy_makers(np: Any) -> list[Maker]:
    class Dtype:
        """Stands for a dtype: those of the process are shared by all arrays."""

        def __init__(self, dtype: Any) -> None:
            self.dtype = dtype
            self.depth = 0

        def __reduce__(self) -> Any:
            return self.dtype.__reduce__()

    def make_dtype(name: Any, _align: Any = False, _copy: Any = True) -> Dtype:
        if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
            raise RefusedError("a dtype of NumPy's that is not a number, text, time or record")
        return Dtype(np.dtype(name))

    def build_dtype(dtype: Dtype, state: Any) -> None:
        if (
            type(state) is not tuple
            or len(state) not in (8, 9)
            or state[1] not in ("<", ">", "|", "=")
        ):
            raise RefusedError("a dtype of NumPy's that is not a number, text, time or record")
        kind, (inner, names, fields, nbytes, _, flags), more = (
            dtype.dtype.kind,
            state[2:8],
            state[8:],
        )
        if kind == "V" and not more and names is not None:
            dtype.dtype = record_dtype(dtype, names, fields, nbytes, flags)
        elif kind == "V" and not more and inner is not None:
            dtype.dtype = inner_dtype(dtype, inner)
        elif (inner, names, fields) != (None, None, None) or (more and kind not in "mM"):
            raise RefusedError("a dtype of NumPy's that is not a number, text, time or record")
        elif more:
            dtype.dtype = np.dtype(f"{kind}8{time_unit(*more)}").newbyteorder(state[1])
        else:
            dtype.dtype = dtype.dtype.newbyteorder(state[1])

    def within(dtype: Dtype, inner: Any) -> Any:
        if type(inner) is not Dtype or inner.depth >= _MAX_DTYPE_DEPTH:
            raise MalformedError("a dtype that is none")
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
            raise RefusedError("a record of NumPy's with titles")
        spec = {
            "names": list(names),
            "formats": [within(dtype, fields[name][0]) for name in names],
            "offsets": [fields[name][1] for name in names],
            "itemsize": nbytes,
        }
        return np.dtype(spec, align=bool(flags & _ALIGNED_STRUCT))

    def inner_dtype(dtype: Dtype, inner: Any) -> Any:
        if type(inner) is not tuple or len(inner) != 2 or type(inner[1]) is not tuple:
            raise MalformedError("a dtype that is none")
        return np.dtype((within(dtype, inner[0]), inner[1]))

    def time_unit(metadata: Any) -> str:
        if type(metadata) is not tuple or len(metadata) != 2 or metadata[0]:
            raise RefusedError("a dtype of NumPy's with metadata")
        if type(metadata[1]) is not tuple or len(metadata[1]) != 4:
            raise MalformedError("a time that is none")
        unit, count, *rest = metadata[1]
        if unit == b"generic":
            return ""
        if type(unit) is not bytes or not _TIME_UNIT.fullmatch(unit) or rest != [1, 1]:
            raise MalformedError("a time that is none")
        if type(count) is not int or not 0 < count < 1 << 31:
            raise MalformedError("a time that is none")
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
            raise MalformedError("an array that is none")
        flat = np.frombuffer(data, dtype.dtype) if data else np.empty(0, dtype.dtype)
        return flat.reshape(shape, order="F" if columns else "C").copy(order="A")

    def reconstruct(kind: Any, _shape: Any = None, _type: Any = None) -> Any:
        if type(kind) is not Maker or kind.name != "numpy.ndarray":
            raise RefusedError("a subclass of NumPy's arrays")
        return np.empty(0, np.int8)

    def build_array(target: Any, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise MalformedError("an array that is none")
        _, shape, dtype, columns, data = state
        array(dtype, shape, data, columns)
        target.__setstate__((1, shape, dtype.dtype, columns is True, bytes(data)))

    def from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_axes: Any) -> Any:
        return array(dtype, shape, data, order == "F")

    return [
        Maker("numpy.dtype", make_dtype, build_dtype, Dtype),
        Maker("numpy.ndarray", _refused, build_array, np.ndarray),
        *(
            Maker(f"numpy.{core}.{name}", make)
            for core in ("core", "_core")  # before and since NumPy 2
            for name, make in (
                ("multiarray.scalar", make_scalar),
                ("multiarray._reconstruct", reconstruct),
                ("numeric._frombuffer", from_buffer),
            )
        ),
    ]
