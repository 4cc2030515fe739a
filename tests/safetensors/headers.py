"""Headers for tests: valid ones, and mutations of them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from tensorferry.safetensors.dtypes import DTYPES

Pairs = list[tuple[str, Any]]


def file_of(text: bytes | str, data: bytes = b"") -> bytes:
    """Return a file with this header and these data."""
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


def info(dtype: str, shape: list[int], begin: int, end: int) -> str:
    """Return a tensor's entry in a header."""
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


class Random:
    """A generator of random numbers with the functions that mutations need."""

    def __init__(self, *seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def below(self, end: int) -> int:
        return int(self.generator.integers(end))

    def chance(self, probability: float) -> bool:
        return bool(self.generator.random() < probability)

    def one_of(self, values: Any) -> Any:
        return values[self.below(len(values))]


# Raw JSON, including values that Python's json cannot write.
VALUES = [
    *("null", "true", "false", "{}", "[]", '""', '"F32"', '"\\u0041"', '"\\ud83d\\ude00"', "[[]]"),
    *(
        "0",
        "-0",
        "1",
        "-1",
        "8",
        "1.0",
        "8e0",
        "0.0",
        "1e5",
        "1e400",
        "-1e400",
        "1e-400",
        "01",
        "+1",
    ),
    *("4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551615"),
    *("18446744073709551616", "-9223372036854775809", "9" * 30, "9" * 400, "NaN", "Infinity"),
    *(
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\ud800\\ud800\\udc00"',
        '"\\\\ud800"',
        '"\\x"',
        '"\\u00"',
    ),
    *('{"F32":null}', '{"F32":{}}', '{"F32":null,"F16":null}', '"\x01"', '"\x7f"', '"\t"', "[1,]"),
    *("[" * depth + "]" * depth for depth in (124, 125, 126, 127, 128, 3000)),
    *('{"a":' * depth + "0" + "}" * depth for depth in (124, 125, 126, 127)),
    *("[0,8]", "[8,0]", "[0,0]", "[0]", "[0,8,8]", "[2]", "[0,18446744073709551615,2]"),
    *("[18446744073709551615,2,0]", "[4294967296,4294967296]", '["F32",[2],[0,8]]', "nul", "'a'"),
]
SPACE = ["", "", "", " ", "\n", "\t\r", "\x0b", "\xa0", "\ufeff"]


def random_file(random: Random) -> tuple[list[Any], bytes]:
    """Return the pairs of a right header, and its data."""
    pairs: Pairs = []
    at = 0
    for index in range(random.below(4)):
        dtype = random.one_of(list(DTYPES))
        shape = [random.below(4) for _ in range(random.below(3))]
        if DTYPES[dtype].bits < 8:
            shape.append(4)
        nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
        fields: Pairs = [("dtype", json.dumps(dtype)), ("shape", [str(each) for each in shape])]
        fields.append(("data_offsets", [str(at), str(at + nbytes)]))
        name = random.one_of(["a", "a.weight", "é", "\U0001f600", "__metadata", ""]) + str(index)
        pairs.append((json.dumps(name, ensure_ascii=random.chance(0.5)), fields))
        at += nbytes
    if random.chance(0.3):
        metadata = [(json.dumps(f"k{each}"), '"v"') for each in range(random.below(3))]
        pairs.append(('"__metadata__"', metadata))
    if random.chance(0.3) and pairs:
        random.generator.shuffle(pairs)  # type: ignore[arg-type]
    return [(key, fields_of(value)) for key, value in pairs], random.generator.bytes(at)


def fields_of(value: Any) -> Any:
    """Return pairs with their names as JSON."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [(key if key.startswith('"') else f'"{key}"', item) for key, item in value]
    return value


def dumped(value: Any, random: Random) -> str:
    """Return a tree of pairs, lists and texts as JSON, with white space, as a mutation has left it."""

    def space() -> str:
        return random.one_of(SPACE[:6]) if random.chance(0.05) else ""

    if isinstance(value, str):
        return value
    if value and isinstance(value[0], tuple):
        items = [f"{space()}{key}{space()}:{space()}{dumped(item, random)}" for key, item in value]
        return "{" + ",".join(items) + space() + "}"
    items = [space() + dumped(item, random) for item in value]
    return "[" + ",".join(items) + space() + "]"


def mutate_tree(value: Any, random: Random) -> Any:
    """Return a tree of which one part is another."""
    if isinstance(value, str) or not value or random.chance(0.1):
        return random.one_of(VALUES)
    index = random.below(len(value))
    change = random.below(12)
    value = list(value)
    if change == 0:
        del value[index]
    elif change == 1:
        value.append(value[index])
    elif change == 2:
        other = random.below(len(value))
        value[index], value[other] = value[other], value[index]
    elif isinstance(value[index], tuple):
        key, item = value[index]
        if change == 3:
            value[index] = (random.one_of(KEYS), item)
        elif change == 4:
            value.insert(index, (random.one_of(KEYS), random.one_of(VALUES)))
        elif change == 5:
            value.insert(index, (key, mutate_tree(item, random)))
        elif change == 6 and isinstance(item, list) and item and isinstance(item[0], tuple):
            value[index] = (key, [each for _, each in item])
        else:
            value[index] = (key, mutate_tree(item, random))
    else:
        value[index] = mutate_tree(value[index], random)
    return value


KEYS = [
    '"dtype"',
    '"shape"',
    '"data_offsets"',
    '"__metadata__"',
    '"a0"',
    '"x"',
    '""',
    '"\\u0061"',
    "a",
]


def mutated(random: Random) -> bytes:
    """Return a valid file, or a mutation of one."""
    tree, data = random_file(random)
    while random.chance(0.6):
        tree = mutate_tree(tree, random)
    text = dumped(tree, random).encode() if tree else b"{}"
    if random.chance(0.2):
        text = random.one_of(SPACE).encode() + text + random.one_of(SPACE).encode()
    if random.chance(0.3):
        text = damaged(text, random)
    file = file_of(text, data)
    if random.chance(0.1):
        file = damaged(file, random)
    if random.chance(0.05):
        length = random.one_of(
            [0, 7, len(text) - 1, len(text) + 1, 100_000_001, 1 << 63, (1 << 64) - 1]
        )
        file = max(0, length).to_bytes(8, "little") + file[8:]
    return file


def damaged(data: bytes, random: Random) -> bytes:
    """Return bytes with some other, some more, or some less."""
    at, count = random.below(len(data) + 1), 1 + random.below(4)
    change = random.below(4)
    if change == 0:
        return data[:at] + data[at + count :]
    if change == 1:
        return data[:at] + random.generator.bytes(count) + data[at:]
    if change == 2:
        return data[:at] + random.generator.bytes(count) + data[at + count :]
    return (
        data[:at]
        + random.one_of([b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"0"])
        + data[at:]
    )
