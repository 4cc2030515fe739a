"""Detects whether reading a file has run code, or changed something in the process."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import enum
import os
import pathlib
import pickle
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint import filesystem, metadata

from tensorferry.checkpoint.storage import metadata as our_metadata
from tensorferry.checkpoint.storage import safe_objects
from tensorferry.checkpoint.zipformat import unpickling

if TYPE_CHECKING:
    from collections.abc import Iterator

_WATCHED: list[Any] = [
    *(getattr(metadata, name) for name in metadata.__all__),
    *(metadata._MEM_FORMAT_ENCODING, *metadata._MEM_FORMAT_ENCODING),
    *(old_metadata.MEM_FORMAT_ENCODING, *old_metadata.MEM_FORMAT_ENCODING),
    *(old_metadata.TensorProperties, filesystem._StorageInfo, torch.Size, torch.dtype),
    *(torch.nn.Parameter, torch.Tensor, torch._utils, torch.serialization, enum.Enum),
    *(OrderedDict, Counter, defaultdict, deque, pathlib.Path, pathlib.PosixPath),
    *(builtins, copyreg, pickle, os, our_metadata, unpickling, safe_objects),
]
# Prefixes of the interpreter's audit events that reading a file must not cause.
_DEEDS = ("exec", "import", "os.", "subprocess.", "shutil.", "socket.", "ctypes.dlopen")
_HARMLESS = ("os.listdir", "os.scandir", "os.putenv")
_HARMLESS_NAMES = {
    "collections",
    "torch",
    "torch._utils",
    "torch.serialization",
    "torch.storage",
} | {
    *("builtins", "__builtin__", "numpy", "numpy.core.multiarray", "numpy._core.multiarray"),
    *("datetime", "decimal", "pathlib", "argparse", "_codecs", "torch._tensor"),
}
_HARMFUL_FUNCTIONS = {"eval", "exec", "compile", "open", "getattr", "setattr", "__import__", "map"}


class _Watch:
    hooked = False
    thread: int | None = None
    deeds: list[str]


def _receive(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watch.thread != threading.get_ident():
        return
    if event == "pickle.find_class":
        module, name = arguments
        if module not in _HARMLESS_NAMES or name in _HARMFUL_FUNCTIONS:
            _Watch.deeds.append(f"{event} {module}.{name}")
    elif event.startswith(_DEEDS) and not event.startswith(_HARMLESS):
        _Watch.deeds.append(f"{event} {arguments!r:.100}")


def _state() -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{number} {name}": id(value)
        for number, each in enumerate(_WATCHED)
        for name, value in vars(each).items()
        if name not in ("__warningregistry__", "_kept")
    }
    found |= {f"format {member.name}": member._value_ for member in metadata._MEM_FORMAT_ENCODING}
    found |= {f"environment {name}": value for name, value in os.environ.items()}
    found |= {"default": torch.get_default_dtype(), "limit": sys.getrecursionlimit()}
    found |= {f"table {key}": id(value) for key, value in copyreg.dispatch_table.items()}
    here = pathlib.Path.cwd()
    found["folder"], found["files"] = here, sorted(here.iterdir())
    return found


@contextlib.contextmanager
def nothing_happens() -> Iterator[None]:
    """Fail if code has been run in the block, or if something outside of the load has changed."""
    if not _Watch.hooked:
        sys.addaudithook(_receive)
        _Watch.hooked = True
    before, threads, _Watch.deeds = _state(), set(threading.enumerate()), []
    _Watch.thread = threading.get_ident()
    try:
        yield
    finally:
        _Watch.thread = None
    assert not _Watch.deeds, _Watch.deeds
    after = _state()
    assert after == before, dict(after.items() ^ before.items())
    assert set(threading.enumerate()) <= threads
