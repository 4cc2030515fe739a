"""The JSON of a safetensors header, taken apart: which tensors it names, with types as the reference wants them.

The text is taken entry by entry, so that memory is that of the tensors found, and of one entry at a time. At worst, of
100 MB of what no writer writes, that is about 2 GB.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn, TypeAlias

from tensorferry.safetensors.dtypes import DTYPES, Dtype
from tensorferry.safetensors.errors import SafetensorError, shortened

LENGTH_NBYTES = 8
"""What stands before the JSON."""

METADATA = "__metadata__"
"""What stands in the place of a tensor's name for metadata."""

WORD = 1 << 64
"""The reference counts in 64 bits."""

Found: TypeAlias = tuple[Dtype, tuple[int, ...], int, int]
"""A tensor's dtype, shape, and data_offsets."""

_MAX_DEPTH = 127  # containers in containers, as serde_json has it
# 100 MB have room for 6 million, in tensors as anybody writes them. The reference, where they take less memory, would
# go on; here nothing else keeps a small file from taking gigabytes.
_MAX_CONTAINERS = 8_000_000
_FIELDS = ("dtype", "shape", "data_offsets")


class Parser:
    """The JSON of a header, and which types it has where."""

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path
        self._at = 0
        self._metadata: dict[str, str] | None = None
        self._seen_metadata = False
        self._tensors: dict[str, Found] = {}
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_Object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )

    def run(self) -> tuple[dict[str, str] | None, dict[str, Found]]:
        """Return metadata, and tensors in the order of the text."""
        if self._text.count("[") + self._text.count("{") > _MAX_CONTAINERS:
            self._fail(f"it has more than {_MAX_CONTAINERS} lists and objects")
        self._check_surrogates()
        if nested_dangerously(self._text):
            self._fail(f"it is nested more than {_MAX_DEPTH} deep")
        self._expect("{", "it is no object")
        more = self._peek() != "}"
        while more:
            match = _PLAIN.match(self._text, self._at)
            if match and match[1] != METADATA:
                name, dtype, shape, begin, end, comma = match.groups()
                sizes = tuple(map(int, shape.split(","))) if shape else ()
                self._tensors[name] = self._dtype(name, dtype), sizes, int(begin), int(end)
                self._at = match.end()
                if comma:
                    continue
            else:
                self._entry()
            more = self._peek() == ","
            self._at += more
        self._expect("}", "a comma or the closing brace is missing")
        if self._peek():
            self._fail("there is more behind the closing brace")
        return self._metadata, self._tensors

    def _entry(self) -> None:
        """Take any entry, however it is written."""
        if self._peek() != '"':
            self._fail("a name is missing")
        key = self._value(None)
        self._expect(":", "a colon is missing")
        if key != METADATA:
            # Of several with one name the last one counts, but all must be tensors.
            self._tensors[key] = self._tensor(key, self._value(key))
            return
        if self._seen_metadata:
            self._fail(f"{METADATA} is there twice")
        self._seen_metadata = True
        self._metadata = self._text_only(self._value(None))

    def _text_only(self, value: Any) -> dict[str, str] | None:
        if value is None:
            return None
        if not isinstance(value, _Object):
            raise SafetensorError(f"its {METADATA} are no JSON object", self._path)
        for key, item in value:
            if not isinstance(item, str):
                raise SafetensorError(
                    f"its {METADATA} have {shortened(item)} for {shortened(key)}, and may have strings only",
                    self._path,
                )
        return dict(value)

    def _tensor(self, name: str, value: Any) -> Found:
        # No writer's, but the reference takes it: the fields in their order.
        if isinstance(value, list):
            if len(value) != len(_FIELDS):
                self._refuse(
                    name, f"it has {len(value)} fields, and must have {', '.join(_FIELDS)}"
                )
            fields = dict(zip(_FIELDS, value, strict=True))
        elif isinstance(value, _Object):
            fields = {}
            for key, item in value:
                if key not in _FIELDS:
                    if _deeper(item, _MAX_DEPTH - 2):
                        self._refuse(name, f"JSON nested more than {_MAX_DEPTH} deep")
                elif key in fields:
                    self._refuse(name, f"it has {key} twice")
                else:
                    fields[key] = item
        else:
            self._refuse(name, f"{shortened(value)} stands where dtype, shape and offsets should")
        for key in _FIELDS:
            if key not in fields:
                self._refuse(name, f"it has no {key}")
        return self._dtype(name, fields["dtype"]), *self._numbers(name, fields)

    def _dtype(self, name: str, value: Any) -> Dtype:
        if isinstance(value, _Object) and len(value) == 1 and value[0][1] is None:
            value = value[0][0]  # no writer's either: {"F32": null}
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            self._refuse(name, f"{shortened(value)} is no dtype of the format")
        return dtype

    def _numbers(self, name: str, fields: dict[str, Any]) -> tuple[tuple[int, ...], int, int]:
        shape, offsets = fields["shape"], fields["data_offsets"]
        if not _are_sizes(shape):
            self._refuse(name, f"its shape is {shortened(shape)}, no list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            self._refuse(name, f"its data_offsets are {shortened(offsets)}, not two offsets")
        return tuple(shape), offsets[0], offsets[1]

    def _check_surrogates(self) -> None:
        """Refuse half a surrogate pair, of which Python makes a string that nothing can encode."""
        if "\\u" not in self._text:
            return
        for match in _ESCAPE.finditer(self._text):
            if match.lastgroup == "lone":
                self._at = match.start()
                self._fail("half a surrogate pair")

    def _peek(self) -> str:
        """Return the next character that is no white space; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _expect(self, character: str, otherwise: str) -> None:
        if self._peek() != character:
            self._fail(otherwise)
        self._at += 1

    def _value(self, name: str | None) -> Any:
        """Return the value that stands here, of the tensor of this name, or the name itself."""
        self._peek()
        try:
            value, self._at = self._decoder.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            self._at = error.pos
            self._fail(error.msg, name)
        except _NumberError as error:
            self._fail(str(error), name)
        except RecursionError:
            self._fail(f"it is nested more than {_MAX_DEPTH} deep", name)
        return value

    def _fail(self, reason: str, name: str | None = None) -> NoReturn:
        at = LENGTH_NBYTES + len(self._text[: self._at].encode())
        raise SafetensorError(
            f"its header is no valid JSON: {reason}, at byte {at}", self._path, name=name
        ) from None

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise SafetensorError(reason, self._path, name=name)


class _Object(tuple[tuple[str, Any], ...]):
    """A JSON object: its pairs, of which several may have one key."""


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of numbers as the reference counts; True and 1.0 are none."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _integer(text: str) -> int | float:
    if len(text) <= _WORD_DIGITS and text != "-0":
        value = int(text)
        if value < WORD:
            return value
    return _float(text)  # as serde_json has it; and int() may refuse so many digits


def _float(text: str) -> float:
    # The reference's arithmetic may differ by a rounding: it refuses some that are just finite. No field is a float.
    value = float(text)
    if math.isinf(value):
        raise _NumberError(f"{shortened(text)} is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise _NumberError(f"{text} is no JSON")


class _NumberError(Exception):
    """A number that the reference does not read; a class of its own, which json passes through."""


def _deeper(value: Any, depth: int) -> bool:
    """Return whether there are containers in containers in more levels than so many."""
    level = [value]
    for _ in range(depth + 1):
        level = [each for each in level if isinstance(each, (list, _Object))]
        if not level:
            return False
        level = [
            each[1] if isinstance(parent, _Object) else each for parent in level for each in parent
        ]
    return True


def nested_dangerously(text: str) -> bool:
    """Return whether Python's parser of JSON may be led through the end of the stack, where its limit was raised."""
    if sys.getrecursionlimit() <= _SAFE_RECURSION_LIMIT:
        return False
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
    depth = 0
    for match in _BRACKET.finditer("".join(outside)):
        depth += 1 if match[0] in "[{" else -1
        if depth > _MAX_DEPTH:
            return True
    return False


# An entry as all writers have it; several times as fast as the general way, to which all others are left.
_SIZE = r"(?:0|[1-9][0-9]{0,18})"
_PLAIN = re.compile(
    rf"""
    [ ]?"([^"\\\x00-\x1f]*)": [ ]?\{{
    "dtype": [ ]?"([A-Z0-9_]+)", [ ]?
    "shape": [ ]?\[((?:{_SIZE}(?:,[ ]?{_SIZE})*)?)\], [ ]?
    "data_offsets": [ ]?\[({_SIZE}),[ ]?({_SIZE})\]\}}(,)?
    """,
    re.VERBOSE,
)
_WORD_DIGITS = len(str(WORD))
_SPACE = re.compile(r"[ \t\n\r]*")
_BRACKET = re.compile(r"[\[\]{}]")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F])|.)",
    re.DOTALL,
)
# Up to here Python's own limit ends the recursion of its parser in time, above the stack may end first.
_SAFE_RECURSION_LIMIT = 5000
