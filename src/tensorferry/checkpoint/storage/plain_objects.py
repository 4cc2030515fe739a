"""Objects of a checkpoint that are no tensors: read without trust, and written again for a planner.

torch's planners give an object's blob to `torch.load(weights_only=False)`, which runs what is in it; and whoever can
write `.metadata` can make any entry an object. So a planner never gets the blob of the file, but one made here, of the
object that :mod:`tensorferry.checkpoint.zipformat.pickles` has made of it: numbers, text, containers, times, arrays,
tensors.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import datetime
import decimal
import functools
import io
import math
import pickle
import re
import struct
from typing import TYPE_CHECKING, Any

import torch

from tensorferry.checkpoint.checksums import crc32
from tensorferry.checkpoint.storage.metadata import OLDER_MODULES, SIMPLE_MAKERS
from tensorferry.checkpoint.zipformat import blobs, pickles, zips
from tensorferry.checkpoint.zipformat.pickles import (
    Maker,
    MalformedError,
    RefusedError,
    record,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEPT_NBYTES, _KEPT_COUNT = 4096, 1024
_NUMPY_TYPE = re.compile(r"[biufc]\d{1,2}|\?|[bBhHiIlLqQefdgFDG]|[SU]\d{1,9}")
_SIZES = {tuple, list, torch.Size}
_DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps)(:\d{1,3})?")


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
    return _kept(blob) if len(blob) <= _KEPT_NBYTES else _harmless(blob)


def _harmless(blob: bytes) -> bytes:
    linked: list[Any] = []
    try:
        return _made_harmless(blob, linked)
    except (RefusedError, MalformedError):
        # Python frees each of them within the one around it, without a limit of depth.
        for each in linked:
            each.clear()
        raise


def _made_harmless(blob: bytes, linked: list[Any]) -> bytes:
    value, has_tensors = loads(blob, linked)
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


_kept = functools.lru_cache(_KEPT_COUNT)(_harmless)


def loads(blob: bytes, linked: list[Any]) -> tuple[Any, bool]:
    """Return the object that torch.save has put into a blob, and whether there are tensors in it.

    Deques and defaultdicts are added to ``linked``, in the order in which they are made.
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
    storages = _Storages(records)
    names = {**_makers(), **storages.makers(), **_linking(linked)}
    value, _ = pickles.loads(records["data.pkl"], names, storages.named, OLDER_MODULES)
    return value, storages.used


def _archive(pickled: bytes) -> bytes:
    """Return what torch.load takes for a file of torch.save's, with that pickle in it."""
    body, directory = bytearray(), bytearray()
    for name, data in ((b"data.pkl", pickled), (b"byteorder", b"little"), (b"version", b"3\n")):
        full_name, crc = b"archive/" + name, crc32(data)
        directory += zips.packed_entry(full_name, len(data), crc, len(body))
        body += zips.packed_header(full_name, len(data), crc, len(body)) + data
    return bytes(body + directory + zips.packed_ends(3, len(body), len(directory)))


class _Storage:
    """Stands for a storage: the dtype that its name says, and its bytes. Only tensors may be made of it."""

    def __init__(self, dtype: torch.dtype, data: torch.Tensor) -> None:
        self.dtype = dtype
        self.data = data

    def __reduce__(self) -> Any:
        raise RefusedError("a storage that is no tensor's")


class _Storages:
    """The tensors of one blob."""

    def __init__(self, records: dict[str, bytes]) -> None:
        self._records = records
        self._made: dict[str, torch.Tensor] = {}
        self.used = False

    def makers(self) -> dict[str, Maker]:
        """Return what makes tensors."""
        v2 = functools.partial(self._tensor, dtype=None)
        return table(
            [
                Maker("torch._utils._rebuild_tensor_v2", v2),
                Maker("torch._utils._rebuild_tensor_v3", self._tensor_v3),
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
                else torch.empty(0, dtype=torch.uint8)
            )
            if location != "cpu":
                if type(location) is not str or not _DEVICE.fullmatch(location):
                    raise RefusedError("memory of an unknown device")
                try:
                    data = data.to(location)
                except (
                    Exception
                ) as error:  # AssertionError, ModuleNotFoundError: each backend has its own
                    raise RefusedError(f"memory of the device {location}: {error}") from None
            self._made[key] = data
        if data.numel() != count * dtype.itemsize:
            raise MalformedError("a storage of another size than it says")
        self.used = True
        return _Storage(dtype, data)

    def _tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any
    ) -> torch.Tensor:
        return self._tensor(storage, offset, size, stride, grad, hooks, dtype=dtype)

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        grad: Any,
        hooks: Any = None,
        *rest: Any,
        dtype: Any,
    ) -> torch.Tensor:
        if hooks or any(rest):
            raise RefusedError("a tensor with hooks or attributes")
        if type(storage) is not _Storage or not {type(size), type(stride)} <= _SIZES:
            raise MalformedError("a tensor that is none")
        data = storage.data
        dtype = storage.dtype if dtype is None else dtype
        counts = (offset, *size, *stride)
        if (
            not isinstance(dtype, torch.dtype)
            or any(type(count) is not int or count < 0 for count in counts)
            or len(size) != len(stride)
        ):
            raise MalformedError("a tensor that is none")
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


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not set(map(type, name)) <= {str}:
        raise MalformedError("a time zone that is none")
    return datetime.timezone(offset, *name)


def _ordered(*arguments: Any) -> collections.OrderedDict[Any, Any]:
    if arguments:
        raise MalformedError("an OrderedDict made of arguments")
    return collections.OrderedDict()


def _build_ordered(target: collections.OrderedDict[Any, Any], state: Any) -> None:
    """Take attributes, as a module's state_dict() has one."""
    if type(state) is not dict or not all(
        type(name) is str and not name.startswith("__") for name in state
    ):
        raise RefusedError("an OrderedDict with odd attributes")
    target.__dict__.update(state)


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
        Maker("collections.OrderedDict", _ordered, _build_ordered, collections.OrderedDict),
        Maker("collections.Counter", _counter),
        Maker("decimal.Decimal", _decimal),
        Maker("datetime.date", _date),
        Maker("datetime.datetime", _datetime),
        Maker("datetime.timezone", _timezone),
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

        def __reduce__(self) -> Any:
            return self.dtype.__reduce__()

    def make_dtype(name: Any, _align: Any = False, _copy: Any = True) -> Dtype:
        if type(name) is not str or not _NUMPY_TYPE.fullmatch(name):
            raise RefusedError("a dtype of NumPy's that is no number or text")
        return Dtype(np.dtype(name))

    def build_dtype(dtype: Dtype, state: Any) -> None:
        if (
            type(state) is not tuple
            or len(state) != 8
            or state[1] not in ("<", ">", "|", "=")
            or any(each is not None for each in state[2:5])
        ):
            raise RefusedError("a dtype of NumPy's that is no number or text")
        dtype.dtype = dtype.dtype.newbyteorder(state[1])

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
