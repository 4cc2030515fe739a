"""A pickle read without trust: a small machine that makes plain values, and what a table says of each name in it.

Python's unpicklers look a name up, call it, and set attributes of whatever there is. Here a name becomes a
:class:`Maker`, which only this machine can use, so that nothing of the process is ever in the hands of a pickle.
Nothing takes more memory or time than the pickle is long: the memo is a dict, memory is taken for bytes that are
there, and what is hashed is small.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from tensorferry import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WORD = struct.Struct("<I").unpack_from
_SIGNED, _DOUBLE = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from
# In the keys of dicts: tuples of tuples are hashed again and again, and without a limit of depth; frozensets of
# frozensets are compared so.
_MAX_KEY_NODES = 256
_PLAIN = frozenset(
    [
        *(str, bytes, int, float, bool, complex, type(None), frozenset, range),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_PLAIN_KEYS = _PLAIN - {frozenset}
_OF_DAMAGE = (
    *(LookupError, struct.error, TypeError, AttributeError),
    *(ValueError, ArithmeticError, RuntimeError, MemoryError),
)
_DICTS = (dict, OrderedDict, defaultdict, Counter)


class RefusedError(Exception):
    """A class or function that is in no table."""


class MalformedError(Exception):
    """No pickle, or one that what it names does not have."""


class Maker:
    """What stands for a class or function.

    Parameters
    ----------
    name : str
        Its full name.
    make : function
        Makes what it would make; called with what the pickle gives it, of any type.
    build : function of (what was made, a state), optional
        Takes a state, as ``__setstate__`` does.
    kind : type, optional
        What is made, where there is such a function.
    """

    __slots__ = ("build", "kind", "make", "name")

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        build: Callable[[Any, Any], None] | None = None,
        kind: type | None = None,
    ) -> None:
        self.name = name
        self.make = make
        self.build = build
        self.kind = kind

    def __call__(self, *arguments: Any) -> Any:
        """Make something, for Python's unpickler."""
        return self.make(*arguments)

    def __reduce__(self) -> Any:
        raise RefusedError(self.name)


def record(name: str, kind: type, build: Callable[[Any, Any], None] | None = None) -> Maker:
    """Return what makes instances of a plain class, that have only what is in their state."""
    new = object.__new__

    def make(*arguments: Any) -> Any:
        if arguments:
            raise MalformedError(f"a {kind.__name__} made of arguments")
        return new(kind)

    return Maker(name, make, build or update, kind)


def empty(kind: type) -> Callable[..., Any]:
    """Return what makes containers that are filled later."""

    def make(*arguments: Any) -> Any:
        if arguments:
            raise MalformedError(f"a {kind.__name__} made of arguments")
        return kind()

    return make


def table(makers: list[Maker]) -> dict[str, Maker]:
    """Return them by name."""
    return {maker.name: maker for maker in makers}


def find(
    names: Mapping[str, Any], module: Any, name: Any, trusted: Mapping[str, Any] | None = None
) -> Any:
    """Return what stands for a name, or one of torch's constants, or what is trusted itself."""
    full_name = f"{text(module)}.{text(name)}"
    maker = names.get(full_name)
    if maker is not None:
        return maker
    if module == "torch":
        value = vars(torch).get(name)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return value
    if trusted and full_name in trusted:
        return trusted[full_name]
    raise RefusedError(full_name)


def loads(
    data: bytes,
    names: Mapping[str, Maker],
    persistent: Callable[[Any], Any] | None = None,
    older: Mapping[str, str] | None = None,
    begin: int = 0,
    trusted: Mapping[str, Any] | None = None,
) -> tuple[Any, int]:
    """Read a pickle of protocol 2 or later.

    Parameters
    ----------
    data : bytes
        It, and anything behind it.
    names : mapping of str to Maker
        What it may name.
    persistent : function of an identity, optional
        Makes what lies outside of the pickle.
    older : mapping of str to str, optional
        Modules that had other names.
    begin : int
        Where it begins.
    trusted : mapping of str to object, optional
        Classes and functions that it may name and call as they are, because the program said so.

    Returns
    -------
    object, int
        What it holds, and where it ends.

    Raises
    ------
    RefusedError
        It names something else.
    MalformedError
        It is no pickle.
    """
    try:
        return _run(data, names, persistent, older or {}, begin, trusted or {})
    except (RefusedError, MalformedError):
        raise
    except _OF_DAMAGE as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from None


def loads_records(data: bytes, known: Mapping[str, Any]) -> tuple[Any, int] | None:
    """Read a pickle of records by Python's own unpickler, if nothing in it asks for more care.

    That unpickler takes a sixth of the time. What it might do wrong with a pickle, ``csrc/pickle/screen.h`` says.

    Parameters
    ----------
    data : bytes
        The pickle, and anything behind it.
    known : mapping of str to object
        What is given to the pickle for each name: plain classes of Python's, whose attributes it can set in no way, and
        Makers.

    Returns
    -------
    object, int
        What it holds, and where it ends; None for what :func:`loads` has to look at.
    """
    end = _core.screened_pickle_end(data)
    if not end:
        return None
    try:
        return _Records(data, known).load(), end
    except Exception:  # loads() says what is wrong
        return None


class _Records(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        return find(self._known, module, name)


class Blank:
    """Whatever a class or function would have made.

    Attributes
    ----------
    inside : list
        What it was made of, its items and its state, where whoever makes it keeps them.
    called : str
        The name of that class or function, where whoever makes it keeps it.
    """

    inside: list[Any]
    called: str


class _Anything(dict[str, Maker]):
    """Every name there may be."""

    def get(self, name: str, _default: Any = None) -> Maker:
        return Maker(name, _SCREENED.get(name.rpartition(".")[2], _blank))


def _not_by_number(*arguments: Any) -> Blank:
    if any(type(each) is int for each in arguments):
        raise MalformedError("memory that is asked for by a number")
    return Blank()


def _of_keys(*arguments: Any) -> Blank:
    """Refuse what is slow to hash, or without a limit of depth, among keys that a container is made of."""
    for argument in arguments:
        if type(argument) in (list, tuple):
            # Items of a dict are pairs, of which the first is a key.
            firsts = [each[0] for each in argument if type(each) in (list, tuple) and each]
            checked_keys([each for each in (*argument, *firsts) if type(each) is tuple])
    return Blank()


def _blank(*_arguments: Any) -> Blank:
    return Blank()


_SCREENED = {"bytearray": _not_by_number} | dict.fromkeys(
    ("set", "frozenset", "Counter", "OrderedDict", "dict", "defaultdict"), _of_keys
)


def screen(data: bytes, count: int = 1) -> None:
    """Refuse a pickle that would crash torch's unpickler: deep keys are hashed without a limit, memory taken by number.

    Raises
    ------
    MalformedError
        It is no pickle, or such a one.
    """
    names = _Anything(blank=Maker("", _blank, lambda _instance, _state: None, Blank))
    at = 0
    for _ in range(count):
        at = loads(data, names, _blank, begin=at)[1]


def _run(
    data: bytes,
    names: Mapping[str, Maker],
    persistent: Callable[[Any], Any] | None,
    older: Mapping[str, str],
    at: int,
    trusted: Mapping[str, Any],
) -> tuple[Any, int]:
    builders = {maker.kind: maker.build for maker in names.values() if maker.build is not None}
    memo: dict[int, Any] = {}
    found: dict[tuple[str, str], Any] = {}
    stack: list[Any] = []
    marks: list[list[Any]] = []
    nbytes = len(data)

    def named(module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a name that is no text")
        value = found.get((module, name))
        if value is None:
            value = found[module, name] = find(names, older.get(module, module), name, trusted)
        return value

    # In the order of how frequent they are. A value that is cut short ends behind the data, and so does the loop.
    while at < nbytes:
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(
                memo[data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24]
            )
            at += 4
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x8C:  # SHORT_BINUNICODE
            end = at + 1 + data[at]
            stack.append(data[at + 1 : end].decode("utf-8", "surrogatepass"))
            at = end
        elif code == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif code == 0x81 or code == 0x52:  # NEWOBJ, REDUCE
            arguments, maker = stack.pop(), stack[-1]
            if type(arguments) is not tuple:
                raise MalformedError("a call of what cannot be called")
            if type(maker) is Maker:
                stack[-1] = maker.make(*arguments)
            else:
                stack[-1] = _call_trusted(trusted, maker, arguments, as_class=code == 0x81)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            build = builders.get(type(stack[-1]))
            if build is None and _is_one_of(trusted, type(stack[-1])):
                build = _build_trusted
            if build is None:
                raise MalformedError(f"a {type(stack[-1]).__name__} that is given a state")
            build(stack[-1], state)
        elif code == 0x75:  # SETITEMS
            items, stack = stack, marks.pop()
            _set(stack[-1], items)
        elif code == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif code == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _extend(stack[-1], [value])
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x4A:  # BININT
            stack.append(_SIGNED(data, at)[0])
            at += 4
        elif code == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[_WORD(data, at)[0]] = stack[-1]
            at += 4
        elif code in _SIZED:
            width, make = _SIZED[code]
            begin = at + width
            at = begin + int.from_bytes(data[at:begin], "little")
            stack.append(make(data[begin:at]))
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif code == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == 0x88 or code == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(code == 0x88)
        elif code == 0x65:  # APPENDS
            items, stack = stack, marks.pop()
            _extend(stack[-1], items)
        elif code == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(named(module, name))
        elif code == 0x63:  # GLOBAL
            end = data.find(b"\n", at)
            if end < 0 or data.find(b"\n", end + 1) < 0:
                raise MalformedError("a name without an end")
            module, name = (
                data[at:end].decode(),
                data[end + 1 : data.find(b"\n", end + 1)].decode(),
            )
            at = data.find(b"\n", end + 1) + 1
            stack.append(named(module, name))
        elif code == 0x51:  # BINPERSID
            if persistent is None:
                raise RefusedError("a persistent object")
            stack[-1] = persistent(stack[-1])
        elif code == 0x47:  # BINFLOAT
            stack.append(_DOUBLE(data, at)[0])
            at += 8
        elif code == 0x8F:  # EMPTY_SET
            stack.append(set())
        elif code == 0x90:  # ADDITEMS
            items, stack = stack, marks.pop()
            add_all(stack[-1], items)
        elif code == 0x91:  # FROZENSET
            items, stack = stack, marks.pop()
            stack.append(frozenset(checked_keys(items)))
        elif code == 0x80:  # PROTO
            if data[at] > 5:
                raise MalformedError(f"a pickle of protocol {data[at]}")
            at += 1
        elif code == 0x30:  # POP
            stack.pop()
        elif code == 0x31:  # POP_MARK
            stack = marks.pop()
        elif code == 0x32:  # DUP
            stack.append(stack[-1])
        elif code == 0x2E:  # STOP
            return stack[-1], at
        elif code in _REFUSED_CODES:
            raise RefusedError(_REFUSED_CODES[code])
        else:
            raise MalformedError(f"no pickle, or one of protocol 0 or 1 (code {code:#x})")
    raise MalformedError("it is cut short")


def _is_one_of(trusted: Mapping[str, Any], value: Any) -> bool:
    return any(value is each for each in trusted.values())


def _call_trusted(
    trusted: Mapping[str, Any], function: Any, arguments: tuple[Any, ...], *, as_class: bool
) -> Any:
    """Do what Python's unpicklers do, with what the program has declared safe."""
    if not _is_one_of(trusted, function):
        raise MalformedError("a call of what cannot be called")
    for each in arguments:
        if type(each) is Maker:
            raise RefusedError(each.name)
    return function.__new__(function, *arguments) if as_class else function(*arguments)


def _build_trusted(instance: Any, state: Any) -> None:
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        update(instance, attributes)
    for name, value in (slots or {}).items():
        setattr(instance, text(name), value)


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _latin1(data: bytes) -> str:
    return data.decode("latin-1")


# Values behind their length: how many bytes that has, and what they are.
_SIZED: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    0x8A: (1, _integer),
    0x8B: (4, _integer),  # LONG1, LONG4
    0x58: (4, _utf8),
    0x8D: (8, _utf8),  # BINUNICODE, BINUNICODE8
    # SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8
    0x43: (1, bytes),
    0x42: (4, bytes),
    0x8E: (8, bytes),
    0x96: (8, bytearray),
    0x55: (1, _latin1),
    0x54: (4, _latin1),  # SHORT_BINSTRING, BINSTRING: Python 2's
}
_REFUSED_CODES = {
    0x50: "a persistent object",
    0x92: "a class made by keywords",
    **dict.fromkeys((0x69, 0x6F), "an instance of an old class"),
    **dict.fromkeys((0x82, 0x83, 0x84), "an extension of copyreg"),
    **dict.fromkeys((0x97, 0x98), "a buffer outside of it"),
}


def checked_keys(values: Any) -> Any:
    """Return what may be hashed: nothing that takes long to hash, or that this machine cannot know.

    Raises
    ------
    MalformedError
        It may not.
    """
    if set(map(type, values)) <= _PLAIN_KEYS:
        return values
    for value in values:
        if type(value) in _PLAIN_KEYS:
            continue
        todo, count = [value], 0
        while todo:
            each = todo.pop()
            count += 1
            # Tuples of another class are those that :mod:`plain_objects` makes: named ones.
            is_nested = type(each) is frozenset or (
                isinstance(each, tuple) and type(each) is not torch.Size
            )
            if is_nested and count + len(each) <= _MAX_KEY_NODES:
                todo += each
            elif is_nested or not (
                type(each) in _PLAIN
                or type(each) in (Blank, Maker)
                or type(each).__module__ == "numpy"  # its scalars
                or _is_index(each)
            ):
                raise MalformedError(f"a key of type {type(each).__name__}")
    return values


def add_all(target: Any, values: list[Any]) -> None:
    """Put values into a set."""
    if type(target) is not set and type(target) is not Blank:
        raise MalformedError(f"a {type(target).__name__} used as a set")
    checked_keys(values)
    if type(target) is set:
        target.update(values)


def _is_index(value: Any) -> bool:
    """Return whether it is a MetadataIndex that is as plain as its parts."""
    if type(value).__name__ != "MetadataIndex":
        return False
    fields = vars(value)
    return type(fields.get("fqn")) is str and type(fields.get("offset")) in (type(None), torch.Size)


def _set(target: Any, items: list[Any]) -> None:
    if type(target) not in (*_DICTS, Blank) or len(items) % 2:
        raise MalformedError(f"a {type(target).__name__} used as a dict")
    keys = items[::2]
    checked_keys(keys)
    if type(target) is dict:
        target.update(zip(keys, items[1::2], strict=True))
    elif type(target) is Blank:
        _keep(target, lambda: dict(zip(keys, items[1::2], strict=True)))
    else:
        for key, value in zip(keys, items[1::2], strict=True):
            target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list or type(target) is deque:
        target.extend(items)
    elif type(target) is Blank:
        _keep(target, lambda: items)
    else:
        raise MalformedError(f"a {type(target).__name__} used as a list")


def _keep(blank: Blank, items: Callable[[], Any]) -> None:
    """Keep what a class is given, where its other parts are kept as well."""
    if hasattr(blank, "inside"):
        blank.inside.append(items())


def update(instance: Any, state: Any) -> None:
    """Give an instance attributes, and nothing else."""
    if type(state) is not dict or not set(map(type, state)) <= {str}:
        raise MalformedError(f"the state of a {type(instance).__name__} is no dict of attributes")
    instance.__dict__.update(state)


def text(value: Any) -> str:
    """Return what must be text."""
    if type(value) is not str:
        raise MalformedError(f"{type(value).__name__} instead of text")
    return value
