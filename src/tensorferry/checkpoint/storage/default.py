"""Installation of our writer and reader in torch's place, for libraries that do not accept a writer or reader.

``dcp.save(state, checkpoint_id=path)`` uses torch's own FileSystemWriter. Lightning saves in this way, and accelerate
(Transformers' Trainer) uses the class by its name in ``torch.distributed.checkpoint``. After :func:`install` both use
our classes.

``dcp.async_save`` creates a writer only after it has staged the state by other means, or in another process, where
:func:`install` has no effect. So our replacement of ``async_save`` passes our writer to torch's function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

from torch.distributed.checkpoint import filesystem, state_dict_saver

from tensorferry.base.checks import absolute_path
from tensorferry.checkpoint.staging import Stager
from tensorferry.checkpoint.storage.reader import FileSystemReader
from tensorferry.checkpoint.storage.writer import FileSystemWriter

_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint._storage_utils")
# For each of our modules: torch's module, and for each class the name under which our module imports torch's class. Our
# classes derive from the classes that they find at import, which must be torch's own. So _hugging_face() imports all of
# our modules, before _put_hugging_face() replaces any class.
_HUGGING_FACE = {
    "quantized": ("quantized_hf_storage", {"QuantizedHuggingFaceStorageReader": "TorchsReader"}),
    "huggingface": (
        "hf_storage",
        {"HuggingFaceStorageWriter": "TorchsWriter", "HuggingFaceStorageReader": "TorchsReader"},
    ),
}
_SAVER_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver")

_torchs_async_save: Any = state_dict_saver.async_save
_defaults: dict[Any, dict[str, Any]] = {}  # the original defaults of keyword arguments, by class
# Shared by all asynchronous saves that name only a folder, so each save reuses the memory of the save before it.
_stager: Stager | None = None


def install(**reading: Any) -> None:
    """Make torch.distributed.checkpoint use our writer and reader by default. A later call replaces ``reading``.

    Parameters
    ----------
    **reading
        Keyword arguments of :class:`FileSystemReader`, such as ``trust_pickle``, ``verify``, ``broadcast`` and
        ``progress``, as defaults for readers that Lightning, accelerate and others create.
        :class:`HuggingFaceStorageReader` uses those that it supports.

    Raises
    ------
    TypeError
        FileSystemReader has no such argument.
    ValueError
        An argument has an invalid value.

    Notes
    -----
    Modules that imported torch's classes or ``async_save`` by name before this call continue to use them. Writers and
    readers that are passed to ``dcp.save`` and ``dcp.load`` are used as before.
    Asynchronous saves that name only a folder share a :class:`Stager`, which keeps its memory until :func:`uninstall`.
    """
    FileSystemReader("", **reading)  # raises for invalid arguments
    _set_defaults(reading)
    _put_hugging_face(ours=True)
    _put(FileSystemWriter, FileSystemReader, _async_save)


def uninstall() -> None:
    """Put torch's own classes back."""
    global _stager
    _set_defaults({})
    _put(filesystem.FileSystemWriter, filesystem.FileSystemReader, _torchs_async_save)
    _put_hugging_face(ours=False)
    if _stager is not None:
        _stager.close()
        _stager = None


def installed() -> bool:
    """Return whether our writer and reader are the default."""
    module: Any = importlib.import_module(_PLACES[0])
    return module.FileSystemWriter is FileSystemWriter


@functools.wraps(_torchs_async_save)
def _async_save(*arguments: Any, **options: Any) -> Any:
    folder = options.get("checkpoint_id")
    if folder and FileSystemWriter.validate_checkpoint_id(folder):
        folder = options["checkpoint_id"] = absolute_path(folder, "checkpoint_id")
        if options.get("storage_writer") is None:
            global _stager
            _stager = _stager or Stager()
            writer = options["storage_writer"] = FileSystemWriter(folder)
            writer._stager = _stager
    return _torchs_async_save(*arguments, **options)


def _hugging_face() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return, for each Hugging Face module of this torch, our module and the names of our and torch's classes."""
    found: dict[str, tuple[Any, dict[str, str]]] = {}
    for name, (torchs, classes) in _HUGGING_FACE.items():
        with contextlib.suppress(ImportError):  # this version of torch has no such module
            module = importlib.import_module(f"tensorferry.checkpoint.storage.{name}")
            found[torchs] = module, classes
    return found


def _put_hugging_face(*, ours: bool) -> None:
    for torchs, (module, classes) in _hugging_face().items():
        for place in (_PLACES[0], f"{_PLACES[0]}.{torchs}"):
            there = importlib.import_module(place)
            for public, original in classes.items():
                if hasattr(there, public):
                    setattr(there, public, getattr(module, public if ours else original))


def _set_defaults(reading: dict[str, Any]) -> None:
    """Change the defaults of keyword arguments in place, where help() and inspect show them."""
    hugging_face = [
        getattr(module, name) for module, names in _hugging_face().values() for name in names
    ]
    readers = [kind for kind in hugging_face if kind.__name__.endswith("Reader")]
    for kind in (FileSystemReader, *readers):
        own = _defaults.setdefault(kind, dict(kind.__init__.__kwdefaults__))
        known = {name: value for name, value in reading.items() if name in own}
        kind.__init__.__kwdefaults__ = own | known
    FileSystemWriter._warns_of_refusals = not reading.get("trust_pickle", False)


def _put(writer: Any, reader: Any, async_save: Any) -> None:
    for name in _PLACES:
        module: Any = importlib.import_module(name)
        module.FileSystemWriter, module.FileSystemReader = writer, reader
    for name in _SAVER_PLACES:
        module = importlib.import_module(name)
        module.async_save = async_save
