"""The parser of a safetensors header's JSON. It returns the tensors' entries, and checks the types of all values.

It accepts the same JSON as the reference, safetensors' own parser in Rust (serde_json); see :mod:`.header`.

The text is parsed entry by entry, so memory holds the tensors found so far and one decoded entry. The worst input, 100
MB of JSON that no writer produces, needs about 2 GB.
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
"""The size of the length field before the JSON."""

METADATA = "__metadata__"
"""The key of the metadata in the JSON, where all other keys are names of tensors."""

WORD = 1 << 64
"""The smallest number that the reference's unsigned 64-bit integers cannot represent."""

Found: TypeAlias = tuple[Dtype, tuple[int, ...], int, int]
"""A tensor's dtype, shape, and data_offsets."""

_MAX_DEPTH = 127  # serde_json's recursion limit for nested containers
# The maximum number of lists and objects ("containers"). The reference has no such limit, because its containers take
# less memory. Here the limit prevents a small hostile file from taking gigabytes. Headers of real writers have at most
# 6 million containers in the 100 MB that the format allows.
_MAX_CONTAINERS = 8_000_000
_FIELDS = ("dtype", "shape", "data_offsets")


class Parser:
    """A parser for the JSON of one header, which also checks the types of all values."""

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
        """Return the metadata, and the tensors in the order of the text."""
        if self._text.count("[") + self._text.count("{") > _MAX_CONTAINERS:
            self._fail(f"it has more than {_MAX_CONTAINERS} lists and objects")
        self._check_surrogates()
        if is_nested_dangerously(self._text):
            self._fail(f"it is nested more than {_MAX_DEPTH} deep")
        self._expect("{", "it is not an object")
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
            self._fail("there is text after the closing brace")
        return self._metadata, self._tensors

    def _entry(self) -> None:
        """Parse one entry with the general JSON decoder."""
        if self._peek() != '"':
            self._fail("a name is missing")
        key = self._value(None)
        self._expect(":", "a colon is missing")
        if key != METADATA:
            # As in the reference, the last of several entries with one name counts, and all of them must be valid.
            self._tensors[key] = self._tensor(key, self._value(key))
            return
        if self._seen_metadata:
            self._fail(f"{METADATA} occurs twice")
        self._seen_metadata = True
        self._metadata = self._text_only(self._value(None))

    def _text_only(self, value: Any) -> dict[str, str] | None:
        if value is None:
            return None
        if not isinstance(value, _Object):
            raise SafetensorError(f"its {METADATA} is not a JSON object", self._path)
        for key, item in value:
            if not isinstance(item, str):
                raise SafetensorError(
                    f"its {METADATA} has {shortened(item)} for {shortened(key)}, which must be a string",
                    self._path,
                )
        return dict(value)

    def _tensor(self, name: str, value: Any) -> Found:
        # The reference also accepts a list of the fields in their order, which no writer produces.
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
                    if _is_deeper(item, _MAX_DEPTH - 2):
                        self._refuse(name, f"JSON nested more than {_MAX_DEPTH} deep")
                elif key in fields:
                    self._refuse(name, f"it has {key} twice")
                else:
                    fields[key] = item
        else:
            self._refuse(name, f"{shortened(value)} is not an object with {', '.join(_FIELDS)}")
        for key in _FIELDS:
            if key not in fields:
                self._refuse(name, f"it has no {key}")
        return self._dtype(name, fields["dtype"]), *self._numbers(name, fields)

    def _dtype(self, name: str, value: Any) -> Dtype:
        if isinstance(value, _Object) and len(value) == 1 and value[0][1] is None:
            # The reference also accepts {"F32": null}, which no writer produces.
            value = value[0][0]
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None:
            self._refuse(name, f"{shortened(value)} is not a dtype of the format")
        return dtype

    def _numbers(self, name: str, fields: dict[str, Any]) -> tuple[tuple[int, ...], int, int]:
        shape, offsets = fields["shape"], fields["data_offsets"]
        if not _are_sizes(shape):
            self._refuse(name, f"its shape is {shortened(shape)}, which is not a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            self._refuse(
                name, f"its data_offsets are {shortened(offsets)}, which are not two offsets"
            )
        return tuple(shape), offsets[0], offsets[1]

    def _check_surrogates(self) -> None:
        """Refuse an escaped unpaired surrogate, which Python decodes to a string that cannot be encoded as UTF-8."""
        if "\\u" not in self._text:
            return
        for match in _ESCAPE.finditer(self._text):
            if match.lastgroup == "lone":
                self._at = match.start()
                self._fail("unpaired surrogate")

    def _peek(self) -> str:
        """Skip white space, and return the next character, or "" at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _expect(self, character: str, otherwise: str) -> None:
        if self._peek() != character:
            self._fail(otherwise)
        self._at += 1

    def _value(self, name: str | None) -> Any:
        """Decode the next value. ``name`` is the tensor that errors refer to."""
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
            f"its header is not valid JSON: {reason}, at byte {at}", self._path, name=name
        ) from None

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise SafetensorError(reason, self._path, name=name)


class _Object(tuple[tuple[str, Any], ...]):
    """The pairs of a JSON object. Unlike a dict, it keeps duplicate keys, which the caller must see."""


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of unsigned integers. True and 1.0 are not, as in the reference."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _integer(text: str) -> int | float:
    if len(text) <= _WORD_DIGITS and text != "-0":
        value = int(text)
        if value < WORD:
            return value
    # serde_json parses larger integers, and -0, as floats. Python's int() raises for more than 4300 digits.
    return _float(text)


def _float(text: str) -> float:
    # The reference rounds differently, and refuses some numbers near the largest float. No tensor's field is a float.
    value = float(text)
    if math.isinf(value):
        raise _NumberError(f"{shortened(text)} is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise _NumberError(f"{text} is not JSON")


class _NumberError(Exception):
    """A number that the reference refuses. The json module passes the error from its hooks to ``Parser._value()``."""


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether containers are nested more than ``depth`` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [each for each in level if isinstance(each, (list, _Object))]
        if not level:
            return False
        level = [
            each[1] if isinstance(parent, _Object) else each for parent in level for each in parent
        ]
    return True


def is_nested_dangerously(text: str) -> bool:
    """Return whether the text may overflow the C stack in Python's JSON parser.

    An overflow is possible only where the program has raised Python's recursion limit. Otherwise the parser raises
    RecursionError before it overflows the stack.
    """
    if sys.getrecursionlimit() <= _SAFE_RECURSION_LIMIT:
        return False
    outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
    depth = 0
    for match in _BRACKET.finditer("".join(outside)):
        depth += 1 if match[0] in "[{" else -1
        if depth > _MAX_DEPTH:
            return True
    return False


# The fast path: an entry with the fields and the white space that all writers use. Any other entry takes the general
# decoder, which is several times slower.
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
# Up to this recursion limit, Python raises RecursionError before its JSON parser exhausts the C stack.
_SAFE_RECURSION_LIMIT = 5000
