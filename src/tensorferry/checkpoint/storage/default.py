"""Our writer and reader in the place of torch's, for programs and libraries that do not let one choose.

``dcp.save(state, checkpoint_id=path)`` takes torch's own FileSystemWriter; Lightning saves like that, and accelerate
(Transformers' Trainer) takes it by its name in ``torch.distributed.checkpoint``. Both find ours after :func:`install`.

``dcp.async_save`` asks for a writer only once it has staged the state by other means, or in another process, that knows
nothing of :func:`install`; so it is given ours from the beginning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

from torch.distributed.checkpoint import filesystem, state_dict_saver

from tensorferry.base.checks import kept_path
from tensorferry.checkpoint.staging import Stager
from tensorferry.checkpoint.storage.reader import FileSystemReader
from tensorferry.checkpoint.storage.writer import FileSystemWriter

_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint._storage_utils")
# By modules of ours: torch's module, and what ours calls the classes of torch's. The first one imports both of torch's:
# its classes derive from what they find at its import, and are to go on with torch's.
_HUGGING_FACE = {
    "quantized": ("quantized_hf_storage", {"QuantizedHuggingFaceStorageReader": "TorchsReader"}),
    "huggingface": (
        "hf_storage",
        {"HuggingFaceStorageWriter": "TorchsWriter", "HuggingFaceStorageReader": "TorchsReader"},
    ),
}
_SAVER_PLACES = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver")

_torchs_async_save: Any = state_dict_saver.async_save
_defaults: dict[Any, dict[str, Any]] = {}  # of keyword arguments, by class
# Of all asynchronous saves that name only a folder: the memory for the copy is kept from one to the next.
_stager: Stager | None = None


def install(**reading: Any) -> None:
    """Have torch.distributed.checkpoint use our writer and reader by default. Calling it again changes ``reading``.

    Parameters
    ----------
    **reading
        Keyword arguments of :class:`FileSystemReader`, as ``trust_pickle``, ``verify``, ``broadcast`` and ``progress``,
        for readers that are not given them: Lightning, accelerate and others make readers by themselves.
        :class:`HuggingFaceStorageReader` has those of them that it knows.

    Raises
    ------
    TypeError
        There is no such argument.
    ValueError
        It has no such value.

    Modules that have imported torch's classes, or ``async_save``, by name before keep these. Writers and readers that
    are given to ``dcp.save`` and ``dcp.load`` are used as before.

    Notes
    -----
    Asynchronous saves that name only a folder share a :class:`Stager`, which keeps its memory until :func:`uninstall`.
    """
    FileSystemReader("", **reading)  # which refuses what is wrong
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
    """Return whether ours are the default."""
    module: Any = importlib.import_module(_PLACES[0])
    return module.FileSystemWriter is FileSystemWriter


@functools.wraps(_torchs_async_save)
def _async_save(*arguments: Any, **options: Any) -> Any:
    folder = options.get("checkpoint_id")
    if folder and FileSystemWriter.validate_checkpoint_id(folder):
        folder = options["checkpoint_id"] = kept_path(folder, "checkpoint_id")
    if (
        options.get("storage_writer") is None
        and folder
        and FileSystemWriter.validate_checkpoint_id(folder)
    ):
        global _stager
        _stager = _stager or Stager()
        writer = options["storage_writer"] = FileSystemWriter(folder)
        writer._stager = _stager
    return _torchs_async_save(*arguments, **options)


def _hugging_face() -> dict[str, tuple[Any, dict[str, str]]]:
    """Return, for each module of this torch, ours in its place with the names of its classes and of torch's."""
    found: dict[str, tuple[Any, dict[str, str]]] = {}
    for name, (torchs, classes) in _HUGGING_FACE.items():
        with contextlib.suppress(ImportError):  # this torch has none
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
    """Let keyword arguments have other defaults, which help() and inspect show."""
    readers = [
        getattr(module, name)
        for module, classes in _hugging_face().values()
        for name in classes
        if name.endswith("Reader")
    ]
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
