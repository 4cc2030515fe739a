"""A safe unpickler: a small pickle machine that creates only plain values, and resolves names by a table.

Python's unpicklers look a name up, call it, and set attributes of any object. Here a name becomes a
:class:`Constructor`, which only this machine can call, so a pickle never gets access to objects of the process.

Memory and time are proportional to the length of the pickle. The memo is a dict, so a large index in the pickle does
not make it grow. Memory is only allocated for bytes that are present, whatever length the pickle announces. Values that
are hashed are small.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from tensorferry import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WORD = struct.Struct("<I").unpack_from
_TWO_LINES = re.compile(rb"([^\n]*)\n([^\n]*)\n")
# The maximum number of values in a dict key, its nested values included. Python hashes nested tuples, and compares
# nested frozensets, recursively, repeatedly and without a depth limit: a larger key could overflow the stack or take
# very long.
_MAX_KEY_NODES = 256
# Types that a dict key may consist of, as they are hashed quickly and without running code. A frozenset is traversed.
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
_MALFORMED = (
    *(LookupError, struct.error, TypeError, AttributeError),
    *(ValueError, ArithmeticError, RuntimeError, MemoryError),
)
_DICTS = (dict, OrderedDict, defaultdict, Counter)


class RefusedError(Exception):
    """A pickle has something that is not created without trust, such as a class or function that is not in the table.

    The message names the class, function or object that is refused, and callers put it after "it contains".
    """


class MalformedError(Exception):
    """The data are not a pickle, or are invalid for an object that the pickle names.

    The message says what is invalid.
    """


class Constructor:
    """Represents a class or function that a pickle names.

    Parameters
    ----------
    name : str
        The full name of the class or function.
    make : function
        Creates an object in place of the class or function; called with the pickle's arguments, which may have any
        type.
    build : function of (object, state), optional
        Sets the state of an object, as ``__setstate__`` does.
    kind : type, optional
        The type of the objects, required with ``build``.
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
        """Create an object, for Python's unpickler."""
        return self.make(*arguments)

    def __reduce__(self) -> Any:
        raise RefusedError(self.name)


def record(name: str, kind: type, build: Callable[[Any, Any], None] | None = None) -> Constructor:
    """Return a constructor for a plain class; instances have only the attributes in their state."""
    return Constructor(name, empty(kind, lambda: object.__new__(kind)), build or update, kind)


def empty(kind: type, new: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """Return a function that creates an empty container, by ``new`` or by calling its class."""

    def make(*arguments: Any) -> Any:
        if arguments:
            raise MalformedError(f"a {kind.__name__} with arguments")
        return (new or kind)()

    return make


def table(makers: list[Constructor]) -> dict[str, Constructor]:
    """Return constructors by name."""
    return {maker.name: maker for maker in makers}


def find(
    names: Mapping[str, Any], module: Any, name: Any, trusted: Mapping[str, Any] | None = None
) -> Any:
    """Return the constructor for a name, one of torch's constants, or a trusted object itself."""
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
    names: Mapping[str, Constructor],
    persistent: Callable[[Any], Any] | None = None,
    older: Mapping[str, str] | None = None,
    begin: int = 0,
    trusted: Mapping[str, Any] | None = None,
) -> tuple[Any, int]:
    """Read a pickle of protocol 2 or later.

    Parameters
    ----------
    data : bytes
        The pickle, possibly with other bytes around it.
    names : mapping of str to Constructor
        The names that may occur in it.
    persistent : function of an identity, optional
        Returns the object outside the pickle, such as a storage, that a persistent id refers to.
    older : mapping of str to str, optional
        Maps former names of modules, as old pickles have them, to their current names.
    begin : int
        The offset of the pickle.
    trusted : mapping of str to object, optional
        Classes and functions that the pickle may use directly, because the program has declared them safe.

    Returns
    -------
    object, int
        The object, and the end of the pickle.

    Raises
    ------
    RefusedError
        The pickle contains a name that is not in ``names``.
    MalformedError
        The data are not a valid pickle.
    """
    try:
        return _run(data, names, persistent, older or {}, begin, trusted or {})
    except (RefusedError, MalformedError):
        raise
    except _MALFORMED as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from None


def loads_records(data: bytes, known: Mapping[str, Any]) -> tuple[Any, int] | None:
    """Read a pickle of records by Python's own unpickler, if nothing in the pickle requires :func:`loads`.

    Records are instances of plain classes. Python's unpickler needs a sixth of the time of :func:`loads`.
    ``csrc/pickle/screen.h`` lists the pickles that would be unsafe.

    Parameters
    ----------
    data : bytes
        The pickle, possibly followed by other bytes.
    known : mapping of str to object
        The object for each name: plain Python classes, whose attributes the pickle cannot set, or constructors.

    Returns
    -------
    object, int
        The object, and the end of the pickle; None if :func:`loads` must read the pickle.
    """
    end = _core.screened_pickle_end(data)
    if not end:
        return None
    try:
        return _RecordsUnpickler(data, known).load(), end
    except Exception:  # loads() will raise an error with the reason
        return None


class _RecordsUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        return find(self._known, module, name)


class Placeholder:
    """Stands in for the result of any class or function.

    Attributes
    ----------
    inside : list
        The arguments, items and state that the pickle gives it, if its constructor collects them.
    called : str
        The name of the class or function, if the constructor sets it.
    """

    inside: list[Any]
    called: str


class _AnyName(dict[str, Constructor]):
    """A table that has a constructor for every name."""

    def get(self, name: str, _default: Any = None) -> Constructor:
        return Constructor(name, _SCREENED.get(name.rpartition(".")[2], _placeholder))


def _refuse_number(*arguments: Any) -> Placeholder:
    if any(type(each) is int for each in arguments):
        raise MalformedError("memory requested by a number")
    return Placeholder()


def _check_container_keys(*arguments: Any) -> Placeholder:
    """Refuse arguments of containers whose keys are slow to hash, or are hashed without a depth limit."""
    for argument in arguments:
        if type(argument) in (list, tuple):
            # Items of a dict are pairs with the key first.
            firsts = [each[0] for each in argument if type(each) in (list, tuple) and each]
            checked_keys([each for each in (*argument, *firsts) if type(each) is tuple])
    return Placeholder()


def _placeholder(*_arguments: Any) -> Placeholder:
    return Placeholder()


# The constructors of screen() for names that end in these words; all other names get _placeholder().
_SCREENED = {"bytearray": _refuse_number} | dict.fromkeys(
    ("set", "frozenset", "Counter", "OrderedDict", "dict", "defaultdict"), _check_container_keys
)


def screen(data: bytes, count: int = 1) -> None:
    """Refuse pickles that could crash torch's unpickler, by deeply nested keys, or by a number that requests memory.

    ``data`` begins with ``count`` pickles.

    Raises
    ------
    MalformedError
        A pickle could crash torch's unpickler, or the data are not a pickle.
    """
    names = _AnyName(
        blank=Constructor("", _placeholder, lambda _instance, _state: None, Placeholder)
    )
    at = 0
    for _ in range(count):
        at = loads(data, names, _placeholder, begin=at)[1]


def _run(
    data: bytes,
    names: Mapping[str, Constructor],
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

    def resolve(module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise MalformedError("a name that is not text")
        value = found.get((module, name))
        if value is None:
            value = found[module, name] = find(names, older.get(module, module), name, trusted)
        return value

    # The most frequent opcodes come first. A truncated value moves `at` past the end of the data, which ends the loop.
    while at < nbytes:
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[_WORD(data, at)[0]])
            at += 4
        elif code in _FIXED:
            number = _FIXED[code]
            stack.append(number.unpack_from(data, at)[0])
            at += number.size
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
                raise MalformedError("a call of an object that cannot be called")
            if type(maker) is Constructor:
                stack[-1] = maker.make(*arguments)
            else:
                stack[-1] = _call_trusted(trusted, maker, arguments, as_class=code == 0x81)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            build = builders.get(type(stack[-1]))
            if build is None and _is_trusted(trusted, type(stack[-1])):
                build = _build_trusted
            if build is None:
                raise MalformedError(
                    f"a state (BUILD) for an object of type {type(stack[-1]).__name__}, which accepts no state"
                )
            build(stack[-1], state)
        elif code in _ADDING:
            items, stack = stack, marks.pop()
            _ADDING[code](stack[-1], items)
        elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            stack[-count:] = [tuple([stack[place] for place in range(-count, 0)])]
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _extend(stack[-1], [value])
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
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
        elif code == 0x74 or code == 0x91:  # TUPLE, FROZENSET
            items, stack = stack, marks.pop()
            stack.append(tuple(items) if code == 0x74 else frozenset(checked_keys(items)))
        elif code == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(resolve(module, name))
        elif code == 0x63:  # GLOBAL
            lines = _TWO_LINES.match(data, at)
            if lines is None:
                raise MalformedError("a name without an end")
            stack.append(resolve(lines[1].decode(), lines[2].decode()))
            at = lines.end()
        elif code == 0x51:  # BINPERSID
            if persistent is None:
                raise RefusedError("a persistent object")
            stack[-1] = persistent(stack[-1])
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
            raise MalformedError(f"not a pickle, or one of protocol 0 or 1 (code {code:#x})")
    raise MalformedError("the pickle is cut short")


def _is_trusted(trusted: Mapping[str, Any], value: Any) -> bool:
    return any(value is each for each in trusted.values())


def _call_trusted(
    trusted: Mapping[str, Any], function: Any, arguments: tuple[Any, ...], *, as_class: bool
) -> Any:
    """Call a function or class that the program has declared safe, as Python's unpicklers do."""
    if not _is_trusted(trusted, function):
        raise MalformedError("a call of an object that cannot be called")
    for each in arguments:
        if type(each) is Constructor:
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


# Opcodes of numbers: BININT1, BININT2, BININT, BINFLOAT.
_FIXED = {
    code: struct.Struct(form)
    for code, form in ((0x4B, "B"), (0x4D, "<H"), (0x4A, "<i"), (0x47, ">d"))
}
# NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE; and EMPTY_DICT, EMPTY_LIST, EMPTY_SET.
_CONSTANTS: dict[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_EMPTY: dict[int, Callable[[], Any]] = {0x7D: dict, 0x5D: list, 0x8F: set}
# Opcodes of values with a length in front: the bytes of the length, and the conversion.
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
    0x54: (4, _latin1),  # SHORT_BINSTRING, BINSTRING, of Python 2
}
_REFUSED_CODES = {
    0x50: "a persistent object",
    0x92: "a class called with keywords",
    **dict.fromkeys((0x69, 0x6F), "an instance of an old class"),
    **dict.fromkeys((0x82, 0x83, 0x84), "an extension of copyreg"),
    **dict.fromkeys((0x97, 0x98), "an out-of-band buffer"),
}


def checked_keys(values: Any) -> Any:
    """Return ``values`` if they may be hashed: this is quick, and runs no code of an unknown class.

    Raises
    ------
    MalformedError
        A value may not be hashed.
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
            # A subclass of tuple can only be a named tuple that :mod:`plain_objects` has created.
            is_nested = type(each) is frozenset or (
                isinstance(each, tuple) and type(each) is not torch.Size
            )
            if is_nested and count + len(each) <= _MAX_KEY_NODES:
                todo += each
            elif is_nested or not (
                type(each) in _PLAIN
                or type(each) in (Placeholder, Constructor)
                or type(each).__module__ == "numpy"  # a scalar
                or _is_index(each)
            ):
                raise MalformedError(f"a key of type {type(each).__name__}")
    return values


def _add_all(target: Any, values: list[Any]) -> None:
    """Add values to a set."""
    if type(target) is not set and type(target) is not Placeholder:
        raise MalformedError(f"a {type(target).__name__} used as a set")
    checked_keys(values)
    if type(target) is set:
        target.update(values)


def _is_index(value: Any) -> bool:
    """Return whether a value is a MetadataIndex with plain fields, so that hashing it is safe."""
    if type(value).__name__ != "MetadataIndex":
        return False
    fields = vars(value)
    return type(fields.get("fqn")) is str and type(fields.get("offset")) in (type(None), torch.Size)


def _set(target: Any, items: list[Any]) -> None:
    if type(target) not in (*_DICTS, Placeholder) or len(items) % 2:
        raise MalformedError(f"a {type(target).__name__} used as a dict")
    pairs = zip(checked_keys(items[::2]), items[1::2], strict=True)
    if type(target) is Placeholder:
        _collect(target, dict(pairs))
    else:
        for key, value in pairs:  # not update(), which adds up the values of a Counter
            target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list or type(target) is deque:
        target.extend(items)
    elif type(target) is Placeholder:
        _collect(target, items)
    else:
        raise MalformedError(f"a {type(target).__name__} used as a list")


def _collect(blank: Placeholder, items: Any) -> None:
    """Add items to a placeholder, if it collects its parts."""
    if hasattr(blank, "inside"):
        blank.inside.append(items)


def update(instance: Any, state: Any) -> None:
    """Set the attributes of an instance directly in its ``__dict__``, without running code of its class."""
    if type(state) is not dict or not set(map(type, state)) <= {str}:
        raise MalformedError(
            f"the state of a {type(instance).__name__} is not a dict of attributes"
        )
    instance.__dict__.update(state)


def text(value: Any) -> str:
    """Return ``value`` if it is text, or raise MalformedError."""
    if type(value) is not str:
        raise MalformedError(f"{type(value).__name__} instead of text")
    return value


# Opcodes that add the items since the last mark to a container: SETITEMS, APPENDS, ADDITEMS.
_ADDING = {0x75: _set, 0x65: _extend, 0x90: _add_all}
