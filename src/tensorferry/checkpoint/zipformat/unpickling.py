"""A restricted unpickler: Python's own, with a table of the names that a pickle may use. It needs no torch.

A pickle can call the objects that it names, and set attributes of what it names or makes. So it gets none of the
process's objects: each name is a :class:`StandIn`, which calls a function of the table's author, and whose attributes
cannot be set. What these functions return belongs to the pickle alone.

Python's unpickler allocates what a pickle declares: a table as long as the highest number of an object, and the length
of bytes before it has read them. :func:`check_sizes` refuses numbers that the pickle is too short for, so damage cannot
make a process use more memory than a small multiple of the pickle's size. A pickle can still be made on purpose to end
the process, by containers that are nested very deeply.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


# Opcodes without a length, up to the next one with a length, a large number of an object, or the end. The number of
# repetitions is bounded because the regular expression needs memory for each.
_SIMPLE_OPCODES = re.compile(
    rb"(?:[()012NRQabd}elo\]stu\x81\x85-\x89\x8f-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|r..\0\0"
    rb"|[G\x95].{8}|[ILFSVPg][^\n]*\n|p\d{1,5}\n|[ci][^\n]*\n[^\n]*\n){1,1000}",
    re.DOTALL,
)
# The sizes of the lengths that follow opcodes.
_LENGTH_NBYTES = (
    dict.fromkeys(b"UC\x8a\x8c", 1)
    | dict.fromkeys(b"TBX\x8b", 4)
    | dict.fromkeys(b"\x8d\x8e\x96", 8)
)


class RefusedError(Exception):
    """A pickle has something that is not created without trust, such as a class or function that is not in the table.

    The message names the class, function or object that is refused, and callers put it after "it contains".
    """


class MalformedError(Exception):
    """The data are not a pickle, or are invalid for an object that the pickle names.

    The message says what is invalid.
    """


class StandIn(type):
    """The class of stand-ins; each is a class itself, because pickles may only make instances of classes.

    Attributes
    ----------
    name : str
        The name of the class or function in pickles.
    call : function
        What a pickle calls in place of the function, or to make an instance; its arguments may have any type.
    """

    name: str
    call: Callable[..., Any]

    def __call__(cls, *arguments: Any) -> Any:
        """Make what the pickle calls."""
        return cls.call(*arguments)

    def __setattr__(cls, *_: Any) -> None:
        raise RefusedError(f"a change of {cls.name}")


def _refuse_to_pickle(kind: StandIn) -> Any:
    raise RefusedError(kind.name)


# A stand-in that is left in an object cannot be pickled with it.
copyreg.pickle(StandIn, _refuse_to_pickle)


def stand_in(name: str, call: Callable[..., Any], new: Callable[..., Any] | None = None) -> StandIn:
    """Return a stand-in that calls a function, and ``new`` in place of ``__new__``, which is by default the same."""
    make = call if new is None else new
    attributes = {
        "__slots__": (),
        "name": name,
        "call": staticmethod(call),
        "__new__": lambda _, *arguments: make(*arguments),
    }
    return StandIn(name.rpartition(".")[2], (), attributes)


def record(name: str, kind: type) -> StandIn:
    """Return a stand-in for a plain class: a pickle makes an instance without arguments, and sets its attributes."""
    return stand_in(name, refuse_call, lambda: object.__new__(kind))


def refuse_call(*_: Any) -> Any:
    """Refuse the call of a class that a pickle may only name."""
    raise MalformedError("a call of a class that cannot be called")


def declared(kind: Any, name: str = "") -> StandIn:
    """Return a stand-in for a class or function that the program has declared safe, which is called itself.

    It is not called with other stand-ins.
    """

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            for each in arguments:
                if isinstance(each, StandIn):
                    raise RefusedError(each.name)
            return function(*arguments)

        return call

    new = kind.__new__
    name = name or f"{kind.__module__}.{kind.__qualname__}"
    return stand_in(name, unwrapping(kind), unwrapping(lambda *values: new(kind, *values)))


def check_sizes(data: bytes) -> None:
    """Check that the lengths and the numbers of objects in a pickle are possible for its size.

    Raises
    ------
    MalformedError
        One of them is not.
    """
    at = 0
    while at < len(data):
        run = _SIMPLE_OPCODES.match(data, at)
        at = at if run is None else run.end()
        opcode = data[at : at + 1]
        if opcode == b"r":
            number, at = int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
        elif opcode == b"p":
            number, at = len(data), len(data)
        elif opcode and (nbytes := _LENGTH_NBYTES.get(opcode[0])):
            at += 1 + nbytes
            number = int.from_bytes(data[at - nbytes : at], "little")
            at += number
        elif run is None:  # the end, or no opcode, which the unpickler refuses
            return
        else:
            continue
        if number >= len(data):
            raise MalformedError(f"the length or number {number}, in {len(data)} bytes")


class Unpickler(pickle.Unpickler):
    """Reads a pickle.

    Parameters
    ----------
    data : bytes
        The pickle, possibly followed by other bytes.
    find : function of a name
        Returns what the pickle gets for a name, usually a :class:`StandIn`; None if the name is refused.
    """

    def __init__(self, data: bytes, find: Callable[[str], Any]) -> None:
        self._data, self._stream = data, io.BytesIO(data)
        super().__init__(self._stream, encoding="utf-8")
        self._find = find

    @property
    def end(self) -> int:
        """The offset of the end of the pickle, once it has been read."""
        return self._stream.tell()

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle gets for a name; one of Python 2 or 3.13 counts as that of other versions."""
        module, name = NAME_MAPPING.get((module, name), (module, name))
        module = IMPORT_MAPPING.get(module, module).replace("pathlib._local", "pathlib")
        found = self._find(f"{module}.{name}")
        if found is None:
            raise RefusedError(f"{module}.{name}")
        return found

    def load(self) -> Any:
        """Return the object.

        Raises
        ------
        RefusedError
            The pickle contains a name that ``find`` refuses.
        MalformedError
            The data are not a valid pickle.
        """
        check_sizes(self._data)
        try:
            return super().load()
        except (RefusedError, MalformedError):
            raise
        except Exception as error:  # anything that functions make of their arguments
            raise MalformedError(f"{type(error).__name__}: {error}") from None


class Inert:
    """Stands in for the result of any class or function: it keeps what the pickle gives it.

    Attributes
    ----------
    called : str
        The name of the class or function.
    parts : list
        Its arguments and state.
    items : list of (key, value)
        The items that the pickle adds to it, those of a list with their numbers.
    """

    def __init__(self, called: str, arguments: tuple[Any, ...]) -> None:
        self.called = called
        self.parts: list[Any] = list(arguments)
        self.items: list[tuple[Any, Any]] = []

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Keep an item that the pickle adds to a list or set."""
        self.items.append((len(self.items), value))

    def extend(self, values: Any) -> None:
        """Keep items that the pickle adds to a list or set."""
        for value in values:
            self.append(value)

    add, update = append, extend


def inert(name: str) -> StandIn:
    """Return a stand-in for any class or function, which makes an :class:`Inert`."""
    return stand_in(name, lambda *arguments: Inert(name, arguments))
