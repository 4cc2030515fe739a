"""Checkpoints in torch's own format: at the drive's speed, safe against crashes, verified.

For torch.distributed.checkpoint there are :class:`FileSystemWriter`, :class:`FileSystemReader` and :class:`Stager`; for
what people do with torch.save and torch.load :func:`save`, :func:`load` and :class:`FileWriter`. :func:`verify` checks
what lies on the drive. All of it needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorferry.checkpoint.audit import verify as verify
    from tensorferry.checkpoint.default import install as install
    from tensorferry.checkpoint.default import installed as installed
    from tensorferry.checkpoint.default import uninstall as uninstall
    from tensorferry.checkpoint.errors import CheckpointError as CheckpointError
    from tensorferry.checkpoint.file_writer import FileWriter as FileWriter
    from tensorferry.checkpoint.objects import load as load
    from tensorferry.checkpoint.objects import save as save
    from tensorferry.checkpoint.reader import FileSystemReader as FileSystemReader
    from tensorferry.checkpoint.staging import Stager as Stager
    from tensorferry.checkpoint.writer import FileSystemWriter as FileSystemWriter

# Imported when they are asked for: torch.distributed takes its time, and save() does without.
_MODULES = {
    "CheckpointError": "errors",
    "FileSystemReader": "reader",
    "FileSystemWriter": "writer",
    "FileWriter": "file_writer",
    "Stager": "staging",
    "install": "default",
    "installed": "default",
    "load": "objects",
    "save": "objects",
    "uninstall": "default",
    "verify": "audit",
}

__all__ = [
    "CheckpointError",
    "FileSystemReader",
    "FileSystemWriter",
    "FileWriter",
    "Stager",
    "install",
    "installed",
    "load",
    "save",
    "uninstall",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
