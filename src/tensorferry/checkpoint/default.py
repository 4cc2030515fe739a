"""Our writer and reader in the place of torch's, for programs and libraries that do not let one choose.

``dcp.save(state, checkpoint_id=path)`` takes torch's own FileSystemWriter; Lightning saves like that, and accelerate
(Transformers' Trainer) takes it by its name in ``torch.distributed.checkpoint``. Both find ours after :func:`install`.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from torch.distributed.checkpoint import filesystem

from tensorferry.checkpoint.reader import FileSystemReader
from tensorferry.checkpoint.writer import FileSystemWriter

_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint._storage_utils")


def install() -> None:
    """Have torch.distributed.checkpoint use our writer and reader by default. Calling it again does nothing.

    Modules that have imported torch's classes by name before keep these. Writers and readers that are given to
    ``dcp.save`` and ``dcp.load`` are used as before.
    """
    # Its classes derive from what they find at its import, and are to go on with torch's.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.distributed.checkpoint.hf_storage")
    _put(FileSystemWriter, FileSystemReader)


def uninstall() -> None:
    """Put torch's own classes back."""
    _put(filesystem.FileSystemWriter, filesystem.FileSystemReader)


def installed() -> bool:
    """Return whether ours are the default."""
    module: Any = importlib.import_module(_PLACES[0])
    return module.FileSystemWriter is FileSystemWriter


def _put(writer: Any, reader: Any) -> None:
    for name in _PLACES:
        module: Any = importlib.import_module(name)
        module.FileSystemWriter, module.FileSystemReader = writer, reader
