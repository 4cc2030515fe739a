"""Pickles made by an attacker, and files damaged at random."""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import re
import shutil
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

if TYPE_CHECKING:
    import numpy as np

TORCH = "torch.distributed.checkpoint"


def some_metadata(**changes: Any) -> Metadata:
    """Metadata of one tensor and one object."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk])
    info = filesystem._StorageInfo("__0_0.distcp", 0, 2000)
    other = filesystem._StorageInfo("__0_0.distcp", 2000, 700)
    values: dict[str, Any] = {
        "state_dict_metadata": {"a": tensor, "b": BytesStorageMetadata()},
        "planner_data": {"a": ("a",), "b": ("nested", 0)},
        "storage_data": {MetadataIndex("a", [0, 0], 0): info, MetadataIndex("b"): other},
        "storage_meta": StorageMeta(pathlib.Path("/some/where"), "id"),
    }
    return Metadata(**(values | changes))


class Calling:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


TARGET = "attack"
ATTACKS = {
    "system": Calling(os.system, f"touch {TARGET}"),
    "eval": Calling(eval, f"open({TARGET!r}, 'w')"),
    "open": Calling(open, TARGET, "w"),
    "import": Calling(__import__, "os"),
    "getattr": Calling(getattr, pickle.Unpickler, "load"),
    "getattr of a class": Calling(getattr, torch_metadata._MEM_FORMAT_ENCODING, "__class__"),
    "setattr": Calling(setattr, torch.Size, "a", 1),
    "torch.load": Calling(torch.load, TARGET),
    "numpy": Calling(__import__("numpy").fromfile, TARGET),
    "rmtree": Calling(shutil.rmtree, "/nowhere"),
    "partial": Calling(__import__("functools").partial, os.system, f"touch {TARGET}"),
    "defaultdict": collections.defaultdict(list),
    "class": pickle.Unpickler,
}


def name_of(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


SYSTEM = name_of("os", "system") + text(f"touch {TARGET}") + b"\x85R"
MEMBER = name_of(f"{TORCH}.metadata", "_MEM_FORMAT_ENCODING") + b"K\0\x85R"
POLLUTION = b"}" + text("_value_") + b"K\7s"
# Pickles without their PROTO and STOP, each of which leaves one value.
CODES: dict[str, bytes] = {
    "a call": SYSTEM,
    "an old instance": b"(ios\nsystem\n",
    "an old object": b"(" + name_of("os", "system") + text("true") + b"o",
    "keywords": name_of("subprocess", "Popen") + b")}\x92",
    "an extension": b"\x82\1",
    "a long extension": b"\x84\1\0\0\0",
    "a persistent name": b"Pos.system\n",
    "a persistent object": text("os.system") + b"Q",
    "a buffer": b"\x97",
    "a state of an enumeration's member": MEMBER + POLLUTION + b"b",
    "slots of an enumeration's member": MEMBER + b"N" + POLLUTION + b"\x86b",
    "a state of an enumeration": name_of(f"{TORCH}.metadata", "_MEM_FORMAT_ENCODING")
    + POLLUTION
    + b"b",
    "a state of an old enumeration's member": name_of(
        "torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"
    )
    + b"K\0\x85R"
    + POLLUTION
    + b"b",
    "a state of a class": name_of(f"{TORCH}.metadata", "Metadata") + b"N" + POLLUTION + b"\x86b",
    "a state of a dtype": name_of("torch", "float32") + POLLUTION + b"b",
    "a state of a layout": name_of("torch", "strided") + POLLUTION + b"b",
    "a state of a NumPy dtype": name_of("numpy", "dtype")
    + text("f8")
    + b"\x89\x89\x87R("
    + b"K\3"
    + text("<")
    + b"NNN"
    + b"K\1K\1K\0tb"
    + POLLUTION
    + b"b",
    "an attribute": name_of("builtins", "getattr") + MEMBER + text("__class__") + b"\x86R",
    "a method": name_of("builtins", "str.format") + b")R",
    "a method of a dtype": name_of("torch", "float32.__reduce__") + b")R",
    "torch's own loader": name_of("torch", "load") + text(TARGET) + b"\x85R",
    "torch's hub": name_of("torch.hub", "load") + text(TARGET) + b"\x85R",
    "a module of torch": name_of("torch", "os"),
    "a stack of names": text("os") + text("system") + b"\x93",
    "names that are none": b"K\1K\2\x93",
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 1 << 60),
    "text that is not there": b"\x8d" + struct.pack("<Q", 1 << 60),
    "a number of an object": b"K\0r\xff\xff\xff\x7f",
    "a number of an object as text": b"K\0p2147483647\n",
    "a byte array that is not there": b"\x96" + struct.pack("<Q", 1 << 40),
    "bytes by number": name_of("builtins", "bytearray") + b"J\0\0\0\x7f\x85R",
    "bytes by number in Python 2": name_of("__builtin__", "bytes") + b"J\0\0\0\x7f\x85R",
    "a huge array": name_of("numpy.core.multiarray", "scalar")
    + name_of("numpy", "dtype")
    + text("S999999999")
    + b"\x89\x89\x87RC\1a\x86R",
    "an array of objects": name_of("numpy", "dtype") + text("O") + b"\x89\x89\x87R",
    "a time that is none": name_of("datetime", "datetime") + b"C\x0a" + b"\xff" * 10 + b"\x85R",
    "a time zone": name_of("datetime", "datetime")
    + b"C\x0a\x07\xe0\1\1\0\0\0\0\0\0"
    + SYSTEM
    + b"\x86R",
    "a factory": name_of("collections", "defaultdict") + name_of("os", "system") + b"\x85R",
    "a subclass of arrays": name_of("numpy.core.multiarray", "_reconstruct")
    + name_of("numpy", "matrix")
    + b"K\0\x85C\1b\x87R",
    "hooks": name_of("torch._utils", "_rebuild_parameter") + SYSTEM + b"\x88}\x87R",
}
CODES |= {name: pickle.dumps(each, 4)[:-1] for name, each in ATTACKS.items()}


def by_protocol_4(code: bytes) -> bytes:
    """Return a code that names things as newer pickles do."""

    def name(match: re.Match[bytes]) -> bytes:
        module, attribute = match.groups()
        return b"\x8c%c%b\x8c%c%b\x93" % (len(module), module, len(attribute), attribute)

    return re.sub(rb"c([\w.]+)\n([\w.]+)\n", name, code)


CODES |= {
    f"{name}, by protocol 4": code
    for name, old in CODES.items()
    if (code := by_protocol_4(old)) != old
}


FREQUENT = b"()tRb\x81\x93cuesh0q}]Nj.Qa\x85\x86\x87\x94\x88\x8f\x90"


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    """Change some bytes: flip bits, remove, duplicate or move pieces, and insert opcodes that attackers use."""
    result = bytearray(data)
    for _ in range(random.integers(1, 5)):
        at = int(random.integers(len(result) + 1))
        end = at + int(random.integers(1, 9))
        kind = random.integers(7)
        if kind <= 1 and at < len(result):
            result[at] ^= 1 << int(random.integers(8))
        elif kind == 2:
            del result[at:end]
        elif kind == 3:
            result[at:at] = result[at:end]
        elif kind == 4:
            result[at:end] = random.bytes(end - at)
        elif kind == 5:
            codes = list(CODES.values())
            result[at:at] = codes[random.integers(len(codes))]
        elif at < len(result):
            result[at] = FREQUENT[random.integers(len(FREQUENT))]
    return bytes(result)
