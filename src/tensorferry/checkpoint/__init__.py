"""Checkpoints in torch's own formats: fast, crash-safe and verified.

For torch.distributed.checkpoint there are :class:`FileSystemWriter`, :class:`FileSystemReader` and :class:`Stager`; in
place of torch.save and torch.load there are :func:`save`, :func:`load` and :class:`FileWriter`. :class:`Checkpoints`
manages the checkpoints of a training, and resumes from them. :func:`verify` checks stored checkpoints. Everything needs
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorferry.checkpoint.errors import CheckpointError as CheckpointError
    from tensorferry.checkpoint.errors import MirrorError as MirrorError
    from tensorferry.checkpoint.manager import Checkpoints as Checkpoints
    from tensorferry.checkpoint.objects.file_writer import FileWriter as FileWriter
    from tensorferry.checkpoint.objects.save_load import load as load
    from tensorferry.checkpoint.objects.save_load import save as save
    from tensorferry.checkpoint.staging import Stager as Stager
    from tensorferry.checkpoint.storage.default import install as install
    from tensorferry.checkpoint.storage.default import installed as installed
    from tensorferry.checkpoint.storage.default import uninstall as uninstall
    from tensorferry.checkpoint.storage.huggingface import (
        HuggingFaceStorageReader as HuggingFaceStorageReader,
    )
    from tensorferry.checkpoint.storage.huggingface import (
        HuggingFaceStorageWriter as HuggingFaceStorageWriter,
    )
    from tensorferry.checkpoint.storage.metadata import (
        add_safe_metadata_globals as add_safe_metadata_globals,
    )
    from tensorferry.checkpoint.storage.quantized import (
        QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
    )
    from tensorferry.checkpoint.storage.reader import FileSystemReader as FileSystemReader
    from tensorferry.checkpoint.storage.writer import FileSystemWriter as FileSystemWriter
    from tensorferry.checkpoint.tools import verify as verify
    from tensorferry.checkpoint.training import RandomState as RandomState
    from tensorferry.checkpoint.training import Restored as Restored

# Imported on first use: torch.distributed is slow to import, and save() does not need it.
_MODULES = {
    "CheckpointError": "errors",
    "Checkpoints": "manager",
    "FileSystemReader": "storage.reader",
    "FileSystemWriter": "storage.writer",
    "FileWriter": "objects.file_writer",
    "HuggingFaceStorageReader": "storage.huggingface",
    "HuggingFaceStorageWriter": "storage.huggingface",
    "MirrorError": "errors",
    "QuantizedHuggingFaceStorageReader": "storage.quantized",
    "RandomState": "training",
    "Restored": "training",
    "Stager": "staging",
    "add_safe_metadata_globals": "storage.metadata",
    "install": "storage.default",
    "installed": "storage.default",
    "load": "objects.save_load",
    "save": "objects.save_load",
    "uninstall": "storage.default",
    "verify": "tools",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])
